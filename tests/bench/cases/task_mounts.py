"""Benchmarks of mounts on the nodes of a task, which read an epoch in known random order with less
memory than the dataset has: small files, and files of 110 KiB."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans import control
from tests.peers.nodes import has_namespaces
from tests.peers.running import DATASET
from tests.waiting import until

from ..client_process import RATE
from ..inputs import D4L, D110, Shape
from ..mounts import Mount
from ..peers.clusters import IPERF3, MEMCACHED, tcp_bytes_per_s
from ..reading import random_order, write_list
from ..report import Row, against, at_least, no_more_than
from ..running import BATCH, NO_MEMCACHED, Running, filled_if_installed, running
from ..samples import OURS, PeerMissing, Side, alternate
from ..workbench import Workbench

MEMORY_MIN = 64 << 20
DISK, NO_TASK = "all in the own node's disk cache", "without a task, all in its disk cache"
ONE_BY_ONE = f"{MEMCACHED}, one by one"
BATCHES = f"{MEMCACHED}, {BATCH} in one request"
READS, RATE_BYTES = "READs a file", "MB/s"
LINK_KBIT_S = 1_000_000
IPERF_S = 3.0
END_S = 60.0
EGRESS_PART = 0.01  # of an epoch's bytes: a master that answers late has a few read from the store
EGRESS_BYTES_MIN = 4 << 20  # a few answers of nodes are late on a busy machine


@dataclass(slots=True)
class Mounted:
    """A mount on the first node of a task; its files are read epoch by epoch. Nearly all must come
    from a cache."""

    bench: Workbench
    task: Running
    mount: Mount
    folder: Path
    epoch: int = 0

    def read(self) -> dict[str, float]:
        """Read the next epoch in a random order that is announced to the mount before."""
        self.epoch += 1
        order = random_order(self.task.shape, self.mount.path, self.epoch, self.folder)
        before = self.mount.counts().reads
        announce(self.mount.path, self.task.shape, self.epoch)
        self.task.task.forget()
        report = self.bench.read_epoch(order)
        egress = self.task.task.egress_bytes()
        allowed = max(EGRESS_PART * report.bytes, EGRESS_BYTES_MIN)
        assert egress <= allowed, f"{egress} bytes came from the store"
        return {
            RATE: report.files_per_s,
            RATE_BYTES: report.bytes / report.seconds / 1e6,
            READS: (self.mount.counts().reads - before) / report.files,
        }


def memory_of(shape: Shape) -> int:
    """Memory of a node that must hold half of the dataset."""
    return max(shape.bytes // 2, MEMORY_MIN)


@contextmanager
def mounted(task: Running, *, cache_dir: Path | None = None) -> Iterator[list[Path]]:
    """Mount the dataset on all nodes, with memory for half of it, and wait until their masters have
    all chunks; with `cache_dir`, on disk. Yields the mount points."""
    memory = str(memory_of(task.shape))
    task.task.options = {"policy": "oneshot", "memory": memory, "session": "kernel"}
    if cache_dir is not None:
        size = str(4 * task.task.stored_bytes)
        task.task.options |= {"cache-dir": str(cache_dir), "cache-size": size}
    ranks = range(len(task.nodes))
    with _no_delay(task), ExitStack() as stack:

        def mount_all() -> list[Path]:
            mountpoints = []
            for rank in ranks:
                mountpoints.append(task.task.mount(rank))
                stack.callback(task.task.umount, rank)
            task.wait_whole(ranks)
            return mountpoints

        mountpoints = mount_all()
        if cache_dir is not None:  # a master that ends writes its memory to the disk
            stack.pop_all().close()
            until(lambda: not any(task.task.masters(rank) for rank in ranks), "the end", END_S)
            mountpoints = mount_all()
        yield mountpoints


@contextmanager
def mounted_alone(task: Running, *, cache_dir: Path) -> Iterator[Path]:
    """Mount the dataset on the first node without a task, with a disk cache that has all of it.
    Yields the mount point."""
    node, mountpoint = task.nodes[0], task.nodes[0].folder / "alone"
    sizes = (
        "--memory",
        str(memory_of(task.shape)),
        "--cache-size",
        str(4 * task.task.stored_bytes),
    )
    options = ("--session", "kernel", *sizes, "--cache-dir", cache_dir)
    with _no_delay(task), ExitStack() as stack:
        node.dlcmd("mount", *options, DATASET, mountpoint)
        stack.callback(node.dlcmd, "umount", mountpoint)
        for path in task.shape.paths():  # each chunk is kept on the disk when it is read
            (mountpoint / path).read_bytes()
        yield mountpoint


@contextmanager
def _no_delay(task: Running) -> Iterator[None]:
    """Meanwhile the store answers at once: it is not measured here."""
    before, task.task.s3.delay_s = task.task.s3.delay_s, 0.0
    try:
        yield
    finally:
        task.task.s3.delay_s = before


def small_files(bench: Workbench) -> list[Row]:
    """D4L in a known random order through a mount that has half of it in its node's memory: against
    such mounts with all in their disk cache, in a task of one node and without a task, and against
    Memcached, which is asked for the same files in such an order: one by one, as a mount is read
    (figure 11a of the paper), and many in one request."""
    with ExitStack() as stack:
        task = stack.enter_context(running(bench, D4L))
        alone = stack.enter_context(running(bench, D4L, 1))
        shape = task.shape
        folder, cache_dir, own_cache_dir = (stack.enter_context(bench.scratch()) for _ in range(3))

        def epochs(each: Running, mountpoint: Path) -> Mounted:
            mount = Mount(mountpoint)
            return Mounted(bench, each, mount, stack.enter_context(bench.scratch()))

        ours = epochs(task, stack.enter_context(mounted(task))[0])
        local = epochs(alone, stack.enter_context(mounted(alone, cache_dir=cache_dir))[0])
        mount = mounted_alone(alone, cache_dir=own_cache_dir)
        no_task = epochs(alone, stack.enter_context(mount))
        cluster = filled_if_installed(stack, task)
        paths, seeds = shape.paths(), count()

        def from_disk(mounted: Mounted) -> dict[str, float]:
            bench.warm_page_cache(cache_dir, own_cache_dir)
            return mounted.read()

        def theirs(size: int) -> dict[str, float]:
            if cluster is None:
                raise PeerMissing(NO_MEMCACHED)
            draw = np.random.default_rng(next(seeds)).permutation(shape.files)
            listed = write_list((paths[at] for at in draw.tolist()), folder / "theirs")
            client = cluster.client(task.nodes[0])
            return {RATE: client.run(do="epoch", paths=str(listed), size=size)[RATE]}

        sides: dict[str, Side] = {
            OURS: ours.read,
            DISK: lambda: from_disk(local),
            NO_TASK: lambda: from_disk(no_task),
            ONE_BY_ONE: partial(theirs, 1),
            BATCHES: partial(theirs, BATCH),
        }
        rounds = alternate(bench.rounds, sides)
    name = f"task {shape.name}, an epoch in known random order, through a mount"
    megabytes = memory_of(shape) >> 20
    memory = f"mount and master have {megabytes} MB, the dataset {shape.bytes >> 20} MB"
    disk = f"{memory}; the files of the disk cache are in the kernel's page cache"
    return [
        *against(rounds, name, RATE, {DISK: at_least(0.7)}, f"{disk}; a task of one node"),
        *against(rounds, name, RATE, {NO_TASK: at_least(0.7)}, disk),
        *against(rounds, name, RATE, {ONE_BY_ONE: at_least(1.4), BATCHES: at_least(0.4)}, memory),
        no_more_than(name, READS, rounds.ours(READS), 0.02),
    ]


def large_files(bench: Workbench) -> list[Row]:
    """D110 in a known random order through a mount that has half of it in its node's memory,
    against the bandwidth of TCP between two nodes: with links as fast as the machine, and with
    limited ones."""
    rows: list[Row] = []
    with running(bench, D110) as task, mounted(task) as mountpoints, bench.scratch() as folder:
        mount = Mounted(bench, task, Mount(mountpoints[0]), folder)

        def theirs() -> dict[str, float]:
            seconds = IPERF_S / bench.divisor
            return {RATE_BYTES: tcp_bytes_per_s(task.nodes[1], task.nodes[0], seconds) / 1e6}

        for limit in (0, LINK_KBIT_S) if has_namespaces() else (0,):
            for node in task.nodes if limit else ():
                node.limit_bandwidth(limit)
            rounds = alternate(bench.rounds, {OURS: mount.read, IPERF3: theirs})
            name = f"task {task.shape.name}, an epoch in known random order, through a mount"
            link = f", links of {limit / 1e6:.0f} Gbit/s" if limit else ""
            note, target = "a quarter of it comes from the own node", {IPERF3: at_least(0.8)}
            rows += against(rounds, f"{name}{link}", RATE_BYTES, target, note)
    return rows


def announce(mountpoint: Path, shape: Shape, epoch: int) -> None:
    """Announce the order that `random_order` draws for this seed to the mount."""
    drawn = np.random.default_rng(epoch).permutation(shape.files)
    entries = entries_of(mountpoint, shape.paths())[drawn]
    with control.Control.connect(mountpoint) as link:
        link.announce("bench", [control.explicit(epoch=epoch, entries=entries)])


def entries_of(
    mountpoint: Path, paths: Sequence[str]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    view = Snapshot((mountpoint / ".diesel" / "snapshot").read_bytes())
    return view.lookup_many([path.encode() for path in paths])
