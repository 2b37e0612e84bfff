"""Refreshes everything on the dashboard at each tick, and makes one JSON state of it.

While a page looks, a tick comes each second, otherwise each 5 s for the history. A tick waits at
most `ANSWERS_S`; later answers are in the next state. One thread runs the ticks; any thread may
call the rest.
"""

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping

import diesel_fs
from diesel_fs.mounts.statistics.reader_groups import reader_group

from .datasets import WatchedDatasets
from .history import EVERY_S, History
from .mounts import COLUMNS, MountPlace, OwnMounts, WatchedMount, tasks
from .servers import WatchedServer
from .watched import Described, Watched

log = logging.getLogger("diesel.dashboard")

WATCHED_EVERY_S, UNWATCHED_EVERY_S = 1.0, 5.0
WATCHED_FOR_S = 10.0
"""A page counts as looking for this time after its last request."""

DATASETS_UNWATCHED_S = 300.0
ANSWERS_S = 0.5
GONE_KEPT_S = 600.0

MOUNTS_MAX = 256
"""More mounts are counted, but not shown."""


class Watcher:
    def __init__(self, servers: list[WatchedServer], datasets: WatchedDatasets) -> None:
        self._mounts: dict[MountPlace, WatchedMount] = {}
        self._own_mounts = OwnMounts()
        self._all = History(("count", *COLUMNS))
        self._servers = servers
        self._datasets = datasets
        self._numbers = itertools.count(1)
        group = reader_group(os.getpid())
        # In another program's process group, leaving it out would hide that program's reads, too
        self._own_pid = group.pid if group.pid == os.getpid() else -1
        self._host = socket.gethostname()
        self._left_out = 0
        self._change = threading.Condition()
        self._tick = 0
        self._state = b"{}"
        self._looked_s = -WATCHED_FOR_S  # of a page
        self._datasets_s = 0.0
        self._point_s = 0.0
        self._is_ended = False

    # For the pages

    def state(self, after: int, wait_s: float) -> bytes:
        """Waits at most `wait_s` until the state's `tick` exceeds `after`."""
        with self._change:
            if time.monotonic() > self._looked_s + WATCHED_FOR_S:
                after = self._tick  # the state may be old
            self._looked_s = time.monotonic()
            self._change.notify_all()
            self._change.wait_for(lambda: self._tick > after, wait_s)
            self._looked_s = time.monotonic()
            return self._state

    def datasets(self) -> bytes:
        return json.dumps(self._datasets.all()).encode()

    def history(self, source_id: str, since_s: float) -> bytes | None:
        """Returns the points after `since_s`, as JSON; None for an unknown ID. The ID `all` means
        all mounts together."""
        with self._change:
            sources: list[Watched] = [*self._mounts.values(), *self._servers]
            known = {"all": self._all, **{each.id: each.history for each in sources}}
            found = known.get(source_id)
            return None if found is None else json.dumps(found.since(since_s)).encode()

    # The ticks

    def run(self) -> None:
        while not self._is_ended:
            began_s = time.monotonic()
            try:
                self._do_tick()
            except Exception:  # the page shows that figures get old
                log.exception("a bug in watching")
            self._sleep(began_s)

    def end(self) -> None:
        with self._change:
            self._is_ended = True
            self._change.notify_all()

    def _is_watched(self) -> bool:
        return time.monotonic() < self._looked_s + WATCHED_FOR_S

    def _sleep(self, began_s: float) -> None:
        def is_due() -> bool:
            every_s = WATCHED_EVERY_S if self._is_watched() else UNWATCHED_EVERY_S
            return self._is_ended or time.monotonic() >= began_s + every_s

        with self._change:
            while not is_due():
                every_s = WATCHED_EVERY_S if self._is_watched() else UNWATCHED_EVERY_S
                self._change.wait(max(began_s + every_s - time.monotonic(), 0.001))

    def _do_tick(self) -> None:
        now_s = time.monotonic()
        with self._change:
            self._find_mounts(now_s)
            refreshed: list[Watched] = [
                *(each for each in self._mounts.values() if each.gone_s is None), *self._servers
            ]  # fmt: skip
        for each in refreshed:
            each.refresh_soon()
        if self._is_watched() or now_s > self._datasets_s + DATASETS_UNWATCHED_S:
            self._datasets_s = now_s
            self._datasets.refresh_soon()
        until_s = time.monotonic() + ANSWERS_S
        for each in refreshed:
            each.is_done.wait(max(until_s - time.monotonic(), 0.0))
        with self._change:
            if now_s >= self._point_s + EVERY_S - 0.5:
                self._point_s = now_s
                self._add_points(refreshed)
            self._tick += 1
            self._state = json.dumps(self._describe()).encode()
            self._change.notify_all()

    def _add_points(self, sources: Iterable[Watched]) -> None:
        time_s, of_mounts = time.time(), []
        for each in sources:
            if (point := each.point()) is not None:
                each.history.add(time_s, point)
                if isinstance(each, WatchedMount):
                    of_mounts.append(point)
        if of_mounts:
            self._all.add(time_s, add_up(of_mounts))

    def _describe(self) -> Described:
        mounts = list(self._mounts.values())
        return {
            "tick": self._tick,
            "time": round(time.time(), 3),
            "host": self._host,
            "version": diesel_fs.__version__,
            "every_s": WATCHED_EVERY_S,
            "mounts": [each.describe() for each in mounts],
            "mounts_left_out": self._left_out,
            "tasks": tasks(mounts),
            "servers": [each.describe() for each in self._servers],
            "datasets": self._datasets.describe(),
        }

    def _find_mounts(self, now_s: float) -> None:
        found = self._own_mounts.find()
        for place, source in list(self._mounts.items()):
            if place in found:
                continue
            if source.gone_s is None:
                source.gone_s = now_s
                source.end()
            is_replaced = any(each.path == place.path for each in found)
            if is_replaced or now_s > source.gone_s + GONE_KEPT_S:
                del self._mounts[place]
        new = [place for place in found if place not in self._mounts]
        while new and len(self._mounts) + len(new) > MOUNTS_MAX:
            gone = [each for each, source in self._mounts.items() if source.gone_s is not None]
            if not gone:
                break
            del self._mounts[gone[0]]
        room = max(MOUNTS_MAX - len(self._mounts), 0)
        self._left_out = len(new[room:])
        for place in new[:room]:
            self._mounts[place] = WatchedMount(
                f"mount-{next(self._numbers)}", found[place], self._own_pid
            )


def add_up(points: Iterable[Mapping[str, float]]) -> dict[str, float]:
    summed = {"count": 0.0}
    for point in points:
        summed["count"] += 1
        for name, value in point.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed
