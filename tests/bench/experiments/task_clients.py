"""Experiment with 1 to 16 clients of a task's cache, spread over its nodes: a table, and a plot
beside the bench. It repeats figure 11a of the paper (DIESEL, section 6.4)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from ..cases.task_mounts import announce, memory_of, mounted
from ..client_process import RATE, SECONDS, ClientProcess
from ..inputs import D4L
from ..peers.clusters import MEMCACHED, TWEMPROXY, Memcached, Twemproxy
from ..plot import Plot, plot_medians
from ..reading import random_order
from ..report import Row, against
from ..running import (
    BATCH,
    NODES,
    Running,
    filled_if_installed,
    reading_together,
    running,
    seconds_of,
)
from ..samples import OURS, PeerMissing, Side, alternate, say
from ..workbench import Workbench

CLIENTS = (1, 2, 4, 8, 16)
MOUNT = "our mount"
SHOWN = {
    OURS: "DIESEL-FS, API",
    MOUNT: "DIESEL-FS, mount",
    **{p: p for p in (MEMCACHED, TWEMPROXY)},
}
PLOT = Plot(
    "task_clients",
    "200,000 files of 4 KiB in random order from the caches of 4 nodes",
    "clients at once",
    "files read a second",
    CLIENTS,
)


def measure(bench: Workbench) -> list[Row]:
    """D4L from the caches of four nodes, in batches by the API and by memcached's clients, and by
    the C reader through mounts that have half of the dataset in their nodes' memory. The readers of
    a node share an epoch in random order, which its mount is told before."""
    with running(bench, D4L) as task, ExitStack() as stack:
        mounts = mounted(bench, task, memory_bytes=memory_of(task.shape))
        mountpoints = stack.enter_context(mounts)
        ranks = [number % NODES for number in range(max(CLIENTS))]
        task.clients = task.join(ranks)
        seconds = seconds_of(bench, SECONDS)
        task.all(do="batches", seed=99, count=max(100 // bench.divisor, 2), size=BATCH)
        readers = _Readers(bench, task, mountpoints, stack.enter_context(bench.scratch()))
        cluster = filled_if_installed(stack, task, copies=2)
        direct = [] if cluster is None else [cluster.client(task.nodes[rank]) for rank in ranks]
        proxied = [] if cluster is None else _through_proxies(stack, task, cluster, ranks)

        def side(clients: Sequence[ClientProcess], **more: object) -> Side:
            order = {"do": "steady_batches", "size": BATCH, **more}
            some = {count: reading_together(clients[:count], seconds, order) for count in CLIENTS}
            return lambda: {str(count): read()[RATE] for count, read in some.items()}

        sides: dict[str, Side] = {
            OURS: side(task.clients),
            MOUNT: lambda: {str(count): readers.rate(count) for count in CLIENTS},
            MEMCACHED: side(direct, paths=task.paths()),
            TWEMPROXY: side(proxied, paths=task.paths()),
        }
        rounds = alternate(bench.rounds, sides)
    plot_medians(bench, PLOT, rounds, SHOWN)
    rows: list[Row] = []
    for count in CLIENTS:
        name, clients = f"task {task.shape.name}, random", f"{count} client{'s' * (count > 1)}"
        peers, of = dict.fromkeys((MEMCACHED, TWEMPROXY)), str(count)
        batches, mounts_name = f"{name}, {BATCH} in one request", f"{name}, through mounts"
        rows += against(rounds, f"{batches}, {clients}", RATE, peers, of=of)
        one = {MEMCACHED: None}
        rows += against(rounds, f"{mounts_name}, {clients}", RATE, one, of=of, side=MOUNT)
    return rows


class _Readers:
    """C readers on the mounts of all nodes."""

    def __init__(
        self, bench: Workbench, task: Running, mountpoints: Sequence[Path], folder: Path
    ) -> None:
        self._bench, self._shape, self._mountpoints = bench, task.shape, mountpoints
        self._folders = [folder / str(rank) for rank in range(len(mountpoints))]
        for each in self._folders:
            each.mkdir()
        self._epoch = 0

    def rate(self, count: int) -> float:
        """The files a second of so many readers together, from the first open to the last close."""
        nodes = min(count, len(self._mountpoints))
        self._epoch += 1
        seeds = [self._epoch * len(self._mountpoints) + rank for rank in range(nodes)]
        places = list(zip(self._mountpoints[:nodes], seeds, self._folders[:nodes], strict=True))
        orders = [random_order(self._shape, point, seed, lists) for point, seed, lists in places]
        for point, seed, _ in places:
            announce(point, self._shape, seed)
        with ThreadPoolExecutor(nodes) as pool:
            begun = [
                pool.submit(self._bench.read_epoch, order, readers=count // nodes)
                for order in orders
            ]
            reports = [each.result() for each in begun]
        start_s = min(each.end_s - each.seconds for each in reports)
        return sum(each.files for each in reports) / (max(e.end_s for e in reports) - start_s)


def _through_proxies(
    stack: ExitStack, task: Running, cluster: Memcached, ranks: Sequence[int]
) -> list[ClientProcess]:
    """Clients of memcached through twemproxy, which has all files, on these nodes; none without
    twemproxy."""
    try:
        proxies = stack.enter_context(Twemproxy(cluster))
    except PeerMissing as error:
        say(f"NOT MEASURED: {error}")
        return []
    clients = [proxies.client(task.nodes[rank]) for rank in ranks]
    clients[0].run(do="fill", source=str(task.source), paths=task.paths())
    return clients
