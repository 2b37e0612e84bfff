"""A server in this process without sockets: handlers over a repository, and clients of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.cache.tiers import MemoryTier
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.repository import RemoteRepository, RemoteWriteSession
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots
from diesel_fs.remote.values import parts_message
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account, Role
from diesel_fs.urls import parse_url
from diesel_server.requests.table import RequestTable

from .direct_link import DirectLink, Loop

URL = parse_url("diesel://nowhere:1")
KEY = bytes(range(32))


class InProcessServer:
    def __init__(self, store: LocalRepository, loop: Loop, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        """Puts faults in, until the server ends."""
        self.store = store
        self.reads = RangeReader(ReadThroughCache(store.objects, MemoryTier(0)))
        self.loop = loop
        self.handlers = RequestTable(store, self.reads, CompressedSnapshots(None)).handlers()
        self.admin = self.client(Account("admin", KEY, admin=True))

    def client(self, account: Account) -> RemoteRepository:
        return RemoteRepository(self.link(account), URL, None)

    def link(self, account: Account) -> DirectLink:
        return DirectLink(self.loop, self.handlers, account, self.store.objects.store_id)

    def with_role(self, role: Role, *names: str) -> RemoteRepository:
        return self.client(Account("somebody", KEY, grants=dict.fromkeys(names, role)))

    @property
    def identity(self) -> UUID:
        return self.store.dataset("ds").identity

    def chunks(self, name: str = "ds") -> list[ChunkId]:
        return list(self.store.chunk_ids(self.store.dataset(name).identity))


@contextmanager
def in_process_server(folder: Path) -> Iterator[InProcessServer]:
    loop = Loop()
    with (
        LocalRepository.open(folder.as_uri(), create=True) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        service = InProcessServer(store, loop, patch)
        try:
            yield service
        finally:
            service.reads.close()
            loop.close()


class ChunkMaker:
    def __init__(self, repository: RemoteRepository, name: str = "ds") -> None:
        session = repository.begin(name)
        assert isinstance(session, RemoteWriteSession)
        self.session = session
        self.builder = ChunkBuilder(session.identity, 1 << 20, "none")

    def add(self, path: bytes, content: bytes) -> None:
        self.builder.room(len(content))[: len(content)] = content
        folder, _, name = path.rpartition(b"/")
        self.builder.add_file((folder, name), 0o644, 1, len(content))

    def seal(self, chunk: ChunkId | None = None) -> tuple[ChunkId, list[bytes]]:
        made = chunk or self.session.new_id()
        parts, _ = self.builder.seal(made)
        copied = [bytes(part) for part in parts]
        self.builder.clear()
        return made, copied

    def sealed(self, path: bytes, content: bytes) -> tuple[ChunkId, list[bytes]]:
        self.add(path, content)
        return self.seal()

    def put(self, chunk: ChunkId, parts: Sequence[bytes]) -> None:
        self.session.objects.put(chunk_object(self.session.identity, chunk), parts)

    def file(self, path: bytes, content: bytes) -> ChunkId:
        chunk, parts = self.sealed(path, content)
        self.put(chunk, parts)
        return chunk


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcessServer]:
    with in_process_server(tmp_path / "store") as found:
        yield found


@pytest.fixture
def filled(server: InProcessServer) -> InProcessServer:
    sealer = ChunkMaker(server.admin)
    for path, content in ((b"a", b"1"), (b"d/b", b"22"), (b"d/e/c", b"333")):
        sealer.add(path, content)
    sealer.put(*sealer.seal())
    sealer.session.finish()
    return server


def link_of(client: RemoteRepository) -> DirectLink:
    link = client._link
    assert isinstance(link, DirectLink)
    return link


def read(client: RemoteRepository, identity: UUID, chunk: ChunkId, size: int) -> bytes:
    answer = link_of(client).call(
        {"do": "read", "identity": identity.bytes, "parts": parts_message([(chunk, 0, size)])}
    )
    return bytes(answer.payload)
