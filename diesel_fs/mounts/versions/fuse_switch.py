"""Switches a FUSE mount to another version: its names stay, and lead to other nodes.

In one turn of the server's loop, names begin to lead to the new version. Then the prefetch worker
takes over the contents of unchanged files, which keep their nodes (FUSE's word for inodes), and
notifies the kernel of changed names and folders. If there is no worker, a thread here notifies it.
Until then, the kernel uses the node that it remembers for a name, with the old bytes.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping

import trio

from ...format.snapshot.diff import SnapshotDiff
from ...net.messages import Message, Value
from ..prefetch.link import WorkerLink
from ..sessions.push_status import NodePushStatusMap
from ..sessions.session import Session
from ..source import node_map_file
from ..tree.vfs import ContentReader
from .following import FollowingVfs, Prepared
from .invalidation import invalidate_after_switch, invalidate_folders
from .switching import PreparedSwitch
from .versioned_vfs import ReaderFactory

log = logging.getLogger("diesel.mount")


class FuseSwitching:
    def __init__(self, vfs: FollowingVfs, session: Session, link: WorkerLink) -> None:
        self.vfs = vfs
        self._session = session
        self._link = link
        self._has_worker = False
        self._ending = False

    def prepare(self, diff: SnapshotDiff, reader: ContentReader) -> PreparedSwitch:
        return _FuseSwitch(self, self.vfs.prepare(diff, reader))

    def attach_worker(self, push_status: int) -> None:
        index_of_node, report_miss = self.vfs.numbers.index, self._link.report_miss

        def on_miss(entry: int) -> None:
            index = index_of_node(entry + 1)  # the session reports node - 1
            if index >= 0:
                report_miss(index)

        self._session.worker.attach(
            on_miss, self._link.report_forgotten, NodePushStatusMap(push_status, index_of_node)
        )
        self._has_worker = True

    async def tidy(self) -> None:
        """Makes the kernel drop the names that it got in folders of retired versions, so that such
        a version can end when no program has these folders open any more."""
        stale = self.vfs.take_stale_names()
        if stale and self._has_worker and self._link.alive:
            names: list[Value] = [[*each] for each in stale.values()]
            self._link.send({"do": "names are old", "nodes": [*stale], "names": names})
        elif stale:
            await self.invalidate_in_thread(lambda device: invalidate_folders(device, stale))

    def stats(self) -> Mapping[str, object]:
        return {}

    def stop(self) -> None:
        self._ending = True

    async def invalidate_in_thread(self, invalidate: Callable[[int], Iterator[None]]) -> None:
        """Notifies the kernel, for mounts without a worker. `invalidate` gets a descriptor of the
        connection, and yields after each piece of work, where `stop` may end it."""
        try:
            device = self._session.clone()
        except OSError as error:
            log.error("cannot notify the kernel of the new version: %s", error)
            return

        def notify() -> None:
            try:
                for _ in invalidate(device):
                    if self._ending:
                        break
            except OSError:
                pass  # the mount has ended
            finally:
                os.close(device)

        await trio.to_thread.run_sync(notify, abandon_on_cancel=True)


class _FuseSwitch:
    def __init__(self, switching: FuseSwitching, prepared: Prepared) -> None:
        self._switching = switching
        self._prepared = prepared
        self._is_made = False

    def worker_files(self) -> list[int]:
        return [node_map_file(self._prepared.diff, self._prepared.numbers.nodes)]

    async def make(self, reopen: ReaderFactory) -> ContentReader:
        self._is_made = True
        return self._switching.vfs.switch_version(self._prepared, reopen)

    def message(self) -> Message:
        return {}

    async def finish_without_worker(self) -> None:
        prepared = self._prepared
        await self._switching.invalidate_in_thread(
            lambda device: invalidate_after_switch(
                device, prepared.diff, prepared.before.nodes, prepared.numbers.nodes
            )
        )

    def close(self) -> None:
        if not self._is_made:
            self._prepared.reader.close()
