"""Takes pages over from the page cache of the version before, after a mount has switched.

A native mount has a file system for each version, so the pages of unchanged files must be copied;
nothing is read from the store again. The worker calls `some` between its decisions, so readers of a
plan do not wait for all of this. Used by the worker's one thread.
"""

import time
from collections.abc import Generator

import numpy as np
import numpy.typing as npt

from ...cache.readers.coalescing_reader import ExtentBatch
from ..prefetch.pages.page_cache import PageCache
from ..prefetch.planner import PrefetchPlanner


class TakenOverPages:
    def __init__(
        self,
        old: PageCache,
        entries: npt.NDArray[np.int64],
        was: npt.NDArray[np.int32],
        page_cache: PageCache,
        planner: PrefetchPlanner,
    ) -> None:
        """`old` is the page cache of the version before, which this object closes. `entries` are
        those of the new version to take over; `was` gives each entry's index in `old`."""
        self._old = old
        self._page_cache = page_cache
        self._planner = planner
        self._pieces = self._taken(entries[np.argsort(was[entries])], was)

    def some(self) -> bool:
        """Take the next piece over. Returns whether more is left."""
        return next(self._pieces, False)

    def close(self) -> None:
        self._pieces.close()
        self._old.close()

    def _taken(self, entries: npt.NDArray[np.int64], was: npt.NDArray[np.int32]) -> Generator[bool]:
        before = was[entries].astype(np.uint32)
        for batch in self._old.take_contents(before):
            some = entries[np.searchsorted(before, batch.entries)]
            if not self._planner.take_over(np.unique(some).astype(np.uint32), time.monotonic()):
                return
            self._page_cache.store(ExtentBatch(some, batch.starts, batch.contents))
            self._planner.memory.set_known_entries(self._page_cache.known_entries)
            yield True
