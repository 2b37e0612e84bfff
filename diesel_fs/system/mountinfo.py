"""Reads the mounted file systems from `/proc/*/mountinfo`. No function touches a mount: if its
server hangs, the call would never return. Any thread.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(rb"\\([0-7]{3})")
_NETWORK = frozenset(
    "9p afs beegfs ceph cifs coda davfs fuseblk glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2"
    " orangefs panfs pvfs2 smb2 smb3 smbfs vboxsf virtiofs vmhgfs wekafs".split()
)


@dataclass(frozen=True, slots=True)
class MountEntry:
    mount_id: int
    parent_id: int  # of the mount that holds its mount point
    device: str  # its number, such as "0:43"
    path: str
    kind: str
    source: str
    options: frozenset[str]  # of the file system, not of this mount of it


def mounts(process: str = "self") -> Iterator[MountEntry]:
    return parse_mounts(Path(f"/proc/{process}/mountinfo").read_bytes())


def topmost_at(path: str, entries: Iterable[MountEntry]) -> MountEntry | None:
    """The mount at exactly this path that hides the others there, or None.

    The order in mountinfo does not show it: since Linux 6.8 it is that of their making, and a
    mount that is moved beneath another was made later.
    """
    there = [each for each in entries if each.path == path]
    hidden = {each.parent_id for each in there}
    return next((each for each in reversed(there) if each.mount_id not in hidden), None)


def parse_mounts(table: bytes) -> Iterator[MountEntry]:
    for line in filter(None, table.split(b"\n")):  # a name may hold a carriage return, unescaped
        before, _, after = line.partition(b" - ")
        mount_id, parent_id, device, _, path, *_ = before.split(b" ")
        kind, source, options, *_ = after.split(b" ")
        yield MountEntry(
            int(mount_id),
            int(parent_id),
            device.decode(),
            _unescaped(path),
            _unescaped(kind),
            _unescaped(source),
            frozenset(_unescaped(options).split(",")),
        )


@dataclass(frozen=True, slots=True)
class FileSystem:
    """For example the kind `nfs4` or `fuse.dlcmd`; empty if unknown."""

    kind: str
    options: frozenset[str]

    @property
    def is_network(self) -> bool:
        """Whether other hosts may have mounted it, too. True for FUSE, whose server can get its
        files from anywhere."""
        return self.kind in _NETWORK or self.kind == "fuse" or self.kind.startswith("fuse.")


def file_system_of(path: Path, table: bytes | None = None) -> FileSystem:
    """`path` may be missing. `table` is the text of a mountinfo file (None: this process's)."""
    real = os.path.realpath(path)
    entries = [*(mounts() if table is None else parse_mounts(table))]
    around = [
        each.path
        for each in entries
        if real == each.path or real.startswith(each.path.rstrip("/") + "/")
    ]
    found = topmost_at(max(around, key=len, default=""), entries)
    return FileSystem("", frozenset()) if found is None else FileSystem(found.kind, found.options)


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), field))
