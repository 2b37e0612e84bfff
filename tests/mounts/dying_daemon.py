"""The program of a mount, one process of which is killed in the midst of a switch.

The environment variable `DIES` names the process (worker, server or supervisor; `nobody`: the
switch pauses instead), and `MOMENT` the moment:

- `told`: the kernel is told of the first change, in a FUSE mount;
- `made`: the new tree of a native mount is mounted nowhere yet;
- `beneath`: it lies beneath the old one;
- `detached`: the old one is gone.

Without `DIES`, none is killed. The kernel may be another one, too (`other_kernels.py`).
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diesel_fs.mounts.sessions.protocol import NOTIFY_INVALIDATE, OUT_HEADER
from diesel_fs.mounts.supervisor import main
from diesel_fs.system import syscalls
from tests.mounts.other_kernels import AT_FDCWD, KERNEL, meet

DIES, MOMENT = "TEST_DIES", "TEST_MOMENT"

PAUSE_S = 1.5

real_write = os.write
new_mount, attach_mount, umount2 = syscalls.new_mount, syscalls.attach_mount, syscalls.umount2

first_process = os.getpid()  # the supervisor
trees: list[int] = []


def reach(moment: str) -> None:
    """Kills the process at its moment. One that kills itself ends here."""
    if moment == os.environ[MOMENT]:
        if os.environ[DIES] == "nobody":
            time.sleep(PAUSE_S)
        elif pid := process_to_kill():
            os.kill(pid, signal.SIGKILL)


def write(descriptor: int, content: bytes) -> int:
    """The system call."""
    if len(content) > OUT_HEADER.size and OUT_HEADER.unpack_from(content)[1] == NOTIFY_INVALIDATE:
        reach("told")
    return real_write(descriptor, content)


def make_mount(kind: str, options: Sequence[tuple[str, str]], attributes: int) -> int:
    """The system calls."""
    made = new_mount(kind, options, attributes)
    if kind == "erofs":
        trees.append(made)
        if len(trees) > 1:
            reach("made")
    return made


def attach(mount: int, path: str, *, folder: int = AT_FDCWD, beneath: bool = False) -> None:
    """The system call."""
    attach_mount(mount, path, folder=folder, beneath=beneath)
    if beneath:
        reach("beneath")


def unmount(mountpoint: str, flags: int = 0) -> None:
    """The system call."""
    umount2(mountpoint, flags)
    reach("detached")


def process_to_kill() -> int:
    """The process that `DIES` names; 0 if it was killed already.

    This runs in the worker, or in the server if there is no worker: both are the supervisor's
    children.
    """
    supervisor = os.getppid()
    if supervisor != first_process:
        return 0
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    name = os.environ[DIES]
    if name == "supervisor":
        return supervisor
    if name == "server":
        return int(children[0])
    return int(children[1]) if len(children) > 1 else 0


if __name__ == "__main__":
    if DIES in os.environ:
        setattr(os, "write", write)  # noqa: B010  # mypy forbids =
        setattr(syscalls, "new_mount", make_mount)  # noqa: B010
        setattr(syscalls, "attach_mount", attach)  # noqa: B010
        setattr(syscalls, "umount2", unmount)  # noqa: B010
    meet(os.environ.get(KERNEL, ""))
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
