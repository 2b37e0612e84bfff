"""Where a mount's content comes from: the one place where a mount is joined to a repository.

Owned here: which snapshot a request means, whether it may be used although it is not the current
one, and how much memory the reader gets.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..cache.store import ContentReader as RepositoryReader
from ..errors import ConflictError, DieselError, ForeignError, MetadataError, NoSuchDataset
from ..repository import DatasetInfo, Repository
from ..snapshot import Snapshot
from ..snapshots import adopt
from ..vfs import ContentReader
from .request import MountRequest

MEMORY_FRACTION = 4
"""By default the chunks in memory may take one part in this many of what is available."""

MEMORY_BYTES_MIN = 64 << 20

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Source:
    """What a mount shows: a snapshot, and a reader of the content; and what to warn its user of."""

    snapshot: Snapshot
    reader: ContentReader
    warning: str = ""


def open_source(request: MountRequest) -> Source:
    """The dataset that was asked for. Raises DieselError."""
    with Repository.open(request.url) as repository:  # reading needs the object store alone
        warning = ""
        if request.snapshot_file:
            snapshot = adopt(Path(request.snapshot_file))
            warning = _doubt(repository, request, snapshot)
        else:
            snapshot = repository.view(request.dataset)
        memory_bytes = request.memory_bytes or _available_bytes() // MEMORY_FRACTION
        reader = RepositoryReader(snapshot, repository.objects, max(memory_bytes, MEMORY_BYTES_MIN))
    return Source(snapshot, reader, warning)


def _doubt(repository: Repository, request: MountRequest, snapshot: Snapshot) -> str:
    """What a snapshot from a file is beside the current version, where that must be told.

    FAULTS E4 to E6. Raises ForeignError for another dataset's; ConflictError for one that is stale
    and refused; MetadataError where nobody can tell, unless `offline`.
    """
    info = _known(repository, request)
    if snapshot.dataset != request.dataset or (info and info.identity != snapshot.identity):
        raise ForeignError(
            f"{request.snapshot_file} is a snapshot of {snapshot.dataset!r} "
            f"({snapshot.identity}), not of {request.dataset!r}"
        )
    if info is None or request.offline:
        return ""
    known = info.marker.version if info.marker else 0
    current = max(known, repository.snapshots.newest(info.identity))
    text = ""
    if current > snapshot.version:
        text = f"{request.snapshot_file} is of version {snapshot.version}, current is {current}"
        if request.stale == "refuse":
            raise ConflictError(text, advice="save it again, or mount with --stale warn")
    elif known < snapshot.version:
        text = f"the metadata store is behind {request.snapshot_file} (version {snapshot.version})"
    return "" if request.stale == "allow" else text


def _known(repository: Repository, request: MountRequest) -> DatasetInfo | None:
    """What is known of the dataset; None only where `offline` and the store cannot tell."""
    try:
        if repository.meta_problem is not None and not request.offline:
            raise repository.meta_problem
        return repository.dataset(request.dataset)
    except NoSuchDataset:
        raise
    except DieselError as error:
        if request.offline:
            return None
        raise MetadataError(
            f"nobody can tell whether {request.snapshot_file} is current: {error.message}",
            advice="--offline mounts it without asking",
        ) from error


def _available_bytes() -> int:
    """Memory that this process may still have without swapping or being killed."""
    listed = ""
    with suppress(OSError):
        listed = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
    return min(_free_bytes(), _cgroup_bytes(CGROUPS, listed))


def _free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes(mounted: Path, listed: str) -> int:
    """The least limit of the control groups that /proc/self/cgroup lists, v2 or v1, and theirs.

    In a container the listed path may be the host's: what it does not have here says nothing, and
    the container's own limit stands at the top.
    """
    limits = [1 << 62]
    for group in re.findall(r"^0::/(.*)$", listed, re.MULTILINE):
        limits += _limits(mounted, group, "memory.max")
    for group in re.findall(r"^\d+:(?:\S+,)?memory(?:,\S+)?:/(.*)$", listed, re.MULTILINE):
        limits += _limits(mounted / "memory", group, "memory.limit_in_bytes")
    return min(limits)


def _limits(top: Path, group: str, name: str) -> Iterator[int]:
    for folder in (top / group, *(top / group).parents):
        if folder.is_relative_to(top):
            with suppress(OSError, ValueError):  # "max", or none here
                yield int((folder / name).read_text())
