"""Rent, then buy: when a chunk that makes others go is worth being fetched.

Owned here: what reads of each chunk have cost or saved, and the account that says whether fetching
has paid so far. Not owned: what a read costs (`read_through.py`), what is fetched and what goes.
One thread. Pure.

A chunk that makes others go has to meet three conditions:

- It is paid for: the single reads that it was missed for since it was last here have cost as much
  as fetching it. Then fetching costs at most twice what was needed, whatever comes.
- It outweighs those that go: of late, `READ_ADVANTAGE_MIN` times as much has been read of it as of
  them. Of chunks that are read alike, as in random order, each pays for itself in time; but
  whichever are here, the hits are the same, and changing them would cost what they save.
- The account has what it costs beyond the read that it serves. Into it goes what hits save, and
  `OVERHEAD_FRACTION` of what misses cost. So whatever comes, all reads and fetches for which
  something went cost no more than the reads alone would have, and `OVERHEAD_FRACTION` of that. The
  account holds no more than renewing the whole cache costs: enough where what is wanted changes
  altogether.
"""

from collections.abc import Callable, Iterable, Sequence

OVERHEAD_FRACTION = 1 / 8
"""How much slower than without a cache it may be, at worst. Without it a cache that is never hit
would never change."""

READ_ADVANTAGE_MIN = 2.0
GENERATION_PRICES = 2.0
"""Of late is this generation and the one before. One ends when the reads of the chunks that were
wanted in it have cost or saved so often what fetching these chunks costs: an epoch of files of
256 KiB. Where half of what is read in random order fits, which would cost 0.53 of what it does
without a cache if nothing ever changed, it costs 0.52 to 0.61 with these, as files are smaller or
larger, and 0.98 where paying is enough; and where what is read changes altogether, a new half is
here after two to four epochs. With 3 and 4, 0.51 to 0.57, and after five to eight."""

Cost = Callable[[int], float]
"""Seconds for one read of so many bytes."""


class SkiRentalAdmission:
    """What units of these sizes have cost, and the account of all."""

    def __init__(self, sizes: Sequence[int], cost: Cost, cache_bytes: int) -> None:
        """Of a cache of `cache_bytes`."""
        self._sizes = sizes
        self._cost = cost
        self._cache_bytes = cache_bytes
        self._missed_s = [0.0] * len(sizes)
        self._recent_s = [0.0] * len(sizes)  # of reads in this generation
        self._previous_s = [0.0] * len(sizes)  # in the one before
        self._reads_s = self._prices_s = 0.0  # of this generation
        self._credit_s = 0.0

    def record_miss(self, unit: int, size: int) -> None:
        """Somebody asked for so many bytes of a unit that is not here."""
        cost_s = self._cost(size)
        self._missed_s[unit] += cost_s
        self._read(unit, cost_s)

    def record_hits(self, units: Sequence[int], size: int) -> None:
        """These have been read, so many bytes in all, and were here."""
        saved_s = len(units) * self._cost(0) + self._cost(size) - self._cost(0)
        self._add_credit(saved_s)
        each_s, lately_s = saved_s / len(units), self._recent_s
        for unit in units:  # in a few lines: it is in the way of each request
            if not lately_s[unit]:
                self._prices_s += self._cost(self._sizes[unit])
            lately_s[unit] += each_s
        self._reads_s += saved_s
        self._age()

    def record_unserved(self, size: int) -> None:
        """A miss was not served: it cost a read."""
        self._add_credit(self._cost(size) * OVERHEAD_FRACTION)

    def has_credit(self, unit: int, wanted: int) -> bool:
        """Whether a unit is paid for by its misses, of which the last, for `wanted` bytes, would be
        served; and the account has the rest."""
        price_s = self._cost(self._sizes[unit])
        # A hair's breadth: sums of the same numbers in another order differ in the last bit
        return self._missed_s[unit] >= price_s * (
            1 - 1e-9
        ) and self._credit_s >= price_s - self._cost(wanted)

    def is_worth_more(self, unit: int, others: Iterable[int]) -> bool:
        """Whether so much more has been read of it than of the others that they may go."""
        theirs_s = sum(self._recent_s[other] + self._previous_s[other] for other in others)
        return self._recent_s[unit] + self._previous_s[unit] >= READ_ADVANTAGE_MIN * theirs_s

    def charge(self, unit: int, wanted: int) -> None:
        """It is being fetched, and has made others go."""
        self._missed_s[unit] = 0.0
        self._credit_s -= self._cost(self._sizes[unit]) - self._cost(wanted)

    def reset_misses(self, unit: int) -> None:
        """It is here, however it came."""
        self._missed_s[unit] = 0.0

    def switch_version(self, sizes: Sequence[int], before: Sequence[int]) -> None:
        """Other units: the numbers that they had before, -1 for new ones."""
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
