"""Leases: small objects that say who is reading which version, and who is purging.

A lease names a process and holds for some minutes; its holder renews it (FORMAT.md, section 6). A
purge spares what a reader's lease names, and only one process can hold the lease of a purge. A
lease that cannot be written protects nothing, and stops nobody: then the grace period covers the
reader.

A `ReadLease` belongs to the process that took it; its renewing thread is the only other that
touches it. In a forked child it does nothing.
"""

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
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
"""How long a lease holds. After its process was killed, it is in the way for so long."""

RENEW_S = 150.0
"""How often a lease is renewed: a few renewals may fail before it is over."""

LEASE_ALLOWANCE_S = 300.0
"""How far apart the clocks of two hosts may be."""

CLOCK_AHEAD_S_MAX = LEASE_ALLOWANCE_S
"""How far the clock of a purge's host may be ahead of the object store's."""

UNREADABLE_S = 86_400.0
"""How long a lease that cannot be read protects every version."""

FOREIGN_LEFTOVER_AGE_S = 7 * 86_400
"""When a leftover of another host counts as abandoned: nobody here can tell whether its process
lives, but no object takes a week to write."""

EVERY_VERSION = -1
"""The version of a lease that cannot be read."""

NO_VERSION = 0
"""The version of a dataset before its first commit: there is nothing to protect."""

CLEANUP_ONE_IN = 64
"""One renewal in so many lists the leases, and removes those that are long over."""

STALE_LEASE_S = 86_400.0 + LEASE_ALLOWANCE_S
"""After this time since it was written no lease holds."""

PURGE = "purge"
POLICY = "policy"
_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Lease:
    """What a lease says. `host` to `pid` identify the process that holds it: `boot` the run of the
    machine, `space` its namespace of process numbers."""

    token: str
    version: int
    until: float  # seconds since 1970
    host: str
    boot: str
    space: str
    pid: int

    @classmethod
    def own(cls, token: str, version: int, seconds: float = LEASE_S) -> Self:
        """A lease of this process, from now on."""
        host, boot, space = _process_namespace()
        return cls(token, version, time.time() + seconds, host, boot, space, os.getpid())

    def to_json(self) -> bytes:
        """The content of its object."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> Self:
        """The lease in an object. Raises ValueError for anything else."""
        values = json.loads(bytes(text))
        kinds = {
            "token": str, "version": int, "until": float,
            "host": str, "boot": str, "space": str, "pid": int,
        }  # fmt: skip
        if (
            not isinstance(values, dict)
            or {name: type(value) for name, value in values.items()} != kinds
        ):
            raise ValueError("other fields than a lease's")
        if values["version"] < NO_VERSION:
            raise ValueError("a version that there is not")
        return cls(**values)

    def is_valid(self, now_s: float, written_s: float) -> bool:
        """Whether the lease holds: its time is not over, and its process is not known to be dead.

        `written_s` is when its object was written, by the store's clock. The clock of the holder
        may be wrong: where it is behind, `until` is too early, and where it is far ahead, `until`
        is no time that a lease can have. Then the store's time counts.
        """
        end_s = written_s + LEASE_S
        if end_s < self.until <= now_s + LEASE_S + LEASE_ALLOWANCE_S:
            end_s = self.until
        return end_s + LEASE_ALLOWANCE_S > now_s and not self.holder_is_dead

    @property
    def holder_is_dead(self) -> bool:
        """Whether its process is known to have ended: it ran in this boot and this namespace."""
        return (self.host, self.boot, self.space) == _process_namespace() and not is_alive(self.pid)


def is_alive(pid: int) -> bool:
    """Whether this host has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_abandoned(leftover: Leftover, now_s: float, age_s: float) -> bool:
    """Whether nobody will finish a half-written object: it is older than `age_s`, and its writer is
    dead."""
    written_s = leftover.modified_ns / 1e9
    host = re.sub(r"[^A-Za-z0-9._-]", "_", os.uname().nodename)[:64] or "_"
    if leftover.host == host:
        return now_s - written_s > age_s and not is_alive(leftover.pid)
    return now_s - written_s > FOREIGN_LEFTOVER_AGE_S


@cache
def _process_namespace() -> tuple[str, str, str]:
    """Host, boot and namespace: two processes with equal ones can tell each other by number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = secrets.token_hex(
            16
        )  # unknown: a random one equals no other, so no process is taken for dead
    return os.uname().nodename, boot, space


# Readers


class ReadLease:
    """The statement that this process is reading a version of a dataset."""

    def __init__(self, objects: ObjectStore, identity: UUID, version: int) -> None:
        self._objects = objects
        self._identity = identity
        self._token = secrets.token_hex(16)
        self._name = lease_object(identity, self._token)
        self._version = version
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._ended = False
        self._failure_logged = False

    @classmethod
    def take(cls, objects: ObjectStore, identity: UUID, version: int) -> Self:
        """Take a lease. Where it cannot be written, that is logged, and the lease does nothing."""
        lease = cls(objects, identity, version)
        if lease._write():
            threading.Thread(target=lease._renew, name="diesel-lease", daemon=True).start()
        else:
            lease._ended = True
        return lease

    def switch_version(self, version: int) -> None:
        """Protect another version instead, from now on."""
        if self._owner != os.getpid():
            return
        with self._changed:
            self._version = version
            if not self._ended:
                self._write()

    def close(self) -> None:
        """End the lease. Repeatable; never raises."""
        if self._owner != os.getpid():
            return
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
            with suppress(DieselError):  # else it ends by its time
                self._objects.delete(self._name)

    def _write(self) -> bool:
        """Write the lease; False where trying again cannot help."""
        try:
            self._objects.replace(self._name, [Lease.own(self._token, self._version).to_json()])
        except DieselError as error:
            if not self._failure_logged:
                log.info("no lease on version %d: %s", self._version, error.message)
            self._failure_logged = True
            return not isinstance(error, PermissionDenied | UsageError)
        return True

    def _renew(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, RENEW_S):
                    return
                self._write()
            _remove_ended(self._objects, self._identity, self._name)


def _remove_ended(objects: ObjectStore, identity: UUID, own: str) -> None:
    """Now and then, remove leases of readers that were killed: a dataset may never be purged.

    `own` is a lease that has just been written: the others are compared with its time, which is of
    the store's clock, since the clock of this host may be wrong.
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
    """Write a lease for a client of this server, which must ask again in time; 0 seconds end it.

    It names no process, since this process may end before the client does, or after. Raises
    DieselError.
    """
    name = lease_object(identity, token)
    if seconds <= 0:
        objects.delete(name)
        return
    lease = replace(Lease.own(token, version, min(seconds, LEASE_S)), host="", boot="", space="")
    objects.replace(name, [lease.to_json()])
    _remove_ended(objects, identity, name)


def leases(objects: ObjectStore, identity: UUID, now_s: float) -> Iterator[tuple[str, Lease, bool]]:
    """The readers' leases of a dataset: the name of each, what it says, and whether it holds.

    A lease that cannot be read counts as one on EVERY_VERSION, and holds for a day.
    """
    prefix = lease_prefix(identity)
    for info in objects.list(prefix):
        name = info.name.removeprefix(prefix)
        if name in (PURGE, POLICY):
            continue
        with suppress(ObjectMissing):
            lease, holds = _read_lease(objects, info, now_s)
            yield info.name, lease, holds


def _read_lease(objects: ObjectStore, info: ObjectInfo, now_s: float) -> tuple[Lease, bool]:
    """What a lease says and whether it holds."""
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
            # It was renewed in between, with another length


def leased_versions(objects: ObjectStore, identity: UUID, now_s: float) -> frozenset[int]:
    """The versions that somebody is reading; EVERY_VERSION among them where a lease cannot be
    read."""
    held = (lease.version for _, lease, holds in leases(objects, identity, now_s) if holds)
    return frozenset(held) - {NO_VERSION}


# Purge


class PurgeLease:
    """The right to purge a dataset, which one process at a time has; a context manager.

    Call `check` before every deletion: it raises BusyError once the right is lost.
    """

    def __init__(self, objects: ObjectStore, identity: UUID) -> None:
        self._objects = objects
        self._token = secrets.token_hex(16)
        self._name = lease_object(identity, PURGE)
        self._renewed_s = 0.0
        self._lost = False
        self._changed = threading.Condition()
        self._ended = False

    @classmethod
    def take(cls, objects: ObjectStore, identity: UUID) -> Self:
        """Take the lease. Raises BusyError where another process has it."""
        lease = cls(objects, identity)
        for _ in range(3):
            renewed_s = time.monotonic()
            try:
                objects.put(lease._name, [Lease.own(lease._token, 0).to_json()])
            except ObjectExists:
                _end_if_over(objects, lease._name)
                continue
            lease._renewed_s = renewed_s
            lease.check()
            lease._check_clock()
            threading.Thread(target=lease._renew, name="diesel-purge", daemon=True).start()
            return lease
        raise BusyError("another purge of this dataset is under way", advice="try again later")

    def check(self) -> None:
        """Raise BusyError where another process has the lease, or may have it by now."""
        if self._lost or time.monotonic() > self._renewed_s + LEASE_S:
            raise _lost()
        try:
            found = Lease.from_json(self._objects.get(self._name))
        except (ObjectMissing, ValueError, RecursionError):
            raise _lost() from None
        if found.token != self._token:
            raise _lost()

    def _check_clock(self) -> None:
        """Raise ObjectStoreRefused, and end the lease, where this host's clock is ahead: by that
        clock, leases that hold would seem over, and young versions and tombstones old."""
        ahead_s = time.time() - self._objects.stat(self._name).modified_ns / 1e9
        if ahead_s > CLOCK_AHEAD_S_MAX:
            self._end()
            raise ObjectStoreRefused(
                f"the clock of this host is {ahead_s:.0f} s ahead of the object store's",
                advice="set it right: purge uses it to tell which leases are over",
            )

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with suppress(DieselError):
            self.check()
            self._objects.delete(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _renew(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ended, RENEW_S):
                renewed_s = time.monotonic()
                try:
                    self.check()
                    self._objects.replace(self._name, [Lease.own(self._token, 0).to_json()])
                except BusyError:
                    self._lost = True
                    return
                except DieselError as problem:
                    log.info("the lease of the purge could not be renewed: %s", problem.message)
                else:
                    self._renewed_s = renewed_s


def purge_is_under_way(objects: ObjectStore, identity: UUID) -> bool:
    """Whether a purge of a dataset holds its lease."""
    try:
        _, holds = _read_lease(objects, objects.stat(lease_object(identity, PURGE)), time.time())
    except ObjectMissing:
        return False
    return holds


def _end_if_over(objects: ObjectStore, name: str) -> None:
    """Remove the lease of a purge that has ended. Raises BusyError where the lease holds."""
    try:
        found, holds = _read_lease(objects, objects.stat(name), time.time())
    except ObjectMissing:
        return
    if holds:
        holder = f" (process {found.pid} on {found.host})" if found.host else ""
        raise BusyError(
            f"a purge of this dataset is under way{holder}", advice="try again when it has ended"
        )
    objects.delete(name)


def _lost() -> BusyError:
    return BusyError(
        "the purge has lost its lease to another, or could not renew it in time",
        advice="nothing is lost; run it again",
    )
