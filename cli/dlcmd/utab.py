"""Adds mounts to libmount's file `utab`, and takes them out, by calls of libmount itself.

A line there with `helper=diesel` makes umount(8) start `umount.diesel` for a mount.
"""

import ctypes
import os
from contextlib import suppress


def update_utab(source: str | None, mountpoint: str) -> None:
    """Takes the mount out if `source` is None. Does nothing if libmount or its folder is missing:
    the user can still unmount with `umount -R`."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libmount.so.1")
        for name in ("mnt_new_fs", "mnt_new_update"):
            getattr(library, name).restype = ctypes.c_void_p
        target, filesystem = os.fsencode(mountpoint), None
        if source is not None:
            filesystem = ctypes.c_void_p(library.mnt_new_fs())
            library.mnt_fs_set_source(filesystem, source.encode())
            library.mnt_fs_set_target(filesystem, target)
            library.mnt_fs_set_root(filesystem, b"/")
            library.mnt_fs_set_options(filesystem, b"ro,helper=diesel")
        update = ctypes.c_void_p(library.mnt_new_update())
        removed = target if source is None else None
        if library.mnt_update_set_fs(update, ctypes.c_ulong(0), removed, filesystem) == 0:
            library.mnt_update_table(update, None)
        library.mnt_free_update(update)
        if filesystem is not None:
            library.mnt_unref_fs(filesystem)
