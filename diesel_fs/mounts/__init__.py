"""Mounts: a dataset as a read-only folder. SEMANTICS.md says what each call does.

In a *native* mount the kernel has the whole tree (EROFS, from an image that `images.py` keeps), and
asks only for contents, in one virtual file (`content_file.py`). In a FUSE mount it also asks for
names.

A mount is three processes. The supervisor (`supervisor.py`) watches over the other two: the server
(`server.py`), which answers the kernel, and the prefetch worker (`prefetch_worker.py`), which puts
contents into the kernel's page cache before they are read.

Read `vfs.py` first (the file system, without FUSE), then `sessions/` (how the kernel asks: native,
kernel, pyfuse3), `server.py`, `prefetch/` (what to push when), `plans/` (what programs say they
will read), `versions/` (mounts that follow their dataset), `waits.py` (what readers wait for),
`launcher.py` (mounting and unmounting), and `warmup.py` (loading what lies at a path).

The folders form layers. Each imports only what stands before it in this line:
attributes, dot_diesel, waits, vfs, options, mountpoint, source < sessions < prefetch < plans <
versions < prefetch_worker, server, supervisor, launcher < warmup.

The names exported here are for programs. Importing them loads neither FUSE, trio nor numpy.
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
