"""The verb `ls`."""

import json
import stat as modes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind, Stat
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.versions import KeptVersion

from ..args.addresses import (
    Address,
    listed_address,
    open_repository_from_flags,
)
from ..args.options import ALL_VERSIONS, argument, global_flags, option, verb
from ..show.entries import KIND_BITS, SECOND_NS, dataset_json, entry_json
from ..show.output import (
    name_line,
    print_json,
    print_note,
    print_table,
    time_text,
    write_stdout,
)

_BATCH = 4096


@verb("ls")
@argument("target", required=False, type=listed_address, metavar="[DATASET[@VERSION][/path]]")
@option("-l", "--long", is_flag=True, help="Show mode, size and mtime, too.")
@option("-R", "--recursive", is_flag=True, help="List everything below the folder, by its paths.")
@option(
    "-0", "nul", is_flag=True, help="End names with NUL instead of a newline, and escape nothing."
)
def ls(target: Address | None, long: bool, recursive: bool, nul: bool) -> None:
    """List datasets, the entries of a folder, or (with DATASET@) the versions that are kept.

    On a terminal, control characters and bytes that are not text are escaped. In a pipe or file,
    names are written unchanged, one a line, as by ls and find. A name may contain a newline; with
    -0 it is still one name.

    \b
    Examples:
      dlcmd ls
      dlcmd ls -l pets/train
      dlcmd ls -R pets | wc -l
      dlcmd ls -R -0 pets | xargs -0 -n 1 echo
      dlcmd ls pets@
      dlcmd ls pets@1790000000000000/train
    """
    with open_repository_from_flags() as repository:
        if nul and (
            target is None or target.version == ALL_VERSIONS or long or global_flags().json
        ):
            raise UsageError(
                "-0 lists the names of entries only", advice="give a DATASET, and no -l or --json"
            )
        if target is None:
            _list_datasets(repository, long=long)
            return
        if target.version == ALL_VERSIONS:
            _list_versions(repository.kept_versions(target.dataset))
            return
        view = target.view(repository)
        top = view.index_of(target.path)
        is_folder = view.stat(top).kind == Kind.FOLDER
        if target.must_be_folder and not is_folder:
            raise UsageError(f"{target} is not a folder")
        if not is_folder:
            chosen = np.array([top], np.int64)
        elif recursive:
            chosen = view.walk(top)[1:]
        else:
            chosen = np.array(view.children(top), np.int64)
        top_path = target.path if is_folder else b""
        write_stdout(_lines(view, chosen, top_path, recursive=recursive, long=long, nul=nul))


def _list_versions(versions: Sequence[KeptVersion]) -> None:
    if global_flags().json:
        for each in versions:
            print_json(
                {
                    "version": each.version,
                    "published": each.published_ns / SECOND_NS,
                    "files": each.files,
                    "bytes": each.bytes,
                }
            )
        return
    rows = []
    for each in versions:
        published = time_text(each.published_ns / SECOND_NS)
        rows.append([str(each.version), published, str(each.files), str(each.bytes)])
    print_table(("version", "published", "files", "bytes"), rows, numbers=("files", "bytes"))


def _list_datasets(repository: Repository, *, long: bool) -> None:
    found_datasets = repository.datasets()
    if long or global_flags().json:
        found_datasets = [_without_lost_counts(repository, info) for info in found_datasets]
    if global_flags().json:
        for info in found_datasets:
            print_json(dataset_json(info))
        return
    if not long:
        write_stdout(info.name.encode() + b"\n" for info in found_datasets)
        return
    columns = ("name", "files", "bytes", "chunks", "version", "created")
    rows = [_dataset_row(info) for info in found_datasets]
    print_table(columns, rows, numbers=columns[1:5])


def _without_lost_counts(repository: Repository, info: DatasetInfo) -> DatasetInfo:
    """Drops the counts, with a note, if the metadata store has lost newer ones."""
    if not (warning := repository.loss_warning(info)):
        return info
    print_note(warning)
    return replace(info, head=None)


def _dataset_row(info: DatasetInfo) -> list[str]:
    described = dataset_json(info)
    counts = [described[name] for name in ("files", "bytes", "chunks", "version")]
    created = time_text(info.created_ns / SECOND_NS)
    return [info.name, *("?" if count is None else str(count) for count in counts), created]


def _lines(
    view: Snapshot, chosen: Indices, top: bytes, *, recursive: bool, long: bool, nul: bool
) -> Iterator[bytes]:
    start, as_json = len(top) + 1 if top else 0, global_flags().json
    for first in range(0, len(chosen), _BATCH):
        batch = chosen[first : first + _BATCH]
        paths = view.paths(batch)
        stats: Iterator[Stat | None] = iter([None] * len(batch))
        if long or as_json:
            stats = iter(view.stat_many(batch))
        for index, path, entry in zip(batch.tolist(), paths, stats, strict=True):
            if as_json and entry is not None:
                yield json.dumps(entry_json(view, index, path, entry)).encode() + b"\n"
                continue
            name = path[start:] if recursive else path.rpartition(b"/")[2]
            line = name + b"\0" if nul else name_line(name)
            if entry is not None:
                if entry.kind == Kind.LINK:
                    line = line[:-1] + b" -> " + name_line(view.link(index))
                line = _long(entry).encode() + line
            yield line


def _long(entry: Stat) -> str:
    mode = modes.filemode(KIND_BITS[entry.kind] | entry.mode)
    return f"{mode} {entry.size:>12} {time_text(entry.mtime_ns / SECOND_NS)} "
