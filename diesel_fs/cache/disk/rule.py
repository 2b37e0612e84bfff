"""The rule by which a process that needs room in a cache's folder evicts chunks. The module imports
no numpy, so that `dlcmd mount` starts fast.
"""

from dataclasses import dataclass

COOL_DOWN_S = 600
"""After a job, a restart or an evaluation often follows within minutes."""

LRFU_P, LRFU_STEP = 2.0, 1 / 24
"""These halve a reference within a day, as times are hours. A dataset that is used each day then
counts about two references, and one that was used often counts little after a week. In a simulation
of DLCache's experiment (`tests/bench/experiments/lrfu.py`), jobs waited least with a step from 0 to
1/24; 0 would never forget."""


@dataclass(frozen=True, slots=True)
class EvictionRule:
    cool_down_s: float = COOL_DOWN_S
    """Chunks of a dataset may be evicted if no job uses it and nobody has used it for this time."""
    by_references: bool = False
    """Evict by LRFU (`policies/lrfu.py`), not the longest unread chunks first."""
    lrfu_p: float = LRFU_P
    lrfu_step: float = LRFU_STEP


LONGEST_UNREAD = EvictionRule()
