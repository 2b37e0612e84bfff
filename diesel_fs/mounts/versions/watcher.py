"""Finds newer versions of a mount's dataset, and switches the mount to them (`--follow`).

The watcher asks for the newest version every few seconds. A switch has these steps:

1. A thread opens the new snapshot and compares it with the old one.
2. The prefetch worker accepts no plans from now on. If a plan is running, the switch is postponed.
3. In one turn of the server's loop, names begin to lead to the new version; so do the lists of
   `.diesel`, statistics and the control socket.
4. The worker takes over what is in the page cache, and tells the kernel which names and folders to
   look up again; without a worker, a thread here tells it. Until the kernel was told of a name, the
   name leads to the old node (FUSE's word for an inode), which has the old bytes.

A failure before step 3 changes nothing: the mount stays at its version, the log says why, once, and
the watcher tries again at its next check.

Concurrency: trio, in the server process; one task.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import trio

from ...errors import DieselError, ForeignError, MetadataError, NoSuchDataset
from ...format.snapshot.diff import diff_snapshots
from ...format.snapshot.reader import Snapshot
from ...net.messages import Message, Value
from ...repository.private_copies import snapshot_descriptor
from ..options import MountRequest
from ..prefetch.link import WorkerLink
from ..sessions.kernel import KernelSession
from ..sessions.push_status import NodePushStatusMap, push_status_file
from ..sessions.session import Session
from ..source import MountSource, node_map_file
from ..vfs import EntryReader
from .following import FollowingVfs, Prepared
from .invalidation import invalidate_after_switch, invalidate_folders
from .leases import VersionLeases

log = logging.getLogger("diesel.mount")

_T = TypeVar("_T")

POLL_INTERVAL_S = 5.0
"""How often each mount asks for the newest version: that takes a few requests to the metadata store
and a listing of snapshots."""

SWITCH_DELAY_S_MAX = 60.0
"""Each commit of a put makes a version, and a switch takes seconds with millions of entries. So a
mount switches when no newer version has come between two checks, or after this long."""

WORKER_DEADLINE_S = 15.0
"""How long to wait for the worker to say whether plans are running: it may be fetching a chunk."""

RETIRED_BYTES = 16 << 20
"""Memory for chunks of a retired version, of which only open files are read."""


class VersionWatcher:
    """Watches the dataset of one mount (see the module)."""

    def __init__(
        self,
        request: MountRequest,
        source: MountSource,
        link: WorkerLink,
        leases: VersionLeases,
        memory_bytes: int,
        on_switch: Callable[[Snapshot], None],
    ) -> None:
        """`memory_bytes` is for chunks of the current version. `on_switch` is called in step 3."""
        self._request = request
        self._source = source
        self._link = link
        self._memory_bytes = memory_bytes
        self._on_switch = on_switch
        self._leases = leases
        self._thread = trio.CapacityLimiter(1)
        self._session: Session
        self._vfs: FollowingVfs
        self._has_worker = False
        self._ending = False
        self._last_error = ""
        self._newest_version, self._newest_since_s = 0, 0.0
        self._running_plans: list[str] = []
        self._versions = 1  # how many versions the mount answered from at the last `_free_memory`
        self._applied_version: int | None = None  # the last version that the kernel was told of

    def stats(self) -> Mapping[str, object]:
        """The watcher's part of `follow` in `.diesel/stats`."""
        return {
            "told": self._vfs.snapshot.version
            if self._applied_version is None
            else self._applied_version,
            "newest": self._newest_version,
            "put_off_by": list(self._running_plans),
            "trouble": self._last_error,
        }

    def attach_vfs(self, vfs: FollowingVfs) -> None:
        """The file system to switch. Called before everything else."""
        self._vfs = vfs

    def attach_session(self, session: KernelSession, push_status: int) -> None:
        """Connects a session with the worker, for the current version. `push_status` is a memory
        file, in which the worker says which entries it is about to push.
        """
        index_of_node, report_miss = self._vfs.numbers.index, self._link.report_miss

        def on_miss(entry: int) -> None:
            index = index_of_node(entry + 1)  # the session counts nodes from 0, FUSE from 1
            if index >= 0:
                report_miss(index)

        session.attach_worker(
            on_miss, self._link.report_forgotten, NodePushStatusMap(push_status, index_of_node)
        )
        self._has_worker = True

    def stop(self) -> None:
        """The mount is being unmounted: nothing more is begun, or sent to the kernel."""
        self._ending = True

    async def run(self, session: Session) -> None:
        """Watches until it is cancelled."""
        self._session = session
        interval_s = self._request.follow_interval_s or POLL_INTERVAL_S
        while not self._ending:
            await trio.sleep(interval_s)
            try:
                await self._invalidate_stale_names()
                self._vfs.drop_unused_versions()
                await self._free_memory()
                await self._in_thread(lambda: self._leases.set_versions(self._vfs.snapshots))
                await self._check_newest()
            except DieselError as error:
                self._log_once(error)
            except Exception:  # a bug here must not end the mount
                log.exception("following %s failed (a bug); trying again", self._request.dataset)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._thread)

    def _log_once(self, error: DieselError) -> None:
        """Logs an error, unless it was the last one, too."""
        text = f"cannot follow: {error}"
        if isinstance(error, NoSuchDataset):
            text = f"{self._request.dataset} has been deleted"
        elif isinstance(error, ForeignError):
            text = error.message
        if text != self._last_error:
            version = self._vfs.snapshot.version
            log.warning("%s; the mount stays at version %d", text, version)
        self._last_error = text

    async def _check_newest(self) -> None:
        """Asks for the newest version, and switches to it when it may."""
        current, now_s = self._vfs.snapshot, trio.current_time()
        newest = await self._in_thread(lambda: self._source.newest(self._request, current.identity))
        if newest < current.version:
            raise MetadataError(f"the metadata store is behind, at version {newest}")
        if self._last_error:
            log.info("following %s again", current.dataset)
            self._last_error = ""
        if newest == current.version:
            self._newest_version = newest
            return
        if self._newest_version <= current.version:
            self._newest_since_s = now_s
        is_unchanged = newest == self._newest_version
        self._newest_version = newest
        if is_unchanged or now_s - self._newest_since_s >= SWITCH_DELAY_S_MAX:
            await self._switch_if_idle()

    async def _no_plan_runs(self, question: str) -> bool:
        """Asks the worker by one of two messages whether plans run; "hold plans" also makes it
        accept none from then on. True where none runs.
        """
        if not self._has_worker or not self._link.alive:
            return True
        answer = await self._link.request({"do": question}, WORKER_DEADLINE_S)
        running = None if answer is None else answer.get("running")
        if not isinstance(running, list):
            return not self._link.alive  # no answer from a busy worker: the next check asks again
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
                ready.versions.reader.close()
                return
            before = await self._switch(ready)
        finally:
            self._link.send({"do": "let plans"})
            ready.close()
        with trio.move_on_after(self._request.read_deadline_s):
            await self._vfs.drain_retired()
        await self._in_thread(before.close)
        self._versions += 1  # with the new version; the retired one may be gone already

    async def _free_memory(self) -> None:
        """Frees the memory of versions that have ended. Their objects refer to each other in
        cycles, and a snapshot would stay mapped until Python collects those.
        """
        versions = len(self._vfs.snapshots)
        if versions < self._versions:
            await self._in_thread(gc.collect)
        self._versions = versions

    def _prepare(self) -> "_PreparedSwitch | None":
        """Step 1, in a thread; None where there is no newer version. Raises DieselError."""
        old = self._vfs.snapshot
        new = self._source.open(self._request).snapshot
        if new.identity != old.identity:
            raise ForeignError(f"{new.dataset!r} is another dataset now ({new.identity})")
        if new.version <= old.version:
            return None
        self._leases.set_versions([new, *self._vfs.snapshots])  # first: comparing takes seconds
        has_worker = self._has_worker
        reader = self._source.reader(self._request, new, self._memory_bytes, pushes=has_worker)
        prepared = self._vfs.prepare(diff_snapshots(old, new), reader)
        ready = _PreparedSwitch(prepared)
        if has_worker and self._link.alive:
            try:
                ready.files.append(snapshot_descriptor(new))
                ready.files.append(node_map_file(prepared.diff, prepared.numbers.nodes))
                ready.files.append(push_status_file(new.entry_count))
            except OSError as error:
                ready.close()
                raise DieselError(f"no memory for version {new.version}: {error}") from error
        return ready

    async def _switch(self, ready: "_PreparedSwitch") -> EntryReader:
        """Steps 3 and 4. Returns the reader of the version before, to be closed."""
        diff = ready.versions.diff
        old, new = diff.old, diff.new
        self._applied_version = old.version
        before = self._vfs.switch_version(
            ready.versions,
            lambda: self._source.reader(self._request, old, RETIRED_BYTES, pushes=True),
        )
        self._on_switch(new)
        await self._in_thread(lambda: self._source.switch_version(new))  # before the worker reads
        answer: Message | None = None
        if ready.files and isinstance(self._session, KernelSession) and self._link.alive:
            self.attach_session(self._session, ready.files[-1])
            answer = await self._link.send_switch({"do": "switch"}, ready.files)
        if answer is None:
            nodes = ready.versions.before.nodes, ready.versions.numbers.nodes
            await self._invalidate_in_thread(
                lambda device: invalidate_after_switch(device, diff, *nodes)
            )
        self._applied_version = new.version
        changed = int(np.count_nonzero(diff.unchanged < 0))
        log.info(
            "the mount has switched from version %d to %d: %d entries are new or changed",
            old.version,
            new.version,
            changed,
        )
        return before

    async def _invalidate_stale_names(self) -> None:
        """Makes the kernel drop names in folders that only a retired version has, once no program
        has them open."""
        stale = self._vfs.take_stale_names()
        if stale and self._has_worker and self._link.alive:
            names: list[Value] = [[*each] for each in stale.values()]
            self._link.send({"do": "names are old", "nodes": [*stale], "names": names})
        elif stale:
            await self._invalidate_in_thread(lambda device: invalidate_folders(device, stale))

    async def _invalidate_in_thread(self, invalidate: Callable[[int], Iterator[None]]) -> None:
        """Tells the kernel in a thread, where there is no worker."""
        try:
            device = self._session.clone()
        except OSError as error:
            log.error("the kernel cannot be told of the new version: %s", error)
            return

        def tell() -> None:
            try:
                for _ in invalidate(device):
                    if self._ending:
                        break
            except OSError:
                pass  # the mount has ended
            finally:
                os.close(device)

        await self._in_thread(tell)


@dataclass(slots=True)
class _PreparedSwitch:
    """A switch after step 1: its versions, and files for the worker (snapshot, nodes, push
    status)."""

    versions: Prepared
    files: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())
