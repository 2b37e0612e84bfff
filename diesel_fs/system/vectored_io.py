"""Writes several buffers with one system call, such as writev(2), which may take only some of the
bytes."""

from collections.abc import Callable, Sequence

BUFFERS_MAX = 1024
"""Linux's IOV_MAX."""


def byte_views(parts: Sequence["bytes | bytearray | memoryview"]) -> list[memoryview]:
    """Empty parts are left out."""
    return [memoryview(part).cast("B") for part in parts if len(part)]


def drop_written(views: list[memoryview], count: int) -> None:
    whole = 0
    while whole < len(views) and count >= len(views[whole]):
        count -= len(views[whole])
        whole += 1
    del views[:whole]
    if count:
        views[0] = views[0][count:]


def write_all(write: Callable[[list[memoryview]], int], views: list[memoryview]) -> None:
    """`write` gets views, and returns how many bytes it has taken. Leaves `views` empty."""
    while views:
        drop_written(views, write(views[:BUFFERS_MAX]))
