"""Plain values that the parts of a mount exchange: attributes, listings, errnos, node numbers.

A node is FUSE's name for an inode: the number in the kernel's requests. The file system (`vfs.py`)
and the folder `.diesel` (`dot_diesel.py`) answer with these values, and the sessions turn them into
FUSE replies.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROOT = 1
HIDDEN_ROOT = 1 << 62
"""The node of `.diesel`. This node and greater ones belong to `.diesel`, smaller ones to the
dataset's entries (in a native mount also to files that only the kernel reads)."""

HIDDEN_NAME = b".diesel"

FOREVER_S = 1e9
"""How long the kernel may keep replies about an immutable tree: 31 years, which the kernel can
count in its clock ticks (jiffies)."""


class FuseErrno(Exception):
    """An errno to reply to a request. It is a regular answer, or its cause has been logged."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, number))
        self.errno = number


class Attributes(NamedTuple):
    """The attributes of a node, for replies to the kernel. Node 0 means that the name does not
    exist."""

    node: int
    mode: int  # with the type bits
    size: int
    mtime_ns: int
    name_valid_s: float  # how long the name leads to this node; its content never changes


ABSENT = Attributes(0, 0, 0, 0, FOREVER_S)
"""The reply for a name that a version does not have. The kernel may remember that."""
ABSENT_NOW = Attributes(0, 0, 0, 0, 0.0)
"""The reply for a name that does not exist now; the kernel must look it up again next time."""


class Listing(NamedTuple):
    """Consecutive children of a folder as columns; the first is child number `position`."""

    position: int
    names: Sequence[bytes]
    nodes: Sequence[int]
    modes: Sequence[int]
    sizes: Sequence[int]
    mtimes_ns: Sequence[int]
    name_valid_s: float


@dataclass(frozen=True, slots=True)
class Owner:
    """The user and group that all files show, and the permissions that they do not show."""

    uid: int
    gid: int
    umask: int = 0
