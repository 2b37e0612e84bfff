"""Loop devices: block devices of the kernel that show the content of a file. They need root, and
the nodes `/dev/loop*`. Any thread.
"""

import errno
import fcntl
import os
import struct
import time

_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_CONFIG = struct.Struct("II 52xI 240x")  # the file, the block size, the flags
_READ_ONLY, _AUTOCLEAR = 1, 4

_DEADLINE_S = 5.0
"""The time for all tries: processes that want a device at once are all offered the same one."""

_PAUSE_S = 0.001


def open_loop_device(file: int) -> int:
    """A descriptor of a new read-only loop device that shows the content of the open file `file`.

    The kernel keeps the file open, and frees the device when no process or mount has it open, so
    none stays behind. Raises OSError (Linux 5.8 is needed); ENOSPC if no device is free.
    """
    deadline_s = time.monotonic() + _DEADLINE_S
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            number = _free_number(control)
            device = os.open(f"/dev/loop{number}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, _CONFIG.pack(file, 0, _READ_ONLY | _AUTOCLEAR))
                return device
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                    raise
            time.sleep(_PAUSE_S)
    finally:
        os.close(control)


def _free_number(control: int) -> int:
    """Another process may take the device before the caller does."""
    try:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(error.errno, "all loop devices are in use") from error
        raise
