"""Benchmarks with less memory than the dataset: chunk-wise order, and random order without a plan.

The plan is made as a training script makes it: by reading the order from the mount.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..control_group import ControlGroup, control_group
from ..dlcmd import Dlcmd
from ..epochs import Order, files_per_s, prepared, random_order, read_epoch, whole_order
from ..inputs import D4L, Shape
from ..mounts import Mount
from ..report import Row, at_least, within
from ..samples import OURS, Rounds, Side, alternate
from ..workbench import Workbench
from .kernel import KERNEL, RATE, READS, worst

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
class _Setting:
    """The parts that the benchmarks share; `session` are the options that choose it."""

    bench: Workbench
    shape: Shape
    dlcmd: Dlcmd
    mountpoint: Path
    folder: Path
    session: tuple[str, ...]

    @property
    def budget_bytes(self) -> int:
        return self.shape.bytes // BUDGET_PART

    @property
    def options(self) -> tuple[str, ...]:
        return (*self.session, "--memory", str(self.budget_bytes))

    @property
    def oneshot(self) -> tuple[str, ...]:
        return (*self.session, "--policy", "oneshot")

    def walk(self) -> None:
        """Look all entries up in this process, so that the kernel charges them to it and not to the
        mount or its readers."""
        for folder, _, files in os.walk(self.mountpoint):
            for name in files:
                os.stat(f"{folder}/{name}")


@contextmanager
def _setting(bench: Workbench, session: tuple[str, ...] = KERNEL) -> Iterator[_Setting]:
    shape, source = prepared(bench, D4L)
    with bench.scratch() as folder:
        dlcmd = Dlcmd(folder)
        chunk = max(CHUNK_BYTES // bench.divisor, CHUNK_BYTES_MIN)
        dlcmd.seconds("put", "--chunk-size", str(chunk), str(source), shape.name)
        setting = _Setting(bench, shape, dlcmd, folder / "mount", folder, session)
        with dlcmd.mounted(shape.name, setting.mountpoint):
            pass  # afterwards this user has a copy of the snapshot
        yield setting


def chunk_wise(bench: Workbench) -> list[Row]:
    """D4L in chunk-wise order with a budget of a tenth, against everything resident."""
    rows: list[Row] = []
    with _setting(bench) as setting:
        epochs = [_epoch(setting, number) for number in range(2)]
        for readers in READERS:
            rounds = alternate(bench.rounds, _chunk_wise_sides(setting, epochs, readers))
            rows += _chunk_wise_rows(setting, rounds, readers)
    return rows


def _chunk_wise_sides(
    setting: _Setting, epochs: list["_Epoch"], readers: int, *, charge_readers: bool = False
) -> dict[str, Side]:
    """With `charge_readers`, the peak memory has the pages of the kernel that readers brought."""
    bench, shape, dlcmd = setting.bench, setting.shape, setting.dlcmd

    def window() -> dict[str, float]:
        bench.warm_page_cache(dlcmd.store)
        with (
            control_group() as group,
            dlcmd.mounted(shape.name, setting.mountpoint, *setting.options, group=group) as mount,
        ):
            setting.walk()
            peak = _Peak(mount, group)
            charged = group if charge_readers else None
            epochs[0].announce(mount)
            first = read_epoch(bench, epochs[0].order, readers=readers, group=charged)
            before = mount.counts()
            epochs[1].announce(mount)
            second = read_epoch(bench, epochs[1].order, readers=readers, group=charged)
            peak_bytes = peak.bytes()
            again = mount.counts() - before
        return {
            RATE: files_per_s(first),
            READS: before.reads / shape.files,
            RATE_AGAIN: files_per_s(second),
            READS_AGAIN: again.reads / shape.files,
            PEAK: peak_bytes / 1e6,
        }

    def resident() -> dict[str, float]:
        bench.warm_page_cache(dlcmd.store)
        with dlcmd.mounted(shape.name, setting.mountpoint, *setting.oneshot):
            read_epoch(bench, epochs[0].order, walk=setting.mountpoint)
            return {RATE: files_per_s(read_epoch(bench, epochs[0].order, readers=readers))}

    return {OURS: window, RESIDENT: resident}


def _chunk_wise_rows(setting: _Setting, rounds: Rounds, readers: int) -> list[Row]:
    name = f"kernel {setting.shape.name}, chunk-wise, {readers} reader{'s' * (readers > 1)}"
    fully, limit_mb = rounds.of(RESIDENT, RATE), 1.3 * setting.budget_bytes / 1e6 + OWN_MB
    how = (
        f"G = {GROUP_CHUNKS}, a budget of a tenth of the dataset; the plan is a list that was read"
    )
    memory = "its processes and all that the kernel charges to them"
    stays = (
        "says little where the first did not keep the limit: the kernel keeps what READs brought"
    )
    target = at_least(RESIDENT_RATIO) if readers == 1 else None
    again = f"{name}, second epoch"
    return [
        Row(name, RATE, rounds.ours(RATE), RESIDENT, fully, target, how),
        Row(again, RATE, rounds.ours(RATE_AGAIN), RESIDENT, fully, target),
        within(name, READS, rounds.ours(READS), READS_MAX, most=True),
        within(again, READS, rounds.ours(READS_AGAIN), READS_MAX, most=True, note=stays),
        within(name, PEAK, worst(rounds.ours(PEAK)), limit_mb, most=True, note=memory),
    ]


def native(bench: Workbench) -> list[Row]:
    """D4L in chunk-wise order with a budget of a tenth over `bench.session`, against the same
    session when all was pushed before, and against everything resident."""
    with _setting(bench, bench.session_options) as setting:
        shape, dlcmd = setting.shape, setting.dlcmd
        epochs = [_epoch(setting, number) for number in range(2)]

        def pushed() -> dict[str, float]:
            bench.warm_page_cache(dlcmd.store)
            with dlcmd.mounted(shape.name, setting.mountpoint, *setting.oneshot) as mount:
                setting.walk()
                mount.wait_until_loaded()
                return {RATE: files_per_s(read_epoch(bench, epochs[0].order))}

        sides = {
            **_chunk_wise_sides(setting, epochs, readers=1, charge_readers=True),
            PUSHED: pushed,
        }
        rounds = alternate(bench.rounds, sides)
    name = f"{bench.session} {shape.name}, window of a tenth"
    again = f"{name}, second epoch"
    peak_mb = NATIVE_PEAK_RATIO * setting.budget_bytes / 1e6 + OWN_MB
    return [
        Row(each, RATE, rounds.ours(rate), side, rounds.of(side, RATE), at_least(ratio))
        for each, rate in ((name, RATE), (again, RATE_AGAIN))
        for side, ratio in ((PUSHED, PUSHED_RATIO), (RESIDENT, NATIVE_RESIDENT_RATIO))
    ] + [
        Row(name, READS, rounds.ours(READS)),
        Row(again, READS, rounds.ours(READS_AGAIN)),
        within(
            name,
            PEAK,
            worst(rounds.ours(PEAK)),
            peak_mb,
            most=True,
            note="its processes, the reader, and all pages of the kernel; 1.25 times the budget",
        ),
    ]


def unplanned(bench: Workbench) -> list[Row]:
    """D4L in true random order with a budget of a tenth, with and without loading ahead."""
    with _setting(bench) as setting:
        shape = setting.shape
        files = shape.files // UNPLANNED_PART
        order = random_order(shape, setting.mountpoint, 0, setting.folder, files=files)

        def run(*, pushing: bool) -> dict[str, float]:
            bench.warm_page_cache(setting.dlcmd.store)
            with setting.dlcmd.mounted(shape.name, setting.mountpoint, *setting.options) as mount:
                if not pushing:
                    mount.stop_pushing()
                setting.walk()
                report = read_epoch(bench, order)
                reads = mount.counts().reads
            return {RATE: files_per_s(report), READS: reads / files}

        sides: dict[str, Side] = {
            OURS: lambda: run(pushing=True),
            NOT_PUSHING: lambda: run(pushing=False),
        }
        rounds = alternate(bench.rounds, sides)
    name, target = f"kernel {shape.name}, random, no plan", at_least(UNPLANNED_RATIO)
    other, note = rounds.of(NOT_PUSHING, RATE), "a quarter of an epoch, a budget of a tenth of it"
    reads = rounds.of(NOT_PUSHING, READS)
    return [
        Row(name, RATE, rounds.ours(RATE), NOT_PUSHING, other, target, note),
        Row(name, READS, rounds.ours(READS), NOT_PUSHING, reads),
    ]


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch: its number, the mount's list of it, and its order for the reader."""

    number: int
    text: bytes
    order: Order

    def announce(self, mount: Mount) -> None:
        """Make the plan by reading its list, and compare the list: it takes milliseconds."""
        name = f"seed={SEED},epoch={self.number},group={GROUP_CHUNKS}"
        text = (mount.path / ".diesel" / "shuffle" / name).read_bytes()
        assert text == self.text, "the mount has another order"


def _epoch(setting: _Setting, number: int) -> _Epoch:
    """An epoch in the order that `dlcmd shuffle` prints."""
    numbers = ["--seed", str(SEED), "--epoch", str(number), "--group-size", str(GROUP_CHUNKS)]
    text = setting.dlcmd.output("shuffle", setting.shape.name, *numbers)
    paths, file = os.fsdecode(text).splitlines(), setting.folder / f"epoch-{number}"
    return _Epoch(number, text, whole_order(setting.shape, setting.mountpoint, paths, file))


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
