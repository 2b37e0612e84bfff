"""Experiment:  how fast files are read while nodes of a task die, one after the other: a table, and
a plot over time beside the bench. It repeats figure 6 of the paper (DIESEL, section 4.2)."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ..client_process import HEAD_START_S, RATE, ClientProcess
from ..inputs import D4L
from ..peers.clusters import MEMCACHED
from ..plot import Plot, plot_medians
from ..report import Row, against
from ..running import BATCH, NODES, Running, filled, running
from ..samples import OURS, Rounds, Side, alternate
from ..workbench import Workbench

DEATHS = ((5.0, 3), (16.0, 2))
"""When nodes are killed, in seconds, and their ranks."""

SECONDS, BUCKET_S = 28.0, 0.5
READERS = (0, 1)  # ranks of nodes that live
MEMORY_PART = 0.6  # of the dataset, in each master: two of them hold all of it
ROUNDS = 3  # each takes a minute

REFILLED = "memcached, the others refilled"
SHOWN = {OURS: "DIESEL-FS", MEMCACHED: "memcached, as in the paper", REFILLED: REFILLED}


def measure(bench: Workbench) -> list[Row]:
    """D4L in random batches by two clients, while two of four nodes are killed.

    Of memcached, in one case each miss is read from the store, as in the paper; in the other the
    servers that remain get the keys of the dead ones, and clients set what they miss. The store
    answers each of its requests, of ours too, in 5 ms.
    """
    scale = min(bench.divisor, 4)  # a shorter time where the bench is only tried
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
            said = [client.answer() for client in clients]
            return {bucket: sum(each[bucket] for each in said) for bucket in said[0]}

        def ours() -> dict[str, float]:
            task.start(task_memory_bytes=int(MEMORY_PART * task.task.stored_bytes))
            task.warm_s()
            task.all(do="batches", seed=99, count=10, size=BATCH)
            return series(
                [task.clients[rank] for rank in READERS], lambda rank: task.nodes[rank].kill()
            )

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
    _plot(bench, rounds, bucket_s, deaths, round(seconds / bucket_s))
    return _rows(task, rounds, bucket_s, deaths, seconds)


def _plot(
    bench: Workbench,
    rounds: Rounds,
    bucket_s: float,
    deaths: Sequence[tuple[float, int]],
    buckets: int,
) -> None:
    """Draw the files a second of each part of the time, at its middle."""
    places = [(bucket + 0.5) * bucket_s for bucket in range(buckets)]
    by_time = {
        side: [{str(places[int(key)]): value for key, value in run.items()} for run in runs]
        for side, runs in rounds.runs.items()
    }
    plot = Plot(
        "task_deaths",
        "200,000 files of 4 KiB in random batches of 128, two of 4 nodes killed",
        "seconds",
        "files read a second",
        places,
        over_time=True,
        events=[(at_s, f"node {rank} is killed") for at_s, rank in deaths],
    )
    plot_medians(bench, plot, Rounds(by_time, rounds.missing), SHOWN)


def _rows(
    task: Running,
    rounds: Rounds,
    bucket_s: float,
    deaths: Sequence[tuple[float, int]],
    seconds: float,
) -> list[Row]:
    """The mean rate before the first death, and after each death: at once, and at last."""
    (first_s, _), (second_s, _) = deaths
    short_s = 4 * bucket_s
    phases = (
        ("before", first_s - short_s, first_s),
        (f"{short_s:g} s after the first death", first_s, first_s + short_s),
        ("before the second death", second_s - short_s, second_s),
        (f"{short_s:g} s after the second death", second_s, second_s + short_s),
        ("at the end", seconds - short_s, seconds),
    )
    name = f"task {task.shape.name}, two of {NODES} nodes killed"
    rows: list[Row] = []
    for what, begin_s, end_s in phases:
        buckets = [str(at) for at in range(round(begin_s / bucket_s), round(end_s / bucket_s))]
        means = {
            side: [{RATE: sum(run[at] for at in buckets) / len(buckets)} for run in runs]
            for side, runs in rounds.runs.items()
        }
        phase = Rounds(means, rounds.missing)
        rows += against(phase, f"{name}, {what}", RATE, {MEMCACHED: None, REFILLED: None})
    return rows
