"""Fixtures of tests of peers: simulated clocks; an acceptor and a `Peer` of it; and a dataset, a
fake master and a `TaskStore` between them."""

import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from trio.testing import MockClock

from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.peers.client import TaskStore
from diesel_fs.peers.node_cache import NodeCache
from diesel_fs.peers.peer import Peer
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import ObjectStore, ReadWrapper

from ..trees import write
from .connected_masters import FakeAnswers, Node, answering, asking
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
    """It jumps when no task has run for a while; sockets and the data plane's thread are real, and
    need far less than this while."""
    return MockClock(autojump_threshold=0.1)


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """A clock that jumps when no task can run, for a `NodeCache`."""
    monkeypatch.setattr(NodeCache, "_in_thread", run_inline)
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
    async with asking(node.port) as found:
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


@pytest.fixture
def store(inner: Counting, view: Snapshot, path: Path) -> Iterator[TaskStore]:
    made = TaskStore(inner, path, view, deadline_s=DEADLINE_S, pause_s=PAUSE_S)
    yield made
    made.close()


@pytest.fixture
def quick_store(inner: Counting, view: Snapshot, path: Path) -> Iterator[TaskStore]:
    """A store that often tells the master which chunks it has unmapped."""
    made = TaskStore(inner, path, view, heartbeat_s=0.02)
    yield made
    made.close()
