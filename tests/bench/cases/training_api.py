"""Benchmark of reading samples without a mount, in one process, against the peers' datasets.

All data lie on the local disk and in the page cache.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from .. import probes
from ..dlcmd import Dlcmd
from ..epochs import prepared
from ..inputs import D4, D110, Shape
from ..peers import streams
from ..report import Row, at_least
from ..samples import Rounds, Side, alternate, say
from ..workbench import Workbench
from .training import SHARD_BYTES, SHARD_BYTES_MIN

ROUNDS_MAX = 3
READ_MANY, DATASET = "read_many", "DieselDataset"
RATIOS = {D4: 2.0, D110: 1.0}  # to the better peer
FIRST, BEST = "first pass", "best pass"
_PEERS_PASSES = {
    FIRST: "as it iterates, shuffled",
    BEST: "the better of its ways, as it iterates, shuffled, and by random indices",
}
_READERS = {READ_MANY: "many", DATASET: "dataset"}
_HOW = {
    READ_MANY: "views of the contents, in random order",
    DATASET: "bytes, in batches of 64 in random order",
}
_PEERS = (streams.MDS, streams.LIT)


def measure(bench: Workbench) -> list[Row]:
    """Files of 4 KiB and of 110 KiB, each by all readers in turns."""
    return [row for shape in RATIOS for row in _rows_of(bench, shape)]


def _rows_of(bench: Workbench, wanted: Shape) -> list[Row]:
    shape, source = prepared(bench, wanted)
    with bench.scratch() as folder:
        dlcmd = Dlcmd(folder)
        dlcmd.seconds("put", str(source), shape.name)
        sides: dict[str, Side] = {}
        for reader in _READERS:
            if reader == DATASET and find_spec("diesel_fs.torch.dataset") is None:
                say(f"NOT MEASURED: {DATASET}, which this version does not have")
                continue
            sides[reader] = _ours(bench, shape, dlcmd, _READERS[reader])
        for peer in _PEERS:
            sides[peer] = _peer(bench, shape, source, folder / peer, peer)
        rounds = alternate(min(bench.rounds, ROUNDS_MAX), sides)
    return [row for reader in sides if reader in _READERS for row in _rows(rounds, shape, reader)]


def _rows(rounds: Rounds, shape: Shape, reader: str) -> list[Row]:
    """Our first pass, which loads and checks the chunks, against the first one of each peer, and
    the best pass of each."""
    target = at_least(RATIOS[D4 if shape.name == D4.name else D110])
    return [
        Row(
            f"{reader} {shape.name}, one process, {which}", "files/s", rounds.of(reader, which),
            peer, rounds.of(peer, which), target, f"{_HOW[reader]}; {peer}: {_PEERS_PASSES[which]}",
        )
        for which in (FIRST, BEST)
        for peer in _PEERS
    ]  # fmt: skip


def _ours(bench: Workbench, shape: Shape, dlcmd: Dlcmd, by: str) -> Side:
    seeds = iter(range(ROUNDS_MAX))

    def read() -> dict[str, float]:
        bench.warm_page_cache(dlcmd.store)
        words = (shape.name, str(next(seeds)), by)
        said: Mapping[str, object] = probes.run("probes.training_api", dlcmd, *words)
        _check(shape, said["files"], said["bytes"], said["sum"])
        seconds = said["seconds"]
        assert isinstance(seconds, list)
        return {FIRST: shape.files / seconds[0], BEST: shape.files / min(seconds)}

    return read


def _peer(bench: Workbench, shape: Shape, source: Path, folder: Path, peer: str) -> Side:
    seeds = iter(range(ROUNDS_MAX))

    def read() -> dict[str, float]:
        if not folder.exists():
            shard = max(SHARD_BYTES // bench.divisor, SHARD_BYTES_MIN)
            streams.pack(peer, source, folder, shard)
        bench.warm_page_cache(folder)
        passes = streams.read(peer, folder, next(seeds))
        _check(shape, passes.files, passes.bytes, passes.sum)
        return {
            FIRST: shape.files / passes.iterated[0],
            BEST: shape.files / min(*passes.iterated, *passes.indexed),
        }

    return read


def _check(shape: Shape, *got: object) -> None:
    expected = (shape.files, shape.bytes, shape.content_sum())
    assert got == expected, f"wrong contents were read: {got}, not {expected}"
