"""Decides whether a unit (a chunk or a part of one) is worth fetching into a full cache, where it
replaces others: ski rental with a credit account. Pure; for use in one thread.

Such a unit must meet three conditions:

- It is paid for: the single reads that missed it since it was last here have cost as much as
  fetching it. Fetching then costs at most twice the least possible, whatever is read.
- It outweighs the units that it replaces: of late, `READ_ADVANTAGE_MIN` times as much has been read
  of it as of them. In random order each unit is paid for sooner or later, but the cache has equally
  many hits whichever units it holds, and replacing would only cost.
- The account has credit for the fetch, less the price of the read that missed, which the fetch also
  serves. Hits add the time that they save to the account, and misses that are read past the cache
  add `OVERHEAD_FRACTION` of their cost. So all reads and fetches together cost at most
  1 + `OVERHEAD_FRACTION` times as much as the reads alone would have. The credit is limited to the
  cost of renewing the whole cache, which is enough if the reads move to other data altogether.

Costs are in seconds (`ReadCosts.read_s`).
"""

from collections.abc import Callable, Iterable, Sequence

OVERHEAD_FRACTION = 1 / 8
"""How much slower than no cache the cache may be in the worst case. With 0, a cache without hits
would never change."""

READ_ADVANTAGE_MIN = 2.0
GENERATION_PRICES = 2.0
""""Of late" means the current generation and the previous one. A generation ends when its reads
have cost or saved this many times the price of the units that were read in it: about one epoch of
files of 256 KiB. Measured with random reads of a dataset of which half fits, as parts of the time
without a cache: a cache that never changes takes 0.53; these values 0.52 to 0.61, depending on the
size of files; the first condition alone 0.98. When the reads move to other data, half of those are
in the cache after two to four epochs. With 3 and 4 for the two values, reads take 0.51 to 0.57, but
the new half takes five to eight epochs."""

Cost = Callable[[int], float]
"""The seconds that one read of a number of bytes takes."""


class SkiRentalAdmission:
    """Units are numbered from 0. Their reads are kept as the time that they have cost or saved."""

    def __init__(self, sizes: Sequence[int], cost: Cost, cache_bytes: int) -> None:
        self._sizes = sizes
        self._cost = cost
        self._cache_bytes = cache_bytes
        self._missed_s = [0.0] * len(sizes)
        self._recent_s = [0.0] * len(sizes)  # reads in this generation
        self._previous_s = [0.0] * len(sizes)  # in the previous one
        self._reads_s = self._prices_s = 0.0  # sums of this generation
        self._credit_s = 0.0

    def record_miss(self, unit: int, size: int) -> None:
        """Record that a reader wants `size` bytes of a unit that the cache lacks."""
        cost_s = self._cost(size)
        self._missed_s[unit] += cost_s
        self._read(unit, cost_s)

    def record_hits(self, units: Sequence[int], size: int) -> None:
        """Record one read of each of these units, of `size` bytes in all, that the cache served."""
        saved_s = len(units) * self._cost(0) + self._cost(size) - self._cost(0)
        self._add_credit(saved_s)
        each_s, recent_s = saved_s / len(units), self._recent_s
        for unit in units:  # few operations: this runs for each request
            if not recent_s[unit]:
                self._prices_s += self._cost(self._sizes[unit])
            recent_s[unit] += each_s
        self._reads_s += saved_s
        self._age()

    def record_unserved(self, size: int) -> None:
        """Record a miss that was read past the cache."""
        self._add_credit(self._cost(size) * OVERHEAD_FRACTION)

    def is_paid(self, unit: int) -> bool:
        """Whether the misses of a unit have cost as much as its fetch."""
        # A tolerance: sums of the same numbers in another order differ in the last bit
        return self._missed_s[unit] >= self._cost(self._sizes[unit]) * (1 - 1e-9)

    def has_credit(self, unit: int, wanted: int) -> bool:
        """Whether a unit is paid for, and the credit covers its fetch, which also serves the
        current miss of `wanted` bytes."""
        price_s = self._cost(self._sizes[unit]) - self._cost(wanted)
        return self.is_paid(unit) and self._credit_s >= price_s

    def is_worth_more(self, unit: int, others: Iterable[int]) -> bool:
        """Whether a unit outweighs the others together."""
        others_s = sum(self._recent_s[other] + self._previous_s[other] for other in others)
        return self._recent_s[unit] + self._previous_s[unit] >= READ_ADVANTAGE_MIN * others_s

    def charge(self, unit: int, wanted: int) -> None:
        """Pay for the fetch of a unit, which also serves the current miss of `wanted` bytes."""
        self._missed_s[unit] = 0.0
        self._credit_s -= self._cost(self._sizes[unit]) - self._cost(wanted)

    def reset_misses(self, unit: int) -> None:
        self._missed_s[unit] = 0.0

    def switch_version(self, sizes: Sequence[int], before: Sequence[int]) -> None:
        """Take the units of another version of the dataset. `before` has the old number of each
        unit, -1 for a new unit."""
        self._sizes = sizes
        for each in (self._missed_s, self._recent_s, self._previous_s):
            each[:] = [0.0 if old < 0 else each[old] for old in before]

    def _read(self, unit: int, seconds: float) -> None:
        if not self._recent_s[unit]:
            self._prices_s += self._cost(self._sizes[unit])
        self._recent_s[unit] += seconds
        self._reads_s += seconds
        self._age()

    def _age(self) -> None:
        if self._reads_s > GENERATION_PRICES * self._prices_s:
            self._previous_s, self._recent_s = self._recent_s, [0.0] * len(self._sizes)
            self._reads_s = self._prices_s = 0.0

    def _add_credit(self, seconds: float) -> None:
        self._credit_s = min(self._credit_s + seconds, self._cost(self._cache_bytes))
