"""Lets only as many workers of a loader prepare batches at once as the processors can serve.

A script may start more workers than its machine can use. They then share the processors, so that
all their first batches come late and together, and the loop and the mount get less time. A
worker therefore takes a *turn* before it prepares a batch, and the number of turns follows from
measurements (Lobster, section 4.1: the fewest threads with which preprocessing is fastest; a worker
that waits for its files leaves its processor to another one). torch gives each worker the same
batches as without turns, so samples, their order and the random numbers inside workers stay the
same.

Turns are semaphores of multiprocessing, which forked and spawned workers share. A worker that gets
no turn for `TURN_S`, because another one was killed or waits for it, goes on and takes no more.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

TURN_S = 20.0
SPARE = 1.5
"""Workers over those that keep all processors busy on average: some wait for files at the same
time."""
_MEASURED_MIN = 8  # batches before the first decision
_MEASURED_FIRST, _MEASURED_EVERY = 32, 7
"""A worker measures its first batches, then one in seven, which counts for seven: to read the
kernel's clock of waits takes 15 us."""
_BATCHES, _FETCH_S, _CPU_S, _COUNTED = 0, 1, 2, 3  # the values of a worker, and their number


class _Lock(Protocol):
    def acquire(self, block: bool = True, timeout: float | None = None) -> bool: ...
    def release(self) -> None: ...


class _Numbers(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, at: int) -> float: ...
    def __setitem__(self, at: int, value: float) -> None: ...


class _Context(Protocol):
    """A context of multiprocessing."""

    def Semaphore(self, value: int) -> _Lock: ...
    def Lock(self) -> _Lock: ...
    def RawArray(self, kind: str, size: int) -> _Numbers: ...


class Turns(NamedTuple):
    """The memory and locks that the loop's process and the workers of one iterator share."""

    turns: _Lock  # a semaphore
    next: _Lock  # held by the worker that gets the next turn: the others queue here
    changes: _Lock  # guards `surplus`
    surplus: _Numbers  # one value: how many turns end when they are given back
    measured: _Numbers  # by worker: batches, seconds, seconds of processors


class Pace:
    """Measures the workers of one iterator and decides on their turns, in the loop's process."""

    def __init__(self, context: _Context, workers: int, at_once: int) -> None:
        """`at_once`: the number of turns at first."""
        self.workers, self.at_once = workers, at_once
        self.cores = cores_of_rank()
        self._has_failed = False
        self._before = [0.0] * _COUNTED  # the sums at the start of the epoch
        self.shared = Turns(
            context.Semaphore(at_once),
            context.Lock(),
            context.Lock(),
            context.RawArray("d", 1),
            context.RawArray("d", _COUNTED * workers),
        )

    def begin_epoch(self) -> None:
        self._before = self._sums()

    def _sums(self) -> list[float]:
        values = self.shared.measured
        return [
            sum(values[at] for at in range(first, len(values), _COUNTED))
            for first in range(_COUNTED)
        ]

    def measured(self) -> dict[str, object]:
        """The measurements of this epoch for the launcher: the number of batches, the seconds that
        they took without waiting for a processor, and the processors' seconds in these."""
        batches, fetch_s, cpu_s = (now - was for now, was in zip(self._sums(), self._before))  # noqa: B905 (Python 3.9)
        return {
            "workers": self.workers, "at_once": self.at_once, "cores": self.cores,
            "fetched": int(batches), "fetch_s": fetch_s, "cpu_s": cpu_s,
        }  # fmt: skip

    def tune(self) -> None:
        """Change the number of turns if the measurements ask for that."""
        batches, fetch_s, cpu_s = (now - was for now, was in zip(self._sums(), self._before))  # noqa: B905 (Python 3.9)
        if batches >= _MEASURED_MIN and not self._has_failed:
            self._set(min(useful_workers(fetch_s, cpu_s, self.cores), self.workers))

    def _set(self, at_once: int) -> None:
        turns, _, changes, surplus_of, _ = self.shared
        more = at_once - self.at_once
        if not more:
            return
        if not changes.acquire(timeout=0.1):  # a worker was killed while it held the lock
            self._has_failed = True
            return
        self.at_once = at_once
        surplus = int(surplus_of[0]) - more
        surplus_of[0] = max(surplus, 0)
        changes.release()
        for _ in range(-surplus):
            turns.release()


class TurnTaker:
    """Takes a turn for each batch of this process, a worker."""

    def __init__(self, shared: Turns, worker: int, turn_s: float = TURN_S) -> None:
        """`turn_s`: the longest wait for a turn."""
        self._shared, self._worker, self._turn_s = shared, worker, turn_s
        # With a processor for each worker, all may work at once, and turns would only cost time
        self._takes_turns = len(shared.measured) > _COUNTED * cores_of_rank()
        self._count = 0  # batches

    def install(self, kind: type | None = None) -> None:
        """Wrap the `fetch` of a class, by default of torch's for map-style datasets."""
        torchs = sys.modules["torch.utils.data._utils.fetch"]
        wrapped: type = torchs._MapDatasetFetcher if kind is None else kind
        original = wrapped.fetch  # type: ignore[attr-defined] # such a class

        @functools.wraps(original)
        def fetch(*arguments: object) -> object:
            begun = None
            with suppress(Exception):
                self._takes_turns = self._takes_turns and self._take()
                self._count += 1
                if self._weight():
                    begun = _times()
            has_turn = self._takes_turns
            try:
                return original(*arguments)
            finally:
                with suppress(Exception):
                    if begun is not None:
                        self._note(begun, _times())
                    if has_turn:
                        self._give_back()

        wrapped.fetch = fetch  # type: ignore[attr-defined] # likewise

    def _take(self) -> bool:
        if not self._shared.next.acquire(timeout=self._turn_s):
            return False
        try:
            return self._shared.turns.acquire(timeout=self._turn_s)
        finally:
            self._shared.next.release()

    def _give_back(self) -> None:
        turns, _, changes, surplus, _ = self._shared
        if not changes.acquire(timeout=self._turn_s):
            return
        is_surplus = surplus[0] >= 1
        surplus[0] -= is_surplus
        changes.release()
        if not is_surplus:
            turns.release()

    def _weight(self) -> int:
        """For how many batches the current one counts in the measurements."""
        if self._count <= _MEASURED_FIRST:
            return 1
        return 0 if self._count % _MEASURED_EVERY else _MEASURED_EVERY

    def _note(self, begun: Sequence[float], ended: Sequence[float]) -> None:
        wall_s, cpu_s, queued_s = (after - before for before, after in zip(begun, ended))  # noqa: B905 (Python 3.9)
        at, measured, weight = _COUNTED * self._worker, self._shared.measured, self._weight()
        measured[at + _BATCHES] += weight
        measured[at + _FETCH_S] += weight * max(wall_s - queued_s, 0.0)
        measured[at + _CPU_S] += weight * cpu_s


def useful_workers(fetch_s: float, cpu_s: float, cores: float) -> int:
    """How many workers at once make use of the processors, if a batch takes `fetch_s`, of which
    processors work `cpu_s`. More workers prepare no more batches in a second."""
    if cpu_s <= 0:
        return sys.maxsize
    return max(round(SPARE * cores * fetch_s / cpu_s), 1)


def cores_of_rank() -> float:
    """The processors that this process may use, shared equally with the other ranks of the node."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return len(os.sched_getaffinity(0)) / max(int(ranks) if ranks.isdigit() else 1, 1)


def _times() -> tuple[float, float, float]:
    """The clock, the processors' time of this process, and how long its first thread has waited for
    a processor (0 if the kernel does not count that)."""
    queued_ns = 0
    with suppress(OSError, ValueError, IndexError), open("/proc/self/schedstat") as file:
        queued_ns = int(file.read().split()[1])
    return time.perf_counter(), time.process_time(), queued_ns / 1e9
