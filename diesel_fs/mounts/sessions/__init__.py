"""FUSE sessions: each connects a `Vfs`, which knows no FUSE, to the kernel at one mount point.

`session.py` is their interface. `native.py` is the best: users see a tree of the kernel's own
(`native_tree.py`), and the session only delivers contents. It is a `kernel.py`, which speaks the
FUSE protocol (`protocol.py`) on /dev/fuse itself, and is for users who may not mount. `pyfuse3.py`
goes through libfuse, and is the fallback. The same tests run over all three. `readdir_replies.py`
makes replies to READDIRPLUS; `push_status.py` is memory that the server shares with the prefetch
worker.

Sessions import the file system (`tree/vfs.py`), but not prefetching, plans or versions.
"""
