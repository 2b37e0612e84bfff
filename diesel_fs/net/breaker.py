"""Whether another master is asked at all, and how long its answer is waited for.

Owned here: what failures, refusals and damage of one peer lead to, and how fast it usually is. Not
owned: connections and requests (`peer.py`), what time it is: that is an argument, in seconds of any
one clock. Pure.

Who is let in gets a ticket, and gives it back with what came of it: what was asked before the last
change of mind has no say in the next one.
"""

from enum import Enum

FAILURES_MAX = 3
"""In a row, and the peer is not asked for a while."""

PAUSE_S, PAUSE_MAX_S = 1.0, 16.0
DAMAGED_MAX = 3
QUARANTINE_S = 60.0

TIMEOUT_MIN_S = 0.05
"""As long as a busy machine may not run a process: less would be failures of the scheduler's."""

TIMEOUT_MAX_S = 1.0
TIMEOUT_PER_P95 = 4
RATE_MIN_BYTES_PER_S = 8 << 20
"""What a connection must carry to be worth asking: a store gives more by one read."""

_SAMPLES = 128
_SAMPLES_EACH = 16  # between looks at them, which cost some microseconds
_SMALL_BYTES = 256 << 10  # answers whose time is the peer's, not the network's


class BreakerState(Enum):
    """What happens to who asks."""

    CLOSED = "asked"
    OPEN = "paused"
    HALF_OPEN = "tried"
    QUARANTINED = "quarantined"


class CircuitBreaker:
    """What is thought of one peer."""

    def __init__(self) -> None:
        self._ticket = 1  # of those who are let in now; never 0
        self._failures = 0
        self._pause_s = PAUSE_S
        self._open_until_s: float | None = None  # None: all are let in
        self._probing = False
        self._damaged = 0
        self._quarantined_until_s = float("-inf")
        self._samples = [0.0] * _SAMPLES
        self._count = 0
        self._usual_s = TIMEOUT_MAX_S

    def state(self, now_s: float) -> BreakerState:
        """As it is shown to people."""
        if now_s < self._quarantined_until_s:
            return BreakerState.QUARANTINED
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def admit(self, now_s: float) -> int:
        """A ticket to ask, or 0: read from elsewhere."""
        if now_s < self._quarantined_until_s:
            return 0
        if self._open_until_s is not None:
            if self._probing or now_s < self._open_until_s:
                return 0
            self._probing = True
        return self._ticket

    def record_success(self, ticket: int) -> bool:
        """An answer came in time. Whether this has changed a mind: the peer is asked again."""
        if ticket != self._ticket:
            return False
        self._failures = 0
        if self._open_until_s is None:
            return False
        self._change(None)
        self._pause_s = PAUSE_S
        return True

    def record_failure(self, ticket: int, now_s: float) -> bool:
        """No answer, or a late one. Whether the peer is not asked any more because of it."""
        if ticket != self._ticket:
            return False
        self._failures += 1
        if self._open_until_s is None and self._failures < FAILURES_MAX:
            return False
        return self._pause(now_s)

    def record_refusal(self, ticket: int, now_s: float) -> bool:
        """The peer cannot be reached, or does not want us. Whether that changes anything."""
        return ticket == self._ticket and self._pause(now_s)

    def record_protocol_error(self, now_s: float) -> bool:
        """The peer sent what no peer sends. Whether that changes anything: it does."""
        return self._pause(now_s)

    def cancel(self, ticket: int) -> None:
        """Nothing is known: whoever asked does not want to know any more."""
        if ticket == self._ticket:
            self._probing = False

    def record_damage(self, now_s: float) -> bool:
        """A part that the peer gave did not match its checksum. Whether it is in quarantine now."""
        self._damaged += 1
        if self._damaged < DAMAGED_MAX:
            return False
        self._damaged = 0
        self._quarantined_until_s = now_s + QUARANTINE_S
        return True

    def _pause(self, now_s: float) -> bool:
        self._change(now_s + self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        return True

    def _change(self, open_until_s: float | None) -> None:
        self._ticket += 1
        self._probing = False
        self._failures = 0
        self._open_until_s = open_until_s

    # Patience

    def timeout_s(self, size: int) -> float:
        """How long an answer is waited for, where so many bytes are under way, its own included."""
        return self._usual_s + size / RATE_MIN_BYTES_PER_S

    def record_latency(self, seconds: float, size: int) -> None:
        """An answer of so many bytes took so long, in time or late."""
        if size > _SMALL_BYTES:
            return
        self._samples[self._count % _SAMPLES] = seconds
        self._count += 1
        if self._count % _SAMPLES_EACH == 0:
            known = sorted(self._samples[: self._count])
            p95 = known[len(known) * 95 // 100]
            self._usual_s = min(max(TIMEOUT_PER_P95 * p95, TIMEOUT_MIN_S), TIMEOUT_MAX_S)
