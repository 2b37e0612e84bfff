"""Sends the launcher the files that a training process will read, and their order.

The *launcher* is the process that makes plans for mounts from the messages (`../../planner/`): that
of `dlcmd run`, or the one that `join` starts. `loaders.py` wraps `DataLoader`, so that each one
announces its sampler's order when an epoch begins; `prediction.py` computes the order. `files.py`
finds a dataset's listed files (`arrow_tables.py` those of Hugging Face's `datasets`). `learning.py`
observes which files a dataset opens (`opens.py`: those that native code opens). `pace.py` lets no
more workers work at once than processors can use. `link.py` sends messages, and `chunk_wise.py`
has the orders of `--shuffle chunk`.

Concurrency. The hook runs in the threads of the user's program, inside calls of `DataLoader`,
samplers and datasets. Only `learning.py` starts threads: timers, which it cancels and joins at the
end of an epoch, since Python warns if a program with threads forks. Any thread may send; a lock in
`link.py` keeps messages apart. If a send blocks for 20 s, the hook sends nothing more. The garbage
collector may run even inside a send, and free a loader or loop that must send a message; such a
message is queued, and follows the current one. A forked child has no connection and none of its
parent's unsent messages; it connects with its first message.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .link import HookSettings

VARIABLE = "DIESEL_JOIN"
"""The environment variable with `link.HookSettings`, as JSON."""

_links: list[object] = []  # the only one, once this process has joined


def install_from_environment() -> None:
    """Join if the environment has the launcher's settings. Never raises."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            install(json.loads(text))
        except Exception:  # the program runs on without the hook
            return


def has_joined() -> bool:
    """Whether this process sends its reads to a launcher, by `dlcmd run` or
    `diesel_fs.torch.join`."""
    by_launcher = sys.modules.get("diesel_hook")  # the copy of this module from `sitecustomize`
    return bool(_links or getattr(by_launcher, "_links", ()))


def install(settings: HookSettings) -> None:
    """Connect to the launcher, and watch the loaders of this process. Does nothing after the first
    call. May raise any exception."""
    if _links:
        return
    from . import link, loaders  # noqa: PLC0415  (processes without settings need none)

    launcher = link.Link(settings["socket"])
    _links.append(launcher)
    launcher.send({"do": "hello"})
    loaders.watch(launcher, settings)


def learning_workers(*parts: object) -> object:
    """Unpickle a `LearningWorkers`, in a worker."""
    from .learning import LearningWorkers  # noqa: PLC0415  (processes without settings need none)

    return LearningWorkers(*parts)  # type: ignore[arg-type] # as they were
