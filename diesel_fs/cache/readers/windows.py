"""Cuts the files that `EntryReader.read_many` will return into windows, and decides for each window
which chunks to read whole. Changes nothing in the cache of chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...format.entries import Codec, Kind
from ...format.snapshot import layout
from ...format.snapshot.reader import Snapshot
from .chunk_cache import PINNED_COST_DIVISOR, ChunkCache
from .column_reader import Column
from .order_prefetch import WHOLE_CHUNK_FRACTION, OrderPrefetch


@dataclass(frozen=True, slots=True)
class Window:
    """Files that `read_many` returns next, and the chunks to read whole for them.

    `chunks` has the chunk of each file, -1 for a file that is to be read alone. The keys of `whole`
    are the chunks to read whole, in order of first use.

    If the cache follows an order, the files are of one group of it, or of none. The values of
    `whole` are then visits (`order_prefetch.py`), else -1. `closing` maps the position in `wanted`
    of each visit's last file to all files of the visit.
    """

    wanted: Column
    chunks: Column
    whole: dict[int, int]
    followed: OrderPrefetch | None = None
    closing: dict[int, Column] = field(default_factory=dict)


class WindowPlanner:
    def __init__(
        self, snapshot: Snapshot, cache: ChunkCache, is_pinned: Callable[[int], bool]
    ) -> None:
        """`is_pinned`: whether the store shares the memory of a whole chunk with this process."""
        self._snapshot = snapshot
        self._cache = cache
        self._is_pinned = is_pinned
        self._total_bytes = int(snapshot.chunk_sizes.sum())

    @property
    def everything_fits(self) -> bool:
        """Whether all chunks of the dataset fit the memory together."""
        return self._total_bytes <= self._cache.budget_bytes

    def next(self, wanted: Column) -> Window:
        """The first files of `wanted` that belong to one group of the followed order, or to no
        group."""
        followed = self._cache.order
        if followed is None:
            return self._window(wanted)
        groups = followed.groups_of(wanted)
        other = np.flatnonzero(groups != groups[0])
        wanted = wanted[: int(other[0])] if len(other) else wanted
        return self._window(wanted) if groups[0] < 0 else self._followed_window(followed, wanted)

    def _window(self, wanted: Column) -> Window:
        """The first files of `wanted` whose chunks fit the memory together, at least one."""
        chunks, stored = self._plain_chunks(wanted)
        entries, budget_bytes = len(wanted), self._cache.budget_bytes
        while True:
            whole = self._whole_chunks(chunks[:entries], stored[:entries])
            held_bytes = sum(self._held_bytes(number) for number in whole)
            if held_bytes <= budget_bytes or entries == 1:
                return Window(wanted[:entries], chunks[:entries], whole)
            entries //= 2

    def _followed_window(self, followed: OrderPrefetch, wanted: Column) -> Window:
        chunks, _ = self._plain_chunks(wanted)
        visits = followed.visits_of(wanted)
        chunks[visits < 0] = -1  # without a visit: these files are read alone
        closing = {}
        plain = np.flatnonzero(chunks >= 0)
        by_visit = plain[np.argsort(visits[plain], kind="stable")]
        if len(by_visit):
            for places in np.split(by_visit, np.flatnonzero(np.diff(visits[by_visit])) + 1):
                closing[int(places[-1])] = wanted[places]
        whole = dict(zip(chunks[plain].tolist(), visits[plain].tolist(), strict=True))
        return Window(wanted, chunks, whole, followed, closing)

    def _plain_chunks(self, wanted: Column) -> tuple[Column, Column]:
        """The chunk of each file that is one uncompressed extent, else -1; and its stored bytes."""
        columns = self._snapshot.columns
        flags = columns.flags[wanted]
        stored = columns.stored[wanted].astype(np.int64)
        plain = (
            (layout.kinds(flags) == Kind.FILE) & (flags & layout.MANY_EXTENTS == 0) & (stored > 0)
        )
        plain &= (flags >> layout.CODEC_SHIFT & 0xFF) == Codec.RAW
        return np.where(plain, columns.chunk[wanted].astype(np.int64), -1), stored

    def _whole_chunks(self, chunks: Column, stored: Column) -> dict[int, int]:
        if self.everything_fits:
            whole = dict.fromkeys(chunks.tolist(), -1)
            whole.pop(-1, None)
            return whole
        numbers, first, inverse = np.unique(chunks, return_index=True, return_inverse=True)
        bytes_wanted = np.bincount(inverse, weights=stored, minlength=len(numbers))
        whole = {}
        for position in np.argsort(first).tolist():
            number = int(numbers[position])
            if number >= 0 and (
                bytes_wanted[position] * WHOLE_CHUNK_FRACTION
                >= int(self._snapshot.chunk_sizes[number])
                or self._cache.peek(number) is not None
                or self._is_pinned(number)
            ):
                whole[number] = -1
        return whole

    def _held_bytes(self, number: int) -> int:
        return int(self._snapshot.chunk_sizes[number]) // (
            PINNED_COST_DIVISOR if self._is_pinned(number) else 1
        )
