"""Reads entries of one generation of a dataset in Redis (`keys.py`), and turns them into columns.

Large hashes are scanned in pages. A cursor is valid only for the server that gave it: a Redis that
was restarted, or took over the slot, continues elsewhere without an error. So a scan of several
pages raises PartialScan unless it yields as many different names as the hash has. The caller
checks, before and after, that generation and version are still the dataset's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from ....format.entries import EXTENT, RECORD, ROOT, ChunkId, Kind, Rows, join
from ..store import KIND_AT, corrupt_store_error, implied_record
from .keys import (
    CHUNK_ID_BYTES,
    EXTENDED_BYTES,
    EXTENTS_AT,
    FOLDER_BYTES,
    PLAIN_BYTES,
    ROOT_FOLDER,
    FolderId,
    Generation,
    PieceName,
    check_entry,
    child_folder,
)
from .link import RedisLink, command, in_portions
from .pieces import unpack_paths
from .replies import listed, number, octets, packed_dict, pair

FolderEntries = tuple[bytes, Sequence[bytes], Sequence[bytes]]
"""A folder's path, names in it, and their packed entries."""

# Replies to a pipeline take some megabytes at most
_FOLDERS_AT_ONCE = 64
_SCAN_ROWS = 32_768  # in all folders that are scanned at once
_NAMES_AT_ONCE = 1000
_COMMANDS_AT_ONCE = 1000
_PIECES_AT_ONCE = 500

_START = b"0"
"""Redis returns it at the end of a scan, too."""


class _ScanWords(NamedTuple):
    scan: str
    size: str
    unpack: Callable[[object], dict[bytes, bytes]]


_HASHES = _ScanWords("HSCAN", "HLEN", packed_dict)
_SETS = _ScanWords("SSCAN", "SCARD", lambda reply: dict.fromkeys(map(octets, listed(reply)), b""))


class PartialScan(Exception):
    """A scan in several pages has missed something."""


class GenerationGone(Exception):
    """The generation was removed, or has lost data."""


def kind_of(entry: bytes) -> int:
    return check_entry(entry)[KIND_AT]


def chunks_of(entry: bytes) -> list[bytes]:
    """The ID of the chunk that holds each extent of an entry."""
    extents = int.from_bytes(entry[EXTENTS_AT : EXTENTS_AT + 4], "little")
    if len(entry) <= EXTENDED_BYTES or extents <= 1:
        return [entry[RECORD.itemsize : PLAIN_BYTES]]
    starts = range(EXTENDED_BYTES, len(entry), EXTENT.itemsize)  # an `EXTENT` begins with its chunk
    return [entry[at : at + CHUNK_ID_BYTES] for at in starts]


class GenerationReader:
    """`at_each_page` is called before each pipeline of a long read, to extend a deadline and a
    lock."""

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
        """Folder, name and packed entry for each of the wanted names that exists, in no order."""
        portions = (
            (folder, names)
            for folder, all_names in wanted.items()
            for names in in_portions(all_names, _NAMES_AT_ONCE)
        )
        for portion in in_portions(portions, _FOLDERS_AT_ONCE):
            self._at_each_page()
            replies = self._link.run(
                [
                    command("HMGET", self._generation.entries(folder), *names)
                    for folder, names in portion
                ]
            )
            for (folder, names), reply in zip(portion, replies, strict=True):
                for name, entry in zip(names, listed(reply), strict=True):
                    if isinstance(entry, bytes):
                        yield folder, name, check_entry(entry)

    def names_of_pieces(
        self, pieces: Iterable[PieceName]
    ) -> Iterator[tuple[PieceName, dict[FolderId, list[bytes]]]]:
        """Names in each applied piece, by folder, each once. Raises GenerationGone."""
        for portion in in_portions(pieces, _PIECES_AT_ONCE):
            self._at_each_page()
            replies = self._link.run(
                [
                    command("HGET", self._generation.key(piece.bucket, b"n"), piece.field)
                    for piece in portion
                ]
            )
            for piece, reply in zip(portion, replies, strict=True):
                if not isinstance(reply, bytes):
                    raise GenerationGone
                found: dict[FolderId, dict[bytes, None]] = {}
                for folder, names in unpack_paths(reply):
                    found.setdefault(folder, {}).update(dict.fromkeys(names))
                yield piece, {folder: [*names] for folder, names in found.items()}

    def folders(self) -> dict[FolderId, tuple[FolderId, bytes]]:
        keys = [self._generation.key(bucket, b"f") for bucket in range(self._generation.buckets)]
        found: dict[FolderId, tuple[FolderId, bytes]] = {}
        for _, page in self._scan(keys):
            found |= {FolderId(folder): _unpack_parent(packed) for folder, packed in page.items()}
        return found

    def paths(self, folders: Iterable[FolderId]) -> dict[FolderId, bytes]:
        parents: dict[FolderId, tuple[FolderId, bytes]] = {}
        wanted = [*dict.fromkeys(folders)]
        level: Sequence[FolderId] = wanted  # then their parents, and so on
        while level:
            above = dict[FolderId, None]()
            for portion in in_portions(level, _COMMANDS_AT_ONCE):
                commands = [
                    command("HGET", self._generation.key(folder, b"f"), folder)
                    for folder in portion
                ]
                for folder, reply in zip(portion, self._link.run(commands), strict=True):
                    parents[folder] = _unpack_parent(reply)
                    if folder != ROOT_FOLDER:
                        above[parents[folder][0]] = None
            level = [folder for folder in above if folder not in parents]
        return folder_paths(parents, wanted)

    def everything(self) -> Iterator[FolderEntries]:
        """All entries but tombstones, folder by folder."""
        parents = self.folders()
        paths = folder_paths(parents, parents)
        for portion in in_portions(sorted(paths, key=paths.__getitem__), _FOLDERS_AT_ONCE):
            keys = {self._generation.entries(folder): paths[folder] for folder in portion}
            entries_of: dict[bytes, dict[bytes, bytes]] = {}
            for key, page in self._scan([*keys]):
                entries_of.setdefault(key, {}).update(page)
            for key, entries in entries_of.items():
                if entries:
                    yield (keys[key], *_without_tombstones([*entries], [*entries.values()]))

    def children(self, folder: FolderId) -> dict[bytes, bytes]:
        """With tombstones and implied folders."""
        entries: dict[bytes, bytes] = {}
        for _, page in self._scan([self._generation.entries(folder)]):
            entries |= page
        entries.pop(b"", None)  # the root's own entry
        perhaps_implied = [
            name
            for name in self._subfolders([folder])[0]
            if name not in entries or kind_of(entries[name]) != Kind.FOLDER
        ]
        alive = self._are_alive([child_folder(folder, name) for name in perhaps_implied])
        implied = implied_record() + bytes(CHUNK_ID_BYTES)
        return entries | dict.fromkeys(compress(perhaps_implied, alive), implied)

    def _are_alive(self, folders: Sequence[FolderId]) -> list[bool]:
        """Whether anything but tombstones lies in each folder, at any depth."""
        alive = [False] * len(folders)
        level = list(enumerate(folders))  # position in `folders`, and a folder at or below it
        while level:
            dead = list[tuple[int, FolderId]]()
            for portion in in_portions(level, _COMMANDS_AT_ONCE):
                commands = []
                for _, folder in portion:
                    commands.append(command("HLEN", self._generation.entries(folder)))
                    # how many of these are tombstones
                    commands.append(command("HGET", self._generation.key(folder, b"d"), folder))
                replies = [*map(number, self._link.run(commands))]
                for (i, folder), entries, tombstones in zip(
                    portion, replies[::2], replies[1::2], strict=True
                ):
                    if entries > tombstones:
                        alive[i] = True
                    else:
                        dead.append((i, folder))
            undecided = [(i, folder) for i, folder in dead if not alive[i]]
            below = self._subfolders([folder for _, folder in undecided])
            level = [
                (i, child_folder(folder, name))
                for (i, folder), names in zip(undecided, below, strict=True)
                for name in names
            ]
        return alive

    def _subfolders(self, folders: Sequence[FolderId]) -> list[list[bytes]]:
        names_of: dict[bytes, dict[bytes, bytes]] = {
            self._generation.below(folder): {} for folder in folders
        }
        for key, page in self._scan([*names_of], _SETS, _COMMANDS_AT_ONCE):
            names_of[key] |= page
        return [[*names_of[self._generation.below(folder)]] for folder in folders]

    def hash_pages(self, key: bytes) -> Iterator[dict[bytes, bytes]]:
        """Raises PartialScan."""
        return (page for _, page in self._scan([key]))

    def _scan(
        self,
        keys: Sequence[bytes],
        words: _ScanWords = _HASHES,
        keys_at_once: int = _FOLDERS_AT_ONCE,
    ) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        """Pages of hashes or sets, each with its key. Names may repeat while Redis resizes the
        hash. Raises PartialScan."""
        cursors = [(key, _START) for key in keys]
        names = dict[bytes, set[bytes]]()  # seen so far, by key, if there are several pages
        while cursors:
            self._at_each_page()
            portion, cursors = cursors[:keys_at_once], cursors[keys_at_once:]
            rows = max(1, _SCAN_ROWS // len(portion))
            commands = []
            for key, cursor in portion:
                commands.append(command(words.scan, key, cursor, "COUNT", rows))
                if cursor != _START:  # one page cannot have missed anything
                    commands.append(command(words.size, key))
            replies = iter(self._link.run(commands))
            for key, cursor in portion:
                following, reply = pair(next(replies))
                page, following = words.unpack(reply), _check_cursor(following)
                size = number(next(replies)) if cursor != _START else None
                if following != _START or size is not None:
                    names.setdefault(key, set()).update(page)
                yield key, page
                if following != _START:
                    cursors.append((key, following))
                elif size is not None and len(names.pop(key)) != size:
                    raise PartialScan


def folder_paths(
    parents: Mapping[FolderId, tuple[FolderId, bytes]], wanted: Iterable[FolderId]
) -> dict[FolderId, bytes]:
    """`parents` has the parent and the name of each wanted folder and of all above it."""
    paths = {ROOT_FOLDER: ROOT}
    found = {}
    for folder in wanted:
        names, at = list[tuple[FolderId, bytes]](), folder
        while at not in paths:
            if at not in parents or len(names) > len(parents):
                raise corrupt_store_error("a folder without a parent")
            parent, name = parents[at]
            names.append((at, name))
            at = parent
        path = paths[at]
        for above, name in reversed(names):
            path = paths[above] = join(path, name)
        found[folder] = path
    return found


def columns(found: Iterable[FolderEntries], chunks: Sequence[ChunkId] | None = None) -> Rows:
    """Turn packed entries into columns. `chunks` becomes the table of chunks; if it is None, the
    table has the chunks that hold the entries."""
    folders: dict[bytes, int] = {}
    folder, counts, names = list[int](), list[int](), list[bytes]()
    plain: list[bytes] = []  # the first `PLAIN_BYTES` of each entry, many joined
    tails: dict[int, bytes] = {}
    for path, names_here, entries in found:
        if len(names_here) != len(entries):
            raise corrupt_store_error("names without entries")
        folder.append(folders.setdefault(path, len(folders)))
        counts.append(len(names_here))
        joined = b"".join(entries)
        if len(joined) != PLAIN_BYTES * len(entries):
            for entry in entries:
                check_entry(entry)
            for i, entry in enumerate(entries, len(names)):
                if len(entry) > EXTENDED_BYTES:
                    tails[i] = entry[EXTENDED_BYTES:]
            joined = b"".join([entry[:PLAIN_BYTES] for entry in entries])
        names += names_here
        plain.append(joined)
    packed = np.frombuffer(b"".join(plain), np.uint8).reshape(-1, PLAIN_BYTES)
    if len(packed) != len(names):
        raise corrupt_store_error("an entry of a wrong length")
    records = np.ascontiguousarray(packed[:, : RECORD.itemsize]).view(RECORD).reshape(-1)
    ids = np.ascontiguousarray(packed[:, RECORD.itemsize :]).view("S16").reshape(-1)
    # NumPy ignores trailing zeros; IDs of one length still differ without them
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
        raise corrupt_store_error("an entry of a wrong length")
    keep = [entry[KIND_AT] != Kind.TOMBSTONE.value for entry in entries]
    if all(keep):
        return names, entries
    return list(compress(names, keep)), list(compress(entries, keep))


def _check_cursor(reply: object) -> bytes:
    packed = b"%d" % reply if isinstance(reply, int) else octets(reply)
    if not packed.isdigit():
        raise corrupt_store_error("something else where a cursor should be")
    return packed


def _unpack_parent(reply: object) -> tuple[FolderId, bytes]:
    if not isinstance(reply, bytes) or len(reply) < FOLDER_BYTES:
        raise corrupt_store_error("a folder without a parent")
    return FolderId(reply[:FOLDER_BYTES]), reply[FOLDER_BYTES:]
