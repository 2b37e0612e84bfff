"""A disk that fails rests for a while, and is tried again.

Owned here: when it is left alone, and what the log says of that: one line when it begins, one when
the disk works again. Not owned: what is done meanwhile (`cache/disk.py`). Any thread; where two
tell of failures at once, one of them may not be counted.
"""

import logging
import time

log = logging.getLogger("diesel.cache")

OPEN_S = 30.0
"""How long a disk that failed is left alone."""

_FAILURES_MAX = 3  # in a row; one file may be damaged where the disk is not


class CircuitBreaker:
    """Whether the disk of a cache can be used, for reading or for writing."""

    def __init__(self, place: str, doing: str) -> None:
        """`doing`, for the log: what cannot be done with the cache in `place`."""
        self._place, self._doing = place, doing
        self._until = 0.0
        self._failures = 0
        self._said = False

    @property
    def is_open(self) -> bool:
        """Whether it is left alone now."""
        return time.monotonic() < self._until

    def succeeded(self) -> None:
        """What was tried has been done."""
        self._failures = 0
        if self._said:
            self._said = False
            log.warning("the cache in %s works again", self._place)

    def failed(self, error: OSError) -> None:
        """What was tried has failed."""
        self._failures += 1
        if self._failures < _FAILURES_MAX:
            return
        self._until = time.monotonic() + OPEN_S
        if not self._said:
            self._said = True
            log.warning(
                "cannot %s the cache in %s (%s): it is passed by, and tried again every %.0f s",
                self._doing, self._place, error.strerror, OPEN_S,
            )  # fmt: skip
