"""The kernel's side of a mount: unmounting, the connection's own files, read-ahead.

Owned here: system calls that Python does not have, and where the kernel keeps the settings of a
FUSE connection. A connection is known by its device number (`0:43`), as `/proc/*/mountinfo` has it:
nothing here touches a file of the mount, which could wait for a daemon that is gone. Any thread.
"""

import ctypes
import errno
import os
from contextlib import suppress

MNT_FORCE = 1
MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

# The same numbers on every architecture: they came after the tables had been unified.
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_CMD_CREATE = 1, 1, 6
_MOUNT_ATTR_NOSUID_NODEV_NOEXEC = 2 | 4 | 8

READS_AHEAD_MAX = 256
"""READs ahead that may wait for us at once. The kernel's default is 12, and then 12 files of a few
hundred KiB that the store does not answer stop all others (measured: 7.8 s instead of 2 ms)."""

READ_AHEAD_KIB = 1024
"""The largest READ (256 pages); the default of 128 KiB would ask eight times for the same."""

_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def umount2(mountpoint: str, flags: int = 0) -> None:
    """umount2(2), never through a link. Raises OSError."""
    if _libc.umount2(os.fsencode(mountpoint), flags | _UMOUNT_NOFOLLOW) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), mountpoint)


def _control_folder(connection: str) -> int:
    """A descriptor of the connection's folder in fusectl, mounted for ourselves where nobody has.

    A mount of our own hangs in no tree (fsmount(2), root only): there is nothing to clean up.
    """
    with suppress(OSError):
        return os.open(f"/sys/fs/fuse/connections/{connection}", os.O_PATH | os.O_DIRECTORY)
    context = _syscall(_SYS_FSOPEN, b"fusectl", _FSOPEN_CLOEXEC)
    try:
        _syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        root = _syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)
    try:
        return os.open(connection, os.O_PATH | os.O_DIRECTORY, dir_fd=root)
    finally:
        os.close(root)


def _write_control(device: str, name: str, value: str) -> None:
    folder = _control_folder(device.partition(":")[2])
    try:
        file = os.open(name, os.O_WRONLY, dir_fd=folder)
        try:
            os.write(file, value.encode())
        finally:
            os.close(file)
    finally:
        os.close(folder)


def abort(device: str) -> bool:
    """Ends the connection: whoever waits for an answer gets an error. False where not allowed."""
    try:
        _write_control(device, "abort", "1")
    except FileNotFoundError:
        return True  # the connection has gone by itself
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENOSYS):
            return False
        raise
    return True


def tune(device: str) -> None:
    """Lets many READs wait at once and makes them large, as far as this user may."""
    for name in ("max_background", "congestion_threshold"):
        with suppress(OSError):
            _write_control(device, name, str(READS_AHEAD_MAX))
    with suppress(OSError), open(f"/sys/class/bdi/{device}/read_ahead_kb", "w") as file:
        file.write(str(READ_AHEAD_KIB))
