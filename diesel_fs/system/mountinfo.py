"""What is mounted where, as the kernel tells it: the lines of `/proc/*/mountinfo`.

Owned here: their format. Not owned: what a mount is good for (`mounts/mountpoint.py`,
`storage/metadata/sqlite/host_lease.py`). No mount is touched: one that hangs would never answer.
Any thread.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A line of mountinfo. `options` are those of the file system, not of this mount of it."""

    mount_id: int
    device: str
    path: str
    kind: str
    source: str
    options: frozenset[str]


def mounts(process: str = "self") -> Iterator[MountEntry]:
    """What a process sees mounted, in the order of mounting. Raises OSError."""
    return parse_mounts(Path(f"/proc/{process}/mountinfo").read_bytes())


def parse_mounts(table: bytes) -> Iterator[MountEntry]:
    """The lines of a table, in its order."""
    for line in filter(None, table.split(b"\n")):  # names may have a return in them, as it is
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


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), field))
