"""Writes a file under a name that a user gave, either whole or not at all.

`atomic_file` writes a temporary file and renames it; the next writer in the folder removes the
temporary files of killed writers. Anything but a regular file (a device, a fifo, the pipe behind
/dev/stdout) is written to directly: a file renamed over /dev/null would break the machine.

Links are followed, except links that may have been **planted**: made by another user in a folder
that others may write to, such as /tmp, to choose the file that is overwritten. A file that may
have been planted is not written to either. Any thread; of several writers of one name the last
rename wins.
"""

import errno
import hashlib
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from ..errors import DieselError, NoSpaceError, PermissionDenied, UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_CANNOT_SYNC_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})  # CIFS and some FUSE
_LINKS_MAX = 40  # the kernel's own limit

_TEMPORARY = re.compile(
    r"\.dlcmd-(?:(?P<pid_space>[0-9a-f]{8})-(?P<pid>\d{1,10})-(?P<start>\d{1,20})-)?[0-9a-f]{16}"
)
_FOREIGN_AGE_S_MAX = 86_400  # an older temporary file of an unknown process goes


class _FileWithName(io.FileIO):
    """Its OSErrors have the user's file name: those of write(2) have none."""

    def __init__(self, descriptor: int, shown: str) -> None:
        super().__init__(descriptor, "wb")
        self._shown = shown

    def write(self, data: "ReadableBuffer") -> int:
        with _errors_named(self._shown):
            return super().write(data)


@contextmanager
def _errors_named(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = shown
        raise


def named_file(descriptor: int, shown: str) -> BinaryIO:
    """The file closes the descriptor. Its errors have the name `shown`."""
    return cast("BinaryIO", io.BufferedWriter(_FileWithName(descriptor, shown)))


def write_error(file: Path | str, error: OSError) -> DieselError:
    """Returns NoSpaceError or PermissionDenied."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (NoSpaceError if is_full else PermissionDenied)(f"cannot write {file}: {error.strerror}")


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o600, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which appears at `path` if the `with` ends without an error.

    With `sync`, it is durable then. A new file has `mode`, less the umask. Raises OSError with
    `path` as its file name, UsageError for a folder, and PermissionDenied for a file or link that
    may have been planted.
    """
    with _errors_named(str(path)):
        check_links(path)
    target = _path_to_replace(path)
    if target is None:
        check_file(path, os.stat(path))
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        with named_file(descriptor, str(path)) as file:
            yield file
        return
    remove_leftovers(target.parent)
    temporary = target.with_name(temporary_name())
    with _errors_named(str(path)):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with named_file(descriptor, str(path)) as file:
            yield file
            file.flush()
            with _errors_named(str(path)):
                if sync:
                    os.fsync(descriptor)
        with _errors_named(str(path)):
            temporary.rename(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync_folder(target.parent)


def check_links(path: Path) -> None:
    """Raise PermissionDenied if `path`, or a link on the way to it, may have been planted; OSError
    if links form a circle."""
    folder, names_left, links = "/", _names_reversed(os.path.join(os.getcwd(), path)), 0
    while names_left:
        name = names_left.pop()
        if name == "..":
            folder = os.path.dirname(folder)
            continue
        current = os.path.join(folder, name)
        try:
            target = os.readlink(current)
        except OSError:  # not a link, or missing, which opening it will report
            folder = current
            continue
        if folder.startswith("/proc/"):  # the kernel's own link to an open file
            return
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if _may_be_planted(os.lstat(current), folder, is_last=not names_left):
            raise _planted_error(f"{current} is a link", current)
        folder = "/" if target.startswith("/") else folder
        names_left += _names_reversed(target)


def check_file(path: Path, status: os.stat_result) -> None:
    """Raise PermissionDenied if a file to write to directly may have been planted, or is a hard
    link that others may have made to a file of this user."""
    folder = os.path.dirname(os.path.realpath(path))
    if folder.startswith("/proc/"):  # an open file of this process
        return
    has_links = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    if _may_be_planted(status, folder, is_last=True) or (has_links and _others_may_write(folder)):
        raise _planted_error(f"{path} is a file", str(path))


def temporary_name() -> str:
    """`.dlcmd-<pid space>-<pid>-<start>-<random>` identifies the writing process."""
    pid = os.getpid()
    return f".dlcmd-{_pid_space()}-{pid}-{_own_start(pid)}-{secrets.token_hex(8)}"


def remove_leftovers(folder: Path | int) -> None:
    """Remove the temporary files of ended processes in a folder (a path, or a descriptor). Other
    machines, boots and PID namespaces cannot be looked up; their files go when a day old."""
    descriptor, path = (folder, Path()) if isinstance(folder, int) else (None, folder)
    with suppress(OSError):
        for name in os.listdir(folder):
            if match := _TEMPORARY.fullmatch(name):
                with suppress(OSError):
                    if _has_writer_ended(match, path / name, descriptor):
                        os.unlink(path / name, dir_fd=descriptor)


def _has_writer_ended(name: re.Match[str], path: Path, folder: int | None) -> bool:
    if name["pid_space"] == _pid_space():
        return _start(int(name["pid"])) != name["start"]
    changed_s = os.stat(path, dir_fd=folder, follow_symlinks=False).st_ctime
    return time.time() - changed_s > _FOREIGN_AGE_S_MAX


@cache
def _pid_space() -> str:
    """A hash of the scope of process numbers: this PID namespace of this boot of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(boot + str(namespace).encode()).hexdigest()[:8]


@cache
def _own_start(pid: int) -> str:
    return _start(pid)


def _start(pid: int) -> str:
    """When a process started, in clock ticks since the boot (proc(5)); empty if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return status.rpartition(b")")[2].split()[19].decode()


def close_folder(descriptor: int) -> None:
    """Errors are ignored, as nothing was written through the descriptor."""
    with suppress(OSError):
        os.close(descriptor)


def is_stdout(path: Path) -> bool:
    """Whether a path is a link to standard output, such as /dev/stdout."""
    try:
        return path.is_symlink() and os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _path_to_replace(path: Path) -> Path | None:
    """The path to which a new file is renamed; None if `path` is to be written to directly."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} is a folder", advice="name a file")
    if not stat.S_ISREG(status.st_mode):
        return None
    target = Path(os.path.realpath(path))
    # An open file without a name (/dev/fd/3) is written to directly; truncating one with a name
    # could kill a process that has mapped it.
    return target if target.exists() else None


def _names_reversed(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _may_be_planted(status: os.stat_result, folder: str, *, is_last: bool) -> bool:
    """Whether another user may have planted a file or link in `folder`. A link in the middle of a
    path counts only if every user may write to `folder`, since people who share folders also link
    them."""
    if status.st_uid in (0, os.geteuid()):
        return False
    everybody_may_write = os.stat(folder).st_mode & stat.S_IWOTH != 0
    return everybody_may_write or (is_last and _others_may_write(folder))


def _others_may_write(folder: str) -> bool:
    status = os.stat(folder)
    is_shared = status.st_mode & (stat.S_IWOTH | stat.S_IWGRP) != 0
    return is_shared or status.st_uid not in (0, os.geteuid())


def _planted_error(what: str, path: str) -> PermissionDenied:
    return PermissionDenied(
        f"{what} that another user may have planted: others may write to {os.path.dirname(path)}",
        advice="write to a folder of your own",
    )


def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, if its file system can sync folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)
