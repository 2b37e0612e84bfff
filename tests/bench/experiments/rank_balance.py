"""Benchmark of ranks that wait for each other, of which one misses all its files: the gap between
the slowest and the fastest rank of an iteration (Lobster, sections 3 and 5.3).

A mount serves all ranks of a node. Its disk cache has the files of all ranks but the first; the
first rank's files are in a slow store. The other side is the same mount with a prefetch worker that
serves streams by turns, as it did before it balanced them (`by_turns/sitecustomize.py` replaces
those methods there). A third side has all files in its disk cache. It shows the differences between
ranks without any miss: they share the machine's processors.
"""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans import control
from tests.waiting import until

from ..cases.task_mounts import entries_of
from ..dlcmd import TREE, last_line
from ..inputs import Shape
from ..reading import write_list
from ..report import Row, against, at_most
from ..samples import OURS, alternate, progress
from ..store import SlowStore, slow_store
from ..workbench import Workbench

RANKS = 8
FILES, FILES_MIN, FILE_BYTES = 512, 128, 110 << 10  # of each rank
BATCH, COMPUTE_S = 16, 0.1
MISSED_MIN = 0.98  # of the first rank's bytes
STORE_S, STORE_BYTES_PER_S = 0.03, 60e6
"""The first rank needs less than a third of that bandwidth."""
END_S = 60.0
GROUP_FILES = 128
IMBALANCE_PART = 0.1
"""An iteration is unbalanced if the gap is more than this part of `COMPUTE_S`."""

BY_TURNS, NO_MISS = "by turns", "without a miss"
MEDIAN, P95, PART, SECONDS = "median ms", "p95 ms", "part", "s"
_DATASET = "ranks"
_PROGRAM = Path(__file__).parent / "ranks_program.py"
_SITE = Path(__file__).parent / "by_turns"


@dataclass(frozen=True, slots=True)
class _Setting:
    """The dataset in its store, and a disk cache that has all but the first rank's files."""

    bench: Workbench
    shape: Shape
    slow: SlowStore
    cache: Path
    full_cache: Path

    def options(self, cache: Path) -> tuple[str, ...]:
        """The options of a mount with a disk cache; there is memory for the whole dataset."""
        size = str(4 * self.shape.bytes)
        memory = ("--memory", str(6 * self.shape.bytes))
        return ("--cache-dir", str(cache), "--cache-size", size, *memory)

    def orders(self) -> list[list[str]]:
        """The files of each rank, shuffled within groups."""
        per_rank = self.shape.files_per_folder
        paths, orders = self.shape.paths(), []
        for rank in range(RANKS):
            draw = np.random.default_rng(rank)
            groups = np.arange(per_rank).reshape(-1, min(GROUP_FILES, per_rank))
            places = draw.permuted(draw.permutation(groups), axis=1).ravel() + rank * per_rank
            orders.append([paths[at] for at in places.tolist()])
        return orders

    def run(self, cache_of: Path, *, by_turns: bool = False) -> dict[str, float]:
        """One epoch of all ranks, of a mount with a copy of a cache."""
        with self.bench.scratch() as folder:
            dlcmd, mountpoint, starts = self.slow.user(folder), folder / "mount", folder / "starts"
            cache = Path(shutil.copytree(cache_of, folder / "cache"))
            if by_turns:
                dlcmd.environment |= {
                    "PYTHONPATH": f"{_SITE}:{TREE}",
                    "BY_TURNS_STARTS": str(starts),
                }
            orders = self.orders()
            lists = [
                str(write_list((f"{mountpoint}/{path}" for path in order), folder / f"list{rank}"))
                for rank, order in enumerate(orders)
            ]
            self.bench.warm_page_cache(cache)
            before = self.slow.store.counts()
            with (
                dlcmd.mounted(_DATASET, mountpoint, *self.options(cache)),
                control.Control.connect(mountpoint) as link,
            ):
                for rank, order in enumerate(orders):
                    epoch = control.explicit(epoch=0, entries=entries_of(mountpoint, order))
                    link.announce(f"rank{rank}", [epoch], lag_entries=2 * BATCH)
                figures = self._read(lists)
            _wait_for_end(folder)
            read = (self.slow.store.counts() - before).bytes / self.shape.bytes * RANKS
            progress(f"{read:.2f} times a rank's files were read from the store")
            misses = cache_of != self.full_cache
            assert (read >= MISSED_MIN) == misses, "the first rank's files are elsewhere"
            assert starts.exists() == by_turns, "the other side does not serve by turns"
            return figures

    def _read(self, lists: list[str]) -> dict[str, float]:
        options = {"lists": lists, "batch": BATCH, "compute_s": COMPUTE_S}
        report = json.loads(last_line([sys.executable, "-P", str(_PROGRAM), json.dumps(options)]))
        assert report["bytes"] == self.shape.bytes, "not all bytes were read"
        gaps_s = [max(took) - min(took) for took in report["iterations"]]
        return {
            MEDIAN: 1e3 * statistics.median(gaps_s),
            P95: 1e3 * float(np.quantile(gaps_s, 0.95)),
            PART: sum(gap_s > IMBALANCE_PART * COMPUTE_S for gap_s in gaps_s) / len(gaps_s),
            SECONDS: sum(max(took) + COMPUTE_S for took in report["iterations"]),
        }


@contextmanager
def _setting(bench: Workbench) -> Iterator[_Setting]:
    files = max(FILES // bench.divisor, FILES_MIN)
    shape = Shape(f"D110x{files}x{RANKS}", RANKS * files, RANKS, FILE_BYTES)
    source, chunk = bench.input(shape), ("--chunk-size", str(4 << 20))
    rates = {"delay_s": STORE_S, "bytes_per_s": STORE_BYTES_PER_S}
    with bench.scratch() as folder, slow_store(folder, source, _DATASET, *chunk, **rates) as slow:
        setting = _Setting(bench, shape, slow, folder / "cache", folder / "full")
        progress("filling the caches")
        _fill(setting)
        yield setting


def _fill(setting: _Setting) -> None:
    """Fill the cache that has all files, and copy it without the chunks that have any of the first
    rank. (A cache also gets chunks that nobody has read, so it is not enough to read the others.)
    """
    shape = setting.shape
    paths = shape.paths()
    with setting.bench.scratch() as folder:
        mountpoint = folder / "mount"
        options = setting.options(setting.full_cache)
        with setting.slow.user(folder).mounted(_DATASET, mountpoint, *options):
            view = Snapshot((mountpoint / ".diesel" / "snapshot").read_bytes())
            for path in paths:
                (mountpoint / path).read_bytes()
        _wait_for_end(folder)
    shutil.copytree(setting.full_cache, setting.cache)
    names = [path.encode() for path in paths[: shape.files_per_folder]]
    chunks = np.unique(view.chunk_of(view.lookup_many(names)))
    missing = {view.chunk_ids[chunk].hex() for chunk in chunks.tolist()}
    removed = [each for each in setting.cache.rglob("*") if each.name in missing]
    assert len(removed) == len(missing), "the cache does not have a file for each chunk"
    for each in removed:
        each.unlink()


def _wait_for_end(folder: Path) -> None:
    """Wait until no process has a folder in its environment: at its end, the mount's master writes
    its memory to its cache."""

    def has_ended() -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if os.fsencode(folder) + b"/" in (process / "environ").read_bytes():
                    return False
        return True

    until(has_ended, "the end of the mount's processes", END_S)


def measure(bench: Workbench) -> list[Row]:
    """Eight ranks in lockstep, one of which misses all its files."""
    with _setting(bench) as setting:
        sides = {
            OURS: lambda: setting.run(setting.cache),
            BY_TURNS: lambda: setting.run(setting.cache, by_turns=True),
            NO_MISS: lambda: setting.run(setting.full_cache),
        }
        rounds = alternate(bench.rounds, sides)
    name = f"{RANKS} ranks in lockstep, one misses all its files"
    how = f"batches of {BATCH} files of 110 KiB, {COMPUTE_S} s for the model"

    others = {BY_TURNS: at_most(1), NO_MISS: None}
    uneven = f"iterations with a gap of over {IMBALANCE_PART * COMPUTE_S * 1e3:.0f} ms"
    rows: list[Row] = []
    for what, unit, quantity in (
        ("gap of an iteration, median", "ms", MEDIAN),
        ("gap of an iteration, 95th percentile", "ms", P95),
        (uneven, "", PART),
        ("an epoch", "s", SECONDS),
    ):
        rows += against(rounds, f"{name}, {what}", unit, others, how, of=quantity)
    return rows
