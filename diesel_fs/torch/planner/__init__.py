"""The launcher's side of `dlcmd run`: turns messages of training processes into plans for mounts.

`PlanServer` (`server.py` describes its threads) accepts connections of the hooks, the code in the
processes of a training command (`../hook/`). A hook sends the files of a dataset, the order of a
sampler, and the progress of the loop. `file_tables.py` finds the files in the mounts' snapshots,
`observing.py` compares them with the files that samples open, `announcing.py` announces orders to
the mounts, and `summary.py` collects messages for the user. All slow work is done here, so that the
training processes need not wait for it.
"""

from .server import PlanServer
from .summary import Interval, LoopTimes, Summary

__all__ = ["Interval", "LoopTimes", "PlanServer", "Summary"]
