"""Benchmark of what `dlcmd run` costs: its start, and the announcement of a large dataset's order.

Each figure is a difference: the same command with and without `dlcmd run`, one after the other.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..dlcmd import PROGRAM, last_line
from ..inputs import N1M
from ..peers import python_of_training
from ..reading import write_list
from ..report import Row, no_more_than
from ..samples import repeat
from ..workbench import Workbench

START_MAX_S, ANNOUNCE_MAX_S, ANNOUNCE_MAX_MB = 0.3, 1.0, 100.0
_LAUNCHED = (str(PROGRAM), "-q", "run", "--")
_PROGRAM = Path(__file__).parent.parent / "probes" / "announcing.py"


def measure(bench: Workbench) -> list[Row]:
    """The start of a command that does nothing, and an epoch of 1.28 million files on a mount."""

    def started() -> dict[str, float]:
        command = (sys.executable, "-c", "pass")
        return {"s": _seconds((*_LAUNCHED, *command)) - _seconds(command)}

    start = repeat(bench.rounds, started).ours("s")
    with bench.scratch() as folder:
        shape, mountpoint = bench.shape(N1M), folder / "mount"
        listed = write_list((f"{mountpoint}/{path}" for path in shape.paths()), folder / "list")
        dlcmd = bench.n1m
        command = [python_of_training(), "-P", str(_PROGRAM), str(listed)]

        def announce() -> dict[str, float]:
            alone, joined = (
                json.loads(last_line([*prefix, *command], dlcmd.users_environment))
                for prefix in ((), _LAUNCHED)
            )
            return {key: joined[key] - alone[key] for key in ("seconds", "bytes")}

        with dlcmd.mounted(shape.name, mountpoint):
            rounds = repeat(bench.rounds, announce)
    name = f"dlcmd run, announce {shape.name}"
    how = "until the first batch, in the training process, more than without dlcmd run"
    megabytes = rounds.ours("bytes").map(lambda count: count / 1e6)
    return [
        no_more_than("dlcmd run, start", "s", start, START_MAX_S),
        no_more_than(name, "s", rounds.ours("seconds"), ANNOUNCE_MAX_S, how),
        no_more_than(name, "MB", megabytes, ANNOUNCE_MAX_MB, f"peak memory, {how}"),
    ]


def _seconds(command: Sequence[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start_s
