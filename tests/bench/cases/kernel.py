"""Benchmarks of the kernel session: reading files that are in the page cache, and files that are
not."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from ..dlcmd import Dlcmd
from ..epochs import Order, files_per_s, prepared, random_order, read_epoch
from ..inputs import D4, D4L, D110, Shape
from ..peers import squashfuse, tmpfs
from ..report import Row, at_least, within
from ..samples import OURS, Measured, Rounds, Samples, Side, alternate
from ..workbench import Workbench

KERNEL = ("--session", "kernel")
ONESHOT = (*KERNEL, "--policy", "oneshot")
PYFUSE3 = ("--session", "pyfuse3")

EXT4 = "the disk's file system"
ON_DEMAND = "ours, on demand"
OVER_PYFUSE3 = "our pyfuse3 session"

TMPFS_RATIO = 0.65
EXT4_RATIO = 0.8
FIRST_RATIO: Mapping[Shape, float] = {D4: 4, D4L: 4, D110: 2}
ON_DEMAND_RATIO = 2
ON_DEMAND_READS = 0.2
PYFUSE3_RATIO = {1: 1.5, 2: 1.3}

RATE, READS, MOUNTING, REQUESTS = "files/s", "READs a file", "mount s", "requests"


def second_epoch(bench: Workbench) -> list[Row]:
    """D4 in its second epoch, in another order, by one reader and by two."""
    shape, source = prepared(bench, D4)
    rows: list[Row] = []
    with bench.scratch() as folder, ExitStack() as stack:
        dlcmd, mountpoint = Dlcmd(folder), folder / "mount"
        dlcmd.seconds("put", str(source), shape.name)

        @cache
        def orders(root: Path) -> list[Order]:
            return [random_order(shape, root, seed, folder) for seed in range(2)]

        @cache
        def in_memory() -> Path:
            return stack.enter_context(tmpfs.tree(shape))

        def ours(readers: int) -> dict[str, float]:
            first, second = orders(mountpoint)
            bench.warm_page_cache(dlcmd.store)
            with dlcmd.mounted(shape.name, mountpoint, *ONESHOT) as mount:
                read_epoch(bench, first, walk=mountpoint)
                before = mount.counts()
                report = read_epoch(bench, second, readers=readers)
                requests = (mount.counts() - before).requests
            return {RATE: files_per_s(report), REQUESTS: requests}

        def theirs(tree: Callable[[], Path], readers: int) -> dict[str, float]:
            first, second = orders(root := tree())
            read_epoch(bench, first, walk=root)
            return {RATE: files_per_s(read_epoch(bench, second, readers=readers))}

        for readers in (1, 2):
            sides: dict[str, Side] = {
                OURS: partial(ours, readers),
                tmpfs.NAME: partial(theirs, in_memory, readers),
                EXT4: partial(theirs, lambda: source, readers),
            }
            rounds = alternate(bench.rounds, sides)
            rows += _second_epoch_rows(shape, rounds, readers)
    return rows


def _second_epoch_rows(shape: Shape, rounds: Rounds, readers: int) -> list[Row]:
    name = f"kernel {shape.name}, second epoch, {_readers(readers)}"
    ours, asked = rounds.ours(RATE), "READs, OPENs and GETATTRs in the epoch, in the worst round"
    return [
        Row(name, RATE, ours, peer, rounds.of(peer, RATE), at_least(ratio))
        for peer, ratio in ((tmpfs.NAME, TMPFS_RATIO), (EXT4, EXT4_RATIO))
    ] + [within(name, "requests", worst(rounds.ours(REQUESTS)), 0, most=True, note=asked)]


def first_epoch(bench: Workbench) -> list[Row]:
    """The first epoch on a fresh mount, from when it is ready, with a walk of its folders."""
    return [row for shape in FIRST_RATIO for row in _first_epoch_of(bench, shape)]


def _first_epoch_of(bench: Workbench, wanted: Shape) -> list[Row]:
    shape, source = prepared(bench, wanted)
    with bench.scratch() as folder:
        dlcmd, mountpoint, images = Dlcmd(folder), folder / "mount", folder / "images"
        dlcmd.seconds("put", str(source), shape.name)
        images.mkdir()
        order = random_order(shape, mountpoint, 0, folder)
        with dlcmd.mounted(shape.name, mountpoint):
            pass  # afterwards this user has a copy of the snapshot

        @cache
        def image() -> Path:
            return squashfuse.pack(source, images / "image")

        def ours(policy: str) -> dict[str, float]:
            bench.warm_page_cache(dlcmd.store)
            with dlcmd.mounted(shape.name, mountpoint, *KERNEL, "--policy", policy) as mount:
                report = read_epoch(bench, order, walk=mountpoint)
                reads = mount.counts().reads
            rate = shape.files / (report.end_s - mount.ready_s)
            return {RATE: rate, READS: reads / shape.files, MOUNTING: mount.seconds}

        def theirs() -> dict[str, float]:
            packed = image()
            bench.warm_page_cache(images)
            with squashfuse.mounted(packed, mountpoint) as (mount_s, ready_s):
                report = read_epoch(bench, order, walk=mountpoint)
            return {RATE: shape.files / (report.end_s - ready_s), MOUNTING: mount_s}

        sides: dict[str, Side] = {OURS: lambda: ours("oneshot"), squashfuse.NAME: theirs}
        if wanted is D4:
            sides[ON_DEMAND] = lambda: ours("on-demand")
        rounds = alternate(bench.rounds, sides)
    return _first_epoch_rows(wanted, rounds)


def _first_epoch_rows(shape: Shape, rounds: Rounds) -> list[Row]:
    name, peer = f"kernel {shape.name}, first epoch", squashfuse.NAME
    other, mounting = rounds.of(peer, RATE), rounds.of(peer, MOUNTING)
    since = "from the return of the mount command on, with a walk of all folders; one reader"
    rows = [
        Row(
            f"{name}, oneshot", RATE, rounds.ours(RATE), peer, other,
            at_least(FIRST_RATIO[shape]), since,
        ),
        Row(f"{name}, oneshot", READS, rounds.ours(READS)),
        Row(f"{name}, oneshot, mount command", "s", rounds.ours(MOUNTING), peer, mounting),
    ]  # fmt: skip
    if ON_DEMAND in rounds.runs:
        rate, reads = rounds.of(ON_DEMAND, RATE), rounds.of(ON_DEMAND, READS)
        name = f"{name}, on-demand"
        rows += [
            Row(name, RATE, rate, peer, other, at_least(ON_DEMAND_RATIO), "no plan; as above"),
            within(name, READS, reads, ON_DEMAND_READS, most=True),
        ]
    return rows


def one_read_a_file(bench: Workbench) -> list[Row]:
    """D4 where nothing is loaded into the page cache, so that each file costs a READ, against
    pyfuse3."""
    shape, source = prepared(bench, D4)
    rows: list[Row] = []
    with bench.scratch() as folder:
        dlcmd, mountpoint = Dlcmd(folder), folder / "mount"
        dlcmd.seconds("put", str(source), shape.name)
        order = random_order(shape, mountpoint, 0, folder)

        def run(options: tuple[str, ...], readers: int, *, pushes: bool) -> Side:
            def side() -> dict[str, float]:
                bench.warm_page_cache(dlcmd.store)
                with dlcmd.mounted(shape.name, mountpoint, *options) as mount:
                    if pushes:
                        mount.stop_pushing()
                    report = read_epoch(bench, order, readers=readers, walk=mountpoint)
                    reads = mount.counts().reads
                return {RATE: files_per_s(report), READS: reads / shape.files}

            return side

        for readers, ratio in PYFUSE3_RATIO.items():
            sides = {
                OURS: run(KERNEL, readers, pushes=True),
                OVER_PYFUSE3: run(PYFUSE3, readers, pushes=False),
            }
            rounds = alternate(bench.rounds, sides)
            name = f"kernel {shape.name}, one READ a file, {_readers(readers)}"
            other, note = rounds.of(OVER_PYFUSE3, RATE), "a fresh mount that was walked; no helper"
            ours = rounds.ours(RATE)
            rows += [
                Row(name, RATE, ours, OVER_PYFUSE3, other, at_least(ratio), note),
                Row(name, READS, rounds.ours(READS)),
            ]
    return rows


def worst(measured: Measured) -> Measured:
    """The greatest sample, for a limit that none may exceed."""
    return Samples((max(measured.values),)) if isinstance(measured, Samples) else measured


def _readers(count: int) -> str:
    return "1 reader" if count == 1 else f"{count} readers"
