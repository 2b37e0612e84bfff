"""Benchmarks of single files and batches from the cache of a task, by its Python interface: against
the prototype of its data plane and memcached on the same nodes, and against numpy on one node."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from diesel_fs.peers.options import TaskKwargs

from ..client_process import RATE, SECONDS, ClientProcess, rate_together
from ..inputs import Shape
from ..peers import data_plane, memcached
from ..report import Row, at_least
from ..running import BATCH, NODES, Running, filled, running, seconds_of
from ..samples import OURS, PeerMissing, Side, alternate
from ..workbench import Workbench

T4 = Shape("T4", 40_000, 200, 4096)

PROTOTYPE_RATIO = 0.9
BATCH_RATIO, SINGLE_RATIO = 1.5, 0.7
GATHER, GATHER_RATIO = "numpy's gather", 0.7
REMOTE, LOCAL_SINGLE_RATIO = "one by one, over 4 nodes", 25
THROUGH_MASTER = "peers_through_master"
"""The option with which clients ask their own node's master for all, as before there was a data
plane. Versions that lack it do so always."""

BATCHES, SINGLES = "steady_batches", "steady_singles"


def reads(bench: Workbench) -> list[Row]:
    """T4 from the caches of four nodes: batches, single files, by one client and by one a node."""
    with running(bench, T4) as task, ExitStack() as stack:
        task.start()
        task.warm_s()
        seconds = seconds_of(bench, SECONDS)
        cluster = filled(stack, task)
        servers = data_plane.Servers(task.nodes, task.shape, task.source)
        stack.enter_context(servers)
        prototype = [servers.client(node) for node in task.nodes]
        of_memcached = [] if cluster is None else [cluster.client(node) for node in task.nodes]

        def side(clients: Sequence[ClientProcess], do: str, **order: object) -> Side:
            def run() -> dict[str, float]:
                if not clients:
                    raise PeerMissing("no memcached, or no client of it")
                return rate_together(clients, do, seconds, **order)

            return run

        rows = []
        for count in (1, NODES):
            for what, ratio, do, order in (
                (f"{BATCH} in one request", BATCH_RATIO, BATCHES, {"size": BATCH}),
                ("one by one", SINGLE_RATIO, SINGLES, {}),
            ):
                task.all(do="batches", seed=99, count=10, size=BATCH)
                theirs = {**order, "paths": task.paths()}
                sides: dict[str, Side] = {
                    OURS: side(task.clients[:count], do, **order),
                    data_plane.NAME: side(prototype[:count], do, **order),
                    memcached.NAME: side(of_memcached[:count], do, **theirs),
                }
                rounds = alternate(bench.rounds, sides)
                name = f"task {task.shape.name}, random, {what}, {_clients(count)}"
                rows += [
                    Row(name, RATE, rounds.ours(RATE), peer, rounds.of(peer, RATE), at_least(least))
                    for peer, least in ((data_plane.NAME, PROTOTYPE_RATIO), (memcached.NAME, ratio))
                ]
        return rows


def _clients(count: int) -> str:
    return "one client" if count == 1 else f"{count} clients on {count} nodes"


def local(bench: Workbench) -> list[Row]:
    """T4 on a node that holds all of it: batches against numpy, which gathers the same files in the
    same process; single files against those of four nodes that come through the own master."""
    through_master: dict[str, object] = (
        {THROUGH_MASTER: True} if THROUGH_MASTER in TaskKwargs.__annotations__ else {}
    )
    with running(bench, T4, 1) as one, running(bench, T4) as four:
        one.start()
        four.start(**through_master)
        for each in (one, four):
            each.warm_s()
            each.all(do="batches", seed=99, count=100, size=BATCH)
        seconds = seconds_of(bench, SECONDS)

        def side(task: Running, do: str, **order: object) -> Callable[[], dict[str, float]]:
            return lambda: rate_together(task.clients[:1], do, seconds, **order)

        batches = alternate(
            bench.rounds,
            {OURS: side(one, BATCHES, size=BATCH), GATHER: side(one, "steady_gather", size=BATCH)},
        )
        singles = alternate(bench.rounds, {OURS: side(one, SINGLES), REMOTE: side(four, SINGLES)})
        name = f"task {one.shape.name}, a node that holds all, random"
        return [
            Row(f"{name}, {BATCH} in one request", RATE, batches.ours(RATE),
                GATHER, batches.of(GATHER, RATE), at_least(GATHER_RATIO),
                "ours are views of the cache, the gather copies"),
            Row(f"{name}, one by one", RATE, singles.ours(RATE),
                REMOTE, singles.of(REMOTE, RATE), at_least(LOCAL_SINGLE_RATIO),
                "these come through the own master, as before there was a data plane"),
        ]  # fmt: skip
