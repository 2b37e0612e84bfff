"""Benchmarks of what `dlcmd run` costs: the bytes and requests that a mount with little memory
takes from its store for a shuffled order, and the time that announcing takes if all is in memory.

The script (`training_program.py`) is stock PyTorch with `shuffle=True` and two persistent workers;
a step is a sleep. No order of loads takes fewer files than Belady's MIN with that memory for pages,
which knows the whole order, loads a file when the loop wants it, and drops the one whose next use
is farthest. The order is the one in which the loop got its samples. The counts of a mount are up to
a second old, so the script stops after each epoch until they are right; the store's are read before
that, since the mount goes on loading files of the next epoch.
"""

import heapq
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from diesel_fs.mounts.prefetch.memory import KNOWN_DIVISOR
from diesel_fs.mounts.prefetch.streams.units import PAGE_BYTES

from ..cases.limits import LAUNCHED
from ..dlcmd import Dlcmd, last_line
from ..inputs import D4, Shape, Sums
from ..mounts import STILL_S
from ..reading import write_list
from ..report import Row, against, at_most, no_more_than
from ..samples import OURS, alternate, progress, repeat
from ..store import SlowStore, slow_store
from ..workbench import Workbench
from .training import program

BATCH, WORKERS = 64, 2
EPOCHS, FIRST_LATER = 5, 2
"""The second epoch begins before its order is known, so the later ones begin with the third."""
BYTES_MAX, READS_MAX, FIRST_READS_MAX = 1.05, 2.0, 10.0
"""Bytes relative to MIN, or to one reading of all files; READs in percent of files."""
MIN, ONCE = "Belady's MIN", "each file once"

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""More threads of PyTorch would spin while they wait for the processors that the workers have: an
epoch would take 0.8 to 3.4 s, from one to the next."""

OVERHEAD_EPOCHS, OVERHEAD_FROM, OVERHEAD_MAX = 12, 3, 1.03
OVERHEAD_STEPS_S = (0.002, 0.0)
PLAIN = "without dlcmd run"
SECONDS = "s an epoch"

Order = npt.NDArray[np.int64]
"""Numbers of files, by the place in which they are read."""

DATASET = "images"


@dataclass(frozen=True, slots=True)
class Setting:
    """A dataset, the bytes of `mount --memory`, and the seconds of a step."""

    shape: Shape
    memory_bytes: int
    step_s: float


SETTINGS = (
    Setting(Shape("D10", 5_000, 25, 10_000), 24_000_000, 0.002),
    Setting(Shape("D10L", 30_000, 150, 10_000), 80_000_000, 0.01),
    Setting(D4, 64_000_000, 0.002),
)


def fetches_of_min(order: Order, room: int) -> npt.NDArray[np.bool_]:
    """For each place in an order, whether MIN fetches the file there; memory holds `room` files,
    and none at the start."""
    files, end = order.tolist(), len(order)
    next_use, seen = [end] * end, dict[int, int]()
    for place in reversed(range(end)):
        next_use[place] = seen.get(files[place], end)
        seen[files[place]] = place
    fetched = np.zeros(end, np.bool_)
    here = dict[int, int]()  # files in memory, with their next uses
    farthest: list[tuple[int, int]] = []  # the same with former uses, the farthest first
    for place, file in enumerate(files):
        fetched[place] = file not in here
        here[file] = next_use[place]
        heapq.heappush(farthest, (-next_use[place], file))
        while len(here) > room:
            use, victim = heapq.heappop(farthest)
            if here.get(victim) == -use:
                del here[victim]
    return fetched


def order_of(sums: Sums, shape: Shape) -> Order:
    """The files with these sums; no two files of a shape have the same sum."""
    known = shape.file_sums()
    by_sum = np.argsort(known)
    places = np.searchsorted(known, sums, sorter=by_sum)
    found: Order = by_sum[np.minimum(places, shape.files - 1)]
    assert (known[found] == sums).all(), "a sample is not a file of the dataset"
    return found


class _Stats(TypedDict):
    """A part of a mount's statistics."""

    reads: dict[str, int]
    residency: dict[str, int]


class Epoch(TypedDict):
    """A part of what the script prints of an epoch. `counts`: of the store and of the mount."""

    seconds: float
    files: int
    bytes: int
    sum: int
    counts: tuple[dict[str, int], _Stats]


@dataclass(frozen=True, slots=True)
class Ground:
    """A dataset in a slow store, and a folder for lists."""

    bench: Workbench
    shape: Shape
    slow: SlowStore
    folder: Path

    def train(
        self, dlcmd: Dlcmd, source: Path | str, *prefix: str, epochs: int, step_s: float,
        **more: object,
    ) -> list[Epoch]:  # fmt: skip
        """Run the script, with these words before its command."""
        options = {
            "source": str(source), "list": str(self.folder / "list"), "epochs": epochs,
            "batch": BATCH, "workers": WORKERS, "compute_s": step_s, **more,
        }  # fmt: skip
        command = [*prefix, *program("train", json.dumps(options))]
        environment = {**dlcmd.users_environment, **ONE_THREAD}
        printed: list[Epoch] = json.loads(last_line(command, environment))
        for epoch in printed:
            self.shape.check(epoch["files"], epoch["bytes"], epoch["sum"])
        return printed

    def counted(self, memory_bytes: int, step_s: float) -> dict[str, float]:
        """The figures of a job of some epochs, for a user without cached data of the dataset."""
        store, shape = self.slow.store, self.shape
        self.bench.warm_page_cache(store.bucket / "datasets")
        with self.bench.scratch() as folder:
            dlcmd, mountpoint, sums = self.slow.user(folder), folder / "mount", folder / "sums"
            options = (*self.bench.session_options, "--memory", str(memory_bytes))
            with dlcmd.mounted(DATASET, mountpoint, *options):
                before = store.counts()
                stats = (mountpoint / ".diesel" / "stats").as_uri()
                counters = [(f"{store.endpoint}/counts", 0.0), (stats, STILL_S)]
                epochs = self.train(
                    dlcmd, mountpoint, *LAUNCHED, epochs=EPOCHS, step_s=step_s, order=str(sums),
                    counters=counters,
                )  # fmt: skip
                pushed = epochs[-1]["counts"][1]["residency"]
                assert "budget_bytes" in pushed, "the prefetch worker has ended"
            order = order_of(np.fromfile(sums, np.uint64), shape)
        totals = [(before.requests, before.bytes, 0)]
        for epoch in epochs:
            stored, mounted = epoch["counts"]
            reads = mounted["reads"]["hits"] + mounted["reads"]["misses"]
            totals.append((stored["requests"], stored["bytes"], reads))
        counts = np.diff(np.array(totals), axis=0)
        room = _room_files(pushed, shape)
        fetched = fetches_of_min(order, room).reshape(EPOCHS, shape.files).sum(axis=1)
        for number, (requests, size, reads) in enumerate(counts.tolist(), 1):
            progress(
                f"epoch {number}: {requests:,} requests, {size / 1e6:.1f} MB, {reads:,} READs;"
                f" MIN fetches {fetched[number - 1]:,} files with memory for {room:,}"
            )
        _, first_bytes, first_reads = counts[0].tolist()
        requests, size, reads = counts[FIRST_LATER:].mean(axis=0).tolist()
        min_files = float(fetched[FIRST_LATER:].mean())
        return {
            "MB": size / 1e6,
            f"MB {MIN}": min_files * shape.file_bytes / 1e6,
            "requests": requests,
            f"requests {MIN}": min_files,
            "READs": 100 * reads / shape.files,
            "first MB": first_bytes / 1e6,
            f"first MB {ONCE}": shape.bytes / 1e6,
            "first READs": 100 * first_reads / shape.files,
        }


def _room_files(residency: dict[str, int], shape: Shape) -> int:
    """The number of files in the memory that a mount has for pages."""
    budget_bytes = residency["budget_bytes"]
    pages_bytes = budget_bytes - min(residency["known_bytes"], budget_bytes // KNOWN_DIVISOR)
    return pages_bytes // (-(-shape.file_bytes // PAGE_BYTES) * PAGE_BYTES)


@contextmanager
def ground_of(bench: Workbench, wanted: Shape, *options: str) -> Iterator[Ground]:
    """The files of a shape in a slow store, put with these options of `dlcmd put`."""
    shape, source = bench.prepared(wanted)
    with bench.scratch() as folder, slow_store(folder, source, DATASET, *options) as slow:
        write_list(shape.paths(), folder / "list")
        yield Ground(bench, shape, slow, folder)


def store_bytes(bench: Workbench) -> list[Row]:
    """Bytes and requests from the store, and READs of the mount, in each setting."""
    rows: list[Row] = []
    for setting in SETTINGS:
        with ground_of(bench, setting.shape) as ground:
            shape, wanted = ground.shape, setting.shape
            memory_bytes = setting.memory_bytes * shape.files // wanted.files
            run = partial(ground.counted, memory_bytes, setting.step_s)
            rounds = repeat(min(bench.rounds, 3), run)
        name = (
            f"plans of dlcmd run, {wanted.files:,} files of {wanted.file_bytes:,} bytes,"
            f" --memory {setting.memory_bytes / 1e6:.0f} MB"
        )
        later, first = f"{name}, later epochs", f"{name}, first epoch"
        how = f"an epoch, from the third on; steps of {1e3 * setting.step_s:.0f} ms"
        for unit, target in {"MB": at_most(BYTES_MAX), "requests": None}.items():
            other = rounds.ours(f"{unit} {MIN}")
            rows.append(Row(later, unit, rounds.ours(unit), MIN, other, target, how))
        rows.append(no_more_than(later, "READs, % of files", rounds.ours("READs"), READS_MAX))
        once = rounds.ours(f"first MB {ONCE}")
        rows += [
            Row(first, "MB", rounds.ours("first MB"), ONCE, once, at_most(BYTES_MAX)),
            no_more_than(first, "READs, % of files", rounds.ours("first READs"), FIRST_READS_MAX),
        ]
    return rows


def overhead(bench: Workbench) -> list[Row]:
    """The same script with and without `dlcmd run`, on one mount that has all files in memory."""
    rows: list[Row] = []
    with ground_of(bench, D4) as ground, bench.scratch() as folder:
        dlcmd, mountpoint = ground.slow.user(folder), folder / "mount"

        def run(step_s: float, *prefix: str) -> dict[str, float]:
            epochs = ground.train(dlcmd, mountpoint, *prefix, epochs=OVERHEAD_EPOCHS, step_s=step_s)
            seconds = [epoch["seconds"] for epoch in epochs[OVERHEAD_FROM:]]
            progress(f"epochs of {min(seconds):.3f} to {max(seconds):.3f} s")
            return {SECONDS: statistics.median(seconds)}

        memory = ("--memory", str(8 * ground.shape.bytes))
        with dlcmd.mounted(DATASET, mountpoint, *bench.session_options, *memory) as mount:
            for step_s in OVERHEAD_STEPS_S:
                before = mount.counts().reads
                sides = {OURS: partial(run, step_s, *LAUNCHED), PLAIN: partial(run, step_s)}
                rounds = alternate(bench.rounds, sides)
                progress(f"{mount.counts().reads - before:,} READs in all")
                name = f"plans of dlcmd run, {D4.name} in memory, steps of {1e3 * step_s:.0f} ms"
                note = f"the median epoch from number {OVERHEAD_FROM + 1} on, {WORKERS} workers"
                targets = {PLAIN: at_most(OVERHEAD_MAX)}
                rows += against(rounds, name, SECONDS, targets, note)
    return rows
