"""Forked children of a test, like a data loader's workers."""

import os
from collections.abc import Callable


def fork(work: Callable[[], object]) -> Callable[[], None]:
    """Work in a child. The returned function waits for its end, and fails if the work failed."""
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
