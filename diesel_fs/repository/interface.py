"""What every repository of datasets can do, on whichever side of a server it lies.

`Repository` is implemented twice: by `LocalRepository` over stores that this process opens, and by
`RemoteRepository` over requests to a server. Callers need not know which one they have. The values
that go in and come out of its long jobs (recover, verify, purge) stand here, too, with their form
in messages to and from a server.
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
"""Called with how much of a job is done, and how much there is in all (in chunks)."""


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(slots=True)
class Findings:
    """What `recover` or `verify` found in the chunks of a dataset: damage (`problems`), chunks that
    the store failed to deliver (`unreachable`), and what is no damage (`notes`)."""

    chunks: int = 0  # whose headers were read, or could not be
    entries: int = 0  # in these headers, replaced ones and tombstones too
    files: int = 0  # of the current version
    bytes: int = 0  # in these files
    folded: int = 0  # chunks that the metadata store did not know
    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether all of it could be looked at, and nothing is damaged or lost."""
        return not (self.problems or self.unreachable)

    def to_message(self) -> Message:
        """These findings as a message."""
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """The findings in a message. Raises UsageError for anything else."""
        sent = Fields(message, "findings")
        names = ("chunks", "entries", "files", "bytes", "folded")
        chunks, entries, files, content_bytes, folded = map(sent.integer, names)
        problems, notes = sent.texts("problems"), sent.texts("notes")
        # Servers of version 0.1.0 and before send no `unreachable`
        unreachable = sent.texts("unreachable") if "unreachable" in message else []
        return cls(chunks, entries, files, content_bytes, folded, problems, unreachable, notes)


MAX_UNUSED_PPM = 50_000
"""5 %: how many parts in a million of a chunk may be unused before a purge rewrites it."""

AS_POLICY = -1
"""Instead of a number: the one in the dataset's retention policy."""


@dataclass(frozen=True, slots=True)
class PurgeOptions:
    """What a purge may remove."""

    max_unused_ppm: int = MAX_UNUSED_PPM
    keep: int = AS_POLICY  # how many of the last versions
    grace_s: int = AS_POLICY  # how long a version stays for readers after it was current
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.keep > KEEP_MAX or self.grace_s > GRACE_S_MAX:
            raise UsageError(f"at most {KEEP_MAX} versions are kept, and {GRACE_S_MAX} s of grace")

    def to_message(self) -> Message:
        """These options as a message."""
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """The options in a message. Raises UsageError for anything else."""
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
    """What a purge did, or would have done; sizes in bytes."""

    rewritten: int = 0  # chunks whose entries were copied
    unused_bytes: int = 0  # in them
    written: int = 0  # new chunks
    copied_bytes: int = 0
    deleted: int = 0  # chunks
    deleted_bytes: int = 0
    waiting: int = 0  # empty chunks that the grace period, a version or a reader still needs
    waiting_bytes: int = 0
    tombstones: int = 0  # that were dropped
    versions_removed: int = 0
    versions_kept: int = 0
    leftovers: int = 0  # half-written objects of dead processes that were removed
    notes: list[str] = field(default_factory=list)

    def to_message(self) -> Message:
        """This report as a message."""
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """The report in a message. Raises UsageError for anything else."""
        sent = Fields(message, "the report of a purge")
        report = cls(notes=sent.texts("notes"))
        for each in fields(cls):
            if each.name != "notes":
                setattr(report, each.name, sent.integer(each.name))
        return report


class Repository(ABC):
    """Datasets, and what can be done with them.

    May be used from several threads and in forked children; a WriteSession belongs to one writer.
    A context manager: it closes the repository at the end.

    `objects` are the repository's objects, `snapshots` its published versions, `ids` makes the IDs
    of chunks, and `credentials` say as which user a server is asked (None where no server is).
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
        """Close what is open. The repository can be used again."""

    @property
    @abstractmethod
    def meta_problem(self) -> DieselError | None:
        """Why this process cannot use the metadata store; None where it can, or where a server
        does."""

    # Finding datasets

    @abstractmethod
    def datasets(self) -> list[DatasetInfo]:
        """All datasets that are not deleted, by name."""

    @abstractmethod
    def dataset(self, name: str) -> DatasetInfo:
        """The dataset of this name. Raises NoSuchDataset only where it is known not to exist."""

    def newest_known(self, info: DatasetInfo) -> int:
        """The greatest version of a dataset that the metadata store or a published snapshot has; 0
        for none. The metadata store may have lost what a snapshot has."""
        known = info.head.version if info.head else 0
        return max(known, self.snapshots.newest(info.identity))

    # Reading

    def view(self, name: str) -> Snapshot:
        """All metadata of a dataset at its current version.

        Where the metadata store cannot be used or does not know the dataset, this is the newest
        snapshot. Raises NoSuchDataset, or MetadataBehind where there is no way to know.
        """
        return self.view_of(self.dataset(name))

    @abstractmethod
    def view_of(self, info: DatasetInfo) -> Snapshot:
        """`view` of a dataset that has been found."""

    def view_at(self, name: str, version: int) -> Snapshot:
        """A dataset at a version that is kept. Raises NoSuchDataset, NotFoundError."""
        identity = self.dataset(name).identity
        if version not in self.snapshots.versions(identity):  # a private copy of it may be left
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
        """Why `view` may not be the current version, or what the metadata store has lost of it, and
        how old it is; empty where it is current and nothing is lost.

        A user who may read the repository but not its metadata store always gets snapshots: that is
        no reason for a warning.
        """

    def loss_warning(self, info: DatasetInfo) -> str:
        """What the metadata store has lost of a dataset, and the cure; empty where it has lost
        nothing. A server looks after its own."""
        return ""

    @abstractmethod
    def stat(self, name: str, path: bytes) -> Stat:
        """One entry, as it is now. Raises NoSuchPath, NoSuchDataset."""

    @abstractmethod
    def list(self, name: str, folder: bytes = b"") -> Rows:
        """What lies in a folder, as it is now. Raises NoSuchPath where it is no folder."""

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
        """A writer's session on a dataset, which is made if it is missing and `create`.

        First, chunks that the metadata store lacks and that belong to no put under way are
        committed. Raises NoSuchDataset, MetadataError, PermissionDenied; ObjectStoreRefused where
        this host's clock is ahead, before anything is written; LostChunks where the result would
        lack something that the newest snapshot has.
        """

    @abstractmethod
    def unreadable_paths(self, name: str) -> Sequence[bytes]:
        """The paths of a dataset whose chunk is gone or too short, as far as that can be told
        without reading chunks. Putting these files again heals the dataset. Raises NoSuchDataset,
        MetadataError.
        """

    @abstractmethod
    def archive_records(self, identity: UUID) -> Sequence[ArchiveRecord]:
        """The archives that a dataset was made from, as far as that is known. Raises
        ObjectStoreError; NoSuchDataset from a server."""

    @abstractmethod
    def record_archive(self, identity: UUID, record: ArchiveRecord) -> None:
        """Remember that an archive was put, in place of an older record of the same source and
        target. Durable on return. Raises ObjectStoreError; NoSuchDataset from a server."""

    @abstractmethod
    def publish(self, name: str, *, full: bool = False) -> int:
        """Write the snapshot of the current version beside the chunks; returns the version.

        Everything committed so far is durable on return. `full` makes the snapshot from the
        metadata store alone, not from the previous snapshot.
        """

    @abstractmethod
    def delete_dataset(self, name: str) -> Deletion:
        """Delete a dataset for ever.

        Objects that leases pin are left, and named in the log. Repeatable: a deletion that was
        interrupted goes on. Raises NoSuchDataset, and MetadataError where its metadata would be
        left for ever.
        """

    def check_no_overlap(self, source: Path) -> None:
        """Raise UsageError where `source` lies in this repository, or it in `source`."""
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
        """Build the metadata of a dataset again from its chunks: all of them into a fresh state, or
        those since a time (seconds since 1970).

        Chunks that the live metadata or the newest snapshot name must be there: where one is lost
        or damaged, the problems name it with its files, and the state is left as it was.
        `forget_lost` accepts the loss, and the notes list it. An orphan (a chunk that only the
        listing names) that cannot be read is a problem and is left out. Readers see the old state
        until the new one is complete, and writers go on meanwhile. A metadata store that is damaged
        is renamed, and a new one made for all datasets.

        Raises NoSuchDataset, MetadataError, UsageError; ObjectStoreError where a chunk is
        unreachable or this host's clock is ahead (then the state is left as it was, too).
        """

    @abstractmethod
    def verify(
        self, name: str, *, headers_only: bool = False, progress: ReportProgress = no_progress
    ) -> Findings:
        """Check every chunk (with `headers_only` not the bodies) and the metadata against them.

        Changes nothing, and may run beside a put and a purge. Raises NoSuchDataset; BusyError where
        a purge goes on too fast; the reason where the metadata store cannot be used. An embedded
        one that is lost is damage like any other, and one that a reader of a read-only folder
        cannot open is left out.
        """

    @abstractmethod
    def purge(
        self,
        name: str,
        options: PurgeOptions | None = None,
        progress: ReportProgress = no_progress,
    ) -> PurgeReport:
        """Give back the space of replaced and deleted entries (FORMAT.md, section 6). After an
        error, what was done is done, and nothing is lost.

        Raises NoSuchDataset, BusyError where another purge goes on, CorruptError before anything is
        done where chunks that are named are not seen, NoSpaceError where new chunks find no room
        (old ones that can go have been deleted then).
        """

    @abstractmethod
    def reclaimable_bytes(self, name: str, view: Snapshot | None = None) -> int:
        """About how many bytes of chunks no file of the current version is in, beyond what headers
        take. `view` is that version, for a caller who has it. Raises NoSuchDataset, MetadataError.
        """


_HEADER_GUESS_BYTES = 256 << 10  # holds nearly every header: one request instead of two


def check_recover_options(since_s: float | None, *, forget_lost: bool) -> None:
    """Raise UsageError for options of `recover` that contradict each other."""
    if forget_lost and since_s is not None:
        raise UsageError("what is lost is found by looking at all chunks: leave out `--since`")


def staleness_text(view: Snapshot, why: DieselError) -> str:
    """A warning that `view` may not be the current version, with the reason and the view's age."""
    age_s = max(0, time.time_ns() // 1_000_000_000 - view.version // 1_000_000)
    text = (
        f"{why.message.rstrip('.')}; this is version {view.version} of {view.dataset},"
        f" the newest snapshot, which is {timedelta(seconds=age_s)} old"
    )
    return f"{text}; {why.advice}" if isinstance(why, MetadataBehind) and why.advice else text
