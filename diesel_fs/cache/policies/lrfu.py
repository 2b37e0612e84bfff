"""Decides which chunks (the paper's *blocks*) leave a full cache that several datasets share: LRFU,
as DLCache uses it (section III-C.2), without its costs. Pure.

A *reference* is the start of a job that reads a dataset: training reads all of a dataset, so one
reference counts for each of its blocks. The *CRF* of a block (combined recency and frequency) at
the time t is the sum of F(t - t_i) over its references at the times t_i, with:

    F(x) = (1 / p) ** (step * x)

The block of the least CRF leaves first; among equals the one that has not been read for the longest
time. The paper first takes the one among equals that is cheapest to bring back. In a cache folder
that decides nearly nothing: chunks of one dataset cost the same, and datasets are equal only if
their jobs have started within the same hours (`tests/bench/RESULTS.md` has the figures).

F is exponential, so only the sum at the last reference and the time of that reference are kept. The
sum decays until the next reference, which adds 1; so a kept value is at least 1. Logarithms are
compared, since the values themselves become 0 if the last reference is old.

The caller chooses the unit of times. A cache folder (`disk/`) counts whole hours: jobs that start
within the same hour tie. A node runs a few jobs in a day, so finer times would only measure chance.
With `step` 0 nothing is forgotten, and the number of references decides (LFU). With `step` 1 and a
`p` of 2 or more, if a dataset has at most one reference in each unit of time, the time of the last
reference decides (LRU). Only the product `step * ln(p)` matters; both numbers are kept, as in the
paper.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HOUR_S = 3600.0
"""The unit of times in a cache folder, in seconds."""

Values = npt.NDArray[np.float64]


def hour_of(time_s: float) -> float:
    """The whole hours since 1970."""
    return float(math.floor(time_s / HOUR_S))


@dataclass(frozen=True, slots=True)
class Attenuation:
    """How references lose weight over time. Raises ValueError unless `p` is 1 or more and finite,
    and `step` is between 0 and 1."""

    p: float
    step: float

    def __post_init__(self) -> None:
        if not 1 <= self.p < math.inf:
            raise ValueError(f"p is 1 or more, not {self.p}")
        if not 0 <= self.step <= 1:
            raise ValueError(f"step is from 0 to 1, not {self.step}")

    def add_reference(self, crf: Values, last: Values, now: float) -> Values:
        """Add a reference at the time `now` to `crf`, the values (0 or more) at the last
        references."""
        return 1 + crf * np.exp(-self._decay(last, now))

    def log_crf(self, crf: Values, last: Values, now: float) -> Values:
        """Logarithms at the time `now`. `crf` has the values (at least 1) at the last
        references."""
        return np.log(crf) - self._decay(last, now)

    def _decay(self, last: Values, now: float) -> Values:
        """The fall of the logarithms since `last`. If the clock was set back, a future time counts
        as one equally far in the past: otherwise that block would not age."""
        return self.step * math.log(self.p) * np.abs(now - last)


def eviction_order(log_crf: Values, used: Values) -> npt.NDArray[np.intp]:
    """The blocks, the first to be evicted first. `used` has the times of the last reads."""
    return np.lexsort((used, log_crf))
