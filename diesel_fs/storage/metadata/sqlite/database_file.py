"""The SQLite file of a metadata store, shared by many threads, processes and forked children.

On a local disk the journal is a WAL (write-ahead log): readers do not wait for a writer. A WAL
needs memory that all processes share, so over a network file system the file has a rollback
journal, and a lease lets only one host write at a time (`host_lease.py`). Once a lease file exists,
all hosts use the rollback journal, also the host of the disk.

One thread at a time uses a connection, for one transaction. SQLite does not support a fork with
open connections: the child would take its parent's locks for its own, even in a file that it opened
anew. So a fork waits for all transactions of this process and closes all connections. No other code
may open the file in this process: closing it would drop the locks of all connections here (POSIX
locks).
"""

import os
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from ....errors import (
    BusyError,
    CorruptError,
    DieselError,
    ForeignError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSpaceError,
    PermissionDenied,
)
from ....system.mountinfo import file_system_of
from .host_lease import HostLease, locks_fault
from .schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION

DEADLINE_S = 30.0
LEASE_NAME = "meta.lease"

_CACHE_KIB = 16 << 10
_CHECKPOINT_PAGES = 4000  # 16 MB: SQLite's default of 1,000 means more syncs in a long put
_WAL_BYTES_KEPT = 64 << 20
_IDLE_MAX = 4
_POLL_S = 0.02
_PROBE_S = 2.0
"""Opening a file over a network waits this long for a lock: a reader can use a snapshot instead."""

_RECOVER = "run `dlcmd recover`: it makes the metadata again from the chunks"


class SqliteFile:
    """Thread-safe. A file that is not writable is refused with PermissionDenied, since a WAL needs
    a writable file beside it even for reading. Each transaction checks whether the file was
    replaced or removed. A fork waits at most `fork_wait_s` for transactions."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        readonly: bool = False,
        deadline_s: float = DEADLINE_S,
        host: str = "",
        clock: Callable[[], float] = time.time,
        fork_wait_s: float = 10.0,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self.deadline_s = deadline_s
        self._readonly = readonly
        self._fork_wait_s = fork_wait_s
        self._lease = HostLease(self.path.with_name(LEASE_NAME), host, clock)
        self._network = file_system_of(self.path).is_network
        self._rollback = False
        self._locks_checked = False
        self._change = threading.Condition()  # guards all below
        self._idle: list[sqlite3.Connection] = []
        self._in_use = 0
        self._file: tuple[int, int] | None = None  # device and inode of the idle connections' file
        self._forking = False
        self._unusable = ""  # why no transaction can begin any more
        with self._errors():
            self._check_files(create)
            self._idle.append(self._open(create))
        with _FORK_LOCK:
            _FILES.add(self)

    def now_s(self) -> float:
        """The file system's clock: over a network, its server's."""
        with self._errors(), tempfile.TemporaryFile(dir=self.path.parent) as file:
            return os.fstat(file.fileno()).st_mtime

    # Transactions

    @property
    def durable_commits(self) -> bool:
        """Whether every commit survives a power cut: true with the rollback journal."""
        return self._rollback

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """All reads of a transaction see one state."""
        with self._errors(), self._borrowed() as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def writing(self, *, sync: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction that commits at the end of the context. With `sync`, this and all earlier
        transactions survive a power cut."""
        if self._readonly:
            raise PermissionDenied(f"{self.path} was opened for reading only")
        with self._errors(), self._borrowed() as connection:
            if sync and not self._rollback:
                connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            self._keep_lease()
            yield connection
            self._keep_lease()
            connection.execute("COMMIT")
            if sync and not self._rollback:
                connection.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Connections in use are closed when their transaction ends. Repeatable."""
        with self._change:
            self._unusable = self._unusable or "it has been closed"
            self._close_idle()
        self._lease.release()

    def _lease_exists(self) -> bool:
        return self.path.with_name(LEASE_NAME).exists()

    def _keep_lease(self) -> None:
        if self._rollback:
            if not self._locks_checked and (fault := locks_fault(self.path.parent)):
                raise MetadataError(
                    f"{self.path.parent} is on a network file system without sound locks: {fault}",
                    advice="to write, use ?meta=redis://; reading works as it is",
                )
            self._locks_checked = True
            self._lease.keep()

    # The pool of connections

    @contextmanager
    def _borrowed(self) -> Iterator[sqlite3.Connection]:
        connection = self._borrow()
        reusable = False
        try:
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            reusable = True
        except DieselError:
            reusable = True  # it is not SQLite's error
            raise
        finally:
            self._give_back(connection, reusable=reusable)

    def _borrow(self) -> sqlite3.Connection:
        with self._change:
            if not self._change.wait_for(lambda: not self._forking, self.deadline_s):
                raise BusyError(f"{self.path} cannot be used while this process forks")
            if self._unusable:
                raise MetadataError(f"cannot use {self.path}: {self._unusable}")
            replaced = self._file != self._identity()  # idle connections have the old file
            if replaced or (not self._rollback and self._lease_exists()):
                self._close_idle()
            connection = self._idle.pop() if self._idle else None
            self._in_use += 1
        try:
            return connection if connection is not None else self._open(create=False)
        except BaseException:
            self._give_back(None, reusable=False)
            raise

    def _give_back(self, connection: sqlite3.Connection | None, *, reusable: bool) -> None:
        with self._change:
            if connection is not None:
                if reusable and not self._unusable and len(self._idle) < _IDLE_MAX:
                    self._idle.append(connection)
                else:
                    connection.close()
            self._in_use -= 1
            self._change.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    # Opening

    def _check_files(self, create: bool) -> None:
        folder = self.path.parent
        if not self.path.exists():
            if not create:
                raise MetadataBehind(f"there is no metadata store at {self.path}", advice=_RECOVER)
            if not folder.is_dir():
                raise MetadataError(f"there is no folder {folder} for the metadata store")
        writable = os.access(folder, os.W_OK | os.X_OK, effective_ids=True) and (
            not self.path.exists() or os.access(self.path, os.W_OK, effective_ids=True)
        )
        if not writable:
            raise PermissionDenied(
                f"{self.path} cannot be used: it or its folder is not writable",
                advice="reading by snapshot works without it",
            )

    def _open(self, create: bool) -> sqlite3.Connection:
        mode = "rwc" if create else "rw"
        if not create and not self.path.exists():
            raise MetadataBehind(f"the metadata store {self.path} has gone", advice=_RECOVER)
        self._rollback = self._network or self._lease_exists()
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode={mode}",
            uri=True,
            timeout=min(self.deadline_s, _PROBE_S) if self._rollback else self.deadline_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._set_up(connection, create)
        except BaseException:
            connection.close()
            raise
        self._file = self._identity()
        return connection

    def _set_up(self, connection: sqlite3.Connection, create: bool) -> None:
        if self._rollback:
            # Keeps SQLite from using shared memory before the journal's mode is known. It has to be
            # the first statement: even setting the cache's size reads the file
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA trusted_schema=OFF")  # no functions from a foreign file
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        connection.execute("PRAGMA temp_store=MEMORY")
        made = self._is_made(connection)
        if not made and not create:
            raise MetadataBehind(f"the metadata store {self.path} is empty", advice=_RECOVER)
        if self._rollback:
            self._set_rollback(connection)
        else:
            self._set_wal(connection)
        if not made:
            self._make(connection)
        connection.execute(f"PRAGMA busy_timeout={self.deadline_s * 1000:.0f}")
        if self._readonly:
            connection.execute("PRAGMA query_only=ON")
        if not self._rollback and self._lease_exists():
            raise BusyError(f"another host has begun to write to {self.path}")

    def _is_made(self, connection: sqlite3.Connection) -> bool:
        """Whether the file has the tables. Raises an error for another program's file, or another
        schema."""
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application_id != APPLICATION_ID:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if application_id or version or tables:
                raise ForeignError(f"{self.path} is another application's database")
            return False
        if version > SCHEMA_VERSION:
            raise NewerVersionError(
                f"{self.path} has schema {version}, this program knows {SCHEMA_VERSION}",
                advice="use a newer diesel-fs",
            )
        if version < SCHEMA_VERSION:
            raise MetadataError(
                f"{self.path} has schema {version}, this program needs {SCHEMA_VERSION}",
                advice=_RECOVER,
            )
        return True

    def _set_wal(self, connection: sqlite3.Connection) -> None:
        # With NORMAL a commit survives a crash of the process; a power cut may undo the last ones,
        # each whole. `writing(sync=True)` syncs
        self._set_journal(connection, "wal")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")

    def _set_rollback(self, connection: sqlite3.Connection) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        if mode != "delete":
            if self._readonly:
                raise MetadataError(
                    f"{self.path} has the journal of a local disk, and is read over a network here",
                    advice="reading by snapshot works without it",
                )
            self._keep_lease()
            self._set_journal(connection, "delete")
        connection.execute("PRAGMA locking_mode=NORMAL")
        # A commit ends when SQLite unlinks the journal. EXTRA syncs the folder after that;
        # otherwise the journal could come back after a power cut, and undo the commit
        connection.execute("PRAGMA synchronous=EXTRA")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # releases the lock

    def _set_journal(self, connection: sqlite3.Connection, wanted: str) -> None:
        """SQLite does not wait here for other users of the file; this does."""
        deadline = time.monotonic() + self.deadline_s
        while True:
            try:
                (mode,) = connection.execute(f"PRAGMA journal_mode={wanted}").fetchone()
            except sqlite3.OperationalError as error:
                if _primary(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
                continue
            if mode != wanted:
                raise MetadataError(f"{self.path} cannot use journal mode {wanted}: it is {mode}")
            return

    def _make(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        if not self._is_made(connection):  # another process may have been faster
            if self._rollback:
                self._keep_lease()
            for statement in filter(str.strip, SCHEMA.split(";\n")):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")

    # Errors

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate_error(error) from error
        except PermissionError as error:
            raise PermissionDenied(f"{self.path}: {error.strerror}") from error
        except OSError as error:
            raise MetadataError(f"{self.path}: {error.strerror}") from error

    def _translate_error(self, error: sqlite3.Error) -> DieselError:
        code = _primary(error)
        name = getattr(error, "sqlite_errorname", "")
        what = f"{self.path}: {error}"
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            pids = _lock_holders([self.path, self.path.with_name(self.path.name + "-shm")])
            return BusyError(
                f"{self.path} stayed locked for {self.deadline_s:g} s",
                advice=f"process {', '.join(map(str, pids))} is writing" if pids else "",
            )
        if code == sqlite3.SQLITE_FULL or name in ("SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP"):
            return NoSpaceError(
                f"{self.path}: its disk is full",
                advice="make room on that disk; `dlcmd delete-dataset` works all the same",
            )
        if name == "SQLITE_READONLY" and not self._readonly and self._may_be_written():
            # SQLite does not report why it opened a file only for reading
            return MetadataError(
                f"{self.path} could not be opened for writing, though its mode allows it",
                advice="check whether its disk fails (`dmesg`), then try again",
            )
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return PermissionDenied(what)
        if code == sqlite3.SQLITE_CORRUPT:
            return CorruptError(what, advice=_RECOVER)
        if code == sqlite3.SQLITE_NOTADB:
            return ForeignError(
                f"{self.path} is not a database", advice=f"move it away, {_RECOVER}"
            )
        return MetadataError(f"{what} ({name})" if name else what)

    def _may_be_written(self) -> bool:
        """By the file's mode. This must not open the file (see the module)."""
        return os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)

    # Forks

    def before_fork(self) -> None:
        """Wait for transactions, close all connections, and let none begin until `after_fork`."""
        self._change.acquire()
        self._forking = True
        self._change.wait_for(lambda: not self._in_use, self._fork_wait_s)
        self._close_idle()

    def after_fork(self, *, child: bool) -> None:
        """Let transactions begin; in a child, only if no connection was in use."""
        if child and self._in_use:
            self._unusable = "this process was forked in the middle of a transaction"
        self._forking = False
        self._change.notify_all()
        self._change.release()


def _primary(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _lock_holders(files: list[Path]) -> list[int]:
    try:
        inodes = {str(os.stat(file).st_ino) for file in files if file.exists()}
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    locks = [line.split() for line in lines if " WRITE " in line and "->" not in line]
    found = {int(lock[4]) for lock in locks if lock[5].rpartition(":")[2] in inodes}
    return sorted(found - {os.getpid(), 0, -1})


_FILES: "weakref.WeakSet[SqliteFile]" = weakref.WeakSet()
_FORK_LOCK = threading.Lock()  # while `_FILES` changes, and during a fork
_forked: list[SqliteFile] = []  # after `before_fork`


def _before_fork() -> None:
    _FORK_LOCK.acquire()
    _forked.extend(_FILES)
    for file in _forked:
        file.before_fork()


def _after_fork(*, child: bool) -> None:
    while _forked:
        _forked.pop().after_fork(child=child)
    _FORK_LOCK.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(child=False),
    after_in_child=lambda: _after_fork(child=True),
)
