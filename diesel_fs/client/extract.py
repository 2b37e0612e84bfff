"""Writes entries of a dataset back to a folder, to one file, or into a tar.

Nothing outside the destination is touched: folders are opened component by component, and links are
never followed. An existing file is replaced only with `force`, and only by a whole file. Order of
work: folders, then files by their places in the chunks (so each chunk is read once), then links;
the attributes of folders last, deepest first.

Not safe for concurrent use. As with `cp` and `tar`, nothing is synced: a file appears whole under
its name or not at all, and survives a power cut once the kernel has written it.
"""

import errno
import io
import os
import stat
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..cache.readers.entry_file import EntryFile
from ..cache.readers.entry_reader import EntryReader
from ..errors import (
    CorruptError,
    FormatError,
    NoSpaceError,
    NoSuchPath,
    ObjectMissing,
    PermissionDenied,
    UsageError,
)
from ..format.entries import MODE_MASK, Kind, Stat, name_fault
from ..format.snapshot import layout
from ..format.snapshot.reader import Indices, Snapshot, same_content
from ..system.atomic_file import check_links, close_folder, remove_leftovers, temporary_name

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FOLDERS = 64  # open descriptors: enough, since the files of a folder mostly share chunks
_BATCH_BYTES = 64 << 20  # contents of one `read_many`, to bound its memory
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_SECOND_NS = 1_000_000_000
_FILE_ERRORS = (FormatError, ObjectMissing)  # of one file; other errors of a store end the get


@dataclass(slots=True)
class GetReport:
    """The progress of a get.

    `total` counts all entries, `entries` those done, `files` and `content_bytes` the written files,
    `unchanged` the existing entries that were equal. `failed` has the paths that were left out,
    with the reasons.
    """

    total: int = 0
    entries: int = 0
    files: int = 0
    content_bytes: int = 0
    unchanged: int = 0
    failed: list[tuple[bytes, str]] = field(default_factory=list)


GetProgress = Callable[[GetReport], None]
"""Called with the report so far, after each entry."""


def _no_progress(_: GetReport) -> None: ...


class _EntrySkipped(Exception):
    """One entry cannot be written; the message is the reason."""


def get(
    view: Snapshot,
    reader: EntryReader,
    path: bytes,
    dest: Path,
    *,
    force: bool = False,
    progress: GetProgress = _no_progress,
) -> GetReport:
    """Write the entry at `path`, with contents, mode, mtime and link targets as they were put.

    The contents of a folder go into the folder `dest`, which gets the folder's attributes if it is
    new or empty. A file or link becomes `dest`, or goes into it if it is a folder. An equal
    existing entry is left alone. A different one is replaced, and an existing folder gets other
    attributes, only with `force`.

    The report names the entries that could not be written. Raises NoSuchPath, NoSpaceError,
    PermissionDenied, ObjectStoreError.
    """
    top = view.index_of(path)
    is_folder, is_new = view.stat(top).kind == Kind.FOLDER, False
    names: dict[int, bytes] = {}
    if is_folder:
        root, is_new = _open_destination(dest, view.stat(top).mode)
        folders = _Folders(view, top, root)
    else:  # the folder of `dest` takes the place of the entry's folder; the name may differ, too
        target = dest / os.fsdecode(view.name(top)) if dest.is_dir() else dest
        try:
            check_links(dest)
            root = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _destination_error(target.parent, error) from error
        folders = _Folders(view, view.parent(top), root)
        names[top] = os.fsencode(target.name)
    remove_leftovers(root)
    writer = _FolderWriter(view, reader, folders, force, progress, names)
    try:
        if is_folder:
            writer.write_tree(top, is_new)
        else:
            writer.write_entries(np.array([top], np.int64))
    finally:
        folders.close()
    return writer.report


def _open_destination(dest: Path, mode: int) -> tuple[int, bool]:
    """Returns the descriptor of `dest`, and whether it is new or empty."""
    try:
        check_links(dest)
        dest.parent.mkdir(parents=True, exist_ok=True)
        try:
            dest.mkdir()
            dest.chmod(mode & MODE_MASK | 0o700)  # near to its final mode
        except FileExistsError:
            pass  # it gets the dataset's attributes only if it is empty
        root = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return root, not os.listdir(root)
    except OSError as error:
        raise _destination_error(dest, error) from error


def _destination_error(dest: Path, error: OSError) -> Exception:
    if error.errno in _NO_SPACE:
        return NoSpaceError(f"cannot write to {dest}: {error.strerror}")
    if isinstance(error, NotADirectoryError):
        return UsageError(f"cannot write to {dest}: it is not a folder")
    if isinstance(error, FileNotFoundError):
        return NoSuchPath(f"there is no folder {dest}", advice="make it first")
    return PermissionDenied(f"cannot write to {dest}: {error.strerror}")


class _Folders:
    """Descriptors of the destination's folders, by the index of the dataset's folder.

    A folder is opened from the descriptor of the folder above it, so a path may be longer than the
    kernel's limit, and a link in place of a folder is an error.
    """

    def __init__(self, view: Snapshot, top: int, root: int) -> None:
        self._view = view
        self._top = top
        self._root = root
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, index: int) -> int:
        """Valid until the next call. Raises OSError, _EntrySkipped."""
        to_open = []
        while index != self._top and index not in self._open:
            to_open.append(index)
            index = self._view.parent(index)
        folder = self._root
        if index != self._top:
            self._open.move_to_end(index)
            folder = self._open[index]
        for below in reversed(to_open):
            folder = os.open(_safe_name(self._view, below), _FOLDER_FLAGS, dir_fd=folder)
            self._open[below] = folder
            if len(self._open) > _OPEN_FOLDERS:
                close_folder(self._open.popitem(last=False)[1])
        return folder

    def close(self) -> None:
        for folder in (*self._open.values(), self._root):
            close_folder(folder)
        self._open.clear()


def _safe_name(view: Snapshot, index: int) -> bytes:
    """The name is checked again, since a snapshot may come from an untrusted place."""
    name = view.name(index)
    if fault := name_fault(name):
        raise _EntrySkipped(f"not written: its name has {fault}")
    return name


@dataclass(eq=False)
class _FolderWriter:
    """An entry that fails goes into the report."""

    view: Snapshot
    reader: EntryReader
    folders: _Folders
    force: bool
    progress: GetProgress
    names: dict[int, bytes]  # of entries that get another name than in the dataset
    report: GetReport = field(default_factory=GetReport)

    def write_tree(self, top: int, is_new: bool) -> None:
        """Write everything below the folder `top`, and its attributes if `is_new`."""
        below = self.view.walk(top)
        kinds = layout.kinds(self.view.columns.flags[below])
        folders = below[kinds == Kind.FOLDER]
        self.report.total = len(below) - 1 + is_new
        made = [top] if is_new else []
        for index in folders[1:].tolist():
            with _EntryErrors(self, index):
                if self._make_folder(index):
                    made.append(index)
                else:
                    self._count_entry()
        self.write_entries(below[kinds != Kind.FOLDER])
        for index in reversed(made):
            with _EntryErrors(self, index):
                self._finish_folder(index)
        self.progress(self.report)

    def write_entries(self, indices: Indices) -> None:
        """Write files, in the order of their chunks, then links."""
        self.report.total = max(self.report.total, len(indices))
        kinds = layout.kinds(self.view.columns.flags[indices])
        files = [i for i in indices[kinds == Kind.FILE].tolist() if self._must_write(i)]
        chosen = in_chunk_order(self.view, np.array(files, np.int64))
        for index, content in contents(self.view, self.reader, chosen):
            if isinstance(content, Exception):
                self.add_failure(index, str(content))
            else:
                self._write_file(index, content)
        for index in indices[kinds == Kind.LINK].tolist():
            if self._must_write(index):
                self._write_link(index)

    # Folders

    def _make_folder(self, index: int) -> bool:
        """Make a folder with write permission for us. Returns whether `_finish_folder` must set the
        dataset's attributes later."""
        above, name = self._destination_of(index)
        mode = self.view.stat(index).mode & MODE_MASK | 0o700  # near to its final mode
        try:
            os.mkdir(name, mode, dir_fd=above)
        except FileExistsError:
            existing = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
            if stat.S_ISDIR(existing):
                if self.force and existing & 0o700 != 0o700:
                    _grant_owner(above, name, existing)
                with suppress(OSError):  # writing into the folder meets and reports the same error
                    remove_leftovers(self.folders[index])
                return self.force
            if not self.force:
                raise _EntrySkipped("a file is there; --force replaces it") from None
            os.unlink(name, dir_fd=above)
            os.mkdir(name, mode, dir_fd=above)
        return True

    def _finish_folder(self, index: int) -> None:
        """An implicit folder, which exists only since something lies below it, gets only its
        mode."""
        wanted = self.view.stat(index)
        implicit = bool(self.view.columns.flags[index] & layout.IMPLICIT)
        folder = self.folders[index]
        there = os.fstat(folder)
        if stat.S_IMODE(there.st_mode) != wanted.mode & MODE_MASK:
            os.fchmod(folder, wanted.mode & MODE_MASK)
        if there.st_mtime_ns != wanted.mtime_ns and not implicit:
            os.utime(folder, ns=(wanted.mtime_ns, wanted.mtime_ns))
        self.report.entries += 1

    # Files and links

    def _must_write(self, index: int) -> bool:
        """If a file or link need not be written, it is counted as unchanged or failed."""
        with _EntryErrors(self, index):
            above, name = self._destination_of(index)
            try:
                there = os.stat(name, dir_fd=above, follow_symlinks=False)
            except FileNotFoundError:
                return True
            if self._equal(index, above, name, there):
                self.report.unchanged += 1
                self._count_entry()
                return False
            if stat.S_ISDIR(there.st_mode):
                raise _EntrySkipped("a folder is there; remove it first")
            if not self.force:
                raise _EntrySkipped("something different is there; --force replaces it")
            return True
        return False

    def _equal(self, index: int, above: int, name: bytes, there: os.stat_result) -> bool:
        wanted = self.view.stat(index)
        if wanted.kind == Kind.LINK:
            return stat.S_ISLNK(there.st_mode) and (
                os.readlink(name, dir_fd=above) == self.view.link(index)
            )
        return (
            stat.S_ISREG(there.st_mode)  # nothing else is ever opened
            and there.st_size == wanted.size
            and there.st_mtime_ns == wanted.mtime_ns
            and stat.S_IMODE(there.st_mode) == wanted.mode & MODE_MASK
            and self._same_content(index, above, name)
        )

    def _same_content(self, index: int, above: int, name: bytes) -> bool:
        try:
            file = os.open(name, _READ_FLAGS, dir_fd=above)
        except PermissionError:
            return True  # its mode forbids reading; everything else is equal
        try:
            return stat.S_ISREG(os.fstat(file).st_mode) and same_content(
                self.view.extents(index), partial(os.pread, file)
            )
        finally:
            os.close(file)

    def _write_file(self, index: int, pieces: Iterable[memoryview]) -> None:
        with _EntryErrors(self, index):
            above, name = self._destination_of(index)
            wanted = self.view.stat(index)
            with _named_at_end(name, above) as temporary:
                file = os.open(temporary, _CREATE_FLAGS, 0o600, dir_fd=above)
                try:
                    for piece in pieces:
                        left = piece
                        while len(left):
                            left = left[os.write(file, left) :]
                    os.fchmod(file, wanted.mode & MODE_MASK)
                    os.utime(file, ns=(wanted.mtime_ns, wanted.mtime_ns))
                finally:
                    os.close(file)
            self.report.files += 1
            self.report.content_bytes += wanted.size
            self._count_entry()

    def _write_link(self, index: int) -> None:
        with _EntryErrors(self, index):
            above, name = self._destination_of(index)
            mtime_ns = self.view.stat(index).mtime_ns
            with _named_at_end(name, above) as temporary:
                os.symlink(self.view.link(index), temporary, dir_fd=above)
                os.utime(temporary, ns=(mtime_ns, mtime_ns), dir_fd=above, follow_symlinks=False)
            self._count_entry()

    def _destination_of(self, index: int) -> tuple[int, bytes]:
        name = self.names.get(index) or _safe_name(self.view, index)
        return self.folders[self.view.parent(index)], name

    def _count_entry(self) -> None:
        self.report.entries += 1
        self.progress(self.report)

    def add_failure(self, index: int, reason: str) -> None:
        self.report.failed.append((self.view.path(index), reason))
        self._count_entry()


class _EntryErrors:
    """Makes an error a failure of one entry; a full disk ends the whole get.

    A class, since a generator function would take three times as long for each entry.
    """

    def __init__(self, writer: _FolderWriter, index: int) -> None:
        self._writer = writer
        self._index = index

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            if error.errno in _NO_SPACE:
                path = os.fsdecode(self._writer.view.path(self._index))
                raise NoSpaceError(f"cannot write {path!r}: {reason}") from error
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                reason = "a link or file stands where its folder should; it is not followed"
        elif isinstance(error, (_EntrySkipped, *_FILE_ERRORS)):
            reason = str(error)
        else:
            return False
        self._writer.add_failure(self._index, reason)
        return True


# Reading in a good order


def in_chunk_order(view: Snapshot, files: Indices) -> Indices:
    """Each chunk is then read once."""
    if not len(files):
        return files
    return files[np.lexsort((view.columns.offset[files], view.chunk_of(files)))]


def contents(
    view: Snapshot, reader: EntryReader, files: Indices
) -> Iterator[tuple[int, Iterable[memoryview] | Exception]]:
    """Yield each file, in this order, with its content in pieces or with the error of reading it.

    The pieces of a file of several extents are read as they are consumed, which may raise. Raises
    ObjectStoreError if the store fails.
    """
    has_many_extents = (view.columns.flags[files] & layout.MANY_EXTENTS) != 0
    ends = np.cumsum(np.where(has_many_extents, 0, view.columns.size[files]).astype(np.int64))
    cuts = np.flatnonzero(np.diff(ends // _BATCH_BYTES)) + 1
    for batch in np.split(np.arange(len(files)), cuts):
        whole = _whole_files(view, reader, files[batch[~has_many_extents[batch]]])
        for i in batch.tolist():
            index = int(files[i])
            yield ((index, _pieces(view, reader, index)) if has_many_extents[i] else next(whole))


def _whole_files(
    view: Snapshot, reader: EntryReader, files: Indices
) -> Iterator[tuple[int, tuple[memoryview] | Exception]]:
    """Read files of one extent together; after an error, go on with the next file."""
    done = 0
    while done < len(files):
        try:
            for content in reader.read_many(files[done:]):
                index, done = int(files[done]), done + 1
                has_all = len(content) == view.size(index)
                yield index, (content,) if has_all else _size_error(view, index, len(content))
        except _FILE_ERRORS as error:
            yield int(files[done]), error
            done += 1


def _pieces(view: Snapshot, reader: EntryReader, index: int) -> Iterator[memoryview]:
    done = 0
    for extent in view.extents(index):
        content = reader.read(index, extent.start, extent.size)
        done += len(content)
        yield content
    if done != view.size(index):
        raise _size_error(view, index, done)


def _size_error(view: Snapshot, index: int, found: int) -> CorruptError:
    return CorruptError(f"its content has {found} bytes, and its metadata say {view.size(index)}")


# Into a tar


def get_tar(
    view: Snapshot,
    reader: EntryReader,
    path: bytes,
    out: BinaryIO,
    progress: GetProgress = _no_progress,
) -> GetReport:
    """Write the contents of a folder, or a file, as a tar (PAX), in the order of the folders.

    Files that cannot be read are left out and named in the report. Raises NoSuchPath, OSError of
    `out`, and FormatError if a file of several extents cannot be read to its end: the tar then ends
    after that file's header.
    """
    top = view.index_of(path)
    below = view.walk(top)
    report = GetReport(total=len(below))
    prefix = len(view.path(top)) + 1 if top else 0
    kinds = layout.kinds(view.columns.flags[below])
    reading = contents(view, reader, below[kinds == Kind.FILE])
    # tarfile's stub has no overload for options that come by name.
    options = {"format": tarfile.PAX_FORMAT, "encoding": "utf-8", "errors": "surrogateescape"}
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20, **options) as tar:  # type: ignore[call-overload]  # see above
        for index, kind in zip(below.tolist(), kinds.tolist(), strict=True):
            report.entries += 1
            name = (
                view.name(top)
                if index == top and kind != Kind.FOLDER
                else (view.path(index)[prefix:] or b".")
            )
            if kind == Kind.FILE:
                _, content = next(reading)
                if isinstance(content, Exception):
                    report.failed.append((view.path(index), str(content)))
                    continue
                info = _tar_info(view, index, name)
                body: io.BytesIO | io.BufferedReader
                if isinstance(content, tuple):
                    body = io.BytesIO(content[0])
                else:
                    body = io.BufferedReader(EntryFile(reader, index), 1 << 20)
                tar.addfile(info, body)
                report.files += 1
                report.content_bytes += info.size
            elif not view.columns.flags[index] & layout.IMPLICIT:
                tar.addfile(_tar_info(view, index, name))
            progress(report)
    return report


def _tar_info(view: Snapshot, index: int, name: bytes) -> tarfile.TarInfo:
    """The header has no owner, since a dataset keeps none."""
    entry: Stat = view.stat(index)
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    info.mode = entry.mode & MODE_MASK
    seconds, rest_ns = divmod(entry.mtime_ns, _SECOND_NS)
    info.mtime = max(seconds, 0)
    if rest_ns or seconds < 0:
        sign, ns = ("-", -entry.mtime_ns) if entry.mtime_ns < 0 else ("", entry.mtime_ns)
        info.pax_headers = {"mtime": f"{sign}{ns // _SECOND_NS}.{ns % _SECOND_NS:09d}"}
    match entry.kind:
        case Kind.FOLDER:
            info.type = tarfile.DIRTYPE
        case Kind.LINK:
            info.type = tarfile.SYMTYPE
            info.linkname = view.link(index).decode("utf-8", "surrogateescape")
        case _:
            info.size = entry.size
    return info


def _grant_owner(above: int, name: bytes, mode: int) -> None:
    """Let the owner read and write a folder, without following a link."""
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{folder}", stat.S_IMODE(mode) | 0o700)
    finally:
        close_folder(folder)


@contextmanager
def _named_at_end(name: bytes, folder: int) -> Iterator[str]:
    """A temporary name for an entry in `folder` (a descriptor). The entry is renamed to `name` when
    the `with` ends, or removed after an error."""
    temporary = temporary_name()
    try:
        yield temporary
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
