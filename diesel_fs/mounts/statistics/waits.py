"""Counts how long the readers of a mount have waited, and for what (SEMANTICS.md, "Waiting").

Most requests are answered at once, and counted afterwards by one call (`Waits.answered`). Any other
request is a `Wait` until it is answered; meanwhile threads mark its cause (`cache/waiting.py`).

If n requests wait at one moment, each of them accounts for 1/n of it. So a `WaitClock` has a
virtual time that runs n times slower than real time (as in processor sharing: Parekh and Gallager,
"A generalized processor sharing approach to flow control", 1993, section III). A request adds to
its cause the virtual time that passed. An event then costs the same however many requests wait.

Concurrency: the server's trio thread makes all calls except `Wait.enter`, `Wait.leave` and
`Waits.regroup`, which any thread may call. One lock guards the clocks while anything waits.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...cache.waiting import WaitCause

log = logging.getLogger("diesel.mount")

READERS_MAX = 64
"""Groups of processes to remember. For a further one, the group that was seen longest ago is
forgotten; a rank only if all others are ranks, too."""

THREADS_MAX = 4096
"""Threads to remember; then all are forgotten, and looked up again."""

THREADS_MAX_AGE_S = 60.0
"""The kernel may give a thread's number to another process later."""

_CAUSES = tuple(WaitCause)

CAUSE_NAMES = ("metadata", "mount", "prefetch", "decompression", "peer", "store")
"""The causes, in the order in which they are shown."""


class ReaderGroup(NamedTuple):
    """The processes that count as one reader: a rank of a training job, or a program and its
    workers."""

    rank: int | None
    pid: int
    command: str

    @property
    def key(self) -> tuple[int | None, int]:
        return (self.rank, 0 if self.rank is not None else self.pid)


UNSEEN = ReaderGroup(None, 0, "")
"""All invisible processes, and requests whose thread is unknown."""


class WaitClock:
    """All times are in seconds."""

    __slots__ = ("at_s", "causes_s", "requests_s", "virtual_s", "waited_s", "waiting")

    def __init__(self) -> None:
        self.waiting = 0  # requests that wait now
        self.at_s = 0.0  # while a request waits: all time before this is counted
        self.virtual_s = 0.0  # see the module
        self.waited_s = 0.0  # the time in which at least one request waited
        self.causes_s = [0.0] * len(_CAUSES)  # `waited_s`, divided among the causes
        self.requests_s = [0.0] * len(_CAUSES)  # by cause: the sum over all requests

    def advance(self, now_s: float) -> None:
        if self.waiting and now_s > self.at_s:
            passed_s = now_s - self.at_s
            self.waited_s += passed_s
            self.virtual_s += passed_s / self.waiting
            self.at_s = now_s
        elif not self.waiting:
            self.at_s = now_s

    def add(self, cause: WaitCause, begun_s: float, now_s: float) -> None:
        """Counts a request that was answered at once, while no other request began or ended."""
        self.requests_s[cause] += now_s - begun_s
        if not self.waiting:
            self.waited_s += now_s - begun_s
            self.causes_s[cause] += now_s - begun_s
            return
        self.advance(begun_s)
        self.waiting += 1
        before_s = self.virtual_s
        self.advance(now_s)
        self.waiting -= 1
        self.causes_s[cause] += self.virtual_s - before_s

    def figures(self, alone_s: Sequence[float]) -> dict[str, object]:
        """`alone_s` is the time of requests that waited alone, by cause, which this clock has not
        counted."""
        return {
            "waited_s": round(self.waited_s + sum(alone_s), 6),
            "causes_s": _by_name(self.causes_s, alone_s),
            "requests_s": _by_name(self.requests_s, alone_s),
            "waiting": self.waiting,
        }


class _Reader:
    __slots__ = ("alone_s", "clock", "clocks", "group", "requests", "seen_s")

    def __init__(self, group: ReaderGroup, mount: WaitClock | None) -> None:
        """`mount` is the clock of all readers; None for processes that do not count as readers."""
        self.group = group
        self.requests = 0
        # By cause: the time of requests that were answered at once while no other request of the
        # mount waited. To count it here takes half the time that the clocks take.
        self.alone_s = [0.0] * len(_CAUSES)
        self.seen_s = 0.0  # when its last request came
        self.clock = WaitClock()
        self.clocks = () if mount is None else (mount, self.clock)

    def merge(self, other: "_Reader") -> None:
        self.requests += other.requests
        self.seen_s = max(self.seen_s, other.seen_s)
        self.clock.waited_s += other.clock.waited_s
        for cause in _CAUSES:
            self.alone_s[cause] += other.alone_s[cause]
            self.clock.causes_s[cause] += other.clock.causes_s[cause]
            self.clock.requests_s[cause] += other.clock.requests_s[cause]


class Wait:
    """A request that is not answered at once. Its cause is the greatest one that is marked."""

    __slots__ = ("_base", "_before_s", "_cause", "_clocks", "_marks", "_owner", "_since_s")

    def __init__(
        self, owner: "Waits", clocks: Sequence[WaitClock], cause: WaitCause, now_s: float
    ) -> None:
        self._owner = owner
        self._clocks = clocks
        self._base = self._cause = cause  # the cause while nothing else is marked
        self._marks = [0] * len(_CAUSES)
        self._since_s = now_s
        self._before_s = [clock.virtual_s for clock in clocks]

    def enter(self, cause: WaitCause) -> None:
        """Marks a cause. Callable from any thread, and after the end of the request."""
        with self._owner.lock:
            self._marks[cause] += 1
            if cause > self._cause:
                self._change(cause)

    def leave(self, cause: WaitCause) -> None:
        """Removes a mark. Callable from any thread."""
        with self._owner.lock:
            self._marks[cause] -= 1
            if cause == self._cause and not self._marks[cause]:
                left = [each for each in _CAUSES if self._marks[each]]
                self._change(max([self._base, *left]))

    def _change(self, cause: WaitCause) -> None:
        self.settle(self._owner.now())
        self._cause = cause

    def settle(self, now_s: float) -> None:
        """Counts the time up to now. The caller holds the lock."""
        if not self._owner.is_waiting(self):
            return
        now_s = max(now_s, self._since_s)
        for number, clock in enumerate(self._clocks):
            clock.advance(now_s)
            clock.causes_s[self._cause] += clock.virtual_s - self._before_s[number]
            clock.requests_s[self._cause] += now_s - self._since_s
            self._before_s[number] = clock.virtual_s
        self._since_s = now_s


class _DecodingInline:
    """Measures only the decompression, in requests that are answered at once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since_s = 0.0
        self.decoded_s = 0.0

    def enter(self, cause: WaitCause) -> None:
        if cause == WaitCause.DECOMPRESSION:
            self._since_s = self._now()

    def leave(self, cause: WaitCause) -> None:
        if cause == WaitCause.DECOMPRESSION:
            self.decoded_s += self._now() - self._since_s


class Waits:
    def __init__(
        self,
        identify: Callable[[int], ReaderGroup | None] = lambda _: UNSEEN,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identify` returns the group of a thread, or None if its requests do not count."""
        self.now = now
        self.lock = threading.Lock()
        self.inline = _DecodingInline(now)
        """Observes the server's thread while it answers a request."""
        self._identify = identify
        self._clock = WaitClock()
        self._waiting: set[Wait] = set()
        self._nobody = _Reader(UNSEEN, None)  # for processes that do not count as readers
        self._readers: dict[tuple[int | None, int], _Reader] = {}
        self._dropped_alone_s = [0.0] * len(_CAUSES)  # the `alone_s` of forgotten readers
        self._by_thread: dict[int, _Reader] = {}
        self._started_s = now()
        self._forget_at_s = self._started_s + THREADS_MAX_AGE_S
        self._regrouped: deque[tuple[ReaderGroup, ReaderGroup]] = deque()

    def answered(self, thread: int, cause: WaitCause, begun_s: float) -> None:
        """Counts a request that was answered at once. Thread 0: unknown."""
        now_s = self.now()
        reader = self._by_thread.get(thread)
        if reader is None or now_s > self._forget_at_s:
            reader = self._find_reader(thread, now_s)
        reader.requests += 1
        reader.seen_s = now_s
        decoded_s = self.inline.decoded_s
        if not decoded_s and not self._clock.waiting:
            reader.alone_s[cause] += now_s - begun_s
            return
        self.inline.decoded_s = 0.0
        decoded_at_s = min(begun_s + decoded_s, now_s)
        with self.lock:
            for clock in reader.clocks:
                clock.add(WaitCause.DECOMPRESSION, begun_s, decoded_at_s)
                clock.add(cause, decoded_at_s, now_s)

    def begin(self, thread: int, cause: WaitCause, begun_s: float) -> Wait:
        """Begins a request that arrived at `begun_s` and is not answered at once. `cause` counts
        while no greater cause is marked. The caller calls `end` with the result."""
        reader = self._by_thread.get(thread)
        if reader is None or begun_s > self._forget_at_s:
            reader = self._find_reader(thread, begun_s)
        reader.requests += 1
        reader.seen_s = begun_s
        since_s = begun_s
        with self.lock:
            for clock in reader.clocks:
                clock.advance(begun_s)
                clock.waiting += 1
                since_s = max(since_s, clock.at_s)
            wait = Wait(self, reader.clocks, cause, since_s)
            self._waiting.add(wait)
        return wait

    def end(self, wait: Wait) -> None:
        with self.lock:
            wait.settle(self.now())
            self._waiting.discard(wait)
            for clock in wait._clocks:
                clock.waiting -= 1

    def is_waiting(self, wait: Wait) -> bool:
        """The caller holds the lock."""
        return wait in self._waiting

    def figures(self) -> dict[str, object]:
        """The value of `waits` in `.diesel/stats`."""
        self._merge_regrouped()
        with self.lock:
            now_s = self.now()
            for wait in self._waiting:
                wait.settle(now_s)
            readers = list(self._readers.values())
            all_alone_s = [
                sum(some)
                for some in zip(
                    self._dropped_alone_s, *(each.alone_s for each in readers), strict=True
                )
            ]
            return {
                "clock_s": round(now_s - self._started_s, 6),
                **self._clock.figures(all_alone_s),
                "readers": [
                    {
                        **each.group._asdict(),
                        "requests": each.requests,
                        **each.clock.figures(each.alone_s),
                    }
                    for each in readers
                ],
            }

    def regroup(self, before: ReaderGroup, group: ReaderGroup) -> None:
        """Moves the counts of `before` to `group`, soon. Any thread."""
        self._regrouped.append((before, group))
        self._forget_at_s = -math.inf  # the next request moves them

    def _find_reader(self, thread: int, now_s: float) -> _Reader:
        if now_s > self._forget_at_s or len(self._by_thread) >= THREADS_MAX:
            self._by_thread.clear()
            self._forget_at_s = now_s + THREADS_MAX_AGE_S
            self._merge_regrouped()
        group: ReaderGroup | None = UNSEEN
        try:
            group = self._identify(thread) if thread else UNSEEN
        except Exception:  # a bug here must not end the mount
            log.exception("cannot find out which process reads")
        reader = self._by_thread[thread] = self._nobody if group is None else self._reader(group)
        return reader

    def _reader(self, group: ReaderGroup) -> _Reader:
        reader = self._readers.get(group.key)
        if reader is None:
            if len(self._readers) >= READERS_MAX:
                self._make_room()
            reader = self._readers[group.key] = _Reader(group, self._clock)
        return reader

    def _merge_regrouped(self) -> None:
        for _ in range(len(self._regrouped)):
            before, group = self._regrouped.popleft()
            old = self._readers.get(before.key)
            if old is None:
                continue
            if old.clock.waiting:  # its requests go on counting: later
                self._regrouped.append((before, group))
                continue
            del self._readers[before.key]
            self._reader(group).merge(old)
            self._by_thread.clear()

    def _make_room(self) -> None:
        """Forgets the group that was seen longest ago and has no waiting request."""
        idle = [each for each in self._readers.values() if not each.clock.waiting]
        if idle:
            dropped = min(idle, key=lambda each: (each.group.rank is not None, each.seen_s))
            del self._readers[dropped.group.key]
            for cause in _CAUSES:
                self._dropped_alone_s[cause] += dropped.alone_s[cause]
            for thread in [each for each, its in self._by_thread.items() if its is dropped]:
                del self._by_thread[thread]


def _by_name(first_s: Sequence[float], second_s: Sequence[float]) -> Mapping[str, float]:
    return {
        name: round(first_s[cause] + second_s[cause], 6)
        for name, cause in ((name, WaitCause[name.upper()]) for name in CAUSE_NAMES)
    }
