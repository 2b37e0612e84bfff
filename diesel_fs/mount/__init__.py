"""The mount: a dataset as a read-only folder. SEMANTICS.md says what each operation does.

`mount`, `umount` and `stats` are for programs; they import neither FUSE nor trio. The daemon that
they start is `daemon.py`; the sessions speak FUSE for a `Vfs` that knows none.
"""

from .launcher import mount, mount_in_foreground, stats, umount
from .request import MountRequest

__all__ = ["MountRequest", "mount", "mount_in_foreground", "stats", "umount"]
