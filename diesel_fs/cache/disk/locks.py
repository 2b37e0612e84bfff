"""Locks of files in a cache's folder. They end with the process that holds them."""

import fcntl
import os
import stat

FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""For each open: a link or a FIFO may have the name."""


def try_lock(file: int, how: int) -> bool:
    """Whether a lock of an open file (flock(2)) could be had without waiting."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(path: str) -> bool:
    """Whether a regular file is here that nobody has locked: its writer or user has ended."""
    try:
        file = os.open(path, os.O_RDWR | FILE_FLAGS)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(file).st_mode) and try_lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)
