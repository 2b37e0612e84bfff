"""Unix sockets at paths of any length (a socket's address has room for 107 bytes only), and the
descriptors that are passed over them."""

import array
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


def connect_unix(client: socket.socket, path: str | os.PathLike[str]) -> None:
    with _short_path(path) as short:
        client.connect(short)


def bind_unix(listener: socket.socket, path: str | os.PathLike[str]) -> None:
    with _short_path(path) as short:
        listener.bind(short)


def received_descriptors(control: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the control messages of a `recvmsg`; the caller closes them."""
    descriptors = array.array("i")
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return descriptors.tolist()


@contextmanager
def _short_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """Lead through a descriptor of the folder, which is open in the `with`."""
    parent, name = os.path.split(path)
    folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
