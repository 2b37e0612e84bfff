"""Chooses the order log that each stream reads, and the log that is written for its next epoch.
Pure.

A *stream* is a reader with an order of its own, for example one rank of a training job. It reads
the log of its order if there is one. If its next order is unknown, the files of this epoch are
logged in this epoch's own order. When the next order becomes known, and the one after it, that log
is rewritten; until then the stream reads it entry by entry.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from ...orders.plan import NO_ENTRIES, Entries
from .layout import LogIdentity


@dataclass(frozen=True, slots=True, eq=False)
class LogPlan:
    """The order of one stream in this epoch and in the next one; None: unknown. Two plans are equal
    if they have the same arrays."""

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

    __hash__ = None  # type: ignore[assignment]  # plans are only compared


@dataclass(frozen=True, slots=True)
class WantedLogs:
    """The logs that the streams want. A log is named by the digest of its order."""

    orders: dict[int, Entries]
    """The orders of all these logs by digest; those that are being read come first."""
    following: frozenset[int]
    """The logs that will be written, for the next epochs."""
    unforeseen: frozenset[int]
    """Orders that are being read. A missing log of one may be made of other logs."""
    arrivals: Entries
    """The order in which contents will come."""


class StreamLogs:
    """The logs of all streams, named as in `WantedLogs`."""

    def __init__(self, identity: UUID, version: int) -> None:
        self._identity, self._version = identity, version
        self.plans: list[LogPlan] = []
        self.orders: dict[int, Entries] = {}
        """As in `WantedLogs`."""
        self.sources: dict[str, int] = {}
        """The log that each stream reads from, by the stream's name."""
        self.following: dict[str, int] = {}
        """The log that is written for the next epoch of each stream."""
        self._current: dict[str, int] = {}  # the digest of the order that each stream reads
        self._announced: dict[str, int | None] = {}  # that of its next epoch's order
        # Arrays of orders, and their digests, by the array's id. Keeping the array keeps its id
        self._digests: dict[int, tuple[Entries, int]] = {}

    def set_plans(self, plans: Sequence[LogPlan], existing: Collection[int]) -> list[str]:
        """Set the orders of all streams. `existing` has the digests of the logs that exist. Returns
        the names of streams that now read another order than was announced for them."""
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
            # The stream's files lie in the log of its order, or, if that order was not foreseen, in
            # the log that was written while the stream read the epoch before. If the next order is
            # known, that log is rewritten for this order
            written, announced = self.following.get(each.name), self._announced.get(each.name)
            before = self.sources.get(each.name, written)
            if (current := self.digest(each.current)) is not None:
                is_another = self._current.get(each.name) != current
                source = written if is_another and written is not None else before
                if source is None or current in existing or each.following is not None:
                    source = current
                sources[each.name] = source
                if is_another and announced is not None and announced != current:
                    surprised.append(each.name)
            next_log = self.digest(each.following)
            if next_log is None and each.name in sources:
                # The next order is unknown: keep this epoch's log for it
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

    def wanted(self) -> WantedLogs:
        own = frozenset(self.sources.values()) & self.current_orders
        orders = dict(sorted(self.orders.items(), key=lambda each: each[0] not in own))
        following = frozenset(self.following.values())
        return WantedLogs(orders, following, own, self._arrivals())

    @property
    def current_orders(self) -> frozenset[int]:
        return frozenset(self._current.values())

    def current(self, name: str) -> int:
        """The digest of the order that a stream reads; -1 if that order is unknown."""
        return self._current.get(name, -1)

    def digest(self, order: Entries | None) -> int | None:
        """The digest of an array of the current plans; None for others."""
        found = self._digests.get(id(order))
        return None if order is None or found is None else found[1]

    def _arrivals(self) -> Entries:
        """All orders that are being read, merged as if all streams were always through with the
        same part."""
        orders = [each.current for each in self.plans if each.current is not None]
        if len(orders) < 2:
            return orders[0] if orders else NO_ENTRIES
        moments = [np.linspace(0, 1, len(order), endpoint=False) for order in orders]
        return np.concatenate(orders)[np.argsort(np.concatenate(moments), kind="stable")]

    def _hash(self, order: Entries) -> int:
        return LogIdentity.of(self._identity, self._version, order).order
