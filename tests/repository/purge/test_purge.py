"""`purge` (FORMAT.md, section 6): FAULTS P, Z7, A2, B, O12, on both metadata stores."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.errors import (
    BusyError,
    NoSpaceError,
    NotFoundError,
    ObjectMissing,
    ObjectStoreError,
    UsageError,
)
from diesel_fs.format.chunk_id import id_fields, stamp
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object, lease_object
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.leases import PURGE, Lease, PurgeLease
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.retention import RetentionPolicy, read_retention_policy
from diesel_fs.repository.stored import LocalWriteSession
from diesel_fs.storage.metadata.store import CommitBatch, ReadCommitted

from ...datasets import content, dataset_state, stored_bytes
from ...storage.objects.faulty_store import Fault, FaultyStore
from ...trees import facts, write
from ..folder_puts import faulty, put_folder
from ..test_interleavings import Writer
from .moved_clock import HOUR_S, MovedClock
from .purged import (
    DROP,
    NOW,
    ShortListing,
    chunks,
    dataset_of,
    dead_process,
    deleted_file,
    nothing_more_is_known,
    sound,
    tombstones,
)

STEPS = ["put /chunks/", "put /snapshots/", "delete /snapshots/", "delete /chunks/", "commit",
         "forget"]  # fmt: skip


def test_P1_space_comes_back_and_nothing_is_lost(holed: LocalRepository, tmp_path: Path) -> None:
    before = stored_bytes(holed)
    report = holed.purge("ds", NOW)
    assert (report.rewritten, report.deleted > 4, report.waiting) == (report.deleted, True, 0)
    assert report.unused_bytes > 100_000
    assert stored_bytes(holed) < before * 0.55
    assert dataset_state(holed) == facts(tmp_path / "source")
    sound(holed)
    assert holed.purge("ds", NOW).rewritten == 0


def test_P12_no_reader_is_sent_to_a_deleted_chunk(holed: LocalRepository, tmp_path: Path) -> None:
    expected = facts(tmp_path / "source")
    seen: list[int] = []

    def look(name: str) -> None:
        identity = holed.dataset("ds").identity
        version = holed.snapshots.newest(identity)
        assert version == holed.meta.head("ds").version
        gone = name.rpartition("/")[2]
        assert gone not in {str(chunk) for chunk in holed.view("ds").chunk_ids}
        with LocalRepository.open(holed.url) as other:
            assert dataset_state(other) == expected
        seen.append(version)

    with faulty(holed, Fault("delete", "/chunks/", act=look)):
        holed.purge("ds", NOW)
    assert seen, "nothing was deleted: proves nothing"


def test_P4_one_purge_at_a_time_and_a_lost_lease_deletes_nothing(holed: LocalRepository) -> None:
    identity = holed.dataset("ds").identity
    with PurgeLease.take(holed.objects, identity), pytest.raises(BusyError):
        holed.purge("ds", NOW)
    name = lease_object(identity, PURGE)
    other = Lease("another", 0, time.time() + 600, "elsewhere", "", "", 1)
    before = chunks(holed)

    def lose(_: str) -> None:
        holed.objects.replace(name, [other.to_json()])

    with faulty(holed, Fault("delete", "/chunks/", act=lose)), pytest.raises(BusyError):
        holed.purge("ds", NOW)
    assert len(chunks(holed)) == len(before)  # one was written, and one deleted
    with pytest.raises(BusyError):  # the other still has it
        holed.purge("ds", NOW)
    holed.objects.delete(name)
    sound(holed)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_P1_P5_a_purge_killed_at_any_step_can_be_completed(
    holed: LocalRepository, tmp_path: Path, step: str, done: bool, clock: MovedClock
) -> None:
    """Killed there (before or after the effect), then a writer, a rebuild, and another purge."""
    expected = facts(tmp_path / "source")
    killed = holed
    with pytest.MonkeyPatch.context() as patch:
        if " " in step:
            operation, where = step.split()
            fault = Fault(operation, where, error=ObjectStoreError("killed"), done=done)
            store = FaultyStore(holed.objects, fault)
            killed = LocalRepository(store, holed.meta, url=holed.url)
        else:
            real = getattr(holed.meta, step)

            def ended(*given: object, **options: object) -> None:
                if done:
                    real(*given, **options)
                raise ObjectStoreError("killed")

            patch.setattr(holed.meta, step, ended)
        with pytest.raises(ObjectStoreError, match="killed"):
            killed.purge("ds", NOW)
    assert dataset_state(holed) == expected
    assert holed.verify("ds").problems == []
    clock.ahead_s += 2 * HOUR_S  # an uncommitted chunk is an orphan now
    with LocalRepository.open(holed.url) as again:
        again.begin("ds")
        assert dataset_state(again) == expected
        sound(again)
        again.purge("ds", NOW)
        assert dataset_state(again) == expected
        sound(again)
        assert again.purge("ds", NOW).waiting == 0
        assert stored_bytes(again) < 200_000


def test_P5_a_writer_folds_in_no_forgotten_chunk(holed: LocalRepository, clock: MovedClock) -> None:
    old = chunks(holed)

    def write_beside(_: str) -> None:
        with LocalRepository.open(holed.url) as other:
            before = other.meta.chunks(other.dataset("ds").identity)
            other.begin("ds")
            assert other.meta.chunks(other.dataset("ds").identity) == before

    clock.ahead_s = 2 * HOUR_S  # old enough for orphans
    with faulty(holed, Fault("delete", "/chunks/", act=write_beside)):
        holed.purge("ds", NOW)
    nothing_more_is_known(holed)
    assert len(set(chunks(holed)) & set(old)) <= 1
    assert holed.verify("ds").problems == []


def test_P5_a_rebuild_beside_the_deletions(holed: LocalRepository, tmp_path: Path) -> None:
    """The purge forgets them once more."""

    def rebuild_beside(_: str) -> None:
        with LocalRepository.open(holed.url) as other:
            other.recover("ds")

    with faulty(holed, Fault("delete", "/chunks/", act=rebuild_beside)):
        holed.purge("ds", NOW)
    nothing_more_is_known(holed)
    assert dataset_state(holed) == facts(tmp_path / "source")
    sound(holed)


def test_P5_a_purge_beside_a_rebuild_that_has_read(holed: LocalRepository, tmp_path: Path) -> None:
    """They are gone when the rebuild ends, which forgets them, too."""
    rebuild = holed.meta.rebuild

    def rebuild_slowly(
        name: str,
        identity: UUID,
        batches: Iterable[CommitBatch],
        late: ReadCommitted,
        newer_than: int,
    ) -> int:
        def then_purged() -> Iterator[CommitBatch]:
            yield from batches
            with LocalRepository.open(holed.url) as other:
                assert other.purge("ds", NOW).deleted > 4

        return rebuild(name, identity, then_purged(), late, newer_than)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holed.meta, "rebuild", rebuild_slowly)
        assert holed.recover("ds").problems == []
    nothing_more_is_known(holed)
    assert dataset_state(holed) == facts(tmp_path / "source")
    sound(holed)


def test_P6_files_written_while_purge_copies_win(holed: LocalRepository) -> None:
    def write_beside(_: str) -> None:
        writer = Writer(LocalRepository.open(holed.url))
        writer.builder.room(3)[:] = b"new"
        writer.builder.add_file((b"d1", b"1"), 0o644, 1, 3)
        writer.seal().commit()

    with faulty(holed, Fault("put", "/chunks/", act=write_beside)):
        holed.purge("ds", NOW)
    assert content(holed, b"d1/1") == b"new"
    sound(holed)


def test_P10_a_full_store_leaves_all_unchanged(holed: LocalRepository, tmp_path: Path) -> None:
    before = chunks(holed)
    full = Fault("put", "/chunks/", error=NoSpaceError("the store is full"))
    with faulty(holed, full), pytest.raises(NoSpaceError):
        holed.purge("ds", NOW)
    assert chunks(holed) == before
    assert dataset_state(holed) == facts(tmp_path / "source")
    sound(holed)


def test_P7_the_purge_that_removes_the_entry_keeps_the_tombstone(
    repository: LocalRepository, clock: MovedClock
) -> None:
    deleted_file(repository)
    clock.ahead_s += 2 * HOUR_S
    repository.purge("ds", NOW)
    assert tombstones(repository, b"f") == 1
    report = repository.purge("ds", DROP)
    repository.purge("ds", DROP)
    assert tombstones(repository, b"f") == 0, report
    sound(repository)
    assert content(repository, b"f") is None


def test_P7_a_chunk_that_could_not_be_deleted_keeps_the_tombstone(
    repository: LocalRepository, clock: MovedClock, tmp_path: Path
) -> None:
    deleted_file(repository)
    identity = repository.dataset("ds").identity
    old = chunk_object(identity, chunks(repository)[0])
    backup = bytes(repository.objects.get(old))
    clock.ahead_s += 2 * HOUR_S
    repository.purge("ds", NOW)
    with pytest.raises(ObjectMissing):
        repository.objects.stat(old)
    repository.objects.put(old, [backup])
    for _ in range(2):
        kept = Fault("delete", old, error=ObjectStoreError("no"))
        with faulty(repository, kept), pytest.raises(ObjectStoreError):
            repository.purge("ds", DROP)
        assert tombstones(repository, b"f") == 1
        assert content(repository, b"f") is None
    for _ in range(3):
        repository.purge("ds", DROP)
    assert tombstones(repository, b"f") == 0
    assert content(repository, b"f") is None
    sound(repository)


def test_Z7_an_unknown_chunk_with_an_older_entry_keeps_the_tombstone(
    repository: LocalRepository, clock: MovedClock
) -> None:
    """A purge that was killed between writing and committing has left a copy, younger than the put
    window, which a writer will fold in later."""
    deleted_file(repository)
    first = chunks(repository)[0]
    clock.ahead_s += 2 * HOUR_S
    repository.purge("ds", NOW)
    writer = Writer(repository)
    writer.add(b"f", b"content of f")
    writer.builder.set_stamp(stamp(first, 0))
    writer.seal()  # not committed
    for _ in range(2):
        repository.purge("ds", DROP)
    assert tombstones(repository, b"f") == 1
    clock.ahead_s += 2 * HOUR_S
    repository.begin("ds")
    assert content(repository, b"f") is None


@pytest.mark.parametrize("is_durable", [True, False])
def test_Z7_a_put_in_flight_a_delete_a_purge_and_then_the_commit(
    repository: LocalRepository, clock: MovedClock, is_durable: bool
) -> None:
    writer = Writer(repository)
    identity = writer.session.identity
    writer.add(b"f", b"in flight")
    sealed = writer.seal()
    name = chunk_object(identity, sealed.id)
    if not is_durable:
        repository.objects.delete(name)
    writer.session.delete([b"f"])
    writer.add(b"g", b"1")
    writer.seal().commit()
    for _ in range(3):
        repository.purge("ds", DROP)
        assert tombstones(repository, b"f") == 1
    if not is_durable:
        repository.objects.put(name, sealed.parts)
    sealed.commit()
    assert content(repository, b"f") is None
    clock.ahead_s += 2 * HOUR_S
    for _ in range(3):
        repository.purge("ds", DROP)
    assert tombstones(repository, b"f") == 0
    repository.objects.put(name, sealed.parts)
    if is_durable:  # a writer folds it in, since nothing distinguishes it from an orphan
        repository.begin("ds")
    else:
        sealed.session = LocalWriteSession(repository, repository.dataset("ds"))
        with pytest.raises(BusyError):
            sealed.commit()
        assert content(repository, b"f") is None
        sound(repository)


def test_O12_a_forgotten_chunk_that_is_not_listed_keeps_the_tombstone(
    repository: LocalRepository, clock: MovedClock
) -> None:
    """A purge was killed before it deleted the chunk; kept versions still know of it."""
    deleted_file(repository)
    old = chunk_object(repository.dataset("ds").identity, chunks(repository)[0])
    clock.ahead_s += 2 * HOUR_S
    real = repository.objects
    killed = Fault("delete", old, error=ObjectStoreError("killed"))
    with faulty(repository, killed), pytest.raises(ObjectStoreError, match="killed"):
        repository.purge("ds", NOW)
    repository.objects = ShortListing(real, old)
    report = repository.purge("ds", NOW)
    assert tombstones(repository, b"f") == 1, report
    assert "still there" in report.notes[0]
    repository.objects = real
    for _ in range(3):
        repository.purge("ds", DROP)
    assert tombstones(repository, b"f") == 0
    assert content(repository, b"f") is None


def test_B3_B9_damaged_and_newer_chunks_stay_as_they_are(holed: LocalRepository) -> None:
    identity = holed.dataset("ds").identity
    first = chunks(holed)[0]
    path = Path(holed.url.path) / chunk_object(identity, first)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    newer = chunk_object(identity, id_fields(ChunkId(b"\1" * 16)).id())
    holed.objects.put(newer, [b"\x93DIESEL\n" + bytes(200)])
    report = holed.purge("ds", NOW)
    assert any("stays as it is" in note for note in report.notes)
    assert holed.objects.stat(newer).bytes
    assert path.read_bytes() == damaged
    assert len(holed.verify("ds").problems) == 2


def test_small_chunks_are_merged(repository: LocalRepository, tmp_path: Path) -> None:
    source = tmp_path / "many"
    for i in range(7):
        write(source, {f"f{i}": b"%d" % i, f"d{i}/x": b"x" * i})
        put_folder(repository, source)
    assert len(chunks(repository)) == 7
    assert repository.purge("ds", NOW).deleted == 7
    assert len(chunks(repository)) == 1
    assert dataset_state(repository) == facts(source)
    sound(repository)
    assert repository.purge("ds", NOW).rewritten == 0


def test_A2_A13_leftovers_of_dead_writers_go(holed: LocalRepository, clock: MovedClock) -> None:
    folder = Path(holed.url.path) / f"datasets/{holed.dataset('ds').identity.hex}/chunks"
    host = os.uname().nodename
    dead = folder / f".tmp-{host}-{dead_process()}-{'a' * 16}"
    living = folder / f".tmp-{host}-{os.getpid()}-{'b' * 16}"
    strange = folder / f".tmp-elsewhere-1-{'c' * 16}"
    foreign = folder / "notes.txt"
    everything = (dead, living, strange, foreign)
    for file in everything:
        file.write_bytes(b"half")
    assert holed.purge("ds").leftovers == 0
    assert all(file.exists() for file in everything)
    clock.ahead_s += 25 * HOUR_S
    assert holed.purge("ds").leftovers == 1
    assert [file.exists() for file in everything] == [False, True, True, True]
    clock.ahead_s += 7 * 24 * HOUR_S
    assert holed.purge("ds").leftovers == 1
    assert [file.exists() for file in everything] == [False, True, False, True]


def test_purge_of_the_library(repository: LocalRepository) -> None:
    with dataset_of(repository) as ds:
        for i in range(4):
            ds.put(os.urandom(50_000), f"f{i}")
        ds.flush()
        ds.delete("f0")
        ds.put(b"pending", "late")
        assert ds.purge(grace_s=0, dry_run=True).rewritten == 3
        report = ds.purge(grace_s=0)
        assert (report.deleted, report.written) == (3, 1)
        assert ds.get("late") == b"pending"
        assert ds.version == repository.view("ds").version


def test_purge_of_the_library_takes_the_share_and_the_versions(repository: LocalRepository) -> None:
    with dataset_of(repository) as ds:
        for i in range(7):  # one whole chunk
            ds.put(os.urandom(600_000), f"f{i}")
        ds.flush()
        before = ds.version
        ds.delete("f0")
        assert ds.purge(grace_s=0, max_unused=0.2, dry_run=True).rewritten == 0
        assert ds.purge(grace_s=0, max_unused=0.05, dry_run=True).rewritten > 0
        with pytest.raises(UsageError, match="between 0 and 1"):
            ds.purge(max_unused=5)
        assert ds.purge(grace_s=0, keep=2).waiting == 1
        assert repository.view_at("ds", before).lookup(b"f0") >= 0
        assert ds.purge(grace_s=0, keep=0).deleted > 0
        with pytest.raises(NotFoundError):
            repository.view_at("ds", before)


def test_a_policy_stays_until_another_one_is_named(repository: LocalRepository) -> None:
    day_s = 24 * 3600
    with dataset_of(repository) as ds:
        ds.put(b"x", "a")
        ds.flush()

        def policy_after(keep: int = -1, grace_s: int = -1) -> RetentionPolicy:
            repository.purge("ds", PurgeOptions(keep=keep, grace_s=grace_s))
            return read_retention_policy(repository.objects, ds.snapshot.identity)

        assert policy_after(keep=3, grace_s=7 * day_s) == RetentionPolicy(3, 7 * day_s)
        assert policy_after() == RetentionPolicy(3, 7 * day_s)
        assert policy_after(keep=2) == RetentionPolicy(2, 7 * day_s)
        assert policy_after(keep=0) == RetentionPolicy(0, 7 * day_s)
        assert policy_after(grace_s=0) == RetentionPolicy()
