"""Limits how fast a daemon logs: otherwise a store that fails all night could fill the disk."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LINES_AT_ONCE = 20
"""Lines of one kind (one place in the code) that may come at once, so that a few bad files are all
named."""

LINES_PER_S = 1.0
"""Further lines of one kind per second."""

SAME_S = 1.0
"""The least time between two lines of one kind and subject (`extra={"subject": ...}`, such as a
file), so that one subject leaves room for others."""

_SUBJECTS_MAX = 1024


@dataclass(slots=True)
class _Kind:
    last_line_s: float
    allowance: float = LINES_AT_ONCE
    left_out: int = 0
    subjects: dict[str, float] = field(default_factory=dict)


class LogRateLimit(logging.Filter):
    """Drops lines of one kind that come too fast. The next line has the number of dropped ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            now = self._clock()
            kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind(now))
            gained = (now - kind.last_line_s) * LINES_PER_S
            kind.allowance = min(LINES_AT_ONCE, kind.allowance + gained)
            kind.last_line_s = now
            subject = str(getattr(record, "subject", ""))
            if kind.allowance < 1 or now - kind.subjects.get(subject, -math.inf) < SAME_S:
                kind.left_out += 1
                return False
            kind.allowance -= 1
            if subject:
                if len(kind.subjects) >= _SUBJECTS_MAX:
                    kind.subjects.clear()
                kind.subjects[subject] = now
            if kind.left_out:
                record.msg = f"{record.msg} ({kind.left_out} more like this left out)"
                kind.left_out = 0
            return True
