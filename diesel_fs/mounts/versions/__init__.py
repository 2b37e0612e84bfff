"""Mounts that follow their dataset (`--follow`): how they find a newer version and switch to it.

`watcher.py` finds the newer version and runs the switch; `following.py` is the file system over
several versions; `invalidation.py` tells the kernel which names to look up again; `leases.py` keeps
a purge from removing the chunks of versions that are still read. Read them in this order.

After a switch names lead to the new version, and files that are open keep the old one.
"""
