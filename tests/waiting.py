"""Waits for the effect of another process, thread or task in tests."""

import time
from collections.abc import Awaitable, Callable

import trio

PATIENCE_S = 60.0
"""The limit of a wait; even on a busy machine the wait is far shorter."""


def wait_until(
    condition: Callable[[], object],
    within_s: float = PATIENCE_S,
    otherwise: Callable[[], str] = lambda: "the condition never held",
) -> None:
    """Return when the condition holds; fail with the message of `otherwise` after `within_s`."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, otherwise()
        time.sleep(0.005)


def until(condition: Callable[[], object], what: str, within_s: float = 20.0) -> None:
    """As `wait_until`, with the name of the awaited event."""
    wait_until(condition, within_s, lambda: f"waited in vain for: {what}")


async def soon(
    condition: Callable[[], Awaitable[object]] | Callable[[], object],
    within_s: float = PATIENCE_S,
) -> None:
    """As `wait_until`, in a task of trio. The condition may be an asynchronous function."""
    with trio.fail_after(within_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await trio.sleep(0.005)
