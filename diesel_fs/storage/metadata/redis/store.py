"""The metadata store for many hosts: one Redis, a Redis under sentinels, or a Redis Cluster.

Every read sees one state of its dataset. It gets the head, applies pending commits, reads entries,
and checks that generation and version are still those of the head. If not, it starts again; after
some tries it locks commits meanwhile. A read of all entries also compares their number with the
head's counts, so a read that missed something never answers "no such file".

With `appendonly yes` on Redis 7.2 or later, everything committed before `sync` returned survives a
power cut. Older versions cannot report when their log is on disk (`appendfsync everysec`: within
some two seconds; `always`: at once). Without a log, Redis loses all writes since its last snapshot.
Nothing is lost for good: chunks that the metadata store no longer knows are folded in again.

`keys.py` defines the terms.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar, cast
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ....errors import CorruptError, DieselError, MetadataBehind, NoSuchDataset, NotFoundError
from ....format.chunk_id import chunk_id_text
from ....format.entries import ChunkId, ChunkInfo, Kind, Rows, Stamp, split
from ..rebuild import RebuildingStore, ShadowState
from ..store import (
    COMMIT_LOCK_S_MAX,
    ChunkRecord,
    CommitBatch,
    CommitLock,
    DatasetHead,
    MetadataChanges,
    RenewingCommitLock,
    StampedRows,
    check_lock_time,
    log,
    log_unreleased,
    no_such_dataset_error,
)
from .head import RedisHead, ScriptRejected, UnknownDataset, lost_data_error, open_link
from .head_scripts import CREATE, DROP, LOCK_COMMITS
from .keys import (
    DEAD_KEY,
    HOLES_PER_FIELD,
    NAMES_KEY,
    ChunkFacts,
    DatasetKeys,
    FolderId,
    Generation,
    entry_place,
    entry_stamp,
    folder_id,
    hole_fields,
    piece_names,
    unpack_chunk,
)
from .link import (
    DEADLINE_S,
    METADATA_READ_S,
    RedisCommand,
    RedisLink,
    ServerFacts,
    command,
    in_portions,
)
from .pieces import ChunkPieces, Tombstones, cut_removal
from .replies import listed, octets, packed_dict
from .rows import (
    FolderEntries,
    GenerationGone,
    GenerationReader,
    PartialScan,
    chunks_of,
    columns,
    kind_of,
)
from .shadow_state import RedisShadowState, remove_abandoned
from .transactions import (
    PendingCommits,
    RedisTransactions,
    Transaction,
    changing_error,
)

_CLUSTER_BUCKETS = 64
"""A new dataset in a cluster has enough buckets to use all nodes, and few enough to read all at
once."""

_TRIES_WITHOUT_LOCK = 3
_QUICK_TRIES_WITHOUT_LOCK = 8  # of a read of few entries
_TRIES_MAX = 20
_PARTIAL_SCANS_MAX = 4
"""After this number of scans of an unchanged state that each missed something, Redis has lost data:
it does not restart, or move a slot, in each of several scans in a row."""

_REPAIR_ENTRIES = 1 << 20
"""Lost entries that one commit of `repair` folds in. Until all are folded in, readers see only
some."""

_RELEASE_S = 1.0  # to release a commit lock, which otherwise expires
_FORGET_AT_ONCE = 64
"""Chunks that one transaction removes: the head's script keeps Redis busy for 1 ms."""

_PATHS_AT_ONCE = 10_000  # paths or chunks in one round trip

T = TypeVar("T")


class RedisMetadata(RebuildingStore):
    def __init__(
        self, link: RedisLink, clock_ns: Callable[[], int] = time.time_ns, *, buckets: int = 0
    ) -> None:
        self._link = link
        self._buckets = buckets or (_CLUSTER_BUCKETS if link.is_cluster else 1)
        self._transactions = RedisTransactions(link, clock_ns)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        deadline_s: float = DEADLINE_S,
        clock_ns: Callable[[], int] = time.time_ns,
        environment: Mapping[str, str] | None = None,
        buckets: int = 0,
        store: UUID | None = None,
    ) -> Self:
        """An empty Redis is an empty store. `buckets` is for new datasets; other parameters and
        errors as in `open_link`."""
        link = open_link(url, deadline_s=deadline_s, store=store, environment=environment)
        return cls(link, clock_ns, buckets=buckets)

    def __repr__(self) -> str:
        return f"RedisMetadata({self._link.address})"

    def close(self) -> None:
        self._link.close()

    def server_facts(self) -> list[ServerFacts]:
        return self._with_read_deadline(self._link.server_facts)

    def now_s(self) -> float:
        (reply,) = self._with_read_deadline(
            lambda: self._link.run([RedisCommand(NAMES_KEY, ["TIME"])])
        )
        seconds, microseconds = cast(tuple[int, int], reply)
        return seconds + microseconds / 1e6

    # Datasets

    def heads(self) -> list[DatasetHead]:
        def read() -> list[DatasetHead]:
            self._link.check_policy()
            return self._heads()

        return sorted(self._with_read_deadline(read), key=lambda head: head.name)

    def _heads(self) -> list[DatasetHead]:
        identities, found = [*self._names().values()], []
        heads = self._transactions.read_heads(identities)
        readable = [head for head in heads if isinstance(head, RedisHead)]
        have_lost = self._transactions.have_lost_pieces(readable)
        complete = {
            head.dataset.identity
            for head, has_lost in zip(readable, have_lost, strict=True)
            if not has_lost
        }
        for identity, head in zip(identities, heads, strict=True):
            self._link.extend_deadline()
            if isinstance(head, RedisHead) and identity in complete and not head.pending:
                found.append(head.dataset)
                continue
            try:
                found.append(self._apply_pending(identity).dataset)
            except NoSuchDataset:
                continue
            except (MetadataBehind, CorruptError) as error:
                # A damaged dataset does not hide others; reading it raises the error
                log.warning("%s", error.message)
                if isinstance(head, RedisHead):
                    found.append(head.dataset)
        return found

    def _with_read_deadline(self, work: Callable[[], T]) -> T:
        return self._link.with_retries(work, METADATA_READ_S)

    def head(self, name: str) -> DatasetHead:
        return self._with_read_deadline(lambda: self._head(name))

    def _head(self, name: str) -> DatasetHead:
        reply = self._link.execute("HGET", NAMES_KEY, name)
        if reply is None:
            raise no_such_dataset_error(name)
        return self._apply_pending(UUID(bytes=octets(reply, 16))).dataset

    def _names(self) -> dict[bytes, UUID]:
        reply = self._link.execute("HGETALL", NAMES_KEY)
        return {
            name: UUID(bytes=identity)
            for name, identity in packed_dict(reply).items()
            if len(identity) == 16  # reading a damaged one raises the error
        }

    def _apply_pending(self, identity: UUID) -> RedisHead:
        with RenewingCommitLock(self, identity) as lock:
            for _ in range(_TRIES_MAX):
                try:
                    head = self._transactions.apply_pending(identity)
                except PendingCommits:
                    lock.lock()
                    continue
                if self._transactions.is_unchanged(head, or_newer=True):
                    return head
        raise changing_error(identity)

    def create(self, name: str, identity: UUID) -> DatasetHead:
        self._link.with_retries(lambda: self._create(name, identity))
        self.clean()
        return self._with_read_deadline(lambda: self._apply_pending(identity)).dataset

    def _create(self, name: str, identity: UUID) -> None:
        generation = Generation.new(self._buckets)
        keys = [NAMES_KEY, DatasetKeys(identity).head]
        words = name, identity.bytes, generation.name, generation.buckets
        self._transactions.run_head_script(CREATE, keys, *words)

    def drop(self, identity: UUID) -> None:
        keys = [NAMES_KEY, DEAD_KEY, *DatasetKeys(identity).all]
        self._link.with_retries(lambda: self._transactions.run_head_script(DROP, keys))
        self.clean()

    def shadow_state(self, name: str, identity: UUID, newer_than: int) -> ShadowState:
        return RedisShadowState(self._transactions, self._buckets, name, identity, newer_than)

    def remove_abandoned(self) -> None:
        self._link.with_retries(lambda: remove_abandoned(self._transactions))

    # Commits

    def commit(self, identity: UUID, *batches: CommitBatch) -> int:
        return self._commit(identity, batches)

    def _commit(self, identity: UUID, batches: Iterable[CommitBatch], run: str = "") -> int:
        by_chunk = {batch.check().chunk.id: batch for batch in batches}
        deadline, tries = time.monotonic() + self._link.deadline_s, list[Transaction]()
        return self._link.with_retries(
            lambda: self._transactions.commit(identity, by_chunk, deadline, tries, run)
        )

    def needs_repair(self, identity: UUID) -> str:
        def read() -> str:
            self._link.check_policy()
            return self._transactions.needs_repair(identity)

        return self._link.with_retries(read)

    def repair(self, identity: UUID, run_id: str, batches: Iterable[CommitBatch]) -> None:
        waiting, entries = list[CommitBatch](), 0
        for batch in batches:
            waiting.append(batch)
            entries += len(batch.rows)
            if entries >= _REPAIR_ENTRIES:
                self._commit(identity, waiting, run_id)
                waiting, entries = [], 0
        if waiting:
            self._commit(identity, waiting, run_id)
        self._link.with_retries(lambda: self._transactions.confirm(identity, run_id))

    def missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        keys = DatasetKeys(identity)
        commands = [
            command("HMGET", keys.chunks, *some) for some in in_portions(chunks, _PATHS_AT_ONCE)
        ]
        commands.append(command("EXISTS", keys.head))
        *replies, exists = self._link.with_retries(lambda: self._link.run(commands))
        if not exists:
            raise no_such_dataset_error(identity)
        known = [record for reply in replies for record in listed(reply)]
        return [chunk for chunk, record in zip(chunks, known, strict=True) if record is None]

    def forget(
        self, identity: UUID, chunks: Iterable[ChunkId], *, tombstones: bool = False
    ) -> frozenset[ChunkId]:
        wanted = sorted(set(chunks))
        deadline = time.monotonic() + self._link.deadline_s
        for portion in in_portions(wanted, _FORGET_AT_ONCE):
            attempt = partial(self._forget, identity, portion, deadline, tombstones=tombstones)
            while not self._link.with_retries(attempt):
                pass
        return frozenset(self.missing(identity, wanted))

    def _forget(
        self, identity: UUID, chunks: Sequence[ChunkId], deadline: float, *, tombstones: bool
    ) -> bool:
        """Try once to remove those of `chunks` that are empty. Returns False if it must be called
        again."""

        def read(head: RedisHead, reader: GenerationReader) -> tuple[RedisHead, list[ChunkPieces]]:
            records = self._link.execute("HMGET", DatasetKeys(identity).chunks, *chunks)
            removals = [
                self._removal(head, reader, chunk, _unpack_chunk(head, packed), tombstones)
                for chunk, packed in zip(chunks, listed(records), strict=True)
                if packed is not None and chunk != head.dataset.newest
            ]
            return head, [each for each in removals if each is not None]

        head, removals = self._read_once(identity, read, until_empty=False)
        if not removals:
            return True
        try:
            self._transactions.forget(identity, head.generation, removals, deadline)
        except UnknownDataset:
            raise no_such_dataset_error(identity) from None
        except ScriptRejected:
            if time.monotonic() > deadline:
                raise changing_error(identity) from None
            return False
        return True

    def _removal(
        self,
        head: RedisHead,
        reader: GenerationReader,
        chunk: ChunkId,
        facts: ChunkFacts,
        tombstones: bool,
    ) -> ChunkPieces | None:
        """None if the chunk is not empty. The pieces stay right whatever is committed: a hole stays
        a hole, and a tombstone is removed only if it is still its path's entry."""
        places = set(self._holes(head, chunk, facts).tolist())
        dropped = {name: Tombstones() for name in piece_names(chunk, facts.piece_counts)}
        if tombstones and len(places) < facts.entries:
            for name, names_in in reader.names_of_pieces(dropped):
                for folder, base, entry in reader.entries(names_in):
                    if kind_of(entry) == Kind.TOMBSTONE and chunks_of(entry) == [chunk]:
                        places.add(entry_place(entry))
                        dropped[name].setdefault(folder, []).append((base, entry))
        return cut_removal(chunk, facts, dropped) if len(places) == facts.entries else None

    def sync(self) -> None:
        self._link.with_retries(self._link.wait_durable)

    def lock_commits(self, identity: UUID, seconds: float) -> CommitLock:
        check_lock_time(seconds)
        token, keys = secrets.token_bytes(16), DatasetKeys(identity)
        words = token, seconds, COMMIT_LOCK_S_MAX
        try:
            self._link.with_retries(
                lambda: self._transactions.run_head_script(
                    LOCK_COMMITS, [keys.head, keys.commit_locks], *words
                )
            )
        except UnknownDataset:
            raise no_such_dataset_error(identity) from None

        def release() -> None:
            unlock = command("HDEL", keys.commit_locks, token)
            try:
                self._link.with_retries(lambda: self._link.run([unlock]), _RELEASE_S)
            except DieselError as error:  # the work is done; the lock expires by itself
                log_unreleased(error)

        return CommitLock(release)

    # Reading

    def lookup(
        self, identity: UUID, paths: Iterable[bytes], *, tombstones: bool = False
    ) -> StampedRows:
        wanted = [*dict.fromkeys(paths)]

        def read(_: RedisHead, reader: GenerationReader) -> list[bytes | None]:
            found = list[bytes | None]()
            for some in in_portions(wanted, _PATHS_AT_ONCE):
                found += _find(reader, some)
            return found

        entries = self._read(identity, read)
        chosen = [
            (path, entry)
            for path, entry in zip(wanted, entries, strict=True)
            if entry is not None and (tombstones or kind_of(entry) != Kind.TOMBSTONE)
        ]
        rows = columns((split(path)[0], [split(path)[1]], [entry]) for path, entry in chosen)
        stamps: list[Stamp] = [entry_stamp(entry) for _, entry in chosen]
        return StampedRows.of(rows, stamps)

    def children(self, identity: UUID, folder: bytes, *, tombstones: bool = False) -> Rows:
        def read(_: RedisHead, reader: GenerationReader) -> dict[bytes, bytes]:
            return reader.children(folder_id(folder))

        rows = self._read(identity, read)
        names = sorted(
            name for name, entry in rows.items() if tombstones or kind_of(entry) != Kind.TOMBSTONE
        )
        return columns([(folder, names, [rows[name] for name in names])] if names else [])

    def changes(self, identity: UUID, since: int) -> MetadataChanges:
        def read(head: RedisHead, reader: GenerationReader) -> MetadataChanges:
            chunks = self._chunk_table(head, reader)
            if since > 0:
                rows = columns(list(self._newer(head, reader, chunks, since)), list(chunks))
            else:
                rows = columns(list(reader.everything()), list(chunks))
                _check_counts(head.dataset, rows)
            infos = [ChunkInfo(chunk, chunks[chunk].object_bytes) for chunk in sorted(chunks)]
            return MetadataChanges(head.dataset, rows, infos)

        return self._read(identity, read, until_empty=True)

    def _newer(
        self,
        head: RedisHead,
        reader: GenerationReader,
        chunks: Mapping[ChunkId, ChunkFacts],
        since: int,
    ) -> Iterator[FolderEntries]:
        new = {chunk for chunk, record in chunks.items() if record.version > since}
        pieces = [name for chunk in new for name in piece_names(chunk, chunks[chunk].piece_counts)]
        names: dict[FolderId, dict[bytes, None]] = {}
        for _, names_in in reader.names_of_pieces(pieces):
            for folder, bases in names_in.items():
                names.setdefault(folder, {}).update(dict.fromkeys(bases))
        rows: dict[FolderId, list[tuple[bytes, bytes]]] = {}
        for folder, base, entry in reader.entries({key: [*bases] for key, bases in names.items()}):
            if not new.isdisjoint(chunks_of(entry)):
                rows.setdefault(folder, []).append((base, entry))
        paths = reader.paths(rows)
        for folder, entries in rows.items():
            yield paths[folder], [base for base, _ in entries], [entry for _, entry in entries]

    def chunks(self, identity: UUID) -> list[ChunkRecord]:
        def read(head: RedisHead, reader: GenerationReader) -> list[ChunkRecord]:
            chunks = self._chunk_table(head, reader)
            holes = dict.fromkeys(chunks, 0)
            for bucket in range(head.generation.buckets):
                for page in reader.hash_pages(head.generation.key(bucket, b"h")):
                    for field, bitmap in page.items():
                        chunk = ChunkId(field[:16])
                        if chunk in holes:
                            holes[chunk] += int.from_bytes(bitmap, "little").bit_count()
            return [
                ChunkRecord(
                    chunk, facts.object_bytes, facts.uploaded_ns, facts.entries, holes[chunk]
                )
                for chunk, facts in sorted(chunks.items())
            ]

        return self._read(identity, read, until_empty=True)

    def holes(self, identity: UUID, chunk: ChunkId) -> npt.NDArray[np.uint32]:
        def read(head: RedisHead, _: GenerationReader) -> npt.NDArray[np.uint32]:
            packed = self._link.execute("HGET", DatasetKeys(identity).chunks, chunk)
            if packed is None:
                raise NotFoundError(f"chunk {chunk_id_text(chunk)} has not been committed")
            return self._holes(head, chunk, _unpack_chunk(head, packed))

        return self._read(identity, read)

    def _holes(self, head: RedisHead, chunk: ChunkId, facts: ChunkFacts) -> npt.NDArray[np.uint32]:
        fields, field_bytes = [*hole_fields(chunk, facts.entries)], HOLES_PER_FIELD // 8
        bitmap = np.zeros(len(fields) * field_bytes, np.uint8)
        for bucket, _ in facts.piece_counts:
            reply = self._link.execute("HMGET", head.generation.key(bucket, b"h"), *fields)
            parts = [bytes(field_bytes) if part is None else part for part in listed(reply)]
            bitmap |= np.frombuffer(b"".join(octets(part, field_bytes) for part in parts), np.uint8)
        return np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).astype(np.uint32)

    def _chunk_table(self, head: RedisHead, reader: GenerationReader) -> dict[ChunkId, ChunkFacts]:
        found = dict[ChunkId, ChunkFacts]()
        for page in reader.hash_pages(DatasetKeys(head.dataset.identity).chunks):
            for chunk, packed in page.items():
                found[ChunkId(octets(chunk, 16))] = _unpack_chunk(head, packed)
        if len(found) != head.dataset.chunks:
            raise PartialScan
        return found

    def _read(
        self,
        identity: UUID,
        read: Callable[[RedisHead, GenerationReader], T],
        *,
        until_empty: bool = False,
    ) -> T:
        """The result of `read`, once all that it read belongs to one state. `read` gets the head,
        with the right counts if `until_empty`, and a reader of its generation. If commits keep
        changing the version, they are locked."""
        return self._with_read_deadline(
            lambda: self._read_once(identity, read, until_empty=until_empty)
        )

    def _read_once(
        self, identity: UUID, read: Callable[[RedisHead, GenerationReader], T], *, until_empty: bool
    ) -> T:
        """As `_read`, without further tries after an error of Redis."""
        tries_without_lock = _TRIES_WITHOUT_LOCK if until_empty else _QUICK_TRIES_WITHOUT_LOCK
        partial_scans = 0
        with RenewingCommitLock(self, identity) as lock:

            def at_each_page() -> None:
                lock.renew()
                self._link.extend_deadline()

            for tries in range(_TRIES_MAX):
                if tries - partial_scans >= tries_without_lock:
                    lock.lock()
                try:
                    head = self._transactions.apply_pending(identity, until_empty=until_empty)
                except PendingCommits:
                    continue
                reader = GenerationReader(self._link, head.generation, at_each_page)
                try:
                    found = read(head, reader)
                except GenerationGone:
                    continue
                except PartialScan:
                    if self._transactions.is_unchanged(head):
                        partial_scans += 1
                        if partial_scans == _PARTIAL_SCANS_MAX:
                            raise lost_data_error(head.dataset.name) from None
                    continue
                except DieselError:
                    if self._transactions.is_unchanged(head):
                        raise
                    continue  # it may have read half of another state
                if self._transactions.is_unchanged(head):
                    return found
        raise changing_error(identity)


def _unpack_chunk(head: RedisHead, packed: object) -> ChunkFacts:
    return unpack_chunk(octets(packed), head.first, head.generation.buckets)


def _check_counts(head: DatasetHead, rows: Rows) -> None:
    is_file = rows.records["kind"] == Kind.FILE
    counts = int(is_file.sum()), int(rows.records["size"][is_file].sum())
    if counts != (head.files, head.bytes):
        raise PartialScan


def _find(reader: GenerationReader, paths: list[bytes]) -> list[bytes | None]:
    folders: dict[bytes, FolderId] = {}
    wanted: dict[FolderId, list[bytes]] = {}
    keys = []
    for path in paths:
        folder, name = split(path)
        if folder not in folders:
            folders[folder] = folder_id(folder)
        wanted.setdefault(folders[folder], []).append(name)
        keys.append((folders[folder], name))
    found = {(folder, name): entry for folder, name, entry in reader.entries(wanted)}
    return [found.get(key) for key in keys]
