"""Feeds the order logs of a mount: makes logs if they pay, and reports readers' progress to them.

Order logs (`cache/order_logs/`) have the files of an order one behind the other on a disk. While an
epoch is read, its files are copied to the log of the next one, most of them when the prefetch
worker pushes them. READs bring the others first (*late* files); the worker reads these again when
it is idle.

Used by the worker's one thread. The calls may wait for the store or the disk.
"""

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...cache.disk.speed import DiskSpeed
from ...cache.order_logs.addresses import LogAddresses
from ...cache.order_logs.logs import (
    WORTHWHILE_FILE_BYTES,
    LoggedReader,
    OrderLogs,
    is_log_worthwhile,
)
from ...cache.order_logs.streams import LogPlan
from ...cache.readers.coalescing_reader import BatchSource
from ...errors import DieselError
from ...format.snapshot.reader import Snapshot
from ...orders.plan import Entries
from ...system.syscalls import keep_large_allocations
from ..options import MountRequest
from ..prefetch.decisions import StreamReading
from ..prefetch.planner import PrefetchPlanner
from ..source import LOGS_DIVISOR, MemorySplit, MountSource

log = logging.getLogger("diesel.mount")

LATE_MAX, LATE_ENTRIES = 4096, 256
"""The most lists of late files that wait until the worker is idle, and the length of each."""

MEASURED_FILE_BYTES_MAX = 1 << 20
"""The disk is not measured for files of this mean size or more: no disk reads those faster from a
log."""

LOOK_S = 0.05
"""The least time between two reports to the logs."""


class OrderLogFeed:
    def __init__(
        self, request: MountRequest, source: MountSource, snapshot: Snapshot, push_bytes: int
    ) -> None:
        """`push_bytes` is the mount's memory for pages."""
        self._request = request
        self._source = source
        self._snapshot = snapshot
        self._push_bytes = push_bytes
        self.batches: BatchSource = source.batch_source(request, snapshot)
        """The source of contents: the logs, if there are any, then the store."""
        self.is_possible = bool(request.log_folder)
        """Whether there are logs, or may be some later."""
        self._logs: OrderLogs | None = None
        self._has_old_logs: bool | None = None  # None: not looked yet
        self._speed: Future[DiskSpeed | None] | None = None  # of the disk, once it is needed
        self._is_worthwhile: bool | None = None  # None: not decided yet
        self._measuring = ThreadPoolExecutor(1, "disk-speed")
        self._looked_s = 0.0
        self._plans: dict[str, LogPlan] = {}  # by stream
        self._late: deque[Entries] = deque(maxlen=LATE_MAX)

    @property
    def has_logs(self) -> bool:
        return self._logs is not None

    def follow(self, planner: PrefetchPlanner, addresses: LogAddresses, now_s: float) -> None:
        """Report the planner's streams to the logs; make the logs if they pay. The mount's server
        finds entries by `addresses`. Raises DieselError."""
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        reading = planner.views.reading()
        if self._logs is None and not self._make_logs(planner, addresses, reading):
            return
        assert self._logs is not None
        plans = {
            each.name: LogPlan(
                each.name,
                each.current.entries,
                None if each.following is None else each.following.entries,
            )
            for each in reading
            if each.current is not None
        }
        if plans:  # a stream with nothing left to push keeps its last plan until it has more
            streams = {each.name for each in reading}
            kept = {name: plan for name, plan in self._plans.items() if name in streams}
            before, self._plans = self._plans, kept | plans
            self._logs.set_plan([*self._plans.values()])
            for name, plan in plans.items():
                if before.get(name) != plan:  # files pushed before belong to the next log, too
                    self.note_late(planner.views.pushed_early(name))
        for skipped in planner.streams.take_skipped():
            self.note_late(skipped)
        for each in reading:
            self._logs.passed(each.name, each.read_up_to)

    def _make_logs(
        self, planner: PrefetchPlanner, addresses: LogAddresses, reading: list[StreamReading]
    ) -> bool:
        """Returns whether there are logs now."""
        request = self._request
        is_wanted = request.task_options.cache_layout == "order"
        if not is_wanted and any(each.current is not None for each in reading):
            is_next_known = any(each.following is not None for each in reading)
            if self._is_worthwhile is None and (is_next_known or self._finds_old_logs()):
                self._is_worthwhile = self._decide()
            is_wanted = self._is_worthwhile is True
        if not is_wanted:
            return False
        self._logs = self._source.order_logs(request, self._snapshot, self._push_bytes, addresses)
        self.is_possible = self._logs is not None
        if self._logs is None:
            return False
        logs_bytes = self._push_bytes // LOGS_DIVISOR
        keep_large_allocations(logs_bytes)
        self.batches = LoggedReader(self.batches, self._logs)
        planner.streams.set_logged(self._logs.holds)
        planner.memory.set_budget(planner.stats()["budget_bytes"] - logs_bytes)
        return True

    def _finds_old_logs(self) -> bool:
        if self._has_old_logs is None:
            self._has_old_logs = self._source.has_order_logs(self._request, self._snapshot)
        return self._has_old_logs

    def _decide(self) -> bool | None:
        """The rule of `--cache-layout auto` (`cache/ORDER_LOG.md`). None while the disk's speed is
        being measured."""
        memory_bytes = MemorySplit.of(self._request).total_bytes
        file_bytes_max = self._request.task_options.order_log_below
        if not file_bytes_max:
            if self._speed is None:
                if not is_log_worthwhile(self._snapshot, memory_bytes, MEASURED_FILE_BYTES_MAX):
                    return False
                self._speed = self._measuring.submit(self._source.disk_speed, self._request)
            if not self._speed.done():
                return None
            speed = self._speed.result()
            file_bytes_max = WORTHWHILE_FILE_BYTES if speed is None else speed.log_file_bytes_max
        return is_log_worthwhile(self._snapshot, memory_bytes, file_bytes_max)

    def note_late(self, entries: Entries) -> None:
        """Joins calls, since a reader that outruns the pushes causes one for each file."""
        if self._late and len(self._late[-1]) + len(entries) <= LATE_ENTRIES:
            entries = np.concatenate((self._late.pop(), entries))
        self._late.extend(np.split(entries, range(LATE_ENTRIES, len(entries), LATE_ENTRIES)))

    def read_late(self) -> bool:
        """Read a list of late files, so that the logs get them. Returns whether there was one."""
        if self._logs is None:
            return False
        if not self._late:
            self._logs.flush()
            return False
        wanted = self._logs.lacking(np.unique(self._late.popleft()))
        try:
            for _ in self.batches.batches(wanted):
                pass
        except DieselError as error:
            log.warning("the order log gets fewer files: %s", error)
        return True

    def close(self) -> None:
        self._measuring.shutdown()
        self.batches.close()
