"""Following: looks for newer versions of a mount's dataset, and has the mount go over to them.

Owned here: when that is done, and in which order. Not owned: which version is current
(`source.py`), what is unchanged in it (`format/snapshot/diff.py`), how nodes are answered for
(`following.py`), what the kernel is told (`invalidation.py`) and by whom: the helper where there is
one (`prefetch_worker.py`), else a thread here.

The order: (1) the snapshot is opened and compared, in a thread; (2) the helper takes no plan from
now on, unless one is running: then all of it is put off; (3) in one turn of the loop names lead to
the new version, and lists, statistics and the control socket are its; (4) the helper takes over
what is resident, and the kernel is told which names and folders to look up anew. Until it has been
told of a name, that leads where it did, to a node of old, which has the bytes of old.

Whatever fails before (3) changes nothing: the mount stays at its version, the log says why, once,
and it is tried again at the next look. Concurrency: trio, in the server; one task.
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
from .invalidation import SwitchInvalidation, invalidate_folders
from .leases import VersionLeases

log = logging.getLogger("diesel.mount")

_T = TypeVar("_T")

POLL_INTERVAL_S = 5.0
"""How often is looked for another version: a look is a few requests to the metadata store and a
listing of snapshots, by each mount of a task."""

SWITCH_DELAY_S_MAX = 60.0
"""Each commit of a put is a version, and to go over to one costs seconds where there are millions
of entries: so it is done when no other has come between two looks, or after so long."""

WORKER_DEADLINE_S = 15.0
"""For a helper that is asked whether plans are running: it may be fetching a chunk."""

RETIRED_BYTES = 16 << 20
"""Memory for chunks of a version that is shown no longer: only files that are open are read."""


class VersionWatcher:
    """One mount that follows its dataset."""

    def __init__(
        self,
        request: MountRequest,
        opener: MountSource,
        link: WorkerLink,
        leases: VersionLeases,
        memory_bytes: int,
        on_switch: Callable[[Snapshot], None],
    ) -> None:
        """`memory_bytes`: for chunks of the version that is shown. `on_switch` is called when names
        lead to another version.
        """
        self._request = request
        self._opener = opener
        self._link = link
        self._memory_bytes = memory_bytes
        self._shown = on_switch
        self._leases = leases
        self._thread = trio.CapacityLimiter(1)
        self._session: Session
        self._vfs: FollowingVfs
        self._pushes = False
        self._ending = False
        self._last_error = ""
        self._newest_version, self._newest_since_s = 0, 0.0
        self._running_plans: list[str] = []
        self._versions = 1  # that were answered for when memory was last given back
        self._applied_version: int | None = (
            None  # the version of which the kernel knows all that it must
        )

    def stats(self) -> Mapping[str, object]:
        """What is known of other versions, and what they wait for."""
        return {
            "told": self._vfs.snapshot.version
            if self._applied_version is None
            else self._applied_version,
            "newest": self._newest_version,
            "put_off_by": list(self._running_plans),
            "trouble": self._last_error,
        }

    def attach_vfs(self, vfs: FollowingVfs) -> None:
        """Whose version it is; before all else."""
        self._vfs = vfs

    def attach_session(self, session: KernelSession, board: int) -> None:
        """Joins a session to the helper: for the version that is shown now, whose board this is."""
        entry_of, missed = self._vfs.numbers.index, self._link.report_miss

        def on_miss(entry: int) -> None:
            index = entry_of(entry + 1)
            if index >= 0:
                missed(index)

        session.attach_worker(
            on_miss, self._link.report_forgotten, NodePushStatusMap(board, entry_of)
        )
        self._pushes = True

    def stop(self) -> None:
        """The mount is being taken away: nothing more is begun, nor told in a thread."""
        self._ending = True

    async def run(self, session: Session) -> None:
        """Follows, until it is cancelled."""
        self._session = session
        look_s = self._request.follow_interval_s or POLL_INTERVAL_S
        while not self._ending:
            await trio.sleep(look_s)
            try:
                await self._invalidate_stale_names()
                self._vfs.drop_unused_versions()
                await self._give_back()
                await self._in_thread(lambda: self._leases.set_versions(self._vfs.snapshots))
                await self._check_newest()
            except DieselError as error:
                self._log_once(error)
            except Exception:  # a bug here must not end the mount
                log.exception("following %s failed", self._request.dataset)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._thread)

    def _log_once(self, error: DieselError) -> None:
        """Once for each trouble."""
        version, what = self._vfs.snapshot.version, f"cannot follow: {error}"
        if isinstance(error, NoSuchDataset):
            what = f"{self._request.dataset} has been deleted"
        elif isinstance(error, ForeignError):
            what = error.message
        if what != self._last_error:
            log.warning("%s; the mount stays at version %d", what, version)
        self._last_error = what

    async def _check_newest(self) -> None:
        """Asks for the current version, and goes over to it when it may."""
        shown, now_s = self._vfs.snapshot, trio.current_time()
        newest = await self._in_thread(lambda: self._opener.newest(self._request, shown.identity))
        if newest < shown.version:
            raise MetadataError(f"the metadata store is behind, at version {newest}")
        if self._last_error:
            log.info("following %s again", shown.dataset)
            self._last_error = ""
        if newest == shown.version:
            self._newest_version = newest
            return
        if self._newest_version <= shown.version:
            self._newest_since_s = now_s
        is_unchanged = newest == self._newest_version
        self._newest_version = newest
        if is_unchanged or now_s - self._newest_since_s >= SWITCH_DELAY_S_MAX:
            await self._switch_if_idle()

    async def _no_plan_runs(self, question: str) -> bool:
        """Whether no plan is running, as the helper says."""
        if not self._pushes or not self._link.alive:
            return True
        answer = await self._link.request({"do": question}, WORKER_DEADLINE_S)
        running = None if answer is None else answer.get("running")
        if not isinstance(running, list):
            return not self._link.alive  # else it is busy: at the next look
        names = [str(name) for name in running]
        if names and not self._running_plans:
            log.info(
                "version %d waits for plans to end: %s", self._newest_version, ", ".join(names)
            )
        self._running_plans = names
        return not names

    async def _switch_if_idle(self) -> None:
        if not await self._no_plan_runs("running"):
            return
        ready = await self._in_thread(self._ready)
        if ready is None:
            return
        try:
            if not await self._no_plan_runs("hold plans") or self._ending:
                ready.prepared.reader.close()
                return
            before = await self._switch(ready)
        finally:
            self._link.send({"do": "let plans"})
            ready.close()
        with trio.move_on_after(self._request.read_deadline_s):
            await self._vfs.drain_retired()
        await self._in_thread(before.close)
        self._versions += 1  # the one before may have gone at once

    async def _give_back(self) -> None:
        """Frees versions that have gone. Each hangs together in circles, and its snapshot would
        stay mapped until Python looks for those.
        """
        versions = len(self._vfs.snapshots)
        if versions < self._versions:
            await self._in_thread(gc.collect)
        self._versions = versions

    def _ready(self) -> "_Ready | None":
        """Another version, opened and compared. In a thread. Raises DieselError."""
        old = self._vfs.snapshot
        new = self._opener.open(self._request).snapshot
        if new.identity != old.identity:
            raise ForeignError(f"{new.dataset!r} is another dataset now ({new.identity})")
        if new.version <= old.version:
            return None
        self._leases.set_versions(
            [new, *self._vfs.snapshots]
        )  # before it is compared: that takes seconds
        pushes = self._pushes
        reader = self._opener.reader(self._request, new, self._memory_bytes, pushes=pushes)
        prepared = self._vfs.prepare(diff_snapshots(old, new), reader)
        ready = _Ready(prepared)
        if pushes and self._link.alive:
            try:
                ready.files.append(snapshot_descriptor(new))
                ready.files.append(node_map_file(prepared.match, prepared.numbers.nodes))
                ready.files.append(push_status_file(new.entry_count))
            except OSError as error:
                ready.close()
                raise DieselError(f"no memory for version {new.version}: {error}") from error
        return ready

    async def _switch(self, ready: "_Ready") -> EntryReader:
        """Names lead to the version from here on; what read the one before comes back."""
        found = ready.prepared.match
        old, new = found.old, found.new
        self._applied_version = old.version
        before = self._vfs.switch_version(
            ready.prepared,
            lambda: self._opener.reader(self._request, old, RETIRED_BYTES, pushes=True),
        )
        self._shown(new)
        await self._in_thread(
            lambda: self._opener.switch_version(new)
        )  # before the helper reads of it
        answer: Message | None = None
        if ready.files and isinstance(self._session, KernelSession) and self._link.alive:
            self.attach_session(self._session, ready.files[-1])
            answer = await self._link.send_switch({"do": "switch"}, ready.files)
        if answer is None:
            numbers = ready.prepared.before.nodes, ready.prepared.numbers.nodes
            await self._invalidate_in_thread(SwitchInvalidation(found, *numbers).send)
        self._applied_version = new.version
        changed = int(np.count_nonzero(found.unchanged < 0))
        log.info(
            "the mount has gone over from version %d to %d: %d entries are new or changed",
            old.version,
            new.version,
            changed,
        )
        return before

    async def _invalidate_stale_names(self) -> None:
        """Has the kernel drop names in folders that are shown no longer, with their last users."""
        given = self._vfs.take_stale_names()
        if given and self._pushes and self._link.alive:
            names: list[Value] = [[*each] for each in given.values()]
            self._link.send({"do": "names are old", "nodes": [*given], "names": names})
        elif given:
            await self._invalidate_in_thread(lambda device: invalidate_folders(device, given))

    async def _invalidate_in_thread(self, invalidate: Callable[[int], Iterator[None]]) -> None:
        """Tells the kernel, where no helper does."""
        try:
            device = self._session.clone()
        except OSError as error:
            log.error("the kernel cannot be told of another version: %s", error)
            return

        def tell() -> None:
            try:
                for _ in invalidate(device):
                    if self._ending:
                        break
            except OSError:
                pass  # the mount has gone
            finally:
                os.close(device)

        await self._in_thread(tell)


@dataclass(slots=True)
class _Ready:
    """A version that can be shown, and what the helper needs of it: snapshot, numbers, board."""

    prepared: Prepared
    files: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())
