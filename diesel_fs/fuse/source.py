"""Where a mount's content comes from: the one place where a mount is joined to a repository.

Owned here: which snapshot a request means, whether it may be used although it is not the current
one, and how much memory the reader gets.
"""

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..cache.extents import Batch, ExtentReader
from ..cache.store import ContentReader as RepositoryReader
from ..errors import ConflictError, DieselError, ForeignError, MetadataError, NoSuchDataset
from ..leases import ReadLease
from ..repositories import open_repository
from ..repository import DatasetInfo, Repository
from ..snapshot import Snapshot
from ..snapshot_match import Match, Places
from ..snapshots import adopt, private_file
from ..vfs import ContentReader
from .request import MountRequest

MEMORY_FRACTION = 2
"""By default a mount may take one part in this many of what is available."""

MEMORY_BYTES_MIN = 64 << 20

OWN_FRACTION = 8
"""Where contents are pushed, the server keeps one part in this many of that for chunks; the rest is
the kernel's pages."""

OWN_BYTES_MAX = 256 << 20

CGROUPS = Path("/sys/fs/cgroup")


class Pieces(Protocol):
    """Where contents come from, checked."""

    def batches(self, entries: npt.NDArray[np.uint32], /) -> Iterator[Batch]:
        """All parts of these files; what is damaged is left out. Raises DieselError."""
        ...

    def ahead(self, units: Sequence[npt.NDArray[np.uint32]], /) -> None:
        """What will probably be asked for next, the soonest first."""
        ...

    def stats(self) -> dict[str, int]:
        """What was read."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """What a mount shows, and what to warn its user of."""

    snapshot: Snapshot
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """How the memory of a mount is shared out, in bytes."""

    total_bytes: int

    @classmethod
    def of(cls, asked_bytes: int) -> "Memory":
        """What was asked for; 0: a part of what is available."""
        return cls(asked_bytes or max(_available_bytes() // MEMORY_FRACTION, MEMORY_BYTES_MIN))

    def server_bytes(self, *, pushes: bool) -> int:
        """For chunks in the server: everything where nothing is pushed."""
        return min(self.total_bytes // OWN_FRACTION, OWN_BYTES_MAX) if pushes else self.total_bytes

    @property
    def push_bytes(self) -> int:
        """For contents in the kernel's page cache."""
        return self.total_bytes - self.server_bytes(pushes=True)


class SourceOpener:
    """Opens what a request names; the server and the helper of a mount each do."""

    def open(self, request: MountRequest) -> Source:
        """The dataset that was asked for. Raises DieselError."""
        with _opened(request) as repository:  # reading needs the object store alone
            if request.snapshot_file:
                snapshot = adopt(Path(request.snapshot_file))
                return Source(snapshot, _doubt(repository, request, snapshot))
            if request.version:
                return Source(repository.view_at(request.dataset, request.version))
            return Source(repository.view(request.dataset))

    def newest(self, request: MountRequest, identity: UUID) -> int:
        """The current version of the dataset that is mounted. Raises NoSuchDataset where it has

        been deleted, ForeignError where another one has its name, DieselError where nobody can
        tell.
        """
        with _opened(request) as repository:
            info = repository.dataset(request.dataset)
            if info.identity != identity:
                raise ForeignError(f"{request.dataset!r} is another dataset now ({info.identity})")
            return _newest(repository, info)

    def lease(self, request: MountRequest, snapshot: Snapshot) -> ReadLease | None:
        """That this process reads a version, where its chunks are objects. Raises DieselError."""
        with _opened(request) as repository:
            return ReadLease.take(repository.objects, snapshot.identity, snapshot.version)

    def reader(
        self, request: MountRequest, snapshot: Snapshot, memory_bytes: int, *, pushes: bool
    ) -> ContentReader:
        """A reader of the content through so much memory, for what is not pushed.

        Raises DieselError.
        """
        with _opened(request) as repository:
            objects = repository.objects
            return RepositoryReader(snapshot, objects, memory_bytes, prefer_entries=pushes)

    def pieces(self, request: MountRequest, snapshot: Snapshot) -> Pieces:
        """What the helper pushes. Raises DieselError."""
        with _opened(request) as repository:
            return ExtentReader(snapshot, repository.objects)


def snapshot_descriptor(snapshot: Snapshot) -> int:
    """A descriptor of a file that holds the snapshot, for another process of the same mount."""
    try:
        return private_file(snapshot.identity, snapshot.version)
    except OSError:  # there is no private folder, or it has newer versions
        descriptor = os.memfd_create("diesel-snapshot", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(snapshot.buffer)
        return descriptor


def numbers_file(found: Match, nodes: npt.NDArray[np.uint64]) -> int:
    """A descriptor of a file that holds a version's nodes and what its entries were before, for
    another process of the same mount. Raises OSError.
    """
    descriptor = os.memfd_create("diesel-numbers", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        for column in (nodes, found.met, found.was):
            file.write(column.data)
    return descriptor


def read_numbers(
    descriptor: int, entry_count: int
) -> tuple[npt.NDArray[np.uint64], Places, Places]:
    """The columns in such a file, mapped."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    nodes = np.frombuffer(mapped, np.uint64, entry_count)
    places = np.frombuffer(mapped, np.int32, 2 * entry_count, nodes.nbytes)
    return nodes, places[:entry_count], places[entry_count:]


def snapshot_at(descriptor: int) -> Snapshot:
    """The snapshot in such a file, mapped."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    return Snapshot(memoryview(mapped), verify=False)


def _opened(request: MountRequest) -> Repository:
    return open_repository(request.url, request.credentials)


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
    current = _newest(repository, info)
    text = ""
    if current > snapshot.version:
        text = f"{request.snapshot_file} is of version {snapshot.version}, current is {current}"
        if request.stale == "refuse":
            raise ConflictError(text, advice="save it again, or mount with --stale warn")
    elif known < snapshot.version:
        text = f"the metadata store is behind {request.snapshot_file} (version {snapshot.version})"
    return "" if request.stale == "allow" else text


def _newest(repository: Repository, info: DatasetInfo) -> int:
    """The greatest version that anybody knows of."""
    known = info.marker.version if info.marker else 0
    return max(known, repository.snapshots.newest(info.identity))


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
