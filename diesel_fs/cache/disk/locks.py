"""Locks of files in a cache's folder. They end with the process that holds them."""

import fcntl
import os
import stat

FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags for every `open` in a cache's folder: `open` must not follow a link, or wait for a FIFO,
that has the name of a file."""


def try_lock(file: int, how: int) -> bool:
    """Returns whether the open file is locked now. Never waits. `how` is as for flock(2)."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(path: str) -> bool:
    """Whether `path` is a regular file whose writer or user has ended. False if it cannot be
    opened."""
    try:
        file = os.open(path, os.O_RDWR | FILE_FLAGS)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(file).st_mode) and try_lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)
