"""Benchmark of `read_many`, in one process, from chunks on the local disk and in the page cache."""

from itertools import count
from typing import TypedDict

from .. import probes
from ..inputs import D4, Shape
from ..report import Row, no_less_than
from ..samples import Rounds, repeat
from ..stored import Stored, stored
from ..workbench import Workbench

RATE = "files/s"
FIRST_PER_S, SECOND_PER_S = 200_000, 300_000
FIRST, SECOND = "first pass", "second pass"


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
        no_less_than(second, RATE, indices.ours(SECOND), SECOND_PER_S, "not summed"),
        Row(f"{first}, by paths", RATE, paths.ours(FIRST)),
        Row(f"{second}, by paths", RATE, paths.ours(SECOND)),
    ]


def _two_passes(data: Stored, by: str) -> Rounds:
    seeds = count()

    def read() -> dict[str, float]:
        first_s, second_s = read_twice(data, next(seeds), by, "sum")
        return {FIRST: data.shape.files / first_s, SECOND: data.shape.files / second_s}

    return repeat(data.bench.rounds, read)


def read_twice(data: Stored, seed: int, by: str, first: str) -> list[float]:
    """The seconds of two passes in a new process, whose `first` sums contents, or only counts."""
    data.bench.warm_page_cache(data.dlcmd.store)
    words = (data.shape.name, str(seed), by, first)
    said: _Passes = probes.run("read", data.dlcmd, *words)  # type: ignore[assignment] # its own words
    check_contents(data.shape, said["files"], said["bytes"], said["sum"])
    return said["seconds"]


def check_contents(shape: Shape, *got: object) -> None:
    expected = (shape.files, shape.bytes, shape.content_sum())
    assert got == expected, f"wrong contents were read: {got}, not {expected}"
