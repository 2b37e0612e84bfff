"""Thousands of simulated masters: real ownership, and a network that is a list of events.

The simulation has registrations (each master renews, receives the members, and uses them until its
next renewal), requests between masters, and transfers of whole chunks over links with so many bytes
a second: each master's own, and the store's. A simulated master answers by the chunks that it has
and the owners that it computes; what no master gives is read from the store.

Pure: the seed decides the outcome. Times are simulated seconds.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diesel_fs.net.breaker import PAUSE_S, TIMEOUT_MAX_S
from diesel_fs.peers.master import RENEW_S
from diesel_fs.peers.membership import TTL_S
from diesel_fs.peers.ownership import Ownership

ROUND_TRIP_S = 0.0005

Owners = npt.NDArray[np.int64]
Event = Callable[[], None]


@dataclass(slots=True)
class Master:
    """One simulated master; `view` is the number of the membership that it uses."""

    rank: int
    alive: bool = True
    joined: bool = False
    view: int = 0
    instance: int = 0
    free_s: float = 0.0  # when its link has done what it has to
    suspended: dict[int, float] = field(default_factory=dict)
    loading: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)  # to whom it has a connection


class Task:
    """The masters, the registrations, and the chunks that each master has."""

    def __init__(
        self,
        ownership: Ownership,
        sizes: npt.NDArray[np.uint64],
        world: int,
        *,
        link_bytes_s: float,
        store_bytes_s: float,
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.count: Counter[str] = Counter()
        self.loads: Counter[int] = Counter()  # of chunks, from the store
        self.worst_read_s = 0.0
        self._ownership = ownership
        self._sizes = sizes.astype(np.float64)
        self._link_bytes_s, self._store_bytes_s = link_bytes_s, store_bytes_s
        self._store_free_s = 0.0
        self._random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Event]] = []
        self._order = 0
        self._expires = np.full(world, -1.0)
        self._views: dict[bytes, int] = {}
        self.owners: list[Owners] = []
        self.masters = [Master(rank) for rank in range(world)]
        everyone = np.ones(world, np.bool_)
        self._first = self.owners[self._view(everyone)]
        self._more: dict[int, set[int]] = {}  # further holders of a chunk
        self._without: set[int] = set()  # masters that have lost their first chunks
        for master in self.masters:
            master.joined = True
            self._expires[master.rank] = TTL_S
            self.after(float(self._random.uniform(0, RENEW_S)), self._renewing(master, 0))

    # Time

    def after(self, seconds: float, event: Event) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._order, event))

    def run(self, until_s: float) -> None:
        """All that happens until then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    # Membership

    def kill(self, rank: int) -> None:
        """It is silent from now on, and all that it held is lost."""
        self.masters[rank].alive = False
        self._without.add(rank)
        for holders in self._more.values():
            holders.discard(rank)

    def start(self, rank: int) -> None:
        """A new master of that rank registers at once, and holds nothing."""
        before = self.masters[rank]
        master = self.masters[rank] = Master(rank, instance=before.instance + 1)
        self._renewing(master, master.instance)()

    def _renewing(self, master: Master, instance: int) -> Event:
        def renew() -> None:
            if not master.alive or self.masters[master.rank].instance != instance:
                return
            self._expires[master.rank] = self.now_s + TTL_S
            view = self._view(self._expires > self.now_s)
            if view != master.view or not master.joined:
                before, fresh = master.view, not master.joined
                master.view, master.joined = view, True
                if fresh:  # what it owns is with those who own it where it does not count
                    others = self._expires > self.now_s
                    others[master.rank] = False
                    before = self._view(others)
                self._take_over(master, before)
            self.after(RENEW_S, renew)

        return renew

    def _view(self, living: npt.NDArray[np.bool_]) -> int:
        key = np.packbits(living).tobytes()
        if key not in self._views:
            self._views[key] = len(self.owners)
            self.owners.append(self._ownership.owners(living))
        return self._views[key]

    # Chunks

    def holds(self, rank: int, chunk: int) -> bool:
        if rank in self._more.get(chunk, ()):
            return True
        return int(self._first[chunk]) == rank and rank not in self._without

    def missing(self) -> int:
        """Chunks that the owner, as all living masters see it, does not hold."""
        views = {master.view for master in self.masters if master.alive}
        if len(views) > 1:
            return len(self._first)
        owners = self.owners[views.pop()]
        moved = np.flatnonzero((owners != self._first) | np.isin(owners, [*self._without]))
        return sum(not self.holds(int(owners[chunk]), chunk) for chunk in moved.tolist())

    def _take_over(self, master: Master, before: int) -> None:
        """`oneshot`: what it owns now and does not hold is loaded, from who had it before."""
        owners = self.owners[master.view]
        for chunk in np.flatnonzero(owners == master.rank).tolist():
            if not self.holds(master.rank, chunk):
                self._load(master, chunk, int(self.owners[before][chunk]))

    def _load(self, master: Master, chunk: int, origin: int) -> None:
        if chunk in master.loading:
            return
        master.loading.add(chunk)
        size = self._sizes[chunk]
        from_peer = origin != master.rank and self._answers(origin) and self.holds(origin, chunk)
        ready_s = max(self.now_s, master.free_s) + size / self._link_bytes_s
        if from_peer:
            other = self.masters[origin]
            other.free_s = max(self.now_s, other.free_s) + size / self._link_bytes_s
            ready_s = max(ready_s, other.free_s)
            master.asked.add(origin)
        else:
            self._store_free_s = max(self.now_s, self._store_free_s) + size / self._store_bytes_s
            ready_s = max(ready_s, self._store_free_s)
            self.loads[chunk] += 1
        master.free_s = ready_s
        self.count["moved from a peer" if from_peer else "loaded from the store"] += 1

        def come() -> None:
            master.loading.discard(chunk)
            if master.alive and self.masters[master.rank] is master:
                self._more.setdefault(chunk, set()).add(master.rank)

        self.after(ready_s - self.now_s, come)

    # Reads

    def read_often(self, each_s: float, until_s: float) -> None:
        """Each master reads a random chunk's part every `each_s` seconds."""
        for rank in range(len(self.masters)):
            self.after(float(self._random.uniform(0, each_s)), self._reading(rank, each_s, until_s))

    def _reading(self, rank: int, each_s: float, until_s: float) -> Event:
        def read() -> None:
            if self.masters[rank].alive:
                self.read(rank, int(self._random.integers(len(self._first))))
            if self.now_s + each_s < until_s:
                self.after(each_s, read)

        return read

    def read(self, rank: int, chunk: int) -> None:
        """A part of a chunk, from whoever gives it; the store has all that nobody gives."""
        master = self.masters[rank]
        owner = int(self.owners[master.view][chunk])
        outcome, took_s = self._asked(master, owner, chunk)
        self.count[outcome] += 1
        self.worst_read_s = max(self.worst_read_s, took_s)

    def _asked(self, master: Master, owner: int, chunk: int) -> tuple[str, float]:
        if owner == master.rank:
            return ("own" if self.holds(owner, chunk) else "store"), 0.0
        if master.suspended.get(owner, 0.0) > self.now_s:
            return "store", 0.0
        if not self._answers(owner):
            master.suspended[owner] = self.now_s + PAUSE_S
            return "store, after a time-out", TIMEOUT_MAX_S
        master.asked.add(owner)
        other = self.masters[owner]
        if self.holds(owner, chunk):
            return "given", ROUND_TRIP_S
        if int(self.owners[other.view][chunk]) != owner:
            return "store, not mine", ROUND_TRIP_S
        self._load(other, chunk, owner)
        return "store", ROUND_TRIP_S

    def _answers(self, rank: int) -> bool:
        return self.masters[rank].alive and self.masters[rank].joined
