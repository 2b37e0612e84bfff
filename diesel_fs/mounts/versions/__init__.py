"""Mounts that follow their dataset (`--follow`): how they find a newer version and switch to it.

`watcher.py` finds the newer version and runs the switch. `versioned_vfs.py` is the file system over
several versions, and `switching.py` the interface of a switch. There are two kinds:

- In a FUSE mount (`fuse_switch.py`) all versions share one set of nodes (`following.py`), and
  `invalidation.py` makes the kernel look up changed names again.
- A native mount (`native_switch.py`) gets another tree.

`leases.py` keeps a purge from removing the chunks of versions that are still read.
"""
