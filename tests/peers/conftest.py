"""Fixtures of tests of peers: simulated clocks; an acceptor and a `Peer` of it; and a dataset, a
fake master and a `TaskStore` between them."""

import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from trio.testing import MockClock

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.peers.master.peer import Peer
from diesel_fs.peers.node.fetches import Fetches
from diesel_fs.peers.reader.store import TaskStore
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import ObjectStore, ReadWrapper

from ..trees import write
from .connected_masters import FakeAnswers, Node, answering, connected_peer
from .fake_master import Behaviour, FakeMaster
from .node_caches import run_inline
from .planes import Plane, running_plane

FILES = {f"n{i:03}": os.urandom(1000 + i) for i in range(300)} | {
    "text": b"the same words, " * 1000,
    "large": os.urandom(3 * CHUNK_BYTES_MIN + 77),
}
DEADLINE_S, PAUSE_S = 1.5, 0.5
"""Long enough for the fake master on a busy machine."""

LITTLE_MEMORY = 1 << 10
"""Memory in which no chunk fits."""


class Counting(ReadWrapper):
    """The object store; it counts reads, and fails on demand."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.reads = 0
        self.fails = False
        self.delay_s = 0.0
        self.most = 0  # reads at once
        self._under_way = 0
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.reads += 1
        if self.fails:
            raise ObjectStoreError("the store fails")
        with self._lock:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        time.sleep(self.delay_s)
        with self._lock:
            self._under_way -= 1
        self.inner.read_into(name, start, buffer)


@pytest.fixture
def jumping_clock() -> MockClock:
    """It jumps when no task has run for some time; sockets and the data plane's thread are real,
    and need far less than that."""
    return MockClock(autojump_threshold=0.1)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_NODEID", "GROUP_RANK", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `NodeCache` has no threads, and does not check contents."""
    monkeypatch.setattr(Fetches, "in_thread", run_inline)
    monkeypatch.setattr("diesel_fs.peers.node.fetches.verify_chunk", lambda key, content: None)


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """A clock that jumps when no task can run, for a `NodeCache`."""
    monkeypatch.setattr(Fetches, "in_thread", run_inline)
    return MockClock(autojump_threshold=0)


@pytest.fixture
def answers() -> FakeAnswers:
    return FakeAnswers()


@pytest.fixture
async def node(answers: FakeAnswers) -> AsyncIterator[Node]:
    async with answering(fake_answers=answers) as found:
        yield found


@pytest.fixture
async def peer(node: Node) -> AsyncIterator[Peer]:
    async with connected_peer(node.port) as found:
        yield found


@pytest.fixture
def plane() -> Iterator[Plane]:
    with running_plane() as found:
        yield found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:
    folder = tmp_path_factory.mktemp("task")
    source = write(folder / "source", FILES)
    with LocalRepository.open((folder / "store").as_uri(), create=True) as opened:
        options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress="lz4", jobs=1)
        put(opened, "ds", FolderSource(source), options=options)
        yield opened


@pytest.fixture(scope="module")
def view(repository: LocalRepository) -> Snapshot:
    return repository.view("ds")


@pytest.fixture(scope="module")
def chunks(repository: LocalRepository, view: Snapshot) -> dict[int, bytes]:
    names = [chunk_object(view.identity, chunk) for chunk in view.chunk_ids]
    return {at: bytes(repository.objects.get(name)) for at, name in enumerate(names)}


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def master(path: Path, chunks: dict[int, bytes], behaviour: Behaviour) -> Iterator[FakeMaster]:
    with FakeMaster(path, chunks, behaviour) as answers:
        yield answers


@pytest.fixture
def inner(repository: LocalRepository) -> Counting:
    return Counting(repository.objects)


class Client:
    def __init__(
        self, inner: Counting, path: Path, view: Snapshot, chunks: dict[int, bytes]
    ) -> None:
        self.inner, self.path, self.view, self.chunks = inner, path, view, chunks
        self.store = TaskStore(inner, path, view, deadline_s=DEADLINE_S, pause_s=PAUSE_S)

    def name(self, chunk: int) -> str:
        return chunk_object(self.view.identity, self.view.chunk_ids[chunk])

    def pin(self, chunk: int) -> memoryview | None:
        found = self.store.fast_reads.pin(self.name(chunk), lambda: None)
        return None if found is None else found.content

    def reader(self, memory_bytes: int, *, prefer_entries: bool = False) -> EntryReader:
        return EntryReader(self.view, self.store, memory_bytes, prefer_entries=prefer_entries)

    def counts(self) -> dict[str, int]:
        return cast("dict[str, int]", self.store.stats()["client"])

    def read_one(self, chunk: int) -> None:
        room = bytearray(100)
        self.store.read_into(self.name(chunk), 500, room)
        assert room == self.chunks[chunk][500:600]

    def read(self, *chunks: int) -> None:
        found = self.store.fast_reads.read_parts([(self.name(chunk), 500, 100) for chunk in chunks])
        assert list(map(bytes, found)) == [self.chunks[chunk][500:600] for chunk in chunks]

    def parts(self, seed: int, count: int) -> list[tuple[int, int, int]]:
        random = np.random.default_rng(seed)
        found = []
        for chunk in random.integers(0, self.view.chunk_count, count).tolist():
            size = int(self.view.chunk_sizes[chunk])
            start = int(random.integers(0, size))
            found.append((chunk, start, int(random.integers(0, min(size - start, 5000) + 1))))
        return found

    def begin(self, seed: int, count: int = 200) -> tuple[Iterator[memoryview], list[bytes]]:
        parts = self.parts(seed, count)
        found = self.store.fast_reads.read_parts(
            [(self.name(chunk), start, size) for chunk, start, size in parts]
        )
        return found, [self.chunks[chunk][start : start + size] for chunk, start, size in parts]

    def check_parts(self, seed: int, count: int = 200) -> None:
        found, right = self.begin(seed, count)
        views = list(found)
        assert all(each.readonly for each in views)
        assert list(map(bytes, views)) == right


@pytest.fixture
def client(
    inner: Counting, path: Path, view: Snapshot, chunks: dict[int, bytes]
) -> Iterator[Client]:
    made = Client(inner, path, view, chunks)
    yield made
    made.store.close()
