"""The verb `get`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from diesel_fs.client import extract
from diesel_fs.client.extract import GetReport
from diesel_fs.errors import ConflictError, DieselError, UsageError
from diesel_fs.repository.interface import Repository
from diesel_fs.system.atomic_file import atomic_file, is_stdout, named_file, write_error

from ..args.addresses import Address, entry_reader, open_repository_from_flags, versioned_address
from ..args.options import argument, global_flags, option, verb
from ..show.output import (
    STDOUT,
    bytes_text,
    count_text,
    is_terminal,
    json_failed,
    print_result,
    raise_if_partial,
)
from ..show.progress import shown_progress


@verb("get")
@argument("source", type=versioned_address, metavar="DATASET[@VERSION][/path]")
@argument("dest", required=False, metavar="[DEST]")
@option("--tar", metavar="FILE|-", help="Write a tar to this file, in place of DEST.")
@option("--force", is_flag=True, help="Replace files that exist and differ.")
def get(source: Address, dest: str | None, tar: str | None, force: bool) -> None:
    """Write a dataset back to a folder, a file or a tar, with mode, mtime and links.

    The contents of a folder go into DEST. An equal file is skipped; one that differs is named and
    kept, unless --force is given. Nothing is written outside DEST.

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
            if not (to_stdout and global_flags().json):  # JSON would go into the tar
                show(report.entries, report.total, report.content_bytes)

        view = source.view(repository)
        with entry_reader(repository, view) as reader:
            if tar is not None:
                with _tar_file("-" if to_stdout else tar, force=force) as out:
                    report = extract.get_tar(view, reader, source.path, out, progress)
            else:
                where = _destination(repository, str(dest), view.name(view.index_of(source.path)))
                report = extract.get(
                    view, reader, source.path, where, force=force, progress=progress
                )
    _print_report(report, source, quiet=to_stdout)


def _destination(repository: Repository, dest: str, name: bytes) -> Path:
    """If DEST ends in a slash, makes the folder for the entry `name` (empty: the root). Refuses a
    DEST in the repository."""
    path = Path(dest)
    real, store = Path(os.path.realpath(path)), repository.url.path.resolve()
    if repository.url.scheme == "file" and (real == store or store in real.parents):
        raise UsageError(f"{dest} lies in the repository {store}", advice="name another folder")
    if dest.endswith("/") and name:
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _tar_file(name: str, *, force: bool) -> Iterator[BinaryIO]:
    """Yields stdout for `-`, otherwise a file that appears when it is whole."""
    if name == "-":
        if sys.stdout is None:
            raise DieselError("standard output is closed")
        if is_terminal():
            raise UsageError(
                "a tar cannot be written to a terminal", advice="pipe it, or name a file"
            )
        sys.stdout.flush()
        with named_file(os.dup(1), STDOUT) as file:
            yield file
        return
    path = Path(name)
    if path.is_file() and not force:
        raise ConflictError(f"{name} exists", advice="--force replaces it")
    try:
        with atomic_file(path, mode=0o666, sync=False) as file:
            yield file
    except OSError as error:
        if error.filename != str(path):  # `Path` drops the `./` of `./x`
            raise
        raise write_error(name, error) from error


def _print_report(report: GetReport, source: Address, *, quiet: bool) -> None:
    if not quiet:
        described = {
            "event": "done",
            "dataset": source.dataset,
            "files": report.files,
            "bytes": report.content_bytes,
            "unchanged": report.unchanged,
            "failed": json_failed(report.failed),
        }
        amount = f"{count_text(report.files, 'file')} ({bytes_text(report.content_bytes)})"
        print_result(described, f"got {amount}; {report.unchanged:,} unchanged")
    raise_if_partial(report.failed, str(source), "written")
