"""Benchmark of `ls -lR` of a million entries, over both sessions, against the same tree in
tmpfs."""

import os
import subprocess
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from ..inputs import N1M
from ..peers import tmpfs
from ..report import Row, Target, at_most
from ..samples import OURS, Side, alternate
from ..workbench import Workbench
from .kernel import KERNEL, OVER_PYFUSE3, PYFUSE3

FIRST_RATIO = 3
AGAIN_RATIO = 1.5
PYFUSE3_FIRST_RATIO = 8


def measure(bench: Workbench) -> list[Row]:
    """List on a fresh mount, and again on the same mount."""
    shape, dlcmd = bench.shape(N1M), bench.n1m
    with ExitStack() as stack:

        @cache
        def tree() -> Path:
            return stack.enter_context(tmpfs.tree(shape))

        def ours(options: tuple[str, ...]) -> dict[str, float]:
            with (
                bench.scratch() as folder,
                dlcmd.mounted(shape.name, folder / "mount", *options) as mount,
            ):
                return {"first": _ls_seconds(mount.path), "again": _ls_seconds(mount.path)}

        sides: dict[str, Side] = {
            OURS: lambda: ours(KERNEL),
            tmpfs.NAME: lambda: {"first": _ls_seconds(tree())},
            OVER_PYFUSE3: lambda: ours(PYFUSE3),
        }
        rounds = alternate(bench.rounds, sides)
    other, name = rounds.of(tmpfs.NAME, "first"), f"ls -lR of {shape.name}"

    def row(name: str, side: str, which: str, target: Target | None, note: str = "") -> Row:
        return Row(name, "s", rounds.of(side, which), tmpfs.NAME, other, target, note)

    return [
        row(f"kernel {name}", OURS, "first", at_most(FIRST_RATIO), "a fresh mount"),
        row(f"kernel {name}, again", OURS, "again", at_most(AGAIN_RATIO)),
        row(f"pyfuse3 {name}", OVER_PYFUSE3, "first", at_most(PYFUSE3_FIRST_RATIO)),
        row(f"pyfuse3 {name}, again", OVER_PYFUSE3, "again", None),
    ]


def _ls_seconds(folder: Path) -> float:
    environment = {**os.environ, "LC_ALL": "C"}
    start_s = time.perf_counter()
    subprocess.run(["ls", "-lR", folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start_s
