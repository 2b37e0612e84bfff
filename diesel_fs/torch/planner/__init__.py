"""The launcher's side of `dlcmd run`: turns what training processes say into plans for mounts.

`PlanServer` listens on a socket for the hooks in the processes of a training command
(`../hook/`). They say which files a dataset has, in which order a sampler will give them, and how
far the loop is. `file_tables.py` finds the entries of these files in the snapshots of mounts,
`observing.py` compares them with what the samples open, `announcing.py` announces the orders to the
mounts, and `summary.py` keeps what the user is told. All work that takes time is done here, beside
the training processes.
"""

from .server import PlanServer
from .summary import Interval, LoopTimes, Summary

__all__ = ["Interval", "LoopTimes", "PlanServer", "Summary"]
