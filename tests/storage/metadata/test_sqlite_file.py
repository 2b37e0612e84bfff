"""The file of the SQLite store: foreign and damaged files, permissions, full disks, forks."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import (
    BusyError,
    CorruptError,
    ForeignError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSpaceError,
    PermissionDenied,
)
from diesel_fs.storage.metadata.sqlite.database_file import SqliteFile
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from tests.forks import in_child
from tests.small_disks import remount
from tests.storage.metadata.batches import check, files
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, edit


@pytest.fixture
def meta(path: Path) -> Iterator[SqliteMetadata]:
    with closing(SqliteMetadata.open(path, create=True)) as store:
        store.create(NAME, IDENTITY)
        yield store


def commit(meta: SqliteMetadata, number: int, *paths: bytes) -> None:
    meta.commit(IDENTITY, files(number, *(paths or [b"f%d" % number])).batch())


def test_a_missing_or_empty_store_is_behind_not_empty(path: Path) -> None:
    with pytest.raises(MetadataBehind, match="dlcmd recover"):
        SqliteMetadata.open(path)
    assert not path.exists()
    path.touch()  # a crash while it was made
    with pytest.raises(MetadataBehind, match="dlcmd recover"):
        SqliteMetadata.open(path)
    SqliteMetadata.open(path, create=True).close()
    SqliteMetadata.open(path).close()


def test_C15_of_another_schema_both_versions_are_named(meta: SqliteMetadata, path: Path) -> None:
    meta.close()
    edit(path, "PRAGMA user_version=7")
    for create in (False, True):
        with pytest.raises(NewerVersionError, match="schema 7, this program knows 1"):
            SqliteMetadata.open(path, create=create)
    edit(path, "PRAGMA user_version=0")
    with pytest.raises(MetadataError, match="schema 0, this program needs 1"):
        SqliteMetadata.open(path)


def test_C16_the_file_of_another_application_is_left_alone(path: Path) -> None:
    edit(path, "CREATE TABLE theirs (x)")
    for content, named in (
        (path.read_bytes(), "another application"),
        (b"GIF89a, and then something that is no database at all\n" * 100, "not a database"),
    ):
        path.write_bytes(content)
        with pytest.raises(ForeignError, match=named):
            SqliteMetadata.open(path, create=True)
        assert path.read_bytes() == content


def test_Z10_a_damaged_or_truncated_file_is_an_error(meta: SqliteMetadata, path: Path) -> None:
    for number in range(1, 30):
        commit(meta, number, *(b"f%d-%d" % (number, i) for i in range(50)))
    meta.close()
    content = path.read_bytes()
    path.write_bytes(content[: 3 * 4096] + b"\xff" * (len(content) - 3 * 4096))
    with (
        closing(SqliteMetadata.open(path)) as damaged,
        pytest.raises(CorruptError, match="dlcmd recover"),
    ):
        damaged.changes(IDENTITY, 0)
    path.write_bytes(content[: 5 * 4096 + 7])
    with (
        pytest.raises((CorruptError, MetadataError)),
        closing(SqliteMetadata.open(path)) as truncated,
    ):
        truncated.changes(IDENTITY, 0)


def test_a_replaced_file_is_noticed(meta: SqliteMetadata, path: Path) -> None:
    commit(meta, 1)
    with closing(SqliteMetadata.open(path)) as other:
        other.heads()
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).rename(path.with_name("old" + end))
        with pytest.raises(MetadataBehind, match="has gone"):
            commit(meta, 2)
        with closing(SqliteMetadata.open(path, create=True)) as new:
            new.create(NAME, IDENTITY)
            commit(other, 3)
            check(new, NAME, [files(3, b"f3")])


def test_a_readonly_store_refuses_changes(meta: SqliteMetadata, path: Path) -> None:
    commit(meta, 1)
    with closing(SqliteMetadata.open(path, readonly=True)) as reader:
        check(reader, NAME, [files(1, b"f1")])
        with pytest.raises(PermissionDenied):
            commit(reader, 2)
        with pytest.raises(PermissionDenied):
            reader.drop(IDENTITY)
        with pytest.raises(PermissionDenied):
            reader.sync()
    with pytest.raises(MetadataBehind):
        SqliteMetadata.open(path.with_name("none"), create=True, readonly=True)


def test_C8_a_full_disk_stops_commits_whole(disk: Path) -> None:
    path = disk / "meta.sqlite"
    done = []
    with closing(SqliteMetadata.open(path, create=True)) as meta:
        meta.create(NAME, IDENTITY)
        for number in range(1, 100):
            chunk = files(number, *(b"f%d-%d" % (number, i) for i in range(100)))
            try:
                meta.commit(IDENTITY, chunk.batch())
            except NoSpaceError:
                break
            done.append(chunk)
        assert 0 < len(done) < 99
        check(meta, NAME, done)
        remount(disk, "size=64m")
        commit(meta, 1000)
        check(meta, NAME, [*done, files(1000, b"f1000")])


def test_O16_a_read_only_folder_is_refused_at_once(disk: Path) -> None:
    path = disk / "meta.sqlite"
    SqliteMetadata.open(path, create=True).close()
    remount(disk, "ro")
    with pytest.raises(PermissionDenied, match="snapshot"):
        SqliteMetadata.open(path)


def test_waiting_for_a_locked_store_ends_in_an_error(meta: SqliteMetadata, path: Path) -> None:
    code = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('BEGIN IMMEDIATE'); print('locked', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with (
        closing(SqliteMetadata.open(path, deadline_s=0.1)) as hasty,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BusyError, match=f"locked for 0.1 s.*process {other.pid} "):
            commit(hasty, 1)
        assert hasty.head(NAME).version == 0  # readers do not wait
        other.communicate()
        commit(hasty, 1)


def test_sync_syncs_and_a_commit_does_not(tmp_path: Path, path: Path, meta: SqliteMetadata) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.storage.metadata.test_sqlite_file import SqliteMetadata, commit\n"
        "meta = SqliteMetadata.open(Path(sys.argv[1]))\n"
        "commit(meta, 1)\n"
        "open('/proc/self/comm', 'w').write('begin')\n"
        "for number in range(2, 12): commit(meta, number)\n"
        "open('/proc/self/comm', 'w').write('middle')\n"
        "meta.sync()\n"
        "open('/proc/self/comm', 'w').write('end')\n"
    )
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-o", str(trace), "-e", "trace=write,fsync,fdatasync"]
    try:
        subprocess.run([*command, sys.executable, "-c", code, str(path)], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        if trace.exists() and trace.stat().st_size:
            raise
        pytest.skip("strace is missing or may not trace")
    text = trace.read_text()
    marks = [text.index(f'"{mark}"') for mark in ("begin", "middle", "end")]
    assert text.count("sync(", marks[0], marks[1]) == 0
    assert text.count("sync(", marks[1], marks[2]) >= 1


FORKS_WITH_THREADS = "ignore:.*multi-threaded.*fork:DeprecationWarning"


@pytest.mark.filterwarnings(FORKS_WITH_THREADS)
def test_Z9_a_fork_waits_for_transactions(meta: SqliteMetadata, pool: ThreadPoolExecutor) -> None:
    stop = threading.Event()
    numbers: list[int] = []

    def work() -> None:
        while not stop.is_set():
            commit(meta, 100 + len(numbers))
            numbers.append(100 + len(numbers))

    working = pool.submit(work)
    try:
        for number in range(1, 9):
            assert in_child(partial(commit, meta, number)) == 0
    finally:
        stop.set()
    working.result()
    check(meta, NAME, [files(i, b"f%d" % i) for i in [*range(1, 9), *numbers]])


@pytest.mark.filterwarnings(FORKS_WITH_THREADS)
def test_Z9_a_child_forked_in_a_transaction_raises(path: Path, pool: ThreadPoolExecutor) -> None:
    inside, leave = threading.Event(), threading.Event()
    file = SqliteFile(path, create=True, fork_wait_s=0.05)
    meta = SqliteMetadata(file)
    meta.create(NAME, IDENTITY)

    def read() -> None:
        with file.reading():
            inside.set()
            leave.wait()

    def use() -> None:
        with pytest.raises(MetadataError, match="forked"):
            meta.heads()

    reading = pool.submit(read)
    inside.wait()
    try:
        assert in_child(use) == 0
    finally:
        leave.set()
    reading.result()
    commit(meta, 1)
