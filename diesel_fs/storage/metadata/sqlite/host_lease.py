"""Decides which host may write to a SQLite file on a network file system.

SQLite relies on file locks, which on network file systems work or fail depending on server and
mount options. So a lease, in a small file beside the database, lets only one host (identified by
its boot ID) write at a time. Each writing process is a holder with an expiry of its own; another
host may take the lease when all holders have released it or have expired. Thread-safe; a forked
child becomes a holder of its own.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ....errors import BusyError, MetadataError, PermissionDenied
from ....system.mountinfo import file_system_of

LEASE_S = 60.0
CLOCK_ALLOWANCE_S = 300.0
"""Hosts' clocks may differ by this, so a host's lease is over for others only this long later."""

_LOCK_DEADLINE_S = 10.0
_POLL_S = 0.02
_FILE_BYTES_MAX = 1 << 16
_HOLDERS_MAX = 500  # keeps the file small

# Mount options that keep locks inside one host, or turn them off
_LOCAL_LOCKS = frozenset(
    "nolock local_lock=all local_lock=posix nobrl localflock noflock forcemandatorylock".split()
)
_FLOCK = struct.Struct("hhqqi4x")  # `struct flock` of fcntl(2) on a 64-bit Linux
_IN_PROCESS = threading.Lock()  # POSIX locks do not keep threads of one process apart


def locks_fault(folder: Path) -> str:
    """Why file locks do not work between processes; "" if they do."""
    refused = file_system_of(folder).options & _LOCAL_LOCKS
    if refused:
        return f"it is mounted with {sorted(refused)[0]!r}"
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-lock-") as first,
            open(first.name, "r+b") as second,
        ):
            return _conflict_fault(first.fileno(), second.fileno())
    except OSError as error:
        return f"locking a file in it fails: {error.strerror}"


def _conflict_fault(first: int, second: int) -> str:
    lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(first, fcntl.F_OFD_SETLK, lock)
    try:
        fcntl.fcntl(second, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return ""
        raise
    return "two open files get the same lock at once"


def host_boot_id() -> str:
    """Containers of a host share it, as they share locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class _Lease:
    """`host` is an ID, `where` the name and process for messages. `holders` has when (seconds since
    1970) each holder expires."""

    host: str
    where: str
    holders: dict[str, float]

    @property
    def expires_s(self) -> float:
        return max(self.holders.values(), default=0.0)


class HostLease:
    def __init__(self, path: Path, host: str = "", clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._host = host or host_boot_id()
        self._clock = clock
        self._process = 0  # that made `_token`: a forked child makes its own
        self._token = ""
        self._fresh_until = 0.0  # monotonic time at which `keep` has to write

    def keep(self) -> None:
        """Take the lease, or renew it once half of its time has passed; cheap before that. Raises
        BusyError if another host has it, PermissionDenied, MetadataError."""
        if self._process != os.getpid():
            self._process, self._token, self._fresh_until = os.getpid(), secrets.token_hex(8), 0.0
        if time.monotonic() < self._fresh_until:
            return
        began = time.monotonic()
        with self._locked() as file:
            lease, now = self._read(file), self._clock()
            wait_s = lease.expires_s + CLOCK_ALLOWANCE_S - now
            if lease.host != self._host and wait_s > 0:
                raise BusyError(
                    f"{lease.where} is writing to {self._path.parent}: on a network file system"
                    " only one host at a time may write",
                    advice=f"if that host is dead, wait {wait_s:.0f} s or delete {self._path.name};"
                    " for several hosts use ?meta=redis://",
                )
            others = lease.holders if lease.host == self._host else {}
            alive = [(token, until_s) for token, until_s in others.items() if until_s > now]
            holders = dict(alive[-_HOLDERS_MAX:]) | {self._token: now + LEASE_S}
            where = f"{socket.gethostname()} (process {os.getpid()})"
            self._write(file, _Lease(self._host, where, holders))
        self._fresh_until = began + LEASE_S / 2

    def release(self) -> None:
        """Never raises: a holder that stays in the lease expires."""
        if self._process != os.getpid():
            return
        self._fresh_until = 0.0
        try:
            with self._locked() as file:
                lease = self._read(file)
                if lease.host == self._host and lease.holders.pop(self._token, None) is not None:
                    self._write(file, lease)
        except (OSError, BusyError, MetadataError, PermissionDenied):
            return

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with _IN_PROCESS:
                file = os.open(self._path, flags, 0o666)
                try:
                    _lock(file, self._path)
                    yield file
                finally:
                    os.close(file)
        except PermissionError as error:
            raise PermissionDenied(f"cannot write {self._path}: {error.strerror}") from error
        except OSError as error:
            raise MetadataError(f"cannot lease {self._path}: {error.strerror}") from error

    def _read(self, file: int) -> _Lease:
        content = os.pread(file, _FILE_BYTES_MAX, 0)
        if not content:
            return _Lease("", "", {})
        try:
            fields: object = json.loads(content)
            if isinstance(fields, dict):
                host, where, holders = fields["host"], fields["where"], fields["holders"]
                expiries = {str(token): float(until_s) for token, until_s in holders.items()}
                return _Lease(str(host), str(where), expiries)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        # Half written, or another program's: as if an unknown host took the lease at that time
        return _Lease("unknown", "an unknown host", {"": os.fstat(file).st_mtime + LEASE_S})

    def _write(self, file: int, lease: _Lease) -> None:
        content = json.dumps(
            {"host": lease.host, "where": lease.where, "holders": lease.holders}
        ).encode()
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        os.fsync(file)


def _lock(file: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > deadline:
                raise BusyError(f"{path} stays locked by another process") from error
            time.sleep(_POLL_S)
        else:
            return
