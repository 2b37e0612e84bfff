"""`TaskStore` reads chunks through a master; whatever the master does, no read fails."""

import gc
import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.coalescing_reader import FETCH_THREADS, CoalescingReader
from diesel_fs.cache.reader import EntryReader
from diesel_fs.errors import MetadataError, ObjectMissing, ObjectStoreError
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.net.breaker import FAILURES_MAX, TIMEOUT_MAX_S, BreakerState
from diesel_fs.peers import client as client_module
from diesel_fs.peers import task_chunks, wire
from diesel_fs.peers.client import TaskStore
from diesel_fs.peers.link import MasterLink
from diesel_fs.peers.mapped_chunks import MappedChunks
from diesel_fs.repository.local import LocalRepository

from ..server.program import until
from .conftest import FILES, LITTLE_MEMORY, Counting
from .fake_master import (
    DAMAGED,
    HELLO,
    PIN,
    RANK,
    READ,
    STATS,
    SWITCH_VERSION,
    UNPIN,
    Behaviour,
    FakeMaster,
)

READ_S = TIMEOUT_MAX_S
"""How long a reader waits for an answer of a master of which it does not know how fast it is."""


def name_of(view: Snapshot, chunk: int) -> str:
    return chunk_object(view.identity, view.chunk_ids[chunk])


def some_parts(view: Snapshot, seed: int, count: int) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(seed)
    found = []
    for chunk in random.integers(0, view.chunk_count, count).tolist():
        size = int(view.chunk_sizes[chunk])
        start = int(random.integers(0, size))
        found.append((chunk, start, int(random.integers(0, min(size - start, 5000) + 1))))
    return found


def check_parts(store: TaskStore, view: Snapshot, chunks: dict[int, bytes], seed: int) -> None:
    parts = some_parts(view, seed, 200)
    wanted = [(name_of(view, chunk), start, size) for chunk, start, size in parts]
    found = list(store.read_parts(wanted))
    assert all(each.readonly for each in found)
    right = [chunks[chunk][start : start + size] for chunk, start, size in parts]
    assert list(map(bytes, found)) == right


def check_files(reader: EntryReader) -> None:
    names = list(FILES)
    indices = reader.snapshot.lookup_many([name.encode() for name in names])
    for name, content in zip(names, reader.read_many(indices), strict=True):
        assert content == FILES[name], name
    for name, index in zip(names[::7], indices[::7].tolist(), strict=True):
        assert reader.read(index) == FILES[name], name


# Whatever a master does, bytes are right ----------------------------------------------------------


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
    "F5 other chunks, pinned": {
        "change_pinned": lambda chunk, content: flip(chunk, 0, content),
    },
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
"""Fields of `Behaviour`, by what the master does wrong."""


def behave(master: FakeMaster, kind: str) -> None:
    for name, value in BEHAVIOURS[kind].items():
        if name == "owner":
            assert isinstance(value, int)
            master.set_owners(dict.fromkeys(master.chunks, value))
            continue
        assert hasattr(master.behaviour, name), name
        setattr(master.behaviour, name, value)


@pytest.mark.parametrize("kind", BEHAVIOURS)
def test_every_byte_is_right_and_no_read_fails(
    kind: str, store: TaskStore, master: FakeMaster, view: Snapshot
) -> None:
    behave(master, kind)
    start_s = time.monotonic()
    reader = EntryReader(view, store, LITTLE_MEMORY)
    check_files(reader)
    check_files(reader)
    check_files(EntryReader(view, store, 64 << 20))
    check_files(EntryReader(view, store, LITTLE_MEMORY, prefer_entries=True))
    assert time.monotonic() - start_s < 20
    assert reader.stats()["damaged"] == 0


@pytest.mark.parametrize("kind", BEHAVIOURS)
def test_reads_into_a_mounts_buffers_get_every_byte(
    kind: str, store: TaskStore, master: FakeMaster, view: Snapshot
) -> None:
    behave(master, kind)
    reader = CoalescingReader(view, store)
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


def test_F9_without_a_master_all_bytes_come_from_the_store(
    store: TaskStore, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    check_parts(store, view, chunks, 1)
    check_files(EntryReader(view, store, LITTLE_MEMORY))


def test_errors_of_the_store_are_raised(store: TaskStore, inner: Counting, view: Snapshot) -> None:
    inner.fails = True
    with pytest.raises(ObjectStoreError, match="the store fails"):
        store.read_into(name_of(view, 0), 0, bytearray(10))
    with pytest.raises(ObjectMissing):
        store.inner.inner.read_into(name_of(view, 0)[:-1] + "z", 0, bytearray(1))  # type: ignore[attr-defined]  # wrapped


@pytest.mark.parametrize("in_child", [False, True])
def test_what_no_node_has_is_read_at_once_from_a_slow_store(
    store: TaskStore, inner: Counting, view: Snapshot, chunks: dict[int, bytes], in_child: bool
) -> None:
    """Also by a forked child, which has none of its parent's threads."""
    inner.delay_s = 0.02
    check_parts(store, view, chunks, 1)
    assert 8 < inner.most <= FETCH_THREADS
    inner.fails = True
    with pytest.raises(ObjectStoreError, match="the store fails"):
        check_parts(store, view, chunks, 2)
    inner.fails = False
    if in_child:
        child = os.fork()
        if not child:
            code = 1
            try:
                check_parts(store, view, chunks, 3)
                store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_parts(store, view, chunks, 4)


def test_what_no_node_has_is_read_one_by_one_from_a_fast_store(
    store: TaskStore, inner: Counting, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    check_parts(store, view, chunks, 1)
    assert inner.most == 1


# Where bytes come from ----------------------------------------------------------------------------


def test_many_parts_are_one_request_and_nothing_is_read_from_the_store(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    check_parts(store, view, chunks, 2)
    assert master.kinds().count(READ) == 1
    assert inner.reads == 0
    parts = [part for part in some_parts(view, 2, 200) if part[2]]
    assert list(struct.iter_unpack("<III", master.bodies(READ)[0])) == parts


def test_a_chunk_that_is_read_often_is_mapped_and_then_costs_no_request(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    room = memoryview(bytearray(100))
    for _ in range(20):
        store.read_into(name_of(view, 1), 500, room)
        assert room == chunks[1][500:600]
    assert master.pinned == [1]
    assert master.kinds().count(READ) <= 2
    assert store.read_nowait(name_of(view, 1), 7, room)
    assert room == chunks[1][7:107]
    [slice_] = store.read_parts([(name_of(view, 1), 9, 50)])
    assert slice_.nbytes == 50
    assert len(slice_.obj) == len(chunks[1]), "nothing was copied"  # type: ignore[arg-type]  # an array
    assert inner.reads == 0


def test_no_whole_chunk_is_copied_into_private_memory(
    store: TaskStore, master: FakeMaster, view: Snapshot, inner: Counting
) -> None:
    """Small files in random order, of a dataset that does not fit: the reader gets slices of shared
    memory."""
    reader = EntryReader(view, store, 100_000)
    small = view.lookup_many([name.encode() for name in FILES if name.startswith("n")])

    def read_few(seed: int) -> None:
        """Less than would make reading whole chunks worth it."""
        few = np.random.default_rng(seed).choice(small, 6, replace=False)
        for index, content in zip(few.tolist(), reader.read_many(few), strict=True):
            assert content == FILES[view.path(index).decode()]

    for seed in range(80):
        read_few(seed)
    stats = reader.stats()
    assert (stats["chunk_fetches"], inner.reads) == (0, 0)
    assert stats["memory_bytes"] <= int(view.chunk_sizes.sum()) // 32
    before = len(master.requests)
    fetches = reader.stats()["range_fetches"]
    for seed in range(100, 120):
        read_few(seed)
    assert reader.stats()["range_fetches"] == fetches, "all of it was at hand, and checked"
    assert master.kinds()[before:].count(READ) == 0


def test_large_parts_are_requested_alone(
    store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(client_module, "READ_BYTES", 10_000)
    master.behaviour.pins = False
    size = len(chunks[0])
    wanted = [(name_of(view, 0), 0, size), (name_of(view, 1), 0, 10), (name_of(view, 2), 0, 10)]
    assert list(map(bytes, store.read_parts(wanted))) == [
        chunks[0], chunks[1][:10], chunks[2][:10]
    ]  # fmt: skip
    assert [len(body) // 12 for body in master.bodies(READ)] == [1, 2]
    room = bytearray(size)
    store.read_into(name_of(view, 0), 0, room)
    assert room == chunks[0]
    check_parts(store, view, chunks, 4)


# Pinned chunks ------------------------------------------------------------------------------------


def test_a_pinned_chunk_is_unpinned_with_its_last_view(
    quick_store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    """Never before: a view that was given out keeps its bytes."""
    whole = quick_store.pin(name_of(view, 2), lambda: None)
    assert whole is not None
    inside = np.frombuffer(whole[100:300], np.uint8)
    del whole
    gc.collect()
    time.sleep(0.1)
    assert not any(master.bodies(UNPIN)), "it is kept for who comes next"
    master.behaviour.revoked = [2]
    time.sleep(0.2)
    assert not any(master.bodies(UNPIN)), "somebody still looks at it"
    assert bytes(inside) == chunks[2][100:300]
    master.behaviour.revoked = []
    del inside
    until(lambda: struct.pack("<I", 2) in master.bodies(UNPIN), "the chunk to be returned")
    assert master.bodies(UNPIN).count(struct.pack("<I", 2)) == 1


def test_a_reader_unpins_revoked_chunks(
    quick_store: TaskStore, master: FakeMaster, view: Snapshot
) -> None:
    reader = EntryReader(view, quick_store, 64 << 20)
    check_files(reader)
    pinned = sorted(set(master.pinned))
    assert pinned
    assert reader.stats()["chunk_fetches"] == 0
    gc.collect()
    master.behaviour.revoked = pinned

    def returned() -> set[int]:
        return {each for body in master.bodies(UNPIN) for (each,) in struct.iter_unpack("<I", body)}

    until(lambda: returned() == set(pinned), "all to be unpinned")
    assert reader.stats()["memory_bytes"] < 64 << 10  # what was decoded out of them
    master.behaviour.revoked = []
    check_files(reader)


def test_a_pinned_chunk_cannot_be_written_and_outlives_the_store(
    store: TaskStore, inner: Counting, master: FakeMaster, view: Snapshot, path: Path,
    chunks: dict[int, bytes],
) -> None:  # fmt: skip
    mine = store.pin(name_of(view, 0), lambda: None)
    assert mine is not None
    with pytest.raises(TypeError, match="read-only"):
        mine[:4] = b"mine"
    other = TaskStore(inner, path, view)
    theirs = other.pin(name_of(view, 0), lambda: None)
    assert theirs is not None
    other.close()
    assert bytes(theirs) == bytes(mine) == chunks[0]


def test_F5_a_pinned_chunk_that_is_another_one_is_not_used(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    """Its preamble says which chunk it is; the master has verified the rest."""
    index = view.lookup(b"n007")
    [extent] = view.extents(index)
    others = [each for each in chunks if each != extent.chunk]

    def exchange(chunk: int, content: bytearray) -> None:
        if chunk == extent.chunk:
            content[:100] = chunks[others[0]][:100]

    master.behaviour.change_pinned = exchange
    assert store.pin(name_of(view, extent.chunk), lambda: None) is None
    assert EntryReader(view, store, 64 << 20).read(index) == FILES["n007"]
    assert inner.reads == 0, "the master has sent it over a connection"
    master.behaviour.change_pinned = lambda chunk, content: None
    whole = store.pin(name_of(view, extent.chunk), lambda: None)
    assert whole is not None
    assert bytes(whole) == chunks[extent.chunk]


def test_F5_damaged_parts_are_read_from_the_store_and_reported(
    store: TaskStore, master: FakeMaster, inner: Counting, view: Snapshot
) -> None:
    index = view.lookup(b"n007")
    [extent] = view.extents(index)
    master.behaviour.pins, master.behaviour.change = False, flip
    reader = EntryReader(view, store, LITTLE_MEMORY, prefer_entries=True)
    assert reader.read(index) == FILES["n007"]
    assert reader.stats()["healed"] == inner.reads == 1
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


def test_a_mapped_chunk_keeps_no_descriptor(
    store: TaskStore, master: FakeMaster, view: Snapshot
) -> None:
    def opened() -> list[str]:
        files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [file for file in files if os.path.islink(file) and "pinned" in os.readlink(file)]

    before = set(opened())  # of other tests in this process
    for chunk in range(view.chunk_count):
        assert store.pin(name_of(view, chunk), lambda: None) is not None
    # The master is in this process, too
    until(lambda: set(opened()) <= before, "all descriptors to be closed")


# A master that is gone, or hangs ------------------------------------------------------------------


def test_F2_a_master_that_hangs_is_not_asked_for_a_while_and_then_used_again(
    store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    check_parts(store, view, chunks, 1)
    master.behaviour.pins, master.behaviour.hangs = False, 4.0
    monkeypatch.setattr(task_chunks, "PIN_COST_S", 1e9)  # nothing is worth pinning
    start_s = time.monotonic()
    for seed in range(5, 10):
        check_parts(store, view, chunks, seed)
    assert READ_S * 0.9 < time.monotonic() - start_s < FAILURES_MAX * READ_S + 2
    said = len(master.requests)
    start_s = time.monotonic()
    check_parts(store, view, chunks, 6)
    assert time.monotonic() - start_s < READ_S * 0.9
    assert len(master.requests) <= said + 1, "only what it had not received yet"
    master.behaviour.hangs = 0.0

    def asked() -> bool:
        check_parts(store, view, chunks, 10)
        return master.kinds().count(READ) > FAILURES_MAX + 2

    until(asked, "the master to be asked again")


def test_many_threads_wait_for_a_master_that_hangs_once(
    store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After the pause one thread asks again, and the others do not wait for it."""
    check_parts(store, view, chunks, 1)
    master.behaviour.pins, master.behaviour.hangs = False, 5.0
    monkeypatch.setattr(task_chunks, "PIN_COST_S", 1e9)  # nothing is worth pinning

    def read_times_s() -> list[float]:
        """How long each of 8 threads took for a read, ordered."""
        took: list[float] = []

        def read(seed: int) -> None:
            start_s = time.monotonic()
            check_parts(store, view, chunks, seed)
            took.append(time.monotonic() - start_s)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(10)
        assert len(took) == 8
        return sorted(took)

    assert read_times_s()[-1] < 2.5 * READ_S
    link = store._chunks._own_link(wire.LOAD)
    until(lambda: link._breaker.state(time.monotonic()) is BreakerState.HALF_OPEN, "its pause")
    *others, longest_s = read_times_s()
    assert others[-1] < READ_S * 0.9
    assert longest_s > READ_S * 0.9, "the first pause is over: together they had failed once"


def test_F1_a_master_that_dies_and_comes_back(
    path: Path, store: TaskStore, view: Snapshot, chunks: dict[int, bytes], inner: Counting
) -> None:
    with FakeMaster(path, chunks, Behaviour()):
        whole = store.pin(name_of(view, 1), lambda: None)
        check_parts(store, view, chunks, 1)
    assert inner.reads == 0
    check_parts(store, view, chunks, 2)
    assert inner.reads > 0
    assert whole is not None
    assert bytes(whole) == chunks[1], "a pinned chunk outlives its master"
    with FakeMaster(path, chunks, Behaviour()) as back:
        until(lambda: _is_used(store, view, chunks, back), "the master to be used")
        del whole
        gc.collect()
        store._mapped.release_all()
        store._link.return_unmapped()
        pinned, unpinned = (
            [*struct.iter_unpack("<I", b"".join(back.bodies(kind)))] for kind in (PIN, UNPIN)
        )
        assert set(unpinned) <= set(pinned), "others are chunks of the old master"
        assert len(unpinned) == len({*unpinned})


def test_F1_a_failed_restart_of_a_master_is_tried_again(
    path: Path, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    """A failed start leaves nothing behind, no socket either."""
    tries: list[str] = []

    def revive(_: bool) -> bool:
        tries.append("a try")
        if len(tries) < 3:
            raise MetadataError("no Redis here")
        return False

    link = MasterLink(
        path,
        view.identity,
        view.version,
        MappedChunks(view.chunk_count),
        pause_s=0.02,
        restart=revive,
    )
    until(lambda: link.connect() or len(tries) >= 3, "the last try")
    with FakeMaster(path, chunks, Behaviour()):
        until(link.connect, "the master to be used")
    link.close()


def _is_used(store: TaskStore, view: Snapshot, chunks: dict[int, bytes], back: FakeMaster) -> bool:
    check_parts(store, view, chunks, 3)
    return READ in back.kinds()


def test_a_master_that_rejects_reads_is_paused_and_still_receives_unpins(
    store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    """During the pause, unpinned chunks are still reported."""
    check_parts(store, view, chunks, 1)
    whole = store.pin(name_of(view, 1), lambda: None)
    master.behaviour.refuses = "the task reads another version"
    check_parts(store, view, chunks, 2)
    said = len(master.requests)
    check_parts(store, view, chunks, 3)
    check_parts(store, view, chunks, 4)
    assert len(master.requests) == said
    del whole
    master.behaviour.refuses = ""
    store._mapped.release_all()
    gc.collect()
    store._link.return_unmapped()
    assert struct.pack("<I", 1) in master.bodies(UNPIN)

    def asked() -> bool:
        check_parts(store, view, chunks, 5)
        return READ in master.kinds()[said:]

    until(asked, "the master to be asked again")


# Forked children, other versions ------------------------------------------------------------------


def test_a_forked_child_uses_connections_of_its_own(
    store: TaskStore, master: FakeMaster, view: Snapshot, chunks: dict[int, bytes]
) -> None:
    whole = store.pin(name_of(view, 1), lambda: None)
    assert whole is not None
    check_parts(store, view, chunks, 1)
    hellos = master.kinds().count(HELLO)
    child = os.fork()
    if not child:
        code = 1
        try:
            assert bytes(whole) == chunks[1]
            room = memoryview(bytearray(10))
            assert store.read_nowait(name_of(view, 1), 5, room)
            check_parts(store, view, chunks, 2)
            store.close()
            del whole
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert master.kinds().count(HELLO) == hellos + 2, "one for control, one for data"
    unpinned = {each for body in master.bodies(UNPIN) for each in struct.iter_unpack("<I", body)}
    assert (1,) not in unpinned, "it is the parent's to return"
    check_parts(store, view, chunks, 3)
    assert master.kinds().count(HELLO) == hellos + 2
    assert bytes(whole) == chunks[1]


def test_another_version_is_announced_and_read_through_the_same_master(
    repository: LocalRepository,
    store: TaskStore,
    master: FakeMaster,
    view: Snapshot,
    inner: Counting,
    chunks: dict[int, bytes],
) -> None:
    check_parts(store, view, chunks, 1)
    later = store.at_version(view)
    try:
        [body] = master.bodies(SWITCH_VERSION)
        assert struct.unpack("<Q", body) == (view.version,)
        check_parts(later, view, chunks, 2)
    finally:
        later.close()
    check_parts(store, view, chunks, 3)
    assert inner.reads == 0


def test_statistics_are_the_masters_and_the_readers(store: TaskStore, master: FakeMaster) -> None:
    told = store.stats()
    assert (told["rank"], told["answers"]) == (3, True)
    assert isinstance(told["client"], dict)
    assert STATS in master.kinds()
    master.behaviour.refuses = "no"
    assert store.stats()["answers"] is False


def test_each_read_is_counted_once_by_its_source(
    store: TaskStore, master: FakeMaster, view: Snapshot
) -> None:
    """Also the read for which a chunk is mapped."""
    master.behaviour.has = lambda chunk: chunk != 2
    room = memoryview(bytearray(100))
    for chunk in (1, 2):
        for _ in range(20):
            store.read_into(name_of(view, chunk), 500, room)
    assert 1 in master.pinned
    counts = store.stats()["client"]
    assert isinstance(counts, dict)
    assert counts["mapped_reads"] + counts["local_reads"] == counts["store_reads"] == 20
