"""Eviction policies: which chunks a cache takes in, and which it gives up when it is full.

A policy keeps the table of one cache: which *units* (mostly chunks) are in it, and their bytes. The
cache holds the contents, reports every insertion, removal and read, and requests decisions. If the
future reads are known (`orders/future.py`), the cache passes them on; only the policy `plan` uses
them. Policies are pure: the same calls give the same answers on every machine. One thread at a
time.

A policy is a class and a line in `POLICIES`; `--evict` takes the names of that table.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ...orders.future import NEVER, FutureUses, Times, Units

UnitValues = npt.NDArray[np.float32]
"""For each unit, how many of its parts will be read in an epoch (an estimate)."""

_Key = tuple[int, float, int, int]
"""The order of eviction, least first: the time of a unit's next use, negated; its value; the number
of its last read; the unit."""

_OLD_KEYS_MIN = 1024  # with fewer old keys, the heap is not built anew


class EvictionPolicy(ABC):
    uses_future: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        """The bytes of each unit in the cache. Only the policy changes this table."""
        self.bytes = 0

    def insert(self, unit: int, size: int) -> None:
        """Note that a unit is in the cache now."""
        self.bytes += size - self.sizes.get(unit, 0)
        self.sizes[unit] = size

    def remove(self, unit: int) -> None:
        """Ignores unknown units."""
        self.bytes -= self.sizes.pop(unit, 0)

    @abstractmethod
    def record_access(self, unit: int) -> None:
        """Note a read of a unit, whether the cache had it or not."""

    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        """Whether to take in a unit that is not in the cache. Changes nothing: the caller may
        decide otherwise."""
        return size <= free_bytes + self.bytes

    @abstractmethod
    def eviction_order(self) -> Iterator[int]:
        """The units that may be evicted, the least valuable first. Changes nothing; the caller
        removes units only after it has stopped iterating."""

    def replaces(self, unit: int, victims: Collection[int], uses_min: int = 1) -> bool | None:
        """Whether a unit that is not in the cache should replace `victims`, the first units of
        `eviction_order`; None leaves it to the caller (`admission.py`). Fetching costs as much as
        `uses_min` reads past the cache, so the unit should be used that often before a victim is.
        Changes nothing."""
        return None

    def set_future(self, future: FutureUses | None) -> None:
        """Set the future reads of this cache's readers; None if they are unknown. The caller moves
        the readers (`FutureUses.seek`): several policies may share a future."""
        return

    def note_passed(self, units: Units) -> None:
        """The next uses of these units have changed: a reader whose future is known has passed
        them, or has gone back to before them."""
        return

    def set_values(self, values: UnitValues | None) -> None:
        """Set the values that decide between units of equal next use. None: all are worth the
        same."""
        return

    def renumber(self, after: Mapping[int, int]) -> None:
        """`after` maps old unit numbers to those of another version of the dataset; units without a
        new number leave. The order of eviction stays."""
        kept = dict.fromkeys([*self.eviction_order(), *self.sizes])
        sizes = {after[unit]: self.sizes[unit] for unit in kept if unit in after}
        for unit in kept:
            self.remove(unit)
        for unit, size in sizes.items():
            self.insert(unit, size)


class LeastRecentlyUsed(EvictionPolicy):
    def insert(self, unit: int, size: int) -> None:
        super().insert(unit, size)
        self.sizes.move_to_end(unit)

    def record_access(self, unit: int) -> None:
        if unit in self.sizes:
            self.sizes.move_to_end(unit)

    def eviction_order(self) -> Iterator[int]:
        return iter(self.sizes)


class FarthestNextUse(LeastRecentlyUsed):
    """Evicts units first that are not read any more, then those that are read last (Lobster, ICPP
    2022, section 4.4; Belady's MIN).

    Among units of equal next use the one of the least value goes first; among equal values, and if
    no order is known, the longest unread. The policy does not know whether a unit is the last copy
    among several nodes: the caller must evict such a unit only after others.

    All units are in a heap, the first victim at its top. A unit gets a new key when it is read or
    its next use changes. The old key is passed over until it comes to the top or more than half of
    the keys are old.
    """

    uses_future = True

    def __init__(self) -> None:
        super().__init__()
        self._future: FutureUses | None = None
        self._values: UnitValues | None = None
        self._reads = 0
        self._keys: dict[int, _Key] = {}  # of each unit in the cache, if the future is known
        self._heap: list[_Key] = []

    def insert(self, unit: int, size: int) -> None:
        super().insert(unit, size)
        if self._future is not None:
            self._reads += 1
            self._push(unit, self._future.next_time_of(unit), self._reads)

    def remove(self, unit: int) -> None:
        super().remove(unit)
        if self._keys.pop(unit, None) is not None:
            while self._heap and self._is_old(self._heap[0]):
                heappop(self._heap)

    def record_access(self, unit: int) -> None:
        super().record_access(unit)
        key = self._keys.get(unit)
        if key is not None and key[0] == -NEVER:  # units with a next use keep their keys
            self._reads += 1
            self._push(unit, NEVER, self._reads)

    def eviction_order(self) -> Iterator[int]:
        return super().eviction_order() if self._future is None else self._walk_heap()

    def _walk_heap(self) -> Iterator[int]:
        """A key of a heap is never less than the one above it, so the next least key is always
        right below one of those taken before."""
        heap, seen = self._heap, set[int]()
        reached = [(heap[0], 0)] if heap else []
        while reached:
            key, place = heappop(reached)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heappush(reached, (heap[below], below))
            if not self._is_old(key) and key[-1] not in seen:
                seen.add(key[-1])
                yield key[-1]

    def replaces(self, unit: int, victims: Collection[int], uses_min: int = 1) -> bool | None:
        if self._future is None:
            return None
        needed_again = min((-self._keys[victim][0] for victim in victims), default=NEVER)
        next_use = self._future.next_time_of(unit)
        if next_use == NEVER:
            return None if needed_again == NEVER else False
        if next_use >= needed_again:
            return False
        return uses_min <= 1 or self._future.uses_before(unit, needed_again) >= uses_min

    def set_values(self, values: UnitValues | None) -> None:
        self._values = values
        self.set_future(self._future)

    def set_future(self, future: FutureUses | None) -> None:
        self._future = future
        self._keys.clear()
        self._heap.clear()
        if future is not None:
            units = [*self.sizes]  # the longest unread first
            times = self._next_times(np.array(units, np.int64)).tolist()
            for unit, time in zip(units, times, strict=True):
                self._reads += 1
                self._keys[unit] = -time, self._value_of(unit), self._reads, unit
            self._heap = [*self._keys.values()]
            heapify(self._heap)

    def note_passed(self, units: Units) -> None:
        if self._future is None:
            return
        keys = self._keys
        held = np.array([unit for unit in set(units.tolist()) if unit in keys], np.int64)
        for unit, time in zip(held.tolist(), self._next_times(held).tolist(), strict=True):
            before = keys[unit]
            if before[0] != -time:
                self._push(unit, time, before[2])

    def renumber(self, after: Mapping[int, int]) -> None:
        """Also forgets the future and the values: they belong to one version."""
        for unit in [*self.eviction_order()]:
            self.sizes.move_to_end(unit)
        self._values = None
        self.set_future(None)
        super().renumber(after)

    def _next_times(self, units: Units) -> Times:
        assert self._future is not None
        return self._future.next_time(units)

    def _value_of(self, unit: int) -> float:
        return 0.0 if self._values is None else float(self._values[unit])

    def _push(self, unit: int, time: int, read: int) -> None:
        self._keys[unit] = key = -time, self._value_of(unit), read, unit
        heappush(self._heap, key)
        if len(self._heap) > 2 * len(self._keys) + _OLD_KEYS_MIN:
            self._heap = [*self._keys.values()]
            heapify(self._heap)

    def _is_old(self, key: _Key) -> bool:
        return self._keys.get(key[-1]) != key


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the unit that has been read least often since it came; among equals, the longest
    unread."""

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
    """Keeps the units that came first: each epoch then hits all units that fit, while LRU may hit
    none (the cache MinIO of CoorDL; Mohan et al., VLDB 2021, section 4.1)."""

    def record_access(self, unit: int) -> None:
        """Does nothing: the decisions depend on free room alone."""

    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        return size <= free_bytes

    def eviction_order(self) -> Iterator[int]:
        return iter(())


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "plan": FarthestNextUse,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "none": NoEviction,
}
"""By the names that `--evict` takes."""
