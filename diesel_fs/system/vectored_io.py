"""Writes several buffers with one system call, of which the call may take only the first bytes.

For writev(2), sendmsg(2) and their like. Stateless.
"""

from collections.abc import Callable, Sequence

BUFFERS_MAX = 1024
"""The most buffers of one call (IOV_MAX of Linux)."""


def byte_views(parts: Sequence["bytes | bytearray | memoryview"]) -> list[memoryview]:
    """Views of the bytes of parts, without those that are empty."""
    return [memoryview(part).cast("B") for part in parts if len(part)]


def drop_written(views: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes, which have been written, from views of bytes."""
    whole = 0
    while whole < len(views) and count >= len(views[whole]):
        count -= len(views[whole])
        whole += 1
    del views[:whole]
    if count:
        views[0] = views[0][count:]


def write_all(write: Callable[[list[memoryview]], int], views: list[memoryview]) -> None:
    """Call `write`, which returns how many bytes it has taken, until it has taken all. Leaves
    `views` empty."""
    while views:
        drop_written(views, write(views[:BUFFERS_MAX]))
