"""Runs loops of Python code over a list of files (`loops_program.py`), in any Python."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .epochs import Order
from .reader import DEADLINE_S

STOCK, SYSTEM_CALLS, PIECES = "open().read()", "os.open", "pieces of 1 MiB"
_PROGRAM = Path(__file__).with_name("loops_program.py")


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What the processes have read, as in `ReadReport`. Contents are counted and not checked."""

    files: int
    bytes: int
    seconds: float
    end_s: float
    walked: int

    @property
    def files_per_s(self) -> float:
        return self.files / self.seconds


@contextmanager
def waiting_loop(
    python: str, order: Order, loop: str, *, processes: int = 1, walk: Path | None = None
) -> Iterator[Callable[[], LoopReport]]:
    """Start a loop that has read its list and waits; it begins when the yielded function is called.

    So the start of Python is not measured with a mount that loads ahead meanwhile. The function
    raises an error if a file cannot be read, or has another size.
    """
    arguments = [str(order.list_file), str(processes), loop, *([] if walk is None else [str(walk)])]
    with subprocess.Popen(
        [python, "-P", str(_PROGRAM), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None

        def run() -> LoopReport:
            said, _ = process.communicate(b"go\n", DEADLINE_S)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)
            report = LoopReport(**json.loads(said))
            got, expected = (report.files, report.bytes), (order.files, order.bytes)
            assert got == expected, f"other files were read: {got}, not {expected}"
            assert walk is None or report.walked > order.files, f"{report.walked} entries were met"
            return report

        try:
            process.stdout.readline()
            yield run
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run_loop(python: str, order: Order, loop: str, *, processes: int = 1) -> LoopReport:
    """Start a loop and run it at once; the start of Python is not in its figures."""
    with waiting_loop(python, order, loop, processes=processes) as run:
        return run()
