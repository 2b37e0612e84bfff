"""The launcher's side of `dlcmd run`: turns messages of training processes into plans for mounts.

`PlanServer` listens on a socket for the hooks in the processes of a training command
(`../hook/`). They send the files of a dataset, the order in which a sampler will give them, and the
progress of the loop. `file_tables.py` finds the entries of these files in the snapshots of mounts,
`observing.py` compares them with the files that samples open, `announcing.py` announces the orders
to the mounts, and `summary.py` collects the messages for the user. All slow work is done here,
beside the training processes. `server.py` describes the threads.
"""

from .server import PlanServer
from .summary import Interval, LoopTimes, Summary

__all__ = ["Interval", "LoopTimes", "PlanServer", "Summary"]
