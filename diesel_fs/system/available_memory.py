"""How much memory a program of ours may take by itself, where nobody says.

Owned here: what the machine has free, and what control groups allow. Any thread.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMORY_DIVISOR = 2
"""One part in this many of what is available."""

MEMORY_BYTES_MIN = 64 << 20

CGROUPS = Path("/sys/fs/cgroup")


def default_memory_bytes() -> int:
    """What a program may take."""
    return max(_available_bytes() // MEMORY_DIVISOR, MEMORY_BYTES_MIN)


def memory_limit_bytes() -> int:
    """What programs may use in all: the machine's memory, or less where a control group says so."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _own_cgroup_limit_bytes())


def _available_bytes() -> int:
    """Memory that this process may still have without swapping or being killed."""
    return min(_free_bytes(), _own_cgroup_limit_bytes())


def _own_cgroup_limit_bytes() -> int:
    listed = ""
    with suppress(OSError):
        listed = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
    return _cgroup_limit_bytes(CGROUPS, listed)


def _free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit_bytes(mounted: Path, listed: str) -> int:
    """The least limit of the control groups that /proc/self/cgroup lists, v2 or v1, and theirs.

    In a container the listed path may be the host's: what it does not have here says nothing, and
    the container's own limit stands at the top.
    """
    limits = [1 << 62]
    for group in re.findall(r"^0::/(.*)$", listed, re.MULTILINE):
        limits += _limits(mounted, group, "memory.max")
    for group in re.findall(r"^\d+:(?:\S+,)?memory(?:,\S+)?:/(.*)$", listed, re.MULTILINE):
        limits += _limits(mounted / "memory", group, "memory.limit_in_bytes")
    return min(limits)


def _limits(top: Path, group: str, name: str) -> Iterator[int]:
    for folder in (top / group, *(top / group).parents):
        if folder.is_relative_to(top):
            with suppress(OSError, ValueError):  # "max", or none here
                yield int((folder / name).read_text())
