"""Benchmark of many clients of one master: whether their connections hold, what memory each takes,
and what processor time a master with them takes while nothing is read."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ..client_process import ClientProcess, answers_of
from ..control_group import ControlGroup, control_group
from ..inputs import Shape
from ..memory import rollup_bytes
from ..mounts import processor_s
from ..report import Row, no_less_than, no_more_than
from ..running import NODES, Running, connected, running
from ..samples import NotMeasured, Samples
from ..workbench import Workbench

C4 = Shape("C4", 2_000, 10, 4096)
CHUNK_BYTES = 256 << 10  # so that each node has some of the chunks
CLIENTS, PROCESSES = 1_000, 20
IDLE_S = 10.0
SETTLE_S = 2.0  # after which what clients did last has ended
OWN, OTHER = 0, 1
"""The rank of the node where all clients are, and that of another one."""


def measure(bench: Workbench) -> list[Row]:
    """1,000 clients on one of four nodes, in 20 processes; each reads a file of each chunk.

    Where clients connect to the owners of what they read, the master of each node has a connection
    of each client. Where they do not, only that of their own node has; of that a client may have
    several. Memory is measured before and after; that of the kernel is what it charges to a control
    group of the master.
    """
    count, processes = (max(each // bench.divisor, 2) for each in (CLIENTS, PROCESSES))
    idle_s = max(IDLE_S / bench.divisor, 1.0)
    with running(bench, C4, chunk_bytes=CHUNK_BYTES) as task, ExitStack() as stack:
        task.start()
        task.warm_s()
        task.all(do="batches", seed=99, count=20, size=64)
        masters = {rank: _Master(stack, task, rank) for rank in (OWN, OTHER)}
        before = {rank: master.look() for rank, master in masters.items()}
        idle = {rank: master.idle_percent(idle_s) for rank, master in masters.items()}
        clients = _connected(stack, task, count, processes)
        from_store = _read_by_all(clients)
        time.sleep(SETTLE_S)
        after = {rank: master.look() for rank, master in masters.items()}
        busy = {rank: master.idle_percent(idle_s) for rank, master in masters.items()}
        again_from_store = _read_by_all(clients) - from_store
        held = {rank: masters[rank].look().sockets - before[rank].sockets for rank in (OWN, OTHER)}
    name = f"task, {count:,} clients on one of {NODES} nodes"
    left, unit = Samples((float(max(held.values())),)), "files from the store"
    note = "these are left after each client has read twice"
    rows = [
        no_less_than(name, "connections of a master", left, count, note),
        Row(f"{name}, first read", unit, Samples((from_store,))),
        no_more_than(f"{name}, second read", unit, Samples((again_from_store,)), 0),
    ]
    for rank, where in ((OWN, "of its own node"), (OTHER, "of other nodes")):
        if held[rank] >= count:
            name = f"task, a master with {count:,} clients {where}"
            rows += _rows(name, before[rank], after[rank], idle[rank], busy[rank])
    return rows


@dataclass(frozen=True, slots=True)
class _Look:
    """What a master has at a moment. `kernel_bytes` is None where no control group tells it."""

    sockets: int
    resident_bytes: int
    kernel_bytes: int | None


class _Master:
    """The processes of the master of a node, in a control group where one can be made."""

    def __init__(self, stack: ExitStack, task: Running, rank: int) -> None:
        self._pids = task.task.masters(rank)
        assert self._pids, f"there is no master on node {rank}"
        self._group: ControlGroup | None = stack.enter_context(control_group())
        if self._group is not None:
            for pid in self._pids:
                self._group.add(pid)
            stack.callback(task.stop)  # so that it can be removed

    def look(self) -> _Look:
        return _Look(
            sum(map(_sockets, self._pids)),
            sum(rollup_bytes(str(pid)).get("Rss", 0) for pid in self._pids),
            None if self._group is None else self._group.kernel_bytes(),
        )

    def idle_percent(self, seconds: float) -> float:
        """The processor time that it takes while nobody reads, in percent of one processor."""
        start_s, used_s = time.monotonic(), self._processor_s()
        time.sleep(seconds)
        return 100 * (self._processor_s() - used_s) / (time.monotonic() - start_s)

    def _processor_s(self) -> float:
        return sum(map(processor_s, self._pids))


def _sockets(pid: int) -> int:
    """How many sockets a process has."""
    count = 0
    for each in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{each}").startswith("socket:")
    return count


def _connected(stack: ExitStack, task: Running, count: int, processes: int) -> list[ClientProcess]:
    """Start the processes, which open the dataset `count` times together."""
    clients = []
    for number in range(processes):
        part = count // processes + (number < count % processes)
        clients.append(connected(task.nodes[OWN], {"clients": part, **task.member(OWN)}))
        stack.callback(clients[-1].close)
    for process in clients:
        process.answer()
    return clients


def _read_by_all(clients: Sequence[ClientProcess]) -> float:
    """Let each client read a file of each chunk. Returns how many files of all reads so far came
    from the store, since a master did not answer in time."""
    from_store = 0.0
    for said in answers_of(clients, [{"do": "read"}] * len(clients)):
        assert said["right"] == said["files"], f"not every read was answered: {said}"
        from_store += said["from_store"]
    return from_store


def _rows(name: str, before: _Look, after: _Look, idle: float, busy: float) -> list[Row]:
    """The rows of one master."""
    held = after.sockets - before.sockets
    resident = (after.resident_bytes - before.resident_bytes) / held / 1024
    if before.kernel_bytes is None or after.kernel_bytes is None:
        kernel: Samples | NotMeasured = NotMeasured("no control group can be made here")
    else:
        kernel = Samples(((after.kernel_bytes - before.kernel_bytes) / held / 1024,))
    growth = f"the growth of Rss in smaps_rollup of its processes, for {held:,} more connections"
    charged = "the growth of what the kernel charges to a control group that has the master alone"
    clocks = "processor time of the master's processes by their own clocks"
    return [
        Row(f"{name}, resident memory of each connection", "KiB", Samples((resident,)),
            note=growth),
        Row(f"{name}, memory of the kernel for each connection", "KiB", kernel, note=charged),
        Row(f"{name}, idle", "% of a processor", Samples((busy,)), "without them", Samples((idle,)),
            note=clocks),
    ]  # fmt: skip
