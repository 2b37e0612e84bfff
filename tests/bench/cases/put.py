"""Putting a folder: the whole command, from its start to all of it being durable."""

from collections.abc import Callable
from pathlib import Path

from ..dlcmd import Dlcmd
from ..inputs import D4L, D110, Shape
from ..memory import peak_pss_bytes
from ..peers import mds, tar
from ..report import Row, Target, at_least, within
from ..samples import OURS, Rounds, Samples, Side, alternate
from ..workbench import Workbench

TAR_RATIO = 0.8
MDS_RATIO = 2.5
PEAK_MB = 500

WARM = "whole commands and a final sync; the sources are in the page cache"
MDS = "the same; MDSWriter without its start-up, which favours it"
COLD = "the same; the sources' contents are not in the page cache"

Prepare = Callable[[Path], None]
"""Brings the sources into the state from which they are packed."""


def rate_of(shape: Shape) -> Callable[[Workbench], list[Row]]:
    """The benchmark of putting the files of a shape."""

    def measure(bench: Workbench) -> list[Row]:
        source = bench.input(shape)

        def side(prepare: Prepare, pack_seconds: Callable[[Path], float]) -> Side:
            def run() -> dict[str, float]:
                with bench.scratch() as folder:
                    prepare(source)
                    return {"files/s": shape.files / pack_seconds(folder)}

            return run

        def sides(prepare: Prepare) -> dict[str, Side]:
            return {
                OURS: side(prepare, lambda folder: _put_seconds(source, shape, folder)),
                tar.NAME: side(prepare, lambda folder: tar.pack_seconds(source, folder / "o.tar")),
            }

        packed_by_mds = side(bench.settle, lambda folder: mds.pack_seconds(source, folder / "out"))
        warm = alternate(bench.rounds, {**sides(bench.settle), mds.NAME: packed_by_mds})
        cold = alternate(bench.rounds, sides(bench.chill))
        return [
            _row(f"put {shape.name}", warm, tar.NAME, at_least(TAR_RATIO), WARM),
            _row(f"put {shape.name}", warm, mds.NAME, at_least(MDS_RATIO), MDS),
            _row(f"put {shape.name}, from disk", cold, tar.NAME, None, COLD),
        ]

    return measure


def _row(name: str, rounds: Rounds, peer: str, target: Target | None, note: str) -> Row:
    ours, other = rounds.ours("files/s"), rounds.of(peer, "files/s")
    return Row(name, "files/s", ours, peer, other, target, note)


def peak_memory(bench: Workbench) -> list[Row]:
    """PSS over all processes of a put, in a run that is not timed."""
    rows = []
    for shape in (D4L, D110):
        source = bench.input(shape)
        with bench.scratch() as folder:
            dlcmd = Dlcmd(folder)
            command = dlcmd.command("put", str(source), shape.name)
            peak = Samples((peak_pss_bytes(command, dlcmd.environment) / 1e6,))
        rows.append(within(f"put {shape.name}, peak PSS", "MB", peak, PEAK_MB, most=True))
    return rows


def _put_seconds(source: Path, shape: Shape, folder: Path) -> float:
    dlcmd = Dlcmd(folder)
    seconds = dlcmd.seconds("put", str(source), shape.name)
    stored = dlcmd.stored_bytes()
    assert stored >= shape.bytes, f"only {stored} bytes were stored of {shape.bytes}"
    return seconds
