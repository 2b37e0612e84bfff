"""`dlcmd mount --evict lrfu`: what real mounts of several datasets leave in one `--cache-dir`."""

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from diesel_fs.cache.disk import IDLE_S
from diesel_fs.errors import DieselError
from diesel_fs.mounts import umount
from diesel_fs.mounts.mountpoint import mounted_at
from tests.trees import write
from tests.waiting import wait_until

from .conftest import Dlcmd, is_running

pytestmark = pytest.mark.fuse

FILE_BYTES = 9_000
FILES = {"weekly": 300, "daily": 300, "new": 150}
"""The datasets, and how many files each has."""
LIMIT = "4M"
"""There is room for `daily`, which has 2 MB, for most of `weekly`, and not for `new` as well."""


def files_of(name: str) -> dict[str, bytes]:
    return {f"{number}": (b"%s %d " % (name.encode(), number)) * (FILE_BYTES // 12)
            for number in range(FILES[name])}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A mount, and the process of its master, which keeps the chunks."""

    name: str
    at: Path
    master: int


class Machine:
    """Mounts datasets with one cache folder."""

    def __init__(self, dlcmd: Dlcmd, folder: Path) -> None:
        self._dlcmd, self._folder = dlcmd, folder
        self.cache = folder / "cache"
        self.folders: dict[str, Path] = {}  # of datasets, in the cache
        for name in FILES:
            source = write(folder / name, files_of(name))
            dlcmd("put", "--compress", "none", "--chunk-size", "256K", source, name)

    def chunks(self, name: str) -> set[str]:
        here = self.folders.get(name)
        return {each.name for each in here.iterdir() if len(each.name) == 32} if here else set()

    def begin(self, name: str) -> Job:
        sockets = self._sockets()
        at = self._folder / f"{name}.mount"
        before = {*self.cache.glob("*/*/")}
        self._dlcmd(
            "mount", "--memory", "8M", "--cache-dir", self.cache, "--cache-size", LIMIT,
            "--policy", "oneshot", "--evict", "lrfu", name, at,
        )  # fmt: skip
        if name not in self.folders:  # which the job has registered in
            [self.folders[name]] = {*self.cache.glob("*/*/")} - before
        [opened] = self._sockets() - sockets
        return Job(name, at, _process_of(opened))

    def end(self, job: Job) -> None:
        """Read all, and unmount; the master then writes what it has in memory, and ends."""
        for path, content in files_of(job.name).items():
            assert (job.at / path).read_bytes() == content
        self._dlcmd("umount", job.at)
        with suppress(ProcessLookupError):
            os.kill(job.master, signal.SIGTERM)
        wait_until(lambda: not is_running(job.master))

    def seem_unused(self, name: str, hours: int) -> None:
        """As if nobody had used a dataset for some hours."""
        long_ago = time.time() - hours * 3600
        assert time.time() - long_ago > IDLE_S
        for each in self.folders[name].iterdir():
            os.utime(each, (long_ago, long_ago))

    def close(self) -> None:
        for name in FILES:
            at = str(self._folder / f"{name}.mount")
            while mounted_at(at) is not None:
                with suppress(DieselError):
                    umount(Path(at), force=True)
        for opened in self._sockets():
            with suppress(OSError):
                os.kill(_process_of(opened), signal.SIGKILL)

    def _sockets(self) -> set[Path]:
        return {*(self._folder / "run").glob("diesel/tasks/*/0/socket")}


def _process_of(opened: Path) -> int:
    """The process that listens at a socket."""
    with socket.socket(socket.AF_UNIX) as link:
        here = os.open(opened.parent, os.O_PATH)  # a short path
        try:
            link.connect(f"/proc/self/fd/{here}/socket")
        finally:
            os.close(here)
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


@pytest.fixture
def machine(dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    made = Machine(dlcmd, tmp_path)
    yield made
    made.close()


@pytest.mark.deep
def test_datasets_in_use_stay_and_then_the_least_used_goes_first(machine: Machine) -> None:
    machine.end(machine.begin("daily"))
    daily = machine.chunks("daily")
    assert len(daily) > 6

    job = machine.begin("daily")
    machine.seem_unused("daily", 4)
    machine.end(machine.begin("weekly"))
    weekly = machine.chunks("weekly")
    assert machine.chunks("daily") == daily, "a job uses them"
    assert weekly, "the rest of the folder"
    machine.end(job)

    machine.seem_unused("daily", 4)
    machine.seem_unused("weekly", 1)  # by LRU it would stay
    machine.end(machine.begin("new"))
    assert len(machine.chunks("new")) > 3
    assert machine.chunks("daily") == daily, "two jobs have used them, and one the others"
    assert machine.chunks("weekly") < weekly
