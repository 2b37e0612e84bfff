"""The entries of a zip, read with Python's `zipfile` in their order in the zip.

A name is Info-ZIP's field for UTF-8 names, else the entry's own bytes (`ingest/README.md`).
Backslashes count as slashes in an entry of DOS without a slash, as in `unzip`: Windows programs
have written them. Modes come from zips made on Unix; others give 0644 and 0755. An mtime in
Info-ZIP's extra field is UTC. The older field has a local time without its zone, and is taken as
UTC; if it is no date (some programs write zeros), it counts as the format's first date, 1980-01-01.

`zipfile` refuses the whole zip if one entry of its table is odd, so `_plain_table` repairs the
table first.
"""

import calendar
import stat
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast

from ...errors import UsageError
from ..packer import FileSkipped
from .compression import BROKEN_STREAM
from .members import MemberTaker, member_path

ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # the second: without members
_BROKEN: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    *(NotImplementedError, ValueError, OverflowError, struct.error),  # malformed header fields
    FileSkipped,
    *BROKEN_STREAM,
)
_LINK_BYTES_MAX = 4096
_PROGRESS_ENTRIES = 256
_SECOND_NS = 1_000_000_000
_FIRST_TIME_NS = 315_532_800 * _SECOND_NS
_UTF8, _ENCRYPTED = 0x800, 0x1
_DOS, _UNIX = 0, 3

_TABLE_MAGIC = b"PK\x01\x02"
_TABLE_HEADER = struct.Struct("<4s2xBxH10xLLHHH8xL")
"""Magic, version needed, flags, sizes of data and content, lengths of name, extra fields and
comment, and the start of the entry."""
_IN_ZIP64 = 0xFFFF_FFFF  # a size or offset with this value stands in the ZIP64 field instead
_NEEDED_AT, _FLAGS_AT = 6, 8
_NEEDED_MAX = 63  # zipfile refuses the whole zip if one entry needs more
_FIELD = struct.Struct("<HH")  # of an extra field: kind, size
_ZIP64, _EXTENDED_TIME, _UTF8_NAME, _UNKNOWN = 0x0001, 0x5455, 0x7075, 0xFFFF


@dataclass(slots=True)
class _TableEntry:
    """`name` may be decoded wrongly by `zipfile`; `fault` is why the entry cannot be read (or
    "")."""

    name: bytes
    fault: str = ""


class ZipEntries:
    """Raises UsageError for a file that is no zip."""

    def __init__(self, file: BinaryIO) -> None:
        plain = _PlainTableFile(file)
        try:
            self._zip = zipfile.ZipFile(cast("BinaryIO", plain))
            self._entries = [*zip(self._zip.infolist(), plain.take_entries(), strict=True)]
        except _BROKEN as error:
            raise UsageError(f"the input is no zip: {error}") from error
        self._entries.sort(key=lambda each: each[0].header_offset)

    def close(self) -> None:
        self._zip.close()

    def take_all(self, taker: MemberTaker) -> str:
        """A zip never breaks off, so this always returns "" (see `TarEntries`). Raises
        DieselError."""
        work = taker.work
        for number, (info, entry) in enumerate(self._entries):
            name = entry.name
            if info.create_system == _DOS and b"\\" in name and b"/" not in name:
                name = name.replace(b"\\", b"/")
                work.report.backslashes += 1
            path = member_path(name)
            if info.flag_bits & _ENCRYPTED:
                entry.fault = "it is encrypted"
            if entry.fault:
                work.report.fail(path, f"skipped: {entry.fault}")
                continue
            try:
                member, content = self._member(info, name), partial(self._zip.open, info)
                taker.take(path, member, _mtime_ns(info), content)  # type: ignore[arg-type]  # a ZipExtFile reads bytes
            except NotImplementedError as error:
                work.report.fail(path, f"skipped: {error} (method {info.compress_type})")
            except _BROKEN as error:
                work.report.fail(path, f"it is damaged or cut off: {error}")
            if number % _PROGRESS_ENTRIES == 0:
                work.progress(work.report)
        return ""

    def _member(self, info: zipfile.ZipInfo, name: bytes) -> tarfile.TarInfo:
        member = tarfile.TarInfo()
        mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
        member.size = info.file_size
        if name.endswith(b"/"):
            member.type, member.size = tarfile.DIRTYPE, 0
            member.mode = stat.S_IMODE(mode) if mode else 0o755
        elif stat.S_ISLNK(mode):
            if info.file_size > _LINK_BYTES_MAX:
                raise zipfile.BadZipFile(f"a link's target of {info.file_size} bytes")
            target = self._zip.read(info)
            member.type, member.mode = tarfile.SYMTYPE, 0o777
            member.linkname = target.decode("utf-8", "surrogateescape")
        elif mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            member.type = tarfile.FIFOTYPE  # a kind that no dataset has
        else:
            member.mode = stat.S_IMODE(mode) if mode else 0o644
        return member


class _PlainTableFile:
    """Gives `zipfile`, which reads the table in one call, a repaired one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._entries: list[_TableEntry] = []
        self._is_taken = False
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if not self._is_taken and data.startswith(_TABLE_MAGIC):
            data, self._entries = _plain_table(data)
        return data

    def take_entries(self) -> list[_TableEntry]:
        """From now on the file is read unchanged."""
        self._is_taken = True
        return self._entries

    def close(self) -> None: ...


def _plain_table(table: bytes) -> tuple[bytes, list[_TableEntry]]:
    """Returns the table as `zipfile` accepts it, and its entries up to the first damaged one."""
    plain, entries, at = bytearray(table), list[_TableEntry](), 0
    while at + _TABLE_HEADER.size <= len(table):
        magic, needed, flags, packed, size, *lengths, place = _TABLE_HEADER.unpack_from(table, at)
        name_at = at + _TABLE_HEADER.size
        extra_at = name_at + lengths[0]
        extra_end = extra_at + lengths[1]
        end = extra_end + lengths[2]
        if magic != _TABLE_MAGIC or end > len(table):
            break
        raw = table[name_at:extra_at]
        entry = _TableEntry(_name(raw, bool(flags & _UTF8)))
        if needed > _NEEDED_MAX:
            entry.fault = f"it needs version {needed / 10} of the format"
            plain[at + _NEEDED_AT] = _NEEDED_MAX
        if flags & _UTF8 and not _is_utf8(raw):
            plain[at + _FLAGS_AT : at + _FLAGS_AT + 2] = (flags & ~_UTF8).to_bytes(2, "little")
        zip64_bytes = 8 * [size, packed, place].count(_IN_ZIP64)
        _make_extra_plain(plain, extra_at, extra_end, entry, raw, zip64_bytes)
        entries.append(entry)
        at = end
    return bytes(plain), entries


def _make_extra_plain(
    plain: bytearray, at: int, end: int, entry: _TableEntry, raw: bytes, zip64_bytes: int
) -> None:
    """Give extra fields that `zipfile` might refuse an unknown kind, and take a name from them.
    `zip64_bytes` is the required length of the field for large sizes."""
    while at + _FIELD.size <= end:
        kind, size = _FIELD.unpack_from(plain, at)
        field = bytes(plain[at + _FIELD.size : min(at + _FIELD.size + size, end)])
        is_plain = len(field) == size
        if kind == _ZIP64:
            is_plain &= len(field) >= zip64_bytes > 0
            zip64_bytes = 0 if is_plain else zip64_bytes
        elif kind == _UTF8_NAME:
            is_plain = False
            is_of_name = field[:5] == b"\x01" + zlib.crc32(raw).to_bytes(4, "little")
            if len(field) == size and is_of_name and _is_utf8(field[5:]):
                entry.name = field[5:] or entry.name
        if not is_plain:
            _FIELD.pack_into(plain, at, _UNKNOWN, len(field))
        at += _FIELD.size + len(field)
    if zip64_bytes:
        entry.fault = entry.fault or "its sizes are damaged"


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _name(raw: bytes, declares_utf8: bool) -> bytes:
    if declares_utf8 or _is_utf8(raw):
        return raw
    return raw.decode("cp437").encode("utf-8")


def _mtime_ns(info: zipfile.ZipInfo) -> int:
    extra, at = info.extra, 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == _EXTENDED_TIME and size >= 5 and at + 9 <= len(extra) and extra[at + 4] & 1:
            return int(struct.unpack_from("<i", extra, at + 5)[0]) * _SECOND_NS
        at += 4 + size
    try:
        return calendar.timegm((*info.date_time, 0, 0, 0)) * _SECOND_NS
    except (ValueError, OverflowError):
        return _FIRST_TIME_NS
