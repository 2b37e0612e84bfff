"""What the operating system knows of mounts: where they are, and which processes belong to them.

- `mountpoint.py` finds mounts of datasets, checks and makes folders, and ends mounts. Start here.
- `processes.py` finds the daemon of a mount, the processes that use it, and killed ones that hang.

One rule: nothing here touches a mount itself, since a mount that hangs would never let go. It reads
/proc, and asks a mount only in a child process with a deadline.
"""
