"""Files past the kernel's page cache (O_DIRECT).

A copy into the page cache costs more per byte than all else that a large read or write needs, and
evicts pages that other processes read.
"""

import errno
import fcntl
import os

import numpy as np

from .syscalls import cached_bytes

BLOCK_BYTES = 4096
"""The largest block of disks in use, and a page: places in files and memory are multiples of it."""


def set_direct(fd: int, *, wanted: bool) -> bool:
    """Returns whether the file system allows it. Raises OSError if O_DIRECT cannot be ended."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags)
    except OSError:
        if not wanted:
            raise
        return False
    return True


def read_once(fd: int, size: int, room: memoryview) -> None:
    """Read the first `size` bytes of a file that is not read again soon into `room`, which is of
    `aligned_memory`. The page cache does not take them up; if most of them are there already, they
    are copied from it. Raises OSError; EOFError if the file is shorter.
    """
    is_direct = 2 * cached_bytes(fd, 0, size) < size and set_direct(fd, wanted=True)
    done = 0
    while done < size:
        try:
            got = os.preadv(fd, [room[done:]], done)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:  # other blocks, or an odd length
                raise
            is_direct = not set_direct(fd, wanted=False)
            continue
        if not got:
            raise EOFError
        done += got


def aligned_memory(size: int) -> memoryview:
    """Whole blocks for `size` bytes. Raises MemoryError."""
    whole = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    memory = np.empty(whole + BLOCK_BYTES, np.uint8)
    start = -int(memory.ctypes.data) % BLOCK_BYTES
    return memory[start : start + whole].data
