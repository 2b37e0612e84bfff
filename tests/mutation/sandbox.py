"""Runs a program in a private copy of the tree that stands at the tree's own path.

The program gets a mount namespace, in which an overlay covers the tree: the changed files, and all
files that the program writes there, lie in a scratch folder. So the environment, the installed
programs and every absolute path find the changed code, and the user's tree stays as it is. It also
gets a process namespace: when it ends or is killed, all daemons that it started end too, and so do
their mounts. It takes root, and overlayfs in the kernel.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

# Without `volatile`, the end of the overlay would sync the whole disk, for seconds on a busy one.
# sh stays as the first process of the namespace, and reaps what daemons leave. The tests marked
# `alone` exclude each other by locks on two files (`tests/conftest.py`): all copies share them.
_SCRIPT = """
    mount --bind "$1" "$2/below" &&
    mount -t overlay overlay -o "volatile,lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$1" &&
    cd "$1" || exit 125
    for lock in tests/conftest.py tests/__init__.py; do
        [ ! -e "$lock" ] || mount --bind "$2/below/$lock" "$lock" || exit 125
    done
    shift 2
    "$@"
    exit $?
"""
_UNSHARE = "setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc".split()
"""The namespaces end with this program, even if it is killed."""

_running: set["subprocess.Popen[bytes]"] = set()
_ended = threading.Event()
_lock = threading.Lock()


class SandboxError(Exception):
    """The copy could not be made (no root, or no overlayfs), or all copies were ended."""


@dataclass(slots=True)
class Sandbox:
    """One copy of a tree. Programs in it run one after the other; each sees a fresh copy."""

    tree: Path
    scratch: Path
    """A short path on a disk: tests make sockets and mounts below it."""
    changed: Mapping[str, str] = field(default_factory=dict)
    """The content of changed files, by path in the tree."""

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> int | None:
        """Run a program in the copy. Returns its exit code; None after the time-out.

        Its output goes to `log` in the scratch folder.
        """
        for name in ("upper", "work", "below"):
            shutil.rmtree(self.scratch / name, ignore_errors=True)
            (self.scratch / name).mkdir()
        for file, content in self.changed.items():
            path = self.scratch / "upper" / file
            # The overlay shows the upper folder's mode: users without rights enter it, too.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        words = [*_UNSHARE, "sh", "-c", _SCRIPT, "sh", str(self.tree), str(self.scratch), *command]
        with (self.scratch / "log").open("wb") as log, _process(words, environment, log) as process:
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
        if code == 125:
            raise SandboxError(self.log())
        return code

    def log(self) -> str:
        return (self.scratch / "log").read_text(errors="replace")


@contextmanager
def sandbox(tree: Path, changed: Mapping[str, str] | None = None) -> Iterator[Sandbox]:
    """A copy of a tree, with some files changed. It leaves nothing behind."""
    scratch = Path(tempfile.mkdtemp(prefix="mu"))
    scratch.chmod(0o755)
    try:
        yield Sandbox(tree, scratch, changed or {})
    finally:
        _detach_loop_devices(scratch)
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _process(
    words: Sequence[str], environment: Mapping[str, str], log: BinaryIO
) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that is killed at the end. Raises SandboxError after `end_all`."""
    if _ended.is_set():
        raise SandboxError("interrupted")
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    with _lock:
        _running.add(process)
    try:
        yield process
    finally:
        _kill(process)
        with _lock:
            _running.discard(process)
        if _ended.is_set():
            raise SandboxError("interrupted")


def end_all() -> None:
    """End every program that runs in a copy, and let no other one start; for an interrupt."""
    _ended.set()
    with _lock:
        running = list(_running)
    for process in running:
        _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a namespace by its first process, and wait until it is empty: unshare ends after that."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in children or [str(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    process.wait()


def _detach_loop_devices(folder: Path) -> None:
    """Loop devices belong to no namespace, so a killed test leaves its own."""
    command = ["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"]
    listed = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    for device, _, file in (line.strip().partition(" ") for line in listed.splitlines()):
        if file.strip().startswith(f"{folder}/"):
            subprocess.run(["losetup", "--detach", device], check=False)
