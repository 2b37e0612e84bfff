"""Reads a file only if its folders and its bytes are in the page cache. Any thread.

Uses openat2(2) with RESOLVE_CACHED, and preadv2(2) with RWF_NOWAIT. Without support by the kernel
and the file system, every read counts as one that would wait.
"""

import ctypes
import errno
import os
import struct

_SYS_OPENAT2 = 437  # Linux 5.6; the same on every architecture
_AT_FDCWD = -100
_RESOLVE_CACHED = 0x20  # Linux 5.12
_HOW = struct.Struct("QQQ")  # flags, mode, resolve

_WOULD_WAIT = frozenset({errno.EAGAIN, errno.ENOSYS, errno.EINVAL, errno.E2BIG, errno.EOPNOTSUPP})

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)


def read_nowait_at(path: str, flags: int, start: int, room: memoryview) -> bool:
    """Whether `room` could be filled from byte `start` of the file without waiting. After False its
    content is undefined. `flags` are those of open(2). Raises OSError."""
    how = _HOW.pack(flags, 0, _RESOLVE_CACHED)
    file = _syscall(_SYS_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how))
    if file < 0:
        number = ctypes.get_errno()
        if number in _WOULD_WAIT:
            return False
        raise OSError(number, os.strerror(number), path)
    try:
        return os.preadv(file, [room], start, os.RWF_NOWAIT) == len(room)
    except OSError as error:
        if error.errno in _WOULD_WAIT:
            return False
        raise
    finally:
        os.close(file)
