"""Experiment with reading samples without a mount, in one process, against the peers' datasets.

All data lie on the local disk and in the page cache.
"""

from collections.abc import Mapping
from functools import partial
from itertools import count

from ..cases.read import RATE, check_contents, read_twice
from ..inputs import D4, D110, Shape
from ..report import Row, against, at_least
from ..samples import Side, alternate
from ..stored import Stored, stored
from ..workbench import Workbench
from . import shards

ROUNDS_MAX = 3
RATIOS = {D4: 2.0, D110: 1.0}  # to the better peer
FIRST, BEST = "first pass", "best pass"
PEERS = (shards.MDS, shards.LIT)
_PEERS_PASSES = {
    FIRST: "as it iterates, shuffled",
    BEST: "the better of its ways, as it iterates, shuffled, and by random indices",
}
_READERS = {
    "read_many": ("indices", "views of the contents, in random order"),
    "DieselDataset": ("dataset", "bytes, in batches of 64 in random order"),
}


def measure(bench: Workbench) -> list[Row]:
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
    seconds = read_twice(data, next(seeds), by, "count")
    return {FIRST: data.shape.files / seconds[0], BEST: data.shape.files / min(seconds)}


def _peer(data: Stored, peer: str, seeds: "count[int]") -> Mapping[str, float]:
    folder, shape = data.folder / peer, data.shape
    if not folder.exists():
        shards.pack(peer, data.source, folder, shards.shard_bytes(data.bench))
    data.bench.warm_page_cache(folder)
    passes = shards.read(peer, folder, next(seeds))
    check_contents(shape, passes.files, passes.bytes, passes.sum)
    best_s = min(*passes.iterated, *passes.indexed)
    return {FIRST: shape.files / passes.iterated[0], BEST: shape.files / best_s}
