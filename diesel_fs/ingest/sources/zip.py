"""The entries of a zip, read with Python's `zipfile` in the order in which they lie there.

Names are taken as the bytes that the zip has, if it says that they are UTF-8 or they can be read
so, else as code page 437. A mode is that of a zip made on Unix, else 0644 and 0755. An mtime is
UTC where the zip has it in the extra field of Info-ZIP; the older field has a local time without
its zone, and is taken as UTC; one that is no date (some programs write zeros) counts as the first
that the format has, 1980-01-01. Members that are encrypted, or compressed by a method that Python
does not know, are left out, and the report names them.
"""

import calendar
import stat
import struct
import tarfile
import zipfile
from functools import partial
from typing import BinaryIO

from ...errors import UsageError
from ...names import shown
from ..packer import FileSkipped
from .compression import BROKEN_STREAM
from .members import MemberTaker, member_path

ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # the second: of a zip without members
_BROKEN: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    *(NotImplementedError, ValueError, OverflowError, struct.error),  # of fields that are no such
    FileSkipped,
    *BROKEN_STREAM,
)
_LINK_BYTES_MAX = 4096
_PROGRESS_ENTRIES = 256
_SECOND_NS = 1_000_000_000
_FIRST_TIME_NS = 315_532_800 * _SECOND_NS
_EXTENDED_TIME = 0x5455
_UTF8, _ENCRYPTED = 0x800, 0x1
_UNIX = 3


class ZipEntries:
    """The entries of a zip in a file that can be read anywhere. Raises UsageError where it is no
    zip."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._zip = zipfile.ZipFile(file)
        except _BROKEN as error:
            raise UsageError(f"the input is no zip: {error}") from error

    def close(self) -> None:
        self._zip.close()

    def take_all(self, taker: MemberTaker) -> str:
        """Take all entries; returns why reading broke off, or the empty string. Raises
        DieselError."""
        path, work = b"", taker.work
        try:
            for number, info in enumerate(sorted(self._zip.infolist(), key=_place)):
                path = member_path(_name(info))
                if info.flag_bits & _ENCRYPTED:
                    work.report.fail(path, "skipped: it is encrypted")
                    continue
                try:
                    member, content = self._member(info), partial(self._zip.open, info)
                    taker.take(path, member, _mtime_ns(info), content)  # type: ignore[arg-type]  # a ZipExtFile reads bytes
                except NotImplementedError as error:
                    work.report.fail(path, f"skipped: {error} (method {info.compress_type})")
                if number % _PROGRESS_ENTRIES == 0:
                    work.progress(work.report)
        except _BROKEN as error:
            return f"the zip is damaged or cut off, after {shown(path)}: {error}"
        return ""

    def _member(self, info: zipfile.ZipInfo) -> tarfile.TarInfo:
        member = tarfile.TarInfo()
        mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
        member.size = info.file_size
        if info.filename.endswith("/"):
            member.type, member.size = tarfile.DIRTYPE, 0
            member.mode = stat.S_IMODE(mode) if mode else 0o755
        elif stat.S_ISLNK(mode):
            if info.file_size > _LINK_BYTES_MAX:
                raise zipfile.BadZipFile(f"a link's target of {info.file_size} bytes")
            target = self._zip.read(info)
            member.type, member.mode = tarfile.SYMTYPE, 0o777
            member.linkname = target.decode("utf-8", "surrogateescape")
        elif mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            member.type = tarfile.FIFOTYPE  # of no kind that a dataset has
        else:
            member.mode = stat.S_IMODE(mode) if mode else 0o644
        return member


def _place(info: zipfile.ZipInfo) -> int:
    return info.header_offset


def _name(info: zipfile.ZipInfo) -> bytes:
    """The name as bytes; `zipfile` has decoded it."""
    if info.flag_bits & _UTF8:
        return info.filename.encode("utf-8", "surrogateescape")
    raw = info.filename.encode("cp437", "surrogateescape")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return info.filename.encode("utf-8", "surrogateescape")
    return raw


def _mtime_ns(info: zipfile.ZipInfo) -> int:
    """The mtime of an entry."""
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
