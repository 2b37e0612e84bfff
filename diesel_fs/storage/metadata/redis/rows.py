"""Reads entries of one generation of a dataset in Redis, and turns them into columns.

Every reply has a bounded size, so large hashes are scanned in pages. The cursor of a scan is valid
only for the server that gave it: a Redis that was restarted, or that has taken over the slot,
continues at another position without an error. So a scan of several pages is checked: it has to
yield as many different names as the hash has, or PartialScan is raised. The caller checks, before
and after, that the generation is still the dataset's and its version has not changed. Nothing is
cached, so nothing can be stale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress

import numpy as np

from ....format.entries import EXTENT, RECORD, ROOT, ChunkId, Kind, Rows, join
from ..store import KIND_AT, corrupt_store_error, implied_record
from .keys import (
    EXTENDED_BYTES,
    FOLDER_BYTES,
    PLAIN_BYTES,
    ROOT_FOLDER,
    FolderId,
    Generation,
    check_entry,
    child_folder,
)
from .link import Command, RedisLink, in_portions
from .replies import listed, number, octets, packed_dict, pair

FolderEntries = tuple[bytes, Sequence[bytes], Sequence[bytes]]
"""The path of a folder, names in it, and their packed entries."""

# The replies to one pipeline take some megabytes at most, however large a folder is
_FOLDERS_AT_ONCE = 64
_SCAN_ROWS = 32_768  # of all folders that are scanned at once
_NAMES_AT_ONCE = 1000
_COMMANDS_AT_ONCE = 1000

_START = b"0"
"""The cursor with which a scan begins, and that Redis returns at its end."""

_EXTENTS_AT = 40
_DEAD = int(Kind.TOMBSTONE)


class PartialScan(Exception):
    """A scan in several pages has missed something."""


def kind_of(entry: bytes) -> int:
    """The `Kind` of a packed entry."""
    return check_entry(entry)[KIND_AT]


def chunks_of(entry: bytes) -> list[bytes]:
    """The chunks that hold a packed entry, one for each extent."""
    if (
        len(entry) <= EXTENDED_BYTES
        or int.from_bytes(entry[_EXTENTS_AT : _EXTENTS_AT + 4], "little") <= 1
    ):
        return [entry[48:64]]
    starts = range(EXTENDED_BYTES, len(entry), EXTENT.itemsize)
    return [entry[at : at + 16] for at in starts]


class GenerationReader:
    """Reads one generation; long reads call `at_each_page` again and again."""

    def __init__(
        self,
        link: RedisLink,
        generation: Generation,
        at_each_page: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self._generation = generation
        self._at_each_page = at_each_page

    def entries(
        self, wanted: Mapping[FolderId, Sequence[bytes]]
    ) -> Iterator[tuple[FolderId, bytes, bytes]]:
        """Folder, name and packed entry, for those of the names that exist, in no order."""
        pieces = (
            (folder, names[start : start + _NAMES_AT_ONCE])
            for folder, names in wanted.items()
            for start in range(0, len(names), _NAMES_AT_ONCE)
        )
        for some in in_portions(pieces, _FOLDERS_AT_ONCE):
            self._at_each_page()
            commands = [self._of_folder(folder, "HMGET", *names) for folder, names in some]
            for (folder, names), reply in zip(some, self._link.run(commands), strict=True):
                for name, entry in zip(names, listed(reply), strict=True):
                    if isinstance(entry, bytes):
                        yield folder, name, check_entry(entry)

    def folders(self) -> dict[FolderId, tuple[FolderId, bytes]]:
        """The parent and the name of every folder."""
        keys = [self._generation.key(bucket, b"f") for bucket in range(self._generation.buckets)]
        found: dict[FolderId, tuple[FolderId, bytes]] = {}
        for _, page in self._scan(keys):
            found |= {FolderId(folder): _unpack_parent(packed) for folder, packed in page.items()}
        return found

    def paths(self, folders: Iterable[FolderId]) -> dict[FolderId, bytes]:
        """The paths of these folders."""
        parents: dict[FolderId, tuple[FolderId, bytes]] = {}
        asked = [*dict.fromkeys(folders)]
        wanted = asked
        while wanted:
            above = dict[FolderId, None]()
            for some in in_portions(wanted, _COMMANDS_AT_ONCE):
                commands = []
                for folder in some:
                    key = self._generation.of_folders(folder, b"f")
                    commands.append(Command(key, ("HGET", key, folder)))
                for folder, reply in zip(some, self._link.run(commands), strict=True):
                    parents[folder] = _unpack_parent(reply)
                    if folder != ROOT_FOLDER:
                        above[parents[folder][0]] = None
            wanted = [folder for folder in above if folder not in parents]
        return folder_paths(parents, asked)

    def everything(self) -> Iterator[FolderEntries]:
        """All entries except tombstones, folder by folder."""
        parents = self.folders()
        paths = folder_paths(parents, parents)
        for some in in_portions(sorted(paths, key=paths.__getitem__), _FOLDERS_AT_ONCE):
            keys = {self._generation.entries(folder): paths[folder] for folder in some}
            in_pages: dict[bytes, dict[bytes, bytes]] = {}
            for key, page in self._scan([*keys]):
                in_pages.setdefault(key, {}).update(page)
            for key, rows in in_pages.items():
                if rows:
                    yield (keys[key], *_without_tombstones([*rows], [*rows.values()]))

    def children(self, folder: FolderId) -> dict[bytes, bytes]:
        """Names and packed entries in a folder, with tombstones and implied folders."""
        rows: dict[bytes, bytes] = {}
        for _, page in self._scan([self._generation.entries(folder)]):
            rows |= page
        rows.pop(b"", None)
        perhaps_implied = []
        for name in self._below([folder])[0]:
            if name not in rows or kind_of(rows[name]) != Kind.FOLDER:
                perhaps_implied.append(name)
        alive = self._alive([child_folder(folder, name) for name in perhaps_implied])
        entry = implied_record() + bytes(16)
        return rows | dict.fromkeys(compress(perhaps_implied, alive), entry)

    def _alive(self, folders: Sequence[FolderId]) -> list[bool]:
        """For each folder, whether anything but tombstones lies in it, at any depth."""
        alive = [False] * len(folders)
        level = list(enumerate(folders))
        while level:
            empty = list[tuple[int, FolderId]]()
            for some in in_portions(level, _COMMANDS_AT_ONCE):
                commands = []
                for _, folder in some:
                    commands.append(self._of_folder(folder, "HLEN"))
                    dead = self._generation.of_folders(folder, b"d")
                    commands.append(Command(dead, ("HGET", dead, folder)))
                replies = self._link.run(commands)
                for (i, folder), there, dead_there in zip(
                    some, replies[::2], replies[1::2], strict=True
                ):
                    if number(there) > number(dead_there):
                        alive[i] = True
                    else:
                        empty.append((i, folder))
            left = [(i, folder) for i, folder in empty if not alive[i]]
            below = self._below([folder for _, folder in left])
            level = [
                (i, child_folder(folder, name))
                for (i, folder), names in zip(left, below, strict=True)
                for name in names
            ]
        return alive

    def _below(self, folders: Sequence[FolderId]) -> list[list[bytes]]:
        """For each folder, the names of the folders in it."""
        found: list[dict[bytes, None]] = [{} for _ in folders]
        left = [(i, _START) for i in range(len(folders))]
        while left:
            following = []
            for some in in_portions(left, _COMMANDS_AT_ONCE):
                self._at_each_page()
                keyed = [(self._generation.below(folders[i]), cursor) for i, cursor in some]
                rows = max(1, _SCAN_ROWS // len(some))
                pages = self._pages(keyed, "SSCAN", "SCARD", rows)
                for (i, _), (cursor, names, count) in zip(some, pages, strict=True):
                    found[i].update(dict.fromkeys(map(octets, listed(names))))
                    if cursor != _START:
                        following.append((i, cursor))
                    elif count is not None and len(found[i]) != count:
                        raise PartialScan
            left = following
        return [[*names] for names in found]

    def _scan(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        """The fields and values of hashes, in pages: key and page. A name may come twice, while
        Redis resizes the hash. Raises PartialScan.
        """
        left = [(key, _START) for key in keys]
        names = dict[bytes, set[bytes]]()  # of hashes of more than one page
        while left:
            self._at_each_page()
            some, left = left[:_FOLDERS_AT_ONCE], left[_FOLDERS_AT_ONCE:]
            pages = self._pages(some, "HSCAN", "HLEN", _SCAN_ROWS // len(some))
            for (key, _), (cursor, reply, count) in zip(some, pages, strict=True):
                page = packed_dict(reply)
                if cursor != _START or count is not None:
                    names.setdefault(key, set()).update(page)
                yield key, page
                if cursor != _START:
                    left.append((key, cursor))
                elif count is not None and len(names.pop(key)) != count:
                    raise PartialScan

    def _pages(
        self, some: Sequence[tuple[bytes, bytes]], scan: str, size: str, rows: int
    ) -> Iterator[tuple[bytes, object, int | None]]:
        """One page for each key and cursor: the next cursor, the page, and the size of the whole
        hash or set (None for a first page).
        """
        commands = []
        for key, cursor in some:
            commands.append(Command(key, (scan, key, cursor, "COUNT", rows)))
            if cursor != _START:
                commands.append(Command(key, (size, key)))
        replies = iter(self._link.run(commands))
        for _, cursor in some:
            after, page = pair(next(replies))
            count = number(next(replies)) if cursor != _START else None
            yield _cursor(after), page, count

    def hash_pages(self, bucket: int, what: bytes) -> Iterator[dict[bytes, bytes]]:
        """One of a bucket's own hashes, in pages."""
        return self.pages_of(self._generation.key(bucket, what))

    def pages_of(self, key: bytes) -> Iterator[dict[bytes, bytes]]:
        """The fields and values of a hash, in pages."""
        return (page for _, page in self._scan([key]))

    def _of_folder(self, folder: FolderId, word: str, *names: bytes) -> Command:
        key = self._generation.entries(folder)
        return Command(key, (word, key, *names))


def folder_paths(
    parents: Mapping[FolderId, tuple[FolderId, bytes]], wanted: Iterable[FolderId]
) -> dict[FolderId, bytes]:
    """The paths of folders. `parents` has the parent and the name of each and of all above them."""
    paths = {ROOT_FOLDER: ROOT}
    found = {}
    for folder in wanted:
        names, at = list[tuple[FolderId, bytes]](), folder
        while at not in paths:
            if at not in parents or len(names) > len(parents):
                raise corrupt_store_error("a folder without a parent")
            names.append((at, parents[at][1]))
            at = parents[at][0]
        path = paths[at]
        for above, name in reversed(names):
            path = paths[above] = join(path, name)
        found[folder] = path
    return found


def columns(found: Iterable[FolderEntries], chunks: Sequence[ChunkId] | None = None) -> Rows:
    """Turn packed entries into columns. `chunks` becomes the table of chunks; without it the table
    has only those that hold the entries.
    """
    folders: dict[bytes, int] = {}
    folder, counts, names = list[int](), list[int](), list[bytes]()
    heads: list[bytes] = []
    tails: dict[int, bytes] = {}
    for path, some, entries in found:
        if len(some) != len(entries):
            raise corrupt_store_error("names without entries")
        folder.append(folders.setdefault(path, len(folders)))
        counts.append(len(some))
        joined = b"".join(entries)
        if len(joined) != PLAIN_BYTES * len(entries):
            for entry in entries:
                check_entry(entry)
            for i, entry in enumerate(entries, len(names)):
                if len(entry) > EXTENDED_BYTES:
                    tails[i] = entry[EXTENDED_BYTES:]
            joined = b"".join([entry[:PLAIN_BYTES] for entry in entries])
        names += some
        heads.append(joined)
    packed = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, PLAIN_BYTES)
    if len(packed) != len(names):
        raise corrupt_store_error("an entry of another length")
    records = np.ascontiguousarray(packed[:, : RECORD.itemsize]).view(RECORD).reshape(-1)
    ids = np.ascontiguousarray(packed[:, RECORD.itemsize :]).view("S16").reshape(-1)
    # NumPy ignores trailing zeros when it compares them: all have the same length, so this is safe
    table = np.unique(ids) if chunks is None else np.sort(np.array(chunks, "S16"))
    chunk = np.searchsorted(table, ids).astype(np.uint32)
    if len(ids) and (chunk.max() >= len(table) or (table[chunk] != ids).any()):
        raise corrupt_store_error("an entry without a chunk")
    return Rows(
        folders=list(folders),
        folder=np.repeat(np.array(folder, np.uint32), counts),
        names=names,
        records=records,
        chunk=chunk,
        chunks=[ChunkId(each.ljust(16, b"\0")) for each in table.tolist()],
        tails=tails,
    )


def _without_tombstones(
    names: list[bytes], entries: list[bytes]
) -> tuple[list[bytes], list[bytes]]:
    if entries and min(map(len, entries)) < PLAIN_BYTES:
        raise corrupt_store_error("an entry of another length")
    keep = [entry[KIND_AT] != _DEAD for entry in entries]
    if all(keep):
        return names, entries
    return list(compress(names, keep)), list(compress(entries, keep))


def _cursor(reply: object) -> bytes:
    packed = b"%d" % reply if isinstance(reply, int) else octets(reply)
    if not packed.isdigit():
        raise corrupt_store_error("something else where a cursor should be")
    return packed


def _unpack_parent(reply: object) -> tuple[FolderId, bytes]:
    if not isinstance(reply, bytes) or len(reply) < FOLDER_BYTES:
        raise corrupt_store_error("a folder without a parent")
    return FolderId(reply[:FOLDER_BYTES]), reply[FOLDER_BYTES:]
