"""Sends the launcher the files that a training process will read, and their order.

`install` lets each `DataLoader` of the process announce the order of its sampler when an epoch
begins (`loaders.py`). `prediction.py` learns the order without drawing from the user's generators,
`files.py` finds the files of a dataset (`arrow_tables.py` for Hugging Face's `datasets`), and
`link.py` sends both to the launcher. `learning.py` finds out which files a dataset opens, whether
it lists them or not (`opens.py` sees those that Python does not open), and `chunk_wise.py` has the
orders of `--shuffle chunk`.

Concurrency. The hook runs in the threads of the user's program, inside calls of `DataLoader`,
samplers and datasets; it has no event loop. `learning.py` alone starts threads: timers, which it
cancels and joins at the end of an epoch, since Python warns if a program forks while it has
threads. Any thread may send; a lock in `link.py` lets one message leave after another. If a send
blocks for 20 s, the hook gives the launcher up. The garbage collector may run at any point, even
inside a send, and may end a stream then; such a message is queued, and leaves after the current
one. A forked child has no connection and none of its parent's unsent messages; it connects with its
first message.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .link import HookSettings

VARIABLE = "DIESEL_JOIN"
"""The variable of the environment with the launcher's settings, as JSON (`link.Settings`)."""


_links: list[object] = []  # one, once this process has joined


def install_from_environment() -> None:
    """Join the launcher that has started this process, if there is one. Never raises."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            install(json.loads(text))
        except Exception:  # the user's program runs on as without the hook
            return


def has_joined() -> bool:
    """Whether this process announces its reads."""
    by_launcher = sys.modules.get("diesel_hook")  # this module, as imported by `sitecustomize`
    return bool(_links or getattr(by_launcher, "_links", ()))


def install(settings: HookSettings) -> None:
    if _links:
        return
    from . import link, loaders  # noqa: PLC0415  (processes without settings need none)

    launcher = link.Link(settings["socket"])
    _links.append(launcher)
    launcher.send({"do": "hello"})
    loaders.watch(launcher, settings)


def learning_workers(*parts: object) -> object:
    """Called by the pickle of a `LearningWorkers`, which it returns."""
    from .learning import LearningWorkers  # noqa: PLC0415  (processes without settings need none)

    return LearningWorkers(*parts)  # type: ignore[arg-type] # as they were
