"""Network file systems: how to tell one, whether its locks work, and which host may write there.

SQLite's locks are as good as the file system's, and those of network file systems differ with the
server, the mount options and the day. So besides them one host at a time may write, by a lease in a
small file beside the database. Owned here: that file. Not owned: what the lease guards.

The lease belongs to a host (known by its boot ID), and each of its processes that writes is a
holder with its own expiry; it is free when the last one has gone or expired. A `HostLease` may be
used from many threads; a forked child becomes a holder of its own.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diesel_fs.errors import BusyError, MetadataError, PermissionDenied
from diesel_fs.system.mountinfo import file_system_of

LEASE_S = 60.0
CLOCK_ALLOWANCE_S = 300.0
"""How far clocks of hosts may differ: so much longer a dead host keeps the others out."""

_LOCK_DEADLINE_S = 10.0
_POLL_S = 0.02
_FILE_BYTES_MAX = 1 << 16
_HOLDERS_MAX = 500

# Mount options that keep locks inside one host, or turn them off.
_LOCAL_LOCKS = frozenset(
    "nolock local_lock=all local_lock=posix nobrl localflock noflock forcemandatorylock".split()
)
_FLOCK = struct.Struct("hhqqi4x")
_IN_PROCESS = threading.Lock()  # POSIX locks do not keep threads of one process apart


def locks_fault(folder: Path) -> str:
    """Why locks in a folder cannot be relied on between processes, or the empty string."""
    refused = file_system_of(folder).options & _LOCAL_LOCKS
    if refused:
        return f"it is mounted with {sorted(refused)[0]!r}"
    probe = folder / f".tmp-lock-{secrets.token_hex(8)}"
    try:
        first = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            second = os.open(probe, os.O_RDWR | os.O_CLOEXEC)
            try:
                return _conflict_fault(first, second)
            finally:
                os.close(second)
        finally:
            os.close(first)
    except OSError as error:
        return f"locking a file in it fails: {error.strerror}"
    finally:
        probe.unlink(missing_ok=True)


def _conflict_fault(first: int, second: int) -> str:
    lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(first, fcntl.F_OFD_SETLK, lock)
    try:
        fcntl.fcntl(second, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return ""
        raise
    return "two at once get the same lock"


def host_boot_id() -> str:
    """The identity of this host's kernel: containers on it share it, and its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class _Lease:
    """What the file holds: who, for messages where and which process, and expiry by holder."""

    host: str
    where: str
    holders: dict[str, float]

    @property
    def expires(self) -> float:
        return max(self.holders.values(), default=0.0)


class HostLease:
    """This process's share in the lease of its host."""

    def __init__(self, path: Path, host: str = "", clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._host = host or host_boot_id()
        self._clock = clock
        self._process = 0
        self._token = ""
        self._sure_until = 0.0  # monotonic

    def keep(self) -> None:
        """Take the lease, or renew it where half of it is over; without a system call before.

        Raises BusyError where another host has it, PermissionDenied, MetadataError.
        """
        if self._process != os.getpid():
            self._process, self._token, self._sure_until = os.getpid(), secrets.token_hex(8), 0.0
        if time.monotonic() < self._sure_until:
            return
        began = time.monotonic()
        with self._locked() as file:
            lease, now = self._read(file), self._clock()
            if lease.host != self._host and now < lease.expires + CLOCK_ALLOWANCE_S:
                wait_s = lease.expires + CLOCK_ALLOWANCE_S - now
                raise BusyError(
                    f"{lease.where} is writing to {self._path.parent}, and this is a network"
                    " file system: one host at a time may",
                    advice=f"if that host is dead, wait {wait_s:.0f} s or delete {self._path.name};"
                    " for several hosts use ?meta=redis://",
                )
            others = lease.holders if lease.host == self._host else {}
            alive = [(token, until) for token, until in others.items() if until > now]
            holders = dict(alive[-_HOLDERS_MAX:]) | {self._token: now + LEASE_S}
            where = f"{socket.gethostname()} (process {os.getpid()})"
            self._write(file, _Lease(self._host, where, holders))
        self._sure_until = began + LEASE_S / 2

    def release(self) -> None:
        """Give up this process's share. Never raises: what is left expires."""
        if self._process != os.getpid():
            return
        self._sure_until = 0.0
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
                known = {str(token): float(until) for token, until in holders.items()}
                return _Lease(str(host), str(where), known)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        # Torn or foreign: somebody wrote it at that time, and nobody knows who.
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
