"""`purge` in bad conditions: a store restored from an older copy, wrong clocks, a full disk."""

import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diesel_fs.errors import (
    BusyError,
    CorruptError,
    DieselError,
    NoSpaceError,
    ObjectMissing,
    ObjectStoreRefused,
)
from diesel_fs.format.chunk_id import LOWEST
from diesel_fs.format.object_names import chunk_object, lease_object, snapshot_object
from diesel_fs.repository.expected_chunks import LostChunks
from diesel_fs.repository.interface import PurgeOptions, PurgeReport
from diesel_fs.repository.leases import PURGE, Lease, leased_versions, purge_is_under_way
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata

from ...datasets import dataset_state, stored_bytes
from ...storage.objects.faulty_store import Fault
from ...trees import facts
from ..folder_puts import faulty, put_folder
from ..test_interleavings import Writer
from .moved_clock import HOUR_S, MovedClock
from .purged import (
    DROP,
    NOW,
    Reader,
    ShortListing,
    chunks,
    dead_process,
    deleted_file,
    leased,
    read_all,
    sound,
    tombstones,
)

LOOK = replace(NOW, dry_run=True)


def test_P7_a_restored_store_loses_nothing_more(holed: LocalRepository, tmp_path: Path) -> None:
    """The metadata know of chunks that the backup lacks, into which contents have moved."""
    store = tmp_path / "store"
    shutil.copytree(store / "datasets", tmp_path / "backup")
    expected = facts(tmp_path / "source")
    holed.purge("ds")
    shutil.rmtree(store / "datasets")
    shutil.copytree(tmp_path / "backup", store / "datasets")
    before = chunks(holed)
    with LocalRepository.open(holed.url) as again:
        for _ in range(2):
            with pytest.raises(LostChunks):
                again.purge("ds", NOW)
            assert any("lost" in note for note in again.purge("ds", LOOK).notes)
        assert set(before) <= set(chunks(again))
        assert again.verify("ds").problems
        assert again.recover("ds").problems
        assert again.recover("ds", forget_lost=True).sound
        assert dataset_state(again) == expected
        again.purge("ds", NOW)
        assert dataset_state(again) == expected
        sound(again)


def test_O12_a_chunk_missing_in_a_listing_is_no_loss_and_justifies_no_deletion(
    holed: LocalRepository, tmp_path: Path
) -> None:
    """Nor does `recover` forget chunks that the listing left out."""
    real, identity = holed.objects, holed.dataset("ds").identity
    for hidden in (0, -1):  # the second time, a chunk that a purge has rewritten and kept for now
        before = chunks(holed)
        holed.objects = ShortListing(real, chunk_object(identity, before[hidden]))
        problems = holed.verify("ds").problems
        assert any("listing lacks" in problem for problem in problems)
        assert not any("lost" in problem for problem in problems)
        for _ in range(2):
            with pytest.raises(CorruptError, match="listing lacks"):
                holed.purge("ds", NOW)
        holed.recover("ds")
        holed.objects = real
        assert set(before) <= set(chunks(holed))
        assert dataset_state(holed) == facts(tmp_path / "source")
        sound(holed)
        holed.purge("ds")
    assert holed.purge("ds", NOW).deleted > 4


@pytest.mark.parametrize("operation", ["list", "stat", "get"])
def test_verify_beside_a_purge_finds_nothing_wrong(holed: LocalRepository, operation: str) -> None:
    """Chunks that the metadata named at first are gone when verify lists, opens or reads them."""
    last = chunk_object(holed.dataset("ds").identity, chunks(holed)[-2])

    def purge_beside(_: str) -> None:
        with LocalRepository.open(holed.url) as other:
            assert other.purge("ds", NOW).deleted > 4

    fault = Fault(operation, "/chunks/" if operation == "list" else last, act=purge_beside)
    with faulty(holed, fault):
        findings = holed.verify("ds", headers_only=operation == "stat")
    assert findings.problems == []
    assert findings.files == 30


def test_verify_beside_many_purges(holed: LocalRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    known = type(holed.meta).chunks
    monkeypatch.setattr(type(holed.meta), "chunks", lambda *a: known(*a)[1:])
    first = chunk_object(holed.dataset("ds").identity, chunks(holed)[0])
    fault = Fault("get", first, error=ObjectMissing("gone"))
    with faulty(holed, fault), pytest.raises(BusyError, match="purged"):
        holed.verify("ds")


def test_recover_beside_dropped_tombstones(repository: LocalRepository, clock: MovedClock) -> None:
    """It reads a chunk of tombstones after the purge forgot it and before it deletes it."""
    deleted_file(repository)
    clock.ahead_s += 2 * HOUR_S
    repository.purge("ds", NOW)
    repository.purge("ds", PurgeOptions(1_000_000, -1, 0))

    def rebuild_beside(_: str) -> None:
        with LocalRepository.open(repository.url) as other:
            other.recover("ds")

    with faulty(repository, Fault("delete", "/chunks/", act=rebuild_beside)):
        report = repository.purge("ds", DROP)
        assert report.deleted, report
    assert tombstones(repository, b"f") == 0
    assert repository.verify("ds").problems == []
    sound(repository)


@pytest.mark.parametrize("token", ["0" * 32, PURGE])
@pytest.mark.parametrize("grows", [True, False])
def test_a_lease_renewed_while_it_is_read(holed: LocalRepository, token: str, grows: bool) -> None:
    """Its length changes meanwhile."""
    view, real = holed.view("ds"), holed.objects
    name = lease_object(view.identity, token)
    text = Lease(token, view.version, time.time() + 600, "far", "", "", 1).to_json()
    real.replace(name, [b"{}" if grows else text + b" " * 40])
    fault = Fault("get", name, act=lambda _: real.replace(name, [text]))
    with faulty(holed, fault) as store:
        if token == PURGE:
            with pytest.raises(BusyError, match="far"):
                holed.purge("ds", NOW)
        else:
            assert leased_versions(store, view.identity, time.time()) == {view.version}


YEAR_S = 365 * 24 * HOUR_S


def lease_file(repository: LocalRepository, token: str, until_s: float, version: int = 0) -> Path:
    name = lease_object(repository.dataset("ds").identity, token)
    repository.objects.replace(name, [Lease(token, version, until_s, "far", "", "", 1).to_json()])
    return Path(repository.url.path) / name


def written(file: Path, seconds_ago: float) -> None:
    os.utime(file, (time.time() - seconds_ago,) * 2)


@pytest.mark.parametrize("until_s", [-3000.0, YEAR_S, math.nan, math.inf])
def test_a_lease_of_a_host_whose_clock_is_wrong(holed: LocalRepository, until_s: float) -> None:
    """It holds as long as it is renewed, and no longer."""
    view = holed.view("ds")
    file = lease_file(holed, "0" * 32, time.time() + until_s, view.version)
    for ago_s, versions in ((0, {view.version}), (890, {view.version}), (910, set())):
        written(file, ago_s)
        assert leased(holed) == versions


@pytest.mark.parametrize("until_s", [-3000.0, YEAR_S])
def test_a_purge_of_a_host_whose_clock_is_wrong(holed: LocalRepository, until_s: float) -> None:
    file = lease_file(holed, PURGE, time.time() + until_s)
    with pytest.raises(BusyError):
        holed.purge("ds", NOW)
    assert purge_is_under_way(holed.objects, holed.dataset("ds").identity)
    written(file, 910)
    assert not purge_is_under_way(holed.objects, holed.dataset("ds").identity)
    assert holed.purge("ds", NOW).deleted > 4


def test_a_purge_by_a_clock_that_is_ahead_is_refused(
    holed: LocalRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take all leases for ended. A purge whose clock is behind only waits longer."""
    before, now = chunks(holed), time.time
    reader = Reader(holed)
    lease = reader.take_lease()
    monkeypatch.setattr("diesel_fs.repository.leases.CLOCK_AHEAD_S_MAX", 300)
    monkeypatch.setattr(time, "time", lambda: now() + HOUR_S)
    with pytest.raises(ObjectStoreRefused, match="ahead of the repository"):
        holed.purge("ds", NOW)
    with monkeypatch.context() as patch:
        for store in (SqliteMetadata, RedisMetadata):  # is equally wrong
            patch.setattr(store, "now_s", lambda _: time.time())
        with pytest.raises(ObjectStoreRefused, match="ahead of the object store"):
            holed.purge("ds", NOW)
    assert chunks(holed) == before
    for ahead_s in (200, -HOUR_S):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: now() + ahead_s)
        holed.purge("ds", NOW)
        assert reader.reads_on()
    lease.close()


def test_P10_a_purge_frees_space_of_a_full_store(holed: LocalRepository, tmp_path: Path) -> None:
    """The next purge would find no room to begin either."""
    holed.purge("ds")
    writer = Writer(holed)
    for i in range(1, 20, 2):
        writer.add(b"more%d" % i, os.urandom(5000))
    writer.seal().commit()
    writer.session.delete([b"more1", b"more3"])
    before = stored_bytes(holed)
    full = Fault("put", "/chunks/", error=NoSpaceError("the store is full"))
    with faulty(holed, full), pytest.raises(NoSpaceError, match="run it again"):
        holed.purge("ds", NOW)
    assert stored_bytes(holed) < before - 200_000
    sound(holed)


def test_L5_files_of_a_late_writer_are_removed(repository: LocalRepository, tmp_path: Path) -> None:
    """The dataset has been made again since, or has not."""
    writer = Writer(repository)
    writer.add(b"f", b"content")
    identity = writer.session.identity
    folder = tmp_path / f"store/datasets/{identity.hex}"
    half = folder / f"chunks/.tmp-{os.uname().nodename}-{dead_process()}-{'a' * 16}"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    repository.delete_dataset("ds")
    assert not half.exists()
    for is_made_again in (False, True):
        if is_made_again:
            repository.begin("ds")
        chunk = repository.ids.next(LOWEST)
        repository.objects.put(chunk_object(identity, chunk), writer.builder.seal(chunk)[0])
        repository.purge("ds", NOW)
        assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert repository.view("ds").identity != identity
    with pytest.raises(DieselError):
        writer.seal().commit()


PURGES = [
    ([0, HOUR_S, -1][(one + other) % 3], keep, hours)
    for one, keep in enumerate([0, 1, 2, 5])
    for other, hours in enumerate([0, 2, 50])
]
"""Grace periods, versions to keep, and hours between two purges: any two values of two of them
stand together."""


@pytest.mark.parametrize(("grace_s", "keep", "hours"), PURGES)
def test_a_dry_run_reports_the_same_as_the_purge(
    holed: LocalRepository, clock: MovedClock, tmp_path: Path, grace_s: int, keep: int, hours: int
) -> None:
    source = tmp_path / "source"
    for number in (1, 3):
        clock.ahead_s += hours * HOUR_S
        (source / f"d{number % 3}/{number}").unlink()
        put_folder(holed, source, delete=True)
        planned = holed.purge("ds", PurgeOptions(0, keep, grace_s, dry_run=True))
        assert PurgeReport.from_message(planned.to_message()) == planned
        done = holed.purge("ds", PurgeOptions(0, keep, grace_s))
        assert done.rewritten
        assert planned == replace(done, written=0, copied_bytes=0)


def test_P2_the_grace_period_begins_when_the_next_version_is_published(
    repository: LocalRepository, clock: MovedClock
) -> None:
    """A put was killed before that, days ago, so readers by snapshot open the previous one."""
    clock.ahead_s = -100 * HOUR_S
    with LocalRepository.open(repository.url) as early:
        writer = Writer(early)
        writer.add(b"f", b"old")
        writer.seal().commit()
        writer.session.finish()
        clock.ahead_s = -50 * HOUR_S
        writer.add(b"f", b"new")
        writer.seal().commit()  # killed: its snapshot is missing
    view = repository.view_at("ds", repository.snapshots.newest(writer.session.identity))
    folder = Path(repository.url.path)
    written(folder / snapshot_object(view.identity, view.version), 100 * HOUR_S)
    clock.ahead_s = 0
    for hours, deleted in ((0, 0), (23, 0), (25, 1)):
        newest = repository.snapshots.newest(view.identity)
        if hours:
            assert newest > view.version
            written(folder / snapshot_object(view.identity, newest), hours * HOUR_S)
        assert read_all(view, repository) == [b"old"]
        assert repository.purge("ds").deleted == deleted
