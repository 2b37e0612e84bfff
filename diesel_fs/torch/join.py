"""The library call that does what `dlcmd run` does, from inside a training script."""

import atexit
import json
import subprocess
import sys

from ..errors import DieselError, UsageError
from .hook.diesel_hook import has_joined, install

AHEAD_MAX = 7
_END_S = 10.0


def join(*, ahead: int = 1) -> None:
    """Have each `DataLoader` of this process announce to the mounts what it will read, from its
    next epoch on.

    The samples and their order stay as they are. `ahead` is how many further epochs are announced
    where they can be foreseen, 0 to 7. The work is done in a process of its own, which ends with
    this one. Under `dlcmd run`, and when it is called again, this does nothing. Raises UsageError
    for a bad `ahead`, and DieselError where the process cannot be started.
    """
    if not 0 <= ahead <= AHEAD_MAX:
        raise UsageError(f"bad ahead {ahead}: from 0 to {AHEAD_MAX}")
    if has_joined():
        return
    command = [sys.executable, "-m", "diesel_fs.torch.planner", str(ahead)]
    try:
        planner = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise DieselError(f"cannot start the planner: {error.strerror}") from error
    assert planner.stdin is not None
    assert planner.stdout is not None
    line = planner.stdout.readline()
    if not line:
        raise DieselError("the planner ended before it listened; its error is above")
    settings = json.loads(line)
    install(settings["socket"], settings["ahead"], settings["fuse_trees"])
    atexit.register(_end, planner)


def _end(planner: "subprocess.Popen[bytes]") -> None:
    """Let the planner say what it has to, and end."""
    assert planner.stdin is not None
    planner.stdin.close()
    try:
        planner.wait(_END_S)
    except subprocess.TimeoutExpired:
        planner.kill()
