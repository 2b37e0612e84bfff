"""Circuit breakers: they stop requests to a service that fails, and decide when to try again.

A breaker is *closed* while the service answers. Several failures in a row *open* it: for a pause,
no request is sent. Then it is *half open*: one request at a time may try, and its outcome closes
the breaker or opens it for a longer pause.

`admit` gives each caller a ticket, to be returned with the outcome. Outcomes with a ticket from
before the breaker last opened or closed are ignored, so requests that failed together count as one
failure. Times are arguments, in seconds of any one clock. There is no lock: if several threads call
one breaker at once, a failure may not be counted.
"""

from enum import Enum

FAILURES_MAX = 3
"""Failures in a row after which a peer gets no requests."""
PAUSE_S, PAUSE_MAX_S = 1.0, 16.0
"""The first and the longest pause for a peer."""

DAMAGED_MAX = 3
"""Damaged parts after which a peer gets no requests for `QUARANTINE_S`."""
QUARANTINE_S = 60.0

TIMEOUT_MIN_S = 0.05
"""The shortest time-out. On a busy machine, a process may not run for this long, so a shorter
time-out would count failures of healthy peers."""

TIMEOUT_MAX_S = 1.0
"""The longest time-out, without the time for the bytes in flight."""
TIMEOUT_PER_P95 = 4
"""The time-out is this many times the 95th percentile of the peer's latencies."""
RATE_MIN_BYTES_PER_S = 8 << 20
"""A peer must be at least this fast: below it, the object store is faster."""

_SAMPLES = 128
_SAMPLES_PER_UPDATE = 16  # finding the percentile takes some microseconds
_SMALL_BYTES = 256 << 10  # the time of larger answers depends on the network more than on the peer


class BreakerState(Enum):
    """The states of a breaker; statistics show the values."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"
    QUARANTINED = "quarantined"


class CircuitBreaker:
    """Guards a disk, a metadata store, or the master of a client's own node."""

    def __init__(self, failures_max: int, pause_s: float, pause_max_s: float | None = None) -> None:
        """Open after `failures_max` failures in a row, first for `pause_s`. Each further pause is
        twice as long, up to `pause_max_s` (None: all are `pause_s`)."""
        self.is_clean = True
        """True while `admit` would return a ticket and `record_success` change nothing. Then
        callers may leave out both calls."""

        self._failures_max = failures_max
        self._first_pause_s = self._pause_s = pause_s
        self._pause_max_s = pause_s if pause_max_s is None else pause_max_s
        self.ticket = 1
        """The ticket that `admit` gives now; never 0."""
        self._failures = 0
        self._open_until_s: float | None = None  # None: closed
        self._is_probing = False

    def state(self, now_s: float) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def is_open(self, now_s: float) -> bool:
        return self._open_until_s is not None and now_s < self._open_until_s

    def admit(self, now_s: float) -> int:
        """Returns a ticket; 0 if no request may be sent now."""
        if self._open_until_s is not None:
            if self._is_probing or now_s < self._open_until_s:
                return 0
            self._is_probing = True
        return self.ticket

    def record_success(self, ticket: int | None = None) -> bool:
        """Note an answer in time. Returns whether this has closed the breaker.

        An outcome without a ticket (from callers of `is_open`) always counts.
        """
        if ticket is not None and ticket != self.ticket:
            return False
        self._failures = 0
        self.is_clean = True
        if self._open_until_s is None:
            return False
        self._set_open_until(None)
        self._pause_s = self._first_pause_s
        return True

    def record_failure(self, ticket: int | None, now_s: float) -> bool:
        """Note a late or missing answer. Returns whether this has opened the breaker."""
        if ticket is not None and ticket != self.ticket:
            return False
        self._failures += 1
        self.is_clean = False
        if self._open_until_s is None and self._failures < self._failures_max:
            return False
        return self.open(now_s)

    def record_refusal(self, ticket: int, now_s: float) -> bool:
        """Open the breaker at once, as the service is unreachable or rejects this process. Returns
        whether the ticket was current."""
        return ticket == self.ticket and self.open(now_s)

    def cancel(self, ticket: int) -> None:
        """Note that the request was given up without an outcome."""
        if ticket == self.ticket:
            self._is_probing = False

    def open(self, now_s: float) -> bool:
        """Open the breaker for the next pause. Always returns True."""
        self._set_open_until(now_s + self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._pause_max_s)
        return True

    def _set_open_until(self, open_until_s: float | None) -> None:
        self.ticket += 1
        self._is_probing = False
        self._failures = 0
        self._open_until_s = open_until_s
        self.is_clean = open_until_s is None


class PeerBreaker(CircuitBreaker):
    """Guards another master of the task. It has a quarantine for damaged bytes, and a time-out that
    follows the peer's usual latency."""

    def __init__(self) -> None:
        super().__init__(FAILURES_MAX, PAUSE_S, PAUSE_MAX_S)
        self._damaged = 0
        self._quarantined_until_s = float("-inf")
        self._samples = [0.0] * _SAMPLES
        self._count = 0
        self._usual_s = TIMEOUT_MAX_S

    def state(self, now_s: float) -> BreakerState:
        if now_s < self._quarantined_until_s:
            return BreakerState.QUARANTINED
        return super().state(now_s)

    def record_damage(self, now_s: float) -> bool:
        """Note a part with a wrong checksum. Returns whether this starts a quarantine: the breaker
        opens for longer, so answers that were under way do not close it."""
        self._damaged += 1
        if self._damaged < DAMAGED_MAX:
            return False
        self._damaged = 0
        self._quarantined_until_s = now_s + QUARANTINE_S
        self._set_open_until(self._quarantined_until_s)
        return True

    def timeout_s(self, size: int) -> float:
        """For an answer while `size` bytes are under way, its own included."""
        return self._usual_s + size / RATE_MIN_BYTES_PER_S

    def record_latency(self, seconds: float, size: int) -> None:
        if size > _SMALL_BYTES:
            return
        self._samples[self._count % _SAMPLES] = seconds
        self._count += 1
        if self._count % _SAMPLES_PER_UPDATE == 0:
            known = sorted(self._samples[: self._count])
            p95 = known[len(known) * 95 // 100]
            self._usual_s = min(max(TIMEOUT_PER_P95 * p95, TIMEOUT_MIN_S), TIMEOUT_MAX_S)
