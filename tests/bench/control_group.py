"""A control group of the bench's own, which counts all memory that is charged to its processes:
their own, the page cache that they filled, and what the kernel keeps for them.

Either version of control groups serves, where this user may make a group (root mostly).
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
REMOVAL_S = 5.0  # its last process ends a moment after the mount

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group, and the file that knows its peak."""

    folder: Path
    peak_file: Path

    @property
    def prefix(self) -> list[str]:
        """What comes before a command so that it runs in the group, and all that it starts."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, str(self.folder)]

    def peak_bytes(self) -> int:
        """The most that has been charged at any time."""
        return int(self.peak_file.read_text())


@contextmanager
def control_group() -> Iterator[ControlGroup | None]:
    """A group until the end; None where there cannot be one."""
    found = next(filter(None, map(_made, _places())), None)
    try:
        yield found
    finally:
        if found is not None:
            _remove(found.folder)


def _places() -> Iterator[tuple[Path, str]]:
    """Where a group could be, and how its peak is called there: of version 1, of version 2."""
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


def _made(place: tuple[Path, str]) -> ControlGroup | None:
    parent, name = place
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
