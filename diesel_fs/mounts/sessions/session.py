"""What every FUSE session shares: how it is driven, and the options it mounts with.

A session joins one `Vfs` to the kernel at one mount point, and knows nothing of snapshots, readers
or repositories; the `Vfs` knows nothing of FUSE. Whoever drives a session (the daemon) unmounts:
`serve` returns once the kernel has closed the connection. Concurrency: `mount` before trio runs,
`serve` inside it, `close` after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ...names import check_dataset_name
from ..mountpoint import SUBTYPE
from ..vfs import Vfs


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What a mount is called, and who besides its owner may enter it."""

    dataset: str
    version: int
    allow_other: bool = False
    follows: bool = False  # so its version changes

    def as_list(self) -> Sequence[str]:
        """The options for mount(2) or fusermount3: a fixed list, and nothing of a user's but a
        dataset's name, which holds neither comma nor backslash, so that none becomes an option. The
        mount is `ro` and `noatime`, or each read would make the kernel ask for attributes again.
        """
        name = check_dataset_name(self.dataset)
        source = name if self.follows else f"{name}@{int(self.version)}"
        fixed = ["ro", "nosuid", "nodev", "noatime", "default_permissions", f"subtype={SUBTYPE}"]
        return [*fixed, f"fsname={source}", *(["allow_other"] if self.allow_other else [])]


class SessionUnsupported(Exception):
    """The kernel lacks what a session needs; another session may do."""


class Session(Protocol):
    """One connection to the kernel. The same suite runs over every implementation."""

    name: ClassVar[str]
    negotiated: str
    """What was agreed upon with the kernel, for the log."""

    def __init__(self, vfs: Vfs, mountpoint: str, options: MountOptions) -> None: ...

    def mount(self) -> None:
        """Puts the file system in the tree; requests wait until `serve`.

        Raises DieselError; SessionUnsupported, with nothing mounted, where another session may do.
        """
        ...

    async def serve(self, started: Callable[[], None]) -> None:
        """Answers requests until the kernel has closed the connection; cancelled, it answers EIO to
        those that still wait. Calls `started` once the kernel's first request is being answered.
        """
        ...

    def set_open_callback(self, opened: Callable[[int], None]) -> None:
        """From now on, tell of each entry that is opened; nothing where the kernel opens files by
        itself.
        """
        ...

    def clone(self) -> int:
        """Another descriptor of the connection, to notify the kernel through. Raises OSError."""
        ...

    def close(self) -> None:
        """Closes the connection; the kernel fails what is still waiting for an answer."""
        ...
