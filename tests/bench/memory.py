"""Measures the peak memory of a program and its children, as PSS, which counts shared pages once.

The program runs in a session of its own, and all processes of that session are counted. The memory
is sampled, so a peak shorter than the interval may be missed.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 0.05
SHORT_INTERVAL_S = 0.002  # for a command of less than a second
BLOCK_BYTES = 512  # of `ru_oublock`
_PROC = Path("/proc")


def peak_pss_bytes(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command, and return the greatest sum of PSS over its processes. Raises
    CalledProcessError."""
    peak = 0
    with subprocess.Popen(command, env=environment, start_new_session=True) as leader:
        while leader.poll() is None:
            peak = max(peak, sum(map(pss_bytes, members(leader.pid))))
            time.sleep(INTERVAL_S)
    if leader.returncode:
        raise subprocess.CalledProcessError(leader.returncode, command)
    return peak


class Usage(NamedTuple):
    """Of one process, in bytes: its greatest anonymous memory, and what it wrote to disks."""

    anonymous: int
    written: int


def usage_of(command: Sequence[str], environment: Mapping[str, str]) -> Usage:
    """Run a command. Raises CalledProcessError."""
    peak = 0
    process = subprocess.Popen(command, env=environment)
    while True:
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        peak = max(peak, _anonymous_bytes(process.pid))
        time.sleep(SHORT_INTERVAL_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(peak, used.ru_oublock * BLOCK_BYTES)


def _anonymous_bytes(pid: int) -> int:
    """0 if the process has ended."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = (line.split()[1] for line in lines.splitlines() if line.startswith("RssAnon:"))
    return int(next(found, "0")) * 1024


def members(session: int) -> list[int]:
    return [pid for pid in map(_number, _PROC.iterdir()) if pid and _session(pid) == session]


def pss_bytes(pid: int) -> int:
    """The PSS of a process; 0 if it has ended."""
    return rollup_bytes(str(pid)).get("Pss", 0)


def rollup_bytes(process: str) -> dict[str, int]:
    """The kernel's sums over all mappings of a process (a number, or `self`), in bytes."""
    try:
        lines = (_PROC / process / "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def available_bytes() -> int:
    """The memory that programs can still take without swapping."""
    lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _number(entry: Path) -> int:
    """The process ID of an entry of /proc; 0 if it is not a process."""
    return int(entry.name) if entry.name.isdigit() else 0


def _session(pid: int) -> int:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[3])  # the name before may hold anything
