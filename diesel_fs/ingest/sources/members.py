"""Takes the members of a tar or a zip one by one: refuses, compares and packs them. One thread.

A `tarfile.TarInfo` describes a member of any archive. If several members have one name, the last
counts. The report names refused members. At the end, hard links become files: their targets are
copied from the dataset, since an archive is read only once.
"""

import io
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast

from ...cache.readers.entry_file import EntryFile
from ...cache.readers.entry_reader import EntryReader
from ...format.entries import MODE_MASK, NAME_BYTES_MAX, Kind, Names, Stat, join, path_fault, split
from ...format.snapshot.reader import Snapshot, same_content
from ...names import shown
from ..compare import Comparer
from ..packer import FILE_BYTES_MAX, Packer
from ..paths import RESERVED_NAME, is_reserved, refusal_reason, source_path, target_path
from ..put import PutWork

READ_BYTES = 1 << 20
_SPOOL_BYTES = 64 << 20  # with --checksum, longer contents are spooled to disk
_LINK_MEMORY_BYTES = 256 << 20  # for chunks with hard links' targets

OpenContent = Callable[[], BinaryIO]
"""Opens a member's content; is called before the next member is taken."""


class MemberLog:
    """Notes nothing; subclasses note the members of an archive as they are taken."""

    def add_files(self, prefix: bytes, names: Sequence[bytes]) -> None:
        """The path of each, below the archive's root, is `prefix` and a name."""

    def add_other(self, path: bytes, *, is_link: bool) -> None:
        """A link or a folder; `path` is below the archive's root."""

    def add_unchanged(self, index: int) -> None:
        """The dataset has the last added member already, at this index of its view."""


@dataclass(slots=True)
class FolderFiles:
    """`prefix` is the folder's name in the archive, with a slash at its end."""

    prefix: bytes
    names: list[bytes]
    modes: list[int]
    mtimes_ns: list[int]
    contents: list[memoryview]


class MemberTaker:
    """Without a packer (in a dry run), members are only counted."""

    def __init__(
        self,
        work: PutWork,
        comparer: Comparer,
        packer: Packer | None,
        log: MemberLog | None = None,
    ) -> None:
        self.work = work
        self._comparer = comparer
        self._packer = packer
        self._log = log or MemberLog()
        # By path: target, mode, mtime_ns
        self._hard_links: dict[bytes, tuple[bytes, int, int]] = {}

    @property
    def has_hard_links(self) -> bool:
        return bool(self._hard_links)

    def take_files(self, files: FolderFiles) -> None:
        """Put all files at once if the folder is empty in the dataset, else one by one."""
        folder = self._empty_target_folder(files)
        if folder is not None and max(map(len, files.contents)) <= self._extent_bytes:
            self.work.report.entries_found += len(files.names)
            self._log.add_files(_name(files.prefix), files.names)
            if self._packer is not None:
                self._packer.add_contents(
                    folder, files.names, files.modes, files.mtimes_ns, files.contents
                )
            return
        for name, mode, mtime_ns, content in zip(
            files.names, files.modes, files.mtimes_ns, files.contents, strict=True
        ):
            member = tarfile.TarInfo()
            member.mode, member.size = mode, len(content)
            path = member_path(files.prefix + name)
            self.take(path, member, mtime_ns, partial(io.BytesIO, content))

    def take(
        self, path: bytes, member: tarfile.TarInfo, mtime_ns: int | None, content_of: OpenContent
    ) -> None:
        """Put a member, or name it in the report. `path` is relative to the source; `mtime_ns` is
        None if it cannot be stored."""
        report, comparer = self.work.report, self._comparer
        target = target_path(self.work.target, path)
        if reason := _refusal(member, path, target):
            report.fail(path, reason)
            return
        if mtime_ns is None:
            report.fail(path, "refused: its mtime cannot be stored")
            return
        if self.work.path_filter.excludes(path, is_folder=member.isdir()):
            return
        index = comparer.find(target)
        if self._hard_links:
            self._hard_links.pop(target, None)
        if member.isreg():
            entry = Stat(Kind.FILE, member.mode & MODE_MASK, member.size, mtime_ns)
        elif member.isdir():
            entry = Stat(Kind.FOLDER, member.mode & MODE_MASK, 0, mtime_ns)
        elif member.issym():
            size = len(encoded(member.linkname))
            entry = Stat(Kind.LINK, MODE_MASK, size, mtime_ns)
        elif member.islnk():
            entry = Stat(Kind.FILE, member.mode & MODE_MASK, 0, mtime_ns)
        else:
            report.fail(path, "skipped: a pipe, device or unknown kind")
            return
        if reason := comparer.conflict_reason(target, index, entry.kind):
            report.fail(path, reason)
            return
        if entry.kind == Kind.FILE:
            self._log.add_files(b"", [path])
        else:
            self._log.add_other(path, is_link=entry.kind == Kind.LINK)
        if member.islnk():
            self._take_hard_link(member, path, target, entry)
        else:
            self._put(member, target, index, entry, content_of)

    def copy_hard_links(self, view: Snapshot) -> None:
        """Put hard links as files. `view` is the dataset with all entries packed before."""
        assert self._packer is not None
        repository, report = self.work.repository, self.work.report
        reader = EntryReader(view, repository.objects, _LINK_MEMORY_BYTES)
        failed = {path for path, _ in report.failed}
        origins = hard_link_origins(
            {path: origin for path, (origin, _, _) in self._hard_links.items()}
        )
        for path, (_, mode, mtime_ns) in self._hard_links.items():
            origin = origins[path]
            source, index = view.lookup(origin), view.lookup(path)
            below = source_path(self.work.target, origin)
            if source < 0 or view.stat(source).kind != Kind.FILE or below in failed:
                report.fail(
                    source_path(self.work.target, path),
                    f"a hard link to {shown(below)}, which is not there",
                )
                continue
            size = view.stat(source).size
            if (
                index >= 0
                and view.stat(index) == Stat(Kind.FILE, mode, size, mtime_ns)
                and _checksums(view, index) == _checksums(view, source)
            ):
                report.entries_found -= 1
                report.unchanged += 1
                before = self._comparer.view.lookup(path)
                if before >= 0:
                    self._log.add_unchanged(before)
                continue
            content = io.BufferedReader(EntryFile(reader, source), READ_BYTES)
            self._packer.add_stream(content, size, split(path), mode, mtime_ns)
            report.hard_links += 1
        self._packer.finish()
        self._hard_links.clear()

    @property
    def _extent_bytes(self) -> int:
        return self._packer.extent_bytes if self._packer else FILE_BYTES_MAX

    def _empty_target_folder(self, files: FolderFiles) -> bytes | None:
        """The files' folder in the dataset; None if it is not empty, a name is not allowed, or each
        file must be checked by itself."""
        if self._hard_links or not self.work.path_filter.includes_all:
            return None
        prefix = files.prefix
        while prefix.startswith(b"./"):
            prefix = prefix[2:]
        folder = target_path(self.work.target, prefix[:-1])
        if prefix.startswith(b"/") or not Names.of(files.names).are_allowed():
            return None
        if path_fault(join(folder, b"n" * NAME_BYTES_MAX)):  # a path in it may be too long
            return None
        if is_reserved(folder) or (not folder and RESERVED_NAME in files.names):
            return None
        return folder if self._comparer.accepts_any_file(folder) else None

    def _put(
        self,
        member: tarfile.TarInfo,
        target: bytes,
        index: int,
        entry: Stat,
        content_of: OpenContent,
    ) -> None:
        """Put a member, unless the dataset has an equal entry at `index`. `entry` has only the mode
        bits that a dataset keeps."""
        link = encoded(member.linkname) if entry.kind == Kind.LINK else b""
        content: BinaryIO = io.BytesIO()
        if entry.size and entry.kind == Kind.FILE:
            content = content_of()
        to_pack = entry._replace(mode=member.mode)  # the packer counts the bits that it drops
        same = self._comparer.unchanged(index, entry, link)
        if same and self.work.options.checksum and entry.kind == Kind.FILE:
            with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
                shutil.copyfileobj(content, spool, READ_BYTES)
                spool.seek(0)
                extents = self._comparer.view.extents(index)
                same = same_content(extents, partial(_read_at, cast("BinaryIO", spool)))
                spool.seek(0)
                if not same:
                    self._pack(target, index, to_pack, cast("BinaryIO", spool), link)
                    return
        if same:
            self.work.report.unchanged += 1
            self._log.add_unchanged(index)
        else:
            self._pack(target, index, to_pack, content, link)

    def _pack(self, target: bytes, index: int, entry: Stat, content: BinaryIO, link: bytes) -> None:
        self.work.report.entries_found += 1
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
        """`copy_hard_links` puts the link after the archive has been read."""
        origin = member_path(encoded(member.linkname))
        if not origin or path_fault(origin):
            self.work.report.fail(path, f"refused: a hard link to {shown(origin)}")
            return
        self.work.report.entries_found += 1
        self._hard_links[target] = join(self.work.target, origin), entry.mode, entry.mtime_ns


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def member_path(name: bytes) -> bytes:
    """A path without `./` before it or a slash at its end; empty for the root. `/` stays."""
    while name.startswith(b"./"):
        name = name[2:]
    return b"" if name == b"." else name.rstrip(b"/") if len(name) > 1 else name


def hard_link_origins(links: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """By path, the file at the end of each link's chain; for a ring, any of its members. `links`
    maps each link to its target."""
    origins: dict[bytes, bytes] = {}
    for path in links:
        chain: dict[bytes, None] = {}
        while path in links and path not in origins and path not in chain:
            chain[path] = None
            path = links[path]
        origins |= dict.fromkeys(chain, origins.get(path, path))
    return origins


def _name(prefix: bytes) -> bytes:
    """The path with a slash at its end, to be put before names; empty for the root."""
    path = member_path(prefix)
    return path + b"/" if path else b""


def _refusal(member: tarfile.TarInfo, path: bytes, target: bytes) -> str:
    """Empty if the member can be put."""
    if path.startswith(b"/"):
        return "refused: an absolute name"
    if reason := refusal_reason(target):
        return reason
    if not target and not member.isdir():
        return "refused: a dataset's root is a folder"
    if not 0 <= member.size <= FILE_BYTES_MAX:
        return f"refused: a file of {member.size} bytes"
    if member.issym() and (not member.linkname or "\0" in member.linkname):
        return "refused: a link to nothing"
    return ""


def _read_at(content: BinaryIO, size: int, start: int) -> bytes:
    content.seek(start)
    return content.read(size)


def _checksums(view: Snapshot, index: int) -> list[tuple[int, int]]:
    return [(extent.size, extent.checksum) for extent in view.extents(index)]
