"""A mount that follows its dataset for long uses no more resources than at its beginning."""

import os
import signal
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.system.unix_sockets import connect_unix
from tests.mounts.observed import Processes, mounted, mounts_below, noise
from tests.mounts.versions.followed_dataset import FILES, FollowedMount, begin
from tests.waiting import wait_until

pytestmark = [pytest.mark.deep, pytest.mark.fuse]

FIRST_SWITCHES, SWITCHES = 5, 50
MEMORY_BYTES = 8 << 20
CHANGED_BYTES = 1 << 20
"""New bytes in each version: after the first switches the master's memory is full."""

SETTLED_S = 60.0
"""How long figures may take to fall: idle threads end after ten seconds."""


class Figures(NamedTuple):
    descriptors: int
    threads: int
    mappings: int
    anonymous_kib: int

    @classmethod
    def of(cls, pid: int) -> "Figures":
        here = Path(f"/proc/{pid}")
        rollup = (here / "smaps_rollup").read_text().splitlines()
        [anonymous] = [line.split()[1] for line in rollup if line.startswith("Anonymous:")]
        return cls(
            len(os.listdir(here / "fd")),
            len(os.listdir(here / "task")),
            len((here / "maps").read_text().splitlines()),
            int(anonymous),
        )

    def has_grown(self, before: "Figures") -> bool:
        """Whether a figure has grown by more than `ROOM`, which comes and goes. A leak in each
        switch would add 45 of its kind, and 45 MiB of memory for contents."""
        most = Figures(*map(sum, zip(before, ROOM, strict=True)))
        return any(now > limit for now, limit in zip(self, most, strict=True))


ROOM = Figures(10, 10, 30, 16 << 10)


def master_of(runtime: Path) -> int:
    [place] = runtime.glob("diesel/tasks/*/0/socket")
    with socket.socket(socket.AF_UNIX) as link:
        connect_unix(link, str(place))
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test. The master that is left in it is killed."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for _ in folder.glob("diesel/tasks/*/0/socket"):
        os.kill(master_of(folder), signal.SIGKILL)


def processes_of(followed: FollowedMount, runtime: Path) -> dict[str, int]:
    found = Processes.of(followed.at)._asdict()
    return {**found, "master": master_of(runtime)} if followed.request.task_options else found


def switch(followed: FollowedMount, number: int) -> None:
    changed = noise(number, CHANGED_BYTES)
    followed.change({"changed": changed})
    for path, content in {**FILES, "changed": changed}.items():
        assert (followed.at / path).read_bytes() == content


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("", id="alone"),
        pytest.param("training", id="task", marks=pytest.mark.only_session("native")),
    ],
)
def test_no_process_of_a_mount_grows_between_five_and_fifty_switches(
    tmp_path: Path, runtime: Path, session: str, task: str
) -> None:
    followed = begin(tmp_path, session)
    options = TaskOptions(task=task, rank=0, world=1) if task else TaskOptions()
    followed.request = replace(followed.request, task_options=options, memory_bytes=MEMORY_BYTES)
    with mounted(followed.request):
        for number in range(FIRST_SWITCHES):
            switch(followed, number)
        processes = processes_of(followed, runtime)
        before = {name: Figures.of(pid) for name, pid in processes.items()}
        for number in range(FIRST_SWITCHES, SWITCHES):
            switch(followed, number)
        assert processes_of(followed, runtime) == processes, "a process was started again"

        def grown() -> dict[str, tuple[Figures, Figures]]:
            now = {name: Figures.of(pid) for name, pid in processes.items()}
            return {
                name: (before[name], now[name]) for name in now if now[name].has_grown(before[name])
            }

        followed.wait_for_retirement()
        assert len(mounts_below(followed.at)) == 1 + followed.is_native
        wait_until(lambda: not grown(), SETTLED_S, lambda: f"these have grown: {grown()}")
