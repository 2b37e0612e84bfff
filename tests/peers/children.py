"""Forked children of a test, as a data loader's workers are."""

import os
from collections.abc import Callable


def fork(work: Callable[[], object]) -> Callable[[], None]:
    """Do some work in a child; the result waits for its end, and fails if the work failed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)

    def wait() -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return wait
