"""Keeps the EROFS images of native mounts, one file each in the user's own folder.

An image (`format/image/`) is built once per node, user, version and `Shown` (owner and
permissions), and then shared by all mounts. Only files in the user's private folder are mapped and
mounted. They are not synced, so they are used only until the machine boots again.

Images of one dataset form a *chain*: each continues the addresses of the one before. To prevent two
continuations of one image, images are built under a lock, and the locked file records the last
image. Only that is continued; if it has been lost, a new chain begins.

A process holds a shared lock on each image file that it has open or mapped. Another process removes
an image only with the file's exclusive lock: nodes may share the folder, and a file that another
node has removed cannot be read any more.

Any thread of any process may call the functions.
"""

import fcntl
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import UUID, uuid4

from xxhash import xxh3_64_hexdigest

from ...errors import BusyError, DieselError, FormatError
from ...format.entries import Bytes
from ...format.image import FORMAT_VERSION, Image, ImageTooLarge, Shown, build_image
from ...format.snapshot.layout import content_mark
from ...format.snapshot.reader import Snapshot
from ...repository.private_copies import boot_id
from ...settings import cache_folder, private_folder
from ...system.atomic_file import atomic_file, write_error

log = logging.getLogger("diesel.mounts")

IMAGES_KEPT = 2
"""How many images of a dataset are kept per node and user, besides those in use."""

UNUSED_S_MAX = 7 * 86_400
"""After this time without use, any image is removed."""

BUILD_DEADLINE_S = 30.0
"""How long to wait for another process that builds an image. 14 million entries take 20 s. After
that the mount may have to build its own image, all within the time for one step of its start."""

UNNAMED_IN: Sequence[str | None] = ("/var/tmp", None)  # noqa: S108  # they have no names there
"""Folders for images that cannot be kept; None is the default folder for temporary files. If all
fail, the image is in memory. The kernel cannot mount files in memory or on a tmpfs directly, but
through the FUSE mount or a loop device (`sessions/native_tree.py`)."""

_POLL_S = 0.02
_REPORT_S = 5.0


def open_image(
    snapshot: Snapshot, shown: Shown, *, deadline_s: float = BUILD_DEADLINE_S
) -> tuple[Image, int]:
    """Opens the image of a snapshot, and builds it if this node has none. Returns the mapped image
    and a descriptor of its file, which the caller closes when no mount of its own needs it.

    If the folder of images cannot be used, or another process builds for longer than `deadline_s`,
    the image is built for this caller alone, in a chain of its own. Raises the errors of
    `build_image`, and NoSpaceError if there is no place for any file.
    """
    try:
        folder = private_folder(cache_folder() / "images")
        path = folder / _name(snapshot, shown)
        kept = _open_kept(path, snapshot, shown)
        if kept is not None:
            return kept
        with _locked(folder / f"{snapshot.identity.hex}.{boot_id()}.chain", deadline_s) as chain:
            kept = _open_kept(path, snapshot, shown, warn=True)  # another process has built it
            if kept is None:
                _build_kept(path, snapshot, shown, chain)
                kept = _open_kept(path, snapshot, shown, warn=True)
            _prune(folder, snapshot.identity)
        if kept is not None:
            return kept
        log.warning("the image %s was lost as soon as it was built", path)
    except (FormatError, ImageTooLarge):
        raise
    except (OSError, DieselError) as error:
        log.warning("the image of %s is not kept: %s", snapshot.dataset, error)
    return _build_unnamed(snapshot, shown)


def _name(snapshot: Snapshot, shown: Shown) -> str:
    """Contains the mark of the snapshot, since a user may have a forged snapshot with the same
    version; and the version of the format, so that images of earlier formats are built again."""
    parts = content_mark(snapshot.buffer), repr((FORMAT_VERSION, shown)).encode()
    digest = xxh3_64_hexdigest(b"".join(parts))
    return f"{snapshot.identity.hex}-{snapshot.version:016x}-{digest}.{boot_id()}"


def _open_kept(
    path: Path, snapshot: Snapshot, shown: Shown, *, warn: bool = False
) -> tuple[Image, int] | None:
    """The image, fully checked; None if there is none, or it is damaged. Raises OSError."""
    try:
        image, descriptor = _open(path)
    except (FileNotFoundError, BlockingIOError):  # there is none, or it is just being removed
        return None
    except FormatError as error:
        if warn:
            log.warning("the image %s is made again: %s", path, error.message)
        return None
    if (image.identity, image.version, image.shown) == (snapshot.identity, snapshot.version, shown):
        now_ns = time.time_ns()  # the kernel's own clock for this only ticks every 4 ms
        with suppress(OSError):
            os.utime(descriptor, ns=(now_ns, now_ns))  # the time of last use, for `_prune`
        return image, descriptor
    os.close(descriptor)
    if warn:
        log.warning("the image %s is made again: it is of another tree", path)
    return None


def _open(path: Path, *, verify: bool = True) -> tuple[Image, int]:
    """Opens and maps an image. The descriptor holds the lock against removal. Raises OSError,
    FormatError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:  # the file was removed before it was locked
            raise FileNotFoundError(path)
        return Image(_mapped(descriptor), verify=verify), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(descriptor: int) -> memoryview:
    """Raises OSError."""
    if not os.fstat(descriptor).st_size:
        return memoryview(b"")
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all of it is read at once, to be checked
    return memoryview(mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ))


# Building


def _build_kept(path: Path, snapshot: Snapshot, shown: Shown, chain: "_Chain") -> None:
    """Builds in the dataset's chain. Raises OSError and the errors of `build_image`."""
    earlier = _last_image(path.parent, snapshot.identity, chain) or uuid4()
    try:
        pieces = build_image(snapshot, shown, earlier)
    except ImageTooLarge:
        if isinstance(earlier, UUID):
            raise
        earlier = uuid4()  # the chain has no addresses left: begin a new one
        pieces = build_image(snapshot, shown, earlier)
    with atomic_file(path, sync=False) as file:
        _write(file, pieces, snapshot)
        # Before the image appears: if this process is killed now, a new chain begins.
        chain.record_next(earlier)


def _build_unnamed(snapshot: Snapshot, shown: Shown) -> tuple[Image, int]:
    """Builds in a chain of its own. Raises the errors of `build_image`, NoSpaceError."""
    for folder in UNNAMED_IN:
        with suppress(OSError):
            return _build_in(_unnamed_file(folder), snapshot, shown)
    try:
        return _build_in(os.memfd_create("diesel-image", os.MFD_CLOEXEC), snapshot, shown)
    except OSError as error:
        raise write_error("an image", error) from error


def _build_in(descriptor: int, snapshot: Snapshot, shown: Shown) -> tuple[Image, int]:
    """Builds in a chain of its own, in an open file, which is closed if that fails. Raises OSError
    and the errors of `build_image`."""
    try:
        with open(descriptor, "wb", closefd=False) as file:
            _write(file, build_image(snapshot, shown, uuid4()), snapshot)
        return Image(_mapped(descriptor), verify=True), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _unnamed_file(folder: str | None) -> int:
    """A file without a name, which lasts as long as its descriptors. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _write(file: BinaryIO, pieces: Iterable[Bytes], snapshot: Snapshot) -> None:
    """Raises OSError."""
    began = time.monotonic()
    file.writelines(pieces)
    file.flush()
    log.info(
        "built the tree of %s at version %d for the kernel: %d entries in %.1f s",
        *(snapshot.dataset, snapshot.version, len(snapshot), time.monotonic() - began),
    )


def _last_image(folder: Path, identity: UUID, chain: "_Chain") -> Image | None:
    """The last image of the chain; None if it is lost or damaged, or there is no chain."""
    for path in folder.glob(f"{identity.hex}-*.{boot_id()}"):
        with suppress(OSError, FormatError):
            image, descriptor = _open(path, verify=False)
            os.close(descriptor)
            if chain.is_last(image):
                return Image(image.buffer, verify=True)
    return None


def _prune(folder: Path, identity: UUID) -> None:
    """Removes images that no process has open: of this dataset all except the `IMAGES_KEPT` last
    used ones, and of any dataset those that have been unused for `UNUSED_S_MAX`."""
    with suppress(OSError):
        used_ns = {
            path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name[0] != "."
        }
        ours = [path for path in used_ns if path.match(f"{identity.hex}-*.{boot_id()}")]
        ours.sort(key=used_ns.__getitem__)
        too_old_ns = time.time_ns() - UNUSED_S_MAX * 10**9
        unused = [path for path, at_ns in used_ns.items() if at_ns < too_old_ns]
        for path in {*ours[:-IMAGES_KEPT], *unused}:
            if not path.match(f"*.{boot_id()}.chain"):
                with suppress(OSError):
                    _remove_unused(path)


def _remove_unused(path: Path) -> None:
    """Raises OSError, also if a process has the image open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only what can be written
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


# The chain


class _Chain:
    """The record of a dataset's last image on this node, in a file that the caller has locked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def is_last(self, image: Image) -> bool:
        record = self._text(image.chain, image.sequence)
        return os.pread(self._descriptor, len(record) + 1, 0) == record

    def record_next(self, earlier: Image | UUID) -> None:
        """Records an image that is being built: the one after `earlier`, or the first of that
        chain."""
        if isinstance(earlier, Image):
            text = self._text(earlier.chain, earlier.sequence + 1)
        else:
            text = self._text(earlier, 1)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    @staticmethod
    def _text(chain: UUID, sequence: int) -> bytes:
        return f"{chain.hex} {sequence:016x}\n".encode()


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[_Chain]:
    """Raises BusyError after the deadline, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, path, deadline_s)
        yield _Chain(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, deadline_s: float) -> None:
    began = reported = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            if now - began > deadline_s:
                raise BusyError(f"another process holds {path}") from None
            if now - reported > _REPORT_S:
                log.info("another process has been building an image for %.0f s", now - began)
                reported = now
            time.sleep(_POLL_S)
