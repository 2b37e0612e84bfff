"""A repository behind a server: each operation of `Repository` becomes requests (`net/WIRE.md`,
section 5).

The client checks every answer, as a server may be wrong, and keeps private copies of snapshots in
files, so that no version is fetched twice. It connects at the first request. Usable from several
threads and in forked children, like any `Repository`.
"""

import logging
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Self
from uuid import UUID

import numpy as np

from ..credentials import Credentials
from ..errors import (
    ConflictError,
    CorruptError,
    DieselError,
    FormatError,
    MetadataBehind,
    MetadataError,
    NoSuchDataset,
    NoSuchPath,
    UsageError,
)
from ..format.chunk import parse_header, parse_preamble
from ..format.chunk_id import IdSource
from ..format.entries import RECORD, ChunkId, Kind, Rows, Stat, check_path
from ..format.snapshot.delta import apply_deltas, merged_from, parse_delta
from ..format.snapshot.layered import LayeredSnapshot
from ..format.snapshot.reader import Snapshot, Stats
from ..names import check_dataset_name, shown
from ..net.client import Answer, RpcClient, ServerLink
from ..net.messages import Fields, Message, Value
from ..repository.catalog import DatasetInfo
from ..repository.interface import (
    Findings,
    PurgeOptions,
    PurgeReport,
    ReportProgress,
    Repository,
    check_recover_options,
    no_progress,
    staleness_text,
)
from ..repository.private_copies import (
    newest_private_copy,
    open_private_copy,
    private_versions,
    write_private_copy,
)
from ..repository.provenance import ArchiveRecord
from ..repository.retention import Deletion
from ..repository.validation import ValidatedChunk, as_validated
from ..repository.versions import KeptVersion, PublishedVersions
from ..repository.writing import WriteSession
from ..storage.metadata.store import DatasetHead
from ..urls import RepositoryUrl
from .objects import RemoteObjects
from .snapshot_transfer import SnapshotAssembler
from .values import (
    PATHS_MAX,
    parse_columns,
    parse_info,
    parse_list,
    parse_records,
    paths_message,
)

log = logging.getLogger("diesel.repository")

_JOB_ANSWER_S = 60.0  # a server reports the progress of a job every few seconds
_FINISH_S = 600.0  # making the snapshot of a large dataset takes long
_FETCH_TRIES = 3  # of a snapshot, if servers stop while they send it
_HEAD_WAIT_S = 30.0  # the same time that a local writer waits for the metadata store
_PAUSE_S, _PAUSE_S_MAX = 0.1, 2.0  # between two requests for a head
_IDS_AT_ONCE = 65_536  # chunk IDs in one request


class RemoteRepository(Repository):
    snapshots: "RemoteSnapshots"

    def __init__(
        self, link: RpcClient, url: RepositoryUrl, credentials: Credentials | None
    ) -> None:
        ids = IdSource(uuid.getnode(), self._now_s, os.urandom, os.getpid)
        super().__init__(RemoteObjects(link), RemoteSnapshots(link), url, ids)
        self.credentials = credentials
        self._link = link
        self._identities: dict[str, UUID] = {}  # of datasets by name, as reported by the server
        self.metadata_error = ""
        """Why the server could not report the dataset's head (version and counts) in the last
        request; empty if it could."""
        self._clock_offset_s = 0.0  # by how much the server's clock is ahead of this host's

    @classmethod
    def at(cls, url: RepositoryUrl, credentials: Credentials) -> Self:
        """Raises ConfigError."""
        return cls(ServerLink(url, credentials), url, credentials)

    def close(self) -> None:
        self._link.close_idle()

    @property
    def meta_problem(self) -> DieselError | None:
        """None: the server, not this process, opens the metadata store."""
        return None

    @property
    def clock_offset_s(self) -> float:
        """How far the server's clock was ahead at the last request for a dataset; 0 before."""
        return self._clock_offset_s

    def _now_s(self) -> float:
        """The server's time, for chunk IDs: the server refuses old ones."""
        return time.time() + self._clock_offset_s

    def _ask(self, do: str, fields: Message, deadline_s: float | None = None) -> Answer:
        return self._link.call({"do": do, **fields}, deadline_s=deadline_s)

    # Finding datasets

    def datasets(self) -> list[DatasetInfo]:
        return [*map(parse_info, parse_list(self._ask("datasets", {}).message, "datasets"))]

    def dataset(self, name: str) -> DatasetInfo:
        return self._info("dataset", {"dataset": check_dataset_name(name)})

    def _info(self, do: str, fields: Message) -> DatasetInfo:
        """Also notes the dataset's identity, the server's clock, and `metadata_error`."""
        try:
            answer = self._ask(do, fields).message
        except NoSuchDataset as error:
            error.message = f"{error.message} in {self.url}"
            raise
        self.metadata_error = Fields(answer, "an answer").text("away", "")
        self._clock_offset_s = Fields(answer, "an answer").number("now_s") - time.time()
        info = parse_info(answer.get("info"))
        self._identities[info.name] = info.identity
        return info

    def _identity(self, name: str) -> UUID:
        check_dataset_name(name)
        return self._identities.get(name) or self.dataset(name).identity

    # Reading

    def view_of(self, info: DatasetInfo, *, lazy: bool = False) -> Snapshot:
        return self.snapshots.current(info.identity, lazy=lazy)

    def staleness_warning(self, view: Snapshot) -> str:
        if not self.metadata_error:
            return ""
        return staleness_text(view, MetadataError(f"the server says: {self.metadata_error}"))

    def stat(self, name: str, path: bytes) -> Stat:
        stat = self.stat_many(name, [check_path(path)], missing_ok=True)[0]
        if stat.kind not in _VISIBLE_KINDS:
            raise NoSuchPath(f"no {shown(path)} in dataset {name!r}")
        return stat

    def stat_many(self, name: str, paths: Sequence[bytes], *, missing_ok: bool = False) -> Stats:
        """As `Snapshot.stat_many`, for the entries as they are now. One request asks for many."""
        batches = []
        for start in range(0, len(paths), PATHS_MAX):
            batch = paths[start : start + PATHS_MAX]
            answer = self._ask_about(name, "stat", {"paths": paths_message(batch)})
            batches.append(parse_columns(Fields(answer.message, "an answer"), len(batch)))
        stats = _joined(batches)
        missing = ~np.isin(stats.kind, [int(kind) for kind in _VISIBLE_KINDS])
        if not missing_ok and missing.any():
            raise NoSuchPath(f"no such path: {shown(paths[int(missing.argmax())])}")
        return stats

    def list(self, name: str, folder: bytes = b"") -> Rows:
        """The entries of a folder as they are now: kinds, modes, sizes and times. Their places in
        chunks are 0."""
        names: list[bytes] = []
        pages = []
        check_path(folder)
        while True:
            after = names[-1] if names else b""
            answer = self._ask_about(name, "list", {"folder": folder, "after": after})
            fields = Fields(answer.message, "an answer")
            packed = fields.octets("names")
            page = packed.split(b"\0") if packed else []
            if any(b"/" in each or before >= each for before, each in pairwise([after, *page])):
                raise CorruptError("the server sent a list of names that is out of order")
            pages.append(parse_columns(fields, len(page)))
            names += page
            if not fields.flag("more_names", default=False):
                break
            if not page:
                raise CorruptError("the server sent a page of names without any")
        stats = _joined(pages)
        records = np.zeros(len(names), RECORD)
        for column in ("kind", "mode", "size", "mtime_ns"):
            records[column] = getattr(stats, column)
        zeros = np.zeros(len(names), np.uint32)  # all are in folder 0, and in chunk 0
        return Rows([folder], zeros, names, records, zeros, [ChunkId(bytes(16))])

    def _ask_about(self, name: str, do: str, fields: Message) -> Answer:
        """Look the identity up again if the dataset was deleted and created again."""
        if name in self._identities:
            with suppress(NoSuchDataset):
                return self._ask(do, {"identity": self._identities[name].bytes, **fields})
            del self._identities[name]
        return self._ask(do, {"identity": self._identity(name).bytes, **fields})

    # Writing

    def begin(self, name: str, *, create: bool = True) -> "RemoteWriteSession":
        check_dataset_name(name)
        return RemoteWriteSession(self, self._info("begin", {"dataset": name, "create": create}))

    def unreadable_paths(self, name: str) -> Sequence[bytes]:
        message: Message = {"dataset": check_dataset_name(name), "unreadable": True}
        return bytes(self._ask("begin", message).payload).split(b"\0")[:-1]

    def archive_records(self, identity: UUID) -> Sequence[ArchiveRecord]:
        answer = self._ask("archives", {"identity": identity.bytes})
        return parse_records(answer.payload)

    def record_archive(self, identity: UUID, record: ArchiveRecord) -> None:
        self._ask("record_archive", {"identity": identity.bytes, "record": record.pack()})

    def finish(self, identity: UUID, chunks: Sequence[ChunkId] = ()) -> int:
        """Make all commits durable; those of `chunks` whose commits were lost are committed again.
        Returns the version."""
        version = 0
        for start in range(0, len(chunks) or 1, _IDS_AT_ONCE):
            packed = b"".join(chunks[start : start + _IDS_AT_ONCE])
            answer = self._ask("finish", {"identity": identity.bytes, "chunks": packed}, _FINISH_S)
            version = Fields(answer.message, "an answer").integer("version")
        return version

    def publish(self, name: str, *, full: bool = False) -> int:
        return self.finish(self.dataset(name).identity)

    def recover(
        self,
        name: str,
        since_s: float | None = None,
        progress: ReportProgress = no_progress,
        *,
        forget_lost: bool = False,
    ) -> Findings:
        check_recover_options(since_s, forget_lost=forget_lost)
        options: Message = {"since_s": since_s, "forget_lost": forget_lost}
        return Findings.from_message(self._run_job("recover", name, options, progress))

    def verify(
        self, name: str, *, headers_only: bool = False, progress: ReportProgress = no_progress
    ) -> Findings:
        options: Message = {"headers_only": headers_only}
        return Findings.from_message(self._run_job("verify", name, options, progress))

    def purge(
        self,
        name: str,
        options: PurgeOptions | None = None,
        progress: ReportProgress = no_progress,
    ) -> PurgeReport:
        message = (options or PurgeOptions()).to_message()
        return PurgeReport.from_message(self._run_job("purge", name, message, progress))

    def reclaimable_bytes(self, name: str, view: Snapshot | None = None) -> int:
        result = self._run_job("reclaimable", name, {}, no_progress)
        return Fields(result, "what is reclaimable").integer("bytes")

    def _run_job(self, job: str, name: str, options: Message, progress: ReportProgress) -> Message:
        message: Message = {"do": job, "dataset": check_dataset_name(name), **options}
        result: Value = None
        for answer in self._link.stream(message, deadline_s=_JOB_ANSWER_S):
            if answer.message.get("more") is True:
                sent = Fields(answer.message, "progress")
                progress(sent.integer("done"), sent.integer("total"))
            else:
                result = answer.message.get("result")
        if not isinstance(result, dict):
            raise CorruptError(f"the server ended the job {job} without a result")
        return result

    def ask_task(self, do: str, identity: UUID, fields: Message, deadline_s: float) -> Message:
        """Send a request about a task (`peers/members/membership.py`)."""
        return self._ask(do, {"identity": identity.bytes, **fields}, deadline_s).message

    def delete_dataset(self, name: str) -> Deletion:
        self._identities.pop(name, None)
        answer = self._ask("delete_dataset", {"dataset": check_dataset_name(name)}, _FINISH_S)
        fields = Fields(answer.message, "an answer")
        done = Deletion(fields.integer("removed"), fields.integer("left", 0))
        done.log_left(name)
        return done


class RemoteWriteSession(WriteSession):
    """The server checks and commits each chunk when it is put."""

    def __init__(self, repository: RemoteRepository, info: DatasetInfo) -> None:
        load_view = partial(repository.view_of, lazy=True)
        super().__init__(info, repository.objects, repository.ids, load_view)
        self._repository = repository
        self._finished = 0  # how many of `_committed_ids` the server has acknowledged

    def validate_chunk(self, preamble: bytes, header: bytes) -> ValidatedChunk:
        """Remember a chunk that has been put."""
        front = parse_preamble(preamble, identity=self.identity)
        chunk = as_validated(parse_header(front, header))
        self._remember([chunk])
        return chunk

    def commit_all(self, chunks: Iterable[ValidatedChunk]) -> int:
        """The server has committed these chunks. Returns 0 for the unknown version."""
        return 0

    def finish(self) -> int:
        own = list(self._committed_ids)
        version = self._repository.finish(self.identity, own[self._finished :])
        self._finished = len(own)
        return version

    def _head(self) -> DatasetHead:
        """Waits a while if the server cannot report the head (version and counts) now. Raises
        ConflictError, MetadataBehind, MetadataError."""
        end_s, pause_s = time.monotonic() + _HEAD_WAIT_S, _PAUSE_S
        while True:
            try:
                info = self._repository.dataset(self.name)
            except NoSuchDataset:
                info = None
            if info is None or info.identity != self.identity:
                raise ConflictError(f"dataset {self.name!r} has been deleted meanwhile")
            if info.head is not None:
                return info.head
            if not self._repository.metadata_error:
                raise MetadataBehind(
                    f"the server's metadata of {self.name!r} is behind its chunks",
                    advice=f"run `dlcmd recover {self.name}`",
                )
            if time.monotonic() > end_s:
                raise MetadataError(
                    self._repository.metadata_error, advice="run the put again to finish it"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)


class RemoteSnapshots(PublishedVersions):
    """They are fetched from the server and kept as private copies."""

    def __init__(self, link: RpcClient) -> None:
        self._link = link

    def versions(self, identity: UUID) -> list[int]:
        return [each.version for each in self.kept(identity)]

    def kept(self, identity: UUID) -> list[KeptVersion]:
        message: Message = {"do": "kept", "identity": identity.bytes}
        kept = []
        for each in parse_list(self._link.call(message).message, "kept"):
            if not isinstance(each, list) or [type(value) for value in each] != [int] * 4:
                raise UsageError("a kept version is four numbers")
            kept.append(KeptVersion(*each))  # type: ignore[arg-type]  # just checked
        return sorted(kept)

    def newest(self, identity: UUID) -> int:
        message: Message = {"do": "kept", "identity": identity.bytes, "newest": True}
        return Fields(self._link.call(message).message, "an answer").integer("newest")

    def current(self, identity: UUID, *, lazy: bool = False) -> Snapshot:
        """`lazy` is as of `Repository.view`."""
        return self._fetch(identity, 0, newest_private_copy(identity), lazy=lazy)

    def load(self, identity: UUID, version: int) -> Snapshot:
        copy = open_private_copy(identity, version)
        earlier = [each for each in private_versions(identity) if each < version]
        return copy or self._fetch(identity, version, max(earlier, default=0))

    def _fetch(self, identity: UUID, version: int, copied: int, *, lazy: bool = False) -> Snapshot:
        """Fetch a version (0: the current one). `copied` is the version of this user's private copy
        (0: none): if the server answers that it is the wanted one, nothing is sent, and if deltas
        lead from it to the wanted one, only these."""
        tries = _FETCH_TRIES
        while True:
            tries -= 1
            try:
                sent, content, lengths = self._receive(identity, version, copied)
            except MetadataError as error:  # a server that stopped while it was sending
                if not (error.retry and tries):
                    raise
                continue
            if lengths and not copied:
                raise CorruptError("the server sent deltas to a client that has no version")
            if version and sent != version:
                raise CorruptError(f"the server sent version {sent} in place of version {version}")
            if content is not None and not lengths:
                return self._checked(identity, sent, content)
            copy = open_private_copy(identity, copied)
            if copy is not None and content is None:
                return copy
            if copy is not None and content is not None:
                try:
                    return _applied(copy, content, lengths, sent, lazy=lazy)
                except FormatError as error:
                    log.warning("the whole snapshot is fetched: %s", error.message)
            copied = 0  # the copy has been removed meanwhile, or does not fit

    def _receive(
        self, identity: UUID, version: int, copied: int
    ) -> tuple[int, memoryview | None, Sequence[int]]:
        """The sent version, its bytes (None if it is `copied`), and if they are deltas, the length
        of each."""
        message: Message = {
            "do": "snapshot", "identity": identity.bytes, "version": version, "have": copied,
        }  # fmt: skip
        assembler = SnapshotAssembler()
        for answer in self._link.stream(message):
            fields = Fields(answer.message, "a snapshot's piece")
            if answer.message.get("more") is True:
                assembler.add(fields.integer("bytes"), answer.payload)
                continue
            sent, total = fields.integer("version"), fields.integer("total")
            if not total and copied and sent == copied:
                return sent, None, ()
            lengths = answer.message.get("deltas", [])
            if not isinstance(lengths, list) or not all(type(each) is int for each in lengths):
                raise UsageError("an answer: bad 'deltas': they are numbers")
            return sent, assembler.joined(total), lengths  # type: ignore[return-value]  # checked
        raise CorruptError("the server sent a snapshot without its end")

    def _checked(self, identity: UUID, version: int, content: memoryview) -> Snapshot:
        """Check that `content` is this version, and make a private copy."""
        snapshot = Snapshot(content, verify=True)
        if (snapshot.identity, snapshot.version) != (identity, version):
            raise CorruptError(
                f"the server sent version {snapshot.version} of dataset {snapshot.identity} in"
                f" place of version {version} of {identity}"
            )
        if not version:
            return snapshot  # an empty dataset, which needs no copy
        return write_private_copy(identity, version, [content]) or snapshot


def _applied(
    copy: Snapshot, content: memoryview, lengths: Sequence[int], version: int, *, lazy: bool
) -> Snapshot:
    """The version to which deltas lead from a private copy. Raises FormatError."""
    ends = list(accumulate(lengths))
    if min(lengths) <= 0 or ends[-1] != len(content):
        raise CorruptError("the server sent deltas of other lengths than it says")
    above = [parse_delta(content[start:end]) for start, end in pairwise([0, *ends])]
    if above[-1].header.version != version:
        raise CorruptError("the server sent deltas to another version")
    if lazy:
        return LayeredSnapshot(copy, above)
    parts = apply_deltas(copy, above)
    made = write_private_copy(copy.identity, version, parts)
    snapshot = made or Snapshot(memoryview(b"".join(parts)), verify=False)
    snapshot.merged_from = merged_from(copy, above)
    return snapshot


_VISIBLE_KINDS = (Kind.FILE, Kind.LINK, Kind.FOLDER)


def _joined(stats: Sequence[Stats]) -> Stats:
    if len(stats) == 1:
        return stats[0]
    columns = ("kind", "mode", "size", "mtime_ns")
    if not stats:
        return Stats.missing(0)
    return Stats(*(np.concatenate([getattr(each, name) for each in stats]) for name in columns))
