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
    """`used_s` is the last use, in seconds since 1970."""

    folder: str
    bytes: int
    used_s: float
    is_pinned: bool


def cached_datasets(path: Path) -> list[CachedDatasetUse]:
    """Changes nothing. Raises OSError, and BusyError if other processes keep the folder locked."""
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
    """A dataset's files, by their names."""

    chunks: tuple[ChunkId, ...]
    """Their bytes were not checked."""
    has_logs: bool  # they have contents of the dataset, too


def dataset_folders(path: Path) -> dict[str, UUID]:
    """The identities of datasets, by their folders. Locks and changes nothing. Raises OSError."""
    if not is_cache_folder(path):
        return {}
    return {each: UUID(hex=os.path.basename(each)) for each in dataset_folders_in(f"{path}")}


def list_files(folder: str) -> CachedFiles:
    """Locks and changes nothing. Raises OSError."""
    chunks, has_logs = [], False
    with os.scandir(folder) as entries:
        for entry in entries:
            has_logs = has_logs or LOG_NAME.fullmatch(entry.name) is not None
            is_chunk = entry.name[0] != "." and CHUNK_NAME.fullmatch(entry.name) is not None
            if is_chunk and entry.is_file(follow_symlinks=False):
                chunks.append(ChunkId(bytes.fromhex(entry.name)))
    return CachedFiles(tuple(chunks), has_logs)
