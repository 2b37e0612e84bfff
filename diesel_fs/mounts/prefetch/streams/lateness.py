"""Learns how much longer than predicted the pushes of one stream take.

`../balance.py` predicts the cost of a unit from the place of its contents, and adds the lateness of
its stream.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LATE_WEIGHT = 0.3
"""The weight of a push that took another time than predicted: the last three such pushes make most
of the lateness."""
LATE_DECAY = 0.95
"""Applied if a push took the predicted time: the contents may have come earlier, which cannot be
seen."""


@dataclass(slots=True)
class Lateness:
    """Seconds that each byte takes longer than predicted; negative if contents come earlier."""

    s_per_byte: float = 0.0

    def note(self, predicted_s: float, least_s: float, most_s: float, size: int) -> None:
        """Note a push of `size` bytes: the predicted time of its read, and limits of the true
        time."""
        believed_s = predicted_s + self.s_per_byte * size
        taken_s = min(max(believed_s, least_s), most_s)
        if taken_s == believed_s:
            self.s_per_byte *= LATE_DECAY
        else:
            late_s_per_byte = (taken_s - predicted_s) / size
            self.s_per_byte += LATE_WEIGHT * (late_s_per_byte - self.s_per_byte)

    def added_to(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Add the lateness to the transfers. `costs` has a row for each unit: latency, transfer
        (both in seconds) and bytes."""
        if not self.s_per_byte:
            return costs
        costs = costs.copy()
        costs[:, 1] = np.maximum(costs[:, 1] + self.s_per_byte * costs[:, 2], 0.0)
        return costs
