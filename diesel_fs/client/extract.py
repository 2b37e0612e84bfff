"""Getting files back: entries of a dataset written to a folder, to one file, or into a tar.

Owned here: that nothing outside the destination is touched (folders are opened component by
component, links never followed), that what is there is replaced only if asked for and only whole,
and the order of writing: folders, files in the order of their chunks, links, and last the folders'
own attributes, deepest first. Not owned: reading and checking bytes (`cache/reader.py`).

One thread. As with `cp` and `tar` nothing is synced: a file is whole under its name or not there,
and survives a power cut once the kernel has written it.
"""

import errno
import io
import os
import stat
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..cache.reader import EntryFile, EntryReader
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
from ..format.snapshot import layout as layout
from ..format.snapshot.reader import Indices, Snapshot, same_content
from ..repository.interface import index_of_path
from ..system.atomic_file import check_links, close_folder, remove_leftovers, temporary_name

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FOLDERS = 64  # descriptors held at once; files come in chunk order, which is nearly theirs
_BATCH_BYTES = 64 << 20  # contents that one `read_many` is asked for: bounds what it holds
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_SECOND_NS = 1_000_000_000
_FILE_ERRORS = (
    FormatError,
    ObjectMissing,
)  # of one file; any other error of a store is everybody's


Failures = list[tuple[bytes, str]]


@dataclass(slots=True)
class GetReport:
    """What a get has done so far; `failed` names what was left out, with the reason.

    `files` and `content_bytes` count regular files that were written, `unchanged` counts entries
    that were there.
    """

    total: int = 0
    entries: int = 0
    files: int = 0
    content_bytes: int = 0
    unchanged: int = 0
    failed: Failures = field(default_factory=list)


GetProgress = Callable[[GetReport], None]
"""Called whenever the report has changed."""


def _silent(_: GetReport) -> None: ...


class _EntrySkipped(Exception):
    """An entry is not written; the reason is the message."""


def get(
    view: Snapshot,
    reader: EntryReader,
    path: bytes,
    dest: Path,
    *,
    force: bool = False,
    progress: GetProgress = _silent,
) -> GetReport:
    """Write what `path` names to `dest`: the contents of a folder into it, a file or link as it.

    Contents, mode, mtime and targets come back as they were put. An equal entry is left alone, a
    different one replaced only with `force`, and only with that does a folder that is there get
    other attributes. A folder's `dest` gets the folder's if it is made or empty; where a file's
    `dest` is a folder it is put into it. What cannot be written is named in the
    report. Raises NoSuchPath, NoSpaceError, PermissionDenied, ObjectStoreError.
    """
    top = index_of_path(view, path)
    if view.stat(top).kind == Kind.FOLDER:
        root, fresh = _open_destination(dest, view.stat(top).mode)
        remove_leftovers(root)
        writing = _Writing(view, reader, _Folders(view, top, root), force, progress)
        try:
            writing.tree(top, fresh)
        finally:
            writing.folders.close()
        return writing.report
    target = dest / os.fsdecode(view.name(top)) if dest.is_dir() else dest
    try:
        check_links(dest)
        root = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _no_destination(target.parent, error) from error
    remove_leftovers(root)
    # The entry's own folder stands for the destination's: its name there may be another.
    folders = _Folders(view, view.parent(top), root)
    writing = _Writing(view, reader, folders, force, progress, {top: os.fsencode(target.name)})
    try:
        writing.entries(np.array([top], np.int64))
    finally:
        folders.close()
    return writing.report


def _open_destination(dest: Path, mode: int) -> tuple[int, bool]:
    """A descriptor of the folder `dest`, and whether it is to have the dataset's attributes."""
    try:
        check_links(dest)
        dest.parent.mkdir(parents=True, exist_ok=True)
        try:
            dest.mkdir()
            dest.chmod(mode & MODE_MASK | 0o700)  # a get that is interrupted leaves nearly this
            fresh = True
        except FileExistsError:
            fresh = False
        root = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return root, fresh or not os.listdir(root)
    except OSError as error:
        raise _no_destination(dest, error) from error


def _no_destination(dest: Path, error: OSError) -> Exception:
    if error.errno in _NO_SPACE:
        return NoSpaceError(f"cannot write to {dest}: {error.strerror}")
    if isinstance(error, NotADirectoryError):
        return UsageError(f"cannot write to {dest}: it is not a folder")
    if isinstance(error, FileNotFoundError):
        return NoSuchPath(f"no folder {dest}", advice="make it first")
    return PermissionDenied(f"cannot write to {dest}: {error.strerror}")


class _Folders:
    """Descriptors of the destination's folders, by the index of the folder that each stands for.

    Opened from the one above, so that a path may be longer than the kernel takes at once, and a
    link that somebody puts in a folder's place is an error and never a way out.
    """

    def __init__(self, view: Snapshot, top: int, root: int) -> None:
        self._view = view
        self._top = top
        self._root = root
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, index: int) -> int:
        """The descriptor; good until the next call. Raises OSError, _EntrySkipped."""
        climbed = []
        while index != self._top and index not in self._open:
            climbed.append(index)
            index = self._view.parent(index)
        folder = self._root
        if index != self._top:
            self._open.move_to_end(index)
            folder = self._open[index]
        for below in reversed(climbed):
            folder = os.open(_safe_name(self._view, below), _FOLDER_FLAGS, dir_fd=folder)
            self._open[below] = folder
            if len(self._open) > _OPEN_FOLDERS:
                close_folder(self._open.popitem(last=False)[1])
        return folder

    def close(self) -> None:
        """Close all, the root too."""
        for folder in (*self._open.values(), self._root):
            close_folder(folder)
        self._open.clear()


def _safe_name(view: Snapshot, index: int) -> bytes:
    """The name of an entry, checked a second time: snapshots come from elsewhere."""
    name = view.name(index)
    if fault := name_fault(name):
        raise _EntrySkipped(f"refused: its name has {fault}")
    return name


class _Writing:
    """One get into a folder."""

    def __init__(
        self,
        view: Snapshot,
        reader: EntryReader,
        folders: _Folders,
        force: bool,
        progress: GetProgress,
        names: dict[int, bytes] | None = None,
    ) -> None:
        self.view = view
        self.reader = reader
        self.folders = folders
        self.report = GetReport()
        self._force = force
        self._progress = progress
        self._names = names or {}  # where an entry is to have another name

    def tree(self, top: int, fresh: bool) -> None:
        """Everything below the folder `top`."""
        below = self.view.walk(top)
        kinds = layout.kinds(self.view.columns.flags[below])
        folders = below[kinds == Kind.FOLDER]
        self.report.total = len(below) - 1 + fresh
        made = [top] if fresh else []
        for index in folders[1:].tolist():
            with _Naming(self, index):
                if self._make_folder(index):
                    made.append(index)
                else:
                    self._wrote()
        self.entries(below[kinds != Kind.FOLDER])
        for index in reversed(made):
            with _Naming(self, index):
                self._finish_folder(index)
        self._progress(self.report)

    def entries(self, indices: Indices) -> None:
        """Files, in the order of their chunks, then links."""
        self.report.total = max(self.report.total, len(indices))
        kinds = layout.kinds(self.view.columns.flags[indices])
        files = [i for i in indices[kinds == Kind.FILE].tolist() if self._wanted(i)]
        chosen = in_chunk_order(self.view, np.array(files, np.int64))
        for index, content in contents(self.view, self.reader, chosen):
            if isinstance(content, Exception):
                self._failed(index, str(content))
            else:
                self._write(index, content)
        for index in indices[kinds == Kind.LINK].tolist():
            if self._wanted(index):
                self._link(index)

    # Folders

    def _make_folder(self, index: int) -> bool:
        """A folder that we can write into; whether it is to get the dataset's attributes."""
        above, name = self._destination_of(index)
        nearly = self.view.stat(index).mode & MODE_MASK | 0o700  # what an interrupted get leaves
        try:
            os.mkdir(name, nearly, dir_fd=above)
        except FileExistsError:
            mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                if self._force and mode & 0o700 != 0o700:
                    _open_up(above, name, mode)
                with suppress(OSError):  # which whoever writes into it will see again
                    remove_leftovers(self.folders[index])
                return self._force
            if not self._force:
                raise _EntrySkipped("a file is there; --force replaces it") from None
            os.unlink(name, dir_fd=above)
            os.mkdir(name, nearly, dir_fd=above)
        return True

    def _finish_folder(self, index: int) -> None:
        """The attributes of a folder, after everything in it; of an implicit one only the mode."""
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

    def _wanted(self, index: int) -> bool:
        """Whether an entry is to be written: it is absent, or different and `force` says so."""
        with _Naming(self, index):
            above, name = self._destination_of(index)
            try:
                there = os.stat(name, dir_fd=above, follow_symlinks=False)
            except FileNotFoundError:
                return True
            if self._equal(index, above, name, there):
                self.report.unchanged += 1
                self._wrote()
                return False
            if stat.S_ISDIR(there.st_mode):
                raise _EntrySkipped("a folder is there; remove it first")
            if not self._force:
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
            return True  # of a mode that forbids reading; all else is equal
        try:
            return stat.S_ISREG(os.fstat(file).st_mode) and same_content(
                self.view.extents(index), partial(os.pread, file)
            )
        finally:
            os.close(file)

    def _write(self, index: int, pieces: Iterable[memoryview]) -> None:
        with _Naming(self, index):
            above, name = self._destination_of(index)
            wanted = self.view.stat(index)
            temporary = temporary_name()
            file = os.open(temporary, _CREATE_FLAGS, 0o600, dir_fd=above)
            try:
                try:
                    for piece in pieces:
                        _write_all(file, piece)
                    os.fchmod(file, wanted.mode & MODE_MASK)
                    os.utime(file, ns=(wanted.mtime_ns, wanted.mtime_ns))
                finally:
                    os.close(file)
                os.rename(temporary, name, src_dir_fd=above, dst_dir_fd=above)
            except BaseException:
                _unlink_quietly(temporary, above)
                raise
            self.report.files += 1
            self.report.content_bytes += wanted.size
            self._wrote()

    def _link(self, index: int) -> None:
        with _Naming(self, index):
            above, name = self._destination_of(index)
            temporary, mtime_ns = temporary_name(), self.view.stat(index).mtime_ns
            os.symlink(self.view.link(index), temporary, dir_fd=above)
            try:
                os.utime(temporary, ns=(mtime_ns, mtime_ns), dir_fd=above, follow_symlinks=False)
                os.rename(temporary, name, src_dir_fd=above, dst_dir_fd=above)
            except BaseException:
                _unlink_quietly(temporary, above)
                raise
            self._wrote()

    def _destination_of(self, index: int) -> tuple[int, bytes]:
        """Where an entry goes: the descriptor of its folder, and its name."""
        name = self._names.get(index) or _safe_name(self.view, index)
        return self.folders[self.view.parent(index)], name

    def _wrote(self) -> None:
        self.report.entries += 1
        self._progress(self.report)

    def _failed(self, index: int, reason: str) -> None:
        self.report.failed.append((self.view.path(index), reason))
        self._wrote()


class _Naming:
    """Turns the failure of one entry into its name in the report; a full disk ends everything."""

    def __init__(self, writing: _Writing, index: int) -> None:
        self._writing = writing
        self._index = index

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            if error.errno in _NO_SPACE:
                path = os.fsdecode(self._writing.view.path(self._index))
                raise NoSpaceError(f"cannot write {path!r}: {reason}") from error
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                reason = "a link or file stands where its folder should; it is not followed"
        elif isinstance(error, (_EntrySkipped, *_FILE_ERRORS)):
            reason = str(error)
        else:
            return False
        self._writing._failed(self._index, reason)
        return True


# Reading in a good order


def in_chunk_order(view: Snapshot, files: Indices) -> Indices:
    """Files by the place of their bytes, so that each chunk is read once."""
    if not len(files):
        return files
    return files[np.lexsort((view.columns.offset[files], view.chunk_of(files)))]


def contents(
    view: Snapshot, reader: EntryReader, files: Indices
) -> Iterator[tuple[int, Iterable[memoryview] | Exception]]:
    """Each file, in this order, with its content in pieces, or with why that cannot be had.

    A file of several extents is read one by one, as its pieces are asked for (which may raise).
    Raises ObjectStoreError where the store as a whole fails.
    """
    many = (view.columns.flags[files] & layout.MANY_EXTENTS) != 0
    ends = np.cumsum(np.where(many, 0, view.columns.size[files]).astype(np.int64))
    cuts = np.flatnonzero(np.diff(ends // _BATCH_BYTES)) + 1
    for batch in np.split(np.arange(len(files)), cuts):
        small = batch[~many[batch]]
        whole = _whole(view, reader, files[small])
        for position in batch.tolist():
            index = int(files[position])
            yield (index, _extents(view, reader, index)) if many[position] else next(whole)


def _whole(
    view: Snapshot, reader: EntryReader, files: Indices
) -> Iterator[tuple[int, tuple[memoryview] | Exception]]:
    done = 0
    while done < len(files):
        try:
            for content in reader.read_many(files[done:]):
                index, done = int(files[done]), done + 1
                has_all = len(content) == view.size(index)
                yield index, (content,) if has_all else _short(view, index, len(content))
        except _FILE_ERRORS as error:
            yield int(files[done]), error
            done += 1


def _extents(view: Snapshot, reader: EntryReader, index: int) -> Iterator[memoryview]:
    done = 0
    for extent in view.extents(index):
        content = reader.read(index, extent.start, extent.size)
        done += len(content)
        yield content
    if done != view.size(index):
        raise _short(view, index, done)


def _short(view: Snapshot, index: int, found: int) -> CorruptError:
    return CorruptError(f"its content has {found} bytes, and its metadata say {view.size(index)}")


# Into a tar


def get_tar(
    view: Snapshot,
    reader: EntryReader,
    path: bytes,
    out: BinaryIO,
    progress: GetProgress = _silent,
) -> GetReport:
    """Write what `path` names as a tar (PAX) in directory order: a folder's contents, or a file.

    Files whose bytes are lost are left out and named. Raises NoSuchPath, OSError of `out`, and
    FormatError where a file of several extents breaks off, since then the tar is not whole.
    """
    top = index_of_path(view, path)
    below = view.walk(top)
    report = GetReport(total=len(below))
    prefix = len(view.path(top)) + 1 if top else 0
    kinds = layout.kinds(view.columns.flags[below])
    reading = contents(view, reader, below[kinds == Kind.FILE])
    # tarfile's stub has no overload for options that come by name.
    options = {"format": tarfile.PAX_FORMAT, "encoding": "utf-8", "errors": "surrogateescape"}
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20, **options) as tar:  # type: ignore[call-overload]
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
    """The header of an entry. It has no owner: a dataset keeps none."""
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


def _open_up(above: int, name: bytes, mode: int) -> None:
    """Let the owner into a folder; never through a link."""
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{folder}", stat.S_IMODE(mode) | 0o700)
    finally:
        close_folder(folder)


def _write_all(file: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(file, piece) :]


def _unlink_quietly(name: str, folder: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
