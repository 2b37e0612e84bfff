"""Where a mount's content comes from: the one place where a mount is joined to a repository.

Owned here: which snapshot a request means, whether it may be used although it is not the current
one, and how much memory the reader gets.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ..cache.store import ContentReader as RepositoryReader
from ..errors import DieselError, ForeignError, MetadataError
from ..repository import Repository
from ..snapshot import Snapshot
from ..snapshots import adopt
from ..vfs import ContentReader
from .request import MountRequest

log = logging.getLogger("diesel.mount")

MEMORY_FRACTION = 4
"""By default the chunks in memory may take one part in this many of what is available."""

MEMORY_BYTES_MIN = 64 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """What a mount shows: a snapshot, and a reader of the content."""

    snapshot: Snapshot
    reader: ContentReader


def open_source(request: MountRequest) -> Source:
    """The dataset that was asked for. Raises DieselError."""
    repository = Repository.open(request.url)
    snapshot = _saved(repository, request) if request.snapshot_file else None
    if snapshot is None:
        snapshot = repository.view(request.dataset)
    memory_bytes = request.memory_bytes or _available_bytes() // MEMORY_FRACTION
    reader = RepositoryReader(snapshot, repository.objects, max(memory_bytes, MEMORY_BYTES_MIN))
    repository.close()  # reading needs the object store alone
    return Source(snapshot, reader)


def _saved(repository: Repository, request: MountRequest) -> Snapshot:
    """The snapshot in a file of the user's, compared with the current version (FAULTS E4-E6)."""
    snapshot = adopt(Path(request.snapshot_file))
    if request.offline:
        return snapshot
    try:
        info = repository.dataset(request.dataset)
    except MetadataError as error:
        error.advice = "--offline mounts the snapshot without asking"
        raise
    if info.identity != snapshot.identity:
        raise ForeignError(
            f"{request.snapshot_file} is a snapshot of {snapshot.dataset!r} "
            f"({snapshot.identity}), not of {request.dataset!r}"
        )
    current = info.marker.version if info.marker else repository.snapshots.newest(info.identity)
    if current == snapshot.version:
        return snapshot
    if current > snapshot.version:
        text = f"{request.snapshot_file} is of version {snapshot.version}, current is {current}"
    else:
        text = f"the metadata store is behind {request.snapshot_file} (version {snapshot.version})"
    if request.stale == "refuse" and current > snapshot.version:
        raise DieselError(text, advice="save it again, or mount with --stale warn")
    if request.stale != "allow":
        log.warning("%s", text)
    return snapshot


def _available_bytes() -> int:
    """Memory that is free or can be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
