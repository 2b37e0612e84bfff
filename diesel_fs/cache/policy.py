"""Eviction policies: which chunks a cache takes in, and which it gives up when it is full.

A policy keeps the table of one cache: which *units* are in the cache, and their bytes. (A unit is
what is kept or evicted as one, known by its number: here a chunk.) The cache tells the policy what
comes, goes and is read, asks it, and has the contents itself. Policies are pure: the same calls
give the same answers on every machine. One thread at a time.

A policy is a class and a line in `POLICIES`, whose names users give to `--evict`.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping


class EvictionPolicy(ABC):
    """The units of one cache, and the decision which of them stay."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        """The bytes of each unit in the cache. Changed by the methods alone."""
        self.bytes = 0
        """The sum of `sizes`."""

    def insert(self, unit: int, size: int) -> None:
        """A unit of `size` bytes is in the cache now."""
        self.bytes += size - self.sizes.get(unit, 0)
        self.sizes[unit] = size

    def remove(self, unit: int) -> None:
        """A unit has left the cache, for whatever reason. One that is not in it is ignored."""
        self.bytes -= self.sizes.pop(unit, 0)

    @abstractmethod
    def record_access(self, unit: int) -> None:
        """A reader has read bytes of a unit, whether the cache had it or not."""

    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        """Whether to take in a unit of `size` bytes that is not in the cache, where `free_bytes`
        are free. Changes nothing: the caller may decide otherwise."""
        return size <= free_bytes + self.bytes

    @abstractmethod
    def eviction_order(self) -> Iterator[int]:
        """The units that may be evicted, the least valuable first. Changes nothing; the caller
        removes units only after it has stopped iterating."""

    def renumber(self, after: Mapping[int, int]) -> None:
        """Give the units other numbers, since the dataset has another version: `after` has the new
        number of each old one; units without one leave. The order of eviction stays."""
        kept = dict.fromkeys([*self.eviction_order(), *self.sizes])
        sizes = {after[unit]: self.sizes[unit] for unit in kept if unit in after}
        for unit in kept:
            self.remove(unit)
        for unit, size in sizes.items():
            self.insert(unit, size)


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts first what has not been read for the longest time."""

    def insert(self, unit: int, size: int) -> None:
        super().insert(unit, size)
        self.sizes.move_to_end(unit)

    def record_access(self, unit: int) -> None:
        if unit in self.sizes:
            self.sizes.move_to_end(unit)

    def eviction_order(self) -> Iterator[int]:
        return iter(self.sizes)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts first what has been read least often since it came; of these the longest unread."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {}  # the longest unread first

    def insert(self, unit: int, size: int) -> None:
        super().insert(unit, size)
        self._set_uses(unit, self._uses.get(unit, 0))

    def remove(self, unit: int) -> None:
        super().remove(unit)
        self._set_uses(unit, None)

    def record_access(self, unit: int) -> None:
        if unit in self._uses:
            self._set_uses(unit, self._uses[unit] + 1)

    def eviction_order(self) -> Iterator[int]:
        for uses in sorted(self._by_uses):
            yield from self._by_uses[uses]

    def _set_uses(self, unit: int, uses: int | None) -> None:
        before = self._uses.pop(unit, None)
        if before is not None:
            used_alike = self._by_uses[before]
            del used_alike[unit]
            if not used_alike:
                del self._by_uses[before]
        if uses is not None:
            self._uses[unit] = uses
            self._by_uses.setdefault(uses, OrderedDict())[unit] = None


class NoEviction(EvictionPolicy):
    """Keeps what came first and takes in nothing else once the cache is full.

    Each epoch then hits what fits, where LRU may hit nothing (the cache MinIO of CoorDL; Mohan et
    al., VLDB 2021, section 4.1).
    """

    def record_access(self, unit: int) -> None:
        """Ignored: the decisions depend on free room alone."""

    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        return size <= free_bytes

    def eviction_order(self) -> Iterator[int]:
        return iter(())


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "none": NoEviction,
}
"""Policies by the names that `--evict` takes."""
