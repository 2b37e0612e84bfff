"""How much memory this process may use: the machine's, or that of its control group (by which Linux
limits a container) if that is less. Any thread."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMORY_DIVISOR = 2
"""The default memory of a cache is the available memory divided by this."""

MEMORY_BYTES_MIN = 64 << 20
"""Some chunks of the default size fit in."""

CGROUPS = Path("/sys/fs/cgroup")


def default_memory_bytes() -> int:
    return max(available_memory_bytes() // MEMORY_DIVISOR, MEMORY_BYTES_MIN)


def available_memory_bytes() -> int:
    return min(_free_bytes(), _own_cgroup_limit_bytes())


def memory_limit_bytes() -> int:
    return min(_machine_bytes(), _own_cgroup_limit_bytes())


def _own_cgroup_limit_bytes() -> int:
    listed = ""
    with suppress(OSError):
        listed = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
    return cgroup_limit_bytes(CGROUPS, listed)


def _free_bytes() -> int:
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _machine_bytes()


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit_bytes(mounted: Path, listed: str) -> int:
    """The smallest limit of the control groups (v2 or v1) in `listed`, the text of
    /proc/self/cgroup, and of the groups above them; all groups are below `mounted`.

    In a container the listed path may be the host's, which is missing here; then the container's
    own limit is in the top folder.
    """
    limits = [1 << 62]  # no limit
    for group in re.findall(r"^0::/(.*)$", listed, re.MULTILINE):
        limits += _limits(mounted, group, "memory.max")
    for group in re.findall(r"^\d+:(?:\S+,)?memory(?:,\S+)?:/(.*)$", listed, re.MULTILINE):
        limits += _limits(mounted / "memory", group, "memory.limit_in_bytes")
    return min(limits)


def _limits(top: Path, group: str, name: str) -> Iterator[int]:
    for folder in (top / group, *(top / group).parents):
        if folder.is_relative_to(top):
            with suppress(OSError, ValueError):  # the file says "max", or is missing
                yield int((folder / name).read_text())
