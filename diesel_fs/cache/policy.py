"""Eviction policies: which chunks a cache takes in, and which it gives up when it is full.

A policy decides and does nothing else: the cache tells it what happens (`on_event`), asks it, and
counts bytes itself. A *unit* is what is kept or evicted as one, by number: here a chunk. Policies
are pure: the same events give the same answers on every machine. One thread at a time.

A policy is a class and a line in `POLICIES`, whose names users give to `--evict`.
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
    """A unit has left the cache, for whatever reason."""

    unit: int


@dataclass(frozen=True, slots=True)
class Accessed:
    """A reader has read bytes of a unit, whether the cache had it or not."""

    unit: int


Event = Inserted | Evicted | Accessed


class EvictionPolicy(ABC):
    """Decides what a cache keeps."""

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Hear of an event. The events of one cache come in the order in which they happened."""

    @abstractmethod
    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        """Whether to take in a unit of `size` bytes that is not in the cache, where `free_bytes`
        are free. Changes nothing: the caller may decide otherwise."""

    @abstractmethod
    def victims(self, wanted: int) -> Sequence[int]:
        """Units to evict, the least valuable first, which have `wanted` bytes together; or all
        units that may be evicted. Changes nothing: the caller reports evictions by `Evicted`."""


class _ByUse(EvictionPolicy):
    """Takes in every unit for which there is or can be room. Subclasses rank units by their use."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._bytes = 0

    def on_event(self, event: Event) -> None:
        match event:
            case Inserted(unit, size):
                self._inserted(unit, size)
            case Evicted(unit):
                self._evicted(unit)
            case Accessed(unit):
                self._accessed(unit)

    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        return size <= free_bytes + self._bytes

    def victims(self, wanted: int) -> Sequence[int]:
        chosen: list[int] = []
        for unit in self._least_valuable_first():
            if wanted <= 0:
                break
            chosen.append(unit)
            wanted -= self._sizes[unit]
        return chosen

    @abstractmethod
    def _least_valuable_first(self) -> Iterator[int]:
        """All units in the cache."""

    @abstractmethod
    def _accessed(self, unit: int) -> None:
        """A unit has been read, which may be absent from the cache."""

    def _inserted(self, unit: int, size: int) -> None:
        self._bytes += size - self._sizes.get(unit, 0)
        self._sizes[unit] = size

    def _evicted(self, unit: int) -> None:
        self._bytes -= self._sizes.pop(unit, 0)


class LeastRecentlyUsed(_ByUse):
    """Evicts first what has not been read for the longest time."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[int, None] = OrderedDict()

    def _least_valuable_first(self) -> Iterator[int]:
        return iter(self._order)

    def _inserted(self, unit: int, size: int) -> None:
        super()._inserted(unit, size)
        self._order[unit] = None
        self._order.move_to_end(unit)

    def _evicted(self, unit: int) -> None:
        super()._evicted(unit)
        self._order.pop(unit, None)

    def _accessed(self, unit: int) -> None:
        if unit in self._order:
            self._order.move_to_end(unit)


class LeastFrequentlyUsed(_ByUse):
    """Evicts first what has been read least often since it came; of these the longest unread."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {}

    def _least_valuable_first(self) -> Iterator[int]:
        for uses in sorted(self._by_uses):
            yield from self._by_uses[uses]

    def _inserted(self, unit: int, size: int) -> None:
        super()._inserted(unit, size)
        self._count(unit, self._uses.get(unit, 0))

    def _evicted(self, unit: int) -> None:
        super()._evicted(unit)
        self._leave(unit)
        self._uses.pop(unit, None)

    def _accessed(self, unit: int) -> None:
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
    """Keeps what came first and takes in nothing else once the cache is full.

    Each epoch then hits what fits, where LRU may hit nothing (the cache MinIO of CoorDL; Mohan et
    al., VLDB 2021, section 4.1).
    """

    def on_event(self, event: Event) -> None:
        """Ignored: the decisions depend on free room alone."""

    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        return size <= free_bytes

    def victims(self, wanted: int) -> Sequence[int]:
        return []


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "none": NoEviction,
}
"""Policies by the names that `--evict` takes."""
