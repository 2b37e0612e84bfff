"""Fixtures of the cache's tests: a dataset of every kind of content in small chunks, and its store,
which counts reads and can damage them."""

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.tiers import ChunkKey
from diesel_fs.errors import ObjectMissing
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import ReadWrapper

from ..small_disks import small_disk
from ..trees import write
from .disk_tier import Chunks

FILES = {
    "empty": b"",
    "small": b"a small file",
    "text": b"the same words, " * 1000,
    "large": os.urandom(5 * CHUNK_BYTES_MIN + 77),
    "zeros": bytes(4 * CHUNK_BYTES_MIN),
} | {f"n{i:03}": os.urandom(1000 + i) for i in range(300)}


def put_files(
    repository: LocalRepository, dataset: str, folder: Path, files: dict[str, bytes], codec: str
) -> Snapshot:
    options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress=codec, jobs=1)
    put(repository, dataset, FolderSource(write(folder, files)), options=options)
    return repository.view(dataset)


def object_of(view: Snapshot, name: str) -> str:
    (extent,) = view.extents(view.lookup(name.encode()))
    return chunk_object(view.identity, view.chunk_ids[extent.chunk])


class Counting(ReadWrapper):
    """Counts reads, and lets a test change the bytes that they bring."""

    def __init__(self, repository: LocalRepository) -> None:
        super().__init__(repository.objects)
        self.reads: list[tuple[str, int, int]] = []
        self.change: Callable[[str, memoryview], None] = lambda name, buffer: None
        self.damaged: dict[tuple[str, int], float] = {}
        """How many reads of a byte, by object and place, are still to be damaged."""

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_into(name, start, buffer)
        self.reads.append((name, start, len(buffer)))
        self.change(name, memoryview(buffer))
        for (damaged, at), times in self.damaged.items():
            if name == damaged and start <= at < start + len(buffer) and times:
                buffer[at - start] ^= 4
                self.damaged[damaged, at] = times - 1

    def reads_by_object(self) -> Counter[str]:
        return Counter(name for name, _, _ in self.reads)

    def bytes_read(self) -> int:
        return sum(size for _, _, size in self.reads)

    def damage(self, view: Snapshot, name: str, times: float = math.inf) -> None:
        """Flip a bit of a file of one extent in the next reads of it."""
        (extent,) = view.extents(view.lookup(name.encode()))
        self.damaged[object_of(view, name), extent.offset] = times

    def lose(self, lost: str, times: float = math.inf) -> None:
        left = [times]

        def change(name: str, buffer: memoryview) -> None:
            if name == lost and left[0]:
                left[0] -= 1
                raise ObjectMissing(f"no object {name}")

        self.change = change


class Gate:
    """Holds reads of a store back until the test opens it, and counts them."""

    def __init__(self, store: Counting) -> None:
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()
        store.change = self.wait

    def wait(self, name: str, buffer: memoryview) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.arrived.release()
        assert self.open.wait(20)
        with self._lock:
            self.now -= 1

    def await_reads(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=20)

    def expect_at_most(self, count: int) -> None:
        """Wait until `count` reads are held back, and see that no more come."""
        self.await_reads(count)
        assert not self.arrived.acquire(timeout=0.2)


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:
    folder: Path = tmp_path_factory.mktemp("cache")
    with LocalRepository.open((folder / "store").as_uri(), create=True) as opened:
        put_files(opened, "ds", folder / "source", FILES, "lz4")
        yield opened


@pytest.fixture
def store(repository: LocalRepository) -> Counting:
    return Counting(repository)


@pytest.fixture
def view(repository: LocalRepository) -> Snapshot:
    return repository.view("ds")


@pytest.fixture(scope="module")
def chunks(repository: LocalRepository) -> Chunks:
    view = repository.view("ds")
    found = {}
    for chunk in view.chunk_ids:
        key = ChunkKey(view.identity, chunk)
        found[key] = bytes(repository.objects.get(chunk_object(*key)))
    assert len(found) > 8
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return prepare_cache_folder(tmp_path / "cache")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "size=2m,nr_inodes=24,mode=700") as point:
        yield point
