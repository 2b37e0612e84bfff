"""A tar as the source of a put: read once from a stream, and packed in this process on the way.

`tar_headers.py` reads headers of plain files, and Python's `tarfile` all others, within limits on
claimed sizes. Sparse files become dense. One tar may follow another in the stream (as after
`cat a.tar b.tar`); the report names trailing bytes that are no tar. Three threads: this one, the
packer's own, and one that decompresses.
"""

import re
import tarfile
from collections.abc import Iterator
from decimal import ROUND_FLOOR, Decimal
from functools import partial
from typing import IO, BinaryIO, Self, cast

from ...errors import UsageError
from ...names import shown
from ...repository.interface import Repository
from ...repository.writing import WriteSession
from ..options import PutOptions
from ..packer import MTIMES_NS, FileSkipped, Packer, start_packer
from ..put import Source
from .compression import (
    BROKEN_STREAM,
    BufferedStream,
    Decompressor,
    TrailingBytes,
    decompressed,
)
from .members import FolderFiles, MemberTaker, OpenContent, encoded, member_path
from .tar_headers import (
    BLOCK_BYTES,
    IGNORED_PAX_KEYS,
    PREFIX,
    PlainFiles,
    has_prefix,
    plain_files,
)

_READ_BYTES = 1 << 20
_WINDOW_BYTES = 4 << 20  # to look for plain files in
_REFILL_BYTES = 1 << 20  # if less of the window is left, more is read
_PROGRESS_ENTRIES = 256
_HEADER_BYTES_MAX = 1 << 20  # of one entry's headers together; the longest path has 256 KiB
_HEADERS_IN_A_ROW_MAX = 16  # tarfile recurses for each
_DIGITS_MAX = 1 << 10  # of one number: tarfile's time grows with the square of their count
_SECOND_NS = 1_000_000_000
_DUMP_FOLDER, _VOLUME_LABEL = b"D", b"V"  # GNU tar's kinds, which tarfile does not know
_BROKEN: tuple[type[Exception], ...] = (tarfile.TarError, FileSkipped, *BROKEN_STREAM)


class _Tar(tarfile.TarFile):
    """Remembers the error with which the tar ended: `tarfile` itself takes a damaged header for the
    end."""

    members: list[tarfile.TarInfo]
    end_error: tarfile.HeaderError | None = None
    window: "_Window"

    @property
    def is_at_header(self) -> bool:
        """Whether the next header is in the window, for `plain_files`. Skips the rest of the entry
        before."""
        if not self.window.skip_to(self.offset):
            return False
        # Another global header would change the meaning of all later ones
        return self.pax_headers.keys() <= IGNORED_PAX_KEYS


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """tarfile takes the field `prefix` for a part of the name in every format, but GNU tar's
        own format has times there."""
        found = super().frombuf(buf, encoding, errors)
        if not has_prefix(buf) and any(buf[PREFIX]) and found.type not in tarfile.GNU_TYPES:
            found.name = bytes(buf[:100]).partition(b"\0")[0].decode(encoding, errors)
            if found.isdir() or found.type == _DUMP_FOLDER:
                found.name = found.name.rstrip("/")
        return found

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        """tarfile reads headers of any length and depth; this method bounds them."""
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
        if found.size < 0:  # refused later; the next header should follow this one
            tarfile.offset = found.offset_data
        if found.type == _DUMP_FOLDER:  # its content, a list of names, is skipped
            found.type = DIRTYPE
        return found


HeaderError, DIRTYPE = tarfile.HeaderError, tarfile.DIRTYPE


class _Headers:
    """Bounds the length and depth of one entry's headers.

    The body of an extended header is checked before tarfile sees it, since tarfile accepts
    overlapping records, and makes gigabytes from a short header.
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
    """Raises HeaderError unless the records ("LENGTH KEY=VALUE", newline) follow each other."""
    start = 0
    while start < len(body) and body[start]:
        length = body[start : start + 8].partition(b" ")[0]
        end = start + int(length) if length.isdigit() else 0
        if not start < end <= len(body) or body[end - 1] != 10 or b"=" not in body[start:end]:
            raise HeaderError("an extended header is malformed")
        start = end
    if max(map(len, re.findall(rb"\d+", body)), default=0) > _DIGITS_MAX:
        raise HeaderError("a number in an extended header is too long")


class _Window:
    """A buffer over the stream: `data[at:end]` is the tar's next part. `tarfile` reads it as a
    file."""

    def __init__(self, stream: BufferedStream | Decompressor) -> None:
        self.data = bytearray(_WINDOW_BYTES)
        self.at = 0
        self.end = 0
        self._start = 0  # of the data, in the stream
        self._stream = stream
        self._error: Exception | None = None  # raised after the data before it are read

    def tell(self) -> int:
        return self._start + self.at

    def seek(self, position: int) -> None:
        """Goes only forward. Raises the errors of the stream."""
        if position < self.tell():
            raise tarfile.StreamError("a tar is read in one direction")
        while position > self.tell() and self.read(min(position - self.tell(), _READ_BYTES)):
            pass

    def read(self, size: int) -> bytes:
        """Returns fewer bytes at the end. Raises the errors of the stream."""
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
        """False if the position is not in the window."""
        if not 0 <= position - self.tell() <= self.end - self.at:
            return False
        self.at = position - self._start
        return True

    def skip_zeros(self) -> bool:
        """Find the next block that is not all zeros; False at the end. Raises the errors of the
        stream."""
        while True:
            self.fill()
            left = memoryview(self.data)[self.at : self.end]
            zeros = len(left) - len(bytes(left).lstrip(b"\0"))
            if zeros < len(left):
                self.at += zeros // BLOCK_BYTES * BLOCK_BYTES
                return True
            self.at = self.end
            if not zeros:
                if self._error is not None:
                    raise self._error
                return False

    def fill(self) -> bool:
        """The window must stand at a header. Returns False if it has enough, or the stream has
        ended."""
        left = self.end - self.at
        if left >= _REFILL_BYTES:
            return False
        room = memoryview(self.data)
        room[:left] = room[self.at : self.end]
        self._start, self.at, self.end = self.tell(), 0, left
        try:
            while self._error is None and self.end < len(room):
                count = self._stream.readinto(room[self.end : self.end + _READ_BYTES])
                if not count:
                    break
                self.end += count
        except _BROKEN as error:
            self._error = error
        return self.end > left


START_BYTES = 512 << 10
"""The bytes that `is_tar` needs to see. A tar without entries is shorter."""


def is_tar(start: bytes) -> bool:
    """`start` has the stream's first START_BYTES, or the whole stream."""
    if len(start) < BLOCK_BYTES:
        return False
    try:
        tarfile.TarInfo.frombuf(start[:BLOCK_BYTES], "utf-8", "surrogateescape")
    except HeaderError as error:
        # Zeros alone are a tar without entries, but some disk images begin with them, too
        is_zero = type(error).__name__ == "EOFHeaderError"
        return is_zero and len(start) < START_BYTES and not any(start)
    return True


class TarEntries:
    """A stream of tars, which can be read once, in order. The constructor raises UsageError if it
    is none."""

    def __init__(self, plain: BufferedStream | Decompressor) -> None:
        try:
            window = _Window(plain)
            self._tar = _Tar(
                fileobj=cast("IO[bytes]", window),
                tarinfo=_Member,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except _BROKEN as error:
            raise UsageError(
                f"the input is no tar: {error}",
                advice="plain, gzip, bzip2, xz and Zstandard are known",
            ) from error
        self._tar.window = window
        self._last = b""

    def take_all(self, taker: MemberTaker) -> str:
        """Returns why the tar broke off, or "". Raises DieselError."""
        tar, ends = self._tar, 0
        try:
            while True:
                begun = tar.offset
                self._take_one_tar(taker)
                if type(tar.end_error).__name__ != "EOFHeaderError":
                    if ends and begun == tar.offset:
                        return f"the bytes behind the tar's end, from byte {begun} on, are no tar"
                    raise tarfile.ReadError(f"no header where one should be ({tar.end_error})")
                self._last, ends = b"", ends + 1
                if not tar.window.skip_zeros():
                    return ""
                tar.offset, tar.pax_headers = tar.window.tell(), {}
        except _BROKEN as error:
            if ends and isinstance(error, TrailingBytes):
                return str(error)
            last = f", after {shown(self._last)}" if self._last else ""
            return f"the tar is damaged or cut off{last}: {error}"

    def _take_one_tar(self, taker: MemberTaker) -> None:
        """Stops at the tar's end, or at damage. Raises the errors of the stream, and
        DieselError."""
        tar, work, entries = self._tar, taker.work, 0
        while (member := tar.next()) is not None:
            tar.members.clear()  # otherwise tarfile keeps a kilobyte for each
            if member.type != _VOLUME_LABEL:
                self._last = member_path(encoded(member.name))
                content = partial(tar.extractfile, member)
                taker.take(self._last, member, _mtime_ns(member), cast("OpenContent", content))
            self._take_plain(taker)
            entries += 1
            if entries % _PROGRESS_ENTRIES == 0:
                work.progress(work.report)

    def _take_plain(self, taker: MemberTaker) -> None:
        tar = self._tar
        while tar.is_at_header:
            window = tar.window
            files = plain_files(window.data, window.at, window.end)
            window.at = files.end
            tar.offset = window.tell()
            if files.names:
                for each in _by_folder(files, memoryview(window.data)):
                    taker.take_files(each)
                taker.work.progress(taker.work.report)
                self._last = member_path(files.names[-1])
            if not window.fill():
                break


class TarSource(Source):
    """If the tar breaks off, the entries read so far are put, the report has the reason with an
    empty path, and nothing is deleted. `open` raises UsageError for a stream that is no tar."""

    shadowed_reason = "it is a folder of the tar, too"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._content: BufferedStream | Decompressor | None = None
        self._tar: TarEntries | None = None
        self._packer: Packer | None = None

    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        self._content = decompressed(self._stream)
        self._tar = TarEntries(self._content)

    def close(self) -> None:
        if self._packer is not None:
            self._packer.close()
        if self._content is not None:
            self._content.close()

    def count(self) -> bool:
        return self._take(MemberTaker(self._work, self._comparer, None))

    def pack(self, session: WriteSession) -> bool:
        options, report = self._work.options, self._work.report
        packer = self._packer = start_packer(
            session, options.chunk_bytes, options.compress, report.add_chunk
        )
        taker = MemberTaker(self._work, self._comparer, packer)
        is_complete = self._take(taker)
        packer.finish()
        report.stripped = packer.stripped
        if taker.has_hard_links:
            session.finish()
            taker.copy_hard_links(self._work.repository.view(session.name))
        return is_complete

    def _take(self, taker: MemberTaker) -> bool:
        assert self._tar is not None
        try:
            reason = self._tar.take_all(taker)
        finally:
            self._work.report.walked = True
        if reason:
            self._work.report.fail(b"", reason)
        return not reason


def _by_folder(files: PlainFiles, data: memoryview) -> Iterator[FolderFiles]:
    names, start = files.names, 0
    while start < len(names):
        prefix_bytes = names[start].rfind(b"/") + 1
        prefix, end = names[start][:prefix_bytes], start + 1
        while end < len(names) and (
            names[end].startswith(prefix) and names[end].rfind(b"/") + 1 == prefix_bytes
        ):
            end += 1
        run = slice(start, end)
        places = zip(files.starts[run], files.sizes[run], strict=True)
        yield FolderFiles(
            prefix,
            [name[prefix_bytes:] for name in names[run]],
            files.modes[run],
            files.mtimes_ns[run],
            [data[at : at + size] for at, size in places],
        )
        start = end


def _mtime_ns(member: tarfile.TarInfo) -> int | None:
    """None if the time cannot be stored."""
    text = member.pax_headers.get("mtime")
    if text is None:
        time_ns = int(member.mtime) * _SECOND_NS
        return time_ns if time_ns in MTIMES_NS else None
    try:
        exact = Decimal(text) * _SECOND_NS
        if not MTIMES_NS.start <= exact < MTIMES_NS.stop:
            return None
        return int(exact.to_integral_value(ROUND_FLOOR))
    except ArithmeticError:
        return None
