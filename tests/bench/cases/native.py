"""Benchmarks of the native session, whose tree is in the kernel: what ordinary Python code gets of
it.

They measure mounts of `bench.session`; another session gives the figures to compare with.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..inputs import D4, D110, F4G
from ..peers import python
from ..peers.trees import EROFS, SQUASHFS, SQUASHFUSE, TMPFS
from ..reading import PIECES, STOCK, SYSTEM_CALLS, Order, random_order, run_loop
from ..report import Row, against, at_least, no_more_than, worst
from ..samples import OURS, NotMeasured, PeerMissing, Rounds, Side, alternate
from ..stored import stored
from ..workbench import Workbench
from .kernel import KERNEL, RATE, REQUESTS, read_first_epoch

OTHER_VERSION = "3.13"
PROCESSES = (1, 4, 16)
TMPFS_RATIO = 0.9
PROCESSOR_PERCENT = 1
PROCESSOR = "% of a core"

POLICIES = ("on-demand", "oneshot")
KERNEL_SESSION = "our kernel session"
KERNEL_C_RATIO, KERNEL_STOCK_RATIO = 1, 2
COLD_RATIO, WARM_RATIO = 0.7, 0.95
LARGE_RATIO = 3

DISK = "the file on the disk"
DISK_RATIO = 0.8
GIGABYTES = "GB/s"
END_S = 40.0  # a node's cache writes for at most 20 s


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop of Python code: in which Python, which loop, in how many processes."""

    version: str
    python: str
    loop: str
    processes: int

    @property
    def name(self) -> str:
        many = f"{self.processes} process{'es' * (self.processes > 1)}"
        return f"{self.loop}, Python {self.version}, {many}"

    def rate(self, order: Order) -> float:
        return run_loop(self.python, order, self.loop, processes=self.processes).files_per_s


def _loops(version: str, python: str) -> list[_Loop]:
    stock = [_Loop(version, python, STOCK, processes) for processes in PROCESSES]
    return [*stock, _Loop(version, python, SYSTEM_CALLS, 1)]


def second_epoch(bench: Workbench) -> list[Row]:
    """D4 resident, read by loops of this Python and of another one, against tmpfs."""
    options = (*bench.session_options, "--policy", "oneshot")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    loops, missing = _loops(own, sys.executable), []
    if own != OTHER_VERSION:
        try:
            loops += _loops(OTHER_VERSION, python(OTHER_VERSION))
        except PeerMissing as error:
            missing = [(each, NotMeasured(str(error))) for each in _loops(OTHER_VERSION, "")]
    with stored(bench, bench.shape(D4)) as data:

        def rates(orders: list[Order]) -> dict[str, float]:
            return {each.name: each.rate(order) for each, order in zip(loops, orders, strict=True)}

        def ours() -> dict[str, float]:
            first, *others = data.orders(OURS, len(loops) + 1)
            with data.opened(OURS, *options) as tree:
                mount = tree.mount
                assert mount is not None
                bench.read_epoch(first, walk=tree.root)
                # Reading the statistics makes requests, too; the first time makes other ones.
                _, once, twice = mount.counts(), mount.counts(), mount.counts()
                bench.read_epoch(first)  # the kernel may have reclaimed pages that were idle
                before = mount.counts()
                own_s, start_s = mount.processor_s(before.supervisor), time.monotonic()
                found = rates(others)
                own_s = mount.processor_s(before.supervisor) - own_s
                seconds = time.monotonic() - start_s
                requests = mount.counts().all - before.all - (twice.all - once.all)
                bench.read_epoch(first)  # the loops have not looked at contents
            return {**found, REQUESTS: max(requests, 0), PROCESSOR: 100 * own_s / seconds}

        def theirs() -> dict[str, float]:
            first, *others = data.orders(TMPFS, len(loops) + 1)
            bench.read_epoch(first, walk=data.root(TMPFS))
            return rates(others)

        rounds = alternate(bench.rounds, {OURS: ours, TMPFS: theirs})
    name, target = f"{bench.session} {data.shape.name}, second epoch", at_least(TMPFS_RATIO)
    rows: list[Row] = []
    for each in loops:
        rows += against(rounds, f"{name}, {each.name}", RATE, {TMPFS: target}, of=each.name)
    asked = "of any kind, in all these epochs together, in the worst round"
    used = "the processor time of the mount's processes during these epochs"
    return [
        *rows,
        *(Row(f"{name}, {each.name}", RATE, why, TMPFS, why, target) for each, why in missing),
        no_more_than(name, REQUESTS, worst(rounds.ours(REQUESTS)), 0, asked),
        no_more_than(name, PROCESSOR, rounds.ours(PROCESSOR), PROCESSOR_PERCENT, used),
    ]


def first_epoch(bench: Workbench) -> list[Row]:
    """D4 on a fresh mount, against squashfuse, our kernel session, and the kernel's packed
    images."""
    session, stock = bench.session_options, sys.executable
    with stored(bench, bench.shape(D4)) as data:
        data.mount_once(*session)
        read = partial(read_first_epoch, data)
        sides: dict[str, Side] = {SQUASHFUSE: partial(read, SQUASHFUSE)}
        for policy in POLICIES:
            for side, options in ((OURS, session), (KERNEL_SESSION, KERNEL)):
                words = (OURS, *options, "--policy", policy)
                sides[f"{side}, {policy}, C"] = partial(read, *words)
                sides[f"{side}, {policy}"] = partial(read, *words, python=stock)
            words = (OURS, *session, "--policy", policy)
            sides[f"{OURS}, {policy}, cold"] = partial(read, *words, python=stock, cold=True)
        for peer in (SQUASHFS, EROFS):
            sides[peer] = partial(read, peer, python=stock)
            sides[f"{peer}, cold"] = partial(read, peer, python=stock, cold=True)
        rounds = alternate(bench.rounds, sides)
    return [row for policy in POLICIES for row in _first_epoch_rows(bench, rounds, policy)]


def _first_epoch_rows(bench: Workbench, rounds: Rounds, policy: str) -> list[Row]:
    ours, kernel = f"{OURS}, {policy}", f"{KERNEL_SESSION}, {policy}"
    compared: list[tuple[str, str, str, str, float | None]] = [
        ("C reader", f"{ours}, C", SQUASHFUSE, SQUASHFUSE, None),
        ("C reader", f"{ours}, C", KERNEL_SESSION, f"{kernel}, C", KERNEL_C_RATIO),
        (STOCK, ours, KERNEL_SESSION, kernel, KERNEL_STOCK_RATIO),
        *((f"{STOCK}, warm", ours, peer, peer, WARM_RATIO) for peer in (SQUASHFS, EROFS)),
        *(
            (f"{STOCK}, cold", f"{ours}, cold", peer, f"{peer}, cold", COLD_RATIO)
            for peer in (SQUASHFS, EROFS)
        ),
    ]
    name = f"{bench.session} {D4.name}, first epoch, {policy}"
    return [
        Row(
            f"{name}, {what}", RATE, rounds.of(own, RATE), peer, rounds.of(other, RATE),
            None if ratio is None else at_least(ratio),
        )
        for what, own, peer, other, ratio in compared
    ]  # fmt: skip


def larger_files(bench: Workbench) -> list[Row]:
    """D110, all loaded from the start, against squashfuse."""
    session = bench.session_options
    with stored(bench, bench.shape(D110)) as data:
        data.mount_once(*session)
        sides: dict[str, Side] = {
            OURS: partial(read_first_epoch, data, OURS, *session, "--policy", "oneshot"),
            SQUASHFUSE: partial(read_first_epoch, data, SQUASHFUSE),
        }
        rounds = alternate(bench.rounds, sides)
    name, note = (
        f"{bench.session} {D110.name}, first epoch, oneshot",
        "C reader; with a walk of all",
    )
    return against(rounds, name, RATE, {SQUASHFUSE: at_least(LARGE_RATIO)}, f"{note} folders")


def one_large_file(bench: Workbench) -> list[Row]:
    """A file of 4 GiB from begin to end; neither its chunks, in the disk cache, nor the file that
    it is compared with are in the page cache."""
    shape = replace(F4G, file_bytes=F4G.file_bytes // bench.divisor)
    with stored(bench, shape) as data:
        chunks = data.folder / "chunks"
        cache = ("--cache-dir", str(chunks), "--cache-size", str(2 * shape.bytes))
        options = (*bench.session_options, *cache)
        roots = data.mountpoint, data.source
        on_mount, on_disk = (random_order(shape, root, 0, data.folder) for root in roots)
        with data.mounted(OURS, *options):
            bench.read_epoch(on_mount)  # checks the contents
        _end_users_of(chunks)  # the node's cache writes its chunks to the disk at its end
        cached = sum(path.stat().st_size for path in chunks.rglob("*") if path.is_file())
        assert cached >= shape.bytes, f"the disk cache has {cached} bytes"

        def rate(order: Order) -> dict[str, float]:
            report = run_loop(sys.executable, order, PIECES)
            return {GIGABYTES: report.bytes / report.seconds / 1e9}

        def ours() -> dict[str, float]:
            data.prepare(OURS, cold=True)
            try:
                with data.mounted(OURS, *options):
                    return rate(on_mount)
            finally:
                _end_users_of(chunks)  # the next round shall find them on the disk only

        def theirs() -> dict[str, float]:
            bench.drop_page_cache(data.source)
            return rate(on_disk)

        rounds = alternate(bench.rounds, {OURS: ours, DISK: theirs})
    name, note = f"{bench.session} one file of 4 GiB", f"{PIECES}; chunks in the disk cache; cold"
    return against(rounds, name, GIGABYTES, {DISK: at_least(DISK_RATIO)}, note)


def _end_users_of(folder: Path) -> None:
    """End the processes that have a file below this folder open, and wait until they are gone."""
    end_s = time.monotonic() + END_S
    ended: set[int] = set()
    while users := _users_of(folder):
        for pid in users - ended:
            os.kill(pid, signal.SIGTERM)
        ended |= users
        assert time.monotonic() < end_s, f"the processes {users} did not end"
        time.sleep(0.05)


def _users_of(folder: Path) -> set[int]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if Path(os.readlink(link)).is_relative_to(folder):
                found.add(int(link.parts[2]))
    return found
