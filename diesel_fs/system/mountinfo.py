"""Reads from `/proc/*/mountinfo` which file systems are mounted where.

No function here touches a mount: one whose server hangs would never answer. Any thread.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(rb"\\([0-7]{3})")
_NETWORK = frozenset(
    "9p afs beegfs ceph cifs coda davfs fuseblk glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2"
    " orangefs panfs pvfs2 smb2 smb3 smbfs vboxsf virtiofs vmhgfs wekafs".split()
)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of mountinfo. `options` are those of the file system, not of this mount of it."""

    mount_id: int
    device: str
    path: str
    kind: str
    source: str
    options: frozenset[str]


def mounts(process: str = "self") -> Iterator[MountEntry]:
    """All mounts that a process sees, in the order of mounting. Raises OSError."""
    return parse_mounts(Path(f"/proc/{process}/mountinfo").read_bytes())


def parse_mounts(table: bytes) -> Iterator[MountEntry]:
    """The lines of the text of a mountinfo file, in its order."""
    for line in filter(None, table.split(b"\n")):  # a name may hold a carriage return, unescaped
        before, _, after = line.partition(b" - ")
        mount_id, _, device, _, path, *_ = before.split(b" ")
        kind, source, options, *_ = after.split(b" ")
        yield MountEntry(
            int(mount_id),
            device.decode(),
            _unescaped(path),
            _unescaped(kind),
            _unescaped(source),
            frozenset(_unescaped(options).split(",")),
        )


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The kind of the file system that holds a path, and its mount options."""

    kind: str
    options: frozenset[str]

    @property
    def is_network(self) -> bool:
        """Whether another host may have it mounted, too. True for FUSE, which can be anything."""
        return self.kind in _NETWORK or self.kind == "fuse" or self.kind.startswith("fuse.")


def file_system_of(path: Path, table: bytes | None = None) -> FileSystem:
    """The file system that holds `path`, which need not exist. `table` is the text of a mountinfo
    file (None: of this process)."""
    here = os.path.realpath(path)
    found, longest = FileSystem("", frozenset()), -1
    for each in mounts() if table is None else parse_mounts(table):
        inside = here == each.path or here.startswith(each.path.rstrip("/") + "/")
        if inside and len(each.path) >= longest:  # the later one hides the other
            longest = len(each.path)
            found = FileSystem(each.kind, each.options)
    return found


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), field))
