"""The program of a mount, one process of which is killed in the midst of a switch.

In a FUSE mount that is while the kernel is told of the new version. In a native mount the new tree
lies beneath the old one then. The environment variable `DIES` names the process: worker, server or
supervisor. Without it, none is killed. The kernel may be another one, too (`other_kernels.py`).
"""

import logging
import os
import signal
import sys
from pathlib import Path

from diesel_fs.mounts.sessions.protocol import NOTIFY_INVALIDATE, OUT_HEADER
from diesel_fs.mounts.supervisor import main
from diesel_fs.system import syscalls
from tests.mounts.other_kernels import KERNEL, meet

DIES = "TEST_DIES"

real_write = os.write
real_attach_mount = syscalls.attach_mount


def write(descriptor: int, content: bytes) -> int:
    """The system call; before the kernel is told of a first change, it kills the process."""
    is_long = len(content) > OUT_HEADER.size
    is_first = is_long and OUT_HEADER.unpack_from(content)[1] == NOTIFY_INVALIDATE
    if is_first and (pid := process_to_kill()):
        os.kill(pid, signal.SIGKILL)
    return real_write(descriptor, content)


def attach_mount(mount: int, path: str, *, folder: int = -100, beneath: bool = False) -> None:
    """The system call; after the first one that puts a tree beneath another, it kills the process.

    A process that kills itself ends here.
    """
    real_attach_mount(mount, path, folder=folder, beneath=beneath)
    if beneath and (pid := process_to_kill()):
        os.kill(pid, signal.SIGKILL)


def process_to_kill() -> int:
    """The process that `DIES` names; 0 if it was killed already.

    This runs in the worker, or in the server if there is no worker: both are the supervisor's
    children.
    """
    supervisor = os.getppid()
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
        setattr(syscalls, "attach_mount", attach_mount)  # noqa: B010
    meet(os.environ.get(KERNEL, ""))
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
