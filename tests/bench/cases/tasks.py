"""Benchmarks of the cache of a task by its Python interface: reads of single files and batches,
filling and keeping the cache, recovery after a node's death, and eviction.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from tests.peers.nodes import Nodes
from tests.peers.planned_nodes import FULL, PlannedEgress
from tests.peers.running import DATASET, RunningTask

from ..client_process import RATE, ClientProcess, answers_of
from ..inputs import D4L, Shape
from ..peers.clusters import MEMCACHED, PROTOTYPE, Memcached, Prototype
from ..reading import write_list
from ..report import Row, against, at_least, no_more_than
from ..running import (
    BATCH,
    NODES,
    WARM_S,
    Running,
    connected,
    filled,
    filled_if_installed,
    reading_together,
    running,
    seconds_of,
)
from ..samples import OURS, Measured, Samples, Side, alternate, repeat
from ..workbench import Workbench

T4 = Shape("T4", 40_000, 200, 4096)
SMALL_CHUNK_BYTES = 512 << 10
"""Chunk size if half of the dataset must fit: of a node's ten large chunks, four or five would
fit."""
POLICY_BATCHES = 30
SAMPLE = 2_000  # files that are read one by one from the store, to measure that rate
SLOW_ROUNDS = 2  # for benchmarks that take a minute a round
GONE = 3  # the rank of the node that is killed

BATCHES: Mapping[str, object] = {"do": "steady_batches", "size": BATCH}
SINGLES: Mapping[str, object] = {"do": "steady_singles"}
READ_COUNTS = ("mapped_reads", "local_reads", "peer_reads", "master_reads", "store_reads")
"""The counters of a client that add up to the number of files that it has read. Some versions of
DIESEL-FS have only some of them."""

GATHER, REMOTE = "numpy's gather", "one by one, over 4 nodes"
NO_CACHE, THEORY = "without a cache", "in theory"
SEQUENTIAL, FILE_BY_FILE = "the store's chunks in a row", "file by file"

PLAN_FILES, PLAN_GROUP, PLAN_PACE_S = 8_000, 10, 0.25


def reads(bench: Workbench) -> list[Row]:
    """T4 from the caches of four nodes: batches, single files, by one client and by one a node,
    against the prototype of the data plane and memcached on the same nodes."""
    with running(bench, T4) as task, ExitStack() as stack:
        task.start()
        task.warm_s()
        cluster = filled_if_installed(stack, task)
        servers = stack.enter_context(Prototype(task.nodes, task.shape, task.source))
        prototype = [servers.client(node) for node in task.nodes]
        of_memcached = [] if cluster is None else [cluster.client(node) for node in task.nodes]
        together = partial(reading_together, seconds=seconds_of(bench))
        rows: list[Row] = []
        for count in (1, NODES):
            for what, ratio, order in (
                (f"{BATCH} in one request", 1.5, BATCHES),
                ("one by one", 0.7, SINGLES),
            ):
                task.all(do="batches", seed=99, count=10, size=BATCH)
                listed = {**order, "paths": task.paths()}
                sides = {
                    OURS: together(task.clients[:count], order=order),
                    PROTOTYPE: together(prototype[:count], order=order),
                    MEMCACHED: together(of_memcached[:count], order=listed),
                }
                rounds = alternate(bench.rounds, sides)
                clients = "one client" if count == 1 else f"{count} clients on {count} nodes"
                name = f"task {task.shape.name}, random, {what}, {clients}"
                targets = {PROTOTYPE: at_least(0.9), MEMCACHED: at_least(ratio)}
                rows += against(rounds, name, RATE, targets)
    return rows


def local(bench: Workbench) -> list[Row]:
    """T4 on a node that holds all of it: batches against numpy, which gathers the same files in the
    same process; single files against those of four nodes that come through the node's own master.
    """
    with running(bench, T4, 1) as one, running(bench, T4) as four:
        one.start()
        four.start(peers_through_master=True)
        for each in (one, four):
            each.warm_s()
            each.all(do="batches", seed=99, count=100, size=BATCH)
        together = partial(reading_together, seconds=seconds_of(bench))
        mine, remote = one.clients[:1], four.clients[:1]
        gather = {**BATCHES, "do": "steady_gather"}
        by_batch = {OURS: together(mine, order=BATCHES), GATHER: together(mine, order=gather)}
        by_file = {OURS: together(mine, order=SINGLES), REMOTE: together(remote, order=SINGLES)}
        batches, singles = (alternate(bench.rounds, sides) for sides in (by_batch, by_file))
    name = f"task {T4.name}, a node that holds all, random"
    some, single = f"{name}, {BATCH} in one request", f"{name}, one by one"
    copies = "ours are views of the cache, the gather copies"
    through = "these come through the own master, as before there was a data plane"
    return [
        *against(batches, some, RATE, {GATHER: at_least(0.7)}, copies),
        *against(singles, single, RATE, {REMOTE: at_least(25)}, through),
    ]


def egress(bench: Workbench) -> list[Row]:
    """The reads from the store in the first epoch, which every node reads whole, in its own
    order."""
    rows = []
    for count in (1, 2, 4):
        with running(bench, T4, count) as task:

            def run(task: Running = task) -> dict[str, float]:
                task.task.forget()
                task.start()
                ranks = range(len(task.clients))
                orders = [{"do": "epoch", "seed": rank, "size": BATCH} for rank in ranks]
                answers_of(task.clients, orders)
                return {"x": task.task.egress_bytes() / task.task.stored_bytes}

            rounds = repeat(bench.rounds, run)
        name = f"task {T4.name}, one epoch of {count} node{'s' * (count > 1)}, read from the store"
        rows.append(no_more_than(name, "x dataset", rounds.ours("x"), 1.05))
    return rows


def cold(bench: Workbench) -> list[Row]:
    """D4L from nothing to every chunk in its owner's memory."""
    with running(bench, D4L) as task:
        stored = task.task.stored_bytes
        file_by_file = _file_by_file(task)

        def rates(bytes_per_s: float) -> dict[str, float]:
            return {"MB/s": bytes_per_s / 1e6, RATE: bytes_per_s / (stored / task.shape.files)}

        def sequential() -> dict[str, float]:
            answer = task.clients[0].run(do="chunks")
            return rates(answer["bytes"] / answer["s"])

        def ours() -> dict[str, float]:
            task.start()
            return rates(stored / task.warm_s())

        sides: dict[str, Side] = {OURS: ours, SEQUENTIAL: sequential}
        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), sides)
    name = f"task {task.shape.name}, from cold to warm"
    note = f"memcached, {NODES} clients at once; of {SAMPLE} files each"
    figures = rounds.ours(RATE), FILE_BY_FILE, file_by_file
    return [
        *against(rounds, name, "MB/s", {SEQUENTIAL: at_least(0.8)}),
        Row(name, RATE, *figures, at_least(5), note),
    ]


def _file_by_file(task: Running) -> Measured:
    """The rate of filling memcached if each file is read from the store by itself: files/s."""
    paths = task.shape.paths()[:: max(task.shape.files // (SAMPLE * NODES), 1)]
    task.put_files(paths)

    def run() -> dict[str, float]:
        with Memcached(task.nodes, 2 * task.shape.bytes) as cluster:
            answers = _refilled(cluster, task, range(NODES), paths)
            seconds = max(each["s"] for each in answers)
            return {RATE: sum(each["missed"] for each in answers) / seconds}

    return alternate(1, {MEMCACHED: run}).of(MEMCACHED, RATE)


def _refilled(
    cluster: Memcached, task: Running, ranks: Sequence[int], paths: Sequence[str]
) -> list[dict[str, float]]:
    """The answers of clients on these nodes that share the files, and set the missing ones."""
    begun: list[ClientProcess] = []
    for at, rank in enumerate(ranks):
        listed = write_list(paths[at :: len(ranks)], task.nodes.folder / f"refill-{rank}")
        begun.append(cluster.client(task.nodes[rank]))
        order = {"do": "refill", "paths": str(listed), "size": BATCH, "store": task.files_store}
        begun[-1].send_order(order)
    return [each.answer() for each in begun]


def recovery(bench: Workbench) -> list[Row]:
    """D4L, when one of four nodes is killed: the time until nothing is read from the store again.

    Readers on the others continue. A new memcached takes the dead one's place at once; its readers
    set the files that they miss. In our task no node takes the place: the others share its chunks.
    """
    others = [rank for rank in range(NODES) if rank != GONE]
    with running(bench, D4L) as task:

        def ours() -> dict[str, float]:
            task.start()
            task.warm_s()
            start_s = time.perf_counter()
            task.nodes[GONE].kill()
            worst_s = 0.0
            while time.perf_counter() - start_s < WARM_S:
                seed = int(time.monotonic_ns() % 1000)
                order = {"do": "batches", "seed": seed, "count": 20, "size": BATCH}
                answers = answers_of([task.clients[rank] for rank in others], [order] * len(others))
                worst_s = max(worst_s, *(each["worst_s"] for each in answers))
                if task.is_whole(others):
                    break
            seconds = time.perf_counter() - start_s
            return {"s": seconds, "1/s": 1 / seconds, "worst": worst_s}

        def theirs() -> dict[str, float]:
            with ExitStack() as own:
                cluster = filled(own, task)
                cluster.kill(GONE)
                cluster.start(GONE)
                names = task.shape.paths()
                draw = np.random.default_rng(1).permutation(task.shape.files).tolist()
                answers = _refilled(cluster, task, others, [names[at] for at in draw])
                assert sum(each["missed"] for each in answers) > task.shape.files / NODES / 2
                seconds = max(each["s"] for each in answers)
                return {"s": seconds, "1/s": 1 / seconds}

        task.put_files(task.shape.paths())
        sides: dict[str, Side] = {OURS: ours, MEMCACHED: theirs}
        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), sides)
    name = f"task {task.shape.name}, one of {NODES} nodes killed"
    slowest = f"{name}, the slowest batch of {BATCH} meanwhile"
    return [
        *against(rounds, f"{name}, as fast again", "1/s", {MEMCACHED: at_least(5)}),
        *against(rounds, f"{name}, until all is cached", "s", {MEMCACHED: None}),
        Row(slowest, "s", rounds.ours("worst")),
    ]


def policies(bench: Workbench) -> list[Row]:
    """Half of T4 fits the caches together: the share of random reads that find their chunk
    there."""
    rows = []
    with running(bench, T4, chunk_bytes=SMALL_CHUNK_BYTES) as task:
        half = task.task.stored_bytes // 2 // NODES
        count = max(POLICY_BATCHES // bench.divisor, 2)

        def run(policy: str) -> dict[str, float]:
            task.start(task_memory_bytes=half, evict=policy)
            task.all(do="batches", seed=1, count=count, size=BATCH)
            before = _counted(task)
            task.all(do="batches", seed=2, count=count, size=BATCH)
            wanted, missed = (a - b for a, b in zip(_counted(task), before, strict=True))
            return {"hits": 1 - missed / wanted}

        for policy in ("lru", "lfu", "none"):
            rounds = repeat(min(bench.rounds, SLOW_ROUNDS), partial(run, policy))
            name = f"task {task.shape.name}, half of it fits, --evict {policy}"
            theory, target = Samples((0.5,)), at_least(0.95)
            rows.append(Row(name, "hits", rounds.ours("hits"), THEORY, theory, target))
    return rows


def _counted(task: Running) -> tuple[int, int]:
    """The number of files that clients have read, and the number that was in no cache: a client
    read it from the store, or a master did while the client waited."""
    answers = task.all(do="stats")
    read = sum(int(each.get(name, 0)) for each in answers for name in READ_COUNTS)
    left = sum(int(each.get("store_reads", 0)) for each in answers)
    held = [task.task.stats(rank)["node_cache"] for rank in range(NODES)]
    return read, left + sum(each["waited"] for each in held if isinstance(each, dict))


def too_large(bench: Workbench) -> list[Row]:
    """T4 is a fifth larger than the caches together: random batches with and without them."""
    with running(bench, T4) as task:
        count = max(100 // bench.divisor, 2)
        part = int(task.task.stored_bytes / 1.2) // NODES
        order = {"do": "batches", "seed": 2, "count": count, "size": BATCH}

        def ours() -> dict[str, float]:
            task.start(task_memory_bytes=part)
            task.all(do="batches", seed=1, count=count, size=BATCH)
            return {RATE: sum(each[RATE] for each in task.all(**order))}

        def bare() -> dict[str, float]:
            words = {"dataset": DATASET, "memory_bytes": task.client_bytes}
            clients = [connected(node, words) for node in task.nodes]
            for client in clients:
                client.answer()
            answers = answers_of(clients, [order] * len(clients))
            for client in clients:
                client.close()
            return {RATE: sum(each[RATE] for each in answers)}

        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), {OURS: ours, NO_CACHE: bare})
    name = f"task {T4.name}, 1.2 times the caches, random, {BATCH} in one request"
    return against(rounds, name, RATE, {NO_CACHE: at_least(1)})


def planned(bench: Workbench) -> list[Row]:
    """The bytes that the store gives in an epoch to four nodes with memory for half of the dataset,
    divided by the least possible: eviction by plan, and `lru`.

    The readers announce their orders, read in step, and are paced, as training is: an epoch takes
    half a minute, and the masters' knowledge of each other is more than a second old.
    `planned_nodes.py` has the optimum. The machine's speed does not matter, as long as it keeps the
    pace.
    """
    rows = []
    with (
        bench.scratch() as folder,
        Nodes(folder / "nodes", NODES) as nodes,
        RunningTask(nodes, files=max(PLAN_FILES // bench.divisor, 400)) as task,
    ):
        for what, group, announced, policy, epochs in (
            ("chunk-wise, computed orders", PLAN_GROUP, "computed", "plan", 4),
            ("chunk-wise, announced orders", PLAN_GROUP, "explicit", "plan", 4),
            ("full shuffle", FULL, "computed", "plan", 4),
            ("chunk-wise", PLAN_GROUP, "computed", "lru", 3),
        ):
            task.options = {"evict": policy}
            measured = PlannedEgress(task, group=group, pace_s=PLAN_PACE_S, announced=announced)
            for epoch in range(epochs):
                outcomes = measured.read(epoch)
                assert not any(each.wrong or each.errors for each in outcomes)
            task.end()
            name = f"task of {NODES} nodes, half of it fits, --evict {policy}, {what}, egress"
            later = Samples(tuple(measured.ratios[1:]))  # each epoch after the first is a sample
            limited = no_more_than(name, "x optimum", later, 1.02)
            rows.append(limited if policy == "plan" else Row(name, "x optimum", later))
    return rows
