"""Chunks that a purge spares for readers: leases, kept versions, the grace period (FAULTS P2, H16,
L5).
"""

import os
import time
from itertools import count
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.errors import CorruptError, NoSuchDataset, NotFoundError, ObjectMissing, UsageError
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_prefix, lease_object, lease_prefix, snapshot_object
from diesel_fs.repository import leases
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.leases import (
    EVERY_VERSION,
    POLICY,
    PURGE,
    Lease,
    ReadLease,
    write_lease_for,
)
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.retention import RetentionPolicy, write_retention_policy

from ...datasets import dataset_state
from ...forks import in_child
from ...storage.objects.faulty_store import FaultyStore
from ...trees import facts
from ...waiting import wait_until
from .moved_clock import HOUR_S, MovedClock
from .purged import NO_FILES, NOW, Reader, chunks, dataset_of, dead_process, leased, read_all, sound


def test_P2_H16_a_reader_without_a_lease_has_its_grace_period(
    holed: LocalRepository, clock: MovedClock, tmp_path: Path
) -> None:
    reader = Reader(holed)
    assert holed.purge("ds").deleted == 0
    for hours in (23, 0):
        clock.ahead_s += hours * HOUR_S
        report = holed.purge("ds")
        assert (report.rewritten, report.deleted, report.waiting > 4) == (0, 0, True)
        assert reader.reads_on()
    clock.ahead_s += 2 * HOUR_S
    assert holed.purge("ds").deleted > 4
    with pytest.raises(ObjectMissing):
        read_all(reader.view, holed)
    assert dataset_state(holed) == facts(tmp_path / "source")
    sound(holed)


def test_a_lease_holds_the_chunks_of_its_version(holed: LocalRepository, clock: MovedClock) -> None:
    reader = Reader(holed)
    lease = reader.take_lease()
    assert leased(holed) == {reader.view.version}
    assert holed.purge("ds", NOW).deleted_bytes < NO_FILES
    assert reader.reads_on()
    assert read_all(holed.view_at("ds", reader.view.version), holed) == read_all(reader.view, holed)
    lease.switch_version(reader.view.version + 1)  # which is not published when the purge begins
    assert holed.purge("ds", NOW).deleted_bytes < NO_FILES
    assert reader.reads_on()
    lease.switch_version(holed.view("ds").version)
    assert holed.purge("ds", NOW).deleted > 4
    lease.close()
    assert leased(holed) == frozenset()


def test_a_lease_taken_before_the_deletion_holds(holed: LocalRepository, clock: MovedClock) -> None:
    reader = Reader(holed)
    taken = list[ReadLease]()
    forget = holed.meta.forget

    def late(identity: UUID, gone: list[ChunkId], *, tombstones: bool = False) -> object:
        taken.append(reader.take_lease())
        return forget(identity, gone, tombstones=tombstones)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holed.meta, "forget", late)
        assert holed.purge("ds", NOW).deleted_bytes < NO_FILES
    assert reader.reads_on()
    for lease in taken:
        lease.close()
    old = {info.name for info in holed.objects.list(chunk_prefix(reader.view.identity))}
    clock.ahead_s = 2 * HOUR_S  # now they are orphans: folded in, forgotten, deleted
    assert holed.purge("ds", NOW).deleted > 4
    assert {info.name for info in holed.objects.list(chunk_prefix(reader.view.identity))} < old
    sound(holed)


def test_a_lease_ends_with_time_or_process(holed: LocalRepository, clock: MovedClock) -> None:
    view = holed.view("ds")
    name = lease_object(view.identity, "0" * 32)
    lease = Lease.own("0" * 32, view.version)
    holed.objects.replace(name, [lease.to_json()])
    assert leased(holed) == {view.version}
    clock.ahead_s += 800  # it has expired, but the clock of its host may be behind
    assert leased(holed) == {view.version}
    clock.ahead_s += 200
    assert leased(holed) == frozenset()
    gone = dead_process()
    dead = Lease("1", view.version, time.time() + 600, lease.host, lease.boot, lease.space, gone)
    holed.objects.replace(name, [dead.to_json()])
    assert leased(holed) == frozenset()
    holed.objects.replace(name, [b"no lease at all"])
    assert leased(holed) == {EVERY_VERSION}
    assert holed.purge("ds", NOW).deleted == 0
    clock.ahead_s += 25 * HOUR_S
    assert holed.purge("ds", NOW).deleted > 4


def test_a_lease_on_nothing_holds_nothing(holed: LocalRepository) -> None:
    """A reader opened the dataset while it was empty."""
    view = holed.view("ds")
    lease = ReadLease.take(holed.objects, view.identity, 0)
    assert leased(holed) == frozenset()
    assert holed.purge("ds", NOW).deleted > 4
    lease.close()


@pytest.mark.parametrize("version", [-1, -(1 << 63)])
def test_a_lease_on_an_impossible_version_holds_all(holed: LocalRepository, version: int) -> None:
    identity = holed.dataset("ds").identity
    lease = Lease.own("0" * 32, version)
    holed.objects.replace(lease_object(identity, "0" * 32), [lease.to_json()])
    assert leased(holed) == {EVERY_VERSION}
    assert holed.purge("ds", NOW).deleted == 0
    holed.delete_dataset("ds")
    assert any(holed.chunk_ids(identity))


@pytest.mark.parametrize("by", ["renewal", "server"])
@pytest.mark.parametrize("clock_ahead_s", [0, -10 * 24 * HOUR_S, 10 * 24 * HOUR_S])
def test_ended_leases_are_removed_without_a_purge(
    holed: LocalRepository,
    tmp_path: Path,
    clock: MovedClock,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
    clock_ahead_s: int,
) -> None:
    """Their age is that by the store's clock, whatever the reader's clock shows."""
    identity = holed.dataset("ds").identity
    for number, ago_h in enumerate((0, 1, 23, 25, 400)):
        write_lease_for(holed.objects, identity, f"{number:032x}", 1, 600)
        age(tmp_path, identity, f"{number:032x}", ago_h)
    holed.objects.put(lease_object(identity, PURGE), [Lease.own("", 0).to_json()])
    write_retention_policy(holed.objects, identity, RetentionPolicy())
    for name in (PURGE, POLICY):
        age(tmp_path, identity, name, 400)
    clock.ahead_s += clock_ahead_s
    monkeypatch.setattr(leases, "CLEANUP_ONE_IN", 1)

    def there() -> set[str]:
        names = {
            name.rpartition("/")[2]
            for name in holed.objects.housekeeping.names(lease_prefix(identity))
        }
        return names & {PURGE, POLICY, *(f"{number:032x}" for number in range(5))}

    expected = {PURGE, POLICY, *(f"{number:032x}" for number in range(3))}
    if by == "server":
        write_lease_for(holed.objects, identity, "f" * 32, 1, 600)
    else:
        lease = ReadLease.take(holed.objects, identity, 1, renew_s=0.01)
        wait_until(lambda: there() == expected)
        lease.close()
    assert there() == expected


def test_few_renewals_list_leases(holed: LocalRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, draws = holed.dataset("ds").identity, count()
    monkeypatch.setattr("secrets.randbelow", lambda most: next(draws) % most)
    with FaultyStore(holed.objects) as store:
        for _ in range(320):
            write_lease_for(store, identity, "f" * 32, 1, 600)
    assert store.calls["list"] == 5


def age(top: Path, identity: UUID, name: str, hours: float) -> None:
    file = top / "store" / lease_object(identity, name)
    written_s = file.stat().st_mtime - hours * HOUR_S
    os.utime(file, (written_s, written_s))


def test_a_forked_child_neither_renews_nor_ends_a_lease(holed: LocalRepository) -> None:
    view = holed.view("ds")
    lease = ReadLease.take(holed.objects, view.identity, view.version)

    def change() -> None:
        lease.switch_version(7)
        lease.close()

    assert in_child(change) == 0
    assert leased(holed) == {view.version}
    lease.close()


def test_kept_versions_can_be_read(repository: LocalRepository, clock: MovedClock) -> None:
    versions = {}
    with dataset_of(repository) as ds:
        for i in range(5):
            ds.put(b"content %d" % i, "f")
            versions[ds.flush()] = b"content %d" % i
    repository.purge("ds", PurgeOptions(0, 3, 0))
    kept = [each.version for each in repository.kept_versions("ds")]
    assert kept[:-1] == list(versions)[2:4]
    for _ in range(2):
        clock.ahead_s += 48 * HOUR_S
        with LocalRepository.open(repository.url) as late, dataset_of(late) as ds:
            late.purge("ds")  # follows the policy
            for version in list(versions)[2:4]:
                view = late.view_at("ds", version)
                assert read_all(view, late) == [versions[version]]
                kept_one = next(
                    each for each in late.kept_versions("ds") if each.version == version
                )
                assert (kept_one.files, kept_one.bytes) == (1, 9)
            with pytest.raises(NotFoundError, match="not kept"):
                late.view_at("ds", next(iter(versions)))
            assert ds.get("f") == b"content 4"
    repository.purge("ds", PurgeOptions(0, 0, 0))
    assert len(repository.kept_versions("ds")) == 1
    assert len(chunks(repository)) == 1


@pytest.mark.parametrize(
    "policy",
    [
        b"{}",
        b'{"keep": 1e3, "grace_s": 0}',
        b'{"keep": 0, "grace_s": 1%s}' % (b"0" * 300),
        b'{"keep": -1, "grace_s": 0}',
    ],
)
def test_a_malformed_policy_is_named_and_replaced(holed: LocalRepository, policy: bytes) -> None:
    holed.objects.replace(lease_object(holed.dataset("ds").identity, "policy"), [policy])
    with pytest.raises(CorruptError, match=r"policy is damaged.*--keep"):
        holed.purge("ds")
    holed.purge("ds", PurgeOptions(keep=1, grace_s=0))
    assert holed.purge("ds").versions_kept


@pytest.mark.parametrize(("keep", "grace_s"), [(1 << 40, 0), (0, 10**20)])
def test_numbers_beyond_any_clock_are_refused(keep: int, grace_s: int) -> None:
    with pytest.raises(UsageError, match="at most"):
        PurgeOptions(keep=keep, grace_s=grace_s)


def test_publishing_keeps_bounded_versions(repository: LocalRepository, clock: MovedClock) -> None:
    with dataset_of(repository) as ds:
        ds.put(b"0", "f")
        first = ds.flush()
        lease = ReadLease.take(repository.objects, ds.snapshot.identity, first)
        for i in range(60):
            clock.ahead_s += 1800
            lease.switch_version(first)
            ds.put(b"%d" % i, "f")
            ds.flush()
            kept = [each.version for each in repository.kept_versions("ds")]
            assert len(kept) <= 20
            assert kept[-8:] == sorted(kept)[-8:]
            assert first in kept
        oldest_s = time.time() - 24 * HOUR_S
        assert sum(version / 1e6 < oldest_s for version in kept) == 2  # that, and the previous one
    lease.close()


def test_L5_H16_a_deleted_dataset_stays_for_its_readers(holed: LocalRepository) -> None:
    reader = Reader(holed)
    lease = reader.take_lease()
    holed.delete_dataset("ds")
    with pytest.raises(NoSuchDataset):
        holed.view("ds")
    assert holed.datasets() == []
    assert reader.reads_on()
    holed.objects.stat(snapshot_object(reader.view.identity, reader.view.version))
    holed.delete_dataset("ds")
    assert reader.reads_on()
    lease.close()
    assert "is deleted" in holed.purge("ds").notes[0]
    assert list(holed.objects.housekeeping.names(f"datasets/{reader.view.identity.hex}/")) == []
    with pytest.raises(NoSuchDataset):
        holed.purge("ds")
