"""Loads the files below a path of a mount, so that readers do not wait for the object store.

The way depends on the mount:

- The mount pushes contents into the kernel's page cache: as many files as fit its memory are
  announced as a plan that no program reads (`plans/CONTROL.md`), until they are loaded.
- The mount also reads through a cache of chunks (of the nodes of a task, or on a disk with
  `--cache-dir`): all files are announced, and the plan's reader reports positions half of the
  memory behind the pushes. So every chunk passes through that cache. A cache on a disk keeps only
  as much as it can write in time, so the pass is repeated as long as the cache gains chunks.
- The mount pushes nothing, since its prefetch worker has ended: this module reads the files.

Files are loaded in the order of their chunks, so that each chunk is fetched once. One thread calls;
reading has threads of its own.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import (
    ConflictError,
    DeadlineError,
    DieselError,
    ObjectStoreError,
    UsageError,
)
from ..format.entries import Kind
from ..format.snapshot.layout import kinds
from ..format.snapshot.reader import Indices, Snapshot
from ..system.available_memory import default_memory_bytes, memory_limit_bytes
from . import launcher
from .mountpoints.mountpoint import DatasetMount, is_alive, locate, mounted_at
from .plans.control import Control, explicit
from .prefetch.memory import KNOWN_DIVISOR, KNOWN_ENTRY_BYTES
from .prefetch.pages.content_page_cache import STAGING_DIVISOR
from .prefetch.planner import PAUSE_S_MAX
from .prefetch.streams.units import PAGE_BYTES
from .source import MemorySplit

Show = Callable[[int, int, int], None]
"""Shows progress: the number of files that had their turn, the number of all files, and the bytes
of the former."""

POLL_S_MIN, POLL_S_MAX = 0.02, 0.25
"""How often the mount's progress is queried: often at first, since small folders are quick."""

WINDOW_ENTRIES = 1 << 18
"""The most files between the pushed ones and the position that the plan's reader reports. A mount
pushes at most twice as far ahead, since it watches one file in 256 of those ahead."""

NO_ROOM_S = 2.0
"""If a mount has waited for room for this time, it gets none: plans of other programs hold it."""

FAILING_S = 30.0
"""How long to wait while the mount cannot read its store and loads nothing: as long as a read
waits."""

WORKER_STATS_LAG_S, TASK_STATS_LAG_S, FILE_AGE_S = 0.6, 1.3, 1.2
"""The greatest age of figures from the prefetch worker (sent four times a second), from the task
(fetched once a second), and in the file `.diesel/stats` (made once a second)."""

SAMPLE_ENTRIES = 1024
"""Files in a sample. If the kernel has freed one in 200 pushed files, the sample contains such a
file with a probability of 99 %."""

READERS = 8
"""Files that are read at once if the mount pushes nothing."""

READ_BYTES = 1 << 20

ENDLESS_BYTES = 1 << 62

PASSES_MAX = 16
"""The most passes over the files."""

VERSIONS_TRIED = 3
"""A mount that follows its dataset may switch to another version just before it gets the plan."""

_DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Amount:
    files: int = 0
    content_bytes: int = 0

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.files - other.files, self.content_bytes - other.content_bytes)

    def part(self, part: float) -> "Amount":
        return Amount(int(self.files * part), int(self.content_bytes * part))


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """Each file counts in one of the amounts below `total`, or in `left`."""

    total: Amount
    in_memory: Amount
    in_cache: Amount
    """Files that are only in the cache of chunks. If it had no room for all, their number is
    estimated from the part of the reads that it served."""
    failed: tuple[tuple[bytes, str], ...]
    """The paths and reasons."""
    failed_amount: Amount

    @property
    def left(self) -> Amount:
        """The files that had no room."""
        return self.total - self.in_memory - self.in_cache - self.failed_amount


class Warmup:
    """Made by `open`."""

    def __init__(self, mount: DatasetMount, path: bytes, stats: Mapping[str, object]) -> None:
        self.mountpoint = mount.path
        self.path = path
        """The path inside the mount."""
        self._mount = mount
        self._stats = stats
        self._read_snapshot()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Warmup":
        """Finds the mount of a path (a mount point, or something below one), and reads its
        snapshot. Raises the errors of `locate`."""
        mount, inside = locate(path)
        if not is_alive(mount.path):
            raise _ended(mount.path)
        if mount.is_native and mount.hidden_mount is None and mount.fuse is not None:
            own = os.path.dirname(mount.hidden_folder)
            raise UsageError(
                f"{mount.path} is another view of the mount on {own}",
                advice="name that one, and the folder in it",
            )
        found = cls(mount, inside, launcher.stats(mount.path))
        with _errors_of(mount.path), found._control() as control:
            if control is not None:  # the worker knows the budget before `.diesel/stats` has it
                found._stats = control.stats()
        return found

    def _read_snapshot(self) -> None:
        with (
            _errors_of(self.mountpoint),
            open(os.path.join(self._mount.hidden_folder, "snapshot"), "rb") as file,
        ):
            snapshot = self.snapshot = Snapshot(file.read())
        below = snapshot.walk(snapshot.index_of(self.path))
        files = below[kinds(snapshot.columns.flags[below]) == Kind.FILE]
        self._files: Indices = files[np.argsort(snapshot.chunk_of(files), kind="stable")]
        self._sizes = snapshot.columns.size[self._files].astype(np.int64)
        self._costs = -(-self._sizes // PAGE_BYTES) * PAGE_BYTES

    @property
    def has_cache(self) -> bool:
        return "task" in self._stats

    @property
    def total(self) -> Amount:
        return self._amount(np.ones(len(self._files), np.bool_))

    @property
    def room(self) -> Amount:
        """The files that fit the page cache: the mount's memory for contents, or, if the mount
        pushes nothing, the free memory."""
        return self._amount(self._fitting())

    def memory_wanted_bytes(self) -> int:
        """The `--memory` that a mount without a cache of chunks needs for all files; 0 if this
        machine has less."""
        names_bytes = len(self._files) * KNOWN_ENTRY_BYTES
        contents_bytes = int(self._costs.sum())
        wanted = contents_bytes + min(names_bytes, contents_bytes // (KNOWN_DIVISOR - 1))
        if self._mount.is_native:
            wanted = wanted * STAGING_DIVISOR // (STAGING_DIVISOR - 1)
        wanted = MemorySplit.total_for(wanted)
        return wanted if wanted <= memory_limit_bytes() else 0

    def run(self, show: Show) -> WarmupReport:
        """Loads the files. An interrupted run withdraws its plan; loaded files stay. Raises
        ObjectStoreError if nothing can be loaded because the mount cannot read its store,
        PermissionDenied for another user's mount, and DieselError if the mount ends meanwhile."""
        if not len(self._files):
            return WarmupReport(Amount(), Amount(), Amount(), (), Amount())
        for tries_left in reversed(range(VERSIONS_TRIED)):
            try:
                with _errors_of(self.mountpoint), self._control() as control:
                    return self._read(show) if control is None else self._push(control, show)
            except ConflictError:  # the mount has just switched to another version
                if not tries_left:
                    raise
                self._read_snapshot()
        raise AssertionError

    # a mount that pushes --------------------------------------------------------------------------

    @contextmanager
    def _control(self) -> Iterator[Control | None]:
        """None if the mount takes no plans."""
        if not os.path.lexists(os.path.join(self._mount.hidden_folder, "control")):
            yield None
            return
        with Control.connect(self.mountpoint) as control:
            yield control if control.accepts_plans else None

    def _push(self, control: Control, show: Show) -> WarmupReport:
        self._stats = control.stats()  # just after mounting, `.diesel/stats` may lack the budget
        self._forget_freed(control)
        unread: dict[int, str] = {}  # reasons, by entry
        if self.has_cache:
            pushed, served_part = self._push_through_cache(control, show)
            large = np.flatnonzero(~self._pushable())
            unread = self._read_files(large, lambda *_: None)
            pushed = replace(pushed, reached=np.concatenate([pushed.reached, self._files[large]]))
        else:
            fitting = self._files[self._fitting()]
            pushed = self._push_once(control, fitting, ENDLESS_BYTES, show)
            self._forget_freed(control)
            # The mount assumes that the READ of a missed file has loaded it; but it may have failed
            absent = np.setdiff1d(fitting[~control.resident(fitting)], pushed.failed)
            if len(absent) and len(pushed.reached) == len(fitting):
                again = self._push_once(control, absent, ENDLESS_BYTES, lambda *_: None)
                pushed = replace(pushed, failed=np.union1d(pushed.failed, again.failed))
            served_part = 0.0
        self._forget_freed(control)
        resident = control.resident(self._files)
        reasons = dict.fromkeys(pushed.failed.tolist(), "damaged, or cannot be read (see its log)")
        reasons |= unread
        has_failed = np.isin(self._files, [*reasons]) & ~resident
        had_turn = np.isin(self._files, pushed.reached)
        failed = self._files[has_failed]
        named = zip(
            self.snapshot.paths(failed), map(reasons.__getitem__, failed.tolist()), strict=True
        )
        return WarmupReport(
            self.total,
            self._amount(resident),
            self._amount(had_turn & ~resident & ~has_failed).part(served_part),
            tuple(named),
            self._amount(has_failed),
        )

    def _push_through_cache(self, control: Control, show: Show) -> tuple["_Pushed", float]:
        """Pushes all files, again and again, until the cache of chunks gains no more. Returns the
        result of the last pass, and the part of its reads that the cache served (0 to 1)."""
        window_bytes = self._budget_bytes // 2
        order = self._files[self._pushable()]
        if not len(order):
            return _Pushed(order, order), 1.0
        chunk_count = len(np.unique(self.snapshot.chunk_of(order)))
        for _ in range(PASSES_MAX):
            before = control.stats()
            pushed = self._push_once(control, order, window_bytes, show)
            time.sleep(TASK_STATS_LAG_S)
            after = control.stats()
            fetched, gained = _changes(before, after)
            # A fetched chunk that replaced another chunk of these files is no gain
            missing = (_served_to_worker(after) - _served_to_worker(before)).missing
            missing += max(fetched - gained, 0) / chunk_count
            if not missing or gained <= 0 or len(pushed.reached) < len(order):
                break
        return pushed, max(1 - missing, 0.0)

    def _push_once(
        self, control: Control, order: Indices, window_bytes: int, show: Show
    ) -> "_Pushed":
        """Has the mount push the files of `order`, as a plan. `window_bytes`: how far its reader
        stays behind the pushes; `ENDLESS_BYTES`: it stays at the beginning."""
        name = f"warmup:{os.getpid()}"
        pushing = _Pushing(control, name, order, self.snapshot, window_bytes, show)
        control.announce(name, [explicit(epoch=0, entries=order)])
        try:
            return pushing.run()
        finally:
            with suppress(DieselError):  # the mount may have ended
                control.withdraw(name)

    @property
    def _budget_bytes(self) -> int:
        match self._stats.get("residency"):
            case {"budget_bytes": int(budget)}:
                return budget
        return default_memory_bytes()

    def _fitting(self) -> npt.NDArray[np.bool_]:
        """Flags the first files that fit the budget beside the kernel's memory for names."""
        budget = self._budget_bytes
        known = 0
        match self._stats.get("residency"):
            case {"known_bytes": int(known)}:
                pass
        # In a FUSE mount, the kernel learns all names of a folder at once
        names = np.arange(1, len(self._files) + 1) if self._mount.is_native else len(self._files)
        names_bytes = np.maximum(names * KNOWN_ENTRY_BYTES, known)
        contents_budget = budget - np.minimum(names_bytes, budget // KNOWN_DIVISOR)
        can_fit = self._pushable()
        fits: npt.NDArray[np.bool_] = np.cumsum(self._costs * can_fit) <= contents_budget
        fits &= can_fit
        fits |= self._costs == 0
        return fits

    def _pushable(self) -> npt.NDArray[np.bool_]:
        """Flags files that the mount can push; larger ones come by READ requests."""
        mask: npt.NDArray[np.bool_] = (
            self._costs <= self._budget_bytes * (KNOWN_DIVISOR - 1) // KNOWN_DIVISOR
        )
        return mask

    def _forget_freed(self, control: Control) -> None:
        """Queries the kernel about resident files, if a sample shows that some were freed."""
        known = self._files[control.resident(self._files)]
        if not control.check(known[:: max(1, len(known) // SAMPLE_ENTRIES)]).all():
            control.check(known)

    def _amount(self, which: npt.NDArray[np.bool_]) -> Amount:
        return Amount(int(np.count_nonzero(which)), int(self._sizes[which].sum()))

    # a mount that does not push -------------------------------------------------------------------

    def _read(self, show: Show) -> WarmupReport:
        fitting = self._fitting()
        chosen = np.flatnonzero(np.ones_like(fitting) if self.has_cache else fitting)
        served_before = _served_to_server(self._stats)
        reasons = self._read_files(chosen, show)
        has_failed = np.isin(self._files, [*reasons])
        served_part = 0.0
        if self.has_cache and not fitting.all():
            time.sleep(TASK_STATS_LAG_S + FILE_AGE_S)
            served = _served_to_server(launcher.stats(self.mountpoint)) - served_before
            served_part = 1 - served.missing
        return WarmupReport(
            self.total,
            self._amount(fitting & ~has_failed),
            self._amount(~fitting & ~has_failed).part(served_part),
            tuple((self.snapshot.path(entry), reason) for entry, reason in reasons.items()),
            self._amount(has_failed),
        )

    def _read_files(self, chosen: Indices, show: Show) -> dict[int, str]:
        """Returns the error texts of files that cannot be read, by entry. Raises DieselError if the
        mount has ended."""
        failed: dict[int, str] = {}
        done = done_bytes = 0
        with ThreadPoolExecutor(READERS, "warmup") as readers:
            try:
                for start in range(0, len(chosen), SAMPLE_ENTRIES):
                    some = chosen[start : start + SAMPLE_ENTRIES].tolist()
                    for at, error in zip(some, readers.map(self._read_one, some), strict=True):
                        done, done_bytes = done + 1, done_bytes + int(self._sizes[at])
                        show(done, len(chosen), done_bytes)
                        if error is not None:
                            failed[int(self._files[at])] = error
                    if failed and not _is_served(self.mountpoint):
                        raise _ended(self.mountpoint)
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                raise
        return failed

    def _read_one(self, at: int) -> str | None:
        """Returns an error text if the file cannot be read. Raises OSError if the mount has
        ended."""
        inside = self.snapshot.path(int(self._files[at]))
        try:
            file = os.open(os.path.join(os.fsencode(self.mountpoint), inside), os.O_RDONLY)
            try:
                while os.read(file, READ_BYTES):
                    pass
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in _DEAD:
                raise
            return os.strerror(error.errno or errno.EIO)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Pushed:
    reached: Indices
    """The files that had their turn; the others had no room."""
    failed: Indices
    """Reached, but not pushed."""


class _Pushing:
    """Watches the pushes of a plan, and moves the plan's reader on."""

    def __init__(
        self,
        control: Control,
        name: str,
        order: Indices,
        snapshot: Snapshot,
        window_bytes: int,
        show: Show,
    ) -> None:
        self._control = control
        self._name = name
        self._order = order
        sizes = snapshot.columns.size[order].astype(np.int64)
        # Bytes of all files before a position, as content and in whole pages
        self._content_before = np.concatenate([[0], np.cumsum(sizes)])
        pages = -(-sizes // PAGE_BYTES) * PAGE_BYTES
        self._pages_before = np.concatenate([[0], np.cumsum(pages)])
        self._window_bytes = window_bytes
        self._show = show
        self._position = 0  # of the reader, which has read all files before it
        self._failed: list[Indices] = [order[:0]]
        self._failures_before = _failed_pushes(_residency(control.stats()))

    def run(self) -> _Pushed:
        """Waits until all files are pushed, or the rest has no room. Raises DieselError."""
        count, poll_s = len(self._order), POLL_S_MIN
        state: tuple[object, ...] = ()
        changed_s = time.monotonic()
        failures = -1
        while True:
            try:
                stats = _residency(self._control.stats())
            except DeadlineError:  # the worker waits for the store, but not for ever
                if time.monotonic() - changed_s > FAILING_S:
                    raise
                continue
            pushed = self._frontier(stats)
            now_s = time.monotonic()
            if state != (state := (pushed, stats["pushed_entries"])):
                changed_s, failures = now_s, -1
            failed_pushes = _failed_pushes(stats)
            failures = failed_pushes if failures < 0 else failures
            # A failed push is tried again after a pause
            has_failed = failed_pushes > self._failures_before
            quiet_s = WORKER_STATS_LAG_S + (PAUSE_S_MAX if has_failed else 0)
            waits_for_room = stats["waits_for_room"] is True
            still_s = now_s - changed_s
            self._show(pushed, count, int(self._content_before[pushed]))
            if pushed == count and self._all_resident(pushed):
                break
            if failed_pushes > failures:
                if still_s > FAILING_S:
                    raise ObjectStoreError(
                        "the mount cannot read its object store, and has loaded"
                        f" {pushed:,} of {count:,} files",
                        advice="its log says why; run this again when the store is back",
                    )
            elif (pushed == count and still_s > quiet_s) or (
                waits_for_room and still_s > NO_ROOM_S
            ):
                break
            self._move_reader(pushed, needs_room=waits_for_room)
            poll_s = POLL_S_MIN if waits_for_room else min(poll_s * 1.3, POLL_S_MAX)
            time.sleep(poll_s)
        self._pass(pushed)
        return _Pushed(self._order[:pushed], np.concatenate(self._failed))

    def _frontier(self, stats: Mapping[str, object]) -> int:
        """Returns the number of files that had their turn: pushed, or impossible to push."""
        streams = stats["streams"]
        assert isinstance(streams, list)
        for each in streams:
            if each["name"] == self._name:
                return min(int(each["frontier"]), len(self._order))
        raise DieselError("somebody else has withdrawn the plan of this command")

    def _all_resident(self, end: int) -> bool:
        return bool(self._control.resident(self._order[self._position : end]).all())

    def _move_reader(self, pushed: int, *, needs_room: bool) -> None:
        """Reports the position of the plan's reader (this process): as far behind the pushed files
        as the window allows, or close behind them if room is needed. Without reports the mount
        would take the reader for dead."""
        moves = self._window_bytes < ENDLESS_BYTES
        behind_bytes = 0 if moves and needs_room else self._window_bytes
        before = self._pages_before[pushed] - behind_bytes
        first = int(np.searchsorted(self._pages_before, before))
        position = min(max(self._position, first, pushed - WINDOW_ENTRIES), max(pushed - 1, 0))
        self._pass(position)
        self._control.progress(self._name, position)

    def _pass(self, position: int) -> None:
        """Moves the reader's position. Passed files that are not resident could not be pushed."""
        passed = self._order[self._position : max(position, self._position)]
        if len(passed):
            self._failed.append(passed[~self._control.resident(passed)])
        self._position = max(position, self._position)


def _residency(stats: Mapping[str, object]) -> Mapping[str, object]:
    found = stats.get("residency")
    assert isinstance(found, dict)
    return found


def _failed_pushes(residency: Mapping[str, object]) -> int:
    found = residency.get("failed_pushes", 0)
    assert isinstance(found, int)
    return found


@dataclass(frozen=True, slots=True)
class _Served:
    """Reads that a cache of chunks has served, and reads that went to the store."""

    hits: int = 0
    misses: int = 0

    def __sub__(self, other: "_Served") -> "_Served":
        return _Served(self.hits - other.hits, self.misses - other.misses)

    @property
    def missing(self) -> float:
        """The part of the reads that went to the store, 0 to 1."""
        return self.misses / (self.hits + self.misses) if self.misses else 0.0


def _served_to_worker(stats: Mapping[str, object]) -> _Served:
    match _residency(stats).get("store"):
        case {"cache_hits": int(hits), "cache_misses": int(misses)}:
            return _Served(hits, misses)
    return _Served()


def _served_to_server(stats: Mapping[str, object]) -> _Served:
    match stats.get("task"):
        case {
            "client": {
                "mapped_reads": int(mapped), "local_reads": int(local),
                "peer_reads": int(peers), "store_reads": int(misses),
            }
        }:  # fmt: skip
            return _Served(mapped + local + peers, misses)
    return _Served()


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[int, int]:
    """How many chunks this node's master has fetched from the store, and how many more of its own
    share it holds now."""
    counts = []
    for stats in (before, after):
        match stats.get("task"):
            case {
                "chunks_from_store": int(fetched),
                "node_cache": {"share_held_chunks": int(held)},
            }:
                counts.append((fetched, held))
            case _:
                return 0, 0
    (fetched, held), (fetched_now, held_now) = counts
    return fetched_now - fetched, held_now - held


def _ended(mountpoint: str) -> DieselError:
    return DieselError(f"the mount on {mountpoint} has ended", advice="unmount it, and mount again")


@contextmanager
def _errors_of(mountpoint: str) -> Iterator[None]:
    """Replaces an error of the code inside by a plain message if the mount has ended."""
    try:
        yield
    except (OSError, DieselError) as error:
        has_ended = isinstance(error, OSError) and error.errno in _DEAD
        with suppress(DieselError):
            has_ended = has_ended or not _is_served(mountpoint)
        if has_ended:
            raise _ended(mountpoint) from error
        raise


def _is_served(mountpoint: str) -> bool:
    return mounted_at(mountpoint) is not None and is_alive(mountpoint)
