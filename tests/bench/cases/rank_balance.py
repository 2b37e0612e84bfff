"""Benchmark of ranks that wait for each other, where one of them misses all its files: the gap
between the slowest and the fastest rank of an iteration (Lobster, sections 3 and 5.3).

A mount serves all ranks of a node. Its disk cache has the files of all ranks but the first, whose
files are in a slow store. The other side is the same mount, whose prefetch worker serves streams by
turns, as it did before it balanced them (`by_turns/sitecustomize.py` replaces those methods there).
A third side, whose disk cache has all files, shows what the ranks differ by without any miss: they
share the machine's processors.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans import control
from tests.storage.metadata.redis_servers import RedisServer

from ..dlcmd import DEADLINE_S, TREE, Dlcmd
from ..inputs import Shape
from ..reader import write_list
from ..report import Row, at_most
from ..samples import OURS, alternate, say
from ..store import BUCKET, Store, serving
from ..workbench import Workbench

RANKS = 8
FILES, FILES_MIN, FILE_BYTES = 512, 128, 110 << 10  # of each rank
BATCH, COMPUTE_S = 16, 0.1
STORE_S, STORE_BYTES_PER_S = 0.03, 60e6
"""The first rank needs less than a third of that bandwidth."""
KEPT_S, STILL_S = 60.0, 1.0
GROUP_FILES = 128
IMBALANCE_PART = 0.1
"""An iteration is unbalanced where the gap is more than so much of `COMPUTE_S`."""

BY_TURNS, NO_MISS = "by turns", "without a miss"
MEDIAN, P95, PART, SECONDS = "median ms", "p95 ms", "part", "s"
_DATASET = "ranks"
_PROGRAM = Path(__file__).parent.parent / "ranks_program.py"
_SITE = Path(__file__).parent.parent / "by_turns"


@dataclass(frozen=True, slots=True)
class _Setting:
    """The dataset in its store, and a disk cache that has all but the first rank's files."""

    bench: Workbench
    shape: Shape
    store: Store
    redis: str
    cache: Path
    full_cache: Path

    def dlcmd(self, folder: Path) -> Dlcmd:
        """A user with nothing of the dataset but what the cache has."""
        dlcmd = Dlcmd(folder)
        dlcmd.environment |= self.store.environment
        dlcmd.environment["DIESEL_URL"] = f"s3://{BUCKET}?meta={self.redis}"
        return dlcmd

    def options(self, cache: Path) -> tuple[str, ...]:
        """The options of a mount with a disk cache; there is memory for the whole dataset."""
        size = str(4 * self.shape.bytes)
        return (
            "--cache-dir",
            str(cache),
            "--cache-size",
            size,
            "--memory",
            str(6 * self.shape.bytes),
        )

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

    def run(self, cache: Path, *, by_turns: bool = False) -> dict[str, float]:
        """One epoch of all ranks, of a mount with a copy of a cache."""
        with self.bench.scratch() as folder:
            dlcmd, mountpoint, starts = self.dlcmd(folder), folder / "mount", folder / "starts"
            cache = Path(shutil.copytree(cache, folder / "cache"))
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
            before = self.store.counts()
            with dlcmd.mounted(_DATASET, mountpoint, *self.options(cache)):
                view = Snapshot((mountpoint / ".diesel" / "snapshot").read_bytes())
                with control.Control.connect(mountpoint) as link:
                    for rank, order in enumerate(orders):
                        entries = view.lookup_many([path.encode() for path in order])
                        epoch = control.explicit(epoch=0, entries=entries)
                        link.announce(f"rank{rank}", [epoch], lag_entries=2 * BATCH)
                    figures = self._read(lists)
            read = self.store.counts() - before
            say(f"{read.bytes / self.shape.bytes * RANKS:.2f} times a rank's files were read")
            assert starts.exists() == by_turns, "the other side is not what it should be"
            return figures

    def _read(self, lists: list[str]) -> dict[str, float]:
        options = {"lists": lists, "batch": BATCH, "compute_s": COMPUTE_S}
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM), json.dumps(options)],
            check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S,
        )  # fmt: skip
        said = json.loads(done.stdout)
        assert said["bytes"] == self.shape.bytes, "not all bytes were read"
        gaps_s = [max(took) - min(took) for took in said["iterations"]]
        return {
            MEDIAN: 1e3 * statistics.median(gaps_s),
            P95: 1e3 * float(np.quantile(gaps_s, 0.95)),
            PART: sum(gap_s > IMBALANCE_PART * COMPUTE_S for gap_s in gaps_s) / len(gaps_s),
            SECONDS: sum(max(took) + COMPUTE_S for took in said["iterations"]),
        }


@contextmanager
def _setting(bench: Workbench) -> Iterator[_Setting]:
    files = max(FILES // bench.divisor, FILES_MIN)
    shape = Shape(f"D110x{files}x{RANKS}", RANKS * files, RANKS, FILE_BYTES)
    source = bench.input(shape)
    with ExitStack() as stack:
        folder = stack.enter_context(bench.scratch())
        (folder / "store").mkdir()
        store = stack.enter_context(
            serving(folder / "store", delay_s=STORE_S, bytes_per_s=STORE_BYTES_PER_S)
        )
        redis = stack.enter_context(RedisServer(folder / "redis")).url
        dlcmd = Dlcmd(folder / "put", store=store.bucket)
        dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}?meta={redis}"
        dlcmd.seconds("put", "--chunk-size", str(4 << 20), str(source), _DATASET)
        caches = folder / "cache", folder / "full"
        setting = _Setting(bench, shape, store, redis, *caches)
        say("filling the caches")
        first = _fill(setting, caches[0], whole=False)
        others = shape.files * (RANKS - 1) // RANKS
        say(
            f"{first / others:.0%} of the other ranks' files are in chunks without one of the first"
        )
        shutil.copytree(*caches)
        _fill(setting, caches[1], whole=True)
        yield setting


def _fill(setting: _Setting, cache: Path, *, whole: bool) -> int:
    """Read all files into a cache, or all that may be in it. Returns how many."""
    with setting.bench.scratch() as folder:
        mountpoint = folder / "mount"
        with setting.dlcmd(folder).mounted(_DATASET, mountpoint, *setting.options(cache)):
            paths = setting.shape.paths()
            if not whole:
                paths = _without_first_rank(setting.shape, mountpoint)
            for path in paths:
                (mountpoint / path).read_bytes()
        _wait_until_kept(cache, len(paths) * setting.shape.file_bytes)
    return len(paths)


def _without_first_rank(shape: Shape, mountpoint: Path) -> list[str]:
    """The files in chunks that have no file of the first rank: a cache keeps whole chunks."""
    view = Snapshot((mountpoint / ".diesel" / "snapshot").read_bytes())
    paths = shape.paths()
    chunks = view.chunk_of(view.lookup_many([path.encode() for path in paths]))
    is_kept = ~np.isin(chunks, chunks[: shape.files_per_folder])
    return [paths[at] for at in np.flatnonzero(is_kept).tolist()]


def _wait_until_kept(cache: Path, wanted: int) -> None:
    """Wait until the mount's master has written what it had in memory to the cache, and has
    ended."""
    before, end_s = -1, time.monotonic() + KEPT_S
    while True:
        files = [each for each in cache.rglob("*") if each.is_file()]
        size = sum(each.stat().st_size for each in files)
        if size >= wanted and size == before:
            say(f"the cache has {size / wanted:.2f} times what it should have")
            return
        assert time.monotonic() < end_s, f"the cache has {size} bytes, not {wanted}"
        before = size
        time.sleep(STILL_S)


def measure(bench: Workbench) -> list[Row]:
    """Eight ranks in lockstep, one of which misses all its files."""
    with _setting(bench) as setting:
        sides = {
            OURS: lambda: setting.run(setting.cache),
            BY_TURNS: lambda: setting.run(setting.cache, by_turns=True),
            NO_MISS: lambda: setting.run(setting.full_cache),
        }
        rounds = alternate(min(bench.rounds, 3), sides)
    name = f"{RANKS} ranks in lockstep, one misses all its files"
    how = f"batches of {BATCH} files of 110 KiB, {COMPUTE_S} s for the model"

    def rows(what: str, unit: str, quantity: str) -> list[Row]:
        ours = rounds.ours(quantity)
        return [
            Row(f"{name}, {what}", unit, ours, side, rounds.of(side, quantity), target, how)
            for side, target in ((BY_TURNS, at_most(1)), (NO_MISS, None))
        ]

    return [
        *rows("gap of an iteration, median", "ms", MEDIAN),
        *rows("gap of an iteration, 95th percentile", "ms", P95),
        *rows(f"iterations with a gap of over {IMBALANCE_PART * COMPUTE_S * 1e3:.0f} ms", "", PART),
        *rows("an epoch", "s", SECONDS),
    ]
