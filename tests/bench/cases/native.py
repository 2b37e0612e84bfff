"""Benchmarks of the native session, whose tree is in the kernel: what ordinary Python code gets of
it.

They measure mounts of `bench.session`; another session gives the figures to compare with.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from ..dlcmd import Dlcmd
from ..epochs import Order, prepared, random_order, read_epoch
from ..inputs import D4, D110, F4G, Shape
from ..loops import PIECES, STOCK, SYSTEM_CALLS, run_loop, waiting_loop
from ..peers import kernel_images, squashfuse, tmpfs
from ..peers.pythons import python
from ..report import Row, at_least, within
from ..samples import OURS, NotMeasured, PeerMissing, Rounds, Side, alternate
from ..workbench import Workbench
from .kernel import KERNEL, RATE, REQUESTS, worst

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


def _loops(version: str, python: str) -> list[_Loop]:
    stock = [_Loop(version, python, STOCK, processes) for processes in PROCESSES]
    return [*stock, _Loop(version, python, SYSTEM_CALLS, 1)]


def second_epoch(bench: Workbench) -> list[Row]:
    """D4 resident, read by loops of this Python and of another one, against tmpfs."""
    session = bench.session_options
    shape, source = prepared(bench, D4)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    loops, missing = _loops(own, sys.executable), []
    if own != OTHER_VERSION:
        try:
            loops += _loops(OTHER_VERSION, python(OTHER_VERSION))
        except PeerMissing as error:
            missing = [(each, NotMeasured(str(error))) for each in _loops(OTHER_VERSION, "")]
    with bench.scratch() as folder, ExitStack() as stack:
        dlcmd, mountpoint = Dlcmd(folder), folder / "mount"
        dlcmd.seconds("put", str(source), shape.name)

        @cache
        def orders(root: Path) -> list[Order]:
            return [random_order(shape, root, seed, folder) for seed in range(len(loops) + 1)]

        @cache
        def in_memory() -> Path:
            return stack.enter_context(tmpfs.tree(shape))

        def rates(root: Path) -> dict[str, float]:
            runs = zip(loops, orders(root)[1:], strict=True)
            return {
                each.name: run_loop(
                    each.python, order, each.loop, processes=each.processes
                ).files_per_s
                for each, order in runs
            }

        def ours() -> dict[str, float]:
            first = orders(mountpoint)[0]
            bench.warm_page_cache(dlcmd.store)
            options = (*session, "--policy", "oneshot")
            with dlcmd.mounted(shape.name, mountpoint, *options) as mount:
                read_epoch(bench, first, walk=mountpoint)
                # Reading the statistics makes requests, too; the first time makes other ones.
                _, once, twice = mount.counts(), mount.counts(), mount.counts()
                read_epoch(bench, first)  # the kernel may have reclaimed pages that were idle
                before = mount.counts()
                own_s, start_s = mount.processor_s(before.supervisor), time.monotonic()
                found = rates(mountpoint)
                own_s = mount.processor_s(before.supervisor) - own_s
                seconds = time.monotonic() - start_s
                requests = (mount.counts() - before).all - (twice - once).all
                read_epoch(bench, first)  # the loops have not looked at contents
            return {**found, REQUESTS: max(requests, 0), PROCESSOR: 100 * own_s / seconds}

        def theirs() -> dict[str, float]:
            tree = in_memory()
            read_epoch(bench, orders(tree)[0], walk=tree)
            return rates(tree)

        rounds = alternate(bench.rounds, {OURS: ours, tmpfs.NAME: theirs})
    name, target = f"{bench.session} {shape.name}, second epoch", at_least(TMPFS_RATIO)
    return [
        *(
            Row(
                f"{name}, {each.name}", RATE, rounds.ours(each.name),
                tmpfs.NAME, rounds.of(tmpfs.NAME, each.name), target,
            )
            for each in loops
        ),
        *(Row(f"{name}, {e.name}", RATE, why, tmpfs.NAME, why, target) for e, why in missing),
        within(
            name, REQUESTS, worst(rounds.ours(REQUESTS)), 0, most=True,
            note="of any kind, in all these epochs together, in the worst round",
        ),
        within(
            name, PROCESSOR, rounds.ours(PROCESSOR), PROCESSOR_PERCENT, most=True,
            note="the processor time of the mount's processes during these epochs",
        ),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _FirstEpochs:
    """Sides that read all files once from a fresh mount and walk its folders before.

    A rate counts from when the mount is ready. `python` is the interpreter of the stock loop; where
    it is empty, the C reader reads. `cold` sides begin with no content in the page cache.
    """

    bench: Workbench
    shape: Shape
    source: Path
    folder: Path
    dlcmd: Dlcmd
    order: Order

    @property
    def mountpoint(self) -> Path:
        return self.folder / "mount"

    def ours(
        self, session: tuple[str, ...], policy: str, python: str = "", *, cold: bool = False
    ) -> dict[str, float]:
        """A mount of ours."""
        self._prepare(self.dlcmd.store, cold=cold)
        with (
            self._reader(python) as read,
            self.dlcmd.mounted(
                self.shape.name, self.mountpoint, *session, "--policy", policy
            ) as mount,
        ):
            return self._rate(read, mount.ready_s)

    def squashfuse(self) -> dict[str, float]:
        """A SquashFS image, mounted by squashfuse_ll and read by the C reader."""
        image = self._image(squashfuse.NAME)
        self._prepare(image.parent, cold=False)
        with (
            self._reader("") as read,
            squashfuse.mounted(image, self.mountpoint) as (_, ready_s),
        ):
            return self._rate(read, ready_s)

    def packed(self, name: str, python: str, *, cold: bool) -> dict[str, float]:
        """An image in the kernel's own file system of this name."""
        image = self._image(name)
        self._prepare(image.parent, cold=cold)
        with (
            self._reader(python) as read,
            kernel_images.mounted(name, image, self.mountpoint) as ready_s,
        ):
            return self._rate(read, ready_s)

    def _image(self, name: str) -> Path:
        """The image for a peer, which is made at the first call."""
        image = self.folder / name.rpartition(" ")[2] / "image"
        if not image.exists():
            image.parent.mkdir()
            if name == squashfuse.NAME:
                squashfuse.pack(self.source, image)
            else:
                kernel_images.pack(name, self.source, image)
        return image

    def _prepare(self, content: Path, *, cold: bool) -> None:
        if cold:
            self.bench.drop_page_cache(self.folder)  # snapshots and images, too
        else:
            self.bench.warm_page_cache(content)

    @contextmanager
    def _reader(self, python: str) -> Iterator[Callable[[], float]]:
        """A function that walks and reads; it returns when it was ready (`time.monotonic()`)."""
        if not python:
            yield lambda: read_epoch(self.bench, self.order, walk=self.mountpoint).end_s
            return
        with waiting_loop(python, self.order, STOCK, walk=self.mountpoint) as run:
            yield lambda: run().end_s

    def _rate(self, read: Callable[[], float], ready_s: float) -> dict[str, float]:
        end_s = read()
        read_epoch(self.bench, self.order)  # the stock loop has not looked at contents
        return {RATE: self.shape.files / (end_s - ready_s)}


@contextmanager
def _first_epochs(bench: Workbench, wanted: Shape) -> Iterator[_FirstEpochs]:
    shape, source = prepared(bench, wanted)
    with bench.scratch() as folder:
        dlcmd, mountpoint = Dlcmd(folder), folder / "mount"
        dlcmd.seconds("put", str(source), shape.name)
        with dlcmd.mounted(shape.name, mountpoint, *bench.session_options):
            pass  # afterwards this user has a copy of the snapshot, and the image
        order = random_order(shape, mountpoint, 0, folder)
        yield _FirstEpochs(bench, shape, source, folder, dlcmd, order)


def first_epoch(bench: Workbench) -> list[Row]:
    """D4 on a fresh mount, against squashfuse, our kernel session, and the kernel's packed
    images."""
    session, stock = bench.session_options, sys.executable
    packed = (kernel_images.SQUASHFS, kernel_images.EROFS)
    with _first_epochs(bench, D4) as epochs:
        sides: dict[str, Side] = {squashfuse.NAME: epochs.squashfuse}
        for policy in POLICIES:
            for side, options in ((OURS, session), (KERNEL_SESSION, KERNEL)):
                sides[f"{side}, {policy}, C"] = partial(epochs.ours, options, policy)
                sides[f"{side}, {policy}"] = partial(epochs.ours, options, policy, stock)
            sides[f"{OURS}, {policy}, cold"] = partial(
                epochs.ours, session, policy, stock, cold=True
            )
        for peer in packed:
            sides[peer] = partial(epochs.packed, peer, stock, cold=False)
            sides[f"{peer}, cold"] = partial(epochs.packed, peer, stock, cold=True)
        rounds = alternate(bench.rounds, sides)
    return [row for policy in POLICIES for row in _first_epoch_rows(bench, rounds, policy, packed)]


def _first_epoch_rows(
    bench: Workbench, rounds: Rounds, policy: str, packed: tuple[str, ...]
) -> list[Row]:
    name = f"{bench.session} {bench.shape(D4).name}, first epoch, {policy}"
    ours, kernel = f"{OURS}, {policy}", f"{KERNEL_SESSION}, {policy}"

    def row(what: str, own: str, against: str, other: str, ratio: float | None) -> Row:
        target = None if ratio is None else at_least(ratio)
        return Row(
            f"{name}, {what}", RATE, rounds.of(own, RATE), against, rounds.of(other, RATE), target
        )

    return [
        row("C reader", f"{ours}, C", squashfuse.NAME, squashfuse.NAME, None),
        row("C reader", f"{ours}, C", KERNEL_SESSION, f"{kernel}, C", KERNEL_C_RATIO),
        row(STOCK, ours, KERNEL_SESSION, kernel, KERNEL_STOCK_RATIO),
        *(row(f"{STOCK}, warm", ours, peer, peer, WARM_RATIO) for peer in packed),
        *(
            row(f"{STOCK}, cold", f"{ours}, cold", peer, f"{peer}, cold", COLD_RATIO)
            for peer in packed
        ),
    ]


def larger_files(bench: Workbench) -> list[Row]:
    """D110, all loaded from the start, against squashfuse."""
    with _first_epochs(bench, D110) as epochs:
        sides: dict[str, Side] = {
            OURS: partial(epochs.ours, bench.session_options, "oneshot"),
            squashfuse.NAME: epochs.squashfuse,
        }
        rounds = alternate(bench.rounds, sides)
    name, other = f"{bench.session} {D110.name}, first epoch, oneshot", squashfuse.NAME
    rate, note = rounds.of(other, RATE), "C reader; with a walk of all folders"
    return [Row(name, RATE, rounds.ours(RATE), other, rate, at_least(LARGE_RATIO), note)]


def one_large_file(bench: Workbench) -> list[Row]:
    """A file of 4 GiB from begin to end; neither its chunks, in the disk cache, nor the file that
    it is compared with are in the page cache."""
    session = bench.session_options
    shape = replace(F4G, file_bytes=F4G.file_bytes // bench.divisor)
    source = bench.input(shape)
    with bench.scratch() as folder:
        dlcmd, mountpoint, chunks = Dlcmd(folder), folder / "mount", folder / "chunks"
        dlcmd.seconds("put", str(source), shape.name)
        options = (*session, "--cache-dir", str(chunks), "--cache-size", str(2 * shape.bytes))
        mounted, on_disk = (random_order(shape, root, 0, folder) for root in (mountpoint, source))
        with dlcmd.mounted(shape.name, mountpoint, *options):
            read_epoch(bench, mounted)  # checks the contents
        _end_users_of(chunks)  # the node's cache writes its chunks to the disk at its end
        cached = sum(path.stat().st_size for path in chunks.rglob("*") if path.is_file())
        assert cached >= shape.bytes, f"the disk cache has {cached} bytes"

        def rate(order: Order) -> dict[str, float]:
            report = run_loop(sys.executable, order, PIECES)
            return {GIGABYTES: report.bytes / report.seconds / 1e9}

        def ours() -> dict[str, float]:
            bench.drop_page_cache(folder)
            try:
                with dlcmd.mounted(shape.name, mountpoint, *options):
                    return rate(mounted)
            finally:
                _end_users_of(chunks)  # the next round shall find them on the disk only

        def theirs() -> dict[str, float]:
            bench.drop_page_cache(source)
            return rate(on_disk)

        rounds = alternate(bench.rounds, {OURS: ours, DISK: theirs})
    rates = rounds.ours(GIGABYTES), DISK, rounds.of(DISK, GIGABYTES)
    name, note = f"{bench.session} one file of 4 GiB", f"{PIECES}; chunks in the disk cache; cold"
    return [Row(name, GIGABYTES, *rates, at_least(DISK_RATIO), note)]


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
