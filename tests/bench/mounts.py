"""Detects mount points by the kernel's table, which includes mounts of dead processes, and reads
the counters of our mounts.
"""

import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from .memory import members

STILL_S = 1.1  # the statistics of a mount are renewed once a second
HELPER_END_S = 5.0
LOADED_S = 120.0
LOADED_INTERVAL_S = 0.2


def is_mounted(folder: Path) -> bool:
    return kind_of(folder) != ""


def kind_of(folder: Path) -> str:
    """The type of the file system that is mounted at `folder`; empty if there is none."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        if point == str(folder):
            return kind
    return ""


@dataclass(frozen=True, slots=True)
class Counts:
    """The requests to a mount of ours since its start: `reads` are those of the dataset's files
    only, `requests` are READs, OPENs and GETATTRs, and `all` are those of every kind, those for
    `.diesel` too."""

    reads: int
    requests: int
    all: int
    supervisor: int  # processes
    server: int


@dataclass(slots=True)
class Mount:
    """A mount of ours, the seconds that the command took, and the time of its return
    (`time.monotonic()`)."""

    path: Path
    seconds: float = 0.0
    ready_s: float = 0.0
    _looked_s: float = field(default=0.0, init=False)

    def counts(self) -> Counts:
        """The present counters. The first call does not wait; a second one soon after it waits for
        new statistics. So call it before and after the measured work, and begin the work right
        after the first call."""
        time.sleep(max(0.0, self._looked_s + STILL_S - time.monotonic()))
        stats = json.loads(self._stats())
        self._looked_s = time.monotonic()
        requests, reads = stats["requests"], sum(map(stats["reads"].get, ("hits", "misses")))
        counted = reads + requests.get("open", 0) + requests.get("getattr", 0)
        return Counts(reads, counted, sum(requests.values()), stats["pid"], stats["server_pid"])

    def wait_until_loaded(self) -> None:
        """Wait until all files have been pushed (`--policy oneshot`)."""
        end_s = time.monotonic() + LOADED_S
        while True:
            loaded = json.loads(self._stats())["residency"]
            if 0 < loaded.get("oneshot_chunks", 0) == loaded["oneshot_done_chunks"]:
                return
            assert time.monotonic() < end_s, f"not everything was pushed: {loaded}"
            time.sleep(LOADED_INTERVAL_S)

    def processor_s(self, supervisor: int) -> float:
        """The processor time of all processes of the mount since their starts."""
        return sum(map(processor_s, members(os.getsid(supervisor))))

    def stop_pushing(self) -> None:
        """Kill the process that loads the page cache, while it is idle; the mount then answers
        every READ."""
        counts = self.counts()
        children = Path(f"/proc/{counts.supervisor}/task/{counts.supervisor}/children")
        helpers = [int(pid) for pid in children.read_text().split() if int(pid) != counts.server]
        assert len(helpers) == 1, f"no helper among the processes of the mount: {helpers}"
        os.kill(helpers[0], signal.SIGKILL)
        end_s = time.monotonic() + HELPER_END_S
        while str(helpers[0]) in children.read_text().split():
            assert time.monotonic() < end_s, "the helper did not end"
            time.sleep(0.01)

    def _stats(self) -> bytes:
        return (self.path / ".diesel" / "stats").read_bytes()


def processor_s(pid: int) -> float:
    """The processor time of a process by its own clock: /proc counts in hundredths of seconds."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0.0  # it has ended
    return time.clock_gettime(clock.value)
