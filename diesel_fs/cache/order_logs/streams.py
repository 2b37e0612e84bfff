"""Which order log each stream reads, and which one is written for its next epoch. Pure.

A *stream* is a reader with an order of its own, for example one rank of a training job. It reads
the log of its order if there is one. If the next order is unknown, its entries are written in the
order in which they come; in the next epoch the stream reads that log entry by entry.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from ...orders.plan import NO_ENTRIES, Entries
from .layout import LogIdentity


@dataclass(frozen=True, slots=True, eq=False)
class LogPlan:
    """The order of one stream in this epoch and in the next one, each None if it is unknown. Two
    plans are equal if they have the same arrays."""

    name: str
    current: Entries | None
    following: Entries | None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LogPlan)
            and self.name == other.name
            and self.current is other.current
            and self.following is other.following
        )

    __hash__ = None  # type: ignore[assignment]  # it is compared only


class StreamLogs:
    """The logs of all streams, by the digests of their orders."""

    def __init__(self, identity: UUID, version: int) -> None:
        self._identity, self._version = identity, version
        self.plans: list[LogPlan] = []
        self.orders: dict[int, Entries] = {}
        """The orders of all logs that are wanted, by digest."""
        self.sources: dict[str, int] = {}
        """The log that each stream reads from."""
        self.following: dict[str, int] = {}
        """The log that is written for the next epoch of each stream."""
        self._current: dict[str, int] = {}  # the order that it reads
        self._announced: dict[str, int | None] = {}  # the order of the next epoch
        self._digests: dict[int, tuple[Entries, int]] = {}  # by the array's id; it keeps the array

    def set_plans(self, plans: Sequence[LogPlan], existing: Collection[int]) -> list[str]:
        """The streams read these orders now and next; `existing` are the digests of the logs that
        exist. Returns the streams that read another order than was announced."""
        self.plans = [*plans]
        known, self._digests = self._digests, {}
        orders = dict(self.orders)
        for each in plans:
            for order in (each.current, each.following):
                if order is not None:
                    digest = known[id(order)][1] if id(order) in known else self._hash(order)
                    self._digests[id(order)] = order, digest
                    orders[digest] = order
        sources, following = dict[str, int](), dict[str, int]()
        surprised = []
        for each in plans:
            # The stream's files lie in the log of its order; or, if that was not foreseen, in the
            # log that was written while it read the epoch before
            written, announced = self.following.get(each.name), self._announced.get(each.name)
            before = self.sources.get(each.name, written)
            if (current := self.digest(each.current)) is not None:
                is_another = self._current.get(each.name) != current
                source = written if is_another and written is not None else before
                sources[each.name] = current if source is None or current in existing else source
                if is_another and announced is not None and announced != current:
                    surprised.append(each.name)
            next_log = self.digest(each.following)
            if next_log is None and each.name in sources:
                next_log = sources[each.name]
            if next_log is not None:
                following[each.name] = next_log
        read = {each.name: self.digest(each.current) for each in plans}
        self._current = {name: digest for name, digest in read.items() if digest is not None}
        self.sources, self.following = sources, following
        self._announced = {each.name: self.digest(each.following) for each in plans}
        wanted = {*sources.values(), *following.values(), *self._current.values()}
        self.orders = {digest: orders[digest] for digest in wanted}
        return surprised

    @property
    def in_order(self) -> frozenset[int]:
        """The orders that are being read."""
        return frozenset(self._current.values())

    def current(self, name: str) -> int:
        """The order that a stream reads; -1 if it reads none."""
        return self._current.get(name, -1)

    def digest(self, order: Entries | None) -> int | None:
        """The digest of an order of the plans; None for any other."""
        found = self._digests.get(id(order))
        return None if order is None or found is None else found[1]

    def arrivals(self) -> Entries:
        """All orders that are being read, as one: at each moment each is at the same part."""
        orders = [each.current for each in self.plans if each.current is not None]
        if len(orders) < 2:
            return orders[0] if orders else NO_ENTRIES
        moments = [np.linspace(0, 1, len(order), endpoint=False) for order in orders]
        return np.concatenate(orders)[np.argsort(np.concatenate(moments), kind="stable")]

    def _hash(self, order: Entries) -> int:
        return LogIdentity.of(self._identity, self._version, order).order
