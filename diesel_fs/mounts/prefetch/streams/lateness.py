"""Learns how much longer than predicted the pushes of one stream take.

`../balance.py` predicts the cost of a unit from the place of its contents, and adds the lateness of
its stream.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LATE_DECAY = 0.95
"""A factor for the lateness if a push took the predicted time: the contents may have come earlier,
which cannot be seen."""


@dataclass(slots=True)
class Lateness:
    """`s_per_byte`: seconds that each byte takes longer than predicted; negative if contents come
    earlier. It is the median of the last three pushes that took another time than predicted, since
    a single one may have waited for the reads of other streams or a busy machine."""

    _last: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def s_per_byte(self) -> float:
        return sorted(self._last)[1]

    def note(self, predicted_s: float, least_s: float, most_s: float, size: int) -> None:
        """Note a push of `size` bytes: the predicted time of its read, and limits of the true
        time."""
        believed_s = predicted_s + self.s_per_byte * size
        taken_s = min(max(believed_s, least_s), most_s)
        first, second, third = self._last
        if taken_s == believed_s:
            self._last = first * LATE_DECAY, second * LATE_DECAY, third * LATE_DECAY
        else:
            self._last = second, third, (taken_s - predicted_s) / size

    def added_to(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Add the lateness to the transfers. `costs` has a row for each unit: latency, transfer
        (both in seconds) and bytes."""
        s_per_byte = self.s_per_byte
        if not s_per_byte:
            return costs
        costs = costs.copy()
        costs[:, 1] = np.maximum(costs[:, 1] + s_per_byte * costs[:, 2], 0.0)
        return costs
