"""Finds newer versions of a mount's dataset, and switches the mount to them (`--follow`).

A switch has these steps:

1. A thread opens the new snapshot, compares it with the old one and prepares the switch.
2. The prefetch worker accepts no plans from now on. If a plan is running, the switch is
   postponed.
3. Names begin to lead to the new version. The lists of `.diesel`, statistics and the control socket
   change to it, too.
4. The worker takes over the contents of the page cache for the new version.

Step 3 differs between kinds of mounts (`switching.py`). A failure before it changes nothing: the
mount stays at its version, logs the reason once, and tries again at the next check. If the kernel
cannot switch this mount, the watcher stops trying.

Concurrency: trio, in the server process; one task.
"""

import gc
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import trio

from ...errors import DieselError, ForeignError, MetadataError, NoSuchDataset
from ...format.snapshot.diff import SnapshotDiff, diff_snapshots
from ...format.snapshot.reader import Snapshot
from ...repository.private_copies import snapshot_descriptor
from ..options import MountRequest
from ..prefetch.link import WorkerLink
from ..sessions.push_status import push_status_file, share_logs
from ..sessions.session import SwitchUnsupported
from ..source import MountSource
from ..tree.vfs import ContentReader
from .leases import VersionLeases
from .switching import PreparedSwitch, Switching
from .versioned_vfs import RETIRED_READERS_MAX

log = logging.getLogger("diesel.mount")

_T = TypeVar("_T")

POLL_INTERVAL_S = 5.0
"""A check takes a few requests to the metadata store and a listing of snapshots."""

SWITCH_DELAY_S_MAX = 60.0
_SWITCH_SHARE = 20
"""Each commit of a put makes a version, and a switch takes seconds with millions of entries. So a
mount switches when no further version has appeared between two checks, or when it has waited for
`_SWITCH_SHARE` times as long as its last switch took, or for `SWITCH_DELAY_S_MAX`."""

WORKER_DEADLINE_S = 15.0
"""How long to wait for an answer of the worker, which may be fetching a chunk."""


class VersionWatcher:
    def __init__(
        self,
        request: MountRequest,
        source: MountSource,
        link: WorkerLink,
        leases: VersionLeases,
        memory_bytes: int,
        retired_bytes: int,
        on_switch: Callable[[Snapshot], None],
    ) -> None:
        """`memory_bytes` is for chunks of the current version, `retired_bytes` for those of all
        retired versions together: only their open files are read. `on_switch` is called in step
        3."""
        self._request = request
        self._source = source
        self._link = link
        self._memory_bytes = memory_bytes
        self._retired_bytes = retired_bytes // RETIRED_READERS_MAX
        self._on_switch = on_switch
        self._leases = leases
        self._thread = trio.CapacityLimiter(1)
        self._switching: Switching
        self._has_worker = False
        self._ending = False
        self._can_switch = True
        self._last_error = ""
        self._switch_failed = False  # with `_last_error`
        self._newest_version, self._newest_since_s = 0, 0.0
        self._switch_took_s = 0.0
        self._running_plans: list[str] = []
        self._versions = 1  # that the mount answered from at the last `_free_memory`
        self._applied_version: int | None = None  # the last that the kernel knows fully

    def stats(self) -> Mapping[str, object]:
        return {
            "told": self._snapshots[0].version
            if self._applied_version is None
            else self._applied_version,
            "newest": self._newest_version,
            "put_off_by": list(self._running_plans),
            "trouble": self._last_error,
            **self._switching.stats(),
        }

    @property
    def _snapshots(self) -> list[Snapshot]:
        return self._switching.vfs.snapshots

    def attach(self, switching: Switching) -> None:
        """Sets the kind of switches, before all other calls."""
        self._switching = switching

    def attach_worker(self, push_status: int) -> None:
        """Called when the worker has begun with the current version (`Switching.attach_worker`)."""
        self._switching.attach_worker(push_status)
        self._has_worker = True

    def stop(self) -> None:
        """Called when the mount is being unmounted: nothing more is begun, or sent to the
        kernel."""
        self._ending = True
        self._switching.stop()

    async def run(self) -> None:
        interval_s = self._request.follow_interval_s or POLL_INTERVAL_S
        while not self._ending:
            await trio.sleep(interval_s)
            try:
                await self._switching.tidy()
                self._switching.vfs.drop_unused_versions()
                await self._free_memory()
                await self._in_thread(lambda: self._leases.set_versions(self._snapshots))
                if self._can_switch:
                    await self._check_newest()
            except SwitchUnsupported as reason:
                self._can_switch = False
                self._log_once(f"cannot follow: {reason}")
            except DieselError as error:
                self._log_once(self._explanation(error))
            except Exception:  # a bug here must not end the mount
                log.exception("following %s failed (a bug); trying again", self._request.dataset)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._thread)

    def _explanation(self, error: DieselError) -> str:
        if isinstance(error, NoSuchDataset):
            return f"{self._request.dataset} has been deleted"
        return error.message if isinstance(error, ForeignError) else f"cannot follow: {error}"

    def _log_once(self, trouble: str) -> None:
        if trouble != self._last_error:
            version = self._snapshots[0].version
            log.warning("%s; the mount stays at version %d", trouble, version)
        self._last_error = trouble

    def _recover(self) -> None:
        if self._last_error:
            log.info("following %s again", self._request.dataset)
        self._last_error = ""
        self._switch_failed = False

    async def _check_newest(self) -> None:
        current, now_s = self._snapshots[0], trio.current_time()
        newest = await self._in_thread(lambda: self._source.newest(self._request, current.identity))
        if newest < current.version:
            raise MetadataError(f"the metadata store is behind, at version {newest}")
        if newest == current.version or not self._switch_failed:
            self._recover()
        if newest == current.version:
            self._newest_version = newest
            return
        if self._newest_version <= current.version:
            self._newest_since_s = now_s
        is_unchanged = newest == self._newest_version
        self._newest_version = newest
        patience_s = min(_SWITCH_SHARE * self._switch_took_s, SWITCH_DELAY_S_MAX)
        if is_unchanged or now_s - self._newest_since_s >= patience_s:
            try:
                await self._switch_if_idle()
                self._switch_took_s = trio.current_time() - now_s
            except DieselError:
                self._switch_failed = True
                raise
            self._recover()

    async def _no_plan_runs(self, question: str) -> bool:
        """Whether no plan is running, as the worker reports; False also if it does not answer in
        time. After the `question` "hold plans" (the other is "running") the worker accepts no
        plans."""
        if not self._has_worker or not self._link.alive:
            return True
        answer = await self._link.request({"do": question}, WORKER_DEADLINE_S)
        running = None if answer is None else answer.get("running")
        if not isinstance(running, list):
            return not self._link.alive  # a busy worker: the next check tries again
        names = [str(name) for name in running]
        if names and not self._running_plans:
            log.info(
                "the switch to version %d waits for plans to end: %s",
                self._newest_version,
                ", ".join(names),
            )
        self._running_plans = names
        return not names

    async def _switch_if_idle(self) -> None:
        if not await self._no_plan_runs("running"):
            return
        ready = await self._in_thread(self._prepare)
        if ready is None:
            return
        try:
            if not await self._no_plan_runs("hold plans") or self._ending:
                return
            before = await self._switch(ready)
        finally:
            self._link.send({"do": "let plans"})
            ready.close()
        with trio.move_on_after(self._request.read_deadline_s):
            await self._switching.vfs.drain_retired()
        await self._in_thread(before.close)
        self._versions += 1  # with the new version; the retired one may be gone already

    async def _free_memory(self) -> None:
        """Collects garbage if a version has ended. The objects of a version refer to each other in
        cycles, and its snapshot would stay mapped until then."""
        versions = len(self._snapshots)
        if versions < self._versions:
            await self._in_thread(gc.collect)
        self._versions = versions

    def _prepare(self) -> "_ReadySwitch | None":
        """Step 1, in a thread. Returns None if there is no newer version. Raises DieselError."""
        old = self._snapshots[0]
        new = self._source.open(self._request).snapshot
        if new.identity != old.identity:
            raise ForeignError(f"{new.dataset!r} is another dataset now ({new.identity})")
        if new.version <= old.version:
            return None
        self._leases.set_versions([new, *self._snapshots])  # before comparing, which takes seconds
        has_worker = self._has_worker
        reader = self._source.reader(self._request, new, self._memory_bytes)
        try:
            diff = diff_snapshots(old, new)
            ready = _ReadySwitch(diff, self._switching.prepare(diff, reader))
        except BaseException:
            reader.close()
            raise
        if has_worker and self._link.alive:
            try:
                ready.files.append(snapshot_descriptor(new))
                ready.files.append(push_status_file(new.entry_count))
                share_logs(reader, ready.files[-1])
                ready.files += ready.prepared.worker_files()
            except OSError as error:
                ready.close()
                raise DieselError(f"no memory for version {new.version}: {error}") from error
        return ready

    async def _switch(self, ready: "_ReadySwitch") -> ContentReader:
        """Steps 3 and 4. Returns the reader of the version before, which the caller closes."""
        old, new = ready.diff.old, ready.diff.new
        self._applied_version = old.version
        before = await ready.prepared.make(
            lambda: self._source.reader(self._request, old, self._retired_bytes)
        )
        self._on_switch(new)
        await self._in_thread(lambda: self._source.switch_version(new))  # before the worker reads
        answer = None
        if ready.files and self._link.alive:
            self._switching.attach_worker(ready.files[1])
            message = {"do": "switch", **ready.prepared.message()}
            answer = await self._link.send_switch(message, ready.files)
        if answer is None:
            await ready.prepared.finish_without_worker()
        self._applied_version = new.version
        log.info(
            "the mount has switched from version %d to %d: %d entries are new or changed",
            old.version,
            new.version,
            int(np.count_nonzero(ready.diff.unchanged < 0)),
        )
        return before


@dataclass(slots=True)
class _ReadySwitch:
    """A switch after step 1, and descriptors of files for the worker: the snapshot, the push status
    (`sessions/push_status.py`), and then those of `PreparedSwitch.worker_files`."""

    diff: SnapshotDiff
    prepared: PreparedSwitch
    files: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())
        self.prepared.close()
