"""Learns how much longer than predicted the pushes of one stream take.

`../balance.py` predicts the cost of a unit from the place of its contents, and corrects it by this.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LATE_WEIGHT = 0.3
"""The weight of a push that took longer than predicted: three make most of the lateness."""
LATE_DECAY = 0.95
"""A push with contents in time lessens the lateness by this factor: nobody knows how early they
were."""


@dataclass(slots=True)
class Lateness:
    """The lateness of one stream."""

    s_per_byte: float = 0.0

    def note(self, predicted_s: float, least_s: float, most_s: float, size: int) -> None:
        """Note a push of `size` bytes. Their read was predicted to take `predicted_s`, and has
        taken between `least_s` and `most_s`."""
        believed_s = predicted_s + self.s_per_byte * size
        taken_s = min(max(believed_s, least_s), most_s)
        if taken_s == believed_s:
            self.s_per_byte *= LATE_DECAY
        else:
            late_s_per_byte = (taken_s - predicted_s) / size
            self.s_per_byte += LATE_WEIGHT * (late_s_per_byte - self.s_per_byte)

    def added_to(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Costs with the lateness in their transfers. `costs` has a row for each unit: latency,
        transfer (both in seconds) and bytes."""
        if not self.s_per_byte:
            return costs
        costs = costs.copy()
        costs[:, 1] = np.maximum(costs[:, 1] + self.s_per_byte * costs[:, 2], 0.0)
        return costs
