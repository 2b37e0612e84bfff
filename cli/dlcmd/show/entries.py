"""Describes datasets, entries and snapshots in JSON."""

import stat as modes

from diesel_fs.format.entries import Kind, Stat
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.catalog import DatasetInfo

from .output import Value, json_name

SECOND_NS = 1_000_000_000

KIND_BITS = {Kind.FILE: modes.S_IFREG, Kind.LINK: modes.S_IFLNK, Kind.FOLDER: modes.S_IFDIR}


def dataset_json(info: DatasetInfo) -> dict[str, Value]:
    """Version and counts are None if the metadata store has no record of them."""
    head = info.head
    return {
        "dataset": info.name,
        "identity": str(info.identity),
        "created": info.created_ns / SECOND_NS,
        "version": head.version if head else None,
        "files": head.files if head else None,
        "bytes": head.bytes if head else None,
        "chunks": head.chunks if head else None,
    }


def entry_json(view: Snapshot, index: int, path: bytes, entry: Stat) -> dict[str, Value]:
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


def snapshot_json(view: Snapshot) -> dict[str, Value]:
    return {
        "dataset": view.dataset,
        "identity": str(view.identity),
        "version": view.version,
        "entries": view.entry_count,
        "files": view.file_count,
        "bytes": view.byte_count,
        "chunks": view.chunk_count,
    }
