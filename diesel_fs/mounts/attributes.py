"""What a mount tells of its nodes: attributes, listings, refusals, and the numbers themselves.

Shared by the file system (`vfs.py`) and the folder that it hides (`dot_diesel.py`). Plain values.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROOT = 1
HIDDEN_ROOT = 1 << 62
HIDDEN_NAME = b".diesel"

FOREVER_S = 1e9
"""How long answers about an immutable tree hold: 31 years, which fits the kernel's jiffies."""


class FuseErrno(Exception):
    """An errno that is an answer and no failure: nothing is logged."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, number))
        self.errno = number


class Attributes(NamedTuple):
    """What is told of a node. Node 0 says that the name does not exist."""

    node: int
    mode: int  # with the type bits
    size: int
    mtime_ns: int
    name_valid_s: float  # how long the name leads to this node; the node itself never changes


ABSENT = Attributes(0, 0, 0, 0, FOREVER_S)
ABSENT_NOW = Attributes(0, 0, 0, 0, 0.0)


class Listing(NamedTuple):
    """Consecutive children of a folder, from `position` on, as columns."""

    position: int
    names: Sequence[bytes]
    nodes: Sequence[int]
    modes: Sequence[int]
    sizes: Sequence[int]
    mtimes_ns: Sequence[int]
    name_valid_s: float


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom all entries belong to, and the permission bits that are not shown."""

    uid: int
    gid: int
    umask: int = 0
