"""A reader's connection to one master: real sockets and threads, and a master that a test
scripts."""

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import DieselError, MetadataError, UsageError
from diesel_fs.net.breaker import DAMAGED_MAX, FAILURES_MAX, TIMEOUT_MAX_S, PeerBreaker
from diesel_fs.net.tls import TlsSocket, client_context, make_certificate
from diesel_fs.peers import wire
from diesel_fs.peers.reader import owner_link
from diesel_fs.peers.reader.owner_link import OwnerLink
from diesel_fs.peers.wire import WORKING_S
from tests.examples import examples
from tests.rows import each_row
from tests.waiting import until

from ...waiting import PATIENCE_S
from ..children import fork
from ..connected_masters import Part, content
from ..fake_owner import HEAD, READ, RECORD, WORKING, received

Script = Callable[["Requests"], None]
Wrap = Callable[[socket.socket, socket.socket], tuple[TlsSocket, socket.socket]]


class Request:
    def __init__(self, number: int, flags: int, records: list[Part]) -> None:
        self.number, self.flags, self.records = number, flags, records

    def answer(self, statuses: bytes = b"") -> bytes:
        """The right answer, with these statuses (0 for each part: all are given)."""
        statuses = statuses or bytes(len(self.records))
        payload = b"".join(
            content(*record)
            for record, status in zip(self.records, statuses, strict=True)
            if not status
        )
        count = len(statuses)
        return HEAD.pack(self.number, READ, 0, 0, count, len(payload)) + statuses + payload

    def working(self) -> bytes:
        return HEAD.pack(self.number, WORKING, 0, 0, 0, 0)


class Requests:
    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def next(self) -> Request:
        number, kind, flags, _, count, _ = HEAD.unpack(received(self.socket, HEAD.size))
        assert kind == READ
        records = received(self.socket, count * RECORD.size)
        return Request(number, flags, list(RECORD.iter_unpack(records)))

    def send(self, answer: bytes) -> None:
        self.socket.sendall(answer)


def answer_all(requests: Requests) -> None:
    while True:
        requests.send(requests.next().answer())


class PatientBreaker(PeerBreaker):
    """No answer is late, even on a busy machine: a link that measures speed would wait only 50 ms
    here."""

    def timeout_s(self, size: int) -> float:
        return PATIENCE_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> PeerBreaker:
    monkeypatch.setattr(owner_link, "CONNECT_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(owner_link, "_SEND_WAIT_S", PATIENCE_S)
    return PatientBreaker()


@contextmanager
def linked(
    *scripts: Script, wrap: Wrap | None = None, breaker: PeerBreaker | None = None
) -> Iterator[OwnerLink]:
    """A link whose connection number n is served by script n, all later ones by the last script."""
    left = list(scripts)
    ends: list[socket.socket] = []

    def serve(end: socket.socket, script: Script) -> None:
        with suppress(OSError), end:
            script(Requests(end))

    def connect() -> socket.socket | TlsSocket:
        plain, theirs = socket.socketpair()
        ours: socket.socket | TlsSocket = plain
        if wrap is not None:
            ours, theirs = wrap(plain, theirs)
        ends.append(theirs)
        script = left.pop(0) if len(left) > 1 else left[0]
        threading.Thread(target=serve, args=(theirs, script), daemon=True).start()
        return ours

    link = OwnerLink(5, connect, breaker=breaker)
    try:
        yield link
    finally:
        link.close()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def read(link: OwnerLink, *records: Part) -> bytes | None:
    size = sum(each[2] for each in records)
    parts = np.array(records, "<u4")
    pending = link.begin(parts, size)
    answer = None if pending is None else link.finish(pending)
    return None if answer is None or answer[1] else bytes(answer[0])


def right(*records: Part) -> bytes:
    return b"".join(content(*each) for each in records)


SOME = (3, 5, 40), (1, 0, 7)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(count) as threads:
        for _ in threads.map(work, range(count), timeout=2 * PATIENCE_S):
            pass


# Answers ------------------------------------------------------------------------------------------


def test_parts_come_in_their_order_and_requests_have_the_load_flag() -> None:
    flags = []

    def script(requests: Requests) -> None:
        while True:
            request = requests.next()
            flags.append(request.flags)
            requests.send(request.answer())

    with linked(script) as link:
        assert read(link, *SOME) == right(*SOME)
        assert link.read_one(2, 9, 100) == content(2, 9, 100)
        assert link.read_one(2, 9, 200_000) == content(2, 9, 200_000)
        assert flags == [wire.LOAD] * 3
        assert (link.stats()["requests"], link.counts["connections"]) == (3, 1)


def in_tls(ours: socket.socket, theirs: socket.socket) -> tuple[TlsSocket, socket.socket]:
    context = make_certificate().context
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(context.wrap_socket, theirs, server_side=True)
        return TlsSocket(ours, client_context()), accepted.result()


@pytest.mark.parametrize("wrap", [None, in_tls])
def test_threads_get_their_own_answers_in_any_order(
    wrap: Wrap | None, patient: PeerBreaker
) -> None:
    def script(requests: Requests) -> None:
        draw = random.Random(1)
        waiting: list[Request] = []
        while True:
            if select.select([requests.socket], [], [], 0.002)[0]:  # a request has begun
                waiting.append(requests.next())
                if len(waiting) < 5:
                    continue
            draw.shuffle(waiting)
            requests.send(b"".join(each.answer() for each in waiting))
            waiting.clear()

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(20):
            most = draw.choice((3000, 40_000))
            records = [(number, draw.randrange(99), draw.randrange(1, most)) for _ in range(3)]
            assert read(link, *records) == right(*records)
            assert link.read_one(*records[0]) == content(*records[0])

    with linked(script if wrap is None else answer_all, wrap=wrap, breaker=patient) as link:
        in_threads(8, work)
        assert link.counts["connections"] == 1
        assert link.counts["failed"] == 0


def test_parts_that_are_not_given_have_a_status_and_no_bytes() -> None:
    statuses = bytes([wire.GIVEN, wire.ABSENT, wire.GIVEN, wire.NOT_MINE, wire.FAILED, wire.BUSY])

    def script(requests: Requests) -> None:
        requests.send(requests.next().answer(statuses))
        requests.send(requests.next().answer(bytes([wire.ABSENT])))

    records = [(at, at, 10 + at) for at in range(len(statuses))]
    with linked(script) as link:
        pending = link.begin(np.array(records, "<u4"), sum(each[2] for each in records))
        assert pending is not None
        answer = link.finish(pending)
        assert answer is not None
        assert answer[1] == statuses
        assert bytes(answer[0]) == right(records[0], records[2])
        assert link.read_one(1, 2, 3) is None
        assert link.counts["failed"] == 0


@examples(60)
@given(
    sizes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 32),
    cuts=st.lists(st.integers(1, 400), max_size=30),
    working=st.sets(st.integers(0, 5)),
    ungiven=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3))),
)
def test_answers_split_and_reordered_arbitrarily(
    sizes: list[list[int]],
    seed: int,
    cuts: list[int],
    working: set[int],
    ungiven: set[tuple[int, int]],
) -> None:
    wanted = [
        [(request, 10 * part, size) for part, size in enumerate(parts)]
        for request, parts in enumerate(sizes)
    ]

    def statuses(request: int) -> bytes:
        return bytes((request, part) in ungiven for part in range(len(wanted[request])))

    def script(requests: Requests) -> None:
        received_requests = [requests.next() for _ in wanted]
        answers = []
        for request in received_requests:
            which = request.records[0][0]
            assert request.records == wanted[which]
            if which in working:
                requests.send(request.working())
            answers.append(request.answer(statuses(which)))
        random.Random(seed).shuffle(answers)
        stream = b"".join(answers)
        for cut in cuts:
            requests.send(stream[:cut])
            stream = stream[cut:]
        requests.send(stream)
        received(requests.socket, 1)

    with linked(script) as link:
        begun = [
            link.begin(np.array(each, "<u4"), sum(part[2] for part in each)) for each in wanted
        ]
        taken = list(range(len(wanted)))
        random.Random(seed + 1).shuffle(taken)
        for request in taken:
            pending = begun[request]
            assert pending is not None
            answer = link.finish(pending)
            assert answer is not None
            given_parts = [
                part
                for part, status in zip(wanted[request], statuses(request), strict=True)
                if not status
            ]
            assert bytes(answer[0]) == right(*given_parts)
            if len(given_parts) < len(wanted[request]):
                assert answer[1] == statuses(request)
            else:
                assert not any(answer[1])
        assert link.counts["failed"] == 0


# Time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "pause_s"),
    [
        (SOME, TIMEOUT_MAX_S + 0.5),
        ([(1, 100 * number, 50) for number in range(40)], TIMEOUT_MAX_S + WORKING_S + 1),
    ],
    ids=["two parts", "many parts"],
)
def test_a_reader_waits_longer_for_a_working_master_if_it_wants_many_parts(
    parts: Sequence[Part], pause_s: float
) -> None:
    def script(requests: Requests) -> None:
        request = requests.next()
        requests.send(request.working())
        time.sleep(pause_s)
        requests.send(request.answer())
        received(requests.socket, 1)

    with linked(script) as link:
        assert read(link, *parts) == right(*parts)
        assert link.counts["timed_out"] == 0


def test_an_answer_that_is_late_after_working_is_no_failure() -> None:
    def script(requests: Requests) -> None:
        while True:
            requests.send(requests.next().working())

    with linked(script) as link:
        start_s = time.monotonic()
        assert read(link, *SOME) is None
        assert TIMEOUT_MAX_S < time.monotonic() - start_s < TIMEOUT_MAX_S + WORKING_S + 1
        assert (link.counts["timed_out"], link.counts["failed"]) == (1, 0)


@pytest.mark.parametrize("one", [False, True])
def test_late_answers_are_skipped_and_the_link_goes_on(one: bool) -> None:
    def script(requests: Requests) -> None:
        late = requests.next()
        requests.send(late.answer()[:11])  # some of it is in time
        following = requests.next()
        requests.send(late.answer()[11:] + following.answer())
        answer_all(requests)

    with linked(script) as link:
        assert (link.read_one(4, 0, 500) if one else read(link, (4, 0, 500))) is None
        assert link.counts["timed_out"] == 1
        for seed in range(5):
            assert read(link, (seed, 2, 900)) == content(seed, 2, 900)
            assert link.read_one(seed, 2, 900) == content(seed, 2, 900)
        assert link.counts["connections"] == 1


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("begun", [0, 5, 40])
def test_F3_an_answer_that_trickles_is_late(one: bool, begun: int) -> None:
    def script(requests: Requests) -> None:
        answer = requests.next().answer()
        requests.send(answer[:begun])
        for at in range(begun, len(answer)):
            time.sleep(0.02)
            requests.send(answer[at : at + 1])

    with linked(script) as link:
        start_s = time.monotonic()
        assert (link.read_one(4, 0, 5000) if one else read(link, (4, 0, 5000))) is None
        assert time.monotonic() - start_s < 2 * TIMEOUT_MAX_S
        assert link.counts["timed_out"] == 1


def test_F2_a_master_that_hangs_is_paused() -> None:
    with linked(lambda requests: time.sleep(30)) as link:
        for _ in range(FAILURES_MAX):
            assert read(link, *SOME) is None
        start_s = time.monotonic()
        assert read(link, *SOME) is None
        assert link.read_one(*SOME[0]) is None
        assert time.monotonic() - start_s < TIMEOUT_MAX_S / 2
        assert link.counts["skipped"] == 2
        assert link.counts["failed"] == FAILURES_MAX


# Connections --------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [False, True])
def test_a_request_whose_connection_was_closed_is_sent_once_more(one: bool) -> None:
    def closes(requests: Requests) -> None:
        request = requests.next()
        requests.send(request.answer())
        requests.send(requests.next().answer()[:20])

    with linked(closes, answer_all) as link:
        for _ in range(3):
            found = link.read_one(*SOME[0]) if one else read(link, SOME[0])
            assert found == content(*SOME[0])
        assert (link.counts["connections"], link.counts["failed"]) == (2, 0)


def test_a_master_that_closes_each_connection_fails() -> None:
    def closes(requests: Requests) -> None:
        requests.next()

    with linked(closes) as link:
        for _ in range(FAILURES_MAX):
            assert read(link, *SOME) is None
        assert link.counts["failed"] == FAILURES_MAX
        assert read(link, *SOME) is None
        assert link.counts["skipped"] == 1


@each_row(
    ("error", "is_refused"),
    [
        (UsageError("too many connections"), True),
        (MetadataError("no route to host"), False),
        (OSError("no descriptors"), False),
    ],
)
def test_a_link_that_cannot_connect(error: DieselError | OSError, is_refused: bool) -> None:
    tries = []

    def connect() -> socket.socket:
        tries.append(1)
        raise error

    link = OwnerLink(5, connect)
    assert read(link, *SOME) is None
    assert link.is_refused is is_refused
    assert read(link, *SOME) is None
    assert link.read_one(*SOME[0]) is None
    assert len(tries) == 1, "the breaker is open"
    link.close()


def test_damaged_parts_lead_to_quarantine() -> None:
    with linked(answer_all) as link:
        assert read(link, *SOME) == right(*SOME)
        for _ in range(DAMAGED_MAX):
            link.record_damage()
        assert read(link, *SOME) is None
        assert link.read_one(*SOME[0]) is None
        assert link.counts["damaged"] == DAMAGED_MAX
        assert link.counts["skipped"] == 2


def _of(request: Request, **changed: int) -> bytes:
    """A head like that of the answer to `request`, but for these fields."""
    fields = {"id": request.number, "kind": READ, "zero": 0, "none": 0, "count": 2, "bytes": 47}
    return HEAD.pack(*(fields | changed).values()) + bytes(49)


@each_row(
    "corrupt",
    [
        *({"id": 999}, {"zero": 1}, {"none": 1}, {"count": 3}, {"count": 1}),
        *({"kind": kind} for kind in (3, 9, WORKING)),
        *({"bytes": size} for size in (46, 48, 1 << 31)),
    ],
)
def test_F7_a_corrupt_answer_ends_the_connection_and_opens_the_breaker(
    corrupt: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def script(requests: Requests) -> None:
        requests.send(_of(requests.next(), **corrupt))
        with suppress(OSError):
            received(requests.socket, 1)
        ended.set()

    with linked(script) as link:
        assert read(link, *SOME) is None
        assert ended.wait(5)
        assert "violates the protocol" in caplog.text
        assert read(link, *SOME) is None
        assert link.counts["skipped"] >= 1


# Processes, signals, TLS --------------------------------------------------------------------------


def test_a_forked_child_uses_a_connection_of_its_own() -> None:
    def answers_two_together(requests: Requests) -> None:
        first = requests.next()
        second = requests.next()
        requests.send(first.answer() + second.answer())
        answer_all(requests)

    with linked(answers_two_together, answer_all) as link:
        pending = link.begin(np.array([SOME[0]], "<u4"), SOME[0][2])
        assert pending is not None

        def finish() -> None:
            answer = link.finish(pending)
            assert answer is not None
            assert bytes(answer[0]) == content(*SOME[0])

        def work() -> None:
            connections = link.counts["connections"]
            finish()  # its own connection sends the request again
            assert link.counts["connections"] == connections + 1

        fork(work)()
        assert read(link, (7, 0, 9)) == content(7, 0, 9)
        finish()
        assert link.counts["connections"] == 1


def test_a_signal_handler_reads_in_the_middle_of_a_read() -> None:
    """The handler runs in the thread that receives."""
    inner: list[bytes | None] = []

    def script(requests: Requests) -> None:
        first = requests.next()
        requests.send(first.answer()[:17])
        os.kill(os.getpid(), signal.SIGUSR1)
        requests.socket.settimeout(0.4)
        with suppress(TimeoutError):
            second = requests.next()
            requests.send(first.answer()[17:] + second.answer())
            first = second
        if not inner:
            requests.send(first.answer()[17:])
        requests.socket.settimeout(None)
        answer_all(requests)

    before = signal.signal(signal.SIGUSR1, lambda *_: inner.append(read(link, (8, 0, 30))))
    try:
        with linked(script, answer_all) as link:
            start_s = time.monotonic()
            found = read(link, *SOME)
            assert time.monotonic() - start_s < 3 * TIMEOUT_MAX_S
            assert found in (right(*SOME), None)
            assert inner == [content(8, 0, 30)] or inner == [None]
            until(lambda: read(link, *SOME) == right(*SOME), "the link to go on")
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("one", [False, True])
def test_a_keyboard_interrupt_ends_the_connection_and_the_link_goes_on(one: bool) -> None:
    def script(requests: Requests) -> None:
        if one:
            requests.send(requests.next().answer())
        request = requests.next()
        requests.send(request.answer()[:20])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        received(requests.socket, 1)

    with linked(script, answer_all) as link:
        if one:
            assert link.read_one(*SOME[1]) == content(*SOME[1])  # it makes the connection
        with pytest.raises(KeyboardInterrupt):
            link.read_one(*SOME[0]) if one else read(link, SOME[0])
        assert read(link, *SOME) == right(*SOME)
        assert link.counts["connections"] == 2
