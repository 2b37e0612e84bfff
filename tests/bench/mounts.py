"""Mounts: whether something is mounted, asked of the kernel's table (which also knows mounts that
died), and what a mount of ours says of itself."""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from .memory import members, pss_bytes

STILL_S = 1.1  # the statistics of a mount stand still for a second
HELPER_END_S = 5.0


def is_mounted(folder: Path) -> bool:
    """Whether there is a mount at `folder`."""
    return kind_of(folder) != ""


def kind_of(folder: Path) -> str:
    """The type of the file system that is mounted at `folder`; empty where there is none."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        if point == str(folder):
            return kind
    return ""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a mount of ours has been asked since its start: `reads` of the dataset's files alone."""

    reads: int
    opens: int
    attributes: int
    supervisor: int  # processes
    server: int
    resident_bytes: int

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What came since then."""
        return Counts(
            self.reads - earlier.reads,
            self.opens - earlier.opens,
            self.attributes - earlier.attributes,
            self.supervisor,
            self.server,
            self.resident_bytes,
        )

    @property
    def requests(self) -> int:
        """READs, OPENs and GETATTRs."""
        return self.reads + self.opens + self.attributes


@dataclass(slots=True)
class Mount:
    """A mount of ours: how long the command that made it took, and when (`time.monotonic()`) it
    returned."""

    path: Path
    seconds: float
    ready_s: float
    _looked_s: float = field(default=0.0, init=False)

    def counts(self) -> Counts:
        """As of now. The first look at a mount waits for nothing, a next one soon after it does:
        so look before what is measured and after it, and read at once after the first look.
        """
        time.sleep(max(0.0, self._looked_s + STILL_S - time.monotonic()))
        said = json.loads((self.path / ".diesel" / "stats").read_bytes())
        self._looked_s = time.monotonic()
        requests, reads = said["requests"], said["reads"]
        return Counts(
            reads["hits"] + reads["misses"],
            requests.get("open", 0),
            requests.get("getattr", 0),
            said["pid"],
            said["server_pid"],
            said.get("residency", {}).get("resident_bytes", 0),
        )

    def stop_pushing(self) -> None:
        """Kill the helper, which is idle yet: the mount goes on, and answers every READ itself."""
        counts = self.counts()
        children = Path(f"/proc/{counts.supervisor}/task/{counts.supervisor}/children")
        helpers = [int(pid) for pid in children.read_text().split() if int(pid) != counts.server]
        assert len(helpers) == 1, f"no helper among the processes of the mount: {helpers}"
        os.kill(helpers[0], signal.SIGKILL)
        end_s = time.monotonic() + HELPER_END_S
        while str(helpers[0]) in children.read_text().split():
            assert time.monotonic() < end_s, "the helper did not end"
            time.sleep(0.01)

    def pss_bytes(self, supervisor: int) -> int:
        """The memory of all processes of the mount, the page cache left out."""
        return sum(map(pss_bytes, members(os.getsid(supervisor))))
