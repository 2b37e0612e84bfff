"""Plain values that the parts of a mount exchange: attributes, listings, errnos, node numbers.

A node is FUSE's name for an inode: the number in the kernel's requests.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROOT = 1
HIDDEN_ROOT = 1 << 62
"""The node of `.diesel`. Greater nodes belong to it, too; smaller ones are the dataset's entries
(in a native mount also files that only the kernel reads)."""

HIDDEN_NAME = b".diesel"

FOREVER_S = 1e9
"""How long the kernel may keep replies about an immutable tree: 31 years. The kernel can count that
in its clock ticks."""


class FuseErrno(Exception):
    """The errno to reply: a regular answer, or a failure that has been logged."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, number))
        self.errno = number


class Attributes(NamedTuple):
    """Node 0 means that the name does not exist."""

    node: int
    mode: int  # with the type bits
    size: int
    mtime_ns: int
    name_valid_s: float  # how long the name leads to this node


ABSENT = Attributes(0, 0, 0, 0, FOREVER_S)
"""For a name that a version does not have. The kernel may remember that."""
ABSENT_NOW = Attributes(0, 0, 0, 0, 0.0)
"""For a name that does not exist now; the kernel must look it up again next time."""


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
    """The user and group of all files, and the permissions that they do not show."""

    uid: int
    gid: int
    umask: int = 0
