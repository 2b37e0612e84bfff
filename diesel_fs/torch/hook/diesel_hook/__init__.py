"""Sends the launcher the files that a training process will read, and their order.

`loaders.py` wraps `DataLoader`, so that each announces its sampler's order when an epoch begins.
`prediction.py` learns the order without drawing from the user's generators, `files.py` finds a
dataset's files (`arrow_tables.py` for Hugging Face's `datasets`), `learning.py` finds out which
files it opens (`opens.py` sees those that Python does not open), `link.py` sends messages, and
`chunk_wise.py` has the orders of `--shuffle chunk`.

Concurrency. The hook runs in the threads of the user's program, inside calls of `DataLoader`,
samplers and datasets. `learning.py` alone starts threads: timers, which it cancels and joins at the
end of an epoch, since Python warns if a program with threads forks. Any thread may send; a lock in
`link.py` keeps messages apart. If a send blocks for 20 s, the hook gives the launcher up. The
garbage collector may run at any point, even inside a send, and end a stream; such a message is
queued, and follows the current one. A forked child has no connection and none of its parent's
unsent messages; it connects with its first message.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .link import HookSettings

VARIABLE = "DIESEL_JOIN"
"""The launcher's settings (`link.HookSettings`), as JSON."""


_links: list[object] = []  # one, once this process has joined


def install_from_environment() -> None:
    """Never raises."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            install(json.loads(text))
        except Exception:  # runs on as without the hook
            return


def has_joined() -> bool:
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
    """The pickle of a `LearningWorkers` calls it."""
    from .learning import LearningWorkers  # noqa: PLC0415  (processes without settings need none)

    return LearningWorkers(*parts)  # type: ignore[arg-type] # as they were
