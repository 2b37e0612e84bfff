"""Benchmarks of `dlcmd put`: the whole command, from its start until everything is durable."""

from collections.abc import Callable
from pathlib import Path

from ..dlcmd import Dlcmd
from ..inputs import D1M, D4L, D110, N4M, Shape, tar_stream
from ..memory import peak_pss_bytes
from ..peers import mds, tar
from ..report import Row, Target, at_least, within
from ..samples import OURS, Rounds, Samples, Side, alternate
from ..workbench import Workbench

TAR_RATIO = 0.9
TAR_RATIO_LARGE = 0.8  # of files of 110 KiB
LARGE_FILE_BYTES = 64 << 10
MDS_RATIO = 2.5
FOLDER_RATIO = 1.0
UNPACK_AND_PUT_RATIO = 2.0
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

Prepare = Callable[[Path], None]
"""A function that prepares the source files: warms or drops their page cache."""


def rate_of(shape: Shape) -> Callable[[Workbench], list[Row]]:
    """The benchmark of putting the files of a shape."""
    tar_ratio = TAR_RATIO_LARGE if shape.file_bytes >= LARGE_FILE_BYTES else TAR_RATIO

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

        packed_by_mds = side(
            bench.warm_page_cache, lambda folder: mds.pack_seconds(source, folder / "out")
        )
        warm = alternate(bench.rounds, {**sides(bench.warm_page_cache), mds.NAME: packed_by_mds})
        cold = alternate(bench.rounds, sides(bench.drop_page_cache))
        return [
            _row(f"put {shape.name}", warm, tar.NAME, at_least(tar_ratio), WARM),
            _row(f"put {shape.name}", warm, mds.NAME, at_least(MDS_RATIO), MDS),
            _row(f"put {shape.name}, from disk", cold, tar.NAME, None, COLD),
        ]

    return measure


def _row(name: str, rounds: Rounds, peer: str, target: Target | None, note: str) -> Row:
    ours, other = rounds.ours("files/s"), rounds.of(peer, "files/s")
    return Row(name, "files/s", ours, peer, other, target, note)


def from_tar(bench: Workbench) -> list[Row]:
    """Putting a tar of small files, against putting the folder that it was made of."""
    shape = bench.shape(D1M)
    source = bench.input(shape)
    folder_name = "the folder"

    def side(put: Callable[[Path], float]) -> Side:
        def run() -> dict[str, float]:
            with bench.scratch() as folder:
                return {"files/s": shape.files / put(folder)}

        return run

    with bench.scratch() as made:
        archive = made / "d1m.tar"
        tar.pack_seconds(source, archive)

        def settle() -> None:
            bench.warm_page_cache(source, made)

        def put_tar(folder: Path) -> float:
            settle()
            return Dlcmd(folder).seconds("put", "--tar", str(archive), shape.name)

        def put_folder(folder: Path) -> float:
            settle()
            return _put_seconds(source, shape, folder)

        rounds = alternate(bench.rounds, {OURS: side(put_tar), folder_name: side(put_folder)})
    name = f"put --tar {shape.name}"
    return [_row(name, rounds, folder_name, at_least(FOLDER_RATIO), FROM_TAR)]


def unpack(bench: Workbench) -> list[Row]:
    """Putting a compressed tar of small files, and again, against unpacking it to the disk."""
    shape = bench.shape(D4L)
    source = bench.input(shape)
    again: list[float] = []
    with bench.scratch() as made:
        tar.pack_seconds(source, made / "d4l.tar")
        archive = tar.compress(made / "d4l.tar")
        (made / "d4l.tar").unlink()

        def side(seconds: Callable[[Path], float]) -> Side:
            def run() -> dict[str, float]:
                bench.warm_page_cache(archive)
                with bench.scratch() as folder:
                    return {"files/s": shape.files / seconds(folder)}

            return run

        def put_archive(folder: Path) -> float:
            dlcmd = Dlcmd(folder)
            seconds = dlcmd.seconds("put", "--unpack", str(archive), shape.name)
            assert dlcmd.stored_bytes() >= shape.bytes
            again.append(dlcmd.seconds("put", "--unpack", str(archive), shape.name))
            return seconds

        def unpack_and_put(folder: Path) -> float:
            seconds = tar.unpack_seconds(archive, folder / "files", tar.TAR_GZIP)
            return seconds + _put_seconds(folder / "files", shape, folder)

        def pigz(folder: Path) -> float:
            return tar.unpack_seconds(archive, folder / "files", tar.PIGZ)

        both = f"{tar.TAR_GZIP}, then put"
        rounds = alternate(
            bench.rounds,
            {OURS: side(put_archive), both: side(unpack_and_put), tar.PIGZ: side(pigz)},
        )
    name = f"put --unpack {shape.name}.tar.gz"
    return [
        _row(name, rounds, both, at_least(UNPACK_AND_PUT_RATIO), UNPACKED),
        _row(name, rounds, tar.PIGZ, at_least(PIGZ_RATIO), UNPACKED),
        within(f"{name} again", "s", Samples(tuple(again)), UNPACK_AGAIN_S, most=True),
    ]


def peak_memory_of_many(bench: Workbench) -> list[Row]:
    """PSS of a put and of a `verify --headers-only` of millions of files, not timed."""
    shape = bench.shape(N4M)
    with bench.scratch() as folder:
        archive = folder / "n4m.tar"
        with archive.open("wb") as file:
            file.writelines(tar_stream(shape))
        dlcmd = Dlcmd(folder)
        rows = []
        for words, limit in (
            (("put", "--tar", str(archive), shape.name), MANY_PUT_PEAK_MB),
            (("verify", "--headers-only", shape.name), MANY_VERIFY_PEAK_MB),
        ):
            peak = Samples((peak_pss_bytes(dlcmd.command(*words), dlcmd.environment) / 1e6,))
            name = f"{words[0]} {shape.name}, peak PSS"
            rows.append(within(name, "MB", peak, limit, most=True))
    return rows


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
