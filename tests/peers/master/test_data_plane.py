"""The data plane on real sockets: answers from memory, requests that it leaves to the control
plane, its limits, and the ends of connections. Also its table of chunks, and random requests
against a plain list of bytes; these are packed and parsed independently, from PEERS.md."""

import random
import socket
import ssl
import struct
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.peers import wire
from diesel_fs.peers.master import data_plane
from diesel_fs.peers.node.chunk_table import ChunkTable
from diesel_fs.peers.wire import ABSENT, FAILED, GIVEN, LOAD, THROUGH
from tests.examples import examples
from tests.rows import each_row

from ...waiting import wait_until
from ..connected_masters import SIZES, SMALL, content, read_request, whole
from ..planes import HOPE_S, KINDS, Plane, answer, exactly, is_closed, running_plane


def check_served(plane: Plane) -> None:
    end = plane.connect(rank=99)
    end.sendall(read_request(1, SMALL))
    assert answer(end).payload == content(*SMALL)
    end.close()


# answers from memory


@each_row("kind", KINDS)
@each_row(
    "records",
    [[SMALL], [(0, 5, 0)], [(3, 1, 40_000_000)], [(2, i * 5000, 4096 + i) for i in range(128)],
     [(1, 0, 0), SMALL, (1, 299_999, 1)], [(1, i * 100, 1 + i % 90) for i in range(2500)],
     [(0, i, 3) for i in range(wire.PARTS_MAX)], [(2, 0, 6 << 20)] * 5],
    ids=["one part", "no bytes", "40 MB", "128 parts", "some empty", "2500 parts", "most parts",
         "30 MiB"],
)  # fmt: skip
def test_parts_in_memory_come_in_order(kind: str, records: list[tuple[int, int, int]]) -> None:
    with running_plane() as plane:
        end = plane.connect_as(kind)
        for number in (7, 0xFFFFFFFF):
            end.sendall(read_request(number, *records))
            found = answer(end)
            assert found[:3] == (number, wire.READ, bytes(len(records)))
            assert found.payload == b"".join(content(*record) for record in records)
        stats = plane.data.stats()
        assert stats["requests"] == stats["inline"] == 2
        assert stats["parts"] == 2 * len(records)
        assert stats["bytes"] == 2 * sum(size for _, _, size in records)


def send_all(
    end: socket.socket, stream: bytes, before: threading.Thread | None = None
) -> threading.Thread | None:
    """Send in a thread, behind the bytes of the thread `before`. With TLS, whose sockets are for
    one thread, send at once: the kernel has room for the answers."""

    def send() -> None:
        if before is not None:
            before.join()
        end.sendall(stream)

    if isinstance(end, ssl.SSLSocket):
        send()
        return None
    sender = threading.Thread(target=send)
    sender.start()
    return sender


@each_row("kind", KINDS)
def test_requests_beyond_a_turn_are_answered_in_their_order(kind: str) -> None:
    with running_plane() as plane:
        end = plane.connect_as(kind)
        chance = random.Random(1)
        for _ in range(5):
            wanted = [
                [(0, chance.randrange(1 << 19), chance.randrange(20))] * (1 + (i % 50 == 0) * 9)
                for i in range(3000)
            ]
            sender = send_all(
                end, b"".join(read_request(i, *each) for i, each in enumerate(wanted))
            )
            for number, records in enumerate(wanted):
                found = answer(end)
                assert found.id == number
                assert found.payload == b"".join(content(*record) for record in records)
            if sender is not None:
                sender.join()
        assert plane.data.stats()["requests"] == 5 * len(wanted)


@each_row("kind", KINDS)
def test_S12_endless_requests_of_one_connection_do_not_delay_others(kind: str) -> None:
    """The master receives no more requests than it can answer soon."""
    count = 3000
    stream = b"".join(read_request(i, (0, i, 4)) for i in range(count))

    def ask() -> None:
        sender = send_all(end, stream)
        while not is_over.is_set():
            sender = send_all(end, stream, before=sender)
            exactly(end, count * (wire.SINGLE_ANSWER.size + 4))
        exactly(end, count * (wire.SINGLE_ANSWER.size + 4))

    with running_plane() as plane:
        end = plane.connect_as(kind)
        is_over = threading.Event()
        greedy = threading.Thread(target=ask)
        greedy.start()
        other, took = plane.connect(rank=1), []
        for _ in range(50):
            before = time.perf_counter()
            other.sendall(read_request(1, SMALL))
            answer(other)
            took.append(time.perf_counter() - before)
            for each in list(plane.data._connections.values()):
                assert len(each.held) <= 2 * data_plane._BUFFER_BYTES
            assert len(plane.data._ready) <= 1
        is_over.set()
        greedy.join()
        assert sorted(took)[45] < 0.3


def test_an_answer_leaves_as_fast_as_its_reader_takes_it(plane: Plane) -> None:
    end = plane.connect(send_buffer=50_000)
    records = [(2, i * 11_000, 10_000) for i in range(100)]
    for number in range(3):
        end.sendall(read_request(number, *records))
    assert end.recv(1, socket.MSG_PEEK)
    other = plane.connect(rank=1)
    other.sendall(read_request(1, SMALL))
    assert answer(other).payload == content(*SMALL), "others are served meanwhile"
    for number in range(3):
        head = wire.parse_answer(exactly(end, wire.HEAD_BYTES))
        assert head == (number, wire.READ, 100, 1_000_000)
        assert exactly(end, 100) == bytes(100)
        found = bytearray()
        while len(found) < head.payload_bytes:
            found += end.recv(min(7001, head.payload_bytes - len(found)))
        assert found == b"".join(content(*record) for record in records)


def test_reads_are_recorded_for_the_eviction_policy(plane: Plane) -> None:
    end = plane.connect()
    for is_recorded in (False, True):
        plane.table.records_reads = is_recorded
        for records in ([SMALL], [(1, 0, 5), (2, 0, 6), (1, 9, 7)]):
            end.sendall(read_request(1, *records))
            answer(end)
        found = [(list(chunks), size) for chunks, size in plane.table.take_reads()]
        assert found == ([([0], 4096), ([1, 2, 1], 18)] if is_recorded else [])


# requests for the control plane


@each_row("kind", KINDS)
def test_absent_chunks_are_left_to_the_control_plane_and_answered_in_any_order(kind: str) -> None:
    with running_plane() as plane:
        end = plane.connect_as(kind)
        del plane.table.views[1]
        end.sendall(read_request(1, (1, 0, 10)))
        end.sendall(read_request(2, SMALL, (1, 20, 30), flags=LOAD))
        end.sendall(read_request(3, SMALL))
        assert answer(end).id == 3, "parts in memory do not wait"
        first, second = plane.next_forwarded(), plane.next_forwarded()
        assert (first.id, first.flags, first.size) == (1, 0, 10)
        assert (second.id, second.flags, second.size) == (2, LOAD, 4126)
        assert second.parts.tolist() == [list(SMALL), [1, 20, 30]]
        assert plane.data.stats()["in_flight"] == 2
        working = wire.answer_head(2, wire.WORKING, b"", 0)
        plane.data.send(second.connection, [working], len(working))
        assert answer(end) == (2, wire.WORKING, b"", b"")
        plane.answer(second, bytes([GIVEN, ABSENT]), content(*SMALL))
        assert answer(end) == (2, wire.READ, bytes([GIVEN, ABSENT]), content(*SMALL))
        plane.answer(first, bytes([FAILED]), b"")
        assert answer(end) == (1, wire.READ, bytes([FAILED]), b"")
        assert plane.data.stats()["in_flight"] == 0
        assert plane.data.stats()["inline"] == 1


@each_row(
    ("count", "record", "in_flight"),
    [(200, SMALL, wire.REQUESTS_MAX), (6, (3, 0, 30 << 20), 3)],
    ids=["64 requests", "64 MiB"],
)
@each_row("kind", KINDS)
def test_the_bytes_in_flight_of_a_connection_are_limited(
    kind: str, count: int, record: tuple[int, int, int], in_flight: int
) -> None:
    with running_plane() as plane:
        end = plane.connect_as(kind)
        del plane.table.views[record[0]]
        end.sendall(b"".join(read_request(number, record) for number in range(count)))
        waiting = [plane.next_forwarded() for _ in range(in_flight)]
        end.sendall(b"".join(read_request(number, record) for number in range(count, 2 * count)))
        time.sleep(0.1)
        before_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before_s < 0.2
        assert plane.forwarded.empty()
        other = plane.connect(rank=1)
        other.sendall(read_request(1, (1, 0, 9)))
        assert answer(other).payload == content(1, 0, 9)
        for number in range(2 * count):
            each = waiting.pop(0)
            assert each.id == number
            plane.answer(each, bytes([ABSENT]), b"")
            assert answer(end)[:3] == (number, wire.READ, bytes([ABSENT]))
            if number + in_flight < 2 * count:
                waiting.append(plane.next_forwarded())
        assert plane.forwarded.empty()


def test_F15_nothing_is_left_of_the_requests_of_a_closed_connection(plane: Plane) -> None:
    end = plane.connect()
    del plane.table.views[1]
    for number in range(10):
        end.sendall(read_request(number, (1, 0, 10)))
    waiting = [plane.next_forwarded() for _ in range(10)]
    end.close()
    wait_until(lambda: not plane.data.stats()["connections"], HOPE_S)
    for each in waiting:
        plane.answer(each, bytes([GIVEN]), content(1, 0, 10))
    wait_until(lambda: not waiting[0].connection.in_flight, HOPE_S)
    assert not waiting[0].connection.unsent
    check_served(plane)


def test_only_local_clients_may_make_the_master_ask_other_nodes(plane: Plane) -> None:
    local, remote = plane.connect(is_local=True), plane.connect()
    del plane.table.views[1]
    local.sendall(read_request(1, SMALL, flags=LOAD | THROUGH))
    assert answer(local).payload == content(*SMALL)
    local.sendall(read_request(2, (1, 0, 10), flags=LOAD | THROUGH))
    assert plane.next_forwarded().flags == LOAD | THROUGH
    for record in (SMALL, (1, 0, 10)):
        remote = plane.connect()
        remote.sendall(read_request(1, record, flags=LOAD | THROUGH))
        assert is_closed(remote)
    assert plane.forwarded.empty()


# connections


def test_F8_the_newest_connection_of_a_master_stays_and_clients_have_many(plane: Plane) -> None:
    first = plane.connect(rank=4, is_client=False)
    clients = [plane.connect(rank=4) for _ in range(3)]
    another = plane.connect(rank=5, is_client=False)
    second = plane.connect(rank=4, is_client=False)
    assert is_closed(first)
    for each in (second, another, *clients):
        each.sendall(wire.request(1, wire.PING))
        assert answer(each) == (1, wire.PING, b"", b"")
    assert plane.data.stats()["connections"] == 5


def test_dropping_all_ends_all_connections_and_new_ones_are_served(plane: Plane) -> None:
    ends = [plane.connect(), plane.connect(is_local=True), plane.connect(is_client=False)]
    ends[0].sendall(read_request(1, SMALL))
    answer(ends[0])
    assert plane.data.stats()["local_connections"] == 1
    plane.data.drop_all()
    assert all(map(is_closed, ends))
    check_served(plane)


def test_closing_ends_the_thread_and_closes_all_connections() -> None:
    for _ in range(50):
        threads = threading.active_count()
        plane = Plane()
        ends = [plane.connect(), plane.connect(is_local=True)]
        plane.data.close()
        assert threading.active_count() == threads
        assert all(map(is_closed, ends))
        late = plane.connect()
        assert is_closed(late), "it came too late"
        plane.close()  # again


@each_row("kind", KINDS)
def test_F7_a_reader_that_takes_no_answers_is_disconnected_and_its_memory_released(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "GRACE_S", 0.5)
    monkeypatch.setattr(data_plane, "_CHECK_S", 0.05)
    with running_plane() as plane:
        end = plane.connect_as(kind)
        memory = np.zeros(int(SIZES[3]), np.uint8)
        gone = weakref.ref(memory)
        plane.table.views[3] = memory.data
        end.sendall(b"".join(read_request(i, (3, 0, 40 << 20)) for i in range(5)))
        assert end.recv(1)
        del memory, plane.table.views[3]
        time.sleep(0.1)
        assert gone() is not None
        wait_until(lambda: not plane.data.stats()["connections"], HOPE_S)
        wait_until(lambda: gone() is None, HOPE_S)
        check_served(plane)


def test_F7_a_slow_reader_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch, plane: Plane
) -> None:
    monkeypatch.setattr(data_plane, "GRACE_S", 0.3)
    monkeypatch.setattr(data_plane, "_CHECK_S", 0.05)
    end = plane.connect(send_buffer=50_000)
    end.sendall(read_request(1, (2, 0, 1 << 20)))
    exactly(end, wire.HEAD_BYTES + 1)
    found = bytearray()
    while len(found) < 1 << 20:  # about 1 MB/s
        found += exactly(end, 1 << 15)
        time.sleep(0.03)
    assert found == content(2, 0, 1 << 20)


def test_F7_slow_loris_byte_by_byte_is_late(monkeypatch: pytest.MonkeyPatch, plane: Plane) -> None:
    monkeypatch.setattr(data_plane, "GRACE_S", 0.6)
    monkeypatch.setattr(data_plane, "_CHECK_S", 0.05)
    request = read_request(1, *[SMALL] * 9)
    end, proper = plane.connect(), plane.connect()
    time.sleep(1.0)
    proper.sendall(request[:20])
    time.sleep(0.2)
    proper.sendall(request[20:])
    assert len(answer(proper).payload) == 9 * 4096
    end.settimeout(0.05)
    began_s = time.monotonic()
    for at in range(len(request)):
        end.sendall(request[at : at + 1])
        try:
            assert is_closed(end)
            break
        except TimeoutError:
            pass
    assert 0.5 < time.monotonic() - began_s < 4
    check_served(plane)


def test_an_idle_connection_ends_unless_it_is_local_or_busy(
    monkeypatch: pytest.MonkeyPatch, plane: Plane
) -> None:
    monkeypatch.setattr(data_plane, "IDLE_S", 0.5)
    monkeypatch.setattr(data_plane, "_CHECK_S", 0.05)
    idle, busy, local = plane.connect(), plane.connect(), plane.connect(is_local=True)
    waiting = plane.connect()
    del plane.table.views[1]
    waiting.sendall(read_request(1, (1, 0, 10)))
    forwarded = plane.next_forwarded()
    for number in range(12):
        time.sleep(0.1)
        busy.sendall(wire.request(number, wire.PING))
        assert answer(busy).id == number
    assert is_closed(idle)
    local.sendall(read_request(1, SMALL))
    assert answer(local).payload == content(*SMALL)
    plane.answer(forwarded, bytes([ABSENT]), b"")
    assert answer(waiting).statuses == bytes([ABSENT])
    assert plane.data.stats()["connections"] == 3


# hostile ends

BAD_REQUESTS = {
    "garbage": random.Random(2).randbytes(4000),
    "4 GB of records": struct.pack("<IBBHII", 1, 1, 0, 0, 0xFFFFFFFF, 0),
    "no chunk": read_request(1, (99, 0, 1)),
    "no chunk of many": read_request(1, *[SMALL] * 9, (99, 0, 1)),
    "behind its chunk": read_request(1, (1, 299_999, 2)),
    "around": read_request(1, (1, 0xFFFFFFFF, 2)),
    "too many bytes": read_request(1, (3, 0, 30 << 20), (3, 0, 3 << 20)),
    "no parts": struct.pack("<IBBHII", 1, 1, 0, 0, 0, 0),
    "no kind": struct.pack("<IBBHII", 1, 9, 0, 0, 0, 0),
    "a flag": read_request(1, SMALL, flags=4),
    "not zero": struct.pack("<IBBHIIIII", 1, 1, 0, 1, 1, 0, *SMALL),
    "not zero at the end": struct.pack("<IBBHIIIII", 1, 1, 0, 0, 1, 1, *SMALL),
    "a hello": wire.greeting(),
}


@each_row("bad", BAD_REQUESTS)
def test_F7_a_bad_request_ends_its_connection_alone_with_one_line(
    bad: str, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    good, end = plane.connect(rank=3), plane.connect(rank=4)
    end.sendall(read_request(1, SMALL) + BAD_REQUESTS[bad])
    assert answer(end).payload == content(*SMALL)
    assert is_closed(end)
    good.sendall(read_request(1, SMALL))
    assert answer(good).payload == content(*SMALL)
    assert plane.forwarded.empty()
    [line] = [line for line in caplog.messages if line.startswith("refused")]
    assert "node 4" in line


def test_an_error_ends_its_connection_alone(caplog: pytest.LogCaptureFixture, plane: Plane) -> None:
    good, end = plane.connect(), plane.connect()
    del plane.table.views[1]

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    plane.data._forward = fail
    end.sendall(read_request(1, (1, 0, 10)))
    assert is_closed(end)
    good.sendall(read_request(1, SMALL))
    assert answer(good).payload == content(*SMALL)
    assert "a bug" in caplog.text


def test_a_view_that_is_being_sent_outlives_its_chunk(plane: Plane) -> None:
    end = plane.connect(send_buffer=50_000)
    end.sendall(read_request(1, (2, 0, 6 << 20)))
    exactly(end, wire.HEAD_BYTES + 1)
    del plane.table.views[2]
    assert exactly(end, 6 << 20) == whole(2)
    end.sendall(read_request(2, (2, 0, 6 << 20)))
    assert plane.next_forwarded().id == 2


# The table of chunks that the two threads of a master share


def test_the_oldest_of_very_many_reads_are_forgotten() -> None:
    table = ChunkTable(SIZES)
    table.records_reads = True
    for size in range(100_000):
        table.record_read((0,), size)
    sizes = [size for _, size in table.take_reads()]
    assert 0 < len(sizes) < 100_000
    assert sizes == list(range(100_000 - len(sizes), 100_000))


def test_no_read_is_lost_or_taken_twice_while_another_thread_records() -> None:
    table = ChunkTable(SIZES)
    table.records_reads = True
    taken: list[int] = []
    for begin in range(0, 100_000, 2000):  # fewer than are remembered

        def record(begin: int = begin) -> None:
            for size in range(begin, begin + 2000):
                table.record_read((0,), size)

        thread = threading.Thread(target=record)
        thread.start()
        while thread.is_alive():
            taken += [size for _, size in table.take_reads()]
        taken += [size for _, size in table.take_reads()]
    assert taken == list(range(100_000))


# Random requests, against a plain list of bytes


CHUNKS = [random.Random(number).randbytes(size) for number, size in enumerate((1, 700, 60_000))]
ABSENT_CHUNK = 1

Records = list[tuple[int, int, int]]


@st.composite
def record(draw: st.DrawFn) -> tuple[int, int, int]:
    chunk = draw(st.integers(0, len(CHUNKS) - 1))
    start = draw(st.integers(0, len(CHUNKS[chunk])))
    return chunk, start, draw(st.integers(0, len(CHUNKS[chunk]) - start))


@examples(60)
@given(
    st.lists(st.lists(record(), min_size=1, max_size=12), min_size=1, max_size=40),
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.sampled_from(KINDS),
    st.randoms(use_true_random=False),
)
def test_every_request_gets_its_own_bytes_once(
    requests: list[Records], pieces: list[int], over: str, chance: random.Random
) -> None:
    with running_plane() as plane:
        plane.table = ChunkTable(np.array([len(each) for each in CHUNKS], np.uint64))
        for chunk, content in enumerate(CHUNKS):
            if chunk != ABSENT_CHUNK:
                plane.table.views[chunk] = memoryview(content)
        end = plane.connect_as(over)
        stream = b"".join(
            struct.pack("<IBBHII", number, 1, 0, 0, len(records), 0)
            + b"".join(struct.pack("<III", *each) for each in records)
            for number, records in enumerate(requests)
        )
        at = turn = 0
        while at < len(stream):
            size = pieces[turn % len(pieces)] if turn < 100 else len(stream)
            end.sendall(stream[at : at + size])
            at, turn = at + size, turn + 1
        absent = [any(each[0] == ABSENT_CHUNK for each in records) for records in requests]
        waiting = [plane.forwarded.get(timeout=HOPE_S) for _ in range(sum(absent))]
        assert [each.id for each in waiting] == [i for i, each in enumerate(absent) if each]
        chance.shuffle(waiting)
        for each in waiting:
            records = [tuple(row) for row in each.parts.tolist()]
            assert records == requests[each.id]
            statuses = bytes(chunk == ABSENT_CHUNK for chunk, _, _ in records)
            plane.answer(each, statuses, wanted(requests[each.id], statuses))
        left = set(range(len(requests)))
        for _ in requests:
            number, kind, zero, none, count, size = struct.unpack("<IBBHII", exactly(end, 16))
            left.remove(number)
            assert (kind, zero, none, count) == (1, 0, 0, len(requests[number]))
            statuses = exactly(end, count)
            assert statuses == bytes(chunk == ABSENT_CHUNK for chunk, _, _ in requests[number])
            assert exactly(end, size) == wanted(requests[number], statuses)
        assert not left


def wanted(records: Records, statuses: bytes) -> bytes:
    return b"".join(
        CHUNKS[chunk][start : start + size]
        for (chunk, start, size), status in zip(records, statuses, strict=True)
        if not status
    )
