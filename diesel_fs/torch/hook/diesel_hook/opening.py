"""Spares the `ioctl` that `open()` of CPython before 3.14 makes for each file.

`open(path, "rb")` asks whether the file is a terminal, unless it is told a size for its buffer. On
a tree of FUSE this question goes to the mount, and costs more than all the rest of `open`. So
`open` gets the usual size; nothing else about the call changes.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys

_NEEDS_NO_HELP = (3, 14)
_READS = frozenset(("r", "rb", "br", "rt", "tr"))


def spare_terminal_checks(folders: list[str]) -> None:
    """Spare the question for files below these folders."""
    if sys.version_info >= _NEEDS_NO_HELP or sys.implementation.name != "cpython":
        return
    below = tuple(folder.rstrip("/") + "/" for folder in folders)
    original = builtins.open

    @functools.wraps(original)
    def opened(file, mode="r", buffering=-1, *rest, **named):  # type: ignore[no-untyped-def] # any
        if buffering == -1 and mode in _READS and _is_below(file, below):
            buffering = io.DEFAULT_BUFFER_SIZE
        return original(file, mode, buffering, *rest, **named)

    builtins.open = io.open = opened


def _is_below(file: object, folders: tuple[str, ...]) -> bool:
    if isinstance(file, int):
        return False
    try:
        path = os.fspath(file)  # type: ignore[call-overload] # or it raises
    except TypeError:
        return False  # `open` raises the error for it
    text = os.fsdecode(path)
    return (text if text[:1] == "/" else os.path.abspath(text)).startswith(folders)
