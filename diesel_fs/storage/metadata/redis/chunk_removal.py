"""Finds empty chunks of a dataset in Redis, and what has to be removed with each.

A chunk is empty when all its places are holes or, if the caller wants, tombstones. The result is a
list of pieces for `UNAPPLY` (in `bucket_scripts.py`, which has their format); `transactions.py`
removes them. The result stays true whatever is committed meanwhile: a hole stays a hole, and
`UNAPPLY` removes a tombstone only if it is still the entry of its path.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ....format.entries import RECORD, ChunkId, Kind
from .keys import FolderId, Generation, PieceCounts, PieceName, hole_fields, piece_names
from .link import Command, RedisLink
from .pieces import BucketPiece, unpack_paths
from .rows import GenerationReader, chunks_of, kind_of
from .transactions import ChunkRemoval

CHUNKS_AT_ONCE = 64
"""How many chunks one transaction removes: the script of the head keeps Redis busy for 1 ms."""

_COUNT = struct.Struct("<H")
_BLOCKS = struct.Struct("<I")
_ROW = struct.Struct("<HB")
_SIZE = struct.Struct("<I")


class Candidate(NamedTuple):
    """A chunk that may be empty: its number of entries, where its pieces are, and its holes."""

    entries: int
    piece_counts: PieceCounts
    holes: frozenset[int]


Tombstones = dict[FolderId, list[tuple[bytes, bytes]]]
"""Names and packed entries of tombstones, by folder."""


class PathListMissing(Exception):
    """The list of the paths of a piece is gone: the generation was replaced, or lost data."""


def plan_removals(
    link: RedisLink,
    generation: Generation,
    reader: GenerationReader,
    candidates: Mapping[ChunkId, Candidate],
    *,
    tombstones: bool,
) -> dict[ChunkId, ChunkRemoval]:
    """The removals of those candidates of which every place is a hole or, with `tombstones`, a
    tombstone.
    """
    found = {}
    for chunk, candidate in candidates.items():
        names = [*piece_names(chunk, candidate.piece_counts)]
        dropped: dict[PieceName, Tombstones] = {name: {} for name in names}
        places = set(candidate.holes)
        if tombstones and len(places) < candidate.entries:
            for name, folder, base, entry in _entries_of_pieces(link, generation, reader, names):
                if kind_of(entry) == Kind.TOMBSTONE and chunks_of(entry) == [chunk]:
                    places.add(int(np.frombuffer(entry, RECORD, 1)["place"][0]))
                    dropped[name].setdefault(folder, []).append((base, entry))
        if len(places) == candidate.entries:
            blocks = len([*hole_fields(chunk, candidate.entries)])
            pieces = [_piece(name, rows, blocks) for name, rows in dropped.items()]
            found[chunk] = ChunkRemoval(candidate.piece_counts, pieces)
    return found


def _entries_of_pieces(
    link: RedisLink, generation: Generation, reader: GenerationReader, names: Sequence[PieceName]
) -> Iterator[tuple[PieceName, FolderId, bytes, bytes]]:
    """The current entries at the paths of pieces: piece, folder, name, packed entry. Raises
    PathListMissing.
    """
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
    """Pack what `UNAPPLY` removes with a piece; the first of a bucket removes the holes, too."""
    folders = [*rows]
    parts = [_COUNT.pack(len(folders)), *folders, _BLOCKS.pack(0 if name.number else blocks)]
    for position, folder in enumerate(folders):
        for base, entry in rows[folder]:
            parts += (_ROW.pack(position, len(base)), base, _SIZE.pack(len(entry)), entry)
    return BucketPiece(name, folders, b"".join(parts))
