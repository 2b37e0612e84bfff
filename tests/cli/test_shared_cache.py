"""`dlcmd mount --evict lrfu`: the chunks that mounts of several datasets leave in one
`--cache-dir`.
"""

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs.cache.disk.rule import COOL_DOWN_S
from diesel_fs.errors import DieselError
from diesel_fs.mounts import umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from tests.processes import is_running
from tests.trees import write
from tests.waiting import wait_until

from .conftest import Dlcmd

FILES = {"weekly": 300, "daily": 300, "new": 150}
"""The datasets, and how many files each has."""
LIMIT = "4M"
"""There is room for `daily`, which has 2 MB, for most of `weekly`, and not for `new` as well."""


class Machine:
    def __init__(self, dlcmd: Dlcmd, folder: Path) -> None:
        self._dlcmd, self._folder = dlcmd, folder
        self._cache = folder / "cache"
        self._masters: dict[str, int] = {}  # the masters keep the chunks
        self.folders: dict[str, Path] = {}  # of datasets in the cache
        for name, count in FILES.items():
            files = {f"{n}": b"%s %d " % (name.encode(), n) * 750 for n in range(count)}
            source = write(folder / name, files)
            dlcmd("put", "--compress", "none", "--chunk-size", "256K", source, name)

    def chunks(self, name: str) -> set[str]:
        return {each.name for each in self.folders[name].iterdir() if len(each.name) == 32}

    def begin(self, name: str, *options: str) -> None:
        sockets, before = self._sockets(), {*self._cache.glob("*/*/")}
        at = self._folder / f"{name}.mount"
        self._dlcmd(
            "mount", "--memory", "8M", "--cache-dir", self._cache, "--cache-size", LIMIT,
            "--policy", "oneshot", "--evict", "lrfu", *options, name, at,
        )  # fmt: skip
        if name not in self.folders:  # the job has registered in it
            [self.folders[name]] = {*self._cache.glob("*/*/")} - before
        [opened] = self._sockets() - sockets
        self._masters[name] = _process_of(opened)
        for source in (self._folder / name).iterdir():
            assert (at / source.name).read_bytes() == source.read_bytes()

    def end(self, name: str) -> None:
        master = self._masters[name]
        self._dlcmd("umount", self._folder / f"{name}.mount")
        with suppress(ProcessLookupError):
            os.kill(master, signal.SIGTERM)
        wait_until(lambda: not is_running(master))

    def seem_unused(self, name: str, hours: int) -> None:
        assert hours * 3600 > COOL_DOWN_S
        long_ago = time.time() - hours * 3600
        for each in self.folders[name].iterdir():
            os.utime(each, (long_ago, long_ago))

    def close(self) -> None:
        for at in self._folder.glob("*.mount"):
            while mounted_at(str(at)) is not None:
                with suppress(DieselError):
                    umount(at, force=True)
        for master in self._masters.values():
            with suppress(ProcessLookupError):
                os.kill(master, signal.SIGKILL)

    def _sockets(self) -> set[Path]:
        return {*(self._folder / "run").glob("diesel/tasks/*/0/socket")}


def _process_of(opened: Path) -> int:
    here = os.open(opened.parent, os.O_PATH)  # a short path
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(f"/proc/self/fd/{here}/socket")
            credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    finally:
        os.close(here)
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
@pytest.mark.fuse
def test_datasets_in_use_stay_and_then_the_least_used_goes_first(machine: Machine) -> None:
    machine.begin("daily")
    machine.end("daily")
    daily = machine.chunks("daily")
    assert len(daily) > 6

    machine.begin("daily")
    machine.seem_unused("daily", 4)
    machine.begin("weekly")
    machine.end("weekly")
    weekly = machine.chunks("weekly")
    assert machine.chunks("daily") == daily, "a job uses them"
    assert weekly, "the rest of the folder"
    machine.end("daily")

    machine.seem_unused("daily", 4)
    machine.seem_unused("weekly", 1)  # LRU would keep it
    machine.begin("new", "--cool-down", "1d")
    machine.end("new")
    assert (machine.chunks("daily"), machine.chunks("weekly")) == (daily, weekly)
    machine.begin("new", "--cool-down", "30m", "--lrfu-p", "1.5")
    machine.end("new")
    assert len(machine.chunks("new")) > 3
    assert machine.chunks("daily") == daily, "two jobs have used them, and one the others"
    assert machine.chunks("weekly") < weekly
