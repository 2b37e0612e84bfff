"""Describes the machine of a run: printed above the table, and written beside the rows."""

import os
import platform
import subprocess
import time
from pathlib import Path

import diesel_fs

from .report import Json

_BUSY_PART_MAX = 0.125  # of the processors' time; above it, other programs affect the figures
_LOOK_S = 5.0

_VM_SETTINGS = ("swappiness", "vfs_cache_pressure", "dirty_ratio", "dirty_background_ratio")
"""Settings that decide how long pages and names stay in memory, and when a writer waits for the
disk."""

_DAMON = Path("/sys/kernel/mm/damon/admin/kdamonds")


def machine(folder: Path) -> dict[str, Json]:
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _gib("MemTotal"),
        "memory_available_gib": _gib("MemAvailable"),
        "load": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "disk": _disk(folder),
        "reclaim_of_idle_pages": _idle_reclaim(),
        "vm": {name: _text(f"/proc/sys/vm/{name}") for name in _VM_SETTINGS},
        "python": platform.python_version(),
        "diesel_fs": f"{diesel_fs.__version__} {_revision()}".strip(),
    }


def is_busy() -> bool:
    """Whether other programs use this machine, so that figures mean little. Measures for 5 s: the
    load average would still include programs that ended minutes ago, such as the benchmark before.
    """
    before = _processor_ticks()
    time.sleep(_LOOK_S)
    all_ticks, idle = (now - then for now, then in zip(_processor_ticks(), before, strict=True))
    return all_ticks - idle > _BUSY_PART_MAX * all_ticks


def _processor_ticks() -> tuple[int, int]:
    """The total time of the processors since the start, and their idle time."""
    ticks = [int(word) for word in _text("/proc/stat").splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3]  # a processor that waits for the disk is not idle


def described(state: dict[str, Json]) -> str:
    load, vm = state["load"], state["vm"]
    assert isinstance(load, list)
    assert isinstance(vm, dict)
    return (
        f"{state['cores']} cores ({state['processor']}), {state['memory_gib']} GiB of memory "
        f"({state['memory_available_gib']} available), load {load[0]}, Linux {state['kernel']}, "
        f"disk {state['disk']}, reclaim of idle pages {state['reclaim_of_idle_pages']}, "
        f"{', '.join(f'{name} {value}' for name, value in vm.items())}, "
        f"Python {state['python']}, diesel-fs {state['diesel_fs']}"
    )


def _idle_reclaim() -> str:
    """Whether the kernel reclaims idle pages even when memory is free, for example `on (DAMON
    pageout)`. Then a pause between loading and reading affects the figures."""
    found = []
    if _text("/sys/module/damon_reclaim/parameters/enabled") == "Y":
        found.append("damon_reclaim")
    for monitor in sorted(_DAMON.glob("[0-9]*")):
        if _text(str(monitor / "state")) == "on":
            actions = (
                _text(str(each)) for each in monitor.glob("contexts/*/schemes/[0-9]*/action")
            )
            found += [f"DAMON {action}" for action in actions if action in ("pageout", "cold")]
    return f"on ({', '.join(found)})" if found else "off"


def _disk(folder: Path) -> str:
    """File system, device and its kind: `ext4 on vda (solid state)`."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = source = "unknown"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            kind, source = rest.split()[:2]
    kinds = {"1": " (reported as turning, as virtual disks are)", "0": " (solid state)"}
    block = Path("/sys/dev/block") / number
    for queue in (block / "queue", block / ".." / "queue"):  # of a partition: its disk's
        if rotational := _text(str(queue / "rotational")):
            return f"{kind} on {source}{kinds[rotational]}"
    return f"{kind} on {source}"


def _gib(key: str) -> float:
    return round(int(_first("/proc/meminfo", key).split()[0]) / 2**20, 1)


def _first(file: str, key: str) -> str:
    named = (line.partition(":") for line in _text(file).splitlines())
    return next((value.strip() for name, _, value in named if name.strip() == key), "")


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, check=False, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()
