"""Decides how many worker processes a data loader needs, from measurements.

`WorkerController` follows DLCache, section III-E (algorithm 2): it chooses just enough workers that
a batch is ready whenever the loop requests one (time to fetch a batch / time between two requests),
within the limits of cores and memory. DLCache takes the time to fetch a batch as independent of the
number of workers. But workers share cores and bandwidth, so here this time comes from a model as in
Lobster (ICPP 2022), section 4.1: for each size of samples, a piece-wise linear function of the
number of workers gives the time for one sample. A size without measurements uses the function of
the nearest size. If no number of workers suffices, the controller chooses the smallest number that
nearly reaches the highest rate.

A measurement moves the whole function of its size up or down, since changes over time (for example,
a cache gets warm) affect all numbers of workers. Pure: no clock and no I/O.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

HEADROOM = 0.1
"""Workers must be faster than the loop by this fraction: with a loader that is just fast enough,
the loop waits at each slow batch."""

SHRINK_HEADROOM = 0.25
"""The same for fewer workers than now. It is larger, so that noise does not change the number."""

NEARLY = 0.95
"""The fraction of the highest rate that counts as nearly reaching it."""

SMOOTHING = 0.5
"""The newest measurement's share; the earlier value has the rest."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Averages over some batches; times in seconds."""

    workers: int
    """The number of workers that prepared the batches."""
    fetch_s: float
    """The time that one worker needs for a batch: reading, decoding, transforming, collating."""
    request_s: float
    """The loop's own time: from a batch to its next request."""
    batch_samples: float
    sample_bytes: float = 0
    """The mean size of a sample's file; 0 if it is not known."""
    worker_bytes: float = 0
    """The memory of one worker, with the batches that it has prepared."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    workers_max: int
    memory_bytes: int
    """For all workers together."""


class Controller(Protocol):
    """Decides on the number of workers of an `AutoDataLoader`."""

    def decide(self, measured: Measured) -> int:
        """The number of workers from now on. Called every `tune_every` batches, in the loop's
        thread."""


@dataclass(slots=True)
class FetchModel:
    """Predicts the time to fetch one sample from the number of workers (see the module)."""

    _curves: dict[int, dict[int, float]] = field(default_factory=dict)
    """Seconds for one sample, by size class (a power of 2), then by number of workers."""

    def learn(self, sample_bytes: float, workers: int, sample_s: float) -> None:
        """Enter a measurement: with `workers` workers, each took `sample_s` for a sample."""
        curve = self._curves.setdefault(_size_class(sample_bytes), {})
        fewer = max((each for each in curve if each < workers), default=None)
        more = min((each for each in curve if each > workers), default=None)
        level = 1.0
        if workers in curve:
            known = curve[workers]
            sample_s = SMOOTHING * sample_s + (1 - SMOOTHING) * known
            level = sample_s / known if known else 1.0
        # More workers never make a sample faster. If it seems so, times have changed meanwhile.
        elif fewer is not None and sample_s < curve[fewer]:
            level = sample_s / curve[fewer]
        elif more is not None and sample_s > curve[more] > 0:
            level = sample_s / curve[more]
        for each in curve:
            curve[each] *= level
        curve[workers] = sample_s

    def measured_below(self, sample_bytes: float, workers: int) -> int:
        """The greatest number of workers below `workers` that was measured for this size, or 0."""
        curve = self._curves.get(_size_class(sample_bytes), {})
        return max((each for each in curve if each < workers), default=0)

    def predict(self, sample_bytes: float, workers: int) -> float:
        """The seconds that each of `workers` workers takes for a sample; 0 if nothing was measured.

        Between two measured numbers of workers the result is interpolated. Below all of them it is
        constant; above them it continues the line through the last two, but never falls.
        """
        if not self._curves:
            return 0.0
        wanted = _size_class(sample_bytes)
        curve = self._curves[min(self._curves, key=lambda size: (abs(size - wanted), size))]
        known = sorted(curve)
        at = bisect_left(known, workers)
        if at == 0:
            return curve[known[0]]
        if at < len(known):
            return _on_line(curve, known[at - 1], known[at], workers)
        last = curve[known[-1]]
        if len(known) == 1:
            return last
        return max(_on_line(curve, known[-2], known[-1], workers), last)


class WorkerController:
    """The default `Controller` (see the module)."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.model = FetchModel()

    def decide(self, measured: Measured) -> int:
        samples = max(measured.batch_samples, 1.0)
        self.model.learn(measured.sample_bytes, measured.workers, measured.fetch_s / samples)
        current = max(measured.workers, 1)
        rates: dict[int, float] = {}  # batches per second, by number of workers
        for workers in range(1, self._most(measured) + 1):
            batch_s = samples * self.model.predict(measured.sample_bytes, workers)
            if batch_s <= 0:
                return workers
            rates[workers] = workers / batch_s
            headroom = SHRINK_HEADROOM if workers < current else HEADROOM
            if rates[workers] * measured.request_s * (1 - headroom) >= 1:
                return workers
        return self._fastest(measured, rates)

    def _fastest(self, measured: Measured, rates: dict[int, float]) -> int:
        """The smallest number of workers that has nearly the highest of `rates`. Between two
        measured numbers the model is a straight line, which predicts badly if workers disturb each
        other: in that case returns the middle of the two, so that it is measured."""
        best = max(rates.values())
        found = next(each for each, rate in rates.items() if rate >= NEARLY * best)
        below = self.model.measured_below(measured.sample_bytes, found)
        if found != measured.workers or below < 1 or found - below < 2:
            return found
        is_disturbed = rates[found] / rates[below] < NEARLY * found / below
        return (found + below) // 2 if is_disturbed else found

    def _most(self, measured: Measured) -> int:
        """The greatest number of workers within the limits (algorithm 2, lines 2 to 6)."""
        most = max(self.limits.workers_max, 1)
        if most * measured.worker_bytes > self.limits.memory_bytes:
            most = int(self.limits.memory_bytes / measured.worker_bytes)
        return max(most, 1)


def _size_class(sample_bytes: float) -> int:
    return int(sample_bytes).bit_length()


def _on_line(curve: dict[int, float], left: int, right: int, at: int) -> float:
    slope = (curve[right] - curve[left]) / (right - left)
    return curve[left] + slope * (at - left)
