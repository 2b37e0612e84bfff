"""Whole chunks from the files of the disk cache: bytes are right, whatever is in the file."""

import gc
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.cache.tiers import ChunkKey
from diesel_fs.errors import FormatError
from diesel_fs.peers.reader.chunk_files import ChunkFiles
from diesel_fs.peers.reader.store import TaskStore
from tests.rows import each_row

from ..conftest import FILES, Client
from ..fake_master import DAMAGED, RANK, FakeMaster

LARGE = "large"


@pytest.fixture
def reader(client: Client, master: FakeMaster) -> EntryReader:
    """A mount's, with the files of all chunks."""
    master.behaviour.lends = lambda chunk: client.chunks[chunk]
    store = TaskStore(client.inner, client.path, client.view, files=ChunkFiles())
    return EntryReader(client.view, store, 64 << 20, prefer_entries=True)


def key_of(client: Client, chunk: int) -> ChunkKey:
    return ChunkKey(client.view.identity, client.view.chunk_ids[chunk])


def test_a_large_file_is_read_from_files_alone(
    reader: EntryReader, client: Client, master: FakeMaster
) -> None:
    index = client.view.lookup(LARGE.encode())
    assert len(client.view.extents(index)) > 2
    content, step = b"", 100_000
    for at in range(0, len(FILES[LARGE]), step):
        found = reader.read_nowait(index, at, step)
        content += reader.read(index, at, step) if found is None else found
    assert content == FILES[LARGE]
    assert (client.inner.reads, master.pinned) == (0, [])
    large = {each.chunk for each in client.view.extents(index)}
    held = reader.stats()["memory_bytes"]
    assert held <= sum(len(body) for at, body in client.chunks.items() if at not in large)


def test_other_readers_get_no_files(client: Client, master: FakeMaster) -> None:
    master.behaviour.lends = lambda chunk: client.chunks[chunk]
    assert client.pin(0) is not None
    assert master.pinned == [0]


def cut(content: bytes) -> bytes:
    return content[:-1]


def longer(content: bytes) -> bytes:
    return content + b"x"


def flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def zeros(content: bytes) -> bytes:
    return bytes(len(content))


@each_row("damage", [cut, longer, flipped, zeros])
def test_F5_a_damaged_file_is_not_used_and_is_reported(
    damage: Callable[[bytes], bytes], client: Client, master: FakeMaster
) -> None:
    master.requests.clear()
    master.behaviour.lends = lambda chunk: damage(client.chunks[chunk])
    store = TaskStore(client.inner, client.path, client.view, files=ChunkFiles())
    assert store.fast_reads.pin(client.name(1), lambda: None) is None
    size = len(client.chunks[1])
    assert master.bodies(DAMAGED) == [struct.pack("<IIIH", 1, 0, size, RANK)]
    reader = EntryReader(client.view, store, 64 << 20, prefer_entries=True)
    index = client.view.lookup(LARGE.encode())
    assert reader.read(index) == FILES[LARGE]
    store.close()


def test_a_late_disk_gets_no_requests_for_a_while(client: Client, tmp_path: Path) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def hanging(file: int, size: int, room: memoryview) -> None:
        may_end.wait()
        ended.set()

    files = ChunkFiles(timeout_s=0.01, read=hanging)
    (tmp_path / "chunk").write_bytes(client.chunks[0])
    opened = os.open(tmp_path / "chunk", os.O_RDONLY)
    assert not files.is_resting
    assert files.read(key_of(client, 0), opened, len(client.chunks[0])) is None
    assert files.is_resting
    may_end.set()
    ended.wait()


def test_memory_is_used_again_only_after_its_last_view(client: Client, tmp_path: Path) -> None:
    files = ChunkFiles()

    def read(chunk: int) -> memoryview:
        (tmp_path / "chunk").write_bytes(client.chunks[chunk])
        opened = os.open(tmp_path / "chunk", os.O_RDONLY)
        found = files.read(key_of(client, chunk), opened, len(client.chunks[chunk]))
        assert found is not None
        return found

    first = read(0)
    part = first[1000:1100]
    del first
    for chunk in client.chunks:
        read(chunk)
        gc.collect()
    assert part == client.chunks[0][1000:1100]
    with pytest.raises(FormatError):
        files.read(key_of(client, 1), os.open(tmp_path / "chunk", os.O_RDONLY), 5)
