"""The volumes of one node: which mounts they have, when mounts are shared, and when they end.

`NodeVolumes` has the logic of `VOLUMES.md`, without gRPC. Equal volumes have the same *key* and
share a mount, whose name is `KEY-N`.

Concurrency: any thread may call. Few threads start mounts; all callers with one key wait for one
start. Another thread (the *reaper*) ends unused mounts. A mount is started, chosen for sharing and
ended under the lock of its key, and is not ended while a `publish` with its key is under way
(`_claims`). A target is changed under the target's own lock.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from contextlib import contextmanager
from dataclasses import dataclass

from diesel_fs.errors import ConflictError, DeadlineError, DieselError, NotFoundError

from .mounter import Mounter, current_version
from .state import StateFolder, key_of
from .targets import (
    FileSystemUsage,
    MountTable,
    TargetState,
    bind,
    check_place,
    checked_target,
    detach,
    lives,
    remove_target,
    show_control,
    usage_of,
)
from .volumes import Volume, VolumeLimits, check_mount_flags, name_the_same, parse_volume

log = logging.getLogger("diesel.csi")

CHECK_INTERVAL_S = 30.0
"""The reaper looks this often for mounts that have died or could not be ended."""

VERSION_KNOWN_S = 10.0
"""After a check, a mount's version counts as current for this time: a Job's pods start together."""


@dataclass(frozen=True, slots=True)
class VolumeHealth:
    trouble: str
    """Why the volume cannot be read, or ""."""
    usage: FileSystemUsage | None


class NodeVolumes:
    """A mount that no target needs ends after `idle_s`. At most `starts_max` mounts start at
    once."""

    def __init__(
        self,
        state: StateFolder,
        mounter: Mounter,
        limits: VolumeLimits,
        *,
        idle_s: float,
        starts_max: int,
    ) -> None:
        self._state = state
        self._mounter = mounter
        self._limits = limits
        self._idle_s = idle_s
        self._lock = threading.Lock()  # of the fields below
        self._claims: Counter[str] = Counter()  # by key: calls of `publish` that are under way
        self._starting: dict[str, Future[str]] = {}  # by key: the name of the mount
        self._checked_s: dict[str, float] = {}  # by name: when the version was known to be current
        self._target_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._target_calls: Counter[str] = Counter()  # calls that hold or wait for a target's lock
        self._starters = ThreadPoolExecutor(starts_max, "diesel-csi-start")
        self._enders = ThreadPoolExecutor(starts_max, "diesel-csi-end")
        self._idle_since_s: dict[str, float] = {}  # by name; used by the reaper alone
        self._wake = threading.Event()
        self._closing = False
        self._reaper = threading.Thread(target=self._reap, name="diesel-csi-reaper", daemon=True)
        self._reaper.start()

    def close(self) -> None:
        """Ends the threads after the starts under way. Mounts go on."""
        self._closing = True
        self._wake.set()
        self._reaper.join()
        self._starters.shutdown(cancel_futures=True)
        self._enders.shutdown()

    def publish(
        self,
        target: str,
        attributes: Mapping[str, str],
        secrets: Mapping[str, str],
        mount_flags: list[str],
        *,
        timeout_s: float,
        is_wanted: Callable[[], bool],
    ) -> Volume:
        """Shows a volume at a target, and returns when it can be read there. Repeatable.

        Nothing is bound if `is_wanted` reports that the caller no longer waits. Raises UsageError,
        ConflictError if another volume or file system is at the target, BusyError if anything else
        is there or the folder above is missing, DeadlineError, and the errors of `dlcmd mount`; no
        message has a secret.
        """
        check_mount_flags(mount_flags)
        volume = parse_volume(attributes, secrets, self._limits)
        target = checked_target(target, self._state)
        key = volume.key(self._state.node_key)
        until_s = time.monotonic() + timeout_s
        try:
            with self._claimed(key):
                with self._target_lock(target):
                    is_published = self._is_published(target, key)
                    if not is_published:
                        check_place(target)  # now, so that no mount is started in vain
                if not is_published:
                    name = self._joined(volume, key, until_s)
                    with self._target_lock(target):
                        if not is_wanted():
                            raise DeadlineError("the caller has not waited for the volume")
                        if not self._is_published(target, key):
                            bind(self._state.root(name), target)
                            show_control(self._state.run_folder(name), target)
        except DieselError as error:
            raise _without_secrets(error, volume) from None
        return volume

    def unpublish(self, target: str) -> None:
        """Does nothing if there is no volume at the target. Raises DieselError."""
        target = checked_target(target, self._state)
        with self._target_lock(target):
            detach(target)
            remove_target(target)
        self._wake.set()

    def condition(self, target: str) -> VolumeHealth:
        """Raises NotFoundError if there is no volume at the target."""
        target = checked_target(target, self._state)
        place, name = MountTable.read(self._state).at(target)
        if place in (TargetState.FREE, TargetState.FOREIGN):
            raise NotFoundError(f"no volume of this driver is published at {target}")
        if place is TargetState.STALE or not lives(self._state.root(name)):
            trouble = "the mount has ended: reads fail until kubelet publishes the volume again"
            return VolumeHealth(f"{trouble}, and then until the container restarts", None)
        try:
            return VolumeHealth("", usage_of(target))
        except OSError as error:
            return VolumeHealth(f"the mount does not answer: {error.strerror}", None)

    @contextmanager
    def _claimed(self, key: str) -> Iterator[None]:
        with self._lock:
            self._claims[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._claims[key] -= 1
                if not self._claims[key]:
                    del self._claims[key]
            self._wake.set()

    @contextmanager
    def _target_lock(self, target: str) -> Iterator[None]:
        with self._lock:
            lock = self._target_locks[target]
            self._target_calls[target] += 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._target_calls[target] -= 1
                if not self._target_calls[target]:
                    del self._target_calls[target], self._target_locks[target]

    def _is_published(self, target: str, key: str) -> bool:
        """Whether this volume can be read at the target. Removes the bind of an ended mount. Raises
        ConflictError if something else is there."""
        place, name = MountTable.read(self._state).at(target)
        match place:
            case TargetState.FREE:
                return False
            case TargetState.OURS if not lives(self._state.root(name)):
                log.warning("the mount behind %s has ended: it is replaced", target)
            case TargetState.OURS if name_the_same(key_of(name), key):
                return True  # the same volume; its secrets may have been renewed meanwhile
            case TargetState.OURS:
                raise ConflictError(
                    f"another volume is published at {target}",
                    advice="unpublish it first; a volume has the same attributes each time",
                )
            case TargetState.FOREIGN:
                raise ConflictError(f"another file system is mounted at {target}")
        detach(target)
        return False

    def _joined(self, volume: Volume, key: str, until_s: float) -> str:
        """Finds or starts a mount for the volume, and returns its name. Raises DeadlineError at
        `until_s` (monotonic), and the errors of the start."""
        with self._lock:
            start = self._starting.get(key)
            is_new = start is None
            if start is None:
                start = self._starting[key] = self._starters.submit(self._start, volume, key)
        if is_new:  # without the lock: if the start has ended, this calls the callback at once
            start.add_done_callback(lambda _: self._forget_start(key))
        try:
            return start.result(max(0.0, until_s - time.monotonic()))
        except WaitedTooLong:
            raise DeadlineError(
                f"the mount of {volume.named} has not started yet", advice="it goes on; try again"
            ) from None

    def _forget_start(self, key: str) -> None:
        with self._lock:
            self._starting.pop(key, None)

    def _start(self, volume: Volume, key: str) -> str:
        with self._state.key_lock(key) as lock:
            living = [
                name
                for name in MountTable.read(self._state).roots
                if key_of(name) == key and lives(self._state.root(name))
            ]
            found = self._current(volume, living)
            if found:
                return found
            name = self._state.new_name(key)
            self._state.make_folder(name, volume.namespace)
            try:
                self._mounter.start(volume, name, lock)
            except BaseException:
                self._end(name)
                raise
            self._checked_s[name] = time.monotonic()
            return name

    def _current(self, volume: Volume, living: list[str]) -> str:
        """Returns "" if there is no living mount that the volume may share: it must show the
        current version if the volume wants that."""
        if not living:
            return ""
        newest = living[-1]
        age_s = time.monotonic() - self._checked_s.get(newest, float("-inf"))
        if not volume.may_go_stale or age_s < VERSION_KNOWN_S:
            return newest
        try:
            source = f"{volume.dataset}@{current_version(volume, self._state)}"
        except NotFoundError:
            raise
        except DieselError as error:
            text = volume.without_secrets(str(error))
            log.warning("%s is shared: cannot find its current version: %s", newest, text)
            return newest
        roots = MountTable.read(self._state).roots
        found = [name for name in living if name in roots and roots[name].source == source]
        if not found:
            return ""
        self._checked_s[found[-1]] = time.monotonic()
        return found[-1]

    def _end(self, name: str) -> None:
        """Ends a mount and removes its folder; logs a failure. The caller holds the lock of the
        mount's key."""
        try:
            self._mounter.end(name)
            self._state.remove_folder(name)
        except (DieselError, OSError) as error:
            log.warning("cannot end the mount %s yet: %s", name, error)
        else:
            self._checked_s.pop(name, None)
            log.info("ended mount=%s", name)

    def _reap(self) -> None:
        wait_s = 0.0
        while True:
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._closing:
                return
            wait_s = CHECK_INTERVAL_S
            try:
                wait_s = self._end_idle()
            except Exception:
                log.exception("cannot look for idle mounts (a bug)")

    def _end_idle(self) -> float:
        """Returns the seconds until the next look."""
        now_s = time.monotonic()
        table = MountTable.read(self._state)
        idle = {name for name in self._state.names() if not table.binds.get(name)}
        self._idle_since_s = {name: self._idle_since_s.get(name, now_s) for name in idle}
        wait_s, due = CHECK_INTERVAL_S, []
        for name, since_s in self._idle_since_s.items():
            left_s = since_s + self._idle_s - now_s if name in table.roots else 0.0
            if left_s > 0:
                wait_s = min(wait_s, left_s)
            else:
                due.append(name)
        list(self._enders.map(self._end_unneeded, due))
        return wait_s

    def _end_unneeded(self, name: str) -> None:
        key = key_of(name)
        if self._closing:
            return
        try:
            with self._state.key_lock(key, wait=False):
                with self._lock:
                    is_claimed = key in self._claims
                if not is_claimed and not MountTable.read(self._state).binds.get(name):
                    self._end(name)
        except BlockingIOError:
            pass


def _without_secrets(error: DieselError, volume: Volume) -> DieselError:
    error.message = volume.without_secrets(error.message)
    error.advice = volume.without_secrets(error.advice)
    error.details = volume.without_secrets(error.details)
    return error
