"""FUSE sessions: each connects a `Vfs`, which knows no FUSE, to the kernel at one mount point.

`session.py` is their interface. The best session is `native.py`: the kernel itself serves the tree
(`native_tree.py`), and the session only delivers contents. It builds on `kernel.py`, which speaks
the FUSE protocol (`protocol.py`) on /dev/fuse itself, and also works for users without the right to
mount. `pyfuse3.py` goes through libfuse, and is the fallback. `readdir_replies.py` makes replies to
READDIRPLUS. `worker_side.py` is what all sessions do for the prefetch worker, and `push_status.py`
the memory that they share with it.

Sessions import the file system (`tree/vfs.py`), but not prefetching, plans or versions.
"""
