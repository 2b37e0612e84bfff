"""The private folder that holds the control sockets of a user's mounts.

A daemon that was killed leaves its socket there. The next mount removes it, and so does `umount` of
the dead mount. This module imports little, because a user waits for `umount`. Any thread may call
it.
"""

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNNAMED_SOCKET_S_MAX = 60.0
"""A socket that still has its temporary name after this time was left by a killed daemon."""


PREFIX = "control-"
"""Names of control sockets begin with this."""


@contextmanager
def open_private(folder: Path) -> Iterator[int]:
    """Opens a folder for a block. Raises OSError unless the folder belongs to this user, and no
    other user may enter it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(1, "other users may enter it")
        yield descriptor
    finally:
        os.close(descriptor)


def short_path(folder: int, name: str) -> str:
    """A path that fits the address of a socket, which has room for 107 bytes."""
    return f"/proc/self/fd/{folder}/{name}"


def control_sockets(folder: Path) -> list[str]:
    """The paths of the control sockets, those of killed daemons included. Raises OSError."""
    return [str(folder / name) for name in sorted(os.listdir(folder)) if name.startswith(PREFIX)]


def remove_dead_sockets(path: Path) -> None:
    """Removes sockets of killed daemons. Raises OSError."""
    with open_private(path) as folder:
        for name in os.listdir(folder):
            with suppress(OSError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                age_s = time.time() - status.st_ctime
                if (name.startswith(PREFIX) and not _listens(short_path(folder, name))) or (
                    name.startswith(".new-") and age_s > UNNAMED_SOCKET_S_MAX
                ):
                    os.unlink(name, dir_fd=folder)


def _listens(path: str) -> bool:
    """Whether a daemon may be listening: a connection is not refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True
