"""Putting a tar, read once from a stream: packed in this process, as it comes.

Owned here: what of a tar becomes which entry, and how a tar that is damaged or cut off ends.
Reading its format is Python's `tarfile`. One thread, and the packer's own.

Files, links and folders are put with their mode and mtime; sparse files are put dense. Of several
entries of one name the last counts. Devices, pipes and unknown kinds are left out and named, and so
are absolute names and names with `..`. A hard link becomes a file with the bytes that its target
has at the end: it is copied from the dataset, for the stream cannot be read again.
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

from ..cache.content_file import ContentFile
from ..cache.store import ContentReader
from ..entries import MODE_MASK, Kind, Stat, join, path_fault, shown, split
from ..errors import UsageError
from ..repository import Repository, WriteSession
from ..snapshot import Snapshot, same_content
from .clashes import acknowledge
from .options import Filter, Progress, PutOptions, PutReport, quiet
from .pack import Packer, Unsettled
from .plan import RESERVED
from .single import new_packer
from .standing import Readable, Standing, begun, leave_out_shadowed

FILE_BYTES_MAX = 16 << 40
"""What ext4 can hold. A sparse file needs one line to claim more, and years to read."""

_READ_BYTES = 1 << 20
_TAR_BUFFER_BYTES = 16 << 10  # tarfile copies what is left of it for each header
_TAIL_BYTES_MAX = 64 << 20  # read behind the end: padding, and the checksum of what was compressed
_SPOOL_BYTES = 64 << 20  # longer contents that are to be compared wait on disk
_LINK_MEMORY_BYTES = 256 << 20  # chunks kept while hard links are copied
_PROGRESS_ENTRIES = 256
_HEADER_BYTES_MAX = 1 << 20  # of one entry, with all that stands before it; paths are 256 KiB
_HEADERS_IN_A_ROW_MAX = 16  # tarfile reads each from within the one before
_DIGITS_MAX = 1 << 10  # tarfile's time grows with the square of their number
_SECOND_NS = 1_000_000_000
_TIME_NS_END = 1 << 63
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, Unsettled)
_OPENERS: dict[bytes, Callable[[IO[bytes]], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}


def put_tar(
    repository: Repository,
    dataset: str,
    stream: BinaryIO,
    prefix: bytes = b"",
    options: PutOptions | None = None,
    progress: Progress = quiet,
) -> PutReport:
    """Put the entries of a tar (plain, gzip, bzip2 or xz) below `prefix` of a dataset.

    As `put_tree` otherwise. Where the tar breaks off, what was read is put, the reason is in
    `failed` with an empty path, and nothing is deleted. Raises UsageError for what is no tar.
    """
    options = options or PutOptions()
    if prefix.split(b"/", 1)[0] == RESERVED:
        raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")
    tar = _open(stream)
    session, view, readable = begun(repository, dataset, options)
    put = _TarPut(view, readable, session, prefix, options, progress)
    report = put.report
    try:
        whole = put.read(tar)
        if session is None:
            report.would_delete(put.standing.gone() if whole else ())
            return report
        put.finish()
        if put.hard_links:
            session.finish()
            put.copy_hard_links(ContentReader(
                repository.view(dataset), repository.objects, _LINK_MEMORY_BYTES
            ))  # fmt: skip
        if whole and (gone := put.standing.gone()):
            report.deleted = session.delete(gone)
        acknowledge(repository, session, report, prefix)
        leave_out_shadowed(repository, session, view, report, "it is a folder of the tar, too")
        progress(report)
        return report
    finally:
        put.close()


class _Tar(tarfile.TarFile):
    """A tar that remembers how it ended: `tarfile` takes a damaged header for the end."""

    members: list[tarfile.TarInfo]
    ending: tarfile.HeaderError | None = None
    plain: IO[bytes]


class _Member(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        """The next entry. Its headers are of any length and depth, and tarfile reads them whole."""
        assert isinstance(tarfile, _Tar)
        stream = cast("IO[bytes] | _Headers", tarfile.fileobj)
        depth = stream.depth + 1 if isinstance(stream, _Headers) else 1
        tarfile.fileobj = cast("IO[bytes]", _Headers(stream, depth))
        try:
            found = super().fromtarfile(tarfile)
            standing = sum(len(key) + len(value) for key, value in tarfile.pax_headers.items())
            if standing > _HEADER_BYTES_MAX:
                raise HeaderError("its global headers are too long")
        except HeaderError as error:
            tarfile.ending = error
            raise
        except (ValueError, OverflowError) as error:
            tarfile.ending = HeaderError(str(error))
            raise tarfile.ending from error
        finally:
            tarfile.fileobj = cast("IO[bytes]", stream)
        return found


HeaderError = tarfile.HeaderError


class _Headers:
    """The stream of a tar while the headers of one entry are read: bounds what they may take.

    The body of an extended header is checked before tarfile sees it, which takes records that
    overlap: of a short header it makes gigabytes.
    """

    def __init__(self, stream: "IO[bytes] | _Headers", depth: int) -> None:
        if depth > _HEADERS_IN_A_ROW_MAX:
            raise HeaderError(f"more than {_HEADERS_IN_A_ROW_MAX} headers in a row")
        self.depth = depth
        self._stream = stream
        self._left = _HEADER_BYTES_MAX
        self._reads = 0  # the header, its body, then those of the entry that it is about
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
    buffered = _Unclosed(stream)
    begins = buffered.peek(6)[:6]
    opener = next((each for magic, each in _OPENERS.items() if begins.startswith(magic)), None)
    try:
        # Not tarfile's own: that looks at no checksum, and stops at a second gzip member.
        plain = cast("IO[bytes]", opener(buffered) if opener else buffered)
        tar = _Tar.open(
            fileobj=plain,
            mode="r|",
            bufsize=_TAR_BUFFER_BYTES,
            tarinfo=_Member,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except _BROKEN as error:
        raise UsageError(
            f"the input is no tar: {error}", advice="plain, gzip, bzip2 and xz are known"
        ) from error
    tar.plain = plain
    return tar


class _Unclosed(io.BufferedReader):
    """Buffers a stream of somebody else's, and leaves it open."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(cast("io.RawIOBase", stream), _READ_BYTES)

    def close(self) -> None: ...


class _TarPut:
    """One put of a tar: takes entry after entry."""

    def __init__(
        self,
        view: Snapshot,
        readable: Readable,
        session: WriteSession | None,
        prefix: bytes,
        options: PutOptions,
        progress: Progress,
    ) -> None:
        self.report = PutReport()
        self.hard_links: dict[bytes, tuple[bytes, int, int]] = {}  # target, mode, mtime_ns
        self.standing = Standing(view, prefix, options, readable)
        self._packer: Packer | None = None
        if session is not None:
            self._packer = new_packer(session, options, self.report)
        self._prefix = prefix
        self._options = options
        self._chosen = Filter(options)
        self._progress = progress

    def read(self, tar: _Tar) -> bool:
        """Take all entries; whether the tar was whole. Raises DieselError."""
        name, entries = b"", 0
        try:
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile keeps them all: a kilobyte each
                name = _name(member.name)
                self._take(tar, member, name)
                entries += 1
                if entries % _PROGRESS_ENTRIES == 0:
                    self._progress(self.report)
            if type(tar.ending).__name__ != "EOFHeaderError":
                raise tarfile.ReadError(f"no header where one should be ({tar.ending})")
            name = b""
            for _ in range(_TAIL_BYTES_MAX // _READ_BYTES):
                if not tar.plain.read(_READ_BYTES):
                    break
        except _BROKEN as error:
            last = f", after {shown(name)}" if name else ""
            self.report.fail(b"", f"the tar is damaged or cut off{last}: {error}")
            return False
        finally:
            self.report.walked = True
        return True

    def finish(self) -> None:
        """Make all that was taken durable."""
        assert self._packer is not None
        self._packer.finish()

    def copy_hard_links(self, reader: ContentReader) -> None:
        """Put the hard links as files, with the bytes that their targets have in a snapshot."""
        assert self._packer is not None
        failed = {path for path, _ in self.report.failed}
        view = reader.snapshot
        origins = _ends({path: origin for path, (origin, _, _) in self.hard_links.items()})
        for path, (_, mode, mtime_ns) in self.hard_links.items():
            origin = origins[path]
            source, index = view.lookup(origin), view.lookup(path)
            below = self._below(origin)
            if source < 0 or view.stat(source).kind != Kind.FILE or below in failed:
                self.report.fail(
                    self._below(path), f"a hard link to {shown(below)}, which is not there"
                )
                continue
            size = view.stat(source).size
            if (
                index >= 0
                and view.stat(index) == Stat(Kind.FILE, mode, size, mtime_ns)
                and _checksums(view, index) == _checksums(view, source)
            ):
                self.report.seen -= 1
                self.report.unchanged += 1
                continue
            content = io.BufferedReader(ContentFile(reader, source), _READ_BYTES)
            self._packer.add_stream(content, size, split(path), mode, mtime_ns)
        self._packer.finish()

    def close(self) -> None:
        """Give up what has not been shipped."""
        if self._packer is not None:
            self._packer.close()

    # One entry

    def _take(self, tar: _Tar, member: tarfile.TarInfo, path: bytes) -> None:
        mtime_ns = _mtime_ns(member)
        target = join(self._prefix, path) if path else self._prefix
        if reason := _refusal(member, path, target):
            self.report.fail(path, reason)
            return
        if mtime_ns is None:
            self.report.fail(path, "refused: its time is none that can be stored")
            return
        if self._chosen.leaves_out(path, is_folder=member.isdir()):
            return
        index = self.standing.find(target)
        if self.hard_links:
            self.hard_links.pop(target, None)
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
            self.report.fail(path, "skipped: a pipe, device or unknown kind")
            return
        if reason := self.standing.obstacle(target, index, entry.kind):
            self.report.fail(path, reason)
        elif member.islnk():
            self._take_hard_link(member, path, target, entry)
        else:
            self._put(tar, member, target, index, entry)

    def _put(
        self, tar: _Tar, member: tarfile.TarInfo, target: bytes, index: int, entry: Stat
    ) -> None:
        link = _encoded(member.linkname) if entry.kind == Kind.LINK else b""
        content: BinaryIO = io.BytesIO()
        if entry.size and entry.kind == Kind.FILE:
            content = cast("BinaryIO", tar.extractfile(member))
        same = self.standing.unchanged(index, entry, link)
        if same and self._options.checksum and entry.kind == Kind.FILE:
            with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
                shutil.copyfileobj(content, spool, _READ_BYTES)
                spool.seek(0)
                extents = self.standing.view.extents(index)
                same = same_content(extents, partial(_read_at, cast("BinaryIO", spool)))
                spool.seek(0)
                if not same:
                    self._pack(target, index, entry, cast("BinaryIO", spool), link)
                    return
        if same:
            self.report.unchanged += 1
        else:
            self._pack(target, index, entry, content, link)

    def _pack(self, target: bytes, index: int, entry: Stat, content: BinaryIO, link: bytes) -> None:
        self.report.seen += 1
        self.standing.put_over(index)
        if self._packer is None:
            return
        match entry.kind:
            case Kind.FOLDER:
                self._packer.add_folder(split(target), entry.mode, entry.mtime_ns)
            case Kind.LINK:
                self._packer.add_link_to(split(target), entry.mtime_ns, link)
            case _:
                self._packer.add_stream(
                    content, entry.size, split(target), entry.mode, entry.mtime_ns
                )

    def _take_hard_link(
        self, member: tarfile.TarInfo, path: bytes, target: bytes, entry: Stat
    ) -> None:
        origin = _name(member.linkname)
        if not origin or path_fault(origin):
            self.report.fail(path, f"refused: a hard link to {shown(origin)}")
            return
        self.report.seen += 1
        self.hard_links[target] = join(self._prefix, origin), entry.mode, entry.mtime_ns

    def _below(self, path: bytes) -> bytes:
        return path[len(self._prefix) + 1 :] if self._prefix else path


def _refusal(member: tarfile.TarInfo, path: bytes, target: bytes) -> str:
    """Why an entry like this cannot be put, or the empty string."""
    if path.startswith(b"/"):
        return "refused: an absolute name"
    if fault := path_fault(target):
        return f"refused: its name has {fault}"
    if target.startswith(RESERVED) and target.split(b"/", 1)[0] == RESERVED:
        return "refused: it is the name of a mount's own folder"
    if not target and not member.isdir():
        return "refused: a dataset's root is a folder"
    if member.size > FILE_BYTES_MAX:
        return f"refused: a file of {member.size} bytes"
    if member.issym() and (not member.linkname or "\0" in member.linkname):
        return "refused: a link to nothing"
    return ""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _name(text: str) -> bytes:
    """The path that a name in a tar means: without leading `./`; the root is empty."""
    name = _encoded(text)
    while name.startswith(b"./"):
        name = name[2:]
    return b"" if name == b"." else name.rstrip(b"/") if len(name) > 1 else name


def _mtime_ns(member: tarfile.TarInfo) -> int | None:
    """The time of an entry; None where it is no time."""
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


def _ends(links: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Where each link comes to by way of others; of those in a ring, any one of it."""
    ends: dict[bytes, bytes] = {}
    for path in links:
        way: dict[bytes, None] = {}
        while path in links and path not in ends and path not in way:
            way[path] = None
            path = links[path]
        ends |= dict.fromkeys(way, ends.get(path, path))
    return ends


def _checksums(view: Snapshot, index: int) -> list[tuple[int, int]]:
    return [(extent.size, extent.checksum) for extent in view.extents(index)]
