"""The verbs `ls` (lists entries), `stat` (shows one entry) and `du` (counts bytes)."""

import json
import stat as modes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from diesel_fs.errors import DieselError, UsageError
from diesel_fs.format.chunk_id import chunk_id_text, id_seconds
from diesel_fs.format.entries import Codec, Kind, Stat
from diesel_fs.format.snapshot import layout
from diesel_fs.format.snapshot.reader import Indices, Snapshot
from diesel_fs.names import shown
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.versions import KeptVersion

from .addresses import (
    Address,
    current_view,
    listed_address,
    open_repository_from_flags,
    versioned_address,
)
from .options import ALL_VERSIONS, argument, global_flags, option, verb
from .output import (
    Value,
    bytes_text,
    json_name,
    name_line,
    print_json,
    print_note,
    print_table,
    time_text,
    write_stdout,
)

_SECOND_NS = 1_000_000_000
_BATCH = 4096
_KIND_BITS = {Kind.FILE: modes.S_IFREG, Kind.LINK: modes.S_IFLNK, Kind.FOLDER: modes.S_IFDIR}


@verb("ls")
@argument("target", required=False, type=listed_address, metavar="[DATASET[@VERSION][/path]]")
@option("-l", "--long", is_flag=True, help="Show mode, size and mtime, too.")
@option("-R", "--recursive", is_flag=True, help="List everything below the folder, by its paths.")
@option(
    "-0", "nul", is_flag=True, help="End names with NUL instead of a newline, and escape nothing."
)
def ls(target: Address | None, long: bool, recursive: bool, nul: bool) -> None:
    """List datasets, the entries of a folder, or (with DATASET@) the versions that are kept.

    On a terminal, control characters and bytes that are not text are shown escaped. In a pipe or
    file, names are written unchanged, one a line, as ls and find write them. A name may contain a
    newline: with -0, a program can tell such a name from two names.

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
                    "published": each.published_ns / _SECOND_NS,
                    "files": each.files,
                    "bytes": each.bytes,
                }
            )
        return
    rows = []
    for each in versions:
        published = time_text(each.published_ns / _SECOND_NS)
        rows.append([str(each.version), published, str(each.files), str(each.bytes)])
    print_table(("version", "published", "files", "bytes"), rows, numbers=("files", "bytes"))


def _list_datasets(repository: Repository, *, long: bool) -> None:
    found_datasets = repository.datasets()
    if long or global_flags().json:
        found_datasets = [_without_lost_counts(repository, info) for info in found_datasets]
    if global_flags().json:
        for info in found_datasets:
            print_json(_dataset_json(info))
        return
    if not long:
        write_stdout(info.name.encode() + b"\n" for info in found_datasets)
        return
    columns = ("name", "files", "bytes", "chunks", "version", "created")
    rows = [_dataset_row(info) for info in found_datasets]
    print_table(columns, rows, numbers=columns[1:5])


def _without_lost_counts(repository: Repository, info: DatasetInfo) -> DatasetInfo:
    """A dataset without its counts if the metadata store has lost newer ones, which a note says."""
    if not (warning := repository.loss_warning(info)):
        return info
    print_note(warning)
    return replace(info, head=None)


def _dataset_row(info: DatasetInfo) -> list[str]:
    """The row of a dataset; with question marks if the metadata store has no counts of it."""
    described = _dataset_json(info)
    counts = [described[name] for name in ("files", "bytes", "chunks", "version")]
    created = time_text(info.created_ns / _SECOND_NS)
    return [info.name, *("?" if count is None else str(count) for count in counts), created]


def _dataset_json(info: DatasetInfo) -> dict[str, Value]:
    head = info.head  # the metadata store's record of version and counts; None where it has none
    return {
        "dataset": info.name,
        "identity": str(info.identity),
        "created": info.created_ns / _SECOND_NS,
        "version": head.version if head else None,
        "files": head.files if head else None,
        "bytes": head.bytes if head else None,
        "chunks": head.chunks if head else None,
    }


def _lines(
    view: Snapshot, chosen: Indices, top: bytes, *, recursive: bool, long: bool, nul: bool
) -> Iterator[bytes]:
    """The lines of a listing; with `recursive`, paths below `top` in place of names."""
    start, as_json = len(top) + 1 if top else 0, global_flags().json
    for first in range(0, len(chosen), _BATCH):
        batch = chosen[first : first + _BATCH]
        paths = view.paths(batch)
        stats: Iterator[Stat | None] = iter([None] * len(batch))
        if long or as_json:
            stats = iter(view.stat_many(batch))
        for index, path, entry in zip(batch.tolist(), paths, stats, strict=True):
            if as_json and entry is not None:
                yield json.dumps(_entry_json(view, index, path, entry)).encode() + b"\n"
                continue
            name = path[start:] if recursive else path.rpartition(b"/")[2]
            line = name + b"\0" if nul else name_line(name)
            if entry is not None:
                if entry.kind == Kind.LINK:
                    line = line[:-1] + b" -> " + name_line(view.link(index))
                line = _long(entry).encode() + line
            yield line


def _long(entry: Stat) -> str:
    mode = modes.filemode(_KIND_BITS[entry.kind] | entry.mode)
    return f"{mode} {entry.size:>12} {time_text(entry.mtime_ns / _SECOND_NS)} "


def _entry_json(view: Snapshot, index: int, path: bytes, entry: Stat) -> dict[str, Value]:
    described: dict[str, Value] = {
        **json_name(path),
        "kind": entry.kind.name.lower(),
        "mode": entry.mode,
        "size": entry.size,
        "mtime_ns": entry.mtime_ns,
    }
    if entry.kind == Kind.LINK:
        described |= json_name(view.link(index), "target")
    return described


@verb("stat")
@argument("target", type=versioned_address, metavar="DATASET[@VERSION][/path]")
def stat(target: Address) -> None:
    """Show the metadata of a dataset or an entry; of a file also where its bytes are stored.

    An extent is the part of a file that lies in one chunk. Offsets count from the chunk's start.
    The time of a chunk comes from its ID: the chunk was finished then, just before its upload.

    \b
    Examples:
      dlcmd stat pets
      dlcmd stat pets/train/cats/1.jpg
    """
    with open_repository_from_flags() as repository:
        info = repository.dataset(target.dataset)
        view = target.view(repository) if target.version else current_view(repository, info)
        index = view.index_of(target.path)
        described = _entry_json(view, index, target.path, view.stat(index))
        if not target.path:
            described |= _dataset_json(info)
            described |= {"entries": view.entry_count, "version": view.version}
            if info.head is None or info.head.version != view.version:
                described |= {"files": view.file_count, "bytes": view.byte_count}
                described["chunks"] = view.chunk_count
        described["extents"] = _extents(view, index)
    if global_flags().json:
        print_json(described)
    else:
        write_stdout(_described(described, view.stat(index)))


def _extents(view: Snapshot, index: int) -> list[Value]:
    return [
        {
            "start": extent.start,
            "size": extent.size,
            "chunk": chunk_id_text(view.chunk_ids[extent.chunk]),
            "offset": extent.offset,
            "length": extent.stored,
            "codec": Codec(extent.codec).name.lower(),
            "xxh3_64": f"{extent.checksum:016x}",
            "uploaded": id_seconds(view.chunk_ids[extent.chunk]),
        }
        for extent in view.extents(index)
    ]


def _described(described: dict[str, Value], entry: Stat) -> Iterator[bytes]:
    """The lines for a user: one for each value, and one for each extent."""
    shown_values = {
        **described,
        "mode": modes.filemode(_KIND_BITS[entry.kind] | entry.mode),
        "mtime_ns": f"{entry.mtime_ns} ({time_text(entry.mtime_ns / _SECOND_NS)})",
    }
    for name, value in shown_values.items():
        if name == "extents" and isinstance(value, list):
            for extent in value:
                assert isinstance(extent, dict)
                extent["uploaded"] = time_text(float(str(extent["uploaded"])))
                parts = " ".join(f"{key}={part}" for key, part in extent.items())
                yield f"extent    {parts}\n".encode()
        else:
            text = shown(str(value).encode("utf-8", "surrogateescape"))
            yield f"{name:<9} {text}\n".encode()


@verb("du")
@argument("targets", nargs=-1, type=versioned_address, metavar="[DATASET[@VERSION][/path]...]")
def du(targets: tuple[Address, ...]) -> None:
    """Count files, their bytes, and the bytes that they take in the repository.

    Compressed files take fewer bytes than they have. For a whole dataset, "reclaimable" is about
    how many bytes of replaced and deleted files `dlcmd purge` can free.

    \b
    Examples:
      dlcmd du
      dlcmd du pets/train pets/test
    """
    with open_repository_from_flags() as repository:
        everything = [Address(info.name) for info in repository.datasets()]
        for target in targets or everything:
            view = target.view(repository)
            files, content_bytes, stored_bytes = _usage(view, view.index_of(target.path))
            unused = _reclaimable(repository, target, view)
            if global_flags().json:
                print_json(
                    {
                        "dataset": target.dataset,
                        **json_name(target.path),
                        "files": files,
                        "bytes": content_bytes,
                        "stored_bytes": stored_bytes,
                        "reclaimable_bytes": unused,
                    }
                )
                continue
            amounts = f"{bytes_text(content_bytes)} ({content_bytes} bytes)"
            text = f"{files:,} files, {amounts}, stored as {bytes_text(stored_bytes)}"
            if unused:
                text += f", reclaimable {bytes_text(unused)}"
            text += f"\t{target}\n"
            write_stdout([text.encode("utf-8", "surrogateescape")])


def _reclaimable(repository: Repository, target: Address, view: Snapshot) -> int | None:
    """About how many bytes a purge can free; None for a part or an old version of a dataset, and
    where the metadata store does not answer."""
    if target.path or target.version:
        return None
    with suppress(DieselError):
        return repository.reclaimable_bytes(target.dataset, view)
    return None


def _usage(view: Snapshot, index: int) -> tuple[int, int, int]:
    """Of an entry and all below it: the number of files, their bytes, and their stored bytes."""
    below = view.walk(index)
    files = below[layout.kinds(view.columns.flags[below]) == Kind.FILE]
    # Of a file of several extents the column has 0, and each extent has its own number
    with_extents = files[(view.columns.flags[files] & layout.MANY_EXTENTS) != 0]
    stored_bytes = int(view.columns.stored[files].astype(np.uint64).sum())
    stored_bytes += sum(extent.stored for i in with_extents.tolist() for extent in view.extents(i))
    return len(files), int(view.columns.size[files].sum()), stored_bytes
