"""Finds the smallest cache with which a job does not stall, in at most six simulations. Pure.

It searches by bisection, on the assumption that a larger cache is no worse. A single pass over the
distances between uses (Mattson et al., 1970) would need the inclusion property: a larger cache
holds all that a smaller one holds. The caches here lack it: they fetch whole chunks, and ski rental
or the count of uses decides on replacements.
"""

from collections.abc import Callable
from dataclasses import replace

from .nodes import ForecastJob
from .simulate import Forecast

STALL_PART_MAX = 0.01
"""A job has no stalls if waiting makes its last epoch longer by at most this fraction."""

RUNS_MAX = 6


def stalls(forecast: Forecast) -> bool:
    later = forecast.later
    return later.seconds > later.compute_s * (1 + STALL_PART_MAX)


def smallest_disk(
    job: ForecastJob, data_bytes: int, run: Callable[[ForecastJob], Forecast]
) -> int | None:
    """The bytes of SSD that each node needs, or None if the job stalls even with the whole dataset
    on the SSDs, since something else is too slow.

    The result is a multiple of about a 31st of the node's share of `data_bytes` (plus an eighth).
    """
    part = -(-data_bytes // job.nodes)
    # Chunks are larger than their files, and shares of nodes differ by up to 8 %
    whole = part + part // 8

    def is_enough(size: int) -> bool:
        return not stalls(run(replace(job, node=replace(job.node, disk_bytes=size))))

    if not is_enough(whole):
        return None
    low, high = 0, (1 << (RUNS_MAX - 1)) - 1  # in parts of `whole`; `high` is enough
    steps = high
    while low < high:
        middle = (low + high) // 2
        if is_enough(whole * middle // steps):
            high = middle
        else:
            low = middle + 1
    return whole * high // steps
