"""Reading entries out of one generation of a dataset in Redis, few or all of them, as columns.

Owned here: which keys are asked, in replies of bounded size, and how packed entries become `Rows`.
Not owned: whether the generation is still the dataset's and nothing moved meanwhile (the caller
asks before and after). Nothing is remembered, so nothing can be stale.

What takes several pages proves itself: a cursor means nothing to a Redis that has been restarted or
has taken the slot over, and that one goes on somewhere. As many different names as the whole has,
all of them of a state that has not moved, are the whole; fewer are `PartialScan`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import TypeVar

import numpy as np

from diesel_fs.format.entries import EXTENT, RECORD, ROOT, ChunkId, Kind, Rows, join
from diesel_fs.storage.metadata.redis.keys import (
    EXTENDED_BYTES,
    FOLDER_BYTES,
    PLAIN_BYTES,
    ROOT_FOLDER,
    FolderId,
    Generation,
    check_entry,
    child_folder,
)
from diesel_fs.storage.metadata.redis.link import Command, RedisLink
from diesel_fs.storage.metadata.redis.replies import (
    corrupt_store_error,
    listed,
    number,
    octets,
    packed_dict,
    pair,
)

FolderEntries = tuple[bytes, Sequence[bytes], Sequence[bytes]]
"""The path of a folder, names in it, and their packed entries."""

_FOLDERS_AT_ONCE = 64
_SCAN_ROWS = 32_768  # of all folders that are asked at once
_NAMES_AT_ONCE = 1000
_COMMANDS_AT_ONCE = 1000
"""A reply is of megabytes at most, whatever a folder holds."""

_START = b"0"
"""The cursor with which a scan begins, and ends."""

_EXTENTS_AT = 40
_KIND_AT = 34
_DEAD = int(Kind.TOMBSTONE)

T = TypeVar("T")


class PartialScan(Exception):
    """What was read in several pages is not all there is."""


def implied_entry() -> bytes:
    """The entry of a folder that has none."""
    record = np.zeros(1, RECORD)
    record["kind"], record["mode"] = Kind.FOLDER, 0o755
    return record.tobytes() + bytes(16)


def kind_of(entry: bytes) -> int:
    """What a packed entry is, a `Kind`."""
    return check_entry(entry)[_KIND_AT]


def chunks_of(entry: bytes) -> list[bytes]:
    """The chunks that hold an entry, one for each extent."""
    if (
        len(entry) <= EXTENDED_BYTES
        or int.from_bytes(entry[_EXTENTS_AT : _EXTENTS_AT + 4], "little") <= 1
    ):
        return [entry[48:64]]
    starts = range(EXTENDED_BYTES, len(entry), EXTENT.itemsize)
    return [entry[at : at + 16] for at in starts]


class GenerationReader:
    """What can be asked of one generation; `at_each_page` is called now and then meanwhile."""

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
        """The entries of these names, of those that exist, in no order."""
        pieces = (
            (folder, names[start : start + _NAMES_AT_ONCE])
            for folder, names in wanted.items()
            for start in range(0, len(names), _NAMES_AT_ONCE)
        )
        for some in _in_portions(pieces, _FOLDERS_AT_ONCE):
            self._at_each_page()
            commands = [self._of_folder(folder, "HMGET", *names) for folder, names in some]
            for (folder, names), reply in zip(some, self._link.run(commands), strict=True):
                for name, entry in zip(names, listed(reply), strict=True):
                    if isinstance(entry, bytes):
                        yield folder, name, check_entry(entry)

    def folders(self) -> dict[FolderId, tuple[FolderId, bytes]]:
        """All folders: the parent of each, and its name."""
        keys = [self._generation.key(bucket, b"f") for bucket in range(self._generation.buckets)]
        found: dict[FolderId, tuple[FolderId, bytes]] = {}
        for _, page in self._scan(keys):
            found |= {FolderId(folder): _unpack_place(place) for folder, place in page.items()}
        return found

    def paths(self, folders: Iterable[FolderId]) -> dict[FolderId, bytes]:
        """The paths of these folders."""
        places: dict[FolderId, tuple[FolderId, bytes]] = {}
        asked = [*dict.fromkeys(folders)]
        wanted = asked
        while wanted:
            above = dict[FolderId, None]()
            for some in _in_portions(iter(wanted), _COMMANDS_AT_ONCE):
                commands = []
                for folder in some:
                    key = self._generation.of_folders(folder, b"f")
                    commands.append(Command(key, ("HGET", key, folder)))
                for folder, reply in zip(some, self._link.run(commands), strict=True):
                    places[folder] = _unpack_place(reply)
                    if folder != ROOT_FOLDER:
                        above[places[folder][0]] = None
            wanted = [folder for folder in above if folder not in places]
        return folder_paths(places, asked)

    def everything(self) -> Iterator[FolderEntries]:
        """All entries but tombstones, folder by folder."""
        places = self.folders()
        paths = folder_paths(places, places)
        for some in _in_portions(iter(sorted(paths, key=paths.__getitem__)), _FOLDERS_AT_ONCE):
            keys = {self._generation.entries(folder): paths[folder] for folder in some}
            in_pages: dict[bytes, dict[bytes, bytes]] = {}
            for key, page in self._scan([*keys]):
                in_pages.setdefault(key, {}).update(page)
            for key, rows in in_pages.items():
                if rows:
                    yield (keys[key], *_alive([*rows], [*rows.values()]))

    def children(self, folder: FolderId) -> dict[bytes, bytes]:
        """The entries of a folder, tombstones too, and those of implied folders."""
        rows: dict[bytes, bytes] = {}
        for _, page in self._scan([self._generation.entries(folder)]):
            rows |= page
        rows.pop(b"", None)
        doubtful = []
        for name in self._below([folder])[0]:
            if name not in rows or kind_of(rows[name]) != Kind.FOLDER:
                doubtful.append(name)
        alive = self._alive([child_folder(folder, name) for name in doubtful])
        implied = implied_entry()
        return rows | dict.fromkeys(compress(doubtful, alive), implied)

    def _alive(self, folders: Sequence[FolderId]) -> list[bool]:
        """Of each folder, whether anything but tombstones lies in it, however deep."""
        alive = [False] * len(folders)
        level = list(enumerate(folders))
        while level:
            empty = list[tuple[int, FolderId]]()
            for some in _in_portions(iter(level), _COMMANDS_AT_ONCE):
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
        """Of each folder, the names of those below."""
        found: list[dict[bytes, None]] = [{} for _ in folders]
        left = [(i, _START) for i in range(len(folders))]
        while left:
            following = []
            for some in _in_portions(iter(left), _COMMANDS_AT_ONCE):
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
        """The fields of hashes, in pages. While a hash table grows or shrinks, a name may come
        twice."""
        left = [(key, _START) for key in keys]
        names = dict[bytes, set[bytes]]()  # of those that take more than a page
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
        """A page of each key, from a cursor on: the next cursor, what is in it, and how much the
        whole has, which a first page need not know."""
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
        """A hash, in pages."""
        return (page for _, page in self._scan([key]))

    def _of_folder(self, folder: FolderId, word: str, *names: bytes) -> Command:
        key = self._generation.entries(folder)
        return Command(key, (word, key, *names))


def folder_paths(
    places: Mapping[FolderId, tuple[FolderId, bytes]], wanted: Iterable[FolderId]
) -> dict[FolderId, bytes]:
    """The paths of folders, of which parents and names are known up to the root."""
    paths = {ROOT_FOLDER: ROOT}
    found = {}
    for folder in wanted:
        names, at = list[tuple[FolderId, bytes]](), folder
        while at not in paths:
            if at not in places or len(names) > len(places):
                raise corrupt_store_error("a folder without a parent")
            names.append((at, places[at][1]))
            at = places[at][0]
        path = paths[at]
        for above, name in reversed(names):
            path = paths[above] = join(path, name)
        found[folder] = path
    return found


def columns(found: Iterable[FolderEntries], chunks: Sequence[ChunkId] | None = None) -> Rows:
    """Packed entries as columns; `chunks` are those of the dataset, else those that are named."""
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
    # As NumPy compares them, trailing zeros do not count; of equal length they need not.
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


def _alive(names: list[bytes], entries: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Without tombstones."""
    if entries and min(map(len, entries)) < PLAIN_BYTES:
        raise corrupt_store_error("an entry of another length")
    if all(entry[_KIND_AT] != _DEAD for entry in entries):
        return names, entries
    keep = [entry[_KIND_AT] != _DEAD for entry in entries]
    return list(compress(names, keep)), list(compress(entries, keep))


def _cursor(reply: object) -> bytes:
    packed = b"%d" % reply if isinstance(reply, int) else octets(reply)
    if not packed.isdigit():
        raise corrupt_store_error("something else where a cursor should be")
    return packed


def _in_portions(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while portion := list(islice(items, size)):
        yield portion


def _unpack_place(reply: object) -> tuple[FolderId, bytes]:
    if not isinstance(reply, bytes) or len(reply) < FOLDER_BYTES:
        raise corrupt_store_error("a folder without a parent")
    return FolderId(reply[:FOLDER_BYTES]), reply[FOLDER_BYTES:]
