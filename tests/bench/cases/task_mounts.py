"""Benchmarks of mounts on the nodes of a task, which read an epoch in known random order with less
memory than the dataset has: small files, and files of 110 KiB."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans import control
from tests.peers.nodes import has_namespaces
from tests.peers.running import DATASET
from tests.server.program import until

from ..client_process import RATE
from ..inputs import D4L, D110, Shape
from ..peers.clusters import IPERF3, MEMCACHED, tcp_bytes_per_s
from ..reading import random_order, write_list
from ..report import Row, against, at_least, no_more_than
from ..running import BATCH, NO_MEMCACHED, Running, filled_if_installed, running
from ..samples import OURS, PeerMissing, Side, alternate
from ..workbench import Workbench

MEMORY_MIN = 64 << 20
DISK, DISK_RATIO = "all in the own node's disk cache", 0.7
NO_TASK = "without a task, all in its disk cache"
MOUNT_RATIO = 1.5
BANDWIDTH_RATIO = 0.8
READS, READS_MAX = "READs a file", 0.02
RATE_BYTES = "MB/s"
LINK_KBIT_S = 1_000_000
IPERF_S = 3.0
END_S = 60.0
EGRESS_PART = 0.01  # of an epoch's bytes: a master that answers late has a few read from the store
EGRESS_BYTES_MIN = 4 << 20  # a few answers of nodes are late on a busy machine


@dataclass(slots=True)
class Mounted:
    """A mount on the first node of a task, whose files are read epoch by epoch. Nearly
    all must come from a cache."""

    bench: Workbench
    task: Running
    mountpoint: Path
    folder: Path
    epoch: int = 0

    def read(self) -> dict[str, float]:
        """Read the next epoch in a random order that the mount is told before."""
        self.epoch += 1
        order = random_order(self.task.shape, self.mountpoint, self.epoch, self.folder)
        before = reads_of(self.mountpoint)
        announce(self.mountpoint, self.task.shape, self.epoch)
        self.task.task.forget()
        report = self.bench.read_epoch(order)
        egress = self.task.task.egress_bytes()
        allowed = max(EGRESS_PART * report.bytes, EGRESS_BYTES_MIN)
        assert egress <= allowed, f"{egress} bytes came from the store"
        count = reads_of(self.mountpoint) - before
        return {
            RATE: report.files_per_s,
            RATE_BYTES: report.bytes / report.seconds / 1e6,
            READS: count / report.files,
        }


def memory_of(shape: Shape) -> int:
    """Memory of a node that is to hold half of the dataset."""
    return max(shape.bytes // 2, MEMORY_MIN)


@contextmanager
def mounted(
    bench: Workbench, task: Running, *, memory_bytes: int, cache_dir: Path | None = None
) -> Iterator[list[Path]]:
    """Mount the dataset on all nodes, and wait until their masters have all chunks; with
    `cache_dir`, on disk. Yields the mount points."""
    options = {"policy": "oneshot", "memory": str(memory_bytes), "session": "kernel"}
    if cache_dir is not None:
        options |= {"cache-dir": str(cache_dir), "cache-size": str(4 * task.task.stored_bytes)}
    task.task.options = options
    ranks = range(len(task.nodes))
    with ExitStack() as stack:
        stack.enter_context(_no_delay(task))
        mountpoints = _mount(stack, task, ranks)
        task.wait_whole(ranks)
        if cache_dir is not None:  # at its end a master writes what it has in memory to the disk
            stack.pop_all().close()
            until(lambda: not any(task.task.masters(rank) for rank in ranks), "the end", END_S)
            mountpoints = _mount(stack, task, ranks)
            task.wait_whole(ranks)
        yield mountpoints


@contextmanager
def mounted_alone(task: Running, *, memory_bytes: int, cache_dir: Path) -> Iterator[Path]:
    """Mount the dataset on the first node without a task, with a disk cache that has all of it.
    Yields the mount point."""
    node, mountpoint = task.nodes[0], task.nodes[0].folder / "alone"
    words = ("--session", "kernel", "--memory", str(memory_bytes), "--cache-dir", cache_dir)
    size = ("--cache-size", str(4 * task.task.stored_bytes))
    mount = ("mount", *words, *size, DATASET, mountpoint)
    with _no_delay(task), ExitStack() as stack:
        node.dlcmd(*mount)
        stack.callback(node.dlcmd, "umount", mountpoint)
        for path in task.shape.paths():  # each chunk is kept on the disk when it is read
            (mountpoint / path).read_bytes()
        yield mountpoint


def _mount(stack: ExitStack, task: Running, ranks: Sequence[int]) -> list[Path]:
    mountpoints = []
    for rank in ranks:
        mountpoints.append(task.task.mount(rank))
        stack.callback(task.task.umount, rank)
    return mountpoints


@contextmanager
def _no_delay(task: Running) -> Iterator[None]:
    """The store answers at once meanwhile, as it is not what is measured."""
    before, task.task.s3.delay_s = task.task.s3.delay_s, 0.0
    try:
        yield
    finally:
        task.task.s3.delay_s = before


def small_files(bench: Workbench) -> list[Row]:
    """D4L in a known random order through a mount that has half of it in its node's memory: against
    such mounts with all in their disk cache, in a task of one node and without a task, and against
    multi-get of the same files in such an order."""
    with ExitStack() as stack:
        task = stack.enter_context(running(bench, D4L))
        alone = stack.enter_context(running(bench, D4L, 1))
        shape, memory_bytes = task.shape, memory_of(task.shape)
        folder, cache_dir, own_cache_dir = (stack.enter_context(bench.scratch()) for _ in range(3))

        def epochs(each: Running, mountpoint: Path) -> Mounted:
            lists = stack.enter_context(bench.scratch())
            return Mounted(bench, each, mountpoint, lists)

        mounts = mounted(bench, task, memory_bytes=memory_bytes)
        ours = epochs(task, stack.enter_context(mounts)[0])
        mounts = mounted(bench, alone, memory_bytes=memory_bytes, cache_dir=cache_dir)
        local = epochs(alone, stack.enter_context(mounts)[0])
        mount = mounted_alone(alone, memory_bytes=memory_bytes, cache_dir=own_cache_dir)
        no_task = epochs(alone, stack.enter_context(mount))
        cluster = filled_if_installed(stack, task)
        paths, seeds = shape.paths(), iter(range(bench.rounds))

        def from_disk(mounted: Mounted) -> dict[str, float]:
            bench.warm_page_cache(cache_dir, own_cache_dir)
            return mounted.read()

        def theirs() -> dict[str, float]:
            if cluster is None:
                raise PeerMissing(NO_MEMCACHED)
            draw = np.random.default_rng(next(seeds)).permutation(shape.files)
            listed = write_list((paths[at] for at in draw.tolist()), folder / "theirs")
            client = cluster.client(task.nodes[0])
            return {RATE: client.run(do="epoch", paths=str(listed), size=BATCH)[RATE]}

        sides: dict[str, Side] = {
            OURS: ours.read,
            DISK: lambda: from_disk(local),
            NO_TASK: lambda: from_disk(no_task),
            MEMCACHED: theirs,
        }
        rounds = alternate(bench.rounds, sides)
    name = f"task {shape.name}, an epoch in known random order, through a mount"
    memory = f"mount and master have {memory_bytes >> 20} MB, the dataset {shape.bytes >> 20} MB"
    disk = f"{memory}; the files of the disk cache are in the kernel's page cache"
    target = at_least(DISK_RATIO)
    return [
        *against(rounds, name, RATE, {DISK: target}, f"{disk}; a task of one node"),
        *against(rounds, name, RATE, {NO_TASK: target}, disk),
        *against(rounds, name, RATE, {MEMCACHED: at_least(MOUNT_RATIO)}, memory),
        no_more_than(name, READS, rounds.ours(READS), READS_MAX),
    ]


def large_files(bench: Workbench) -> list[Row]:
    """D110 in a known random order through a mount that has half of it in its node's memory,
    against the bandwidth of TCP between two nodes: with links as fast as the machine, and with
    limited ones."""
    with running(bench, D110) as task, ExitStack() as stack:
        shape, memory_bytes = task.shape, memory_of(task.shape)
        mountpoints = stack.enter_context(mounted(bench, task, memory_bytes=memory_bytes))
        folder = stack.enter_context(bench.scratch())
        mount = Mounted(bench, task, mountpoints[0], folder)

        def theirs() -> dict[str, float]:
            seconds = IPERF_S / bench.divisor
            return {RATE_BYTES: tcp_bytes_per_s(task.nodes[1], task.nodes[0], seconds) / 1e6}

        sides: dict[str, Side] = {OURS: mount.read, IPERF3: theirs}
        name = f"task {shape.name}, an epoch in known random order, through a mount"
        note = "a quarter of it comes from the own node"
        target = {IPERF3: at_least(BANDWIDTH_RATIO)}
        rows: list[Row] = []
        for limit in (0, LINK_KBIT_S):
            if limit and not has_namespaces():
                continue
            for node in task.nodes if limit else ():
                node.limit_bandwidth(limit)
            rounds = alternate(bench.rounds, sides)
            link = f", links of {limit / 1e6:.0f} Gbit/s" if limit else ""
            rows += against(rounds, f"{name}{link}", RATE_BYTES, target, note)
        return rows


def announce(mountpoint: Path, shape: Shape, epoch: int) -> None:
    """Tell the mount the order that `random_order` draws for this seed."""
    view = Snapshot((mountpoint / ".diesel" / "snapshot").read_bytes())
    drawn = np.random.default_rng(epoch).permutation(shape.files)
    paths = [path.encode() for path in shape.paths()]
    entries = view.lookup_many(paths)[drawn]
    with control.Control.connect(mountpoint) as link:
        link.announce("bench", [control.explicit(epoch=epoch, entries=entries)])


def reads_of(mountpoint: Path) -> int:
    """The READs of files that the mount has answered so far."""
    time.sleep(1.1)  # its statistics may be a second old
    said = json.loads((mountpoint / ".diesel" / "stats").read_bytes())["reads"]
    return int(said["hits"]) + int(said["misses"])
