"""Benchmarks of order logs on a local disk, in the shape of LCache's figure 5, and through a mount.

Without a mount, one process reads epochs in random order: files one by one on ext4, parts of chunk
files, and through order logs, which also write the log of the next epoch meanwhile. All of it lies
on the disk, or half of it (then the rest comes from a store that takes 5 ms and gives 200 MB/s).
Reads of files and chunks go past the page cache (O_DIRECT); that of the logs is dropped before an
epoch, and again with each segment.

`limited` does the same with a disk of 100 MB/s and 2,000 requests/s: `LimitedDisk` makes the calls
that read and write take so long. (The blkio throttle of control groups would not see what the
kernel writes back later.)
"""

import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache import order_log
from diesel_fs.cache.coalescing_reader import CoalescingReader
from diesel_fs.cache.disk import DiskTier, prepare_cache_folder
from diesel_fs.cache.log_layout import LogCut, LogLayout
from diesel_fs.cache.order_log import LoggedReader, LogPlan, OrderLogs
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans.control import Control, explicit
from diesel_fs.orders.plan import Entries
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import ObjectStore, ReadWrapper

from ..cases.kernel import RATE
from ..inputs import D4L, D110, Shape
from ..mounts import Mount
from ..report import Row, against, at_least, no_more_than
from ..samples import OURS, Rounds, Samples, Side, alternate
from ..stored import Stored
from ..workbench import Workbench

FILES, CHUNKS = "files one by one", "parts of chunk files"
THREADS = 8  # for files and parts of chunks
UNIT = 2048  # files of one push, as in a mount
FILES_RATIO, CHUNKS_RATIO = 5, 1.3  # for 4 KiB
DISK_BYTES_PER_S, DISK_REQUESTS_PER_S, REQUEST_BYTES = 100e6, 2_000, 1 << 20
STORE_S, STORE_BYTES_PER_S = 0.005, 200e6
EPOCHS = 2  # that are measured
WRITTEN, FETCHED, REQUESTS = "written/dataset", "fetched/dataset", "requests/file"

MEMORY_PART = 4  # of the dataset, through the mount
MOUNT_RATIO = 0.8
PUSHED, DISK = "all pushed once, read for the first time", "half of the disk's sequential rate"

_INDEX_FILES, _INDEX_S, _INDEX_MB = 14_200_000, 3, 300


class Pace:
    """What all threads together may use at once, such as a disk or a link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0  # when all that was asked is done

    def take(self, cost_s: float, at_least_s: float = 0.0) -> None:
        """Wait until it was used for so long."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + cost_s
            until_s = self._free_s
        time.sleep(max(until_s - time.monotonic(), at_least_s))


class LimitedDisk(Pace):
    """Makes reads and writes of this process take as long as a slow disk takes."""

    def serve(self, size: int) -> None:
        """Wait until the disk has served a request of so many bytes."""
        requests = max(-(-size // REQUEST_BYTES), 1)
        self.take(max(size / DISK_BYTES_PER_S, requests / DISK_REQUESTS_PER_S))

    @contextmanager
    def used(self) -> Iterator[None]:
        """From here to the end, this process has this disk."""
        preadv, pwrite = os.preadv, os.pwrite

        def slow_preadv(
            file: int, buffers: Sequence[memoryview], start: int, flags: int = 0
        ) -> int:
            done = preadv(file, buffers, start, flags)
            self.serve(done)
            return done

        def slow_pwrite(file: int, content: memoryview, start: int) -> int:
            done = pwrite(file, content, start)
            self.serve(done)
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", slow_preadv)
            patch.setattr(os, "pwrite", slow_pwrite)
            yield


class _SlowStore(ReadWrapper):
    """A store whose reads take `STORE_S`, and share its bandwidth. Its files are below `root`."""

    def __init__(self, inner: ObjectStore, root: Path) -> None:
        super().__init__(inner)
        self.root = root
        self._pace, self._lock = Pace(), threading.Lock()
        self.read_bytes = self.requests = 0

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        with open(f"{self.root}/{name}", "rb") as file:  # not by calls that a disk slows down
            file.seek(start)
            file.readinto(buffer)
        with self._lock:
            self.read_bytes += len(buffer)
            self.requests += 1
        self._pace.take(len(buffer) / STORE_BYTES_PER_S, STORE_S)


class _Setting(Stored):
    """A dataset in a store, and the same files in a folder on the disk."""

    def index(self, view: Snapshot) -> Entries:
        """The entry of each file."""
        found = [view.lookup(name.encode()) for name in self.shape.paths()]
        return np.array(found, np.uint32)

    def order(self, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """A random order of the files."""
        return np.random.default_rng(seed).permutation(self.shape.files)


def unlimited(bench: Workbench) -> list[Row]:
    """LCache's figure 5 in shape, on this machine's disk."""
    return [row for shape in (D4L, D110) for row in _figure5(bench, shape, None)]


def limited(bench: Workbench) -> list[Row]:
    """The same with a disk of 100 MB/s and 2,000 requests/s. Fewer files, as it takes minutes."""
    shapes = (D4L.scaled(10), D110.scaled(4))
    return [row for shape in shapes for row in _figure5(bench, shape, LimitedDisk())]


def _figure5(bench: Workbench, shape: Shape, disk: LimitedDisk | None) -> list[Row]:
    rows = []
    with bench.scratch() as folder, ExitStack() as stack:
        setting = _Setting(bench, bench.shape(shape), folder, stack)
        for part in (1.0, 0.5):
            sides = _sides(setting, part, disk)
            rounds = alternate(bench.rounds, sides)
            rows += _figure5_rows(setting.shape, rounds, part, disk)
    return rows


def _sides(setting: _Setting, part: float, disk: LimitedDisk | None) -> dict[str, Side]:
    """The three ways to read, where this part of the dataset is on the disk."""
    shape, count, names = setting.shape, setting.shape.files, setting.shape.paths()
    is_here = np.random.default_rng(99).permutation(count) < part * count

    def used() -> AbstractContextManager[None]:
        return disk.used() if disk is not None else nullcontext()

    def one_by_one(*, by_chunk: bool) -> dict[str, float]:
        with LocalRepository.open(setting.dlcmd.url) as repository:
            view = repository.view(shape.name)
            store = _SlowStore(repository.objects, setting.dlcmd.store)
            index, columns = setting.index(view), view.columns
            chunk_files = [
                os.open(f"{store.root}/{chunk_object(view.identity, each)}", os.O_DIRECT)
                for each in view.chunk_ids
            ]

            def read(some: Sequence[int]) -> None:
                room = mmap.mmap(-1, shape.file_bytes + 2 * mmap.PAGESIZE)
                view_of_room = memoryview(room)
                for at in some:
                    entry = int(index[at])
                    chunk, offset = int(columns.chunk[entry]), int(columns.offset[entry])
                    if not is_here[at]:
                        name = chunk_object(view.identity, view.chunk_ids[chunk])
                        store.read_into(name, offset, view_of_room[: shape.file_bytes])
                        continue
                    if by_chunk:
                        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
                        size = -(-(offset + shape.file_bytes - start) // 4096) * 4096
                        os.preadv(chunk_files[chunk], [view_of_room[:size]], start)
                        continue
                    file = os.open(f"{setting.source}/{names[at]}", os.O_DIRECT)
                    os.preadv(file, [view_of_room[: -(-shape.file_bytes // 4096) * 4096]], 0)
                    os.close(file)

            order = setting.order(1)
            start_s = time.monotonic()
            with used(), ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(read, np.array_split(order, THREADS * 8)))
            seconds = time.monotonic() - start_s
            for file in chunk_files:
                os.close(file)
            return {RATE: count / seconds}

    def logs() -> dict[str, float]:
        with (
            setting.bench.scratch() as place,
            LocalRepository.open(setting.dlcmd.url) as repository,
        ):
            view = repository.view(shape.name)
            store = _SlowStore(repository.objects, setting.dlcmd.store)
            room = int(shape.bytes * part) + 2 * order_log.STAGED_BYTES + (32 << 20)
            room += shape.bytes // 2 if part == 1 else 0
            tier = DiskTier(
                prepare_cache_folder(place / "cache"), repository.objects.store_id, room
            )
            made = OrderLogs(view, tier)
            reader = LoggedReader(CoalescingReader(view, store), made)
            index, rates = setting.index(view), []
            # One array for each epoch, as a plan has
            orders = [index[setting.order(epoch)] for epoch in range(EPOCHS + 2)]
            for epoch in range(EPOCHS + 1):
                made.set_plan([LogPlan("train", orders[epoch], orders[epoch + 1])])
                made.settle()
                _drop_pages(place / "cache")
                store.read_bytes = store.requests = 0
                written = made.stats()["log_written_bytes"]
                start_s = time.monotonic()
                with used() if epoch else nullcontext():
                    units = np.split(orders[epoch], range(UNIT, count, UNIT))
                    for at, unit in enumerate(units):
                        reader.prefetch(units[at : at + 16])
                        for _ in reader.batches(unit):
                            pass
                    made.settle()
                if epoch:
                    rates.append(count / (time.monotonic() - start_s))
            figures = {
                RATE: float(np.median(rates)),
                FETCHED: store.read_bytes / shape.bytes,
                REQUESTS: store.requests / count,
                WRITTEN: (made.stats()["log_written_bytes"] - written) / shape.bytes,
            }
            reader.close()
            return figures

    return {
        OURS: logs,
        FILES: lambda: one_by_one(by_chunk=False),
        CHUNKS: lambda: one_by_one(by_chunk=True),
    }


def _figure5_rows(shape: Shape, rounds: Rounds, part: float, disk: LimitedDisk | None) -> list[Row]:
    where = "this disk" if disk is None else "a disk of 100 MB/s, 2,000 requests/s"
    name = f"order log, {shape.name}, {'all' if part == 1 else 'half'} on {where}"
    is_small = shape.file_bytes < 64 << 10 and part == 1
    note = f"{THREADS} threads; the log is written for the next epoch, too"
    by_file, by_chunk = (
        at_least(ratio) if is_small else None for ratio in (FILES_RATIO, CHUNKS_RATIO)
    )
    fetched = (
        "bytes from the store; the optimum by files, and a twentieth; where the store is slow to"
        " answer, requests are merged, and bring what lies between"
    )
    requests = "the optimum by files, each alone"
    return [
        *against(rounds, name, RATE, {FILES: by_file}, note),
        *against(rounds, name, RATE, {CHUNKS: by_chunk}),
        no_more_than(name, FETCHED, rounds.ours(FETCHED), 1 - part + 0.05, fetched),
        no_more_than(name, REQUESTS, rounds.ours(REQUESTS), 1 - part, requests),
        Row(name, WRITTEN, rounds.ours(WRITTEN)),
    ]


def _drop_pages(folder: Path) -> None:
    """Have the kernel forget what it has of the files there."""
    for path in folder.rglob("order-*"):
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def through_mount(bench: Workbench) -> list[Row]:
    """A dataset of four times the memory through a mount, all in the order log, in random orders
    that are known before: against the same session when all was pushed, and the disk."""
    return [row for shape in (D4L, D110) for row in _mounted(bench, shape)]


def _mounted(bench: Workbench, wanted: Shape) -> list[Row]:
    with bench.scratch() as folder, ExitStack() as stack:
        setting = _Setting(bench, bench.shape(wanted), folder, stack)
        shape, dlcmd, at = setting.shape, setting.dlcmd, setting.mountpoint
        session = bench.session_options
        with LocalRepository.open(dlcmd.url) as repository:
            index = setting.index(repository.view(shape.name))
        orders = setting.orders(OURS, EPOCHS + 1)
        seeds = [index[setting.order(seed)] for seed in range(EPOCHS + 2)]

        def logged() -> dict[str, float]:
            cache = folder / "logs"
            options = [*session, "--memory", str(shape.bytes // MEMORY_PART), "--cache-layout",
                       "order", "--cache-dir", str(cache), "--cache-size",
                       str(shape.bytes * 8 // 5)]  # fmt: skip
            with dlcmd.mounted(shape.name, at, *options) as mount, Control.connect(at) as control:
                for each in os.walk(at):
                    assert each
                control.announce("train", [explicit(epoch=e, entries=seeds[e]) for e in (0, 1)])
                rates = []
                for epoch, order in enumerate(orders):
                    if epoch:
                        control.extend(
                            "train", [explicit(epoch=epoch + 1, entries=seeds[epoch + 1])]
                        )
                    rates.append(bench.read_epoch(order).files_per_s)
                    _wait_until_written(mount, shape.files)
                figures = _worker(mount)
            return {
                RATE: float(np.median(rates[1:])),
                FETCHED: figures["fetched_bytes"] / shape.bytes,
                WRITTEN: figures["log_written_bytes"] / shape.bytes / len(orders),
            }

        def pushed() -> dict[str, float]:
            options = [*session, "--memory", str(2 * shape.bytes), "--policy", "oneshot"]
            with dlcmd.mounted(shape.name, at, *options) as mount:
                for each in os.walk(at):
                    assert each
                mount.wait_until_loaded()
                return {RATE: bench.read_epoch(orders[1]).files_per_s}

        def disk() -> dict[str, float]:
            return {RATE: _sequential_rate(folder, shape.bytes) / 2 / shape.file_bytes}

        rounds = alternate(bench.rounds, {OURS: logged, PUSHED: pushed, DISK: disk})
    limits = {side: rounds.of(side, RATE) for side in (PUSHED, DISK)}
    lower = min(
        limits, key=lambda side: each.median if isinstance(each := limits[side], Samples) else 0
    )
    name = f"{bench.session} {shape.name}, four times the memory, all in the order log"
    targets = {side: at_least(MOUNT_RATIO) if side == lower else None for side in limits}
    note = "epochs after the first; one C reader; the lower of the two limits counts"
    fetched = "bytes from the store in all epochs together, so of the first one"
    return [
        *against(rounds, name, RATE, targets, note),
        no_more_than(name, FETCHED, rounds.ours(FETCHED), 1.6, fetched),
        Row(name, WRITTEN, rounds.ours(WRITTEN), note="an epoch"),
    ]


def _worker(mount: Mount) -> Mapping[str, int]:
    """The figures of the prefetch worker's reader."""
    stats = json.loads((mount.path / ".diesel" / "stats").read_bytes())
    found: Mapping[str, int] = stats["residency"]["store"]
    return found


def _wait_until_written(mount: Mount, files: int) -> None:
    end_s = time.monotonic() + 20
    while _worker(mount).get("log_next_entries") != files and time.monotonic() < end_s:
        time.sleep(0.2)


def _sequential_rate(folder: Path, size: int) -> float:
    """Bytes a second of reading a file from this disk in pieces of 8 MiB, past the page cache."""
    path = folder / "sequential"
    content = np.random.default_rng(1).integers(0, 255, 64 << 20, np.uint8).data
    with open(path, "wb") as file:
        for _ in range(-(-size // len(content))):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    room = mmap.mmap(-1, 8 << 20)
    start_s, done = time.monotonic(), 0
    while got := os.preadv(descriptor, [room], done):
        done += got
    seconds = time.monotonic() - start_s
    os.close(descriptor)
    path.unlink()
    return done / seconds


def index(bench: Workbench) -> list[Row]:
    """The layout of a log of ImageNet-22K: 14.2 million files (LCache, section III-C: 15 s and 10
    GB)."""
    count = _INDEX_FILES // bench.divisor
    rng = np.random.default_rng(1)
    sizes = np.clip(rng.lognormal(11, 0.8, count), 100, 4 << 20).astype(np.uint32)
    before, order = (rng.permutation(count).astype(np.uint32) for _ in range(2))

    def made() -> dict[str, float]:
        start_s = time.monotonic()
        cut = LogCut(order, sizes, np.ones(count, np.bool_))
        layout = LogLayout(cut, cut.by_arrival(before), 1 << 62)
        seconds = time.monotonic() - start_s
        held = sum(each.nbytes for each in vars(layout).values() if isinstance(each, np.ndarray))
        return {"s": seconds, "MB": held / 1e6}

    rounds = alternate(bench.rounds, {OURS: made})
    name = f"order log, the index of {count:,} files"
    return [
        no_more_than(name, "s", rounds.ours("s"), _INDEX_S),
        no_more_than(name, "MB", rounds.ours("MB"), _INDEX_MB, "held; the paper: 10 GB"),
    ]
