"""Putting a folder: the whole command, from its start to all of it being durable."""

from collections.abc import Callable
from pathlib import Path

from ..dlcmd import Dlcmd
from ..inputs import D4L, D110, Shape
from ..memory import peak_pss_bytes
from ..peers import mds, tar
from ..report import Row, at_least, within
from ..samples import OURS, Samples, alternate
from ..workbench import Workbench

TAR_RATIO = 0.8
MDS_RATIO = 2.5
PEAK_MB = 500


def rate_of(shape: Shape) -> Callable[[Workbench], list[Row]]:
    """The benchmark of putting the files of a shape."""

    def measure(bench: Workbench) -> list[Row]:
        source = bench.input(shape)

        def side(pack_seconds: Callable[[Path], float]) -> Callable[[], dict[str, float]]:
            def run() -> dict[str, float]:
                with bench.scratch() as folder:
                    bench.settle(source)
                    return {"files/s": shape.files / pack_seconds(folder)}

            return run

        rounds = alternate(
            bench.rounds,
            {
                OURS: side(lambda folder: _put_seconds(source, shape, folder)),
                tar.NAME: side(lambda folder: tar.pack_seconds(source, folder / "out.tar")),
                mds.NAME: side(lambda folder: mds.pack_seconds(source, folder / "out")),
            },
        )
        ours, name = rounds.ours("files/s"), f"put {shape.name}"
        return [
            Row(name, "files/s", ours, peer, rounds.of(peer, "files/s"), at_least(ratio), note)
            for peer, ratio, note in (
                (tar.NAME, TAR_RATIO, "whole commands and a sync; sources in the page cache"),
                (mds.NAME, MDS_RATIO, "MDSWriter without its start-up, which favours it"),
            )
        ]

    return measure


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
