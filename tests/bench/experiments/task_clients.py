"""Experiment with 1 to 16 clients of a task's cache, spread over its nodes: a table, and a plot
beside the bench. It repeats figure 11a of the paper (DIESEL, section 6.4)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count as counted
from pathlib import Path

from ..cases.task_mounts import announce, mounted
from ..client_process import RATE, ClientProcess
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
from ..samples import OURS, PeerMissing, Side, alternate, progress
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
    a node share an epoch in random order, which is announced to its mount before."""
    with running(bench, D4L) as task, ExitStack() as stack:
        mountpoints = stack.enter_context(mounted(task))
        folders = [stack.enter_context(bench.scratch()) for _ in mountpoints]
        ranks = [number % NODES for number in range(max(CLIENTS))]
        task.clients = task.join(ranks)
        task.all(do="batches", seed=99, count=max(100 // bench.divisor, 2), size=BATCH)
        cluster = filled_if_installed(stack, task, copies=2)
        direct = [] if cluster is None else [cluster.client(task.nodes[rank]) for rank in ranks]
        proxied = [] if cluster is None else _through_proxies(stack, task, cluster, ranks)
        seeds = counted(1)

        def side(clients: Sequence[ClientProcess], **more: object) -> Side:
            order = {"do": "steady_batches", "size": BATCH, **more}
            read = partial(reading_together, order=order, seconds=seconds_of(bench))
            return lambda: {str(each): read(clients[:each])()[RATE] for each in CLIENTS}

        def through_mounts(count: int) -> float:
            """The files a second of `count` readers together, from the first open to the last
            close."""
            places: list[tuple[Path, int, Path]] = [
                (point, next(seeds), lists)
                for point, lists in zip(mountpoints[:count], folders, strict=False)
            ]
            orders = [random_order(task.shape, *place) for place in places]
            for point, seed, _ in places:
                announce(point, task.shape, seed)
            readers = count // len(places)
            with ThreadPoolExecutor(len(places)) as pool:
                reports = list(pool.map(partial(bench.read_epoch, readers=readers), orders))
            start_s = min(each.end_s - each.seconds for each in reports)
            end_s = max(each.end_s for each in reports)
            return sum(each.files for each in reports) / (end_s - start_s)

        sides: dict[str, Side] = {
            OURS: side(task.clients),
            MOUNT: lambda: {str(each): through_mounts(each) for each in CLIENTS},
            MEMCACHED: side(direct, paths=task.paths()),
            TWEMPROXY: side(proxied, paths=task.paths()),
        }
        rounds = alternate(bench.rounds, sides)
    plot_medians(bench, PLOT, rounds, SHOWN)
    rows: list[Row] = []
    for count in CLIENTS:
        name, clients = f"task {task.shape.name}, random", f"{count} client{'s' * (count > 1)}"
        batches, through = f"{name}, {BATCH} in one request", f"{name}, through mounts"
        peers, one, of = dict.fromkeys((MEMCACHED, TWEMPROXY)), {MEMCACHED: None}, str(count)
        rows += against(rounds, f"{batches}, {clients}", RATE, peers, of=of)
        rows += against(rounds, f"{through}, {clients}", RATE, one, of=of, side=MOUNT)
    return rows


def _through_proxies(
    stack: ExitStack, task: Running, cluster: Memcached, ranks: Sequence[int]
) -> list[ClientProcess]:
    """Clients of memcached through twemproxy, which has all files, on these nodes; none without
    twemproxy."""
    try:
        proxies = stack.enter_context(Twemproxy(cluster))
    except PeerMissing as error:
        progress(f"NOT MEASURED: {error}")
        return []
    clients = [proxies.client(task.nodes[rank]) for rank in ranks]
    clients[0].run(do="fill", source=str(task.source), paths=task.paths())
    return clients
