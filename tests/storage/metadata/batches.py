"""Makes batches for metadata stores, and computes the expected state with plain dicts.

`fold` computes the state after chunks from scratch, whatever their order; it shares no code with
the stores, so it can judge them. `check` compares the results of all methods of a store with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np

from diesel_fs.format.entries import EXTENT, RECORD, ChunkId, ChunkInfo, Kind, Rows, Stamp
from diesel_fs.storage.metadata.store import CommitBatch, MetadataStore, StoreRestarted


def chunk_id(number: int) -> ChunkId:
    """A chunk ID; greater numbers give greater IDs."""
    return ChunkId((1_700_000_000).to_bytes(4, "big") + number.to_bytes(12, "big"))


class Entry(NamedTuple):
    """`first` is the entry's stamp (chunk number, place), if another."""

    path: bytes
    size: int = 7
    kind: Kind = Kind.FILE
    number: int = 0
    extents: int = 1
    first: tuple[int, int] | None = None
    target: bytes = b""


@dataclass(frozen=True)
class Chunk:
    number: int
    entries: tuple[Entry | None, ...]
    by_purge: bool = False

    @property
    def id(self) -> ChunkId:
        return chunk_id(self.number)

    def stamp(self, place: int) -> Stamp:
        entry = self.entries[place]
        number, at = (entry.first if entry else None) or (self.number, place)
        return Stamp(chunk_id(number) + at.to_bytes(4, "big"))

    def has_foreign_stamp(self, place: int) -> bool:
        return self.stamp(place) != self.id + place.to_bytes(4, "big")

    def record(self, place: int) -> bytes:
        entry = self.entries[place]
        assert entry is not None
        record = np.zeros(1, RECORD)
        record["size"], record["kind"], record["extents"] = entry.size, entry.kind, entry.extents
        record["place"], record["offset"], record["mode"] = place, place * 64, 0o640
        record["mtime_ns"], record["checksum"] = -place, self.number * 1000 + place
        return record.tobytes()

    def extent(self, place: int) -> bytes:
        entry = self.entries[place]
        assert entry is not None
        extent = np.zeros(1, EXTENT)
        extent["chunk"], extent["number"] = np.void(self.id), entry.number
        extent["place"], extent["start"] = place, entry.number * 65536
        return extent.tobytes()

    def tail(self, place: int) -> bytes | None:
        entry = self.entries[place]
        if entry is not None and entry.extents > 1:
            return self.extent(place)
        return entry.target if entry is not None and entry.kind == Kind.LINK else None

    def batch(self) -> CommitBatch:
        places = [place for place, entry in enumerate(self.entries) if entry is not None]
        split = [
            (b"/".join(parts[:-1]), parts[-1])
            for parts in (entry.path.split(b"/") for entry in self.entries if entry is not None)
        ]
        folders = sorted({folder for folder, _ in split})
        tails = {i: tail for i, at in enumerate(places) if (tail := self.tail(at)) is not None}
        rows = Rows(
            folders=folders,
            folder=np.array([folders.index(folder) for folder, _ in split], np.uint32),
            names=[name for _, name in split],
            records=np.frombuffer(b"".join(map(self.record, places)), RECORD),
            chunk=np.zeros(len(places), np.uint32),
            chunks=[self.id],
            tails=tails,
        )
        stamps = {i: self.stamp(at) for i, at in enumerate(places) if self.has_foreign_stamp(at)}
        info = ChunkInfo(self.id, 1000 + self.number)
        return CommitBatch(
            info, uploaded_ns=self.number, rows=rows, stamps=stamps, by_purge=self.by_purge
        )


def files(number: int, *paths: bytes, size: int = 7) -> Chunk:
    return Chunk(number, tuple(Entry(path, size) for path in paths))


def tombstones(number: int, *paths: bytes) -> Chunk:
    return Chunk(number, tuple(Entry(path, 0, Kind.TOMBSTONE) for path in paths))


def big(number: int, path: bytes, count: int, first: int = 0) -> list[Chunk]:
    """The chunks of a file of `count` extents, from `number` on; its stamp is of chunk `first`."""
    stamp = (first or number, 0)
    return [
        Chunk(number + i, (Entry(path, 99, number=i, extents=count, first=stamp),))
        for i in range(count)
    ]


def chunk_by_purge(number: int, *places: tuple[Chunk, int], known: bool = True) -> Chunk:
    """A chunk into which purge has copied these entries, with their stamps. With `known=False` it
    is an orphan: its writer did not commit it, and the store does not know that purge wrote it."""
    entries = []
    for chunk, place in places:
        entry = chunk.entries[place]
        assert entry is not None
        entries.append(entry._replace(first=entry.first or (chunk.number, place)))
    return Chunk(number, tuple(entries), by_purge=known)


class StoredEntry(NamedTuple):
    stamp: bytes
    chunk: bytes
    record: bytes
    tail: bytes | None


Place = tuple[Chunk, int]


@dataclass
class ExpectedState:
    entries: dict[bytes, StoredEntry]
    holes: dict[bytes, set[int]]
    files: int
    bytes: int


def fold(chunks: Iterable[Chunk]) -> ExpectedState:
    """The state after these chunks were committed, in any order."""
    done = {chunk.number: chunk for chunk in chunks}.values()
    versions: dict[bytes, dict[bytes, dict[int, list[Place]]]] = {}
    for chunk in done:
        for place, entry in enumerate(chunk.entries):
            if entry is not None:
                version = versions.setdefault(entry.path, {}).setdefault(chunk.stamp(place), {})
                version.setdefault(entry.number, []).append((chunk, place))
    answer = ExpectedState({}, {chunk.id: set() for chunk in done}, 0, 0)
    for chunk in done:
        answer.holes[chunk.id] |= {i for i, entry in enumerate(chunk.entries) if entry is None}
    for path, stamps in versions.items():
        complete = [stamp for stamp, parts in stamps.items() if len(parts) == _extents(parts)]
        winner = max(complete, default=b"")
        for stamp, parts in stamps.items():
            for places in parts.values():
                places.sort(key=lambda at: at[0].number)
                for chunk, place in places if stamp < winner else places[:-1]:
                    answer.holes[chunk.id].add(place)
        if winner:
            shown = [stamps[winner][number][-1] for number in sorted(stamps[winner])]
            _show(answer, path, winner, shown)
    return answer


def _extents(parts: dict[int, list[Place]]) -> int:
    chunk, place = next(iter(parts.values()))[0]
    entry = chunk.entries[place]
    assert entry is not None
    return entry.extents


def _show(answer: ExpectedState, path: bytes, stamp: bytes, shown: Sequence[Place]) -> None:
    chunk, place = shown[0]
    tail = chunk.tail(place)
    if len(shown) > 1:
        tail = b"".join(chunk.extent(place) for chunk, place in shown)
    answer.entries[path] = StoredEntry(stamp, chunk.id, chunk.record(place), tail)
    entry = chunk.entries[place]
    if entry is not None and entry.kind == Kind.FILE:
        answer.files += 1
        answer.bytes += entry.size


def stored_entries(rows: Rows) -> dict[bytes, StoredEntry]:
    """The stamp is empty if the rows have none."""
    stamps: Sequence[bytes] = getattr(rows, "stamps", [b""] * len(rows))
    found = {
        rows.path(i): StoredEntry(
            stamps[i], rows.chunks[rows.chunk[i]], rows.records[i].tobytes(), rows.tails.get(i)
        )
        for i in range(len(rows))
    }
    assert len(found) == len(rows), "a path has two entries"
    return found


def without_tombstones(entries: dict[bytes, StoredEntry]) -> dict[bytes, StoredEntry]:
    """Leave out tombstones, and stamps, as `changes` from version 0 does."""
    tombstone = Kind.TOMBSTONE
    return {
        path: entry._replace(stamp=b"")
        for path, entry in entries.items()
        if np.frombuffer(entry.record, RECORD)["kind"][0] != tombstone
    }


def commit_and_repair(meta: MetadataStore, identity: UUID, *batches: CommitBatch) -> int:
    """Commit; if the store has been restarted, confirm first that it has lost nothing."""
    while True:
        try:
            return meta.commit(identity, *batches)
        except StoreRestarted as restarted:
            meta.repair(identity, restarted.run_id, [])


def check(meta: MetadataStore, name: str, chunks: Sequence[Chunk]) -> None:
    """Assert that all methods of a store return the state that `fold` expects."""
    expected = fold(chunks)
    head = meta.head(name)
    identity = head.identity
    paths = {entry.path for chunk in chunks for entry in chunk.entries if entry is not None}
    assert stored_entries(meta.lookup(identity, sorted(paths), tombstones=True)) == expected.entries
    assert (head.files, head.bytes) == (expected.files, expected.bytes)
    assert head.chunks == len(expected.holes)
    records = meta.chunks(identity)
    assert [record.id for record in records] == sorted(expected.holes)
    for record in records:
        holes = meta.holes(identity, record.id).tolist()
        assert holes == sorted(expected.holes[record.id])
        assert record.holes == len(holes)
    assert stored_entries(meta.changes(identity, 0).rows) == without_tombstones(expected.entries)
