"""Measures the peak memory of programs by a control group: all memory that is charged to them.

That is their own memory, the page cache that they filled, and the kernel's memory for them. Both
versions of control groups work, if this user (mostly root) may make a group.
"""

import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
REMOVAL_S = 5.0  # the last process may end a moment after

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folder: Path
    peak_file: Path

    @property
    def prefix(self) -> list[str]:
        """Words before a command, so that it and its children run in the group."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, str(self.folder)]

    def peak_bytes(self) -> int:
        """The greatest memory that was charged at any time."""
        return int(self.peak_file.read_text())

    def add(self, pid: int) -> None:
        """Move a process into the group. Its present memory stays charged to its old group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def kernel_bytes(self) -> int:
        """The memory of the kernel that is charged now: its objects, and buffers of sockets."""
        first = self.folder / "memory.kmem.usage_in_bytes"
        if first.exists():  # version 1
            buffers = self.folder / "memory.kmem.tcp.usage_in_bytes"
            return int(first.read_text()) + int(buffers.read_text())
        lines = (self.folder / "memory.stat").read_text(encoding="ascii").splitlines()
        sums = {name: int(value) for name, value in map(str.split, lines)}
        return sums["kernel"] + sums["sock"]


@contextmanager
def control_group() -> Iterator[ControlGroup | None]:
    """A new group, which is removed at the end; None if this user cannot make one."""
    found = next(filter(None, map(_made, _candidates())), None)
    try:
        yield found
    finally:
        if found is not None:
            _remove(found.folder)


def _candidates() -> Iterator[tuple[Path, str]]:
    """Folders in which a group may be made, and the file of its peak: version 1, then version 2."""
    try:
        listed = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return
    for own in re.findall(r"^\d+:(?:\S+,)?memory(?:,\S+)?:/(.*)$", listed, re.MULTILINE):
        yield MOUNTED / "memory" / own, "memory.max_usage_in_bytes"
        yield MOUNTED / "memory", "memory.max_usage_in_bytes"
    for own in re.findall(r"^0::/(.*)$", listed, re.MULTILINE):
        yield MOUNTED / own, "memory.peak"
        yield MOUNTED, "memory.peak"


def _made(candidate: tuple[Path, str]) -> ControlGroup | None:
    """A new group in a folder; None if this user cannot make one there."""
    parent, name = candidate
    folder = parent / f"diesel-bench-{os.getpid()}-{next(_numbers)}"
    try:
        folder.mkdir()
    except OSError:
        return None
    if (folder / name).exists() and os.access(folder / "cgroup.procs", os.W_OK):
        return ControlGroup(folder, folder / name)
    with suppress(OSError):
        folder.rmdir()
    return None


def _remove(folder: Path) -> None:
    end_s = time.monotonic() + REMOVAL_S
    while folder.exists() and time.monotonic() < end_s:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)
