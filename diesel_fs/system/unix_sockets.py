"""Unix sockets at paths of any length: the address of a socket has room for 107 bytes only."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


def connect_unix(made: socket.socket, path: str | os.PathLike[str]) -> None:
    """Connect a socket to the one at a path. Raises OSError."""
    with _short(path) as short:
        made.connect(short)


def bind_unix(made: socket.socket, path: str | os.PathLike[str]) -> None:
    """Bind a socket to a path, where nothing may be. Raises OSError."""
    with _short(path) as short:
        made.bind(short)


@contextmanager
def _short(path: str | os.PathLike[str]) -> Iterator[str]:
    """A short path to the same place, by a descriptor of the folder."""
    parent, name = os.path.split(path)
    folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
