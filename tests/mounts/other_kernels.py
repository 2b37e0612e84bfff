"""Kernels other than this machine's, as far as the daemon of a native mount notices a difference.

`meet` replaces system calls in the program of a mount, so that they fail as they would there.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence

from diesel_fs.system import syscalls

KERNEL = "TEST_KERNEL"
"""The environment variable with the names of `_KINDS`, separated by spaces."""

AT_FDCWD = -100

new_mount, real_stat, real_ioctl = syscalls.new_mount, os.stat, fcntl.ioctl
attach_mount, copy_mount = syscalls.attach_mount, syscalls.copy_mount


def meet(names: str) -> None:
    for name in names.split():
        _KINDS[name]()


def _no_file_mounts() -> None:
    """EROFS cannot be mounted from a file."""

    def mount(kind: str, options: Sequence[tuple[str, str]], attributes: int) -> int:
        if kind == "erofs" and not stat.S_ISBLK(os.stat(dict(options)["source"]).st_mode):
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK))
        return new_mount(kind, options, attributes)

    setattr(syscalls, "new_mount", mount)  # noqa: B010  # mypy forbids =


def _zeros() -> None:
    """A read of which only a part succeeds, so the name that the probe looks up is not found."""

    def look_up(
        path: str | bytes | int, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> os.stat_result:
        try:
            return real_stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        except OSError as error:
            if path == b"\xff" * 255 and error.errno == errno.EIO:
                raise FileNotFoundError(path) from error
            raise

    setattr(os, "stat", look_up)  # noqa: B010


def _no_erofs() -> None:
    def mount(kind: str, options: Sequence[tuple[str, str]], attributes: int) -> int:
        if kind == "erofs":
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return new_mount(kind, options, attributes)

    setattr(syscalls, "new_mount", mount)  # noqa: B010


def _no_loop_devices() -> None:
    def control(file: int, request: int, argument: bytes | int = 0) -> bytes | int:
        if request == 0x4C82:  # LOOP_CTL_GET_FREE
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_ioctl(file, request, argument)

    setattr(fcntl, "ioctl", control)  # noqa: B010


def _no_mounts_beneath() -> None:
    """No mount can be put beneath another (before Linux 6.5)."""

    def attach(mount: int, path: str, *, folder: int = AT_FDCWD, beneath: bool = False) -> None:
        if beneath:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        attach_mount(mount, path, folder=folder)

    setattr(syscalls, "attach_mount", attach)  # noqa: B010


def _detached_mounts_are_alone() -> None:
    """A mount that is attached nowhere can be neither copied nor mounted in (before 6.15)."""
    attached: set[int] = set()

    def attach(mount: int, path: str, *, folder: int = AT_FDCWD, beneath: bool = False) -> None:
        if folder not in {AT_FDCWD, *attached}:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        attach_mount(mount, path, folder=folder, beneath=beneath)
        attached.add(mount)

    def copy(mount: int) -> int:
        if mount not in attached:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        attached.remove(mount)  # the caller detaches it again
        return copy_mount(mount)

    setattr(syscalls, "attach_mount", attach)  # noqa: B010
    setattr(syscalls, "copy_mount", copy)  # noqa: B010


_KINDS: dict[str, Callable[[], None]] = {
    "no-file-mounts": _no_file_mounts,
    "zeros": _zeros,
    "no-erofs": _no_erofs,
    "no-loop-devices": _no_loop_devices,
    "no-mounts-beneath": _no_mounts_beneath,
    "detached-mounts-are-alone": _detached_mounts_are_alone,
}
