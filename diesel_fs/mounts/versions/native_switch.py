"""Switches a native mount to another version: another tree takes the place of the first.

All look-ups meet the new tree from one moment on, so the kernel need not be notified of changed
names. Open files and working folders stay in the old tree; the old version ends when the kernel
reports that none of them is in use any more.
"""

import os
from collections.abc import Mapping

import trio

from ...errors import DieselError
from ...format.image import Image, Shown
from ...format.snapshot.diff import SnapshotDiff
from ...net.messages import Message
from ..prefetch.link import WorkerLink
from ..sessions.native import NativeSession, TreeVersion, reason_of
from ..sessions.push_status import PushStatusMap
from ..sessions.session import SessionUnsupported
from ..source import node_map_file
from ..tree.images import open_image
from ..tree.vfs import ContentReader
from .switching import PreparedSwitch
from .versioned_vfs import ReaderFactory, VersionedVfs, VersionVfs


def tree_version(vfs: VersionedVfs, version: VersionVfs, image: Image, file: int) -> TreeVersion:
    """`file` is a descriptor of the image's file. When no file of the version's tree is in use any
    more, the version ends and `file` is closed."""

    def end() -> None:
        os.close(file)
        version.end()
        vfs.drop_unused_versions()

    return TreeVersion(image, file, version, end)


class NativeSwitching:
    def __init__(
        self, vfs: VersionedVfs, session: NativeSession, link: WorkerLink, shown: Shown
    ) -> None:
        self.vfs = vfs
        self.session = session
        self._link = link
        self._shown = shown

    def prepare(self, diff: SnapshotDiff, reader: ContentReader) -> PreparedSwitch:
        self.session.check_place()
        image, file = open_image(diff.new, self._shown)
        new = VersionVfs(self.vfs, diff.new, reader)
        return _NativeSwitch(self, diff, new, tree_version(self.vfs, new, image, file))

    def attach_worker(self, push_status: int) -> None:
        link = self._link
        self.session.report_current_tree()
        self.session.worker.attach(
            link.report_miss, link.report_forgotten, PushStatusMap(push_status)
        )

    async def tidy(self) -> None:
        """A tree ends by itself."""

    def stats(self) -> Mapping[str, object]:
        """The earlier trees that are still in use: open files in them keep the mount busy."""
        trees = self.session.retired_trees()
        return {"retired_trees": [{"mount": each, "device": trees[each]} for each in trees]}

    def stop(self) -> None:
        """This class sends no notifications."""


class _NativeSwitch:
    def __init__(
        self, switching: NativeSwitching, diff: SnapshotDiff, new: VersionVfs, tree: TreeVersion
    ) -> None:
        self._switching = switching
        self._diff = diff
        self._new = new
        self._tree = tree
        self._is_begun = self._is_made = False

    def worker_files(self) -> list[int]:
        files = [node_map_file(self._diff, None)]
        try:
            for each in (self._tree.file, self._switching.session.private_mount):
                files.append(os.dup(each))
        except OSError:
            for each in files:
                os.close(each)
            raise
        return files

    async def make(self, reopen: ReaderFactory) -> ContentReader:
        self._is_begun = True  # from now on the session calls `on_end`
        try:
            await self._switching.session.switch_tree(self._tree)
        except OSError as error:
            raise DieselError(reason_of(error)) from error
        except SessionUnsupported as error:
            raise DieselError(str(error)) from error
        self._is_made = True
        return self._switching.vfs.begin_version(self._new, reopen)

    def message(self) -> Message:
        return {"content_node": self._switching.session.content_node}

    async def finish_without_worker(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        if not self._is_begun:
            self._tree.on_end()
        if not self._is_made:
            self._new.close()
