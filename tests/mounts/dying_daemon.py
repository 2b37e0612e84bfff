"""The program of a mount, one process of which is killed while the kernel is told of a new version.

The environment variable `DIES` names it: worker, server or supervisor.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from diesel_fs.mounts.sessions.protocol import NOTIFY_INVALIDATE, OUT_HEADER
from diesel_fs.mounts.supervisor import main

DIES = "TEST_DIES"

real_write = os.write


def write(descriptor: int, content: bytes) -> int:
    """The system call; before the kernel is told of a first change, it kills the process."""
    is_long = len(content) > OUT_HEADER.size
    is_first = is_long and OUT_HEADER.unpack_from(content)[1] == NOTIFY_INVALIDATE
    if is_first and (pid := process_to_kill()):
        os.kill(pid, signal.SIGKILL)
    return real_write(descriptor, content)


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
    setattr(os, "write", write)  # noqa: B010  # mypy forbids =
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
