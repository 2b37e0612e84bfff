"""Files under names that users give: written whole or not at all.

Owned here: the temporary file and its rename, and what is not replaced but written to. Not owned:
what is in the files, and who may be told of one.

What is neither missing nor a regular file (a device, a fifo, the pipe behind /dev/stdout) is
written to as it is: to rename a file over /dev/null would break the machine. A link is followed.

Concurrency: any thread; of several writers of one name the last rename wins.
"""

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from .errors import DieselError, NoSpaceError, PermissionDenied, UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Named(io.FileIO):
    """A file whose errors name it as its user did: those of write(2) name none."""

    def __init__(self, descriptor: int, shown: str) -> None:
        super().__init__(descriptor, "wb")
        self._shown = shown

    def write(self, data: "ReadableBuffer") -> int:
        with _naming(self._shown):
            return super().write(data)


@contextmanager
def _naming(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = shown
        raise


def named_file(descriptor: int, shown: str) -> BinaryIO:
    """A file to write, which is closed with the descriptor; its errors name it."""
    return cast("BinaryIO", io.BufferedWriter(_Named(descriptor, shown)))


def unwritable(file: Path | str, error: OSError) -> DieselError:
    """Why a file cannot be written, as an error of ours."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (NoSpaceError if full else PermissionDenied)(f"cannot write {file}: {error.strerror}")


@contextmanager
def whole_file(path: Path, *, mode: int = 0o600, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which is at `path` when the `with` ends well; `sync`: durably.

    A new file has `mode`, less the umask. Raises OSError with `path` as its file name, and
    UsageError for a folder.
    """
    place = _replaceable(path)
    if place is None:
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        with named_file(descriptor, str(path)) as file:
            yield file
        return
    temporary = place.with_name(f".tmp-{secrets.token_hex(8)}")
    with _naming(str(path)):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with named_file(fd, str(path)) as file:
            yield file
            file.flush()
            with _naming(str(path)):
                if sync:
                    os.fsync(fd)
        with _naming(str(path)):
            temporary.rename(place)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        _sync_folder(place.parent)


def is_stdout(path: Path) -> bool:
    """Whether a name leads to this process's standard output, as /dev/stdout does."""
    try:
        return path.is_symlink() and os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _replaceable(path: Path) -> Path | None:
    """Where a file that replaces the one at `path` is to lie; None for what is written to."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is a folder", advice="name a file")
    if not stat.S_ISREG(found.st_mode):
        return None
    place = Path(os.path.realpath(path))
    with suppress(OSError):
        if os.path.samestat(found, place.stat()):
            return place
    return None  # a file that is open, and has no name any more (/dev/fd/3)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
