"""Tells the launcher which files a training process will read, in which order.

`install` has each `DataLoader` of the process announce the order of its sampler when an epoch
begins (`loaders.py`). `prediction.py` learns the order without drawing from the user's generators,
`files.py` tells which files a dataset reads (`arrow_tables.py` for Hugging Face's `datasets`), and
`link.py` sends both to the launcher. `learning.py` finds out which files a dataset opens, whether
it lists them or not (`opens.py` sees those that Python does not open), and `chunk_wise.py` has the
orders of `--shuffle chunk`.
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
    """Join the launcher that has started this process, if one has. Never raises."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            install(json.loads(text))
        except Exception:  # the user's program goes on as it would without us
            return


def has_joined() -> bool:
    """Whether this process announces what it will read."""
    by_launcher = sys.modules.get("diesel_hook")  # this module, where `sitecustomize` imported it
    return bool(_links or getattr(by_launcher, "_links", ()))


def install(settings: HookSettings) -> None:
    """Have this process announce what it will read."""
    if _links:
        return
    from . import link, loaders  # noqa: PLC0415  (processes without settings need none)

    launcher = link.Link(settings["socket"])
    _links.append(launcher)
    launcher.send({"do": "hello"})
    loaders.watch(launcher, settings)


def learning_workers(*parts: object) -> object:
    """A `LearningWorkers` that was pickled; called by the pickle."""
    from .learning import LearningWorkers  # noqa: PLC0415  (processes without settings need none)

    return LearningWorkers(*parts)  # type: ignore[arg-type] # as they were
