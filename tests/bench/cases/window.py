"""Benchmarks with less memory than the dataset: chunk-wise order, and random order without a plan.

The plan is made as a training script makes it: by reading the order from the mount.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ..control_group import ControlGroup, control_group
from ..inputs import D4L
from ..mounts import Mount
from ..reading import Order, random_order, whole_order
from ..report import Row, against, at_least, no_more_than, worst
from ..samples import OURS, Rounds, Side, alternate
from ..stored import Stored, Tree, stored
from ..workbench import Workbench
from .kernel import KERNEL, RATE, READS

GROUP_CHUNKS = 10
SEED = 1
BUDGET_PART = 10  # of the dataset's bytes
READERS = (1, 4, 16)

RESIDENT_RATIO = 0.6
READS_MAX = 0.02
UNPLANNED_RATIO = 1
UNPLANNED_PART = 4  # a fourth of the epoch is read, which fills the budget many times
PUSHED_RATIO = 0.8
NATIVE_RESIDENT_RATIO = 0.5
NATIVE_PEAK_RATIO, OWN_MB = 1.25, 100
PUSHED = "all pushed once, read for the first time"
RESIDENT, NOT_PUSHING = "everything resident", "the same mount without pushing"
RATE_AGAIN, READS_AGAIN, PEAK = "files/s, second", "READs a file, second", "peak MB"

CHUNK_BYTES, CHUNK_BYTES_MIN = 4 << 20, 64 << 10
INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch: its number, the mount's list of it, and its order for the reader."""

    number: int
    text: bytes
    order: Order

    def announce(self, tree: Tree) -> None:
        """Make the plan by reading its list, and compare the list: it takes milliseconds."""
        name = f"seed={SEED},epoch={self.number},group={GROUP_CHUNKS}"
        text = (tree.root / ".diesel" / "shuffle" / name).read_bytes()
        assert text == self.text, "the mount has another order"


class _Setting:
    """D4L in small chunks, the options of a mount of `session` with a budget of a tenth, and of one
    that has all resident."""

    def __init__(self, data: Stored, session: tuple[str, ...]) -> None:
        self.data, self.bench = data, data.bench
        self.budget_bytes = data.shape.bytes // BUDGET_PART
        self.options = (*session, "--memory", str(self.budget_bytes))
        self.oneshot = (*session, "--policy", "oneshot")
        data.mount_once()

    def epoch(self, number: int) -> _Epoch:
        """An epoch in the order that `dlcmd shuffle` prints."""
        data = self.data
        words = ["--seed", str(SEED), "--epoch", str(number), "--group-size", str(GROUP_CHUNKS)]
        text = data.dlcmd.output("shuffle", data.shape.name, *words)
        paths, file = os.fsdecode(text).splitlines(), data.folder / f"epoch-{number}"
        return _Epoch(number, text, whole_order(data.shape, data.mountpoint, paths, file))

    def walk(self) -> None:
        """Look all entries up in this process, so that the kernel charges them to it and not to the
        mount or its readers."""
        for folder, _, files in os.walk(self.data.mountpoint):
            for name in files:
                os.stat(f"{folder}/{name}")

    def sides(self, readers: int, *, charge_readers: bool = False) -> dict[str, Side]:
        """With `charge_readers`, the peak memory has the pages of the kernel that readers
        brought."""
        first, second = self.epoch(0), self.epoch(1)
        read = partial(self.bench.read_epoch, readers=readers)

        def window() -> dict[str, float]:
            with (
                control_group() as group,
                self.data.opened(OURS, *self.options, group=group) as tree,
            ):
                assert tree.mount is not None
                self.walk()
                peak = _Peak(tree.mount, group)
                charged = group if charge_readers else None
                first.announce(tree)
                once = read(first.order, group=charged)
                before = tree.reads()
                second.announce(tree)
                again = read(second.order, group=charged)
                peak_bytes, reads = peak.bytes(), tree.reads()
            return {
                RATE: once.files_per_s,
                READS: before / self.data.shape.files,
                RATE_AGAIN: again.files_per_s,
                READS_AGAIN: (reads - before) / self.data.shape.files,
                PEAK: peak_bytes / 1e6,
            }

        def resident() -> dict[str, float]:
            with self.data.opened(OURS, *self.oneshot) as tree:
                self.bench.read_epoch(first.order, walk=tree.root)
                rate = read(first.order).files_per_s
                return {RATE: rate, RATE_AGAIN: rate}

        return {OURS: window, RESIDENT: resident}


@contextmanager
def _setting(bench: Workbench, session: tuple[str, ...] = KERNEL) -> Iterator[_Setting]:
    chunk = max(CHUNK_BYTES // bench.divisor, CHUNK_BYTES_MIN)
    with stored(bench, bench.shape(D4L), "--chunk-size", str(chunk)) as data:
        yield _Setting(data, session)


def chunk_wise(bench: Workbench) -> list[Row]:
    """D4L in chunk-wise order with a budget of a tenth, against everything resident."""
    with _setting(bench) as setting:
        runs = {each: alternate(bench.rounds, setting.sides(each)) for each in READERS}
    limit_mb = 1.3 * setting.budget_bytes / 1e6 + OWN_MB
    return [row for each in READERS for row in _chunk_wise_rows(runs[each], each, limit_mb)]


def _chunk_wise_rows(rounds: Rounds, readers: int, limit_mb: float) -> list[Row]:
    name = f"kernel {D4L.name}, chunk-wise, {readers} reader{'s' * (readers > 1)}"
    again = f"{name}, second epoch"
    how = (
        f"G = {GROUP_CHUNKS}, a budget of a tenth of the dataset; the plan is a list that was read"
    )
    stays = (
        "says little where the first did not keep the limit: the kernel keeps what READs brought"
    )
    memory = "its processes and all that the kernel charges to them"
    target = {RESIDENT: at_least(RESIDENT_RATIO) if readers == 1 else None}
    return [
        *against(rounds, name, RATE, target, how),
        *against(rounds, again, RATE, target, of=RATE_AGAIN),
        no_more_than(name, READS, rounds.ours(READS), READS_MAX),
        no_more_than(again, READS, rounds.ours(READS_AGAIN), READS_MAX, stays),
        no_more_than(name, PEAK, worst(rounds.ours(PEAK)), limit_mb, memory),
    ]


def native(bench: Workbench) -> list[Row]:
    """D4L in chunk-wise order with a budget of a tenth over `bench.session`, against the same
    session when all was pushed before, and against everything resident."""
    with _setting(bench, bench.session_options) as setting:
        data = setting.data
        order = setting.epoch(0).order

        def pushed() -> dict[str, float]:
            with data.opened(OURS, *setting.oneshot) as tree:
                assert tree.mount is not None
                setting.walk()
                tree.mount.wait_until_loaded()
                rate = bench.read_epoch(order).files_per_s
                return {RATE: rate, RATE_AGAIN: rate}

        sides = {**setting.sides(1, charge_readers=True), PUSHED: pushed}
        rounds = alternate(bench.rounds, sides)
    name = f"{bench.session} {data.shape.name}, window of a tenth"
    again = f"{name}, second epoch"
    targets = {PUSHED: at_least(PUSHED_RATIO), RESIDENT: at_least(NATIVE_RESIDENT_RATIO)}
    peak_mb = NATIVE_PEAK_RATIO * setting.budget_bytes / 1e6 + OWN_MB
    memory = "its processes, the reader, and all pages of the kernel; 1.25 times the budget"
    return [
        *against(rounds, name, RATE, targets),
        *against(rounds, again, RATE, targets, of=RATE_AGAIN),
        Row(name, READS, rounds.ours(READS)),
        Row(again, READS, rounds.ours(READS_AGAIN)),
        no_more_than(name, PEAK, worst(rounds.ours(PEAK)), peak_mb, memory),
    ]


def unplanned(bench: Workbench) -> list[Row]:
    """D4L in true random order with a budget of a tenth, with and without loading ahead."""
    with _setting(bench) as setting:
        data, files = setting.data, setting.data.shape.files // UNPLANNED_PART
        order = random_order(data.shape, data.mountpoint, 0, data.folder, files=files)

        def run(*, pushing: bool) -> dict[str, float]:
            with data.opened(OURS, *setting.options) as tree:
                if tree.mount is not None and not pushing:
                    tree.mount.stop_pushing()
                setting.walk()
                report = bench.read_epoch(order)
                return {RATE: report.files_per_s, READS: tree.reads() / files}

        sides: dict[str, Side] = {
            OURS: partial(run, pushing=True),
            NOT_PUSHING: partial(run, pushing=False),
        }
        rounds = alternate(bench.rounds, sides)
    name, note = f"kernel {D4L.name}, random, no plan", "a quarter of an epoch, a budget of a tenth"
    target = {NOT_PUSHING: at_least(UNPLANNED_RATIO)}
    return [
        *against(rounds, name, RATE, target, f"{note} of it"),
        *against(rounds, name, READS, {NOT_PUSHING: None}),
    ]


class _Peak:
    """The most memory that a mount's processes took, with the page cache charged to them.

    The control group knows. Without one it is sampled: what is theirs, and what they hold resident
    at the end, which is about what they hold all the time.
    """

    def __init__(self, mount: Mount, group: ControlGroup | None) -> None:
        self._mount = mount
        self._group = group
        self._own_bytes = 0
        self._end = threading.Event()
        if group is None:
            self._supervisor = mount.counts().supervisor
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()

    def bytes(self) -> int:
        """The peak so far, in bytes; may be called once."""
        if self._group is not None:
            return self._group.peak_bytes()
        self._end.set()
        self._sampler.join()
        return self._own_bytes + self._mount.counts().resident_bytes

    def _sample(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self._own_bytes = max(self._own_bytes, self._mount.pss_bytes(self._supervisor))
