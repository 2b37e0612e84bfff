"""The mount: a dataset as a read-only folder. SEMANTICS.md says what each operation does.

What is exported here is for programs and imports neither FUSE, trio nor numpy. The daemon that
`mount` starts is `daemon.py`; the sessions speak FUSE for a `Vfs` that knows none. `mounted.py` is
the same for Python.
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
