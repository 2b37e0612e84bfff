"""A tar as the source of a put: read once from a stream, and packed in this process as it comes.

Headers of plain files are read by `tar_headers.py`, all others by Python's `tarfile`, within limits
on what headers may claim. Files, links and folders are put with their mode and mtime; sparse files
become dense. Of several entries with one name the last counts. Devices, pipes, unknown kinds,
absolute names and names with `..` are left out, and the report names them. A hard link becomes a
file with the bytes that its target has at the end: they are copied from the dataset, since the
stream cannot be read again. One thread, and the packer's own.
"""

import bz2
import gzip
import io
import lzma
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from decimal import ROUND_FLOOR, Decimal
from functools import partial
from typing import IO, BinaryIO, Self, cast

from ...cache.reader import EntryFile, EntryReader
from ...errors import UsageError
from ...format.entries import MODE_MASK, NAME_BYTES_MAX, Kind, Names, Stat, join, path_fault, split
from ...format.snapshot.reader import Snapshot, same_content
from ...names import shown
from ...repository.interface import Repository
from ...repository.writing import WriteSession
from ..options import PutOptions
from ..packer import FileSkipped, Packer, start_packer
from ..paths import RESERVED_NAME, is_reserved, refusal_reason, source_path, target_path
from ..put import Source
from .tar_headers import IGNORED_PAX_KEYS, PlainFiles, plain_files

FILE_BYTES_MAX = 16 << 40
"""What ext4 can hold. A sparse file can claim more in one line, and would take years to read."""

_READ_BYTES = 1 << 20  # of a stream at once
_WINDOW_BYTES = 4 << 20  # of the tar in memory, where plain files are looked for
_REFILL_BYTES = 1 << 20  # with less of it left, more is read
_UNPACKED_BYTES = 16 << 10  # read at once of a compressed tar: an error loses what came with it
_TAIL_BYTES_MAX = 64 << 20  # read behind the end: padding, and the checksum of a compressed tar
_SPOOL_BYTES = 64 << 20  # with --checksum, longer contents are spooled to disk
_LINK_MEMORY_BYTES = 256 << 20  # of chunks, while hard links are copied
_PROGRESS_ENTRIES = 256  # from one report of progress to the next
_HEADER_BYTES_MAX = 1 << 20  # of one entry, with all that stands before it; paths are 256 KiB
_HEADERS_IN_A_ROW_MAX = 16  # tarfile recurses for each
_DIGITS_MAX = 1 << 10  # of one number: tarfile's time grows with the square of their count
_SECOND_NS = 1_000_000_000
_TIME_NS_END = 1 << 63  # times are signed 64-bit numbers
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, FileSkipped)
_Content = Callable[[], BinaryIO]
"""Opens the content of an entry."""
_OPENERS: dict[bytes, Callable[[IO[bytes]], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}


class _Tar(tarfile.TarFile):
    """A tar that remembers how it ended. `tarfile` itself takes a damaged header for the end."""

    members: list[tarfile.TarInfo]
    end_error: tarfile.HeaderError | None = None
    window: "_Window"

    @property
    def is_at_header(self) -> bool:
        """Whether the next header is in the window, so that `plain_files` may read it. The rest of
        the entry before is skipped."""
        if not self.window.skip_to(self.offset):
            return False
        # Another global header would change the meaning of all later ones
        return self.pax_headers.keys() <= IGNORED_PAX_KEYS


class _Member(tarfile.TarInfo):
    """An entry of a `_Tar`."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        """The next entry. tarfile reads headers of any length and depth; here they are bounded."""
        assert isinstance(tarfile, _Tar)
        stream = cast("IO[bytes] | _Headers", tarfile.fileobj)
        depth = stream.depth + 1 if isinstance(stream, _Headers) else 1
        tarfile.fileobj = cast("IO[bytes]", _Headers(stream, depth))
        try:
            found = super().fromtarfile(tarfile)
            header_bytes = sum(len(key) + len(value) for key, value in tarfile.pax_headers.items())
            if header_bytes > _HEADER_BYTES_MAX:
                raise HeaderError("its global headers are too long")
        except HeaderError as error:
            tarfile.end_error = error
            raise
        except (ValueError, OverflowError) as error:
            tarfile.end_error = HeaderError(str(error))
            raise tarfile.end_error from error
        finally:
            tarfile.fileobj = cast("IO[bytes]", stream)
        return found


HeaderError = tarfile.HeaderError


class _Headers:
    """The stream of a tar while the headers of one entry are read: it bounds their length and
    depth.

    The body of an extended header is checked before tarfile sees it: tarfile accepts records that
    overlap, and makes gigabytes of a short header.
    """

    def __init__(self, stream: "IO[bytes] | _Headers", depth: int) -> None:
        if depth > _HEADERS_IN_A_ROW_MAX:
            raise HeaderError(f"more than {_HEADERS_IN_A_ROW_MAX} headers in a row")
        self.depth = depth
        self._stream = stream
        self._left = _HEADER_BYTES_MAX
        self._reads = 0  # the header, its body, then those of the next header
        self._kind = b""

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0:
            raise HeaderError(f"an entry's headers are longer than {_HEADER_BYTES_MAX} bytes")
        data = self._stream.read(size)
        self._reads += 1
        if self._reads == 1:
            self._kind = data[_TYPE_AT : _TYPE_AT + 1]
        elif self._reads == 2 and self._kind in _EXTENDED:
            _check_records(data)
        return data

    def tell(self) -> int:
        return self._stream.tell()


_TYPE_AT = 156
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def _check_records(body: bytes) -> None:
    """Raise HeaderError unless the records ("LENGTH KEY=VALUE", newline) follow each other."""
    start = 0
    while start < len(body) and body[start]:
        length = body[start : start + 8].partition(b" ")[0]
        end = start + int(length) if length.isdigit() else 0
        if not start < end <= len(body) or body[end - 1] != 10 or b"=" not in body[start:end]:
            raise HeaderError("an extended header is malformed")
        start = end
    if max(map(len, re.findall(rb"\d+", body)), default=0) > _DIGITS_MAX:
        raise HeaderError("a number in an extended header is too long")


def _open(stream: BinaryIO) -> _Tar:
    """The tar in a stream. Raises UsageError where it does not begin like one."""
    buffered = _NonClosingReader(stream)
    magic = buffered.peek(6)[:6]
    opener = next((_OPENERS[each] for each in _OPENERS if magic.startswith(each)), None)
    try:
        # Not by tarfile's own openers: they check no checksum, and stop at a second gzip member
        plain = cast("IO[bytes]", opener(buffered) if opener else buffered)
        window = _Window(plain, _UNPACKED_BYTES if opener else _READ_BYTES)
        tar = _Tar(
            fileobj=cast("IO[bytes]", window),
            tarinfo=_Member,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except _BROKEN as error:
        raise UsageError(
            f"the input is no tar: {error}", advice="plain, gzip, bzip2 and xz are known"
        ) from error
    tar.window = window
    return tar


class _NonClosingReader(io.BufferedReader):
    """Buffers the caller's stream, and does not close it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(cast("io.RawIOBase", stream), _READ_BYTES)

    def close(self) -> None: ...


class _Window:
    """The stream of a tar, with the next part in memory (`data[at:end]`). `tarfile` reads it as a
    file."""

    def __init__(self, stream: IO[bytes], read_bytes: int) -> None:
        self.data = bytearray(_WINDOW_BYTES)
        self.at = 0
        self.end = 0
        self._start = 0  # of the data, in the stream
        self._stream = stream
        self._read_bytes = read_bytes
        self._error: Exception | None = None  # raised once the data before it are read

    def tell(self) -> int:
        return self._start + self.at

    def seek(self, position: int) -> None:
        """Skip forward to a position. Raises what the stream raises."""
        if position < self.tell():
            raise tarfile.StreamError("a tar is read in one direction")
        while position > self.tell() and self.read(min(position - self.tell(), _READ_BYTES)):
            pass

    def read(self, size: int) -> bytes:
        """The next `size` bytes, or fewer at the end. Raises what the stream raises."""
        taken = bytes(memoryview(self.data)[self.at : min(self.at + size, self.end)])
        self.at += len(taken)
        if len(taken) == size:
            return taken
        parts = [taken]
        missing = size - len(taken)
        while missing:
            if self._error is not None:
                raise self._error
            parts.append(self._stream.read(min(missing, _READ_BYTES)))
            missing -= len(parts[-1])
            self._start += len(parts[-1])
            if not parts[-1]:
                break
        return b"".join(parts)

    def skip_to(self, position: int) -> bool:
        """Go to a position that is in memory; False where it is not."""
        if not 0 <= position - self.tell() <= self.end - self.at:
            return False
        self.at = position - self._start
        return True

    def fill(self) -> bool:
        """Read more into memory; False where enough is there, or nothing is left. The window must
        stand at a header."""
        left = self.end - self.at
        if left >= _REFILL_BYTES:
            return False
        room = memoryview(self.data)
        room[:left] = room[self.at : self.end]
        self._start, self.at, self.end = self.tell(), 0, left
        stream = cast("io.BufferedIOBase", self._stream)
        try:
            while self._error is None and self.end < len(room):
                count = stream.readinto(room[self.end : self.end + self._read_bytes])
                if not count:
                    break
                self.end += count
        except _BROKEN as error:
            self._error = error
        return self.end > left


class TarSource(Source):
    """The entries of a tar (plain, gzip, bzip2 or xz) in a stream.

    Where the tar breaks off, what was read is put, the report has the reason with an empty path,
    and nothing is deleted. Raises UsageError for a stream that is no tar.
    """

    shadowed_reason = "it is a folder of the tar, too"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._packer: Packer | None = None
        self._hard_links: dict[bytes, tuple[bytes, int, int]] = {}  # target, mode, mtime_ns

    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        self._tar = _open(self._stream)

    def close(self) -> None:
        """Give up what has not been stored."""
        if self._packer is not None:
            self._packer.close()

    def count(self) -> bool:
        return self._read(self._tar)

    def pack(self, session: WriteSession) -> bool:
        options, report = self._work.options, self._work.report
        packer = self._packer = start_packer(
            session, options.chunk_bytes, options.compress, report.add_chunk
        )
        is_complete = self._read(self._tar)
        packer.finish()
        report.stripped = packer.stripped
        if self._hard_links:
            session.finish()
            repository = self._work.repository
            view = repository.view(session.name)
            self._copy_hard_links(packer, EntryReader(view, repository.objects, _LINK_MEMORY_BYTES))
        return is_complete

    def _read(self, tar: _Tar) -> bool:
        """Take all entries; return whether the tar was complete. Raises DieselError."""
        name, entries = b"", 0
        try:
            while (member := tar.next()) is not None:
                tar.members.clear()  # else tarfile keeps a kilobyte for each
                name = _name(_encoded(member.name))
                content = partial(tar.extractfile, member)
                self._take(name, member, _mtime_ns(member), cast("_Content", content))
                name = self._take_plain(tar) or name
                entries += 1
                if entries % _PROGRESS_ENTRIES == 0:
                    self._work.progress(self._work.report)
            if type(tar.end_error).__name__ != "EOFHeaderError":
                raise tarfile.ReadError(f"no header where one should be ({tar.end_error})")
            name = b""
            for _ in range(_TAIL_BYTES_MAX // _READ_BYTES):
                if not tar.window.read(_READ_BYTES):
                    break
        except _BROKEN as error:
            last = f", after {shown(name)}" if name else ""
            self._work.report.fail(b"", f"the tar is damaged or cut off{last}: {error}")
            return False
        finally:
            self._work.report.walked = True
        return True

    def _copy_hard_links(self, packer: Packer, reader: EntryReader) -> None:
        """Put the hard links as files, with the bytes that their targets have in a snapshot."""
        failed = {path for path, _ in self._work.report.failed}
        view = reader.snapshot
        origins = hard_link_origins(
            {path: origin for path, (origin, _, _) in self._hard_links.items()}
        )
        for path, (_, mode, mtime_ns) in self._hard_links.items():
            origin = origins[path]
            source, index = view.lookup(origin), view.lookup(path)
            below = source_path(self._work.target, origin)
            if source < 0 or view.stat(source).kind != Kind.FILE or below in failed:
                self._work.report.fail(
                    source_path(self._work.target, path),
                    f"a hard link to {shown(below)}, which is not there",
                )
                continue
            size = view.stat(source).size
            if (
                index >= 0
                and view.stat(index) == Stat(Kind.FILE, mode, size, mtime_ns)
                and _checksums(view, index) == _checksums(view, source)
            ):
                self._work.report.entries_found -= 1
                self._work.report.unchanged += 1
                continue
            content = io.BufferedReader(EntryFile(reader, source), _READ_BYTES)
            packer.add_stream(content, size, split(path), mode, mtime_ns)
            self._work.report.hard_links += 1
        packer.finish()

    # One entry

    def _take_plain(self, tar: _Tar) -> bytes:
        """Take the plain files that come next; returns the name of the last, if any. Raises what
        the stream raises."""
        last = b""
        while tar.is_at_header:
            window = tar.window
            files = plain_files(window.data, window.at, window.end)
            window.at = files.end
            tar.offset = window.tell()
            if files.names:
                self._take_files(files, memoryview(window.data))
                self._work.progress(self._work.report)
                last = _name(files.names[-1])
            if not window.fill():
                break
        return last

    def _take_files(self, files: PlainFiles, data: memoryview) -> None:
        """Take plain files: those of one folder at once where it is empty in the dataset, else one
        by one."""
        names, start = files.names, 0
        takes_all = self._work.path_filter.includes_all and not self._hard_links
        extent_bytes = self._packer.extent_bytes if self._packer else FILE_BYTES_MAX
        while start < len(names):
            prefix_bytes = names[start].rfind(b"/") + 1
            prefix, end = names[start][:prefix_bytes], start + 1
            while end < len(names) and (
                names[end].startswith(prefix) and names[end].rfind(b"/") + 1 == prefix_bytes
            ):
                end += 1
            run = slice(start, end)  # files of one folder
            contents = [
                data[at : at + size]
                for at, size in zip(files.starts[run], files.sizes[run], strict=True)
            ]
            base_names = [name[prefix_bytes:] for name in names[run]]
            folder = self._empty_target_folder(prefix, base_names) if takes_all else None
            if folder is not None and max(files.sizes[run]) <= extent_bytes:
                self._work.report.entries_found += end - start
                if self._packer is not None:
                    self._packer.add_contents(
                        folder, base_names, files.modes[run], files.mtimes_ns[run], contents
                    )
            else:
                for i, content in zip(range(start, end), contents, strict=True):
                    member = tarfile.TarInfo()
                    member.mode, member.size = files.modes[i], files.sizes[i]
                    content_of = partial(io.BytesIO, content)
                    self._take(_name(names[i]), member, files.mtimes_ns[i], content_of)
            start = end

    def _empty_target_folder(self, prefix: bytes, names: list[bytes]) -> bytes | None:
        """The folder of the dataset that files go to (`prefix` is its name in the tar, with the
        slash); None where it is not empty, or where a name of the files is not allowed."""
        while prefix.startswith(b"./"):
            prefix = prefix[2:]
        folder = target_path(self._work.target, prefix[:-1])
        if prefix.startswith(b"/") or not Names.of(names).are_allowed():
            return None
        if path_fault(join(folder, b"n" * NAME_BYTES_MAX)):
            return None
        if is_reserved(folder) or (not folder and RESERVED_NAME in names):
            return None
        return folder if self._comparer.accepts_any_file(folder) else None

    def _take(
        self, path: bytes, member: tarfile.TarInfo, mtime_ns: int | None, content_of: "_Content"
    ) -> None:
        """Take one entry: put it, or name it in the report. `path` is below the source; an
        `mtime_ns` of None is one that cannot be stored."""
        target = target_path(self._work.target, path)
        if reason := _refusal(member, path, target):
            self._work.report.fail(path, reason)
            return
        if mtime_ns is None:
            self._work.report.fail(path, "refused: its mtime cannot be stored")
            return
        if self._work.path_filter.excludes(path, is_folder=member.isdir()):
            return
        index = self._comparer.find(target)
        if self._hard_links:
            self._hard_links.pop(target, None)
        if member.isreg():
            entry = Stat(Kind.FILE, member.mode & MODE_MASK, member.size, mtime_ns)
        elif member.isdir():
            entry = Stat(Kind.FOLDER, member.mode & MODE_MASK, 0, mtime_ns)
        elif member.issym():
            size = len(_encoded(member.linkname))
            entry = Stat(Kind.LINK, MODE_MASK, size, mtime_ns)
        elif member.islnk():
            entry = Stat(Kind.FILE, member.mode & MODE_MASK, 0, mtime_ns)
        else:
            self._work.report.fail(path, "skipped: a pipe, device or unknown kind")
            return
        if reason := self._comparer.conflict_reason(target, index, entry.kind):
            self._work.report.fail(path, reason)
        elif member.islnk():
            self._take_hard_link(member, path, target, entry)
        else:
            self._put(member, target, index, entry, content_of)

    def _put(
        self,
        member: tarfile.TarInfo,
        target: bytes,
        index: int,
        entry: Stat,
        content_of: "_Content",
    ) -> None:
        """Put an entry unless the one at `index` is the same. `entry` has the bits of the mode that
        a dataset keeps."""
        link = _encoded(member.linkname) if entry.kind == Kind.LINK else b""
        content: BinaryIO = io.BytesIO()
        if entry.size and entry.kind == Kind.FILE:
            content = content_of()
        to_pack = entry._replace(mode=member.mode)  # the packer counts the bits that are not kept
        same = self._comparer.unchanged(index, entry, link)
        if same and self._work.options.checksum and entry.kind == Kind.FILE:
            with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
                shutil.copyfileobj(content, spool, _READ_BYTES)
                spool.seek(0)
                extents = self._comparer.view.extents(index)
                same = same_content(extents, partial(_read_at, cast("BinaryIO", spool)))
                spool.seek(0)
                if not same:
                    self._pack(target, index, to_pack, cast("BinaryIO", spool), link)
                    return
        if same:
            self._work.report.unchanged += 1
        else:
            self._pack(target, index, to_pack, content, link)

    def _pack(self, target: bytes, index: int, entry: Stat, content: BinaryIO, link: bytes) -> None:
        """Pack an entry; in a dry run, count it."""
        self._work.report.entries_found += 1
        self._comparer.mark_replaced(index)
        if self._packer is None:
            return
        match entry.kind:
            case Kind.FOLDER:
                self._packer.add_folder(split(target), entry.mode, entry.mtime_ns)
            case Kind.LINK:
                self._packer.add_known_link(split(target), entry.mtime_ns, link)
            case _:
                self._packer.add_stream(
                    content, entry.size, split(target), entry.mode, entry.mtime_ns
                )

    def _take_hard_link(
        self, member: tarfile.TarInfo, path: bytes, target: bytes, entry: Stat
    ) -> None:
        """Note a hard link; its content is copied when the tar has been read."""
        origin = _name(_encoded(member.linkname))
        if not origin or path_fault(origin):
            self._work.report.fail(path, f"refused: a hard link to {shown(origin)}")
            return
        self._work.report.entries_found += 1
        self._hard_links[target] = join(self._work.target, origin), entry.mode, entry.mtime_ns


def _refusal(member: tarfile.TarInfo, path: bytes, target: bytes) -> str:
    """Why an entry like this cannot be put, or the empty string."""
    if path.startswith(b"/"):
        return "refused: an absolute name"
    if reason := refusal_reason(target):
        return reason
    if not target and not member.isdir():
        return "refused: a dataset's root is a folder"
    if member.size > FILE_BYTES_MAX:
        return f"refused: a file of {member.size} bytes"
    if member.issym() and (not member.linkname or "\0" in member.linkname):
        return "refused: a link to nothing"
    return ""


def _encoded(text: str) -> bytes:
    """The bytes of a name or link target that tarfile has decoded."""
    return text.encode("utf-8", "surrogateescape")


def _name(name: bytes) -> bytes:
    """The path that a name in a tar stands for: without leading `./`; empty for the root."""
    while name.startswith(b"./"):
        name = name[2:]
    return b"" if name == b"." else name.rstrip(b"/") if len(name) > 1 else name


def _mtime_ns(member: tarfile.TarInfo) -> int | None:
    """The mtime of an entry; None where it has no valid one."""
    text = member.pax_headers.get("mtime")
    if text is None:
        time_ns = int(member.mtime) * _SECOND_NS
        return time_ns if -_TIME_NS_END <= time_ns < _TIME_NS_END else None
    try:
        exact = Decimal(text) * _SECOND_NS
        if not -_TIME_NS_END <= exact < _TIME_NS_END:
            return None
        return int(exact.to_integral_value(ROUND_FLOOR))
    except ArithmeticError:
        return None


def _read_at(content: BinaryIO, size: int, start: int) -> bytes:
    content.seek(start)
    return content.read(size)


def hard_link_origins(links: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """By the path of each hard link, the file at the end of its chain of links; for links in a
    ring, any of its members. `links` has the target of each."""
    origins: dict[bytes, bytes] = {}
    for path in links:
        chain: dict[bytes, None] = {}
        while path in links and path not in origins and path not in chain:
            chain[path] = None
            path = links[path]
        origins |= dict.fromkeys(chain, origins.get(path, path))
    return origins


def _checksums(view: Snapshot, index: int) -> list[tuple[int, int]]:
    return [(extent.size, extent.checksum) for extent in view.extents(index)]
