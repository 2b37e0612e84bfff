"""Benchmark of `ls -lR` of a million entries, against the same tree in tmpfs."""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from ..inputs import N1M
from ..peers.trees import TMPFS, in_memory
from ..report import Row, Target, against, at_most
from ..samples import OURS, Rounds, Side, alternate
from ..workbench import Workbench
from .kernel import KERNEL, OVER_PYFUSE3, PYFUSE3

RATIOS = at_most(3), at_most(1.5)
PYFUSE3_RATIOS = at_most(8), None
NATIVE_RATIOS = at_most(1.4), at_most(0.85)


def measure(bench: Workbench) -> list[Row]:
    """List on a fresh mount, and again on the same mount."""
    rounds = _rounds(bench, {OURS: KERNEL, OVER_PYFUSE3: PYFUSE3})
    rows = _rows(rounds, OURS, "kernel", *RATIOS)
    return rows + _rows(rounds, OVER_PYFUSE3, "pyfuse3", *PYFUSE3_RATIOS)


def native(bench: Workbench) -> list[Row]:
    """The same over `bench.session`."""
    rounds = _rounds(bench, {OURS: bench.session_options})
    return _rows(rounds, OURS, bench.session, *NATIVE_RATIOS)


def _rounds(bench: Workbench, sessions: Mapping[str, tuple[str, ...]]) -> Rounds:
    """Lists mounts of some sessions, and the same tree in tmpfs."""
    shape, dlcmd = bench.shape(N1M), bench.n1m
    with ExitStack() as stack:
        tree = cache(lambda: stack.enter_context(in_memory(shape)))

        def ours(options: tuple[str, ...]) -> dict[str, float]:
            with (
                bench.scratch() as folder,
                dlcmd.mounted(shape.name, folder / "mount", *options) as mount,
            ):
                return {"first": _ls_seconds(mount.path), "again": _ls_seconds(mount.path)}

        def theirs() -> dict[str, float]:
            seconds = _ls_seconds(tree())
            return {"first": seconds, "again": seconds}

        sides: dict[str, Side] = {side: partial(ours, each) for side, each in sessions.items()}
        return alternate(bench.rounds, {**sides, TMPFS: theirs})


def _rows(
    rounds: Rounds, side: str, session: str, first: Target, again: Target | None
) -> list[Row]:
    name = f"{session} ls -lR of {N1M.name}"
    return [
        *against(rounds, name, "s", {TMPFS: first}, "a fresh mount", of="first", side=side),
        *against(rounds, f"{name}, again", "s", {TMPFS: again}, of="again", side=side),
    ]


def _ls_seconds(folder: Path) -> float:
    environment = {**os.environ, "LC_ALL": "C"}
    start_s = time.perf_counter()
    subprocess.run(["ls", "-lR", folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start_s
