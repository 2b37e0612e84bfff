"""Runs functions in forked children, and limits their time."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_HANG_S = 120  # enough for any test on a busy machine


def fork(do: Callable[[], object]) -> int:
    """Returns its process ID. SIGALRM ends a child that hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(_HANG_S)
            do()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(do: Callable[[], object]) -> int:
    return exit_code(fork(do))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Assert that the `with` takes less than this; with the fault it would take far longer."""
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < seconds
