"""`TaskStore` reads chunks through a master; no fault of the master fails a read."""

import gc
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.fetching.stored_parts import FETCH_THREADS
from diesel_fs.cache.policies import costs
from diesel_fs.cache.readers import column_reader as store_module
from diesel_fs.cache.readers.coalescing_reader import CoalescingReader
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import DieselError, MetadataError, ObjectMissing, ObjectStoreError
from diesel_fs.format.object_names import STORE_MARKER
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.net import breaker
from diesel_fs.net.breaker import TIMEOUT_MAX_S, BreakerState
from diesel_fs.peers import wire
from diesel_fs.peers.reader import store as client_module
from diesel_fs.peers.reader import task_chunks
from diesel_fs.peers.reader.mapped_chunks import MappedChunks
from diesel_fs.peers.reader.master_link import MasterLink
from diesel_fs.peers.reader.store import TaskStore
from diesel_fs.repository.local import LocalRepository
from tests.rows import each_row
from tests.waiting import until

from ..children import fork
from ..conftest import FILES, LITTLE_MEMORY, Client
from ..fake_master import DAMAGED, HELLO, PIN, RANK, READ, STATS, SWITCH_VERSION, UNPIN, FakeMaster

READ_S = TIMEOUT_MAX_S
"""How long a reader waits for an answer of a master whose speed it does not know."""


def check_files(reader: EntryReader) -> None:
    names = list(FILES)
    indices = reader.snapshot.lookup_many([name.encode() for name in names])
    for name, content in zip(names, reader.read_many(indices), strict=True):
        assert content == FILES[name], name
    for name, index in zip(names[::7], indices[::7].tolist(), strict=True):
        assert reader.read(index) == FILES[name], name


# Bytes are right with any fault of the master -----------------------------------------------------


def flip(chunk: int, start: int, content: bytearray) -> None:
    for at in range(0, len(content), 50):
        content[at] ^= 1


BEHAVIOURS: dict[str, dict[str, object]] = {
    "good": {},
    "owned by an unknown node": {"owner": 7},
    "pins nothing": {"pins": False},
    "has half": {"has": lambda chunk: chunk % 2 == 0},
    "has nothing": {"has": lambda chunk: False},
    "F5 wrong bytes": {"change": flip},
    "F5 wrong bytes, and pins nothing": {"change": flip, "pins": False},
    "F5 other chunks, pinned": {"change_pinned": lambda chunk, content: flip(chunk, 0, content)},
    "revokes all": {"revoked": list(range(4))},
    "revokes chunks that do not exist": {"revoked": [99_999, 4_000_000_000]},
    "refuses": {"refuses": "I do not like you"},
    "another version": {"versions": {1}},
    "F7 garbage": {"raw": b"GET / HTTP/1.1\r\n\r\n" * 20},
    "F7 endless": {"raw": struct.pack("<BBHIII", 2, 0, 0, 9, 1 << 31, 0)},
    "F7 of another kind": {"raw": struct.pack("<BBHIII", 4, 0, 0, 0, 0, 0)},
    "F7 garbage for data": {"raw_data": b"GET / HTTP/1.1\r\n\r\n" * 20, "pins": False},
    "F7 endless data": {"raw_data": struct.pack("<IBBHII", 1, 1, 0, 0, 9, 1 << 31), "pins": False},
    "F7 data of another request": {
        "raw_data": struct.pack("<IBBHII", 77, 1, 0, 0, 1, 0),
        "pins": False,
    },
    "breaks off": {"breaks_off": True},
    "F2 hangs": {"hangs": 4.0},
}
"""Fields of `Behaviour`, by the master's fault."""


def read_files(client: Client) -> None:
    start_s = time.monotonic()
    reader = client.reader(LITTLE_MEMORY)
    check_files(reader)
    check_files(reader)
    check_files(client.reader(64 << 20))
    check_files(client.reader(LITTLE_MEMORY, prefer_entries=True))
    assert time.monotonic() - start_s < 20
    assert reader.stats()["damaged"] == 0


def read_into_a_mounts_buffers(client: Client) -> None:
    view = client.view
    reader = CoalescingReader(view, client.store)
    order = np.random.default_rng(1).permutation(view.files())
    reader.prefetch(np.array_split(order, 5))
    found: dict[int, dict[int, bytes]] = {}
    for unit in np.array_split(order, 5):
        for batch in reader.batches(unit):
            for entry, start, content in zip(
                batch.entries.tolist(), batch.starts.tolist(), batch.contents, strict=True
            ):
                found.setdefault(entry, {})[start] = bytes(content)
    whole = {
        view.path(entry).decode(): b"".join(pieces[at] for at in sorted(pieces))
        for entry, pieces in found.items()
    }
    assert whole == FILES
    assert reader.stats()["damaged"] == reader.stats()["lost"] == 0


@pytest.mark.parametrize("read", [read_files, read_into_a_mounts_buffers])
@pytest.mark.parametrize("kind", BEHAVIOURS)
def test_every_byte_is_right_and_no_read_fails(
    kind: str, read: Callable[[Client], None], client: Client, master: FakeMaster
) -> None:
    fields = dict(BEHAVIOURS[kind])
    if owner := fields.pop("owner", 0):
        assert isinstance(owner, int)
        master.set_owners(dict.fromkeys(master.chunks, owner))
    for name, value in fields.items():
        assert hasattr(master.behaviour, name), name
        setattr(master.behaviour, name, value)
    read(client)


def test_F9_without_a_master_the_store_serves(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "SLOW_READ_S", math.inf)
    client.check_parts(1)  # the first reads show that the store is fast
    client.inner.most = 0
    client.check_parts(1)
    assert client.inner.most == 1
    check_files(client.reader(LITTLE_MEMORY))
    with pytest.raises(ObjectMissing):
        client.inner.inner.read_into(client.name(0)[:-1] + "z", 0, bytearray(1))
    client.inner.fails = True
    with pytest.raises(ObjectStoreError, match="the store fails"):
        client.store.read_into(client.name(0), 0, bytearray(10))


@pytest.mark.parametrize("in_child", [False, True])
def test_chunks_of_no_node_are_read_at_once_from_the_store(client: Client, in_child: bool) -> None:
    """A forked child has none of its parent's threads."""
    client.inner.delay_s = 0.02
    client.check_parts(1)
    assert 8 < client.inner.most <= FETCH_THREADS
    client.inner.fails = True
    with pytest.raises(ObjectStoreError, match="the store fails"):
        client.check_parts(2)
    client.inner.fails = False

    def work() -> None:
        client.check_parts(3)
        client.store.close()

    if in_child:
        fork(work)()
    client.check_parts(4)


# Sources of bytes ---------------------------------------------------------------------------------


def test_many_parts_are_one_request_and_no_read_of_the_store(
    client: Client, master: FakeMaster
) -> None:
    client.check_parts(2)
    assert client.inner.reads == 0
    [body] = master.bodies(READ)
    assert [*struct.iter_unpack("<III", body)] == [part for part in client.parts(2, 200) if part[2]]


def test_no_whole_chunk_is_copied_into_private_memory(client: Client, master: FakeMaster) -> None:
    """The files are small, in random order, and of a dataset that does not fit."""
    view, reader = client.view, client.reader(100_000)
    small = view.lookup_many([name.encode() for name in FILES if name.startswith("n")])

    def read_few(seed: int) -> None:
        few = np.random.default_rng(seed).choice(small, 6, replace=False)
        for index, content in zip(few.tolist(), reader.read_many(few), strict=True):
            assert content == FILES[view.path(index).decode()]

    for seed in range(80):
        read_few(seed)
    stats = reader.stats()
    assert (stats["chunk_fetches"], client.inner.reads) == (0, 0)
    assert stats["memory_bytes"] <= int(view.chunk_sizes.sum()) // 32
    before = len(master.requests)
    fetches = reader.stats()["range_fetches"]
    for seed in range(100, 120):
        read_few(seed)
    assert reader.stats()["range_fetches"] == fetches, "all of it was in memory, and checked"
    assert master.kinds()[before:].count(READ) == 0


def test_large_parts_are_requested_alone(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "READ_BYTES", 10_000)
    master.behaviour.pins = False
    chunks, size = client.chunks, len(client.chunks[0])
    wanted = [(client.name(chunk), 0, 10 if chunk else size) for chunk in range(3)]
    found = list(map(bytes, client.store.fast_reads.read_parts(wanted)))
    assert found == [chunks[0], chunks[1][:10], chunks[2][:10]]
    assert [len(body) // 12 for body in master.bodies(READ)] == [1, 2]
    room = bytearray(size)
    client.store.read_into(client.name(0), 0, room)
    assert room == chunks[0]
    client.check_parts(4)


def test_other_objects_come_from_the_store(client: Client, master: FakeMaster) -> None:
    marker = bytes(client.inner.get(STORE_MARKER))
    first, second = client.name(0), client.name(1)
    wanted = [(first, 3, 10), (STORE_MARKER, 1, 9), (second, 0, 20), (STORE_MARKER, 0, 1)]
    found = list(map(bytes, client.store.fast_reads.read_parts(wanted)))
    assert found == [client.chunks[0][3:13], marker[1:10], client.chunks[1][:20], marker[:1]]
    assert master.kinds().count(READ) == 1


def test_a_version_may_have_no_chunks(repository: LocalRepository, client: Client) -> None:
    repository.begin("empty")
    store = TaskStore(client.inner, client.path, repository.view("empty"))
    assert list(map(bytes, store.fast_reads.read_parts([(STORE_MARKER, 0, 4)]))) == [
        bytes(client.inner.get(STORE_MARKER))[:4]
    ]
    store.close()


@pytest.mark.usefixtures("master")
@each_row(("start", "size"), [(-1, 5), (1 << 40, 5), (1, 0)])
def test_a_part_outside_its_chunk_is_an_error(client: Client, start: int, size: int) -> None:
    """The last case is one byte more than the chunk has."""
    name, size = client.name(0), size or len(client.chunks[0])
    with pytest.raises(DieselError):
        list(client.store.fast_reads.read_parts([(name, 0, 5), (name, start, size)]))


# Requests in flight -------------------------------------------------------------------------------


def test_parts_are_requested_before_the_first_one_is_consumed(
    client: Client, master: FakeMaster
) -> None:
    master.behaviour.pins = False
    found, right = client.begin(1)
    until(lambda: READ in master.kinds(), "a request")
    client.check_parts(2)  # on another connection
    assert list(map(bytes, found)) == right
    assert client.inner.reads == 0


def test_the_next_group_of_parts_is_requested_ahead(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BATCH_PARTS_MAX", 5)
    master.behaviour.pins = False
    view = client.view
    files = view.files()
    stored = view.columns.stored[files]
    files = files[(stored > 0) & (stored * 20 < view.chunk_sizes[view.chunk_of(files)])]
    _, first_of, count = np.unique(view.chunk_of(files), return_index=True, return_counts=True)
    alone = files[np.concatenate([first_of, first_of + count - 1])]  # too few to read chunks whole
    assert len(alone) > 10
    found = client.reader(400_000).read_many(alone)
    first = next(found)
    until(lambda: master.kinds().count(READ) >= 2, "the next request")
    time.sleep(0.05)
    assert master.kinds().count(READ) == 2, "one, and not more"
    names = [os.fsdecode(view.path(index)) for index in alone.tolist()]
    assert [bytes(first), *map(bytes, found)] == [FILES[name] for name in names]


def test_abandoned_reads_keep_their_connections_and_mix_no_answers(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "TIMEOUT_MIN_S", 1.0)  # on a busy machine the master is not late
    master.behaviour.pins = False
    for seed in range(30):
        found, _ = client.begin(seed, 5)
        if seed % 3:
            next(found, None)
        del found
        gc.collect()
        if seed % 4 == 0:
            client.check_parts(100 + seed, 5)
    client.check_parts(99, 5)
    assert client.inner.reads == 0
    assert master.kinds().count(HELLO) <= 2
    assert client.store.stats()["answers"]


@pytest.fixture
def quick_store(client: Client) -> Iterator[TaskStore]:
    made = TaskStore(client.inner, client.path, client.view, heartbeat_s=0.02)
    yield made
    made.close()


# Pinned chunks ------------------------------------------------------------------------------------


def test_a_pinned_chunk_is_unpinned_with_its_last_view(
    quick_store: TaskStore, client: Client, master: FakeMaster
) -> None:
    whole = quick_store.fast_reads.pin(client.name(2), lambda: None)
    assert whole is not None
    assert whole.is_shared
    inside = np.frombuffer(whole.content[100:300], np.uint8)
    del whole
    gc.collect()
    time.sleep(0.1)
    assert master.unpinned() == [], "it is kept for the next reader"
    master.behaviour.revoked = [2]
    time.sleep(0.2)
    assert master.unpinned() == [], "a view is still alive"
    assert bytes(inside) == client.chunks[2][100:300]
    master.behaviour.revoked = []
    del inside
    until(lambda: master.unpinned() == [2], "the chunk to be returned")


def test_a_reader_unpins_revoked_chunks(
    quick_store: TaskStore, master: FakeMaster, view: Snapshot
) -> None:
    reader = EntryReader(view, quick_store, 64 << 20)
    check_files(reader)
    pinned = set(master.pinned)
    assert pinned
    assert reader.stats()["chunk_fetches"] == 0
    gc.collect()
    master.behaviour.revoked = sorted(pinned)
    until(lambda: set(master.unpinned()) == pinned, "all to be unpinned")
    assert reader.stats()["memory_bytes"] < 64 << 10  # of decoded contents
    master.behaviour.revoked = []
    check_files(reader)


@pytest.mark.usefixtures("master")
def test_a_pinned_chunk_cannot_be_written_and_outlives_the_store(client: Client) -> None:
    mine = client.pin(0)
    assert mine is not None
    with pytest.raises(TypeError, match="read-only"):
        mine[:4] = b"mine"
    other = TaskStore(client.inner, client.path, client.view)
    theirs = other.fast_reads.pin(client.name(0), lambda: None)
    assert theirs is not None
    other.close()
    assert bytes(theirs.content) == bytes(mine) == client.chunks[0]


def test_F5_a_wrong_pinned_chunk_is_not_used(client: Client, master: FakeMaster) -> None:
    """Its preamble names the chunk; the master has verified the rest."""
    index = client.view.lookup(b"n007")
    [extent] = client.view.extents(index)
    other = next(each for each in client.chunks if each != extent.chunk)

    def exchange(chunk: int, content: bytearray) -> None:
        if chunk == extent.chunk:
            content[:100] = client.chunks[other][:100]

    master.behaviour.change_pinned = exchange
    assert client.pin(extent.chunk) is None
    assert client.reader(64 << 20).read(index) == FILES["n007"]
    assert client.inner.reads == 0, "the master has sent it over a connection"
    master.behaviour.change_pinned = lambda chunk, content: None
    whole = client.pin(extent.chunk)
    assert whole is not None
    assert bytes(whole) == client.chunks[extent.chunk]


def test_F5_damaged_parts_are_read_again_and_reported(client: Client, master: FakeMaster) -> None:
    index = client.view.lookup(b"n007")
    [extent] = client.view.extents(index)
    master.behaviour.pins, master.behaviour.change = False, flip
    reader = client.reader(LITTLE_MEMORY, prefer_entries=True)
    assert reader.read(index) == FILES["n007"]
    assert reader.stats()["healed"] == client.inner.reads == 1
    part = struct.pack("<IIIH", extent.chunk, extent.offset, extent.stored, RANK)
    assert master.bodies(DAMAGED) == [part]
    assert bytes(next(reader.read_many([index]))) == FILES["n007"]
    assert reader.stats()["healed"] == 2
    assert master.bodies(DAMAGED) == [part] * 2


def _another(size: int) -> int:
    file = os.memfd_create("x")
    os.ftruncate(file, size)
    return file


def test_a_chunk_that_was_pinned_in_two_memories_is_unpinned_twice() -> None:
    table = MappedChunks(64)
    one, other = _another(5000), _another(5000)
    first = table.keep(3, one, 5000)
    assert table.keep(3, one, 5000) == first
    assert table.take_unmapped() == []
    table.release([3])
    second = table.keep(3, other, 5000)
    del first
    gc.collect()
    assert table.take_unmapped() == [3]
    table.release([3])
    assert table.take_unmapped() == []
    del second
    gc.collect()
    assert table.take_unmapped() == [3]
    for file in (one, other):
        os.close(file)


def test_a_mapped_chunk_keeps_no_descriptor(client: Client, master: FakeMaster) -> None:
    def opened() -> list[str]:
        files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [file for file in files if os.path.islink(file) and "pinned" in os.readlink(file)]

    before = set(opened())  # of other tests in this process
    for chunk in client.chunks:
        assert client.pin(chunk) is not None
    # The master is in this process, too
    until(lambda: set(opened()) <= before, "all descriptors to be closed")


# Masters that fail --------------------------------------------------------------------------------


def test_F2_many_threads_wait_for_a_master_that_hangs_once(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.check_parts(1)
    master.behaviour.pins, master.behaviour.hangs = False, 5.0
    monkeypatch.setattr(task_chunks, "PIN_COST_S", 1e9)  # pinning does not pay

    def read_times_s() -> list[float]:
        took: list[float] = []

        def read(seed: int) -> None:
            start_s = time.monotonic()
            client.check_parts(seed)
            took.append(time.monotonic() - start_s)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(10)
        assert len(took) == 8
        return sorted(took)

    assert read_times_s()[-1] < 2.5 * READ_S
    link = client.store._chunks._own_link(wire.LOAD)
    until(lambda: link._breaker.state(time.monotonic()) is BreakerState.HALF_OPEN, "its pause")
    *others, longest_s = read_times_s()
    assert others[-1] < READ_S * 0.9
    assert longest_s > READ_S * 0.9, "the first pause is over: together they had failed once"


def is_used(client: Client, master: FakeMaster, since: int = 0) -> bool:
    client.check_parts(3)
    return READ in master.kinds()[since:]


def test_F1_a_master_that_dies_and_comes_back(client: Client) -> None:
    with FakeMaster(client.path, client.chunks):
        whole = client.pin(1)
        client.check_parts(1)
    assert client.inner.reads == 0
    client.check_parts(2)
    assert client.inner.reads > 0
    assert whole is not None
    assert bytes(whole) == client.chunks[1], "a pinned chunk outlives its master"
    with FakeMaster(client.path, client.chunks) as back:
        until(lambda: is_used(client, back), "the master to be used")
        del whole
        gc.collect()
        client.store._mapped.release_all()
        client.store._link.return_unmapped()
        unpinned = back.unpinned()
        pinned = {chunk for body in back.bodies(PIN) for chunk in struct.unpack("<I", body)}
        assert set(unpinned) <= pinned, "others are chunks of the old master"
        assert len(unpinned) == len({*unpinned})


def test_F1_a_failed_restart_is_repeated(
    path: Path, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    tries: list[str] = []

    def revive(_: bool) -> bool:
        tries.append("a try")
        if len(tries) < 3:
            raise MetadataError("no Redis here")
        return False

    mapped = MappedChunks(view.chunk_count)
    link = MasterLink(path, view.identity, view.version, mapped, pause_s=0.02, restart=revive)
    until(lambda: link.connect() or len(tries) >= 3, "the last try")
    with FakeMaster(path, chunks):
        until(link.connect, "the master to be used")
    link.close()


def test_a_master_that_rejects_reads_still_gets_unpins(client: Client, master: FakeMaster) -> None:
    client.check_parts(1)
    whole = client.pin(1)
    master.behaviour.refuses = "the task reads another version"
    client.check_parts(2)
    before = len(master.requests)
    client.check_parts(3)
    client.check_parts(4)
    assert len(master.requests) == before
    del whole
    master.behaviour.refuses = ""
    client.store._mapped.release_all()
    gc.collect()
    client.store._link.return_unmapped()
    assert struct.pack("<I", 1) in master.bodies(UNPIN)
    until(lambda: is_used(client, master, before), "the master to be used again")


# Forked children, other versions ------------------------------------------------------------------


def test_a_forked_child_uses_connections_of_its_own(client: Client, master: FakeMaster) -> None:
    whole = client.pin(1)
    assert whole is not None
    client.check_parts(1)
    hellos = master.kinds().count(HELLO)

    def work() -> None:
        nonlocal whole
        assert bytes(whole or b"") == client.chunks[1]
        room = memoryview(bytearray(10))
        assert client.store.fast_reads.read_nowait(client.name(1), 5, room)
        client.check_parts(2)
        client.store.close()
        whole = None
        gc.collect()

    fork(work)()
    assert master.kinds().count(HELLO) == hellos + 2, "one for control, one for data"
    assert 1 not in master.unpinned(), "it is the parent's to return"
    client.check_parts(3)
    assert master.kinds().count(HELLO) == hellos + 2
    assert bytes(whole) == client.chunks[1]


def test_another_version_is_read_through_the_master(client: Client, master: FakeMaster) -> None:
    client.check_parts(1)
    first, client.store = client.store, client.store.at_version(client.view)
    [body] = master.bodies(SWITCH_VERSION)
    assert struct.unpack("<Q", body) == (client.view.version,)
    client.check_parts(2)
    client.store.close()
    client.store = first
    client.check_parts(3)
    assert client.inner.reads == 0


def test_statistics_are_the_masters_and_the_readers(client: Client, master: FakeMaster) -> None:
    """So is the one for which a chunk is mapped."""
    master.behaviour.has = lambda chunk: chunk != 2
    for chunk in [1] * 20 + [2] * 20:
        client.read_one(chunk)
    assert 1 in master.pinned
    figures, counts = client.store.stats(), client.counts()
    assert (figures["rank"], figures["answers"]) == (3, True)
    assert counts["mapped_reads"] + counts["local_reads"] == counts["store_reads"] == 20
    assert STATS in master.kinds()
    master.behaviour.refuses = "no"
    assert client.store.stats()["answers"] is False
