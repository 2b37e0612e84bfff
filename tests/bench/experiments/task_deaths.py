"""Experiment: the rate of reading while nodes of a task die, one after the other: a table, and a
plot over time beside the bench. It repeats figure 6 of the paper (DIESEL, section 4.2).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from ..client_process import HEAD_START_S, RATE, ClientProcess
from ..inputs import D4L
from ..peers.clusters import MEMCACHED
from ..plot import Plot, plot_medians
from ..report import Row, against
from ..running import BATCH, NODES, filled, running
from ..samples import OURS, Rounds, Side, alternate
from ..workbench import Workbench

DEATHS = ((5.0, 3), (16.0, 2))
"""The times at which nodes are killed, in seconds, and their ranks."""

SECONDS, BUCKET_S = 28.0, 0.5
READERS = (0, 1)  # ranks of nodes that live
MEMORY_PART = 0.6  # of the dataset, in each master: two of them hold all of it
ROUNDS = 3  # each takes a minute

REFILLED = "memcached, the others refilled"
SHOWN = {OURS: "DIESEL-FS", MEMCACHED: "memcached, as in the paper", REFILLED: REFILLED}


def measure(bench: Workbench) -> list[Row]:
    """D4L in random batches by two clients, while two of four nodes are killed.

    memcached is measured twice: once each miss is read from the store, as in the paper; once the
    remaining servers get the keys of the dead ones, and clients set the files that they miss. The
    store answers each request, including ours, in 5 ms. The rows are the mean rates before each
    death, after it, and at last.
    """
    scale = min(bench.divisor, 4)  # a shorter time if the bench is only tried
    seconds, bucket_s = SECONDS / scale, BUCKET_S / scale
    deaths = [(at_s / scale, rank) for at_s, rank in DEATHS]
    with running(bench, D4L) as task:
        task.put_files(task.shape.paths())

        def series(
            clients: Sequence[ClientProcess], kill: Callable[[int], None], **order: object
        ) -> dict[str, float]:
            start_s = time.monotonic() + HEAD_START_S
            order |= {"start_s": start_s, "seconds": seconds, "bucket_s": bucket_s, "size": BATCH}
            for seed, client in enumerate(clients):
                client.send_order({"do": "series", "seed": seed, **order})
            for at_s, rank in deaths:
                time.sleep(max(0.0, start_s + at_s - time.monotonic()))
                kill(rank)
            answers = [client.answer() for client in clients]
            return {bucket: sum(each[bucket] for each in answers) for bucket in answers[0]}

        def ours() -> dict[str, float]:
            task.start(task_memory_bytes=int(MEMORY_PART * task.task.stored_bytes))
            task.warm_s()
            task.all(do="batches", seed=99, count=10, size=BATCH)
            clients = [task.clients[rank] for rank in READERS]
            return series(clients, lambda rank: task.nodes[rank].kill())

        def theirs(*options: str, puts: bool) -> dict[str, float]:
            task.stop()
            with ExitStack() as own:
                cluster = filled(own, task, copies=2)
                clients = [cluster.client(task.nodes[rank], *options) for rank in READERS]
                order = {"paths": task.paths(), "store": task.files_store, "puts": puts}
                return series(clients, cluster.kill, **order)

        sides: dict[str, Side] = {
            OURS: ours,
            MEMCACHED: lambda: theirs("text", puts=False),
            REFILLED: lambda: theirs("text", "remaining", puts=True),
        }
        rounds = alternate(min(bench.rounds, ROUNDS), sides)
    places = [(bucket + 0.5) * bucket_s for bucket in range(round(seconds / bucket_s))]
    plot = Plot(
        "task_deaths",
        "200,000 files of 4 KiB in random batches of 128, two of 4 nodes killed",
        "seconds",
        "files read a second",
        places,
        over_time=True,
        events=[(at_s, f"node {rank} is killed") for at_s, rank in deaths],
    )
    by_place = _converted(
        rounds, lambda run: {str(places[int(key)]): value for key, value in run.items()}
    )
    plot_medians(bench, plot, by_place, SHOWN)

    (first_s, _), (second_s, _) = deaths
    short_s = 4 * bucket_s
    name = f"task {task.shape.name}, two of {NODES} nodes killed"
    rows: list[Row] = []
    for what, end_s in (
        ("before", first_s),
        (f"{short_s:g} s after the first death", first_s + short_s),
        ("before the second death", second_s),
        (f"{short_s:g} s after the second death", second_s + short_s),
        ("at the end", seconds),
    ):
        last = round(end_s / bucket_s)
        means = _converted(rounds, partial(_mean, [str(at) for at in range(last - 4, last)]))
        rows += against(means, f"{name}, {what}", RATE, {MEMCACHED: None, REFILLED: None})
    return rows


def _mean(buckets: Sequence[str], run: Mapping[str, float]) -> dict[str, float]:
    return {RATE: sum(run[at] for at in buckets) / len(buckets)}


def _converted(
    rounds: Rounds, convert: Callable[[Mapping[str, float]], dict[str, float]]
) -> Rounds:
    """The rounds with other figures of each run."""
    runs = {side: [*map(convert, of_side)] for side, of_side in rounds.runs.items()}
    return Rounds(runs, rounds.missing)
