"""`dlcmd shuffle`."""

import json
import sys
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
from diesel_fs.repository.local import index_of_path

from .addresses import Address, address, open_repository_from_flags
from .options import global_flags, verb
from .output import emit, json_name, name_line, say_json

_BATCH = 4096
_COLUMNS = ("measure", "this order", "full shuffle")


@verb("shuffle")
@click.argument("target", type=address, metavar="DATASET[/path]")
@click.option(
    "--seed", type=int, metavar="N", required=True,
    help="Number by which the orders are drawn: the same for all ranks and epochs.",
)  # fmt: skip
@click.option(
    "--epoch", type=int, metavar="N", required=True,
    help="Number of the epoch, from 0 on; each has another order.",
)  # fmt: skip
@click.option(
    "--group-size", type=int, metavar="N", default=GROUP_SIZE_DEFAULT, show_default=True,
    help="How many chunks have their files shuffled together.",
)  # fmt: skip
@click.option("--full", is_flag=True, help="All chunks in one group.")
@click.option(
    "--rank", type=int, metavar="N", default=0, show_default=True,
    help="Whose part of the order to print, from 0 on.",
)  # fmt: skip
@click.option(
    "--world", type=int, metavar="N", default=1, show_default=True,
    help="How many ranks the order is cut into parts for.",
)  # fmt: skip
@click.option("--drop-last", is_flag=True, help="Leave a remainder out; else it is filled up.")
@click.option("-0", "nul", is_flag=True, help="Paths end in NUL, not in a newline.")
@click.option("--quality", is_flag=True, help="Show how random the order is, not the order.")
def shuffle(
    target: Address, seed: int, epoch: int, group_size: int, full: bool,
    rank: int, world: int, drop_last: bool, nul: bool, quality: bool,
) -> None:  # fmt: skip
    """Print a chunk-wise order of the files in a dataset or folder, one path a line.

    Chunks are shuffled and cut into groups, and the files of each group are shuffled: whoever reads
    in that order needs two groups of chunks in memory. The same numbers give the same order
    everywhere. Ranks get parts of equal length; a remainder is filled up from the start of the
    order, or dropped.

    \b
    Examples:
      dlcmd shuffle pets/train --seed 1 --epoch 0 | head
      dlcmd shuffle pets --seed 1 --epoch 7 --rank 3 --world 8 -0 | xargs -0 -n1 cat
      dlcmd shuffle pets --seed 1 --epoch 0 --group-size 20 --quality
    """
    with open_repository_from_flags() as repository:
        view = repository.view(target.dataset)
        below = index_of_path(view, target.path)
        if view.stat(below).kind != Kind.FOLDER:
            raise UsageError(f"{target} is not a folder")
        if full:
            order = full_shuffle(
                view, seed, epoch, rank=rank, world=world, drop_last=drop_last, below=below
            )
        else:
            order = chunk_shuffle(
                view, seed, epoch, group_size=group_size, rank=rank, world=world,
                drop_last=drop_last, below=below,
            )  # fmt: skip
        if quality:
            _print_quality(quality_of(view, order, below=below))
        else:
            if not (nul or global_flags().json):
                _refuse_newlines(view, order)
            emit(_lines(view, order, nul=nul))


def _batches(view: Snapshot, order: Indices) -> Iterator[bytes]:
    for start in range(0, len(order), _BATCH):
        yield from view.paths(order[start : start + _BATCH])


def _refuse_newlines(view: Snapshot, order: Indices) -> None:
    """Before anything is printed. Raises UsageError."""
    if not (view.columns.names == ord("\n")).any():
        return
    for path in _batches(view, order):
        if b"\n" in path:
            raise UsageError(
                f"{path!r} has a newline in its name, and would be two lines",
                advice="-0 ends paths in NUL instead",
            )


def _lines(view: Snapshot, order: Indices, *, nul: bool) -> Iterator[bytes]:
    if global_flags().json:
        return (_json_line(path) for path in _batches(view, order))
    if nul:
        return (path + b"\0" for path in _batches(view, order))
    return map(name_line, _batches(view, order))


def _json_line(path: bytes) -> bytes:
    return json.dumps(json_name(path)).encode() + b"\n"


def _print_quality(measured: OrderQuality) -> None:
    """A table, or one object."""
    if global_flags().json:
        say_json({"batch_files": BATCH_FILES, **asdict(measured)})
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
    if sys.stdout.isatty():
        from .drawing import table  # noqa: PLC0415  # rich takes 0.1 s to import

        table(_COLUMNS, rows, _COLUMNS[1:])
    else:
        emit("\t".join(row).encode() + b"\n" for row in rows)
