"""Benchmark of many clients of one master: whether their connections hold, the memory of each, and
the processor time of a master with them while nothing is read.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ..client_process import ClientProcess, answers_of
from ..control_group import control_group
from ..inputs import Shape
from ..memory import rollup_bytes
from ..mounts import processor_s
from ..report import Row, no_less_than, no_more_than
from ..running import NODES, Running, connected, running
from ..samples import Measured, NotMeasured, Samples
from ..workbench import Workbench

C4 = Shape("C4", 2_000, 10, 4096)
CHUNK_BYTES = 256 << 10  # so that each node has some of the chunks
CLIENTS, PROCESSES = 1_000, 20
IDLE_S = 10.0
SETTLE_S = 2.0  # until the last work of clients has ended
RANKS = {"of its own node": 0, "of other nodes": 1}
"""The node with all clients, and another one."""

GROWTH = "the growth of Rss in smaps_rollup of its processes, for {:,} more connections"
CHARGED = "the growth of the memory charged to a control group with the master alone"
CLOCKS = "processor time of the master's processes by their own clocks"


def measure(bench: Workbench) -> list[Row]:
    """1,000 clients on one of four nodes, in 20 processes; each reads a file of each chunk.

    If clients connect to the owners of the chunks that they read, the master of each node has a
    connection of each client. Otherwise only the master of their own node has connections, perhaps
    several of one client. Memory is measured before and after; the kernel's is the memory charged
    to a control group of the master.
    """
    count, processes = (max(each // bench.divisor, 2) for each in (CLIENTS, PROCESSES))
    idle_s = max(IDLE_S / bench.divisor, 1.0)
    with running(bench, C4, chunk_bytes=CHUNK_BYTES) as task, ExitStack() as stack:
        task.start()
        task.warm_s()
        task.all(do="batches", seed=99, count=20, size=64)
        masters = {where: _Master(stack, task, rank) for where, rank in RANKS.items()}
        before = {where: master.look(idle_s) for where, master in masters.items()}
        clients = _connected(stack, task, count, processes)
        from_store = _read_by_all(clients)
        time.sleep(SETTLE_S)
        after = {where: master.look(idle_s) for where, master in masters.items()}
        again_from_store = _read_by_all(clients) - from_store
        held = {where: masters[where].sockets() - before[where].sockets for where in RANKS}
    name = f"task, {count:,} clients on one of {NODES} nodes"
    left, unit = Samples((float(max(held.values())),)), "files from the store"
    note = "these are left after each client has read twice"
    rows = [
        no_less_than(name, "connections of a master", left, count, note),
        Row(f"{name}, first read", unit, Samples((from_store,))),
        no_more_than(f"{name}, second read", unit, Samples((again_from_store,)), 0),
    ]
    for where in RANKS:
        if held[where] >= count:
            name = f"task, a master with {count:,} clients {where}"
            rows += _rows(name, before[where], after[where])
    return rows


@dataclass(frozen=True, slots=True)
class _Look:
    """The state of a master at a moment, and its processor time while nothing is read, in percent
    of one processor. `kernel_bytes` is None without a control group."""

    sockets: int
    resident_bytes: int
    kernel_bytes: int | None
    idle_percent: float


class _Master:
    """The processes of the master of a node, in a control group if one can be made."""

    def __init__(self, stack: ExitStack, task: Running, rank: int) -> None:
        self._pids = task.task.masters(rank)
        assert self._pids, f"there is no master on node {rank}"
        self._group = stack.enter_context(control_group())
        if self._group is not None:
            for pid in self._pids:
                self._group.add(pid)
            stack.callback(task.stop)  # so that it can be removed

    def look(self, seconds: float) -> _Look:
        """Measure the state, and then the processor time for some seconds."""
        resident_bytes = sum(rollup_bytes(str(pid)).get("Rss", 0) for pid in self._pids)
        kernel_bytes = None if self._group is None else self._group.kernel_bytes()
        sockets, start_s, used_s = self.sockets(), time.monotonic(), self._processor_s()
        time.sleep(seconds)
        percent = 100 * (self._processor_s() - used_s) / (time.monotonic() - start_s)
        return _Look(sockets, resident_bytes, kernel_bytes, percent)

    def sockets(self) -> int:
        count = 0
        for pid in self._pids:
            for each in os.listdir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    count += os.readlink(f"/proc/{pid}/fd/{each}").startswith("socket:")
        return count

    def _processor_s(self) -> float:
        return sum(map(processor_s, self._pids))


def _connected(stack: ExitStack, task: Running, count: int, processes: int) -> list[ClientProcess]:
    """Start the processes, which open the dataset `count` times together."""
    rank, clients = RANKS["of its own node"], []
    for number in range(processes):
        part = count // processes + (number < count % processes)
        clients.append(connected(task.nodes[rank], {"clients": part, **task.member(rank)}))
        stack.callback(clients[-1].close)
    for process in clients:
        process.answer()
    return clients


def _read_by_all(clients: Sequence[ClientProcess]) -> float:
    """Let each client read a file of each chunk. Returns the number of files of all reads until now
    that came from the store because a master did not answer in time."""
    from_store = 0.0
    for answer in answers_of(clients, [{"do": "read"}] * len(clients)):
        assert answer["right"] == answer["files"], f"not every read was answered: {answer}"
        from_store += answer["from_store"]
    return from_store


def _rows(name: str, before: _Look, after: _Look) -> list[Row]:
    held = after.sockets - before.sockets
    resident = Samples(((after.resident_bytes - before.resident_bytes) / held / 1024,))
    kernel: Measured = NotMeasured("no control group can be made here")
    if before.kernel_bytes is not None and after.kernel_bytes is not None:
        kernel = Samples(((after.kernel_bytes - before.kernel_bytes) / held / 1024,))
    of_resident = f"{name}, resident memory of each connection"
    of_kernel = f"{name}, memory of the kernel for each connection"
    busy, idle = (Samples((each.idle_percent,)) for each in (after, before))
    return [
        Row(of_resident, "KiB", resident, note=GROWTH.format(held)),
        Row(of_kernel, "KiB", kernel, note=CHARGED),
        Row(f"{name}, idle", "% of a processor", busy, "without them", idle, note=CLOCKS),
    ]
