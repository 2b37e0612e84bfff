"""Reads epochs (all files of a shape, once, in some order) with the C reader, and checks every
byte.

The lists of files are written before a dataset is mounted, so that it is read right after. A pause
would be measured, too, since the kernel may reclaim idle pages of its page cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .control_group import ControlGroup
from .inputs import Shape
from .reader import ReadReport, read_files, write_list
from .workbench import Workbench


@dataclass(frozen=True, slots=True)
class Order:
    """A list of files to read, with the count, bytes and sum that a reader of all of them must
    get."""

    list_file: Path
    files: int
    bytes: int
    sum: int


def prepared(bench: Workbench, wanted: Shape) -> tuple[Shape, Path]:
    """The shape to measure, and the folder with its files."""
    shape = bench.shape(wanted)
    return shape, bench.input(shape)


def random_order(
    shape: Shape, root: Path, seed: int, folder: Path, *, files: int | None = None
) -> Order:
    """A random order of a shape's files below `root`, or the first `files` of it; in `folder`."""
    paths, chosen = shape.paths(), np.random.default_rng(seed).permutation(shape.files)[:files]
    total = int(shape.file_sums()[chosen].sum())
    file = folder / f"random-{root.name}-{seed}"
    write_list((f"{root}/{paths[at]}" for at in chosen.tolist()), file)
    return Order(file, len(chosen), len(chosen) * shape.file_bytes, total)


def whole_order(shape: Shape, root: Path, paths: Iterable[str], file: Path) -> Order:
    """All files of a shape below `root`, in the order of `paths`; the list is written to `file`."""
    write_list((f"{root}/{path}" for path in paths), file)
    return Order(file, shape.files, shape.bytes, shape.content_sum())


def read_epoch(
    bench: Workbench,
    order: Order,
    *,
    readers: int = 1,
    walk: Path | None = None,
    group: ControlGroup | None = None,
) -> ReadReport:
    """Read the files with some readers, which walk the folder `walk` first, and which run in
    `group` if there is one. Wrong contents are an error."""
    prefix = () if group is None else group.prefix
    report = read_files(bench.reader, order.list_file, readers=readers, walk=walk, prefix=prefix)
    got, expected = (report.files, report.bytes, report.sum), (order.files, order.bytes, order.sum)
    assert got == expected, f"wrong contents were read: {got}, not {expected}"
    assert walk is None or report.walked > order.files, f"{report.walked} entries were met"
    return report


def files_per_s(report: ReadReport) -> float:
    """The rate from the first open to the last close."""
    return report.files / report.seconds
