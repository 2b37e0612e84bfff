"""What every mount that follows its dataset can do: switch to another version.

There are two ways. A FUSE mount keeps its names and changes what they lead to (`fuse_switch.py`). A
native mount gets another tree (`native_switch.py`). `watcher.py` decides when.
"""

from collections.abc import Mapping
from typing import Protocol

from ...format.snapshot.diff import SnapshotDiff
from ...net.messages import Message
from ..tree.vfs import ContentReader
from .versioned_vfs import ReaderFactory, VersionedVfs


class PreparedSwitch(Protocol):
    """A switch that can be made at once. It is made, or closed."""

    def worker_files(self) -> list[int]:
        """New descriptors for the prefetch worker. Raises OSError."""
        ...

    async def make(self, reopen: ReaderFactory) -> ContentReader:
        """Makes names lead to the new version from now on. Returns what
        `VersionedVfs.begin_version` does.

        Raises DieselError, and SwitchUnsupported; then nothing has changed.
        """
        ...

    def message(self) -> Message:
        """What the worker is told besides, once the switch was made."""
        ...

    async def finish_without_worker(self) -> None:
        """Does what the worker would do for the kernel."""
        ...

    def close(self) -> None:
        """Frees what a switch needs that was not made."""
        ...


class Switching(Protocol):
    """The way in which one mount switches."""

    @property
    def vfs(self) -> VersionedVfs:
        """The file system with all versions."""
        ...

    def prepare(self, diff: SnapshotDiff, reader: ContentReader) -> PreparedSwitch:
        """Prepares the switch from the current version to another one, which `reader` reads. For a
        thread. Raises DieselError.
        """
        ...

    def attach_worker(self, push_status: int) -> None:
        """Connects the session with the worker, for the current version. `push_status` is a memory
        file, in which the worker says which entries it is about to push.
        """
        ...

    async def tidy(self) -> None:
        """Frees what is not needed any more; is called at each check."""
        ...

    def stats(self) -> Mapping[str, object]:
        """More of `follow` in `.diesel/stats`."""
        ...

    def stop(self) -> None:
        """The mount is being unmounted: nothing more is sent to the kernel."""
        ...
