"""`dlcmd get` and `dlcmd cat`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

from diesel_fs.client import extract
from diesel_fs.client.extract import GetReport
from diesel_fs.errors import ConflictError, UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.repository.local import LocalRepository, index_of_path
from diesel_fs.system.atomic_file import atomic_file, is_stdout, named_file, write_error

from .addresses import Address, entry_reader, open_repository_from_flags, versioned_address
from .options import global_flags, verb
from .output import (
    STDOUT,
    bytes_text,
    count_text,
    emit,
    json_failed,
    raise_if_partial,
    say,
    say_json,
)
from .progress import Progress, shown_progress


@verb("get")
@click.argument("source", type=versioned_address, metavar="DATASET[@VERSION][/path]")
@click.argument("dest", required=False, metavar="[DEST]")
@click.option("--tar", metavar="FILE|-", help="Write a tar, in place of DEST.")
@click.option("--force", is_flag=True, help="Replace what is there and different.")
def get(source: Address, dest: str | None, tar: str | None, force: bool) -> None:
    """Write contents back, with mode, mtime and links, to a folder, a file or a tar.

    The contents of a folder go into DEST. What is there and equal is left alone, what is there and
    different is named and left alone, unless --force. Nothing is written outside DEST.

    \b
    Examples:
      dlcmd get pets ~/copy
      dlcmd get pets/train/cats/1.jpg .
      dlcmd get pets --tar - | tar tv
    """
    if (dest is None) == (tar is None):
        raise UsageError("get takes either DEST or --tar FILE", advice="see --help")
    to_stdout = tar is not None and (tar == "-" or is_stdout(Path(tar)))
    with open_repository_from_flags() as repository, shown_progress(f"get {source}") as show:

        def progress(report: GetReport) -> None:
            if not (to_stdout and global_flags().json):  # there the tar has stdout for itself
                show(Progress(report.entries, report.total, report.content_bytes))

        view = source.view(repository)
        with entry_reader(repository, view) as reader:
            if tar is not None:
                with _tar_file("-" if to_stdout else tar, force=force) as out:
                    report = extract.get_tar(view, reader, source.path, out, progress)
            else:
                where = _destination(
                    repository, str(dest), view.name(index_of_path(view, source.path))
                )
                report = extract.get(
                    view, reader, source.path, where, force=force, progress=progress
                )
    _tell(report, source, quiet=to_stdout)


def _destination(repository: LocalRepository, dest: str, name: bytes) -> Path:
    """DEST, which may end in a slash. Raises UsageError where it lies in the repository."""
    path = Path(dest)
    real, store = Path(os.path.realpath(path)), repository.url.path.resolve()
    if repository.url.scheme == "file" and (real == store or store in real.parents):
        raise UsageError(f"{dest} lies in the repository {store}", advice="name another folder")
    if dest.endswith("/") and name:
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _tar_file(name: str, *, force: bool) -> Iterator[BinaryIO]:
    """Where a tar goes: stdout for `-`, else a file that is there only when it is whole."""
    if name == "-":
        if sys.stdout.isatty():
            raise UsageError("a tar is nothing for a terminal", advice="pipe it, or name a file")
        sys.stdout.flush()
        with named_file(os.dup(1), STDOUT) as file:
            yield file
        return
    path = Path(name)
    if path.is_file() and not force:
        raise ConflictError(f"{name} is there", advice="--force replaces it")
    try:
        with atomic_file(path, mode=0o666, sync=False) as file:
            yield file
    except OSError as error:
        if error.filename != str(path):  # not `name`: it may be `./x`
            raise
        raise write_error(name, error) from error


def _tell(report: GetReport, source: Address, *, quiet: bool) -> None:
    """The result, and on stderr what was left out. Raises PartialError."""
    if global_flags().json and not quiet:
        say_json(
            {
                "event": "done",
                "dataset": source.dataset,
                "files": report.files,
                "bytes": report.content_bytes,
                "unchanged": report.unchanged,
                "failed": json_failed(report.failed),
            }
        )
    elif not quiet:
        say(
            f"got {count_text(report.files, 'file')} ({bytes_text(report.content_bytes)});"
            f" {report.unchanged:,} unchanged"
        )
    raise_if_partial(report.failed, str(source), "written")


@verb("cat")
@click.argument(
    "sources", nargs=-1, required=True, type=versioned_address, metavar="DATASET[@VERSION]/path..."
)
def cat(sources: tuple[Address, ...]) -> None:
    """Write the contents of files to standard output, one behind the other.

    \b
    Examples:
      dlcmd cat pets/README
      dlcmd cat pets/train/cats/1.jpg > cat.jpg
    """
    with open_repository_from_flags() as repository:
        for source in sources:
            _each_piece(repository, source, lambda piece: emit([piece]))


def _each_piece(
    repository: LocalRepository, source: Address, take: Callable[[memoryview], None]
) -> None:
    view = source.view(repository)
    index = index_of_path(view, source.path)
    kind = view.stat(index).kind
    if kind == Kind.LINK:
        raise UsageError(f"{source} is a link to {os.fsdecode(view.link(index))!r}")
    if kind == Kind.FOLDER:
        raise UsageError(f"{source} is a folder", advice="`dlcmd get` writes folders")
    with entry_reader(repository, view) as reader:
        for extent in view.extents(index):
            take(reader.read(index, extent.start, extent.size))
