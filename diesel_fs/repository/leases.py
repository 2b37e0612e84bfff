"""Leases: small objects that name a process and the version that it reads, or its purge.

FORMAT.md, section 6, has the rules. A thread of the holder renews a lease. A purge keeps the
versions in readers' leases, and itself holds a lease that only one process can hold. If a reader
cannot write its lease, only the grace period protects it: the time that a version stays after it
was current. In a forked child, a `ReadLease` does nothing.
"""

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Self
from uuid import UUID

from ..errors import (
    BusyError,
    DieselError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreRefused,
    PermissionDenied,
    TruncatedError,
    UsageError,
)
from ..format.object_names import lease_object, lease_prefix
from ..storage.objects.store import Leftover, ObjectInfo, ObjectStore

log = logging.getLogger("diesel.leases")

LEASE_S = 600.0
"""Validity of a lease after it was written. A killed process of another host blocks a purge for
this time."""

RENEW_S = 150.0
"""Three renewals may fail before the lease is over."""

LEASE_ALLOWANCE_S = 300.0
"""The largest allowed difference between the clocks of two hosts."""

CLOCK_AHEAD_S_MAX = LEASE_ALLOWANCE_S
"""A purge's host may be ahead of the object store's clock by this much."""

UNREADABLE_S = 86_400.0
"""An unreadable lease protects every version for this time."""

FOREIGN_LEFTOVER_AGE_S = 7 * 86_400
"""A leftover (a half-written object) of another host counts as abandoned at this age: its process
cannot be looked up here, but no object takes a week to write."""

EVERY_VERSION = -1
"""The version of an unreadable lease, which protects all versions."""

NO_VERSION = 0
"""The version of a dataset before its first commit, with nothing to protect."""

CLEANUP_ONE_IN = 64
"""One renewal in 64 removes leases that ended long ago."""

STALE_LEASE_S = 86_400.0 + LEASE_ALLOWANCE_S
"""Age at which the object of a lease is removed. It exceeds the validity of every lease."""

PURGE = "purge"  # the token in the name of the lease of a purge
POLICY = "policy"  # the object of this name, beside the leases, holds the retention policy
_BYTES_MAX = 4096  # the bytes of a lease that are read; real leases are far shorter


@dataclass(frozen=True, slots=True)
class Lease:
    """`host`, `boot`, `space` and `pid` identify the holder: `boot` is the run of the machine,
    `space` the PID namespace."""

    token: str  # random: distinguishes two leases of one process
    version: int
    until: float  # seconds since 1970
    host: str
    boot: str
    space: str
    pid: int

    @classmethod
    def own(cls, token: str, version: int, seconds: float = LEASE_S) -> Self:
        host, boot, space = _process_namespace()
        return cls(token, version, time.time() + seconds, host, boot, space, os.getpid())

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> Self:
        """Raises ValueError."""
        values = json.loads(bytes(text))
        types = {each.name: each.type for each in fields(cls)}
        if not isinstance(values, dict) or {k: type(v) for k, v in values.items()} != types:
            raise ValueError("other fields than a lease's")
        if values["version"] < NO_VERSION:
            raise ValueError("a negative version")
        return cls(**values)

    def is_valid(self, now_s: float, written_s: float) -> bool:
        """Whether the lease has time left, and its process is not known to be dead. `written_s` is
        when its object was written, by the store's clock. If `until` is impossible, because the
        holder's clock is wrong, the validity counts from `written_s`."""
        end_s = written_s + LEASE_S
        if end_s < self.until <= now_s + LEASE_S + LEASE_ALLOWANCE_S:
            end_s = self.until
        return end_s + LEASE_ALLOWANCE_S > now_s and not self.holder_is_dead

    @property
    def holder_is_dead(self) -> bool:
        """Always False for a process of another boot or PID namespace, about which nothing is
        known."""
        return (self.host, self.boot, self.space) == _process_namespace() and not is_alive(self.pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_abandoned(leftover: Leftover, now_s: float, age_s: float) -> bool:
    """Whether a half-written object is older than `age_s`, and its writer is dead."""
    written_s = leftover.modified_ns / 1e9
    host = re.sub(r"[^A-Za-z0-9._-]", "_", os.uname().nodename)[:64] or "_"
    if leftover.host == host:
        return now_s - written_s > age_s and not is_alive(leftover.pid)
    return now_s - written_s > FOREIGN_LEFTOVER_AGE_S


@cache
def _process_namespace() -> tuple[str, str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        # A random text equals no other, so no process counts as dead
        boot = space = secrets.token_hex(16)
    return os.uname().nodename, boot, space


def _start_renewing(renew: Callable[[], None], ended: threading.Event, renew_s: float) -> None:
    def renew_until_ended() -> None:
        while not ended.wait(renew_s):
            renew()

    threading.Thread(target=renew_until_ended, name="diesel-lease", daemon=True).start()


# Readers


class ReadLease:
    """Tells purges that this process reads a version of a dataset."""

    def __init__(self, objects: ObjectStore, identity: UUID, version: int) -> None:
        """Call `take` instead."""
        self._objects = objects
        self._identity = identity
        self._token = secrets.token_hex(16)
        self._name = lease_object(identity, self._token)
        self._version = version
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # held while the object is written or deleted
        self._ended = threading.Event()
        self._failure_logged = False

    @classmethod
    def take(
        cls, objects: ObjectStore, identity: UUID, version: int, *, renew_s: float = RENEW_S
    ) -> Self:
        """Write a lease, and renew it every `renew_s` until `close`. If it cannot be written, this
        is logged, and the returned lease does nothing."""
        lease = cls(objects, identity, version)
        if lease._write():
            _start_renewing(lease._renew, lease._ended, renew_s)
        else:
            lease._ended.set()
        return lease

    def switch_version(self, version: int) -> None:
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            self._version = version
            if not self._ended.is_set():
                self._write()

    def close(self) -> None:
        """Repeatable; never raises."""
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                with suppress(DieselError):  # if this fails, the lease expires by itself
                    self._objects.delete(self._name)

    def _write(self) -> bool:
        try:
            self._objects.replace(self._name, [Lease.own(self._token, self._version).to_json()])
        except DieselError as error:
            if not self._failure_logged:
                log.info("no lease on version %d: %s", self._version, error.message)
            self._failure_logged = True
            return not isinstance(error, PermissionDenied | UsageError)
        return True

    def _renew(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._write()
        _remove_ended(self._objects, self._identity, self._name)


def _remove_ended(objects: ObjectStore, identity: UUID, own: str) -> None:
    """In one call of CLEANUP_ONE_IN, remove leases that ended long ago, since a dataset may never
    be purged.

    `own` is the name of a lease that has just been written. Its time by the store counts as now,
    since this host's clock may be wrong.
    """
    if secrets.randbelow(CLEANUP_ONE_IN):
        return
    prefix = lease_prefix(identity)
    with suppress(DieselError):
        written_ns = {info.name: info.modified_ns for info in objects.list(prefix)}
        before_ns = written_ns.get(own, 0) - int(STALE_LEASE_S * 1e9)
        for name, at_ns in written_ns.items():
            if at_ns < before_ns and name.removeprefix(prefix) not in (PURGE, POLICY):
                objects.delete(name)


def write_lease_for(
    objects: ObjectStore, identity: UUID, token: str, version: int, seconds: float
) -> None:
    """Write a lease for a client of this server, which must renew it in time; 0 seconds end it. It
    names no process, since this process and the client end independently."""
    name = lease_object(identity, token)
    if seconds <= 0:
        objects.delete(name)
        return
    lease = replace(Lease.own(token, version, min(seconds, LEASE_S)), host="", boot="", space="")
    objects.replace(name, [lease.to_json()])
    _remove_ended(objects, identity, name)


def leases(objects: ObjectStore, identity: UUID, now_s: float) -> Iterator[tuple[str, Lease, bool]]:
    """The readers' leases of a dataset: the object's name, the lease, and whether it is valid. An
    unreadable lease counts as one on EVERY_VERSION for UNREADABLE_S."""
    prefix = lease_prefix(identity)
    for info in objects.list(prefix):
        name = info.name.removeprefix(prefix)
        if name in (PURGE, POLICY):
            continue
        with suppress(ObjectMissing):
            yield info.name, *_read_lease(objects, info, now_s)


def _read_lease(objects: ObjectStore, info: ObjectInfo, now_s: float) -> tuple[Lease, bool]:
    while True:
        written_s = info.modified_ns / 1e9
        try:
            lease = Lease.from_json(objects.get(info.name, 0, min(info.bytes, _BYTES_MAX)))
            return lease, lease.is_valid(now_s, written_s)
        except (ValueError, RecursionError, TruncatedError):
            before, info = info, objects.stat(info.name)
            if (info.bytes, info.modified_ns) == (before.bytes, before.modified_ns):
                until = written_s + UNREADABLE_S
                return Lease("", EVERY_VERSION, until, "", "", "", 0), until > now_s
            # The lease was renewed between the listing and the read, so read it again


def leased_versions(objects: ObjectStore, identity: UUID, now_s: float) -> frozenset[int]:
    """The versions in valid leases, and EVERY_VERSION if a lease cannot be read."""
    versions = (
        lease.version for _, lease, is_valid in leases(objects, identity, now_s) if is_valid
    )
    return frozenset(versions) - {NO_VERSION}


# Purge


class PurgeLease:
    """The exclusive right to purge a dataset; a context manager. Call `check` before every
    deletion."""

    def __init__(self, objects: ObjectStore, identity: UUID) -> None:
        """Call `take` instead."""
        self._objects = objects
        self._token = secrets.token_hex(16)
        self._name = lease_object(identity, PURGE)
        self._renewed_s = 0.0  # by the monotonic clock
        self._lost = False
        self._lock = threading.Lock()  # held while the object is renewed
        self._ended = threading.Event()

    @classmethod
    def take(cls, objects: ObjectStore, identity: UUID) -> Self:
        """Renewed until the context ends. Raises BusyError if another process has the lease, and
        ObjectStoreRefused if this host's clock is ahead."""
        lease = cls(objects, identity)
        for _ in range(3):  # an ended lease is removed; then another process may be faster
            renewed_s = time.monotonic()
            try:
                objects.put(lease._name, [Lease.own(lease._token, 0).to_json()])
            except ObjectExists:
                _end_if_over(objects, lease._name)
                continue
            lease._renewed_s = renewed_s
            lease.check()
            lease._check_clock()
            _start_renewing(lease._renew, lease._ended, RENEW_S)
            return lease
        raise BusyError("another purge of this dataset is under way", advice="try again later")

    def check(self) -> None:
        """Raise BusyError if another process has the lease, or may have it by now."""
        if self._lost or time.monotonic() > self._renewed_s + LEASE_S:
            raise _lost_error()
        try:
            lease = Lease.from_json(self._objects.get(self._name))
        except (ObjectMissing, ValueError, RecursionError):
            raise _lost_error() from None
        if lease.token != self._token:
            raise _lost_error()

    def _check_clock(self) -> None:
        """End the lease and raise ObjectStoreRefused if this host's clock is ahead: valid leases
        would seem over, and young versions and tombstones old."""
        ahead_s = time.time() - self._objects.stat(self._name).modified_ns / 1e9
        if ahead_s > CLOCK_AHEAD_S_MAX:
            self._end()
            raise ObjectStoreRefused(
                f"the clock of this host is {ahead_s:.0f} s ahead of the object store's",
                advice="set it right: purge uses it to tell which leases are over",
            )

    def _end(self) -> None:
        with self._lock:
            self._ended.set()
        with suppress(DieselError):
            self.check()
            self._objects.delete(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _renew(self) -> None:
        with self._lock:
            if self._ended.is_set() or self._lost:
                return
            renewed_s = time.monotonic()
            try:
                self.check()
                self._objects.replace(self._name, [Lease.own(self._token, 0).to_json()])
            except BusyError:
                self._lost = True
            except DieselError as problem:
                log.info("the lease of the purge could not be renewed: %s", problem.message)
            else:
                self._renewed_s = renewed_s


def purge_is_under_way(objects: ObjectStore, identity: UUID) -> bool:
    try:
        return _read_lease(objects, objects.stat(lease_object(identity, PURGE)), time.time())[1]
    except ObjectMissing:
        return False


def _end_if_over(objects: ObjectStore, name: str) -> None:
    try:
        lease, is_valid = _read_lease(objects, objects.stat(name), time.time())
    except ObjectMissing:
        return
    if is_valid:
        holder = f" (process {lease.pid} on {lease.host})" if lease.host else ""
        raise BusyError(
            f"a purge of this dataset is under way{holder}", advice="try again when it has ended"
        )
    objects.delete(name)


def _lost_error() -> BusyError:
    return BusyError(
        "the purge has lost its lease to another, or could not renew it in time",
        advice="nothing is lost; run the purge again",
    )
