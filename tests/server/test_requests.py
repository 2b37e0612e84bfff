"""Requests and their roles, without a socket: bad input is refused before anything is stored."""

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from uuid import UUID, uuid4

import pytest

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.extract import get
from diesel_fs.errors import (
    BusyError,
    ConflictError,
    CorruptError,
    DieselError,
    ForeignError,
    FormatError,
    MetadataError,
    NoSuchDataset,
    NoSuchPath,
    ObjectExists,
    ObjectMissing,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.chunk import ChunkHeader, damaged_places
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.chunk_id import IdFields, id_fields, stamp
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object, dataset_object, lease_object, lease_prefix
from diesel_fs.ingest import FileSource, put
from diesel_fs.net.messages import Message
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.repository.leases import ReadLease, leased_versions
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.provenance import ArchiveRecord
from diesel_fs.repository.validation import (
    CLOCK_ALLOWANCE_S,
    PUT_WINDOW_S,
    ValidatedChunk,
    batch_of,
)
from diesel_fs.storage.accounts.account import Account, Role
from diesel_server.requests import updates
from diesel_server.requests.directory import Directory
from diesel_server.requests.head_cache import HeadCache
from tests.rows import each_row

from ..repository.purge.purged import read_all
from .in_process_server import KEY, ChunkMaker, InProcessServer, link_of, read
from .in_process_server import filled as filled
from .in_process_server import server as server

# Roles

NEEDED: dict[str, Role] = {
    **dict.fromkeys(("dataset", "snapshot", "kept", "read", "stat", "list"), Role.READ),
    **dict.fromkeys(("reclaimable", "verify", "archives", "lease", "join", "leave"), Role.READ),
    **dict.fromkeys(("begin", "put", "finish", "record_archive"), Role.WRITE),
    **dict.fromkeys(("recover", "purge", "delete_dataset"), Role.ADMIN),
}


RECORD = ArchiveRecord("a", bytes(16), b"", "t", 1, b"", 0.5, 0, False, (), (), ())


def request(do: str, name: str, identity: UUID) -> Message:
    """A request that lacks only the right to send it (and, for `put`, a chunk)."""
    fields: Message = {
        "parts": b"",
        "paths": b"a",
        "folder": b"",
        "after": b"",
        "version": 0,
        "lease": "0" * 32,
        "seconds": 0,
        "task": "t",
        "rank": 0,
        "instance": bytes(16),
        "address": "node:1",
        "holds": 1,
        "certificate": b"",
        "keyed": True,
        "since": 0,
        "state": 0,
        "secret": b"",
        "record": RECORD.pack(),
    }
    return {"do": do, "dataset": name, "identity": identity.bytes, **fields}


@pytest.mark.parametrize("do", NEEDED)
@each_row("role", list(Role))
def test_S10_every_request_needs_its_role(filled: InProcessServer, do: str, role: Role) -> None:
    identity = filled.identity
    link = filled.link(Account("somebody", KEY, grants={"ds": role}))
    if role >= NEEDED[do]:
        try:
            list(link.stream(request(do, "ds", identity)))
        except FormatError:
            assert do == "put"  # there was no chunk
        except UsageError:
            assert do in ("join", "leave")  # and no Redis
        return
    if role >= Role.READ:
        with pytest.raises(PermissionDenied):
            list(link.stream(request(do, "ds", identity)))
        return
    nowhere = uuid4()
    with pytest.raises(NoSuchDataset) as hidden:
        list(link.stream(request(do, "ds", identity)))
    with pytest.raises(NoSuchDataset) as missing:
        list(link.stream(request(do, "no", nowhere)))
    words = missing.value.message.replace(str(nowhere), str(identity)).replace("'no'", "'ds'")
    assert hidden.value.message == words


@each_row("do", [do for do in NEEDED if do != "begin"])
def test_no_error_reveals_where_the_store_is(server: InProcessServer, do: str) -> None:
    with pytest.raises(NoSuchDataset) as error:
        list(link_of(server.admin).stream(request(do, "no", uuid4())))
    assert "file:" not in str(error.value)


def test_a_listing_shows_the_datasets_that_the_user_may_read(filled: InProcessServer) -> None:
    for name in ("other", "third"):
        filled.admin.begin(name)
    reader = filled.client(Account("r", KEY, grants={"ds": Role.READ, "third": Role.ADMIN}))
    assert [info.name for info in reader.datasets()] == ["ds", "third"]
    assert [info.name for info in filled.admin.datasets()] == ["ds", "other", "third"]
    assert filled.client(Account("none", KEY)).datasets() == []


def test_a_writer_cannot_create_a_dataset(server: InProcessServer) -> None:
    writer = server.with_role(Role.WRITE, "ds")
    with pytest.raises(PermissionDenied):
        writer.begin("ds")
    with pytest.raises(NoSuchDataset):
        writer.begin("ds", create=False)
    with pytest.raises(NoSuchDataset):
        writer.begin("other")
    server.with_role(Role.ADMIN, "ds").begin("ds")
    ChunkMaker(writer).file(b"a", b"1")
    assert writer.stat("ds", b"a").size == 1


def test_S10_a_chunk_of_another_dataset_cannot_be_read(filled: InProcessServer) -> None:
    (chunk,) = filled.chunks()
    ChunkMaker(filled.admin, "other").file(b"x", b"y")
    reader = filled.with_role(Role.READ, "other")
    with pytest.raises(ObjectMissing):
        read(reader, filled.store.dataset("other").identity, chunk, 10)
    with pytest.raises(NoSuchDataset):
        read(reader, filled.identity, chunk, 10)


def lease_request(identity: UUID, token: str, seconds: int = 60) -> Message:
    return {
        "do": "lease", "identity": identity.bytes, "lease": token, "version": 1, "seconds": seconds,
    }  # fmt: skip


@each_row("token", ["purge", "policy", "../x", "0" * 31, "G" * 32, "0" * 64])
def test_S10_a_lease_has_a_token_of_32_hex_digits(filled: InProcessServer, token: str) -> None:
    with pytest.raises(UsageError):
        link_of(filled.admin).call(lease_request(filled.identity, token))


def test_S12_the_leases_of_a_user_are_limited(filled: InProcessServer) -> None:
    filled.patch.setattr(updates, "LEASES_MAX", 3)
    identity = filled.identity
    link = filled.link(Account("somebody", KEY, grants={"ds": Role.READ}))

    def lease(number: int, seconds: int = 600) -> None:
        link.call(lease_request(identity, f"{number:032x}", seconds))

    for number in (0, 1, 2, 1):
        lease(number)
    with pytest.raises(BusyError, match="3 leases"):
        lease(3)
    assert len(list(filled.store.objects.list(lease_prefix(identity)))) == 3
    lease(0, 0)
    lease(3, 1)
    time.sleep(1.1)
    lease(4)


def test_a_reader_gets_a_lease_through_the_server(filled: InProcessServer) -> None:
    """The server cannot see the client's process."""
    view = filled.admin.view("ds")
    reader = filled.with_role(Role.READ, "ds")
    lease = ReadLease.take(reader.objects, view.identity, view.version)
    objects = filled.store.objects
    assert leased_versions(objects, view.identity, time.time()) == {view.version}
    assert leased_versions(objects, view.identity, time.time() + 3600) == set()
    lease.switch_version(view.version + 1)
    assert leased_versions(objects, view.identity, time.time()) == {view.version + 1}
    lease.close()
    assert leased_versions(objects, view.identity, time.time()) == set()
    ReadLease.take(filled.with_role(Role.READ, "other").objects, view.identity, 1).close()
    assert leased_versions(objects, view.identity, time.time()) == set()


@pytest.mark.parametrize("is_reported", [True, False])
def test_L5_H16_a_deleted_dataset_stays_for_its_readers(
    filled: InProcessServer, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another server may delete it; this one finds that out at its next check."""
    identity, (chunk,) = filled.identity, filled.chunks()
    reader, other = filled.with_role(Role.READ, "ds"), filled.with_role(Role.ADMIN, "other")
    version = reader.view("ds").version
    content = read(reader, identity, chunk, 50)
    lease = ReadLease.take(reader.objects, identity, version)
    if is_reported:
        caplog.clear()
        assert filled.admin.delete_dataset("ds").left == 2  # the chunk and the snapshot
        loggers = [
            record.name for record in caplog.records if "2 objects are left" in record.message
        ]
        assert len(loggers) == 2  # by the server to itself, and to the client
    else:
        with LocalRepository.open(filled.store.url) as another:
            another.delete_dataset("ds")
        filled.patch.setattr("diesel_server.requests.directory.REMEMBERED_S", 0)
    for _ in range(2):
        assert read(reader, identity, chunk, 50) == content
        lease.switch_version(version + 1)
        assert leased_versions(filled.store.objects, identity, time.time()) == {version + 1}
        lease.switch_version(version)
        for do in NEEDED.keys() - {"begin", "put", "read", "lease", "join", "leave"}:
            with pytest.raises(NoSuchDataset):
                list(link_of(filled.admin).stream(request(do, "no", identity)))
        for do in ("join", "leave"):  # found, but there is no Redis
            with pytest.raises(UsageError):
                link_of(reader).call(request(do, "ds", identity))
        assert filled.admin.datasets() == []
        with pytest.raises(NoSuchDataset):
            filled.admin.dataset("ds")
        with pytest.raises(NoSuchDataset) as hidden:
            read(other, identity, chunk, 50)
        with pytest.raises(NoSuchDataset) as missing:
            read(other, nowhere := uuid4(), chunk, 50)
        assert hidden.value.message == missing.value.message.replace(str(nowhere), str(identity))
    lease.close()
    assert leased_versions(filled.store.objects, identity, time.time()) == set()
    done = filled.admin.delete_dataset("ds")
    assert (done.removed, done.left) == (2, 0)
    with pytest.raises(NoSuchDataset):
        read(reader, identity, chunk, 50)
    with pytest.raises(NoSuchDataset):
        reader.objects.delete(lease_object(identity, "0" * 32))


def test_a_deleted_dataset_is_not_the_new_one_of_its_name(filled: InProcessServer) -> None:
    old, (chunk,) = filled.identity, filled.chunks()
    content = read(filled.admin, old, chunk, 50)
    lease = ReadLease.take(filled.admin.objects, old, filled.admin.view("ds").version)
    filled.admin.delete_dataset("ds")
    directory = Directory(filled.store)
    assert directory.find(old).is_being_deleted
    assert directory.named("ds") is None
    sealer = ChunkMaker(filled.admin)
    sealer.file(b"new", b"1")
    sealer.session.finish()
    assert read(filled.admin, old, chunk, 50) == content
    assert filled.admin.dataset("ds").identity == sealer.session.identity != old
    assert sorted(filled.admin.list("ds").names) == [b"new"]
    lease.close()
    assert filled.admin.verify("ds").sound


@pytest.mark.parametrize(
    "work",
    [
        lambda admin: admin.begin("ds"),
        lambda admin: admin.verify("ds").sound,
        lambda admin: admin.delete_dataset("ds"),
    ],
)
def test_C1_a_metadata_store_that_was_away_when_the_server_started(
    filled: InProcessServer, tmp_path: Path, work: Callable[[RemoteRepository], object]
) -> None:
    filled.store.close()
    file, away = tmp_path / "store/meta.sqlite", tmp_path / "away"
    file.rename(away)
    filled.store.open_metadata(create=False)
    assert filled.store.meta_problem is not None
    away.rename(file)
    assert work(filled.admin)
    assert filled.store.meta_problem is None


class UnavailableRepository:
    """A repository that is opening its metadata store while other requests need it, too."""

    def __init__(self) -> None:
        self.tries = 0
        self.others: list[threading.Thread] = []
        self._problem = MetadataError("away")
        self._looks = threading.Semaphore(0)

    @property
    def meta_problem(self) -> MetadataError:
        self._looks.release()
        return self._problem

    def open_metadata(self, *, create: bool) -> None:
        assert not create
        for thread in self.others if not self.tries else ():
            thread.start()
        for _ in range(2 + len(self.others)):  # two uses are the caller's
            assert self._looks.acquire(timeout=20)
        self.tries += 1
        self._problem = MetadataError("away still")


def test_C1_requests_share_one_attempt_to_open_the_metadata_store() -> None:
    """Each attempt takes seconds: one after the other they would delay all requests."""
    away = UnavailableRepository()
    markers = HeadCache(cast("LocalRepository", away))
    away.others = [threading.Thread(target=markers.reopen, daemon=True) for _ in range(3)]
    markers.reopen()
    for thread in away.others:
        thread.join(20)
        assert not thread.is_alive()
    assert away.tries == 1
    markers.reopen()
    assert away.tries == 2


def test_a_client_can_delete_and_replace_leases_only(filled: InProcessServer) -> None:
    objects, identity = filled.admin.objects, filled.identity
    (chunk,) = filled.chunks()
    name = chunk_object(identity, chunk)
    for change in (
        lambda: objects.delete(name),
        lambda: objects.replace(name, [b""]),
        lambda: objects.replace(lease_object(identity, "purge"), [b"{}"]),
        lambda: objects.put(dataset_object(identity), [b""]),
    ):
        with pytest.raises(UsageError):
            change()  # type: ignore[no-untyped-call]  # any of the lambdas
    with pytest.raises(UsageError):
        list(objects.list("datasets/"))
    with pytest.raises(UsageError):
        _ = objects.housekeeping
    content = filled.store.objects.get(name)
    assert objects.get(name) == content
    assert objects.get(name, 8, 4) == objects.get(name, 8)[:4] == content[8:12]
    assert objects.stat(name).bytes == len(content)
    room = bytearray(20)
    objects.fast_reads.read_uncached(name, 3, room)
    assert room == content[3:23]
    parts = list(
        objects.fast_reads.read_ranges(name, [(0, 5), (3, 9), (0, 0)], memoryview(bytearray(9)))
    )
    assert parts == [content[:5], content[3:12], b""]
    for start, size in ((len(content) - 1, 2), (1 << 31, 1)):
        with pytest.raises(DieselError):
            objects.get(name, start, size)


# Chunks


def test_Z12_a_forged_chunk_never_reaches_the_store(filled: InProcessServer) -> None:
    before = filled.chunks()
    sealer = ChunkMaker(filled.admin)
    good, parts = sealer.sealed(b"f", b"content" * 100)
    whole, now = b"".join(parts), id_fields(good).seconds
    future = now + CLOCK_ALLOWANCE_S + 60

    def forged(seconds: int, foreign: ChunkId | None = None) -> tuple[ChunkId, list[bytes]]:
        sealer.add(b"f", b"content" * 100)
        if foreign is not None:
            sealer.builder.set_stamp(stamp(foreign, 0))
        return sealer.seal(IdFields(seconds, 1, 2, 3).id())

    bad: list[tuple[type[DieselError], ChunkId, list[bytes]]] = [
        (CorruptError, *forged(future)),
        (CorruptError, *forged(now, IdFields(future, 1, 2, 3).id())),
        (CorruptError, *forged(now, before[0])),
        (ObjectExists, *forged(now - PUT_WINDOW_S - 60)),
        (FormatError, good, [whole[:-1]]),
        (CorruptError, good, [whole, b"x"]),
        (FormatError, good, [whole[:50]]),
        (FormatError, good, []),
        (FormatError, good, [os.urandom(len(whole))]),
    ]
    for place in [*range(0, len(whole) - 700, 7), *range(len(whole) - 700, len(whole), 50)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << random.Random(place).randrange(8)
        bad.append((FormatError, good, [bytes(flipped)]))
    for error, chunk, sent in bad:
        with pytest.raises(error):
            sealer.put(chunk, sent)
        assert filled.chunks() == before
    filled.admin.begin("other")
    other = filled.store.dataset("other").identity.bytes
    with pytest.raises(ForeignError):
        link_of(filled.admin).call({"do": "put", "identity": other}, parts)
    assert filled.chunks("other") == []
    sealer.put(good, parts)
    assert filled.chunks() == [*before, good]


def test_a_put_can_be_repeated(filled: InProcessServer) -> None:
    """A client that got no answer repeats it."""
    sealer = ChunkMaker(filled.admin)
    chunk, parts = sealer.sealed(b"f", b"1")
    for _ in range(3):
        sealer.put(chunk, parts)
    marker = filled.admin.dataset("ds").head
    assert marker is not None
    assert (marker.files, marker.chunks) == (4, 2)
    sealer.add(b"f", b"2")
    _, other = sealer.seal(chunk)
    with pytest.raises(ObjectExists):
        sealer.put(chunk, other)
    name = chunk_object(sealer.session.identity, chunk)
    assert filled.store.objects.get(name) == b"".join(parts)


def test_A5_a_put_with_a_lost_commit_is_completed_by_a_repeat(filled: InProcessServer) -> None:
    sealer = ChunkMaker(filled.admin)
    chunk, parts = sealer.sealed(b"f", b"1")
    filled.store.objects.put(chunk_object(sealer.session.identity, chunk), parts)
    with pytest.raises(NoSuchPath):
        filled.admin.stat("ds", b"f")
    sealer.put(chunk, parts)
    assert filled.admin.stat("ds", b"f").size == 1


def test_commits_of_one_moment_are_one_and_a_bad_one_fails_alone(filled: InProcessServer) -> None:
    sealer = ChunkMaker(filled.admin)
    sealed = [sealer.sealed(b"f%d" % i, b"x" * i) for i in range(16)]
    real, bad, sizes = filled.store.commit_all, sealed[14][0], list[int]()

    def slow(identity: UUID, commits: list[ValidatedChunk]) -> int:
        sizes.append(len(commits))
        time.sleep(0.1)
        if any(each.batch.chunk.id == bad for each in commits):
            raise UsageError("this one")
        return real(identity, commits)

    def is_put(each: tuple[ChunkId, list[bytes]]) -> bool:
        try:
            sealer.put(*each)
        except UsageError:
            return False
        return True

    filled.patch.setattr(filled.store, "commit_all", slow)
    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(is_put, sealed[:12]))
        assert sum(sizes) == 12
        assert len(sizes) <= 5
        assert list(threads.map(is_put, sealed[12:])) == [True, True, False, True]
    for i in {*range(16)} - {14}:
        assert filled.admin.stat("ds", b"f%d" % i).size == i


def test_S12_chunks_with_large_files_are_checked_one_at_a_time(server: InProcessServer) -> None:
    """The bytes on the wire are counted; decoded they are up to 16 times as many."""
    server.patch.setattr(updates, "DECODED_BYTES_MAX", 1 << 20)
    real, at_work, most = damaged_places, [0], [0, 0]

    def slow(header: ChunkHeader, body: memoryview) -> list[int]:
        is_large = int(header.records["size"].max()) > 1 << 20
        at_work[0] += 1
        most[is_large] = max(most[is_large], at_work[0])
        time.sleep(0.1)
        at_work[0] -= 1
        return real(header, body)

    server.patch.setattr(updates, "damaged_places", slow)
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


def test_L5_a_put_into_a_deleted_dataset_leaves_nothing(filled: InProcessServer) -> None:
    """Another server deletes it: this one still remembers it."""
    sealer = ChunkMaker(filled.admin)
    chunk, parts = sealer.sealed(b"f", b"1")
    with LocalRepository.open(filled.store.url) as other:
        other.delete_dataset("ds")
    with pytest.raises(NoSuchDataset):
        sealer.put(chunk, parts)
    assert list(filled.store.chunk_ids(sealer.session.identity)) == []
    with pytest.raises(ConflictError):
        sealer.session.new_id()
    with pytest.raises(NoSuchDataset):
        sealer.session.finish()


def test_C4_commits_lost_during_a_put_are_committed_again(filled: InProcessServer) -> None:
    meta, objects = filled.store.meta, filled.store.objects
    sealer = ChunkMaker(filled.admin)
    identity = sealer.session.identity

    def validate(chunk: ChunkId) -> None:
        data = bytes(objects.get(chunk_object(identity, chunk)))
        start = filled.store.read_header(identity, chunk).preamble.body_start
        sealer.session.validate_chunk(data[:96], data[96:start])

    validate(lost := sealer.file(b"lost", b"1"))
    kept = [each.id for each in meta.chunks(identity) if each.id != lost]
    headers = (filled.store.read_header(identity, each) for each in kept)
    meta.rebuild("ds", identity, (batch_of(header, stored=True) for header in headers))
    validate(sealer.file(b"last", b"22"))
    sealer.session.finish()
    assert filled.admin.stat("ds", b"lost").size == 1
    assert filled.admin.stat("ds", b"last").size == 2
    assert filled.admin.verify("ds").problems == []


def test_O2_a_lost_chunk_is_named_healed_forgotten(filled: InProcessServer, tmp_path: Path) -> None:
    identity, view = filled.identity, filled.store.view("ds")
    files = [view.path(i) for i in view.files().tolist()]
    source = tmp_path / "source"
    get(view, EntryReader(view, filled.store.objects, 1 << 20), b"", source, force=False)

    def lose_all_chunks() -> None:
        for chunk in filled.chunks():
            (tmp_path / "store" / chunk_object(identity, chunk)).unlink()

    lose_all_chunks()
    problems = "\n".join(filled.admin.recover("ds").problems) + "\n"
    assert all(f": {os.fsdecode(path)}\n" in problems for path in files)
    for path in files:
        report = put(filled.admin, "ds", FileSource(source / os.fsdecode(path)), path)
        assert (report.files, report.unchanged) == (1, 0)
    assert read_all(filled.store.view("ds"), filled.store) == [b"1", b"22", b"333"]
    assert filled.admin.verify("ds").sound
    lose_all_chunks()
    assert not filled.admin.recover("ds").sound
    assert filled.admin.recover("ds", forget_lost=True).sound
    assert len(filled.store.view("ds").files()) == 0
