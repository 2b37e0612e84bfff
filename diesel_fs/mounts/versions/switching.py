"""The interface by which `watcher.py` switches a mount to another version of its dataset.

`fuse_switch.py` and `native_switch.py` implement it for the two kinds of mounts.
"""

from collections.abc import Mapping
from typing import Protocol

from ...format.snapshot.diff import SnapshotDiff
from ...net.messages import Message
from ..tree.vfs import ContentReader
from .versioned_vfs import ReaderFactory, VersionedVfs


class PreparedSwitch(Protocol):
    """A switch that is ready: `make` carries it out without a long wait. The caller calls `close`
    in any case."""

    def worker_files(self) -> list[int]:
        """Descriptors of files for the prefetch worker, which the caller closes. The first is of
        `source.node_map_file`. Raises OSError."""
        ...

    async def make(self, reopen: ReaderFactory) -> ContentReader:
        """Makes names lead to the new version. `reopen` and the result: as for
        `VersionedVfs.begin_version`. Raises DieselError, and SwitchUnsupported; then nothing has
        changed."""
        ...

    def message(self) -> Message:
        """Further fields of the message that tells the worker of the switch. Called after
        `make`."""
        ...

    async def finish_without_worker(self) -> None:
        """Notifies the kernel as the worker would, if the mount has no worker."""
        ...

    def close(self) -> None:
        """Frees the resources of a switch that was not made."""
        ...


class Switching(Protocol):
    """Makes the switches of one mount, and knows what depends on the kind of mount."""

    @property
    def vfs(self) -> VersionedVfs: ...

    def prepare(self, diff: SnapshotDiff, reader: ContentReader) -> PreparedSwitch:
        """Prepares the switch from the current version (`diff.old`) to another one, which `reader`
        reads. Call it in a thread. Raises DieselError."""
        ...

    def attach_worker(self, push_status: int) -> None:
        """Connects the session with the worker, for the current version. `push_status` is the
        descriptor of the shared memory (`sessions/push_status.py`) in which the worker marks the
        entries that it pushes."""
        ...

    async def tidy(self) -> None:
        """Frees unused resources. The watcher calls it at each check."""
        ...

    def stats(self) -> Mapping[str, object]:
        """Further keys of `follow` in `.diesel/stats`."""
        ...

    def stop(self) -> None:
        """Called when the mount is being unmounted: nothing more may be sent to the kernel."""
        ...
