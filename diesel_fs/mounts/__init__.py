"""Mounts: a dataset as a read-only folder. SEMANTICS.md says what each call does.

In a *native* mount the kernel has the whole tree (EROFS, from an image that `tree/images.py`
keeps), and requests only contents, from one virtual file (`tree/content_file.py`). In a FUSE mount
the kernel also requests names.

Read `tree/vfs.py` first (the file system, without FUSE), then `sessions/` (which answer the
kernel), `daemon/` (the three processes of a mount), `prefetch/` (when contents go into the kernel's
page cache), `plans/` (orders that programs announce), `versions/` (mounts that follow their
dataset), `launcher.py` (mounting and unmounting) and `warmup.py` (loading the files below a path).

The folders and modules form layers. In this line, each imports only names to the left of its own
group: statistics, mountpoints, options < tree < source, sessions < prefetch < plans < launcher,
versions < daemon, warmup, mounted.

Importing the names that are exported here loads neither FUSE, trio nor numpy.
"""

from .launcher import filelist, mount, mount_in_foreground, stats, umount
from .options import MountRequest

__all__ = [
    "MountRequest",
    "filelist",
    "mount",
    "mount_in_foreground",
    "stats",
    "umount",
]
