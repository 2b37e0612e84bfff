"""The interface of every repository of datasets: `LocalRepository` implements it over stores that
this process opens, `RemoteRepository` over requests to a server.

Here are also the options and reports of the long jobs (recover, verify, purge), and their form in
messages.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Self
from uuid import UUID

from ..credentials import Credentials
from ..errors import DieselError, MetadataBehind, NotFoundError, UsageError
from ..format.chunk import ChunkHeader, parse_header, parse_preamble
from ..format.chunk_id import LOWEST, IdSource
from ..format.entries import ChunkId, Rows, Stat
from ..format.object_names import chunk_object, chunk_of_object, chunk_prefix
from ..format.snapshot.reader import Snapshot
from ..net.messages import Fields, Message
from ..storage.objects.store import ObjectStore
from ..urls import RepositoryUrl
from .catalog import DatasetInfo
from .provenance import ArchiveRecord
from .retention import GRACE_S_MAX, KEEP_MAX, Deletion
from .versions import KeptVersion, PublishedVersions
from .writing import WriteSession

ReportProgress = Callable[[int, int], None]
"""A callback of the long jobs: the number of chunks that are done, and of all chunks."""


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(slots=True)
class Findings:
    """The results of `recover` or `verify`: damage (`problems`), chunks that the store failed to
    deliver (`unreachable`), and remarks about sound data (`notes`)."""

    chunks: int = 0  # all whose headers were tried
    entries: int = 0  # of the headers that were read, including replaced entries and tombstones
    files: int = 0  # of the current version
    bytes: int = 0  # the size of these files
    folded: int = 0  # chunks that the metadata store did not know
    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.problems or self.unreachable)

    def to_message(self) -> Message:
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Raises UsageError."""
        sent = Fields(message, "findings")
        names = ("chunks", "entries", "files", "bytes", "folded")
        chunks, entries, files, content_bytes, folded = map(sent.integer, names)
        problems, notes = sent.texts("problems"), sent.texts("notes")
        # Servers of version 0.1.0 and before send no `unreachable`
        unreachable = sent.texts("unreachable") if "unreachable" in message else []
        return cls(chunks, entries, files, content_bytes, folded, problems, unreachable, notes)


MAX_UNUSED_PPM = 50_000
"""A purge rewrites a chunk if more of it is unused, in parts per million (5 %)."""

AS_POLICY = -1
"""A value of `keep` or `grace_s`: the number in the dataset's retention policy counts."""


@dataclass(frozen=True, slots=True)
class PurgeOptions:
    max_unused_ppm: int = MAX_UNUSED_PPM
    keep: int = AS_POLICY  # the number of last versions
    grace_s: int = AS_POLICY  # how long a version stays for readers after it was current
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.keep > KEEP_MAX or self.grace_s > GRACE_S_MAX:
            raise UsageError(f"at most {KEEP_MAX} versions are kept, and {GRACE_S_MAX} s of grace")

    def to_message(self) -> Message:
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Raises UsageError."""
        sent = Fields(message, "options of a purge")
        options = cls(
            sent.integer("max_unused_ppm", MAX_UNUSED_PPM, high=1_000_000),
            sent.integer("keep", AS_POLICY, low=AS_POLICY, high=KEEP_MAX),
            sent.integer("grace_s", AS_POLICY, low=AS_POLICY, high=GRACE_S_MAX),
            sent.flag("dry_run", False),
        )
        sent.end()
        return options


@dataclass(slots=True)
class PurgeReport:
    """The work of a purge; after a dry run, the work that a purge would do."""

    rewritten: int = 0  # chunks whose live entries were copied into new chunks
    unused_bytes: int = 0  # of replaced and deleted entries in the rewritten chunks
    written: int = 0  # new chunks (0 after a dry run)
    copied_bytes: int = 0  # of the entries in the new chunks
    deleted: int = 0  # chunks
    deleted_bytes: int = 0
    waiting: int = 0  # empty chunks that the grace period, a version or a reader still needs
    waiting_bytes: int = 0
    tombstones: int = 0  # dropped ones
    versions_removed: int = 0
    versions_kept: int = 0
    leftovers: int = 0  # half-written objects of dead processes that were removed
    notes: list[str] = field(default_factory=list)

    def to_message(self) -> Message:
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Raises UsageError."""
        sent = Fields(message, "the report of a purge")
        report = cls(notes=sent.texts("notes"))
        for each in fields(cls):
            if each.name != "notes":
                setattr(report, each.name, sent.integer(each.name))
        return report


class Repository(ABC):
    """A set of datasets, and the operations on them. Any thread and forked child; a WriteSession
    belongs to one writer.

    `snapshots` are the published versions, `ids` makes the IDs of chunks, and `credentials`
    identify the user to a server (None without a server).
    """

    def __init__(
        self, objects: ObjectStore, snapshots: PublishedVersions, url: RepositoryUrl, ids: IdSource
    ) -> None:
        self.objects = objects
        self.snapshots = snapshots
        self.url = url
        self.ids = ids
        self.credentials: Credentials | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """The repository can be used again."""

    @property
    @abstractmethod
    def meta_problem(self) -> DieselError | None:
        """Why this process cannot use the metadata store; None if it can, or if a server does."""

    # Finding datasets

    @abstractmethod
    def datasets(self) -> list[DatasetInfo]:
        """Those that are not deleted, by name."""

    @abstractmethod
    def dataset(self, name: str) -> DatasetInfo:
        """Raises NoSuchDataset only if the dataset certainly does not exist."""

    def newest_known(self, info: DatasetInfo) -> int:
        """The greatest version in the metadata store (which may have lost one) or among published
        snapshots; 0 for none."""
        known = info.head.version if info.head else 0
        return max(known, self.snapshots.newest(info.identity))

    # Reading

    def view(self, name: str, *, lazy: bool = False) -> Snapshot:
        """All metadata of a dataset at its current version; at the newest snapshot if the metadata
        store cannot be used or does not know the dataset. With `lazy` the result may be merged only
        when it is used for more than some lookups (`LayeredSnapshot`), and is in no file then.
        Raises NoSuchDataset, or MetadataBehind if the current version cannot be known."""
        return self.view_of(self.dataset(name), lazy=lazy)

    @abstractmethod
    def view_of(self, info: DatasetInfo, *, lazy: bool = False) -> Snapshot:
        """`view` for a dataset that the caller has found."""

    def view_at(self, name: str, version: int) -> Snapshot:
        """A dataset at a kept version. Raises NoSuchDataset, NotFoundError."""
        identity = self.dataset(name).identity
        # Checked first: this machine may still have a cached copy of a removed snapshot
        if version not in self.snapshots.versions(identity):
            raise NotFoundError(
                f"version {version} of {name!r} is not kept",
                advice=f"`dlcmd ls {name}@` lists those that are",
            )
        return self.snapshots.load(identity, version)

    def kept_versions(self, name: str) -> Sequence[KeptVersion]:
        """The versions of a dataset that can be read, ascending. Raises NoSuchDataset."""
        return self.snapshots.kept(self.dataset(name).identity)

    @abstractmethod
    def staleness_warning(self, view: Snapshot) -> str:
        """A warning that `view` may not be current, with its age and the reason; "" if the metadata
        store can be used and has lost no version, and for a user without access to it, who always
        gets snapshots."""

    def loss_warning(self, info: DatasetInfo) -> str:
        """A warning that the metadata store has lost versions of a dataset, with the cure; "" if it
        has not, and with a server, which repairs its own losses."""
        return ""

    @abstractmethod
    def stat(self, name: str, path: bytes) -> Stat:
        """An entry's current state. Raises NoSuchPath, NoSuchDataset."""

    @abstractmethod
    def list(self, name: str, folder: bytes = b"") -> Rows:
        """The current entries of a folder. Raises NoSuchPath if it is no folder."""

    def read_header(self, identity: UUID, chunk: ChunkId) -> ChunkHeader:
        """The checked header of a chunk. Raises FormatError, ObjectStoreError."""
        name = chunk_object(identity, chunk)
        size = self.objects.stat(name).bytes
        front = self.objects.get(name, 0, min(size, _HEADER_GUESS_BYTES))
        preamble = parse_preamble(bytes(front), identity=identity, id=chunk, object_bytes=size)
        start = preamble.body_start - preamble.header_stored
        stored = bytes(front[start : preamble.body_start])
        if len(stored) < preamble.header_stored:
            stored = bytes(self.objects.get(name, start, preamble.header_stored))
        return parse_header(preamble, stored)

    def chunk_ids(self, identity: UUID, since: ChunkId = LOWEST) -> Iterator[ChunkId]:
        """The IDs of the durable chunks greater than `since`, ascending."""
        after = "" if since == LOWEST else chunk_object(identity, since)
        for name in self.objects.housekeeping.names(chunk_prefix(identity), after):
            chunk = chunk_of_object(name)
            if chunk is not None:
                yield chunk

    # Writing

    @abstractmethod
    def begin(self, name: str, *, create: bool = True) -> WriteSession:
        """Begin a writer's session on a dataset. `create` makes a missing dataset.

        Chunks that the metadata store lacks are committed first, unless they belong to a put under
        way. Raises NoSuchDataset, MetadataError, PermissionDenied; ObjectStoreRefused if this
        host's clock is ahead, before any write; LostChunks if the result would lack something that
        the newest snapshot has.
        """

    @abstractmethod
    def unreadable_paths(self, name: str) -> Sequence[bytes]:
        """The paths whose chunks are missing or too short, by the sizes of the objects. Putting
        these files again heals the dataset. Raises NoSuchDataset, MetadataError."""

    @abstractmethod
    def archive_records(self, identity: UUID) -> Sequence[ArchiveRecord]:
        """The known archives that a dataset was made from. Raises ObjectStoreError; NoSuchDataset
        from a server."""

    @abstractmethod
    def record_archive(self, identity: UUID, record: ArchiveRecord) -> None:
        """Remember that an archive was put, in place of an older record of the same source and
        target. Durable on return. Raises as `archive_records`."""

    @abstractmethod
    def publish(self, name: str, *, full: bool = False) -> int:
        """Write the snapshot of the current version beside the chunks; returns the version. All
        earlier commits are durable on return. `full` does not use the previous snapshot."""

    @abstractmethod
    def delete_dataset(self, name: str) -> Deletion:
        """Delete a dataset for ever. Objects that leases pin are left, and named in the log.
        Repeatable: an interrupted deletion continues. Raises NoSuchDataset, and MetadataError if
        its metadata would be left for ever."""

    def check_no_overlap(self, source: Path) -> None:
        """Raise UsageError if `source` lies in this repository, or the repository in it."""
        if self.url.scheme != "file":
            return
        real, store = Path(os.path.realpath(source)), self.url.path.resolve()
        if real == store or store in real.parents or real in store.parents:
            raise UsageError(
                f"{source} and the repository {store} lie in each other",
                advice="put from, or keep the repository in, another folder",
            )

    # Jobs

    @abstractmethod
    def recover(
        self,
        name: str,
        since_s: float | None = None,
        progress: ReportProgress = no_progress,
        *,
        forget_lost: bool = False,
    ) -> Findings:
        """Build the metadata of a dataset again from its chunks. By default all chunks make a fresh
        state; with `since_s` (seconds since 1970), the chunks since then are added to the state.

        If a chunk in the live metadata or the newest snapshot is lost or damaged, the problems name
        it with its files, and the state is not changed. `forget_lost` accepts the loss, and the
        notes list it. An unreadable orphan (a chunk that only the listing names) is a problem and
        is left out. Readers see the old state until the new one is complete; writers continue. A
        damaged metadata store is renamed, and a new one made for all datasets.

        Raises NoSuchDataset, MetadataError, UsageError; ObjectStoreError, before a change, if a
        chunk is unreachable or this host's clock is ahead.
        """

    @abstractmethod
    def verify(
        self, name: str, *, headers_only: bool = False, progress: ReportProgress = no_progress
    ) -> Findings:
        """Check every chunk (with `headers_only` not the bodies) and the metadata against them.
        Changes nothing, and may run beside a put and a purge.

        Raises NoSuchDataset; BusyError if a purge deletes chunks too fast; the reason if the
        metadata store cannot be used. But a lost SQLite database is reported as damage, and a
        metadata store that this user may not open is not checked.
        """

    @abstractmethod
    def purge(
        self,
        name: str,
        options: PurgeOptions | None = None,
        progress: ReportProgress = no_progress,
    ) -> PurgeReport:
        """Free the space of replaced and deleted entries (FORMAT.md, section 6). After an error,
        the completed steps stay.

        Raises NoSuchDataset; BusyError if another purge is under way; CorruptError, before any
        change, if chunks in the metadata are not found; NoSpaceError if new chunks find no room
        (deletable old ones have been deleted then).
        """

    @abstractmethod
    def reclaimable_bytes(self, name: str, view: Snapshot | None = None) -> int:
        """About how many bytes of chunks, without headers, belong to no file of the current
        version. `view` is the snapshot of that version, if the caller has it. Raises NoSuchDataset,
        MetadataError."""


_HEADER_GUESS_BYTES = 256 << 10  # holds nearly every header, so one request is enough


def check_recover_options(since_s: float | None, *, forget_lost: bool) -> None:
    if forget_lost and since_s is not None:
        raise UsageError("lost chunks are found only by reading all chunks: leave out `--since`")


def staleness_text(view: Snapshot, why: DieselError) -> str:
    """The text of `Repository.staleness_warning`; `why` is the reason."""
    age_s = max(0, time.time_ns() // 1_000_000_000 - view.version // 1_000_000)
    text = (
        f"{why.message.rstrip('.')}; this is version {view.version} of {view.dataset},"
        f" the newest snapshot, which is {timedelta(seconds=age_s)} old"
    )
    return f"{text}; {why.advice}" if isinstance(why, MetadataBehind) and why.advice else text
