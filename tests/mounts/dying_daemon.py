"""The program of a mount, one process of which is killed while the kernel is told of a new version.

The environment variable `DIES` names it: worker, server or supervisor.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from diesel_fs.mounts.supervisor import main
from diesel_fs.mounts.versions.invalidation import SwitchInvalidation

DIES = "TEST_DIES"

send = SwitchInvalidation.send


def send_in_part(self: SwitchInvalidation, device: int) -> Iterator[None]:
    """Kills the process after the first piece of notifications."""
    for _ in send(self, device):
        yield
        if pid := process_to_kill():
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
    setattr(SwitchInvalidation, "send", send_in_part)  # noqa: B010  # mypy forbids =
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
