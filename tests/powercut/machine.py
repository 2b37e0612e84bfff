"""A virtual machine with a power switch: user-mode Linux on an ext4 image, killed by SIGKILL.

The root file system of the guest is this host's own, read-only, so the tests run this tree in this
environment. The guest's disk is a file: bytes that the guest has written to it survive the kill,
bytes that only the guest's page cache held are lost. The guest writes nothing by itself, neither
pages nor its journal, so only syncs reach the disk.

Programs in the guest report by lines on its console that begin with "@". A machine belongs to one
thread; every wait has a deadline.
"""

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_HERE = Path(__file__).parent
_DEADLINE_S = 120.0
_DISK_BYTES = 48 << 20
_MEMORY = "384M"
_QUIET = "quiet loglevel=0 con=null con0=null,fd:1"

# What ext4 would do for programs that forget a sync (noauto_da_alloc) would hide that they do.
_PROLOGUE = """#!/bin/sh
mount -t proc proc /proc
mount -t tmpfs none /run
echo 0 > /proc/sys/vm/dirty_writeback_centisecs
mount -t tmpfs none /mnt
for letter in %s; do
    mkdir /mnt/$letter
    mount -t ext4 -o commit=9000,noauto_da_alloc /dev/ubd$letter /mnt/$letter || echo @failed mount
done
export HOME=/run TMPDIR=/run PYTHONDONTWRITEBYTECODE=1
run() {
    name="$1"
    shift
    if "$@" >/run/said 2>&1; then echo "@did $name"; else echo "@failed $name"; cat /run/said; fi
}
"""
_EPILOGUE = """
echo @end
while :; do sleep 1000; done
"""


class Unsuitable(Exception):
    """No machine can run on this host; the message says why."""


class Machine:
    """A running guest. `said` has the lines that it has reported until now, without the "@"."""

    def __init__(
        self, tools: "Tools", folder: Path, disks: Mapping[str, Path], script: str
    ) -> None:
        """Start a guest that runs the shell script `script`. Its disk "a" is mounted on /mnt/a."""
        self.said: list[str] = []
        self.noise: list[str] = []
        self._rest = b""
        init = folder / "init"
        init.write_text(_PROLOGUE % " ".join(disks) + script + _EPILOGUE, encoding="utf-8")
        init.chmod(0o755)
        self._process = subprocess.Popen(
            [
                *("linux.uml", f"mem={_MEMORY}", f"uml_dir={folder}/"),
                *(f"ubd{letter}={disk}" for letter, disk in disks.items()),
                *("root=/dev/root", "rootfstype=hostfs", "hostfs=/", f"init={init}"),
                *_QUIET.split(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LD_PRELOAD": str(tools.xstate)},
        )
        assert self._process.stdout is not None
        self._console = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._console, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._selector.close()
        self._console.close()

    def reports(self) -> Iterator[str]:
        """The lines that the guest reports, as they come, until "end". Raises AssertionError if a
        command in the guest failed, no line comes for a long time, or the guest has ended."""
        line = ""
        while line != "@end":
            line = self._line()
            if line.startswith("@"):
                self.said.append(line[1:])
                assert not line.startswith("@failed"), self._told(line)
                yield line[1:]
            else:
                self.noise.append(line)

    def wait_for(self, wanted: str) -> None:
        assert wanted in self.reports(), f"the guest never said {wanted!r}: {self.said}"

    def cut(self) -> None:
        """Cut the power. Lines that the guest reported before are still added to `said`."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_DEADLINE_S)
            os.set_blocking(self._console.fileno(), False)  # no more output will come
            rest = self._rest + (self._console.read() or b"")
            lines = rest.decode("utf-8", "replace").split("\n")
            self._rest = b""
            self.said += [line.strip()[1:] for line in lines[:-1] if line.startswith("@")]

    def copy_disk(self, disk: Path, copy: Path) -> Path:
        """A copy of a disk as a power cut now would leave it. The guest is stopped meanwhile."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            subprocess.run(["cp", "--sparse=always", disk, copy], check=True)
        finally:
            os.kill(self._process.pid, signal.SIGCONT)
        return copy

    def _line(self) -> str:
        deadline = time.monotonic() + _DEADLINE_S
        while b"\n" not in self._rest:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            assert ready, self._told(f"nothing from the guest in {_DEADLINE_S:.0f} s")
            more = os.read(self._console.fileno(), 1 << 16)
            assert more, self._told("the guest has gone")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def _told(self, what: str) -> str:
        more = ""
        if self._selector.select(0.5):  # its explanation comes after it
            more = os.read(self._console.fileno(), 1 << 16).decode("utf-8", "replace")
        return "\n".join([what, *self.said[-5:], *self.noise[-20:], more])


class Tools:
    """The programs compiled for the guest, and new disks. Raises Unsuitable if no guest can run
    here."""

    def __init__(self, folder: Path) -> None:
        for program in ("linux.uml", "mkfs.ext4", "e2fsck", "debugfs", "cc"):
            if shutil.which(program, path=_path()) is None:
                raise Unsuitable(f"{program} is missing")
        self.xstate = self._compiled("xstate", folder)
        self.steps = self._compiled("steps", folder)
        self._empty = folder / "empty-disk"
        with open(self._empty, "wb") as disk:
            disk.truncate(_DISK_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._empty)
        with Machine(self, folder, {"a": self.new_disk(folder / "tried")}, "") as machine:
            try:
                machine.wait_for("end")
            except AssertionError as error:
                raise Unsuitable(f"linux.uml does not run here: {error}") from error

    def new_disk(self, path: Path) -> Path:
        subprocess.run(["cp", "--sparse=always", self._empty, path], check=True)
        return path

    def preloaded(self, **settings: str | Path) -> str:
        """The words before a program, in a guest's script, that preload `steps`."""
        pairs = {"LD_PRELOAD": self.steps} | {
            f"POWERCUT_{k.upper()}": settings[k] for k in settings
        }
        return "env " + " ".join(f"{name}={shlex.quote(str(pairs[name]))}" for name in pairs)

    @staticmethod
    def _compiled(name: str, folder: Path) -> Path:
        library = folder / f"{name}.so"
        source = _HERE / f"{name}.c"
        _run("cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl")
        return library


@contextmanager
def after_reboot(disk: Path, folder: Path) -> Iterator[Path]:
    """After its journal is replayed as at the next boot."""
    _run("e2fsck", "-fy", disk, accepted=(0, 1))
    _run("e2fsck", "-fn", disk)  # the file system itself is sound, so any fault is ours
    folder.mkdir()
    try:
        _run("debugfs", "-R", f"rdump / {folder}", disk)
        yield folder
    finally:
        shutil.rmtree(folder)


def _run(*command: str | Path, accepted: tuple[int, ...] = (0,)) -> None:
    environment: Mapping[str, str] = {**os.environ, "PATH": _path()}
    done = subprocess.run(
        command, check=False, capture_output=True, env=environment, timeout=_DEADLINE_S
    )
    assert done.returncode in accepted, (command, done.stdout, done.stderr)


def _path() -> str:
    """The PATH with the folders of system programs, which not every user's PATH has."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
