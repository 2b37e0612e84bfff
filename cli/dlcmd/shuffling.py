"""The verb `shuffle`: prints the chunk-wise random order of a dataset's files."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.orders.shuffle import (
    BATCH_FILES,
    GROUP_SIZE_DEFAULT,
    OrderQuality,
    chunk_shuffle,
    full_shuffle,
)
from diesel_fs.orders.shuffle import measure_quality as quality_of

from .addresses import Address, address, open_repository_from_flags
from .options import global_flags, verb
from .output import json_name, name_line, print_json, print_table, write_stdout

_COLUMNS = ("measure", "this order", "full shuffle")


@verb("shuffle")
@click.argument("target", type=address, metavar="DATASET[/path]")
@click.option(
    "--seed", type=int, metavar="N", required=True,
    help="Seed of the random orders; use the same one for all ranks and epochs.",
)  # fmt: skip
@click.option(
    "--epoch", type=int, metavar="N", required=True,
    help="Number of the epoch, from 0 on; each epoch has an order of its own.",
)  # fmt: skip
@click.option(
    "--group-size", type=int, metavar="N", default=GROUP_SIZE_DEFAULT, show_default=True,
    help="Number of chunks in a group: their files are shuffled together.",
)  # fmt: skip
@click.option("--full", is_flag=True, help="Shuffle all files together: one group of all chunks.")
@click.option(
    "--rank", type=int, metavar="N", default=0, show_default=True,
    help="Print the part of this reader (rank), from 0 on.",
)  # fmt: skip
@click.option(
    "--world", type=int, metavar="N", default=1, show_default=True,
    help="Number of ranks, each of which gets an equal part of the order.",
)  # fmt: skip
@click.option(
    "--drop-last", is_flag=True,
    help="Drop the files that do not divide evenly among ranks; else the order's start fills up.",
)  # fmt: skip
@click.option("-0", "nul", is_flag=True, help="End paths with NUL instead of a newline.")
@click.option(
    "--quality", is_flag=True, help="Print how random the order is, instead of the order."
)
def shuffle(
    target: Address, seed: int, epoch: int, group_size: int, full: bool,
    rank: int, world: int, drop_last: bool, nul: bool, quality: bool,
) -> None:  # fmt: skip
    """Print the files of a dataset or folder in chunk-wise random order, one path a line.

    The chunks are shuffled and cut into groups, and the files of each group are shuffled. So a
    program that reads in this order needs memory for two groups of chunks only. The same options
    give the same order on every machine. All ranks get parts of equal length.

    \b
    Examples:
      dlcmd shuffle pets/train --seed 1 --epoch 0 | head
      dlcmd shuffle pets --seed 1 --epoch 7 --rank 3 --world 8 -0 | xargs -0 -n1 cat
      dlcmd shuffle pets --seed 1 --epoch 0 --group-size 20 --quality
    """
    with open_repository_from_flags() as repository:
        view = repository.view(target.dataset)
        top = view.index_of(target.path)
        if view.stat(top).kind != Kind.FOLDER:
            raise UsageError(f"{target} is not a folder")
        if full:
            order = full_shuffle(
                view, seed, epoch, rank=rank, world=world, drop_last=drop_last, below=top
            )
        else:
            order = chunk_shuffle(
                view, seed, epoch, group_size=group_size, rank=rank, world=world,
                drop_last=drop_last, below=top,
            )  # fmt: skip
        if quality:
            _print_quality(quality_of(view, order, below=top))
        else:
            if not (nul or global_flags().json):
                _refuse_newlines(view, order)
            write_stdout(_lines(view, order, nul=nul))


def _refuse_newlines(view: Snapshot, order: Indices) -> None:
    """Raises UsageError, before anything is printed, for a path with a newline in it."""
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


def _print_quality(measured: OrderQuality) -> None:
    """Print measures of an order beside those of a full shuffle: a table, or with --json an
    object."""
    if global_flags().json:
        print_json({"batch_files": BATCH_FILES, **asdict(measured)})
        return
    rows: list[tuple[str, ...]] = [
        ("files", f"{measured.files}", ""),
        ("chunks", f"{measured.chunks}", ""),
        ("folders", f"{measured.folders}", ""),
        (
            f"folders in a batch of {BATCH_FILES}",
            f"{measured.folders_in_batch:.1f}",
            f"{measured.folders_in_batch_expected:.1f}",
        ),
        (
            f"chunks in a batch of {BATCH_FILES}",
            f"{measured.chunks_in_batch:.1f}",
            f"{measured.chunks_in_batch_expected:.1f}",
        ),
        ("rank correlation with the pack", f"{measured.rank_correlation:.4f}", "0.0000"),
        ("chunks open at once", f"{measured.chunks_open_max}", f"{measured.chunks}"),
    ]
    print_table(_COLUMNS, rows, _COLUMNS[1:])
