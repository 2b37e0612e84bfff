"""The SQLite store on a network file system: no WAL, and one host at a time may write."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, MetadataError
from diesel_fs.storage.metadata.sqlite import database_file
from diesel_fs.storage.metadata.sqlite.database_file import LEASE_NAME, SqliteFile
from diesel_fs.storage.metadata.sqlite.host_lease import (
    CLOCK_ALLOWANCE_S,
    LEASE_S,
    HostLease,
    locks_fault,
)
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.system.mountinfo import file_system_of
from tests.forks import in_child
from tests.rows import each_row
from tests.storage.metadata.batches import check, files
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, Clock

MOUNTS = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /mnt/a\040b rw - nfs4 server:/x rw,vers=4.2,local_lock=none
31 22 0:41 / /mnt/old rw - nfs server:/y rw,vers=3,nolock
32 22 0:42 / /mnt/fuse rw - fuse.sshfs me@there: rw
33 22 0:43 / /mnt/control rw - fusectl none rw
34 32 0:44 / /mnt/fuse rw shared:3 - xfs /dev/vdb rw
"""


@each_row(
    ("path", "kind", "is_network"),
    [
        ("/", "ext4", False),
        ("/mnt/old2/x", "ext4", False),
        ("/mnt/a b/c/meta.sqlite", "nfs4", True),
        ("/mnt/old", "nfs", True),
        ("/mnt/control/x", "fusectl", False),
        ("/mnt/fuse/x", "xfs", False),  # mounted over it
    ],
)
def test_network_file_systems_are_recognised(path: str, kind: str, is_network: bool) -> None:
    found = file_system_of(Path(path), MOUNTS)
    assert (found.kind, found.is_network) == (kind, is_network)


def test_odd_names_of_file_systems_are_skipped() -> None:
    """The program that mounts a FUSE file system chooses its name."""
    odd = rb"35 22 0:45 / /mnt/\303\244 rw - fuse.\040\134%s a\012%sb rw\n" % (b"\xff", b"\r")
    assert file_system_of(Path("/mnt/old"), odd + MOUNTS).kind == "nfs"
    assert file_system_of(Path("/mnt/ä/x"), MOUNTS + odd).is_network


def test_locks_work_on_this_disk(tmp_path: Path) -> None:
    assert locks_fault(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert "nolock" in file_system_of(Path("/mnt/old"), MOUNTS).options


Lease = Callable[[str], HostLease]


@pytest.fixture
def lease(tmp_path: Path, clock: Clock) -> Lease:
    return lambda host: HostLease(tmp_path / "meta.lease", host, clock.seconds)


def test_only_one_host_at_a_time_has_the_lease(lease: Lease) -> None:
    first, second, other = lease("host-1"), lease("host-1"), lease("host-2")
    first.keep()
    second.keep()
    with pytest.raises(BusyError, match=r"\?meta=redis://"):
        other.keep()
    first.release()
    first.release()
    with pytest.raises(BusyError):
        other.keep()
    second.release()
    other.keep()
    with pytest.raises(BusyError):
        first.keep()


def test_L8_an_expired_lease_is_taken_and_its_holder_refused(lease: Lease, clock: Clock) -> None:
    dead, other = lease("host-1"), lease("host-2")
    dead.keep()
    clock.advance(LEASE_S + CLOCK_ALLOWANCE_S - 1)
    with pytest.raises(BusyError, match="wait 1 s"):
        other.keep()
    clock.advance(2)
    other.keep()
    dead._fresh_until = 0.0  # it slept through its lease
    with pytest.raises(BusyError):
        dead.keep()


def test_a_damaged_lease_is_valid_for_its_term(tmp_path: Path, lease: Lease, clock: Clock) -> None:
    (tmp_path / "meta.lease").write_bytes(b'{"host": "ho')
    os.utime(tmp_path / "meta.lease", (clock.seconds(), clock.seconds()))
    with pytest.raises(BusyError, match="unknown host"):
        lease("host-2").keep()
    clock.advance(LEASE_S + CLOCK_ALLOWANCE_S + 1)
    lease("host-2").keep()


def test_a_forked_child_is_a_separate_holder(lease: Lease) -> None:
    parents = lease("host-1")
    parents.keep()
    assert in_child(parents.keep) == 0  # without a release
    parents.release()
    with pytest.raises(BusyError):
        lease("host-2").keep()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    if not shutil.which("bindfs"):
        pytest.skip("bindfs is not installed")
    disk, network = tmp_path / "disk", tmp_path / "network"
    disk.mkdir()
    network.mkdir()
    if subprocess.run(["bindfs", disk, network], check=False, capture_output=True).returncode:
        pytest.skip("bindfs cannot mount here")
    yield disk / "meta.sqlite", network / "meta.sqlite"
    subprocess.run(["umount", "-l", network], check=True)


def open_on(
    path: Path, host: str, clock: Clock, *, create: bool = False, readonly: bool = False
) -> SqliteMetadata:
    file = SqliteFile(
        path, create=create, readonly=readonly, deadline_s=0.5, host=host, clock=clock.seconds
    )
    return SqliteMetadata(file, clock)


def journal(path: Path) -> bytes:
    """The format version in the file's header: 1 rollback, 2 WAL."""
    return path.read_bytes()[18:20]


def test_on_a_network_one_host_writes_without_wal(folder: tuple[Path, Path]) -> None:
    disk, network = folder
    clock = Clock()
    assert file_system_of(network).kind == "fuse"
    first = open_on(network, "host-1", clock, create=True)
    first.create(NAME, IDENTITY)
    first.commit(IDENTITY, files(1, b"a").batch())
    assert journal(disk) == b"\1\1"
    assert not disk.with_name("meta.sqlite-shm").exists()
    with closing(open_on(network, "host-2", clock)) as second:
        check(second, NAME, [files(1, b"a")])  # reading is free
        with pytest.raises(BusyError, match="one host at a time"):
            second.commit(IDENTITY, files(2, b"b").batch())
        first.close()
        second.commit(IDENTITY, files(2, b"b").batch())
        check(second, NAME, [files(1, b"a"), files(2, b"b")])
    with closing(open_on(network, "host-1", clock, readonly=True)) as reader:
        check(reader, NAME, [files(1, b"a"), files(2, b"b")])


def test_every_commit_on_a_network_is_synced(folder: tuple[Path, Path]) -> None:
    file = SqliteFile(folder[1], create=True, host="host-1", clock=Clock().seconds)
    with closing(SqliteMetadata(file)) as meta:
        with file.reading() as db:
            assert db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
            assert db.execute("PRAGMA locking_mode").fetchone() == ("normal",)
        meta.sync()


def test_a_store_with_a_wal_changes_its_journal_over_a_network(folder: tuple[Path, Path]) -> None:
    disk, network = folder
    clock = Clock()
    with closing(open_on(disk, "host-1", clock, create=True)) as local:
        local.create(NAME, IDENTITY)
        local.commit(IDENTITY, files(1, b"a").batch())
    assert journal(disk) == b"\2\2"
    memory = disk.with_name("meta.sqlite-shm")
    with pytest.raises(MetadataError, match="snapshot"):
        open_on(network, "host-2", clock, readonly=True)
    memory.symlink_to("meta.sqlite-shm")  # opening it fails
    with pytest.raises(MetadataError, match="snapshot"):
        open_on(network, "host-2", clock, readonly=True)
    memory.unlink()
    with closing(open_on(network, "host-2", clock)) as remote:
        check(remote, NAME, [files(1, b"a")])
        assert journal(disk) == b"\1\1"
        with closing(open_on(disk, "host-1", clock)) as local:  # stays out of WAL from now on
            check(local, NAME, [files(1, b"a")])
            with pytest.raises(BusyError, match="one host at a time"):
                local.commit(IDENTITY, files(2, b"b").batch())
            assert journal(disk) == b"\1\1"


def test_a_local_writer_changes_its_journal_for_a_remote_one(tmp_path: Path) -> None:
    disk, clock = tmp_path / "meta.sqlite", Clock()
    with closing(open_on(disk, "host-1", clock, create=True)) as local:
        local.create(NAME, IDENTITY)
        HostLease(disk.with_name(LEASE_NAME), "host-2", clock.seconds).keep()
        with pytest.raises(BusyError, match="one host at a time"):
            local.commit(IDENTITY, files(1, b"a").batch())


def test_without_sound_locks_writes_are_refused(
    folder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, network = folder
    clock = Clock()
    with closing(open_on(network, "host-1", clock, create=True)) as meta:
        meta.create(NAME, IDENTITY)
    monkeypatch.setattr(database_file, "locks_fault", lambda _: "it is mounted with 'nolock'")
    with closing(open_on(network, "host-1", clock)) as meta:
        check(meta, NAME, [])
        with pytest.raises(MetadataError, match=r"nolock.*\?meta=redis://"):
            meta.commit(IDENTITY, files(1, b"a").batch())
    with closing(sqlite3.connect(disk)) as db:
        assert db.execute("SELECT count(*) FROM chunk").fetchone() == (0,)
