"""Finds mounts, and the processes that belong to them, from the facts of the operating system.

- `mountpoint.py` finds mounts of datasets, checks and makes folders, and ends mounts. Start here.
- `processes.py` finds the daemon of a mount, the processes that use it, and killed ones that hang.

One rule: nothing here touches a mount itself, since a call to a mount that hangs never returns. The
modules read /proc; if a mount must answer, a child process with a deadline makes the call.
"""
