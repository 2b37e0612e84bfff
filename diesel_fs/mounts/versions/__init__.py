"""Mounts that follow their dataset (`--follow`): how they find a newer version and switch to it.

`watcher.py` finds the newer version and runs the switch. `versioned_vfs.py` is the file system over
several versions, and `switching.py` says what there is to do. There are two ways to do it:

- In a FUSE mount (`fuse_switch.py`) all versions share one set of nodes (`following.py`), and
  `invalidation.py` tells the kernel which names to look up again.
- A native mount (`native_switch.py`) gets another tree.

`leases.py` keeps a purge from removing the chunks of versions that are still read.

After a switch names lead to the new version, and files that are open keep the old one.
"""
