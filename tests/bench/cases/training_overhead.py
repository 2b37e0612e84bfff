"""Benchmark of what `dlcmd run` costs: its start, and the announcement of a large dataset's order.

Each figure is a difference: the same command with and without `dlcmd run`, one after the other.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..dlcmd import DEADLINE_S, PROGRAM
from ..inputs import N1M
from ..reader import write_list
from ..report import Row, within
from ..samples import repeat
from ..workbench import Workbench
from .training import python_of_training

START_MAX_S = 0.3
ANNOUNCE_MAX_S, ANNOUNCE_MAX_MB = 1.0, 100.0
_LAUNCHED = (str(PROGRAM), "-q", "run", "--")
_PROGRAM = Path(__file__).parent.parent / "announcing_program.py"


def measure(bench: Workbench) -> list[Row]:
    """The start of a command that does nothing, and an epoch of 1.28 million files on a mount."""
    start = repeat(bench.rounds, _start).ours("s")
    with bench.scratch() as folder:
        shape, mountpoint = bench.shape(N1M), folder / "mount"
        listed = write_list((f"{mountpoint}/{path}" for path in shape.paths()), folder / "list")
        dlcmd = bench.n1m
        environment = {k: v for k, v in dlcmd.environment.items() if k != "PYTHONPATH"}
        command = [python_of_training(), "-P", str(_PROGRAM), str(listed)]

        def announce() -> dict[str, float]:
            alone = _said(command, environment)
            joined = _said([*_LAUNCHED, *command], environment)
            return {key: joined[key] - alone[key] for key in ("seconds", "bytes")}

        with dlcmd.mounted(shape.name, mountpoint):
            rounds = repeat(bench.rounds, announce)
    name = f"dlcmd run, announce {shape.name}"
    how = "until the first batch, in the training process, more than without dlcmd run"
    megabytes = rounds.ours("bytes").map(lambda count: count / 1e6)
    return [
        within("dlcmd run, start", "s", start, START_MAX_S, most=True),
        within(name, "s", rounds.ours("seconds"), ANNOUNCE_MAX_S, most=True, note=how),
        within(name, "MB", megabytes, ANNOUNCE_MAX_MB, most=True, note=f"peak memory, {how}"),
    ]


def _start() -> dict[str, float]:
    command = (sys.executable, "-c", "pass")
    return {"s": _seconds((*_LAUNCHED, *command)) - _seconds(command)}


def _seconds(command: Sequence[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start_s


def _said(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S
    )
    said: dict[str, float] = json.loads(done.stdout)
    return said
