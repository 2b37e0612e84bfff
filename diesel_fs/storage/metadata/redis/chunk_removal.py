"""Which chunks of a dataset in Redis nothing is in any more, and what goes with each.

Owned here: reading that out of a generation, and the packing of what one script removes from one
bucket (the format stands above `UNAPPLY`). Not owned: the transaction (`transactions.py`). What is
found stays true whatever is committed meanwhile: a hole never becomes anything else, and a
tombstone is removed only if it still stands.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diesel_fs.format.entries import RECORD, ChunkId, Kind
from diesel_fs.storage.metadata.redis.keys import (
    FolderId,
    Generation,
    PieceCounts,
    PieceName,
    hole_fields,
    piece_names,
)
from diesel_fs.storage.metadata.redis.link import Command, RedisLink
from diesel_fs.storage.metadata.redis.pieces import BucketPiece, unpack_paths
from diesel_fs.storage.metadata.redis.rows import GenerationReader, chunks_of, kind_of
from diesel_fs.storage.metadata.redis.transactions import ChunkRemoval

CHUNKS_AT_ONCE = 64
"""Chunks that one transaction forgets: the head's script keeps Redis busy for a millisecond."""

_COUNT = struct.Struct("<H")
_BLOCKS = struct.Struct("<I")
_ROW = struct.Struct("<HB")
_SIZE = struct.Struct("<I")


class Candidate(NamedTuple):
    """A chunk that may be empty: its entries, where its pieces are, and its holes."""

    entries: int
    places: PieceCounts
    holes: frozenset[int]


Tombstones = dict[FolderId, list[tuple[bytes, bytes]]]
"""By folder, names and packed entries."""


class PathListMissing(Exception):
    """A piece does not say any more what it named."""


def plan_removals(
    link: RedisLink,
    generation: Generation,
    reader: GenerationReader,
    candidates: Mapping[ChunkId, Candidate],
    *,
    tombstones: bool,
) -> dict[ChunkId, ChunkRemoval]:
    """Those of the chunks of which every place is a hole (or, with `tombstones`, a tombstone)."""
    found = {}
    for chunk, candidate in candidates.items():
        names = [*piece_names(chunk, candidate.places)]
        dropped: dict[PieceName, Tombstones] = {name: {} for name in names}
        places = set(candidate.holes)
        if tombstones and len(places) < candidate.entries:
            for name, folder, base, entry in _named(link, generation, reader, names):
                if kind_of(entry) == Kind.TOMBSTONE and chunks_of(entry) == [chunk]:
                    places.add(int(np.frombuffer(entry, RECORD, 1)["place"][0]))
                    dropped[name].setdefault(folder, []).append((base, entry))
        if len(places) == candidate.entries:
            blocks = len([*hole_fields(chunk, candidate.entries)])
            pieces = [_piece(name, rows, blocks) for name, rows in dropped.items()]
            found[chunk] = ChunkRemoval(candidate.places, pieces)
    return found


def _named(
    link: RedisLink, generation: Generation, reader: GenerationReader, names: Sequence[PieceName]
) -> Iterator[tuple[PieceName, FolderId, bytes, bytes]]:
    """What stands at the paths that pieces name: folder, name, packed entry. Raises Lost."""
    commands = []
    for name in names:
        key = generation.key(name.bucket, b"n")
        commands.append(Command(key, ("HGET", key, name.field)))
    for name, reply in zip(names, link.run(commands), strict=True):
        if not isinstance(reply, bytes):
            raise PathListMissing
        asked: dict[FolderId, list[bytes]] = {}
        for folder, some in unpack_paths(reply):
            asked.setdefault(folder, []).extend(some)
        asked = {folder: [*dict.fromkeys(some)] for folder, some in asked.items()}
        for folder, base, entry in reader.entries(asked):
            yield name, folder, base, entry


def _piece(name: PieceName, rows: Tombstones, blocks: int) -> BucketPiece:
    """What goes with a piece: the chunk's holes in that bucket with its first."""
    folders = [*rows]
    parts = [_COUNT.pack(len(folders)), *folders, _BLOCKS.pack(0 if name.number else blocks)]
    for position, folder in enumerate(folders):
        for base, entry in rows[folder]:
            parts += (_ROW.pack(position, len(base)), base, _SIZE.pack(len(entry)), entry)
    return BucketPiece(name, folders, b"".join(parts))


def in_portions(chunks: Sequence[ChunkId]) -> Iterator[Sequence[ChunkId]]:
    """As many as one transaction forgets."""
    for start in range(0, len(chunks), CHUNKS_AT_ONCE):
        yield chunks[start : start + CHUNKS_AT_ONCE]
