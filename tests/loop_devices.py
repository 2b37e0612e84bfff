"""Lists the loop devices in use, for tests that must leave none behind."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def only_user_of_loop_devices() -> Iterator[None]:
    """All processes of a machine share loop devices."""
    path = Path(tempfile.gettempdir()) / "diesel-test-loop-devices.lock"
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def files_of_loop_devices() -> list[str]:
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it is free again
            found.append(os.path.basename(path.read_text().strip()))
    return sorted(found)
