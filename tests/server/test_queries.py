"""Requests about datasets, without a socket: an answer is never wrong because the server does not
know."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from uuid import UUID

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
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.net.client import RpcClient
from diesel_fs.net.client_connection import Answer
from diesel_fs.remote.repository import RemoteSnapshots
from diesel_fs.repository.local import LocalRepository
from diesel_server import queries as asking
from tests.rows import each_row

from .in_process_server import ChunkMaker, InProcessServer, link_of, read
from .in_process_server import filled as filled
from .in_process_server import server as server

# Entries


def test_an_answer_has_all_that_was_put_before_the_request(filled: InProcessServer) -> None:
    """By the metadata store while there is no snapshot of that version, by one afterwards."""
    sealer = ChunkMaker(filled.admin)
    for i in range(30):
        sealer.file(b"more/f%d" % i, b"x" * i)
        assert filled.admin.stat("ds", b"more/f%d" % i).size == i
        assert filled.admin.stat("ds", b"more").kind == Kind.FOLDER
        assert len(filled.admin.list("ds", b"more").names) == i + 1
        with pytest.raises(NoSuchPath):
            filled.admin.stat("ds", b"more/f%d" % (i + 1))
    until = time.monotonic() + 10
    while not _service(filled)._views:
        assert time.monotonic() < until
        filled.admin.stat("ds", b"a")
        time.sleep(0.05)
    assert filled.admin.stat("ds", b"more/f29").size == 29


def _service(filled: InProcessServer) -> asking.QueryHandlers:
    handler = filled.handlers["datasets"]
    owner = getattr(handler, "__self__")  # noqa: B009  # a bound method's
    assert isinstance(owner, asking.QueryHandlers)
    return owner


PATHS = [b"", b"a", b"d", b"d/b", b"d/e", b"d/e/c", b"nothing", b"d/nothing", b"a/below", b"dd"]


@pytest.mark.parametrize("mapped", [False, True])
def test_snapshot_and_metadata_store_give_the_same_entries(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    if mapped:
        monkeypatch.setattr(asking, "FEW_PATHS", 0)
    else:
        monkeypatch.setattr(_service(filled)._making, "start", lambda _: None)
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


@pytest.mark.parametrize("mapped", [False, True])
def test_a_folder_is_listed_page_by_page(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    sealer = ChunkMaker(filled.admin)
    names = sorted(b"n%d" % i for i in range(100))
    for i, name in enumerate(names):
        sealer.add(b"many/" + name, b"x" * i)
    sealer.put(*sealer.seal())
    monkeypatch.setattr(asking, "NAMES_PER_ANSWER", 7)
    if mapped:
        filled.loop.run(lambda: _map(filled))
    link_of(filled.admin).asked.clear()
    rows = filled.admin.list("ds", b"many")
    assert rows.names == names
    assert rows.records["size"].tolist() == list(range(100))
    assert link_of(filled.admin).asked.count("list") == 15
    assert sorted(filled.admin.list("ds").names) == [b"a", b"d", b"many"]
    for folder in (b"a", b"nowhere", b"d/nothing"):
        with pytest.raises(NoSuchPath):
            filled.admin.list("ds", folder)
    filled.admin.begin("empty")
    assert filled.admin.list("empty").names == []


async def _map(filled: InProcessServer) -> None:
    service = _service(filled)
    await service._making.run(await service.find_dataset(filled.store.dataset("ds").identity))


def test_C3_C4_lost_commits_are_an_error_and_never_a_missing_file(
    filled: InProcessServer, tmp_path: Path
) -> None:
    """The metadata store lost its newest commits, then all: never "no such file"."""
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
    time.sleep(0.6)  # a listing is as old as that
    for path in (b"later", b"nothing"):
        with pytest.raises(MetadataBehind, match="recover"):
            filled.admin.stat("ds", path)
    with pytest.raises(MetadataBehind, match="recover"):
        filled.admin.list("ds")
    assert filled.admin.view("ds").lookup(b"later") > 0
    filled.store.meta.drop(filled.store.dataset("ds").identity)
    for path in (b"later", b"nothing"):
        with pytest.raises(MetadataBehind, match="recover"):
            filled.admin.stat("ds", path)
    assert filled.admin.view("ds").lookup(b"later") > 0
    with pytest.raises(NoSuchDataset):
        filled.admin.dataset("other")
    with pytest.raises(MetadataBehind):
        sealer.session.new_id()
    assert filled.admin.recover("ds").problems == []
    assert filled.admin.stat("ds", b"later").size == 3
    with pytest.raises(NoSuchPath):
        filled.admin.stat("ds", b"nothing")


def test_reads_go_on_while_the_metadata_store_is_away(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, (chunk,) = filled.admin.view("ds"), filled.chunks()
    calls = []

    def away(*_: object) -> None:
        calls.append(1)
        time.sleep(0.2)
        raise MetadataError("it is away")

    assert filled.admin.staleness_warning(view) == ""
    for name in ("head", "heads", "lookup", "children", "changes", "commit"):
        monkeypatch.setattr(filled.store.meta, name, away)
    assert filled.admin.view("ds").version == view.version
    said = filled.admin.staleness_warning(view)
    assert "the server says: it is away" in said
    assert f"this is version {view.version} of ds, the newest snapshot" in said
    assert [info.name for info in filled.admin.datasets()] == ["ds"]
    info = filled.admin.dataset("ds")
    assert info.head is None
    assert read(filled.admin, info.identity, chunk, 8) == b"\x93DIESEL\n"
    calls.clear()
    begun = time.monotonic()

    def ask(_: int) -> bool:
        with pytest.raises(MetadataError, match="away"):
            filled.admin.stat("ds", b"a")
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(100)))
    assert time.monotonic() - begun < 5  # not 20 s
    assert len(calls) < 10
    monkeypatch.undo()
    time.sleep(1.1)
    assert filled.admin.stat("ds", b"a").size == 1
    assert filled.admin.staleness_warning(filled.admin.view("ds")) == ""


def test_C2_a_writer_waits_for_a_metadata_store_that_is_away(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = filled.admin.begin("ds")
    real, back_s = filled.store.meta.head, time.monotonic() + 2

    def away(name: str) -> object:
        if time.monotonic() < back_s:
            raise MetadataError("it is away")
        return real(name)

    monkeypatch.setattr(filled.store.meta, "head", away)
    session.new_id()
    assert time.monotonic() > back_s
    back_s += 3600
    monkeypatch.setattr("diesel_fs.remote.repository._HEAD_WAIT_S", 0.5)
    with pytest.raises(MetadataError, match="it is away") as error:
        session.new_id()
    assert not isinstance(error.value, MetadataBehind)


def test_many_requests_share_one_read_of_the_head(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = filled.store.meta.head
    looks = []

    def slow(name: str) -> object:
        looks.append(name)
        time.sleep(0.05)
        return real(name)

    monkeypatch.setattr(filled.store.meta, "head", slow)
    filled.admin.stat("ds", b"a")
    looks.clear()
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda _: filled.admin.stat("ds", b"a"), range(200)))
    assert len(looks) < 60


# Snapshots


def test_a_snapshot_is_fetched_once(
    filled: InProcessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = filled.admin.view("ds")  # the server's private copy
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "client's"))
    pieces = []
    real = filled.handlers["snapshot"]

    async def counted(request: object) -> object:
        async for reply in real(request):  # type: ignore[arg-type, union-attr]  # one of several kinds of handlers
            pieces.append(len(reply.payload))
            yield reply

    filled.handlers["snapshot"] = counted  # type: ignore[assignment]  # a fault is put in
    fetched = filled.admin.view("ds")
    assert bytes(fetched.buffer) == bytes(view.buffer)
    assert pieces == [1, 0]
    assert filled.admin.view("ds").version == view.version
    assert pieces == [1, 0, 0]
    shutil.rmtree(tmp_path / "client's")
    assert filled.admin.view("ds").version == view.version
    assert filled.admin.view_at("ds", view.version).version == view.version
    assert filled.admin.snapshots.newest(view.identity) == view.version
    assert [each.version for each in filled.admin.kept_versions("ds")] == [view.version]
    ChunkMaker(filled.admin).file(b"more", b"1")
    assert filled.admin.view("ds").lookup(b"more") > 0
    with pytest.raises(DieselError):
        filled.admin.view_at("ds", 5)


def test_an_empty_dataset_has_a_view(server: InProcessServer) -> None:
    server.admin.begin("ds")
    assert len(server.admin.view("ds")) == 1
    assert server.admin.kept_versions("ds") == []


class LyingLink:
    """Stands for a link to a server: sends these bytes as the snapshot of this version."""

    def __init__(self, version: int, content: bytes) -> None:
        self.version, self.content = version, content

    def stream(self, _: object) -> Iterator[Answer]:
        if self.content:
            block = lz4.block.compress(self.content, store_size=False)
            yield Answer({"more": True, "bytes": len(self.content)}, memoryview(block))
        yield Answer({"version": self.version, "total": len(self.content)}, memoryview(b""))


def fetched(link: LyingLink, identity: UUID) -> Snapshot:
    """What a client takes for the current snapshot of a dataset."""
    return RemoteSnapshots(cast(RpcClient, link)).current(identity)


@each_row(
    "damaged",
    [
        lambda view: view[:-1],
        lambda view: view[:100] + bytes([view[100] ^ 1]) + view[101:],
        lambda view: view + b"x",
        lambda view: b"",
        lambda view: view[:-70] + bytes([view[-70] ^ 1]) + view[-69:],
    ],
)
def test_a_damaged_snapshot_from_a_server_is_refused(
    filled: InProcessServer,
    damaged: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it sends is checked whole before anything of it is used, and is not kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "client's"))
    true = filled.store.view("ds")
    content = bytes(true.buffer)
    assert fetched(LyingLink(true.version, content), true.identity).version == true.version
    shutil.rmtree(tmp_path / "client's")
    with pytest.raises(FormatError):
        fetched(LyingLink(true.version, damaged(content)), true.identity)
    assert not list((tmp_path / "client's").rglob("*-*"))


def test_another_snapshot_than_was_asked_for_is_refused(
    filled: InProcessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intact, but of another dataset, or of another version than the server says."""
    ChunkMaker(filled.admin, "other").file(b"x", b"y")
    true, other = filled.store.view("ds"), filled.store.view("other")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "client's"))
    for version, view in ((other.version, other), (true.version + 1, true)):
        with pytest.raises(CorruptError, match="in place of version"):
            fetched(LyingLink(version, bytes(view.buffer)), true.identity)
    assert not list((tmp_path / "client's").rglob("*-*"))


# Jobs


def test_a_job_is_joined_and_goes_on_without_clients(
    filled: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go, runs = LocalRepository.verify, threading.Event(), []

    def slow(*arguments: object, **named: object) -> object:
        runs.append(1)
        assert go.wait(20)
        return real(*arguments, **named)  # type: ignore[arg-type]  # what came is passed on

    monkeypatch.setattr(LocalRepository, "verify", slow)
    with ThreadPoolExecutor(3) as threads:
        both = [threads.submit(filled.admin.verify, "ds") for _ in range(2)]
        until = time.monotonic() + 10
        while not runs:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(BusyError):
            filled.admin.verify("ds", headers_only=True)
        go.set()
        assert [each.result(20).files for each in both] == [3, 3]
    assert len(runs) == 1
    assert filled.admin.verify("ds", headers_only=True).sound


def test_a_failed_job_raises_its_error_and_can_be_started_again(filled: InProcessServer) -> None:
    (chunk,) = filled.chunks()
    name = chunk_object(filled.store.dataset("ds").identity, chunk)
    content = filled.store.objects.get(name)
    filled.store.objects.delete(name)
    content[-1] ^= 1
    filled.store.objects.put(name, [content])
    findings = filled.admin.verify("ds")
    assert [problem for problem in findings.problems if "damaged" in problem]
    with pytest.raises(NoSuchDataset):
        filled.admin.verify("other")
    told: list[tuple[int, int]] = []
    assert filled.admin.recover("ds", None, lambda *far: told.append(far)).problems == []
    with pytest.raises(UsageError):
        list(link_of(filled.admin).stream({"do": "recover", "dataset": "ds", "since_s": "x"}))
