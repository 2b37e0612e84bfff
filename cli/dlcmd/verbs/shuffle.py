"""The verb `shuffle`."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.orders.quality import OrderQuality, QualityReport, compare_group_sizes
from diesel_fs.orders.shuffle import GROUP_SIZE_DEFAULT, chunk_shuffle, full_shuffle

from ..args.addresses import Address, address, open_repository_from_flags
from ..args.fields import FieldOption, Values, made, options_of
from ..args.options import argument, file_path, global_flags, option, verb
from ..show.output import (
    bytes_text,
    count_text,
    json_name,
    name_line,
    print_json,
    print_note,
    print_table,
    write_stdout,
)
from ..show.pages import write_page
from ..show.quality_plot import quality_svg, worth_percent

_MIX_FIRST = "classes lie together in the chunks: put the files in random order, from a tar"

_COLUMNS = ("order", "memory", "chunks in a batch", "design effect", "effective batch")


@dataclass(frozen=True, slots=True)
class WantedOrder:
    seed: int
    epoch: int
    group_size: int = GROUP_SIZE_DEFAULT
    full: bool = False
    rank: int = 0
    world: int = 1
    drop_last: bool = False

    def order(self, view: Snapshot, below: int) -> Indices:
        """`below` is the index of a folder. Raises UsageError for numbers out of range."""
        if self.full:
            return full_shuffle(
                view, self.seed, self.epoch, rank=self.rank, world=self.world,
                drop_last=self.drop_last, below=below,
            )  # fmt: skip
        return chunk_shuffle(
            view, self.seed, self.epoch, group_size=self.group_size, rank=self.rank,
            world=self.world, drop_last=self.drop_last, below=below,
        )  # fmt: skip

    def quality(self, view: Snapshot, below: int) -> QualityReport:
        return compare_group_sizes(
            view, self.seed, self.epoch, self.group_size, rank=self.rank, world=self.world,
            drop_last=self.drop_last, below=below,
        )  # fmt: skip


@verb("shuffle")
@argument("target", type=address, metavar="DATASET[/path]")
@options_of(
    WantedOrder, "given",
    seed=FieldOption(
        "Seed of the random orders; use the same one for all ranks and epochs.",
        type=int, metavar="N", required=True,
    ),
    epoch=FieldOption(
        "Number of the epoch, from 0 on; each epoch has an order of its own.",
        type=int, metavar="N", required=True,
    ),
    group_size=FieldOption(
        "Number of chunks in a group: their files are shuffled together.",
        type=int, metavar="N", shows_default=True,
    ),
    full=FieldOption("Shuffle all files together: one group of all chunks."),
    rank=FieldOption(
        "Print the part of this reader (rank), from 0 on.",
        type=int, metavar="N", shows_default=True,
    ),
    world=FieldOption(
        "Number of ranks, each of which gets an equal part of the order.",
        type=int, metavar="N", shows_default=True,
    ),
    drop_last=FieldOption(
        "Drop the files that do not divide evenly among ranks; else the order's start fills up."
    ),
)  # fmt: skip
@option("-0", "nul", is_flag=True, help="End paths with NUL instead of a newline.")
@option(
    "--quality", is_flag=True,
    help="Print how well orders of several group sizes mix classes, instead of an order.",
)  # fmt: skip
@option(
    "--plot",
    metavar="FILE.svg",
    type=file_path,
    help="With --quality: draw that into this file, too.",
)
def shuffle(target: Address, given: Values, nul: bool, quality: bool, plot: Path | None) -> None:
    """Print the files of a dataset or folder in chunk-wise random order, one path a line.

    The chunks are shuffled and cut into groups, and the files of each group are shuffled, so a
    program that reads in this order needs memory for two groups only. The same options give the
    same order on every machine. All ranks get parts of equal length.

    --quality helps to choose a group size: for several of them, for full shuffle and for none, it
    prints the memory, the number of chunks in a batch, the design effect (how many times the class
    mix of batches varies as much as after full shuffle; 1 is ideal), and how many fully shuffled
    files a batch is worth. Classes are the folders directly in the dataset or folder that you name.

    \b
    Examples:
      dlcmd shuffle pets/train --seed 1 --epoch 0 | head
      dlcmd shuffle pets --seed 1 --epoch 7 --rank 3 --world 8 -0 | xargs -0 -n1 cat
      dlcmd shuffle pets/train --seed 1 --epoch 0 --quality --plot pets.svg
    """
    if plot is not None:
        if not quality:
            raise UsageError("--plot draws what --quality measures", advice="give both")
        if plot.suffix.lower() != ".svg":
            raise UsageError(f"{plot} cannot be drawn: plots are SVG", advice="name it FILE.svg")
    with open_repository_from_flags() as repository:
        view = repository.view(target.dataset)
        top = view.index_of(target.path)
        if view.stat(top).kind != Kind.FOLDER:
            raise UsageError(f"{target} is not a folder")
        wanted = made(WantedOrder, given)
        if quality:
            report = wanted.quality(view, top)
            if plot is not None:
                write_page(plot, quality_svg(report, f"{target}: how well chunk-wise orders mix"))
            _print_quality(report)
            return
        order = wanted.order(view, top)
        if not (nul or global_flags().json):
            _refuse_newlines(view, order)
        write_stdout(_lines(view, order, nul=nul))


def _refuse_newlines(view: Snapshot, order: Indices) -> None:
    """Refuses paths with a newline, before anything is printed."""
    if not (view.columns.names == ord("\n")).any():
        return
    for path in view.iter_paths(order):
        if b"\n" in path:
            raise UsageError(
                f"{path!r} has a newline in its name, so it would be printed as two lines",
                advice="-0 ends paths with NUL instead",
            )


def _lines(view: Snapshot, order: Indices, *, nul: bool) -> Iterator[bytes]:
    if global_flags().json:
        return (json.dumps(json_name(path)).encode() + b"\n" for path in view.iter_paths(order))
    if nul:
        return (path + b"\0" for path in view.iter_paths(order))
    return map(name_line, view.iter_paths(order))


def _print_quality(report: QualityReport) -> None:
    if global_flags().json:
        sizes = [
            {"group_size": size, **_described(report, quality)}
            for size, quality in report.by_group_size.items()
        ]
        print_json(
            {
                **asdict(report),
                "packed": _described(report, report.packed),
                "by_group_size": sizes,
                "full": _described(report, report.full),
                "recommended_group_size": report.recommended,
            }
        )
        return
    orders = {
        "no shuffle": report.packed,
        **{f"G = {size}": quality for size, quality in report.by_group_size.items()},
        "full shuffle": report.full,
    }
    rows = [
        (
            name,
            bytes_text(quality.memory_bytes),
            f"{quality.chunks_in_batch:.1f}",
            "-" if quality.design_effect is None else f"{quality.design_effect:.2f}",
            "-" if (worth := _worth(report, quality)) is None else f"{worth:.1f}",
        )
        for name, quality in orders.items()
    ]
    print_table(_COLUMNS, rows, _COLUMNS[1:])
    print_note(_advice(report))


def _worth(report: QualityReport, quality: OrderQuality) -> float | None:
    """How many fully shuffled files a batch is worth; None if all batches have the same classes in
    any order."""
    return report.batch_files / quality.design_effect if quality.design_effect else None


def _described(report: QualityReport, quality: OrderQuality) -> dict[str, float | None]:
    return {**asdict(quality), "effective_batch_files": _worth(report, quality)}


def _advice(report: QualityReport) -> str:
    measured = (
        f"{count_text(report.files, 'file')} of {count_text(report.classes, 'class')} in"
        f" {count_text(report.chunks, 'chunk')}, batches of {report.batch_files}"
    )
    if report.full.design_effect is None:
        return f"{measured}: classes mean nothing here; classes are the folders directly below"
    size = report.recommended
    if size is None:
        return f"{measured}: no group size here mixes them well; {_MIX_FIRST}, or use --full"
    quality = report.by_group_size[size]
    advice = (
        f"{measured}: with --group-size {size} ({bytes_text(quality.memory_bytes)} of memory) a"
        f" batch is worth {worth_percent(quality):.0f} % of its files"
    )
    return f"{advice}; {_MIX_FIRST} to need less" if size > min(report.by_group_size) else advice
