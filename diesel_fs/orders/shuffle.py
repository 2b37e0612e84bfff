"""Draws the order in which a reader goes through the files of a dataset in one epoch.

Orders are pure functions of the snapshot and of numbers: they are the same in every process, on
every machine and with every version of numpy (the tests hold golden orders). Safe from any thread.

**Chunk-wise shuffle** (DIESEL, ICPP 2020, section 4.3): the chunks are shuffled and cut into groups
of `group_size`, and the files of each group are shuffled among themselves. So a reader needs the
chunks of one group in memory, while the chunks of the next group are loaded. A file of several
extents belongs to the chunk of its first one, an empty file to the chunk that has its entry. Chunks
without any selected file do not count. **Full shuffle** is the same with one group of all chunks.

**Parts** (`parts.py`): a chunk is read by one rank alone, unless the end of a part cuts its group.
Every file is equally likely in each part.

**The generator** is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) used as a counter. All arithmetic
is modulo 2^64:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;
             z ^= z >> 31
    draw(state, word) = mix(state + (word + 1) * 0x9E3779B97F4A7C15)
    state(domain)     = draw(draw(domain, seed), epoch)
    key of a chunk    = draw(draw(state(1), first 8 bytes of its ID), last 8; both big-endian)
    key of a file     = draw(state(2), index of its entry)

Chunks are sorted by their keys, and files by (group, key). Group and key share 64 bits: the group
takes the upper bits that it needs, the key's upper bits the others. Equal keys are sorted by chunk
ID, or by index.
"""

from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, UsageError
from ..format.entries import Kind
from ..format.snapshot.reader import ROOT_INDEX, Indices, Snapshot
from .parts import part_length, part_positions

GROUP_SIZE_DEFAULT = 100
"""The number of chunks in a group: 400 MiB with chunks of 4 MiB. The paper finds no gain in
accuracy with larger groups."""

SEED_MAX = 2**63 - 1
"""The largest seed or epoch: each fits a signed word of 64 bits."""

WORLD_MAX = 1 << 20
"""More ranks than any job has, and few enough that products with other numbers fit 64 bits."""

_U8 = npt.NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_CHUNKS, _FILES = 1, 2  # domains
_WORD = 64


@dataclass(frozen=True, slots=True)
class GroupedOrder:
    """Files in order, as entries of the snapshot, and the position at which each group ends
    (ascending).

    A rank's part may begin and end inside groups. If it repeats files from the start of the order,
    they count as groups of their own, unless they belong to the group before them.
    """

    indices: Indices
    ends: Indices


@dataclass(frozen=True, slots=True)
class ChunkedFiles:
    """Files (as entries) and their chunks. With some numbers, they determine a chunk-wise order.
    Can be pickled."""

    entries: Indices
    chunks: Indices
    """The chunk of each file, as a number in `chunk_ids`."""
    chunk_ids: npt.NDArray[np.uint8]
    """The 16-byte IDs of all chunks of the dataset."""

    @classmethod
    def of(cls, snapshot: Snapshot, entries: Indices) -> "ChunkedFiles":
        """Raises CorruptError for a damaged snapshot."""
        chunks = np.maximum(snapshot.chunk_of(entries), 0)  # entries without a chunk: the first
        if len(chunks) and int(chunks.max()) >= snapshot.chunk_count:
            raise CorruptError(
                f"damaged snapshot of {snapshot.dataset}: a file in an unknown chunk"
            )
        return cls(entries, chunks, snapshot.columns.chunk_id)

    def subset(self, places: Indices) -> "ChunkedFiles":
        return ChunkedFiles(self.entries[places], self.chunks[places], self.chunk_ids)

    def shuffled(self, seed: int, epoch: int, group_size: int) -> tuple[Indices, Indices]:
        """The chunk-wise order, as positions in `entries`, and the number of each file's group.
        Raises UsageError for numbers out of range."""
        check_number("seed", seed)
        check_number("epoch", epoch)
        check_number("group size", group_size, 1)
        if not len(self.entries):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        group = _groups(self, seed, epoch, group_size)
        sequence = np.argsort(_file_keys(self.entries, group, seed, epoch), kind="stable")
        return sequence, group[sequence].astype(np.int64)


class OrderSelection(TypedDict, total=False):
    """The wanted part of an epoch's files; meaning and defaults as in `chunk_order`."""

    rank: int
    world: int
    drop_last: bool
    position: int
    below: int


def chunk_shuffle(
    snapshot: Snapshot,
    seed: int,
    epoch: int,
    *,
    group_size: int = GROUP_SIZE_DEFAULT,
    **part: Unpack[OrderSelection],
) -> Indices:
    """The files of `chunk_order`, with its arguments and errors."""
    return chunk_order(snapshot, seed, epoch, group_size=group_size, **part).indices


def full_shuffle(
    snapshot: Snapshot, seed: int, epoch: int, **part: Unpack[OrderSelection]
) -> Indices:
    """As `chunk_shuffle` with all chunks in one group, so that all orders are equally likely."""
    one_group = max(snapshot.chunk_count, 1)
    return chunk_shuffle(snapshot, seed, epoch, group_size=one_group, **part)


def chunk_order(
    snapshot: Snapshot,
    seed: int,
    epoch: int,
    *,
    group_size: int = GROUP_SIZE_DEFAULT,
    rank: int = 0,
    world: int = 1,
    drop_last: bool = False,
    position: int = 0,
    below: int = ROOT_INDEX,
) -> GroupedOrder:
    """A rank's files in chunk-wise order, from `position` in its part on, and the ends of their
    groups.

    Only files in and below the folder with the entry `below` are selected. `drop_last`: if the
    parts cannot be equally long, leave out the last files instead of repeating the first ones.
    Raises UsageError for numbers out of range, and CorruptError for a damaged snapshot.
    """
    check_number("world", world, 1)
    check_number("rank", rank, 0, world - 1)
    entries = _files(snapshot, below)
    check_number("position", position, 0, part_length(len(entries), world, drop_last=drop_last))
    files = ChunkedFiles.of(snapshot, entries)
    sequence, group = files.shuffled(seed, epoch, group_size)
    part = part_positions(len(entries), rank, world, drop_last=drop_last)[position:]
    return GroupedOrder(entries[sequence[part]], group_ends(group[part]))


def check_number(what: str, value: int, lowest: int = 0, highest: int = SEED_MAX) -> None:
    """Raise UsageError for a number that is not whole, or out of range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UsageError(f"bad {what} of type {type(value).__name__}: it is a whole number")
    if not lowest <= value <= highest:
        upper = "2^63 - 1" if highest == SEED_MAX else f"{highest}"
        raise UsageError(f"bad {what} {value}: it is {lowest} to {upper}")


def _files(snapshot: Snapshot, below: int) -> Indices:
    check_number("folder", below, 0, len(snapshot) - 1)
    if below == ROOT_INDEX:
        return snapshot.files()
    entries = snapshot.walk(int(below))
    files: Indices = entries[snapshot.stat_many(entries).kind == Kind.FILE]
    return files


def _groups(files: ChunkedFiles, seed: int, epoch: int, group_size: int) -> npt.NDArray[np.uint64]:
    all_words = files.chunk_ids.view(">u8").astype(np.uint64).reshape(-1, 2)
    used = np.flatnonzero(np.bincount(files.chunks, minlength=len(all_words)))
    words = all_words[used]
    first = _draw(_state(_CHUNKS, seed, epoch), words[:, 0])
    shuffled = used[np.argsort(_draw(first, words[:, 1]), kind="stable")]
    group_of_chunk = np.zeros(len(all_words), np.uint64)
    group_of_chunk[shuffled] = np.arange(len(shuffled), dtype=np.uint64) // np.uint64(
        min(group_size, len(shuffled))
    )
    return group_of_chunk[files.chunks]


def _file_keys(files: Indices, group: _U8, seed: int, epoch: int) -> _U8:
    """Sort keys: the group in the upper bits, the drawn number in the others."""
    drawn = _draw(_state(_FILES, seed, epoch), files.astype(np.uint64))
    group_bits = int(group.max()).bit_length()
    if not group_bits:
        return drawn
    return group << np.uint64(_WORD - group_bits) | drawn >> np.uint64(group_bits)


def random_keys(domain: int, count: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """`count` random numbers of 64 bits. The `domain` separates the numbers of one purpose from
    others with the same seed and epoch: this module uses 1 and 2, `importance.py` 11 to 17. Raises
    UsageError for a seed or epoch out of range."""
    check_number("seed", seed)
    check_number("epoch", epoch)
    return _draw(_state(domain, seed, epoch), np.arange(count, dtype=np.uint64))


def _state(domain: int, seed: int, epoch: int) -> _U8:
    state = np.array([domain], np.uint64)
    for word in (seed, epoch):
        state = _draw(state, np.array([word], np.uint64))
    return state


def _draw(state: _U8, words: _U8) -> _U8:
    """Takes arrays, since numpy warns if a scalar overflows."""
    z = words + np.uint64(1)
    z *= np.uint64(_GAMMA)
    z += state
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def group_ends(group: Indices) -> Indices:
    """The position after the last file of each group, given the group of each file."""
    changes = np.flatnonzero(group[1:] != group[:-1]) + 1
    return np.append(changes, len(group)) if len(group) else changes
