"""Benchmarks of reading without a mount, in one process, from chunks on the local disk and in the
page cache: `read_many`, and `DieselDataset` against the peers' datasets."""

from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import TypedDict

from .. import probes
from ..inputs import D4, D110, Shape
from ..peers import streams
from ..report import Row, against, at_least, no_less_than
from ..samples import Rounds, Side, alternate, repeat
from ..stored import Stored, stored
from ..workbench import Workbench

RATE = "files/s"
FIRST_PER_S, SECOND_PER_S = 200_000, 300_000

ROUNDS_MAX = 3
RATIOS = {D4: 2.0, D110: 1.0}  # to the better peer
FIRST, BEST = "first pass", "best pass"
PEERS = (streams.MDS, streams.LIT)
_PEERS_PASSES = {
    FIRST: "as it iterates, shuffled",
    BEST: "the better of its ways, as it iterates, shuffled, and by random indices",
}
_READERS = {
    "read_many": ("indices", "views of the contents, in random order"),
    "DieselDataset": ("dataset", "bytes, in batches of 64 in random order"),
}


class _Passes(TypedDict):
    """What `probes/read.py` says."""

    seconds: list[float]
    files: int
    bytes: int
    sum: int


def many(bench: Workbench) -> list[Row]:
    """Two passes of `read_many` in a fresh process, with files named by indices and by paths."""
    with stored(bench, D4) as data:
        indices, paths = (_two_passes(data, by) for by in ("indices", "paths"))
    first, second = f"read_many {D4.name}, first pass", f"read_many {D4.name}, second pass"
    how = "checksums verified, every byte summed; chunks just written, in the page cache"
    return [
        no_less_than(first, RATE, indices.ours(FIRST), FIRST_PER_S, how),
        no_less_than(second, RATE, indices.ours("second"), SECOND_PER_S, "not summed"),
        Row(f"{first}, by paths", RATE, paths.ours(FIRST)),
        Row(f"{second}, by paths", RATE, paths.ours("second")),
    ]


def _two_passes(data: Stored, by: str) -> Rounds:
    seeds = count()

    def read() -> dict[str, float]:
        first_s, second_s = _read(data, next(seeds), by, "sum")
        return {FIRST: data.shape.files / first_s, "second": data.shape.files / second_s}

    return repeat(data.bench.rounds, read)


def _read(data: Stored, seed: int, by: str, first: str) -> list[float]:
    """The seconds of two passes in a new process, whose `first` sums contents, or only counts."""
    data.bench.warm_page_cache(data.dlcmd.store)
    words = (data.shape.name, str(seed), by, first)
    said: _Passes = probes.run("read", data.dlcmd, *words)  # type: ignore[assignment] # its own words
    _check(data.shape, said["files"], said["bytes"], said["sum"])
    return said["seconds"]


def datasets(bench: Workbench) -> list[Row]:
    """Files of 4 KiB and of 110 KiB, each by all readers in turns."""
    return [row for shape in RATIOS for row in _rows_of(bench, shape)]


def _rows_of(bench: Workbench, wanted: Shape) -> list[Row]:
    """Our first pass, which loads and checks the chunks, against the first one of each peer, and
    the best pass of each."""
    with stored(bench, bench.shape(wanted)) as data:
        sides: dict[str, Side] = {
            reader: partial(_ours, data, by, count()) for reader, (by, _) in _READERS.items()
        }
        for peer in PEERS:
            sides[peer] = partial(_peer, data, peer, count())
        rounds = alternate(min(bench.rounds, ROUNDS_MAX), sides)
    rows: list[Row] = []
    for reader, (_, how) in _READERS.items():
        for which, passes in _PEERS_PASSES.items():
            name = f"{reader} {wanted.name}, one process, {which}"
            for peer in PEERS:
                target, note = {peer: at_least(RATIOS[wanted])}, f"{how}; {peer}: {passes}"
                rows += against(rounds, name, RATE, target, note, of=which, side=reader)
    return rows


def _ours(data: Stored, by: str, seeds: "count[int]") -> Mapping[str, float]:
    seconds = _read(data, next(seeds), by, "count")
    return {FIRST: data.shape.files / seconds[0], BEST: data.shape.files / min(seconds)}


def _peer(data: Stored, peer: str, seeds: "count[int]") -> Mapping[str, float]:
    folder, shape = data.folder / peer, data.shape
    if not folder.exists():
        streams.pack(peer, data.source, folder, streams.shard_bytes(data.bench))
    data.bench.warm_page_cache(folder)
    passes = streams.read(peer, folder, next(seeds))
    _check(shape, passes.files, passes.bytes, passes.sum)
    best_s = min(*passes.iterated, *passes.indexed)
    return {FIRST: shape.files / passes.iterated[0], BEST: shape.files / best_s}


def _check(shape: Shape, *got: object) -> None:
    expected = (shape.files, shape.bytes, shape.content_sum())
    assert got == expected, f"wrong contents were read: {got}, not {expected}"
