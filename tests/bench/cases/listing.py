"""Benchmark of `ls -lR` of a million entries, against the same tree in tmpfs."""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from ..inputs import N1M
from ..peers import tmpfs
from ..report import Row, at_most
from ..samples import OURS, Rounds, Side, alternate
from ..workbench import Workbench
from .kernel import KERNEL, OVER_PYFUSE3, PYFUSE3

FIRST_RATIO = 3
AGAIN_RATIO = 1.5
PYFUSE3_FIRST_RATIO = 8
NATIVE_FIRST_RATIO = 1.4
NATIVE_AGAIN_RATIO = 0.85


def measure(bench: Workbench) -> list[Row]:
    """List on a fresh mount, and again on the same mount."""
    rounds = _rounds(bench, {OURS: KERNEL, OVER_PYFUSE3: PYFUSE3})
    return _rows(rounds, OURS, "kernel", FIRST_RATIO, AGAIN_RATIO) + _rows(
        rounds, OVER_PYFUSE3, "pyfuse3", PYFUSE3_FIRST_RATIO, None
    )


def native(bench: Workbench) -> list[Row]:
    """The same over `bench.session`."""
    rounds = _rounds(bench, {OURS: bench.session_options})
    return _rows(rounds, OURS, bench.session, NATIVE_FIRST_RATIO, NATIVE_AGAIN_RATIO)


def _rounds(bench: Workbench, sessions: Mapping[str, tuple[str, ...]]) -> Rounds:
    """Lists mounts of some sessions, and the same tree in tmpfs."""
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
            name: partial(ours, options) for name, options in sessions.items()
        }
        return alternate(
            bench.rounds, {**sides, tmpfs.NAME: lambda: {"first": _ls_seconds(tree())}}
        )


def _rows(rounds: Rounds, side: str, session: str, first: float, again: float | None) -> list[Row]:
    other, name = rounds.of(tmpfs.NAME, "first"), f"{session} ls -lR of {N1M.name}"
    return [
        Row(
            name, "s", rounds.of(side, "first"), tmpfs.NAME, other, at_most(first), "a fresh mount"
        ),
        Row(
            f"{name}, again", "s", rounds.of(side, "again"), tmpfs.NAME, other,
            None if again is None else at_most(again),
        ),
    ]  # fmt: skip


def _ls_seconds(folder: Path) -> float:
    environment = {**os.environ, "LC_ALL": "C"}
    start_s = time.perf_counter()
    subprocess.run(["ls", "-lR", folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start_s
