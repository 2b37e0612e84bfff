"""Benchmarks of single files and batches from the cache of a task, by its Python interface: against
the prototype of its data plane and memcached on the same nodes, and against numpy on one node."""

from contextlib import ExitStack

from ..client_process import RATE, SECONDS
from ..inputs import Shape
from ..peers.clusters import MEMCACHED, PROTOTYPE, Prototype
from ..report import Row, against, at_least
from ..running import BATCH, NODES, filled_if_installed, reading_together, running, seconds_of
from ..samples import OURS, Side, alternate
from ..workbench import Workbench

T4 = Shape("T4", 40_000, 200, 4096)

PROTOTYPE_RATIO = 0.9
BATCH_RATIO, SINGLE_RATIO = 1.5, 0.7
GATHER, GATHER_RATIO = "numpy's gather", 0.7
REMOTE, LOCAL_SINGLE_RATIO = "one by one, over 4 nodes", 25

BATCHES: dict[str, object] = {"do": "steady_batches", "size": BATCH}
SINGLES: dict[str, object] = {"do": "steady_singles"}


def reads(bench: Workbench) -> list[Row]:
    """T4 from the caches of four nodes: batches, single files, by one client and by one a node."""
    with running(bench, T4) as task, ExitStack() as stack:
        task.start()
        task.warm_s()
        seconds = seconds_of(bench, SECONDS)
        cluster = filled_if_installed(stack, task)
        servers = stack.enter_context(Prototype(task.nodes, task.shape, task.source))
        prototype = [servers.client(node) for node in task.nodes]
        of_memcached = [] if cluster is None else [cluster.client(node) for node in task.nodes]
        rows: list[Row] = []
        for count in (1, NODES):
            for what, ratio, order in (
                (f"{BATCH} in one request", BATCH_RATIO, BATCHES),
                ("one by one", SINGLE_RATIO, SINGLES),
            ):
                task.all(do="batches", seed=99, count=10, size=BATCH)
                sides: dict[str, Side] = {
                    OURS: reading_together(task.clients[:count], seconds, order),
                    PROTOTYPE: reading_together(prototype[:count], seconds, order),
                    MEMCACHED: reading_together(
                        of_memcached[:count], seconds, {**order, "paths": task.paths()}
                    ),
                }
                rounds = alternate(bench.rounds, sides)
                clients = "one client" if count == 1 else f"{count} clients on {count} nodes"
                name = f"task {task.shape.name}, random, {what}, {clients}"
                targets = {PROTOTYPE: at_least(PROTOTYPE_RATIO), MEMCACHED: at_least(ratio)}
                rows += against(rounds, name, RATE, targets)
        return rows


def local(bench: Workbench) -> list[Row]:
    """T4 on a node that holds all of it: batches against numpy, which gathers the same files in the
    same process; single files against those of four nodes that come through the own master."""
    with running(bench, T4, 1) as one, running(bench, T4) as four:
        one.start()
        four.start(peers_through_master=True)
        for each in (one, four):
            each.warm_s()
            each.all(do="batches", seed=99, count=100, size=BATCH)
        seconds = seconds_of(bench, SECONDS)
        mine, remote = one.clients[:1], four.clients[:1]
        gather = {**BATCHES, "do": "steady_gather"}
        batches: dict[str, Side] = {
            OURS: reading_together(mine, seconds, BATCHES),
            GATHER: reading_together(mine, seconds, gather),
        }
        singles: dict[str, Side] = {
            OURS: reading_together(mine, seconds, SINGLES),
            REMOTE: reading_together(remote, seconds, SINGLES),
        }
        by_batch, one_by_one = alternate(bench.rounds, batches), alternate(bench.rounds, singles)
    name = f"task {T4.name}, a node that holds all, random"
    copies = "ours are views of the cache, the gather copies"
    through = "these come through the own master, as before there was a data plane"
    some, target = f"{name}, {BATCH} in one request", {GATHER: at_least(GATHER_RATIO)}
    single, over = f"{name}, one by one", {REMOTE: at_least(LOCAL_SINGLE_RATIO)}
    return [
        *against(by_batch, some, RATE, target, copies),
        *against(one_by_one, single, RATE, over, through),
    ]
