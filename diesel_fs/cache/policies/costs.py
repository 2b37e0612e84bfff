"""The time that reads take: the model by which all readers choose between ways of reading. Pure.

A read from one place (the object store, a node of a task, a disk) takes a latency, and a time for
each byte. This is Lobster's model (section 4.3, equation 1); reads that are under way at once are
taken to have the throughput of one read each.
"""

_READS_AVERAGED = 8

SLOW_READ_S = 0.003
"""If the reads of a place take longer, readers request several parts at once, in threads. From a
faster place they read one after the other: 4 MiB from the page cache take 1 ms, and taking turns
with other threads would cost more."""

LATENCY_S_MAX = 1.0
"""The greatest latency that is fitted. A longer one is an outage, which does not predict the next
read."""

_GAP_MIN, _GAP_MAX = 4 << 10, 4 << 20
_S_PER_BYTE_MIN = 1e-12


class ReadCosts:
    """The latency of one place, in seconds, and the seconds for each byte.

    Both are fitted to the last reads by least squares. If all of those had the same size, latency
    and transfer cannot be told apart; then the one that was larger before takes up a change.
    Several threads may call `observe` at once; then a sample may be lost.
    """

    # Nothing is fitted before the reads weigh `_WEIGHT_MIN`. Each read multiplies the weights of
    # earlier ones by `_DECAY`. Sizes count as equal below `_SPREAD_MIN` (variance / mean square).
    _WEIGHT_MIN, _DECAY, _SPREAD_MIN = 3.5, 1 - 1 / 32, 0.01

    def __init__(self, latency_s: float = 0.005, s_per_byte: float = 1e-8) -> None:
        self.latency_s = latency_s
        self.s_per_byte = s_per_byte
        self._at_once = 1.0
        self._mean_s = 0.0
        # Sums over the reads. Sizes are in megabytes: the squares of bytes would lose digits.
        self._weight = self._sizes = self._times = self._squares = self._products = 0.0

    def observe(self, size: int, seconds: float, at_once: int = 1) -> None:
        """`at_once`: the number of reads that were under way, with this one."""
        megabytes, keep = size / 1e6, self._DECAY
        self._mean_s += (seconds - self._mean_s) / (_READS_AVERAGED if self._mean_s else 1)
        self._at_once += (at_once - self._at_once) / _READS_AVERAGED
        self._weight = weight = keep * self._weight + 1
        self._sizes = sizes = keep * self._sizes + megabytes
        self._times = times = keep * self._times + seconds
        self._squares = squares = keep * self._squares + megabytes * megabytes
        self._products = products = keep * self._products + megabytes * seconds
        if weight < self._WEIGHT_MIN:
            return
        mean_size, mean_s = sizes / weight, times / weight  # in megabytes, and seconds
        spread = weight * squares - sizes * sizes
        if spread > self._SPREAD_MIN * weight * squares:
            slope = (weight * products - sizes * times) / spread
            slope = min(max(slope, 0.0), times / sizes)
            latency_s = mean_s - slope * mean_size
        elif self.latency_s >= self.s_per_byte * mean_size * 1e6:
            slope = min(self.s_per_byte * 1e6, mean_s / mean_size if mean_size else 0.0)
            latency_s = mean_s - slope * mean_size
        else:
            latency_s = min(self.latency_s, mean_s)
            slope = (mean_s - latency_s) / mean_size
        self.latency_s = min(max(latency_s, 0.0), LATENCY_S_MAX)
        self.s_per_byte = slope / 1e6

    @property
    def is_slow(self) -> bool:
        """Whether several reads at once are faster than one after the other. True before the first
        read."""
        return self._mean_s > SLOW_READ_S or not self._mean_s

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that take as long to read as another request."""
        gap = self.latency_s / max(self.s_per_byte, _S_PER_BYTE_MIN)
        return int(min(max(gap, _GAP_MIN), _GAP_MAX))

    def read_s(self, size: int) -> float:
        return self.latency_s + self.s_per_byte * size

    def cost(self, size: int, span_bytes: int) -> tuple[float, float]:
        """Seconds for `size` bytes in spans of at most `span_bytes`, as many at once as of late:
        latency and transfer."""
        if not size:
            return 0.0, 0.0
        alone_s = self.read_s(min(size, span_bytes))
        transfer_s = self.s_per_byte * size / self._at_once
        return max(alone_s - transfer_s, 0.0), transfer_s
