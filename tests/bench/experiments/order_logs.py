"""Benchmarks of order logs on a local disk, in the shape of LCache's figure 5.

One process reads epochs in random order: files one by one on ext4, parts of chunk files, and
through order logs, which also write the log of the next epoch meanwhile. All of it lies on the
disk, or half of it, with the rest in a store of 5 ms and 200 MB/s. Files and chunks are read past
the page cache (O_DIRECT); pages of the logs are dropped before an epoch and with each segment.

`limited` does the same with a disk of 100 MB/s and 2,000 requests/s: `LimitedDisk` makes calls take
that long. (The blkio throttle would not see pages that the kernel writes back later.)
"""

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.disk.folder import CacheFolder
from diesel_fs.cache.disk.logs import OrderLogFiles
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.order_logs.logs import STAGED_BYTES, LoggedReader, OrderLogs
from diesel_fs.cache.order_logs.streams import LogPlan
from diesel_fs.cache.readers.coalescing_reader import CoalescingReader
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.plan import Entries
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import ObjectStore, ReadWrapper

from ..cases.mounts import RATE
from ..inputs import D4L, D110, Indices, Shape
from ..report import Row, against, at_least, no_more_than
from ..samples import OURS, Rounds, Side, alternate
from ..stored import Stored, stored
from ..workbench import Workbench

FILES, CHUNKS = "files one by one", "parts of chunk files"
THREADS = 8  # for files and parts of chunks
UNIT = 2048  # files of one push, as in a mount
DISK_BYTES_PER_S, DISK_REQUESTS_PER_S, REQUEST_BYTES = 100e6, 2_000, 1 << 20
STORE_S, STORE_BYTES_PER_S = 0.005, 200e6
EPOCHS = 2  # number of measured epochs
WRITTEN, FETCHED, REQUESTS = "written/dataset", "fetched/dataset", "requests/file"


class Pace:
    """A shared resource of all threads with a limited rate, such as a disk or a link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0  # when all requests until now are done

    def take(self, cost_s: float, at_least_s: float = 0.0) -> None:
        """Wait until the resource was used for this time."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + cost_s
            until_s = self._free_s
        time.sleep(max(until_s - time.monotonic(), at_least_s))


class LimitedDisk(Pace):
    """Makes reads and writes of this process take as long as a slow disk takes."""

    def serve(self, size: int) -> None:
        """Wait until the disk has served a request of `size` bytes."""
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
    """A store with reads that take `STORE_S` and share its bandwidth. Its files are below
    `root`."""

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


def _index(data: Stored, view: Snapshot) -> Entries:
    """The entry of each file."""
    return view.lookup_many([name.encode() for name in data.shape.paths()]).astype(np.uint32)


def _order(data: Stored, seed: int) -> Indices:
    return np.random.default_rng(seed).permutation(data.shape.files)


def unlimited(bench: Workbench) -> list[Row]:
    """LCache's figure 5 in shape, on this machine's disk."""
    return _figure5(bench, (D4L, D110), None)


def limited(bench: Workbench) -> list[Row]:
    """The same with a disk of 100 MB/s and 2,000 requests/s. Fewer files, as it takes minutes."""
    return _figure5(bench, (D4L.scaled(10), D110.scaled(4)), LimitedDisk())


def _figure5(bench: Workbench, shapes: Sequence[Shape], disk: LimitedDisk | None) -> list[Row]:
    rows = []
    for shape in shapes:
        with stored(bench, bench.shape(shape)) as data:
            for part in (1.0, 0.5):
                rounds = alternate(bench.rounds, _sides(data, part, disk))
                rows += _figure5_rows(data.shape, rounds, part, disk)
    return rows


def _sides(data: Stored, part: float, disk: LimitedDisk | None) -> dict[str, Side]:
    """The three ways to read, with this part of the dataset on the disk."""
    shape, count, names = data.shape, data.shape.files, data.shape.paths()
    is_here = np.random.default_rng(99).permutation(count) < part * count

    def used() -> AbstractContextManager[None]:
        return disk.used() if disk is not None else nullcontext()

    def one_by_one(*, by_chunk: bool) -> dict[str, float]:
        with LocalRepository.open(data.dlcmd.url) as repository:
            view = repository.view(shape.name)
            store = _SlowStore(repository.objects, data.dlcmd.store)
            index, columns = _index(data, view), view.columns
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
                    file = os.open(f"{data.source}/{names[at]}", os.O_DIRECT)
                    os.preadv(file, [view_of_room[: -(-shape.file_bytes // 4096) * 4096]], 0)
                    os.close(file)

            order = _order(data, 1)
            start_s = time.monotonic()
            with used(), ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(read, np.array_split(order, THREADS * 8)))
            seconds = time.monotonic() - start_s
            for file in chunk_files:
                os.close(file)
            return {RATE: count / seconds}

    def logs() -> dict[str, float]:
        with data.bench.scratch() as place, LocalRepository.open(data.dlcmd.url) as repository:
            view = repository.view(shape.name)
            store = _SlowStore(repository.objects, data.dlcmd.store)
            room = int(shape.bytes * part) + 2 * STAGED_BYTES + (32 << 20)
            room += shape.bytes // 2 if part == 1 else 0
            folder = CacheFolder(
                prepare_cache_folder(place / "cache"), repository.objects.store_id, room
            )
            made = OrderLogs(view, OrderLogFiles(folder, view.identity))
            reader = LoggedReader(CoalescingReader(view, store), made)
            index, rates = _index(data, view), []
            # One array for each epoch, as a plan has
            orders = [index[_order(data, epoch)] for epoch in range(EPOCHS + 2)]
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
    by_file, by_chunk = (at_least(ratio) if is_small else None for ratio in (5, 1.3))
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
    for path in folder.rglob("order-*"):
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
