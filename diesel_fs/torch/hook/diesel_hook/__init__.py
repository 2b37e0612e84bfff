"""Tells the launcher which files a training process will read, in which order.

`install` has each `DataLoader` of the process announce the order of its sampler when an epoch
begins (`loaders.py`). `prediction.py` learns the order without drawing from the user's generators,
`files.py` learns which files a dataset reads (`arrow_tables.py` for Hugging Face's `datasets`), and
`link.py` sends both to the launcher.
`opening.py` spares a request for each `open()` on a mount of a user without root.
"""

from __future__ import annotations

import json
import os

VARIABLE = "DIESEL_JOIN"
"""The variable of the environment with the launcher's settings, as JSON (`Settings`)."""

_links: list[object] = []  # one, once this process has joined


def install_from_environment() -> None:
    """Join the launcher that has started this process, if one has. Never raises."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            settings = json.loads(text)
            install(settings["socket"], settings["ahead"], settings["fuse_trees"])
        except Exception:  # the user's program goes on as it would without us
            return


def has_joined() -> bool:
    """Whether this process announces what it will read."""
    return bool(_links)


def install(socket_path: str, ahead: int, fuse_trees: list[str]) -> None:
    """Have this process announce what it will read.

    `socket_path` is the launcher's socket, `ahead` how many further epochs are announced, and
    `fuse_trees` the mount points whose `open` is slow.
    """
    if _links:
        return
    from . import link, loaders, opening  # noqa: PLC0415  (processes without settings need none)

    launcher = link.Link(socket_path)
    _links.append(launcher)
    launcher.send({"do": "hello"})
    if fuse_trees:
        opening.spare_terminal_checks(fuse_trees)
    loaders.watch(launcher, ahead)
