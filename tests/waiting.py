"""Waiting, in tests, for something that another thread or process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Return as soon as the condition holds. Fails after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        time.sleep(0.005)
