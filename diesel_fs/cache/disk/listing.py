"""The contents of a cache's folder, for programs that only look: `dlcmd doctor`, the CSI driver."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from ...format.entries import ChunkId
from .folder import (
    CHUNK_NAME,
    LOG_NAME,
    dataset_folders_in,
    find_dataset,
)
from .marker import is_cache_folder, locked_for_listing


@dataclass(frozen=True, slots=True)
class CachedDatasetUse:
    """The bytes of a dataset in a cache's folder, and its last use (seconds since 1970)."""

    folder: str
    bytes: int
    used_s: float
    is_pinned: bool


def cached_datasets(path: Path) -> list[CachedDatasetUse]:
    """The datasets in a cache's folder. Nothing is changed. Raises OSError, and BusyError if other
    processes keep the folder locked."""
    with locked_for_listing(path):
        datasets = [find_dataset(each) for each in dataset_folders_in(f"{path}")]
    found = []
    for dataset in datasets:
        used = 0
        with os.scandir(dataset.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
        found.append(CachedDatasetUse(dataset.folder, used, dataset.used_s, dataset.is_pinned))
    return found


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """The contents of a dataset's folder in a cache, by the names of its files."""

    chunks: tuple[ChunkId, ...]
    """The chunks that have files here. Their bytes were not checked."""
    has_logs: bool
    """Whether there are order logs, which have contents of the dataset, too."""


def dataset_folders(path: Path) -> dict[str, UUID]:
    """The folders of datasets in a cache's folder, and the datasets' identities. Nothing is locked
    or changed. Raises OSError."""
    if not is_cache_folder(path):
        return {}
    return {each: UUID(hex=os.path.basename(each)) for each in dataset_folders_in(f"{path}")}


def list_files(folder: str) -> CachedFiles:
    """The chunks and logs in the folder of a dataset. Nothing is locked or changed. Raises
    OSError."""
    chunks, has_logs = [], False
    with os.scandir(folder) as entries:
        for entry in entries:
            has_logs = has_logs or LOG_NAME.fullmatch(entry.name) is not None
            is_chunk = entry.name[0] != "." and CHUNK_NAME.fullmatch(entry.name) is not None
            if is_chunk and entry.is_file(follow_symlinks=False):
                chunks.append(ChunkId(bytes.fromhex(entry.name)))
    return CachedFiles(tuple(chunks), has_logs)
