"""`join`: announces a training script's reads to the mounts, as `dlcmd run` does, from inside the
script."""

import atexit
import json
import subprocess
import sys

from ..errors import DieselError, UsageError
from ..orders.shuffle import GROUP_SIZE_DEFAULT
from .hook.diesel_hook import has_joined, install
from .hook.diesel_hook.link import HookSettings

AHEAD_MAX = 7
"""The most epochs that may be announced besides the current one."""

SHUFFLES = ("full", "chunk")
_END_S = 10.0  # the wait for the planner process to end, at exit
_HOOK_LOADERS = "diesel_fs.torch.hook.diesel_hook.loaders"


def join(
    *,
    ahead: int = 1,
    shuffle: str = "full",
    group_size: int = GROUP_SIZE_DEFAULT,
    own_seed: bool = False,
) -> None:
    """Let each `DataLoader` of this process announce its reads to the mounts, from its next epoch
    on.

    `ahead` is the number of epochs (0 to 7) that are announced besides the current one, if their
    order can be foreseen. `shuffle` "chunk" replaces random orders by chunk-wise ones, with
    `group_size` chunks in a group. `own_seed` gives each sampler that draws from torch's global
    generator a generator of its own, so that its further epochs can be foreseen; this changes its
    order. A separate process makes the announcements, and ends with this process. A second call
    does nothing, nor does a call under `dlcmd run`. Raises UsageError for bad arguments, and
    DieselError if the separate process cannot be started.
    """
    if not 0 <= ahead <= AHEAD_MAX:
        raise UsageError(f"bad ahead {ahead}: from 0 to {AHEAD_MAX}")
    if shuffle not in SHUFFLES:
        raise UsageError(f"bad shuffle {shuffle!r}: it is one of {', '.join(SHUFFLES)}")
    if group_size < 1:
        raise UsageError(f"bad group size {group_size}: it is 1 or more")
    if has_joined():
        return
    command = [sys.executable, "-m", "diesel_fs.torch.planner"]
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
    settings: HookSettings = json.loads(line)
    settings["ahead"], settings["own_seed"] = ahead, own_seed
    settings["group_size"] = group_size if shuffle == "chunk" else 0
    install(settings)
    atexit.register(_end, planner)


def received(sampler: object) -> int | None:
    """The number of a sampler's indices in the batches that a loop has received in this epoch; with
    workers, the sampler has given more. None if the number is not known, for example if this
    process has not joined."""
    for name in ("diesel_hook.loaders", _HOOK_LOADERS):  # of `dlcmd run`, and of `join`
        loaders = sys.modules.get(name)
        if loaders is not None:
            position: int | None = loaders.received(sampler)
            return position
    return None


def _end(planner: "subprocess.Popen[bytes]") -> None:
    assert planner.stdin is not None
    planner.stdin.close()
    try:
        planner.wait(_END_S)
    except subprocess.TimeoutExpired:
        planner.kill()
