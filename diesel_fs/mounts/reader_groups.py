"""Finds out which readers belong together: to which rank of a training a thread belongs, or else to
which program with its workers.

The kernel names the thread whose system call made a request. /proc says the rest: a rank is in the
environment with which the process was started (a worker that was forked has its parent's), and the
workers of a script run the same program as the script, in the same session. A process of another
user, or in another PID namespace, may not be seen. Any thread; a call takes some 0.1 ms.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .waits import UNSEEN, ReaderGroup

RANK_VARIABLES = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")
"""What launchers tell each rank in its environment; the first one that is there counts."""

_RANK_DIGITS_MAX = 7
_ANCESTORS_MAX = 64


MOUNT_GENERATIONS = 3
"""Below the supervisor of a mount are its server and its worker, and below that its helper."""


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    program: str  # the file that it runs; empty for a thread of the kernel
    command: str


def reader_group(thread: int, *, mount_pid: int = 0) -> ReaderGroup | None:
    """The group of the process that a thread belongs to; UNSEEN for one that cannot be seen. None
    for a process that descends from `mount_pid`, as those of the mount itself do: they look up
    what they push, and nobody waits for that.
    """
    process = _process_of(thread)
    if process is None or not process.program:
        return UNSEEN
    if _descends_from(process, mount_pid):
        return None
    rank = _rank_of(process.pid)
    for _ in range(_ANCESTORS_MAX):
        parent = _process_of(process.parent) if process.parent > 1 else None
        if (
            parent is None
            or (parent.program, parent.session) != (process.program, process.session)
            or _rank_of(parent.pid) != rank  # as the launcher of the ranks
        ):
            break
        process = parent
    return ReaderGroup(rank, process.pid, process.command)


def _descends_from(process: _Process, ancestor: int) -> bool:
    """Whether a process is one of a mount, whose supervisor is `ancestor`."""
    for _ in range(MOUNT_GENERATIONS):
        if ancestor in (process.pid, process.parent):
            return True
        parent = _process_of(process.parent) if process.parent > 1 else None
        if parent is None or parent.program != process.program:
            return False
        process = parent
    return False


def _process_of(thread: int) -> _Process | None:
    """The process of a thread; None where it cannot be seen."""
    with suppress(OSError, ValueError, IndexError):
        pid = _process_number(thread)
        before, _, after = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        command = before.partition(b"(")[2].decode("utf-8", "replace")
        fields = after.split()
        program = ""
        with suppress(OSError):  # a thread of the kernel has none, another user's is hidden
            program = os.readlink(f"/proc/{pid}/exe")
        return _Process(pid, int(fields[1]), int(fields[3]), program, command)
    return None


def _process_number(thread: int) -> int:
    """The number of the process that has a thread. Raises OSError, ValueError."""
    for line in Path(f"/proc/{thread}/status").read_bytes().splitlines():
        if line.startswith(b"Tgid:"):
            return int(line[5:])
    raise ValueError(f"/proc/{thread}/status names no process")


def _rank_of(pid: int) -> int | None:
    """The rank that the environment of a process names; None where it names none."""
    with suppress(OSError):
        variables = dict(
            each.split(b"=", 1)
            for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"=" in each
        )
        for name in RANK_VARIABLES:
            text = variables.get(name, b"")
            if text.isdigit() and len(text) <= _RANK_DIGITS_MAX:
                return int(text)
    return None
