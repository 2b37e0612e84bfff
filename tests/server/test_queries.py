"""Requests about datasets, without a socket: no answer is wrong because the server lacks a fact."""

import shutil
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from unittest.mock import Mock
from uuid import UUID, uuid4

import lz4.block
import numpy as np
import pytest

from diesel_fs.errors import (
    BusyError,
    CorruptError,
    DieselError,
    FormatError,
    MetadataBehind,
    MetadataError,
    NoSuchDataset,
    NoSuchPath,
    UsageError,
)
from diesel_fs.format.entries import Kind
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.net.client import RpcClient
from diesel_fs.net.client_connection import Answer
from diesel_fs.net.messages import Message
from diesel_fs.remote.repository import RemoteSnapshots
from diesel_fs.remote.values import columns_message, parts_message
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.private_copies import write_private_copy
from diesel_fs.storage.accounts.account import Account
from diesel_server.requests import queries
from diesel_server.requests.dispatcher import Reply, Request
from tests.waiting import wait_until

from .in_process_server import ChunkMaker, InProcessServer, link_of, read
from .in_process_server import filled as filled
from .in_process_server import server as server

# Entries


def test_an_answer_has_all_that_was_put_before_the_request(filled: InProcessServer) -> None:
    """The metadata store answers until there is a snapshot of that version, then the snapshot."""
    sealer = ChunkMaker(filled.admin)
    for i in range(30):
        sealer.file(b"more/f%d" % i, b"x" * i)
        assert filled.admin.stat("ds", b"more/f%d" % i).size == i
        assert filled.admin.stat("ds", b"more").kind == Kind.FOLDER
        assert len(filled.admin.list("ds", b"more").names) == i + 1
        with pytest.raises(NoSuchPath):
            filled.admin.stat("ds", b"more/f%d" % (i + 1))
    wait_until(lambda: filled.admin.stat("ds", b"a") and _service(filled)._views)
    assert filled.admin.stat("ds", b"more/f29").size == 29


def _service(filled: InProcessServer) -> queries.QueryHandlers:
    handler = filled.handlers["datasets"]
    owner = getattr(handler, "__self__")  # noqa: B009  # a bound method's
    assert isinstance(owner, queries.QueryHandlers)
    return owner


async def _map(filled: InProcessServer) -> None:
    service = _service(filled)
    await service._making.run(await service.find_dataset(filled.identity))


NOBODY = Account("nobody", b"")
PATHS = [b"", b"a", b"d", b"d/b", b"d/e", b"d/e/c", b"nothing", b"d/nothing", b"a/below", b"dd"]


@pytest.mark.parametrize("mapped", [False, True])
def test_snapshot_and_metadata_store_are_equal(filled: InProcessServer, mapped: bool) -> None:
    if mapped:
        filled.patch.setattr(queries, "FEW_PATHS", 0)
    else:
        filled.patch.setattr(_service(filled)._making, "start", lambda _: None)
    stats = filled.admin.stat_many("ds", PATHS, missing_ok=True)
    kinds = [Kind.FOLDER, 0, 2, 0, 2, 0, 3, 3, 3, 3]
    assert stats.kind.tolist() == kinds
    assert stats.size.tolist() == [0, 1, 0, 2, 0, 3, 0, 0, 0, 0]
    view = filled.store.view("ds")
    wanted = view.stat_many(PATHS, missing_ok=True)
    for name in ("kind", "mode", "size", "mtime_ns"):
        assert np.array_equal(getattr(stats, name), getattr(wanted, name)), name
    assert bool(_service(filled)._views) == mapped
    with pytest.raises(NoSuchPath, match="nothing"):
        filled.admin.stat_many("ds", PATHS)


def test_a_folder_is_listed_page_by_page(filled: InProcessServer) -> None:
    """S12. From the metadata store, and from a snapshot."""
    sealer, requests = ChunkMaker(filled.admin), link_of(filled.admin).requests
    names = [b"n" * 200 + b"%03d" % i for i in range(100)]
    for i, name in enumerate(names):
        sealer.add(b"many/" + name, b"x" * i)
    sealer.put(*sealer.seal())
    filled.admin.begin("empty")
    limits = (("NAMES_PER_ANSWER", 7, 15), ("NAMES_BYTES_PER_ANSWER", 2048, 10))
    for mapped in (False, True):
        if mapped:
            filled.loop.run(lambda: _map(filled))
        for limit, value, pages in limits:
            with filled.patch.context() as patch:
                patch.setattr(queries, limit, value)
                requests.clear()
                rows = filled.admin.list("ds", b"many")
            assert rows.names == names
            assert rows.records["size"].tolist() == list(range(100))
            assert requests.count("list") == pages
        assert sorted(filled.admin.list("ds").names) == [b"a", b"d", b"many"]
        for folder in (b"a", b"nowhere", b"d/nothing"):
            with pytest.raises(NoSuchPath):
                filled.admin.list("ds", folder)
        assert filled.admin.list("empty").names == []


def test_a_page_of_a_large_folder_costs_a_page(filled: InProcessServer) -> None:
    sealer = ChunkMaker(filled.admin)
    for i in range(100):
        sealer.add(b"many/%03d" % i, b"")
    sealer.put(*sealer.seal())
    filled.patch.setattr(queries, "NAMES_PER_ANSWER", 10)
    read: list[int] = []
    real = Snapshot.names

    def names(self: Snapshot, entries: Indices) -> list[bytes]:
        read.append(len(entries))
        return real(self, entries)

    filled.store.view("ds")
    filled.patch.setattr(Snapshot, "names", names)
    filled.patch.setattr(filled.store.meta, "children", lambda *_: pytest.fail("all of a folder"))
    assert len(filled.admin.list("ds", b"many").names) == 100
    assert read == [10] * 10


def test_S12_long_paths_are_looked_up_in_a_thread(filled: InProcessServer) -> None:
    filled.loop.run(lambda: _map(filled))
    threads = _service(filled)._compute_threads
    seen: list[int] = []
    real = Snapshot.stat_many

    def stat_many(self: Snapshot, *arguments: object, **named: object) -> object:
        seen.append(threads.borrowed_tokens)
        return real(self, *arguments, **named)  # type: ignore[arg-type]  # what came is passed on

    filled.patch.setattr(Snapshot, "stat_many", stat_many)
    filled.admin.stat_many("ds", [b"a"] * 100, missing_ok=True)
    filled.admin.stat_many("ds", [b"/".join([b"d"] * 1000)] * 100, missing_ok=True)
    assert seen == [0, 1]


def test_S12_invented_identities_delay_no_reader(filled: InProcessServer) -> None:
    """Each needs a request to the object store, and no role."""
    directory, known = _service(filled)._directory, filled.identity
    filled.admin.stat("ds", b"a")
    real, gate, waiting = directory._look, threading.Event(), threading.Event()

    def slow(identity: UUID) -> object:
        if identity != known:
            waiting.set()
            gate.wait(60)
        return real(identity)

    filled.patch.setattr(directory, "_look", slow)
    filled.patch.setattr("diesel_server.requests.directory.REMEMBERED_S", 0.0)
    link = filled.link(NOBODY)

    def draw(_: int) -> None:
        with pytest.raises(DieselError):
            link.call({"do": "stat", "identity": uuid4().bytes, "paths": b"a"})

    with ThreadPoolExecutor(16) as threads:
        drawn = threads.map(draw, range(16))
        assert waiting.wait(60)
        filled.admin.stat("ds", b"a")  # before any of those look-ups is done
        gate.set()
        list(drawn)


def test_S12_listings_of_all_datasets_are_shared(filled: InProcessServer) -> None:
    real, runs = filled.store.catalogue.all, []

    def slow(markers: object) -> object:
        runs.append(1)
        time.sleep(0.1)
        return real(markers)  # type: ignore[arg-type]  # what came is passed on

    filled.patch.setattr(filled.store.catalogue, "all", slow)
    with ThreadPoolExecutor(20) as threads:
        found = list(threads.map(lambda _: filled.admin.datasets(), range(40)))
    assert {info.name for each in found for info in each} == {"ds"}
    assert all(info.head is not None for each in found for info in each)
    assert len(runs) <= 10
    runs.clear()
    assert filled.client(NOBODY).datasets() == []
    assert not runs


def test_S12_a_fresh_read_is_of_one_chunk_only(filled: InProcessServer) -> None:
    """The server checks its whole copy of that chunk."""
    info, (chunk,) = filled.store.dataset("ds"), filled.chunks()
    ask: Message = {"do": "read", "identity": info.identity.bytes, "fresh": True}
    link = link_of(filled.admin)
    two = parts_message([(chunk, 0, 4), (chunk, 4, 4)])
    assert link.call({**ask, "parts": two}).payload.tobytes() == b"\x93DIESEL\n"
    assert link.call({**ask, "parts": b""}).payload.nbytes == 0
    others = parts_message([(chunk, 0, 4), (type(chunk)(bytes(16)), 0, 4)])
    with pytest.raises(UsageError, match="fresh"):
        link.call({**ask, "parts": others})


def test_N10_a_list_of_names_that_does_not_advance_is_an_error(filled: InProcessServer) -> None:
    columns = columns_message(filled.store.view("ds").stat_many([b"a"]))
    for names in (b"a", b"../x", b"", b"a/b"):

        async def lie(request: Request, names: bytes = names) -> Reply:
            return Reply({"version": 1, "names": names, "more_names": True, **columns})

        filled.handlers["list"] = lie
        with pytest.raises(DieselError):
            filled.admin.list("ds")


def test_C3_C4_lost_commits_are_never_a_missing_file(
    filled: InProcessServer, tmp_path: Path
) -> None:
    ChunkMaker(filled.admin).session.finish()
    store = tmp_path / "store"
    filled.store.close()
    older = {file: file.read_bytes() for file in store.glob("meta.sqlite*")}
    filled.store.open_metadata(create=False)
    sealer = ChunkMaker(filled.admin)
    sealer.file(b"later", b"333")
    sealer.session.finish()
    assert filled.admin.stat("ds", b"later").size == 3
    filled.store.close()
    for file in store.glob("meta.sqlite*"):
        file.unlink()
    for file, content in older.items():
        file.write_bytes(content)
    filled.store.open_metadata(create=False)
    time.sleep(0.6)  # a listing may be that old
    asks: list[Callable[[], object]] = [
        lambda: filled.admin.stat("ds", b"later"),
        lambda: filled.admin.stat("ds", b"nothing"),
        lambda: filled.admin.list("ds"),
    ]
    for has_lost_all in (False, True):
        if has_lost_all:
            filled.store.meta.drop(filled.identity)
        for ask in asks:
            with pytest.raises(MetadataBehind, match="recover"):
                ask()
        assert filled.admin.view("ds").lookup(b"later") > 0
    with pytest.raises(NoSuchDataset):
        filled.admin.dataset("other")
    with pytest.raises(MetadataBehind):
        sealer.session.new_id()
    assert filled.admin.recover("ds").problems == []
    assert filled.admin.stat("ds", b"later").size == 3
    with pytest.raises(NoSuchPath):
        filled.admin.stat("ds", b"nothing")


def test_reads_go_on_while_the_metadata_store_is_away(filled: InProcessServer) -> None:
    view, (chunk,) = filled.admin.view("ds"), filled.chunks()
    calls = []

    def away(*_: object) -> None:
        calls.append(1)
        time.sleep(0.2)
        raise MetadataError("it is away")

    assert filled.admin.staleness_warning(view) == ""
    with filled.patch.context() as patch:
        for name in ("head", "heads", "lookup", "children", "changes", "commit"):
            patch.setattr(filled.store.meta, name, away)
        assert filled.admin.view("ds").version == view.version
        warning = filled.admin.staleness_warning(view)
        assert "the server says: it is away" in warning
        assert f"this is version {view.version} of ds, the newest snapshot" in warning
        assert [info.name for info in filled.admin.datasets()] == ["ds"]
        info = filled.admin.dataset("ds")
        assert info.head is None
        assert read(filled.admin, info.identity, chunk, 8) == b"\x93DIESEL\n"
        calls.clear()
        begun = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            requests = [threads.submit(filled.admin.stat, "ds", b"a") for _ in range(100)]
            for each in requests:
                with pytest.raises(MetadataError, match="away"):
                    each.result()
        assert time.monotonic() - begun < 5  # not 20 s
        assert len(calls) < 10
    time.sleep(1.1)
    assert filled.admin.stat("ds", b"a").size == 1
    assert filled.admin.staleness_warning(filled.admin.view("ds")) == ""


def test_C2_a_writer_waits_for_a_metadata_store_that_is_away(filled: InProcessServer) -> None:
    session = filled.admin.begin("ds")
    real, back_s = filled.store.meta.head, time.monotonic() + 2

    def away(name: str) -> object:
        if time.monotonic() < back_s:
            raise MetadataError("it is away")
        return real(name)

    filled.patch.setattr(filled.store.meta, "head", away)
    session.new_id()
    assert time.monotonic() > back_s
    back_s += 3600
    filled.patch.setattr("diesel_fs.remote.repository._HEAD_WAIT_S", 0.5)
    with pytest.raises(MetadataError, match="it is away") as error:
        session.new_id()
    assert not isinstance(error.value, MetadataBehind)


def test_many_requests_share_one_read_of_the_head(filled: InProcessServer) -> None:
    real = filled.store.meta.head
    looks = []

    def slow(name: str) -> object:
        looks.append(name)
        time.sleep(0.05)
        return real(name)

    filled.patch.setattr(filled.store.meta, "head", slow)
    filled.admin.stat("ds", b"a")
    looks.clear()
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda _: filled.admin.stat("ds", b"a"), range(200)))
    assert len(looks) < 60


# Snapshots


def test_a_snapshot_is_fetched_once(filled: InProcessServer, tmp_path: Path) -> None:
    admin = filled.admin
    view = admin.view("ds")  # the server's private copy
    filled.patch.setenv("XDG_CACHE_HOME", str(tmp_path / "client's"))
    pieces = []
    real = filled.handlers["snapshot"]

    async def counted(request: Request) -> AsyncGenerator[Reply, None]:
        async for reply in real(request):  # type: ignore[union-attr]  # one of several kinds
            pieces.append(len(reply.payload))
            yield reply

    filled.handlers["snapshot"] = counted
    fetched = admin.view("ds")
    assert bytes(fetched.buffer) == bytes(view.buffer)
    assert pieces == [1, 0]
    assert admin.view("ds").version == view.version
    assert pieces == [1, 0, 0]
    shutil.rmtree(tmp_path / "client's")
    assert admin.view("ds").version == view.version
    assert admin.view_at("ds", view.version).version == view.version
    assert admin.snapshots.newest(view.identity) == view.version
    assert [each.version for each in admin.kept_versions("ds")] == [view.version]
    ChunkMaker(admin).file(b"more", b"1")
    assert admin.view("ds").lookup(b"more") > 0
    with pytest.raises(DieselError):
        admin.view_at("ds", 5)
    admin.begin("empty")
    assert len(admin.view("empty")) == 1
    assert admin.kept_versions("empty") == []


@pytest.fixture
def clients_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "client's"))
    return tmp_path / "client's"


class LyingLink:
    def __init__(self, version: int, content: bytes, deltas: Sequence[int] = ()) -> None:
        """`deltas` are in the answers to a client that has a version."""
        self.version, self.content, self.deltas = version, content, list(deltas)

    def stream(self, request: Message) -> Iterator[Answer]:
        if self.content:
            block = lz4.block.compress(self.content, store_size=False)
            yield Answer({"more": True, "bytes": len(self.content)}, memoryview(block))
        last: Message = {"version": self.version, "total": len(self.content)}
        if request["have"] and self.deltas:
            last["deltas"] = [*self.deltas]
        yield Answer(last, memoryview(b""))


def fetched(version: int, content: bytes, identity: UUID) -> Snapshot:
    return RemoteSnapshots(cast(RpcClient, LyingLink(version, content))).current(identity)


def test_only_deltas_are_sent_to_a_client_that_has_an_earlier_version(
    filled: InProcessServer, clients_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diesel_fs.repository.chains._SNAPSHOT_BYTES_MIN", 0)
    admin, store = filled.admin, filled.store
    maker = ChunkMaker(admin)
    for i in range(300):  # so that a delta is a small part of the snapshot
        maker.add(b"f%d" % i, b"%d" % i)
    maker.put(*maker.seal())
    store.publish("ds", as_snapshot=True)
    own = admin.view("ds")
    answers: list[tuple[object, object]] = []
    real = filled.handlers["snapshot"]

    async def counted(request: Request) -> AsyncGenerator[Reply, None]:
        async for reply in real(request):  # type: ignore[union-attr]  # one of several kinds
            answers.append((reply.message.get("deltas"), reply.message.get("total", 0)))
            yield reply

    filled.handlers["snapshot"] = counted

    def publish(path: bytes) -> Snapshot:
        ChunkMaker(admin).file(path, b"1")
        store.publish("ds")
        return store.snapshots.load_current(store.meta, store.meta.head("ds"), full=True)

    for lazy in (True, False):
        publish(b"new%d" % lazy)
        expected = publish(b"newer%d" % lazy)
        shutil.rmtree(clients_cache)
        write_private_copy(own.identity, own.version, [own.buffer])
        found = admin.view("ds", lazy=lazy)
        assert bytes(found.buffer) == bytes(expected.buffer)
        deltas, total = answers[-1]
        assert isinstance(deltas, list)
        assert isinstance(total, int)
        assert 0 < total == sum(deltas) < len(own.buffer) // 2
    assert bytes(admin.view("ds").buffer) == bytes(expected.buffer)
    assert answers[-1] == (None, 0), "the client has a private copy of the version now"
    expected = publish(b"last")
    shutil.rmtree(clients_cache)
    write_private_copy(own.identity, own.version, [own.buffer])
    refusing = Mock(side_effect=CorruptError("other rows"))
    monkeypatch.setattr("diesel_fs.remote.repository.apply_deltas", refusing)
    assert bytes(admin.view("ds").buffer) == bytes(expected.buffer)
    assert answers[-1][0] is None, "a client that cannot apply deltas gets the whole snapshot"


def test_deltas_with_wrong_lengths_are_refused(
    filled: InProcessServer, clients_cache: Path
) -> None:
    view = filled.admin.view("ds")
    content = bytes(view.buffer)
    for lengths in ([len(content) - 1], [0, len(content)], [-1, len(content) + 1], [len(content)]):
        link = LyingLink(view.version + 1, content, lengths)
        with pytest.raises(CorruptError, match="in place of version"):  # of the second request
            RemoteSnapshots(cast(RpcClient, link)).current(view.identity)


def test_a_server_that_always_sends_deltas_is_refused(
    filled: InProcessServer, clients_cache: Path
) -> None:
    identity = filled.admin.view("ds").identity
    shutil.rmtree(clients_cache)

    class AlwaysDeltas(LyingLink):
        def stream(self, request: Message) -> Iterator[Answer]:
            return super().stream({**request, "have": 1})

    for version in (0, 7):
        snapshots = RemoteSnapshots(cast(RpcClient, AlwaysDeltas(7, b"x", [1])))
        with pytest.raises(CorruptError, match="that has no version"):
            snapshots.load(identity, version) if version else snapshots.current(identity)
    with pytest.raises(CorruptError, match="version 3 in place of version 7"):
        RemoteSnapshots(cast(RpcClient, LyingLink(3, b"x"))).load(identity, 7)


def test_a_damaged_or_other_snapshot_is_refused(
    filled: InProcessServer, clients_cache: Path
) -> None:
    ChunkMaker(filled.admin, "other").file(b"x", b"y")
    true, other = filled.store.view("ds"), filled.store.view("other")
    content, version = bytes(true.buffer), true.version
    assert fetched(version, content, true.identity).version == version
    shutil.rmtree(clients_cache)
    damaged = [content[:-1], content + b"x", b""]
    for place in (100, len(content) - 70):
        flipped = bytearray(content)
        flipped[place] ^= 1
        damaged.append(bytes(flipped))
    for bad in damaged:
        with pytest.raises(FormatError):
            fetched(version, bad, true.identity)
    for claimed, view in ((other.version, other), (version + 1, true)):
        with pytest.raises(CorruptError, match="in place of version"):
            fetched(claimed, bytes(view.buffer), true.identity)
    assert not list(clients_cache.rglob("*-*"))


# Jobs


def hold_verify(patch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    real, go, runs = LocalRepository.verify, threading.Event(), list[int]()

    def slow(*arguments: object, **named: object) -> object:
        runs.append(1)
        assert go.wait(20)
        return real(*arguments, **named)  # type: ignore[arg-type]  # what came is passed on

    patch.setattr(LocalRepository, "verify", slow)
    return go, runs


def test_a_job_is_joined_and_goes_on_without_clients(filled: InProcessServer) -> None:
    go, runs = hold_verify(filled.patch)
    with ThreadPoolExecutor(3) as threads:
        both = [threads.submit(filled.admin.verify, "ds") for _ in range(2)]
        wait_until(lambda: runs)
        with pytest.raises(BusyError):
            filled.admin.verify("ds", headers_only=True)
        go.set()
        assert [each.result(20).files for each in both] == [3, 3]
    assert len(runs) == 1
    assert filled.admin.verify("ds", headers_only=True).sound


def test_S12_readers_leave_room_for_jobs_of_administrators(filled: InProcessServer) -> None:
    for i in range(4):
        ChunkMaker(filled.admin, f"ds{i}").file(b"a", b"1")
    go, runs = hold_verify(filled.patch)
    with ThreadPoolExecutor(2) as threads:
        under_way = [threads.submit(filled.admin.verify, f"ds{i}") for i in range(2)]
        wait_until(lambda: len(runs) == 2)
        try:
            with pytest.raises(BusyError, match="jobs are under way"):
                filled.admin.verify("ds2")
            assert filled.admin.recover("ds3").problems == []
        finally:
            go.set()
        assert all(each.result(20).sound for each in under_way)


def test_a_failed_job_raises_its_error_and_can_be_started_again(filled: InProcessServer) -> None:
    (chunk,) = filled.chunks()
    name = chunk_object(filled.identity, chunk)
    content = filled.store.objects.get(name)
    filled.store.objects.delete(name)
    content[-1] ^= 1
    filled.store.objects.put(name, [content])
    findings = filled.admin.verify("ds")
    assert [problem for problem in findings.problems if "damaged" in problem]
    with pytest.raises(NoSuchDataset):
        filled.admin.verify("other")
    progress: list[tuple[int, int]] = []
    assert filled.admin.recover("ds", None, lambda *far: progress.append(far)).problems == []
    with pytest.raises(UsageError):
        list(link_of(filled.admin).stream({"do": "recover", "dataset": "ds", "since_s": "x"}))
