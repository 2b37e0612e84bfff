"""S12, G2, N10: who has an account does not keep others waiting, and takes no memory for nothing;
a server that lies does its clients no harm."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import trio
import trio.testing

from diesel_fs.errors import BusyError, CorruptError, DieselError, UsageError
from diesel_fs.format.chunk import Header, damaged_places
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.object_names import lease_prefix
from diesel_fs.net import frames as wire
from diesel_fs.net.client_connection import PAYLOAD_BYTES_MAX
from diesel_fs.net.messages import Message, parse_error
from diesel_fs.net.metrics_endpoint import MetricsEndpoint
from diesel_fs.remote.values import columns_message, parts_message
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account, Role
from diesel_server import limits, supervisor
from diesel_server import queries as asking
from diesel_server import updates as writing
from diesel_server.options import checked
from diesel_server.request_table import takes_payload
from tests.rows import each_row

from ..net.test_client import Scripted
from .fake_server import ThreadedServer
from .in_process_server import KEY, ChunkMaker, InProcessServer, link_of
from .in_process_server import filled as filled
from .in_process_server import server as server
from .test_hostile import answer, logged_in
from .test_queries import _map, _service


def user(role: Role | None = None, *, admin: bool = False) -> Account:
    return Account("somebody", KEY, admin, {} if role is None else {"ds": role})


# Memory


def test_S12_a_request_with_too_many_items_is_refused() -> None:
    head = wire.frame({"id": 1, "do": "datasets", "x": [0] * 1024}, wire.ANSWER_LIMITS)[8:]
    with pytest.raises(CorruptError, match="too many items"):
        wire.parse_head(head, wire.REQUEST_LIMITS)


def test_S12_answers_about_entries_are_counted_before_they_are_made() -> None:
    paths: Message = {"do": "stat", "paths": b"\0" * 9_999}
    assert limits.answer_bytes(paths) >= 10_000 * 2 * 19
    assert limits.answer_bytes({"do": "list", "folder": b"", "after": b""}) >= 8 << 20
    assert limits.answer_bytes({"do": "stat", "paths": "x"}) == 0


def test_S12_a_page_of_long_names_is_short(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealer = ChunkMaker(filled.admin)
    names = sorted(b"n" * 200 + b"%03d" % i for i in range(100))
    for name in names:
        sealer.add(b"many/" + name, b"")
    sealer.put(*sealer.seal())
    monkeypatch.setattr(asking, "NAMES_BYTES_PER_ANSWER", 2048)
    for mapped in (False, True):
        if mapped:
            filled.loop.run(lambda: _map(filled))
        link_of(filled.admin).asked.clear()
        assert filled.admin.list("ds", b"many").names == names
        assert link_of(filled.admin).asked.count("list") == 10


def test_a_page_of_a_large_folder_costs_a_page(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the names of all before it, nor, from the metadata store, the whole folder."""
    sealer = ChunkMaker(filled.admin)
    for i in range(100):
        sealer.add(b"many/%03d" % i, b"")
    sealer.put(*sealer.seal())
    monkeypatch.setattr(asking, "NAMES_PER_ANSWER", 10)
    view = filled.store.view("ds")
    read: list[int] = []
    real = type(view).names

    def names(self: object, entries: object) -> list[bytes]:
        found = real(self, entries)  # type: ignore[arg-type]  # what came is passed on
        read.append(len(found))
        return found

    monkeypatch.setattr(type(view), "names", names)
    monkeypatch.setattr(filled.store.meta, "children", lambda *_: pytest.fail("all of a folder"))
    assert len(filled.admin.list("ds", b"many").names) == 100
    assert read == [10] * 10


def test_S12_only_users_who_may_write_send_payloads() -> None:
    assert takes_payload(user(admin=True), "put", 1 << 30)
    assert takes_payload(user(Role.WRITE), "put", 1 << 30)
    assert takes_payload(user(admin=True), "import_users", 1 << 20)
    for account, do, size in (
        (user(), "put", 1),
        (user(Role.READ), "put", 1),
        (user(Role.ADMIN), "import_users", 1),
        (user(admin=True), "import_users", 65 << 20),
        (user(admin=True), "stat", 1),
    ):
        assert not takes_payload(account, do, size)


def test_S12_a_forbidden_payload_takes_no_memory() -> None:
    with ThreadedServer() as server, logged_in(server) as client:
        assert server.service is not None
        server.service.takes_payload = lambda account, do, size: do == "put"
        client.sendall(wire.frame({"id": 1, "do": "echo"}, wire.REQUEST_LIMITS, 100 << 20))
        time.sleep(0.3)
        assert server.service.budget.held == 0
        for _ in range(100):
            client.sendall(bytes(1 << 20))
        assert answer(client)[0]["error"] == "PermissionDenied"
        client.sendall(wire.frame({"id": 2, "do": "echo"}, wire.REQUEST_LIMITS))
        assert answer(client)[0]["id"] == 2


def test_S12_chunks_with_large_files_are_checked_one_at_a_time(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is counted; what it decodes to is up to 16 times as much."""
    monkeypatch.setattr(writing, "DECODED_BYTES_MAX", 1 << 20)
    real, at_work, most = damaged_places, [0], [0, 0]

    def slow(header: Header, body: memoryview) -> list[int]:
        is_large = int(header.records["size"].max()) > 1 << 20
        at_work[0] += 1
        most[is_large] = max(most[is_large], at_work[0])
        time.sleep(0.1)
        at_work[0] -= 1
        return real(header, body)

    monkeypatch.setattr(writing, "damaged_places", slow)
    sealer = ChunkMaker(server.admin)
    for size in (1 << 10, 2 << 20):
        made = []
        for i in range(4):
            sealer.builder = ChunkBuilder(sealer.session.identity, 4 << 20, "lz4")
            sealer.add(b"%d" % i, (b"%d" % i + bytes(15)) * (size // 16))
            made.append(sealer.seal())
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda chunk: sealer.put(*chunk), made))
    assert most[0] > 1
    assert most[1] == 1


# Time


def test_S12_one_user_cannot_use_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUESTS_PER_USER_MAX", 5)
    with ThreadedServer() as server, logged_in(server) as client:
        for number in range(8):
            client.sendall(
                wire.frame({"id": number, "do": "sleep", "seconds": 0.5}, wire.REQUEST_LIMITS)
            )
        said = [answer(client)[0] for _ in range(8)]
        assert sorted("retry_after_s" in each for each in said) == [False] * 5 + [True] * 3
        client.sendall(wire.frame({"id": 9, "do": "echo"}, wire.REQUEST_LIMITS))
        assert "error" not in answer(client)[0]


def test_S12_long_paths_are_looked_up_in_a_thread(filled: InProcessServer) -> None:
    filled.loop.run(lambda: _map(filled))
    threads = _service(filled)._compute_threads
    seen: list[int] = []
    view = next(iter(_service(filled)._views.values()))
    real = view.stat_many

    def stat_many(*arguments: object, **named: object) -> object:
        seen.append(threads.borrowed_tokens)
        return real(*arguments, **named)  # type: ignore[arg-type]  # what came is passed on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(view), "stat_many", lambda _, *a, **b: stat_many(*a, **b))
        filled.admin.stat_many("ds", [b"a"] * 100, missing_ok=True)
        filled.admin.stat_many("ds", [b"/".join([b"d"] * 1000)] * 100, missing_ok=True)
    assert seen == [0, 1]


def test_S12_invented_identities_delay_no_reader(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a question to the object store, and nobody needs a role to ask it."""
    service = _service(filled)
    known = filled.store.dataset("ds").identity
    filled.admin.stat("ds", b"a")
    real = service._directory._look

    gate, waiting = threading.Event(), threading.Event()

    def slow(identity: UUID) -> object:
        if identity != known:
            waiting.set()
            gate.wait(60)
        return real(identity)

    monkeypatch.setattr(service._directory, "_look", slow)
    monkeypatch.setattr("diesel_server.directory.REMEMBERED_S", 0.0)
    link = filled.link(user())

    def draw(_: int) -> None:
        with pytest.raises(DieselError):
            link.call({"do": "stat", "identity": uuid4().bytes, "paths": b"a"})

    with ThreadPoolExecutor(16) as threads:
        drawn = threads.map(draw, range(16))
        assert waiting.wait(60)
        filled.admin.stat("ds", b"a")  # while none of those has been looked for
        gate.set()
        list(drawn)


def test_S12_listings_of_all_datasets_are_shared(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = filled.store.catalogue.all, []

    def slow(markers: object) -> object:
        runs.append(1)
        time.sleep(0.1)
        return real(markers)  # type: ignore[arg-type]  # what came is passed on

    monkeypatch.setattr(filled.store.catalogue, "all", slow)
    with ThreadPoolExecutor(20) as threads:
        found = list(threads.map(lambda _: filled.admin.datasets(), range(40)))
    assert {info.name for each in found for info in each} == {"ds"}
    assert all(info.head is not None for each in found for info in each)
    assert len(runs) <= 10
    runs.clear()
    assert filled.client(user()).datasets() == []
    assert not runs


def test_S12_readers_leave_room_for_administrators_jobs(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        ChunkMaker(filled.admin, f"ds{i}").file(b"a", b"1")
    go = threading.Event()
    real = LocalRepository.verify

    def slow(*arguments: object, **named: object) -> object:
        assert go.wait(5)
        return real(*arguments, **named)  # type: ignore[arg-type]  # what came is passed on

    monkeypatch.setattr(LocalRepository, "verify", slow)
    with ThreadPoolExecutor(2) as threads:
        under_way = [threads.submit(filled.admin.verify, f"ds{i}") for i in range(2)]
        time.sleep(0.3)
        try:
            with pytest.raises(BusyError, match="jobs are under way"):
                filled.admin.verify("ds2")
            assert filled.admin.recover("ds3").problems == []
        finally:
            go.set()
        assert all(each.result(20).sound for each in under_way)


def test_S12_a_fresh_read_is_of_one_chunk_only(filled: InProcessServer) -> None:
    """A server looks at its own copy of it, whole."""
    info, (chunk,) = filled.store.dataset("ds"), filled.chunks()
    ask: Message = {"do": "read", "identity": info.identity.bytes, "fresh": True}
    link = link_of(filled.admin)
    two = parts_message([(chunk, 0, 4), (chunk, 4, 4)])
    assert link.call({**ask, "parts": two}).payload.tobytes() == b"\x93DIESEL\n"
    assert link.call({**ask, "parts": b""}).payload.nbytes == 0
    others = parts_message([(chunk, 0, 4), (type(chunk)(bytes(16)), 0, 4)])
    with pytest.raises(UsageError, match="fresh"):
        link.call({**ask, "parts": others})


def test_S12_the_leases_of_a_user_are_limited(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "LEASES_MAX", 3)
    identity = filled.store.dataset("ds").identity
    link = filled.link(user(Role.READ))

    def lease(number: int, seconds: int = 600) -> None:
        link.call(
            {
                "do": "lease", "identity": identity.bytes, "lease": f"{number:032x}", "version": 1,
                "seconds": seconds,
            }
        )  # fmt: skip

    for number in (0, 1, 2, 1):
        lease(number)
    with pytest.raises(BusyError, match="3 leases"):
        lease(3)
    assert len(list(filled.store.objects.list(lease_prefix(identity)))) == 3
    lease(0, 0)
    lease(3, 1)
    time.sleep(1.1)
    lease(4)


# A server that lies


def test_N10_a_list_of_names_that_does_not_advance_is_an_error(filled: InProcessServer) -> None:
    view = filled.store.view("ds")
    columns = columns_message(view.stat_many([b"a"]))
    for names in (b"a", b"../x", b"", b"a/b"):

        async def lie(request: object, names: bytes = names) -> object:
            from diesel_server.requests import Reply  # noqa: PLC0415

            return Reply({"version": 1, "names": names, "more_names": True, **columns})

        filled.handlers["list"] = lie  # type: ignore[assignment]  # a fault is put in
        with pytest.raises(DieselError):
            filled.admin.list("ds")


@pytest.mark.parametrize(
    ("message", "size"),
    [({"id": 1}, PAYLOAD_BYTES_MAX + 1), ({"id": 1, "error": "DieselError"}, 1)],
)
def test_N10_an_answer_with_an_unexpected_payload_is_an_error(message: Message, size: int) -> None:
    def said(client: socket.socket) -> None:
        client.sendall(wire.frame(message, wire.ANSWER_LIMITS, size))
        time.sleep(1)

    begun = time.monotonic()
    with Scripted(said) as scripted, pytest.raises(CorruptError):
        scripted.link().call({"do": "echo"}, deadline_s=10)
    assert time.monotonic() - begun < 5


def test_S8_text_from_a_server_cannot_control_a_terminal() -> None:
    evil = "\x1b]0;x\x07\x1b[2J\nready\r" + "x" * 100_000
    error = parse_error({"error": "DieselError", "message": evil, "advice": evil})
    refused = wire.refusal_error(wire.VERSION, b"\x1b[2J\xff\n")
    assert error is not None
    for text in (str(error), error.advice, str(refused)):
        assert text.isprintable()
        assert len(text) < 20_000


# An operator's night


def test_F7_one_ipv6_network_has_as_many_log_lines_as_one_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from diesel_fs import metrics  # noqa: PLC0415
    from diesel_server.refusal_log import RefusalLog  # noqa: PLC0415

    async def main() -> None:
        refusals = RefusalLog(metrics.private_cells())
        for i in range(200):
            refusals.add("login", "x", address=f"[2001:db8::{i:x}]:5")

    trio.run(main)
    assert len(caplog.messages) <= 21


def test_J9_a_worker_that_cannot_be_started_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory or descriptors are short: it is an error of that start, which is tried again."""

    async def fails(*_: object, **__: object) -> object:
        raise BlockingIOError(11, os.strerror(11))

    options, _ = checked(
        store=f"file://{tmp_path}", meta=None, listen="127.0.0.1:0", tls_cert=None, tls_key=None,
        workers=1, cache_dir=None, cache_size=None, metrics=None, insecure=False,
    )  # fmt: skip
    parent = supervisor.Supervisor(options, print)
    monkeypatch.setattr(trio.lowlevel, "open_process", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DieselError, match="cannot start a worker"):
        trio.run(lambda: parent._start(0, is_first=False))
    assert len(os.listdir("/proc/self/fd")) == before
    for each in parent._sockets:
        each.close()


@each_row("head", [b"\r\n\r\n", b"\n\n", b"x\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 9000])
def test_S12_any_bytes_sent_to_the_metrics_port_are_harmless(head: bytes) -> None:
    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, head)
            await MetricsEndpoint(str, lambda: True).answer(theirs)
            nursery.cancel_scope.cancel()

    trio.run(main)
