"""Writes several buffers with one system call, such as writev(2), which may take only some of the
bytes. Keeps no state."""

from collections.abc import Callable, Sequence

BUFFERS_MAX = 1024
"""The maximum of buffers in one call (IOV_MAX of Linux)."""


def byte_views(parts: Sequence["bytes | bytearray | memoryview"]) -> list[memoryview]:
    """A view of the bytes of each part; empty parts are left out."""
    return [memoryview(part).cast("B") for part in parts if len(part)]


def drop_written(views: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes, which have been written, from `views`."""
    whole = 0
    while whole < len(views) and count >= len(views[whole]):
        count -= len(views[whole])
        whole += 1
    del views[:whole]
    if count:
        views[0] = views[0][count:]


def write_all(write: Callable[[list[memoryview]], int], views: list[memoryview]) -> None:
    """Call `write` until it has taken all bytes; it gets views, and returns how many bytes it has
    taken. Leaves `views` empty."""
    while views:
        drop_written(views, write(views[:BUFFERS_MAX]))
