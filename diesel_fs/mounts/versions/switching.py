"""The interface of switching a mount to another version of its dataset.

There are two kinds. A FUSE mount keeps its names and changes the nodes that they lead to
(`fuse_switch.py`). A native mount gets another tree (`native_switch.py`). `watcher.py` decides
when.
"""

from collections.abc import Mapping
from typing import Protocol

from ...format.snapshot.diff import SnapshotDiff
from ...net.messages import Message
from ..tree.vfs import ContentReader
from .versioned_vfs import ReaderFactory, VersionedVfs


class PreparedSwitch(Protocol):
    """A switch that can be made at once. The caller makes it, or closes it."""

    def worker_files(self) -> list[int]:
        """New descriptors for the prefetch worker. Raises OSError."""
        ...

    async def make(self, reopen: ReaderFactory) -> ContentReader:
        """Makes names lead to the new version. Returns the result of `VersionedVfs.begin_version`.

        Raises DieselError, and SwitchUnsupported; then nothing has changed.
        """
        ...

    def message(self) -> Message:
        """More fields for the worker, after the switch was made."""
        ...

    async def finish_without_worker(self) -> None:
        """Does the worker's part for the kernel."""
        ...

    def close(self) -> None:
        """Frees the resources of a switch that was not made."""
        ...


class Switching(Protocol):
    @property
    def vfs(self) -> VersionedVfs: ...

    def prepare(self, diff: SnapshotDiff, reader: ContentReader) -> PreparedSwitch:
        """Prepares the switch from the current version to another one, with the reader of the
        latter. For a thread. Raises DieselError."""
        ...

    def attach_worker(self, push_status: int) -> None:
        """Connects the session with the worker. In the memory file `push_status` the worker marks
        the entries that it is about to push."""
        ...

    async def tidy(self) -> None:
        """Frees unused resources; called at each check."""
        ...

    def stats(self) -> Mapping[str, object]:
        """More of `follow` in `.diesel/stats`."""
        ...

    def stop(self) -> None:
        """The mount is being unmounted: nothing more is sent to the kernel."""
        ...
