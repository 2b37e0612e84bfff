"""Groups the processes that read a mount: by rank of a training job, or by program.

The kernel names the thread that made a request. /proc gives the rest: the rank is in the
environment with which the process was started (a forked worker has its parent's), and the workers
of a script run the same program, in the same session.

Concurrency: `group_of` runs in the server's thread, so it reads only files of /proc that the kernel
serves without a lock of the process. The environment is read under the lock of the process's
memory, which a thread that waits for a page of the mount may hold; so another thread reads it.
`reader_group` may wait; any thread may call it.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from .waits import UNSEEN, ReaderGroup

RANK_VARIABLES = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")
"""Launchers pass the rank to a process in these; the first one that is set counts."""

MOUNT_GENERATIONS = 3
"""A mount's own processes: the supervisor, its children (server and worker), their helpers."""

_RANK_DIGITS_MAX = 7
_ANCESTORS_MAX = 64
_KNOWN_MAX = 4096  # processes; when it is reached, all are forgotten


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    started: int  # in clock ticks; an earlier process with the same ID started at another time
    program: str  # the file that it runs; empty for a thread of the kernel
    command: str


class ReaderProcesses:
    def __init__(self, mount_pid: int) -> None:
        """`mount_pid` is the process ID of the mount's supervisor."""
        self._mount_pid = mount_pid
        self.on_found: Callable[[ReaderGroup, ReaderGroup], None] = lambda _, __: None
        """Called in another thread, with a group that `group_of` returned and the group that it
        turned out to belong to."""
        self._known: dict[_Process, ReaderGroup] = {}
        self._asked: SimpleQueue[_Process] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def group_of(self, thread: int) -> ReaderGroup | None:
        """The group of the process that a thread belongs to, or of that process alone while its
        group is not known. Takes some 0.1 ms.

        Returns UNSEEN if the process is invisible (another user's, or in another PID namespace),
        and None for the mount's own processes: they look up the files that they push, and no reader
        waits for that.
        """
        process = _process_of(thread)
        if process is None or not process.program:
            return UNSEEN
        if _descends_from(process, self._mount_pid):
            return None
        known = self._known.get(process)
        if known is not None:
            return known
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        alone = self._known[process] = ReaderGroup(None, process.pid, process.command)
        self._asked.put(process)
        if self._thread is None:
            finder = threading.Thread(target=self._find_always, name="readers", daemon=True)
            with suppress(RuntimeError):  # no thread can be had now; the next process tries again
                finder.start()
                self._thread = finder
        return alone

    def _find_always(self) -> None:
        while True:
            process = self._asked.get()
            group = _group_of(process)
            self._known[process] = group
            alone = ReaderGroup(None, process.pid, process.command)
            if group.key != alone.key:
                self.on_found(alone, group)


def reader_group(pid: int) -> ReaderGroup:
    """UNSEEN if the process is invisible. May wait."""
    process = _process_of(pid)
    return UNSEEN if process is None else _group_of(process)


def _group_of(process: _Process) -> ReaderGroup:
    rank = _rank_of(process.pid)
    for _ in range(_ANCESTORS_MAX):
        parent = _process_of(process.parent) if process.parent > 1 else None
        if (
            parent is None
            or (parent.program, parent.session) != (process.program, process.session)
            or _rank_of(parent.pid) != rank  # for example, the launcher of the ranks
        ):
            break
        process = parent
    return ReaderGroup(rank, process.pid, process.command)


def _descends_from(process: _Process, ancestor: int) -> bool:
    """Whether a process belongs to the mount with the supervisor `ancestor`."""
    for _ in range(MOUNT_GENERATIONS):
        if ancestor in (process.pid, process.parent):
            return True
        parent = _process_of(process.parent) if process.parent > 1 else None
        if parent is None or parent.program != process.program:
            return False
        process = parent
    return False


def _process_of(thread: int) -> _Process | None:
    """None if it is invisible."""
    with suppress(OSError, ValueError, IndexError):
        pid = _process_number(thread)
        before, _, after = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        command = before.partition(b"(")[2].decode("utf-8", "replace")
        fields = after.split()
        program = ""
        with suppress(OSError):  # a thread of the kernel has none, another user's is hidden
            program = os.readlink(f"/proc/{pid}/exe")
        return _Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), program, command)
    return None


def _process_number(thread: int) -> int:
    """Raises OSError, ValueError."""
    for line in Path(f"/proc/{thread}/status").read_bytes().splitlines():
        if line.startswith(b"Tgid:"):
            return int(line[5:])
    raise ValueError(f"/proc/{thread}/status names no process")


def _rank_of(pid: int) -> int | None:
    """None if there is none, or the environment is hidden. May wait."""
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
