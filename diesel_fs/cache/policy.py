"""Eviction policies: what a cache takes in, and what it gives up. They decide and do nothing else.

A **unit** is a run of entries that is kept or given up as one; a whole chunk is the simplest. Units
are numbers, which mean the same on every node. Owned here: the interface, and the policies that
know only the past. Not owned: bytes, tiers, and the budget, which the caller counts. Pure: the same
events give the same answers on every machine; one thread at a time.

A policy is a class and a line in `POLICIES`. What tells of the future, of costs and of other nodes
(`Planned`, `Progress`, `Cost`, `Value`, `Replicas`), and the question to which node a unit belongs
(`home`), are part of the interface, so that policies can be written for them; no cache says or asks
any of that yet.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inserted:
    """A unit of so many bytes is in the cache now."""

    unit: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A unit is in the cache no more, whoever decided that."""

    unit: int


@dataclass(frozen=True, slots=True)
class Accessed:
    """Somebody read of a unit, whether it was there or not."""

    unit: int


Event = Inserted | Evicted | Accessed


class EvictionPolicy(ABC):
    """What a cache keeps."""

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Something happened. The events of one cache come in the order in which they happened; one
        that a policy has no use for passes."""

    @abstractmethod
    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        """Whether a unit of `size` bytes that is not in the cache is worth taking in, where
        `free_bytes` bytes are free. It changes nothing: the caller may ask and not do it."""

    @abstractmethod
    def victims(self, wanted: int) -> Sequence[int]:
        """Units to be given up, the least worth first, that have `wanted` bytes together, or all
        there are. It changes nothing: what is given up is told by `Evicted`."""


class _Counted(EvictionPolicy):
    """One that takes in whatever can be made room for."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._held = 0

    def on_event(self, event: Event) -> None:
        match event:
            case Inserted(unit, size):
                self._came(unit, size)
            case Evicted(unit):
                self._went(unit)
            case Accessed(unit):
                self._used(unit)

    def admits(self, unit: int, size: int, room: int) -> bool:
        return size <= room + self._held

    def victims(self, wanted: int) -> Sequence[int]:
        chosen: list[int] = []
        for unit in self._worst_first():
            if wanted <= 0:
                break
            chosen.append(unit)
            wanted -= self._sizes[unit]
        return chosen

    @abstractmethod
    def _worst_first(self) -> Iterator[int]:
        """All units in the cache."""

    @abstractmethod
    def _used(self, unit: int) -> None:
        """A unit has been used, which need not be in the cache."""

    def _came(self, unit: int, size: int) -> None:
        self._held += size - self._sizes.get(unit, 0)
        self._sizes[unit] = size

    def _went(self, unit: int) -> None:
        self._held -= self._sizes.pop(unit, 0)


class LeastRecentlyUsed(_Counted):
    """What has not been used for longest goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[int, None] = OrderedDict()

    def _worst_first(self) -> Iterator[int]:
        return iter(self._order)

    def _came(self, unit: int, size: int) -> None:
        super()._came(unit, size)
        self._order[unit] = None
        self._order.move_to_end(unit)

    def _went(self, unit: int) -> None:
        super()._went(unit)
        self._order.pop(unit, None)

    def _used(self, unit: int) -> None:
        if unit in self._order:
            self._order.move_to_end(unit)


class LeastFrequentlyUsed(_Counted):
    """What has been used least often since it came goes first; of these the longest unused."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {}

    def _worst_first(self) -> Iterator[int]:
        for uses in sorted(self._by_uses):
            yield from self._by_uses[uses]

    def _came(self, unit: int, size: int) -> None:
        super()._came(unit, size)
        self._count(unit, self._uses.get(unit, 0))

    def _went(self, unit: int) -> None:
        super()._went(unit)
        self._leave(unit)
        self._uses.pop(unit, None)

    def _used(self, unit: int) -> None:
        if unit in self._uses:
            self._count(unit, self._uses[unit] + 1)

    def _count(self, unit: int, uses: int) -> None:
        self._leave(unit)
        self._uses[unit] = uses
        self._by_uses.setdefault(uses, OrderedDict())[unit] = None

    def _leave(self, unit: int) -> None:
        uses = self._uses.get(unit)
        if uses is not None:
            same = self._by_uses[uses]
            same.pop(unit, None)
            if not same:
                del self._by_uses[uses]


class NoEviction(EvictionPolicy):
    """What is in stays in: each epoch hits what fits, where LRU may hit nothing (the cache MinIO of
    CoorDL; Mohan et al., VLDB 2021, section 4.1)."""

    def on_event(self, event: Event) -> None:
        """Nothing changes its mind."""

    def admits(self, unit: int, size: int, room: int) -> bool:
        return size <= room

    def victims(self, wanted: int) -> Sequence[int]:
        return []


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "none": NoEviction,
}
"""By the names that `--evict` takes."""
