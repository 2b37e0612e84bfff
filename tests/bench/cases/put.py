"""Benchmarks of `dlcmd put`: the whole command, from its start until everything is durable."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..dlcmd import Dlcmd
from ..inputs import D1M, D4L, D110, N4M, Shape, tar_stream
from ..memory import peak_pss_bytes
from ..peers import mds, tar
from ..report import Row, against, at_least, no_more_than
from ..samples import OURS, Samples, Side, alternate
from ..workbench import Workbench

RATE = "files/s"
TAR_RATIO = 0.9
TAR_RATIO_LARGE = 0.8  # of files of 110 KiB
LARGE_FILE_BYTES = 64 << 10
MDS_RATIO = 2.5
FOLDER, FOLDER_RATIO = "the folder", 1.0
UNPACK_AND_PUT, UNPACK_AND_PUT_RATIO = f"{tar.TAR_GZIP}, then put", 2.0
PIGZ_RATIO = 0.8
UNPACK_AGAIN_S = 2.0
PEAK_MB = 500
MANY_PUT_PEAK_MB = 850
MANY_VERIFY_PEAK_MB = 1300

WARM = "whole commands and a final sync; the sources are in the page cache"
MDS = "the same; MDSWriter without its start-up, which favours it"
FROM_TAR = "whole commands; the peer is the put of the folder that the tar was made of"
UNPACKED = "whole commands and a final sync; the archive is in the page cache"
COLD = "the same; the sources' contents are not in the page cache"


def rate_of(shape: Shape) -> Callable[[Workbench], list[Row]]:
    """The benchmark of putting the files of a shape."""
    tar_ratio = TAR_RATIO_LARGE if shape.file_bytes >= LARGE_FILE_BYTES else TAR_RATIO

    def measure(bench: Workbench) -> list[Row]:
        source = bench.input(shape)
        ways = {
            OURS: lambda folder: _put_seconds(source, shape, folder),
            tar.NAME: lambda folder: tar.pack_seconds(source, folder / "o.tar"),
            mds.NAME: lambda folder: mds.pack_seconds(source, folder / "out"),
        }
        warm_up = partial(bench.warm_page_cache, source)
        warm = {name: _side(bench, shape, warm_up, way) for name, way in ways.items()}
        cool = partial(bench.drop_page_cache, source)
        cold = {name: _side(bench, shape, cool, ways[name]) for name in (OURS, tar.NAME)}
        name, target = f"put {shape.name}", at_least(tar_ratio)
        rounds, from_disk = alternate(bench.rounds, warm), alternate(bench.rounds, cold)
        return [
            *against(rounds, name, RATE, {tar.NAME: target}, WARM),
            *against(rounds, name, RATE, {mds.NAME: at_least(MDS_RATIO)}, MDS),
            *against(from_disk, f"{name}, from disk", RATE, {tar.NAME: None}, COLD),
        ]

    return measure


def from_tar(bench: Workbench) -> list[Row]:
    """Putting a tar of small files, against putting the folder that it was made of."""
    shape, source = bench.prepared(D1M)
    with bench.scratch() as made:
        archive = made / "d1m.tar"
        tar.pack_seconds(source, archive)
        ways: dict[str, Callable[[Path], float]] = {
            OURS: lambda folder: Dlcmd(folder).seconds("put", "--tar", str(archive), shape.name),
            FOLDER: lambda folder: _put_seconds(source, shape, folder),
        }
        warm_up = partial(bench.warm_page_cache, source, made)
        sides = {name: _side(bench, shape, warm_up, way) for name, way in ways.items()}
        rounds = alternate(bench.rounds, sides)
    target = {FOLDER: at_least(FOLDER_RATIO)}
    return against(rounds, f"put --tar {shape.name}", RATE, target, FROM_TAR)


def unpack(bench: Workbench) -> list[Row]:
    """Putting a compressed tar of small files, and again, against unpacking it to the disk."""
    shape, source = bench.prepared(D4L)
    again: list[float] = []
    with bench.scratch() as made:
        tar.pack_seconds(source, made / "d4l.tar")
        archive = tar.compress(made / "d4l.tar")
        (made / "d4l.tar").unlink()

        def put_archive(folder: Path) -> float:
            dlcmd = Dlcmd(folder)
            seconds = dlcmd.seconds("put", "--unpack", str(archive), shape.name)
            assert dlcmd.stored_bytes() >= shape.bytes
            again.append(dlcmd.seconds("put", "--unpack", str(archive), shape.name))
            return seconds

        def unpack_and_put(folder: Path) -> float:
            seconds = tar.unpack_seconds(archive, folder / "files", tar.TAR_GZIP)
            return seconds + _put_seconds(folder / "files", shape, folder)

        ways: dict[str, Callable[[Path], float]] = {
            OURS: put_archive,
            UNPACK_AND_PUT: unpack_and_put,
            tar.PIGZ: lambda folder: tar.unpack_seconds(archive, folder / "files", tar.PIGZ),
        }
        warm_up = partial(bench.warm_page_cache, archive)
        sides = {name: _side(bench, shape, warm_up, way) for name, way in ways.items()}
        rounds = alternate(bench.rounds, sides)
    name = f"put --unpack {shape.name}.tar.gz"
    targets = {UNPACK_AND_PUT: at_least(UNPACK_AND_PUT_RATIO), tar.PIGZ: at_least(PIGZ_RATIO)}
    return [
        *against(rounds, name, RATE, targets, UNPACKED),
        no_more_than(f"{name} again", "s", Samples(tuple(again)), UNPACK_AGAIN_S),
    ]


def peak_memory_of_many(bench: Workbench) -> list[Row]:
    """PSS of a put and of a `verify --headers-only` of millions of files, not timed."""
    shape = bench.shape(N4M)
    with bench.scratch() as folder:
        archive = folder / "n4m.tar"
        with archive.open("wb") as file:
            file.writelines(tar_stream(shape))
        dlcmd = Dlcmd(folder)
        return [
            _peak_row(dlcmd, shape, MANY_PUT_PEAK_MB, "put", "--tar", str(archive)),
            _peak_row(dlcmd, shape, MANY_VERIFY_PEAK_MB, "verify", "--headers-only"),
        ]


def peak_memory(bench: Workbench) -> list[Row]:
    """PSS over all processes of a put, in a run that is not timed."""
    rows = []
    for shape in (D4L, D110):
        source = bench.input(shape)
        with bench.scratch() as folder:
            rows.append(_peak_row(Dlcmd(folder), shape, PEAK_MB, "put", str(source)))
    return rows


def _side(
    bench: Workbench, shape: Shape, prepare: Callable[[], None], way: Callable[[Path], float]
) -> Side:
    """A side that prepares the page cache, and takes so many seconds in an empty folder."""

    def run() -> dict[str, float]:
        with bench.scratch() as folder:
            prepare()
            return {RATE: shape.files / way(folder)}

    return run


def _peak_row(dlcmd: Dlcmd, shape: Shape, limit_mb: float, verb: str, *words: str) -> Row:
    command = dlcmd.command(verb, *words, shape.name)
    peak = Samples((peak_pss_bytes(command, dlcmd.environment) / 1e6,))
    return no_more_than(f"{verb} {shape.name}, peak PSS", "MB", peak, limit_mb)


def _put_seconds(source: Path, shape: Shape, folder: Path) -> float:
    dlcmd = Dlcmd(folder)
    seconds = dlcmd.seconds("put", str(source), shape.name)
    stored = dlcmd.stored_bytes()
    assert stored >= shape.bytes, f"only {stored} bytes were stored of {shape.bytes}"
    return seconds
