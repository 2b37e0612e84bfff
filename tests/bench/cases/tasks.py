"""Benchmarks of how the cache of a task is filled and kept: reads from the store, from cold to
warm, recovery after a node's death, eviction policies, a dataset that is too large."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from tests.peers.running import DATASET

from ..client_process import RATE, ClientProcess, answers_of
from ..inputs import D4L
from ..peers.clusters import MEMCACHED, Memcached
from ..reading import write_list
from ..report import Row, against, at_least, no_more_than
from ..running import BATCH, NODES, WARM_S, Running, connected, filled, running
from ..samples import OURS, Measured, Samples, Side, alternate, repeat
from ..workbench import Workbench
from .task_reads import T4

SMALL_CHUNK_BYTES = 512 << 10
"""Of what half of the dataset is to be: of a node's ten large ones, four or five would fit."""
POLICY_BATCHES = 30
SAMPLE = 2_000  # files that are read one by one from the store, to measure that rate
SLOW_ROUNDS = 2  # for benchmarks that take a minute a round
GONE = 3  # the rank of the node that is killed

COLD_RATIO, FILE_BY_FILE_RATIO, RECOVERY_RATIO = 0.8, 5, 5
EGRESS_MAX = 1.05
HIT_RATIO = 0.95
READ_COUNTS = ("mapped_reads", "local_reads", "peer_reads", "master_reads", "store_reads")
"""The counters of a client that tell together how many files it has read. Some versions of
DIESEL-FS have only some of them."""

NO_CACHE, THEORY = "without a cache", "in theory"
SEQUENTIAL, FILE_BY_FILE = "the store's chunks in a row", "file by file"


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
        rows.append(no_more_than(name, "x dataset", rounds.ours("x"), EGRESS_MAX))
    return rows


def cold(bench: Workbench) -> list[Row]:
    """D4L from nothing to every chunk in its owner's memory."""
    with running(bench, D4L) as task:
        stored = task.task.stored_bytes
        file_by_file = _file_by_file(task)

        def rates(bytes_per_s: float) -> dict[str, float]:
            return {"MB/s": bytes_per_s / 1e6, RATE: bytes_per_s / (stored / task.shape.files)}

        def sequential() -> dict[str, float]:
            said = task.clients[0].run(do="chunks")
            return rates(said["bytes"] / said["s"])

        def ours() -> dict[str, float]:
            task.start()
            return rates(stored / task.warm_s())

        sides: dict[str, Side] = {OURS: ours, SEQUENTIAL: sequential}
        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), sides)
    name, target = f"task {task.shape.name}, from cold to warm", at_least(FILE_BY_FILE_RATIO)
    note = f"memcached, {NODES} clients at once; of {SAMPLE} files each"
    return [
        *against(rounds, name, "MB/s", {SEQUENTIAL: at_least(COLD_RATIO)}),
        Row(name, RATE, rounds.ours(RATE), FILE_BY_FILE, file_by_file, target, note),
    ]


def _file_by_file(task: Running) -> Measured:
    """The rate of filling memcached, where each file is read from the store by itself: files/s."""
    paths = task.shape.paths()[:: max(task.shape.files // (SAMPLE * NODES), 1)]
    task.put_files(paths)

    def run() -> dict[str, float]:
        with Memcached(task.nodes, 2 * task.shape.bytes) as cluster:
            begun = [
                _start_refill(cluster, task, rank, paths[rank::NODES]) for rank in range(NODES)
            ]
            said = [each.answer() for each in begun]
            return {RATE: sum(each["missed"] for each in said) / max(each["s"] for each in said)}

    return alternate(1, {MEMCACHED: run}).of(MEMCACHED, RATE)


def _start_refill(
    cluster: Memcached, task: Running, rank: int, paths: Sequence[str]
) -> ClientProcess:
    """Start a client that reads these files, and sets what is missing; it answers at the end."""
    listed = write_list(paths, task.nodes.folder / f"refill-{rank}")
    client = cluster.client(task.nodes[rank])
    client.send_order(
        {"do": "refill", "paths": str(listed), "size": BATCH, "store": task.files_store}
    )
    return client


def recovery(bench: Workbench) -> list[Row]:
    """D4L, when one of four nodes is killed: how long until nothing is read from the store again.

    Readers on the others go on. A new memcached takes the dead one's place at once; its readers put
    into it what they miss. Of ours nobody takes the place: the others share what it had.
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
                said = answers_of([task.clients[rank] for rank in others], [order] * len(others))
                worst_s = max(worst_s, *(each["worst_s"] for each in said))
                if task.is_whole(others):
                    break
            seconds = time.perf_counter() - start_s
            return {"s": seconds, "1/s": 1 / seconds, "worst": worst_s}

        def theirs() -> dict[str, float]:
            with ExitStack() as own:
                cluster = filled(own, task)
                cluster.kill(GONE)
                cluster.start(GONE)
                draw = np.random.default_rng(1).permutation(task.shape.files).tolist()
                names = task.shape.paths()
                paths = [names[at] for at in draw]
                begun = [
                    _start_refill(cluster, task, rank, paths[at :: len(others)])
                    for at, rank in enumerate(others)
                ]
                said = [each.answer() for each in begun]
                assert sum(each["missed"] for each in said) > task.shape.files / NODES / 2
                seconds = max(each["s"] for each in said)
                return {"s": seconds, "1/s": 1 / seconds}

        task.put_files(task.shape.paths())
        sides: dict[str, Side] = {OURS: ours, MEMCACHED: theirs}
        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), sides)
    name = f"task {task.shape.name}, one of {NODES} nodes killed"
    worst = rounds.ours("worst")
    return [
        *against(rounds, f"{name}, as fast again", "1/s", {MEMCACHED: at_least(RECOVERY_RATIO)}),
        *against(rounds, f"{name}, until all is cached", "s", {MEMCACHED: None}),
        Row(f"{name}, the slowest batch of {BATCH} meanwhile", "s", worst),
    ]


def policies(bench: Workbench) -> list[Row]:
    """Half of T4 fits the caches together: the share of random reads that find their chunk
    there."""
    rows = []
    with running(bench, T4, chunk_bytes=SMALL_CHUNK_BYTES) as task:
        half = task.task.stored_bytes // 2 // NODES
        count = max(POLICY_BATCHES // bench.divisor, 2)
        for policy in ("lru", "lfu", "none"):

            def run(policy: str = policy) -> dict[str, float]:
                task.start(task_memory_bytes=half, evict=policy)
                task.all(do="batches", seed=1, count=count, size=BATCH)
                before = _counted(task)
                task.all(do="batches", seed=2, count=count, size=BATCH)
                asked, missed = (a - b for a, b in zip(_counted(task), before, strict=True))
                return {"hits": 1 - missed / asked}

            rounds = repeat(min(bench.rounds, SLOW_ROUNDS), run)
            name = f"task {task.shape.name}, half of it fits, --evict {policy}"
            theory, target = Samples((0.5,)), at_least(HIT_RATIO)
            rows.append(Row(name, "hits", rounds.ours("hits"), THEORY, theory, target))
    return rows


def _counted(task: Running) -> tuple[int, int]:
    """What clients have read, and what of it was in no cache: read by them from the store, or by a
    master while they waited."""
    said = task.all(do="stats")
    read = sum(int(each.get(name, 0)) for each in said for name in READ_COUNTS)
    left = sum(int(each.get("store_reads", 0)) for each in said)
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
            said = answers_of(clients, [order] * len(clients))
            for client in clients:
                client.close()
            return {RATE: sum(each[RATE] for each in said)}

        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), {OURS: ours, NO_CACHE: bare})
    name = f"task {T4.name}, 1.2 times the caches, random, {BATCH} in one request"
    return against(rounds, name, RATE, {NO_CACHE: at_least(1)})
