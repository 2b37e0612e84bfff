"""The mount daemon, of which one process is killed while the kernel is told of another version.

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
    """Kills, once the kernel knows a part."""
    for _ in send(self, device):
        yield
        if pid := process_to_kill():
            os.kill(pid, signal.SIGKILL)


def process_to_kill() -> int:
    """Who tells is the worker, or where there is none, the server; both are the supervisor's. 0:

    it has been killed already.
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
