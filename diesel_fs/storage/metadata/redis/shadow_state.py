"""Rebuilds a dataset in Redis as a new generation of keys, beside the one that readers see.

The hash `dead` (`keys.py`) lists each generation that is being built, or was replaced or dropped. A
rebuild writes a heartbeat there every 20 s; without one for 10 minutes it counts as abandoned. Keys
are removed in small steps. A generation stays listed for at least 10 minutes after its end, because
a writer that does not know this yet may still write keys. A rebuild does not rely on the state that
it replaces: that may be damaged.
"""

import time
from collections import Counter
from contextlib import suppress
from uuid import UUID

from ....errors import (
    BusyError,
    ConflictError,
    CorruptError,
    DieselError,
    MetadataError,
    NoSuchDataset,
)
from ....format.chunk_id import LOWEST
from ....format.entries import ChunkId
from ..rebuild import NO_LIVE_STATE, LiveState, ShadowState
from ..store import CommitBatch, chunks_digest, log, rebuilt_version
from .bucket_scripts import APPLY
from .head import ScriptRejected, UnknownDataset
from .head_scripts import CLAIM_ABANDONED, HEARTBEAT, REPLACE_LIVE
from .keys import (
    BUCKETS_MAX,
    DEAD_KEY,
    GENERATION_BYTES,
    NAMES_KEY,
    STATE,
    DatasetKeys,
    FolderId,
    Generation,
)
from .link import RedisLink, ScriptCommand, Word, command, in_portions
from .pieces import ChunkPieces, cut_batch
from .replies import as_count, listed, octets, packed_dict
from .rows import GenerationReader, PartialScan
from .transactions import BucketCounts, RedisTransactions, parse_bucket_counts, piece_keys

_ROWS_AT_ONCE = 16_384
_BYTES_AT_ONCE = 16 << 20
_HEARTBEAT_S = 20.0
_CLEAN_S = 3.0  # for one removal of generations; a later one removes the rest
_ABANDONED_S = 600
_KEYS_AT_ONCE = 1000

_NO_REVISION = (b"", b"0")
"""REPLACE_LIVE expects this if no state is live."""


class RedisShadowState(ShadowState):
    def __init__(
        self,
        transactions: RedisTransactions,
        buckets: int,
        name: str,
        identity: UUID,
        newer_than: int,
    ) -> None:
        self._link = transactions.link
        self._transactions = transactions
        self._generation = Generation.new(buckets)
        self._name = name
        self._identity = identity
        self._newer_than = newer_than
        self._chunks: dict[ChunkId, None] = {}
        self._counts: dict[int, BucketCounts] = {}  # by bucket, as last returned
        self._sent_pieces = Counter[int]()
        self._waiting: list[ChunkPieces] = []  # for `flush`
        self._rows = 0
        self._bytes = 0
        self._last_heartbeat_s = -_HEARTBEAT_S  # monotonic
        # The run IDs of the Redis servers when the rebuild began. Another ID means a restart, which
        # may lose data.
        self._run_ids = list[str]()
        self._head_run_id = b""  # of the server that has the head's slot

    def begin(self) -> None:
        self._link.with_retries(self._read_revision)  # for its ConflictError
        self._run_ids = self._link.with_retries(self._link.run_ids)
        self._heartbeat()

    def live_state(self) -> LiveState:
        return self._link.with_retries(self._live_state_once)

    def _live_state_once(self) -> LiveState:
        revision = self._read_revision()
        if not revision:
            return NO_LIVE_STATE
        try:
            reply = self._link.execute("HKEYS", DatasetKeys(self._identity).chunks)
            chunks = frozenset(ChunkId(octets(chunk, 16)) for chunk in listed(reply))
        except CorruptError as error:  # readers cannot read these chunks either
            log.warning(
                "the rebuild of %s replaces a damaged list of chunks: %s", self._name, error.message
            )
            chunks = frozenset()
        return LiveState(revision, chunks)

    def _read_revision(self) -> tuple[bytes, ...]:
        """The live state's generation and version; empty if there is none. Raises ConflictError if
        another dataset has the name or the identity."""
        name, identity = self._name, self._identity
        owner = self._link.execute("HGET", NAMES_KEY, name)
        if isinstance(owner, bytes) and len(owner) == 16 and owner != identity.bytes:
            raise ConflictError(f"dataset {name!r} has the identity {UUID(bytes=owner)}")
        fields = "name", "generation", "version"
        try:
            reply = self._link.execute("HMGET", DatasetKeys(identity).head, *fields)
            known, generation, version = listed(reply)
        except CorruptError as error:
            log.warning("the rebuild of %s replaces a damaged head: %s", name, error.message)
            return NO_LIVE_STATE.revision
        if isinstance(known, bytes) and known != name.encode():
            shown = known.decode(errors="replace")
            raise ConflictError(f"dataset {shown!r} has the identity {identity}")
        if generation is None and version is None:
            return NO_LIVE_STATE.revision
        return octets(generation or b""), b"0" if version is None else octets(version)

    def _heartbeat(self) -> None:
        """Write a heartbeat if it is due. Raises BusyError after a restart of Redis."""
        if time.monotonic() < self._last_heartbeat_s + _HEARTBEAT_S:
            return
        words = self._generation.name, self._generation.buckets
        (run_id,) = self._link.with_retries(
            lambda: self._transactions.run_head_script(HEARTBEAT, [DEAD_KEY], *words)
        )
        if self._head_run_id and run_id != self._head_run_id:
            raise _restarted_error()
        self._head_run_id = octets(run_id)
        self._last_heartbeat_s = time.monotonic()

    def add(self, batch: CommitBatch) -> None:
        self._heartbeat()
        chunk = cut_batch(batch, self._generation)
        self._chunks[chunk.chunk] = None
        self._waiting.append(chunk)
        self._rows += len(batch.rows)
        self._bytes += sum(len(piece.packed) for piece in chunk.pieces)
        if self._rows >= _ROWS_AT_ONCE or self._bytes >= _BYTES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        self._heartbeat()
        waiting, self._waiting, self._rows, self._bytes = self._waiting, [], 0, 0
        pieces = [piece for chunk in waiting for piece in chunk.pieces]
        commands = []
        for piece in pieces:
            keys = piece_keys(self._generation, piece.name.bucket, piece.folders)
            # The field in `x` is empty, because the third argument is the piece itself
            words = b"", piece.name.field, piece.packed
            commands.append(ScriptCommand(APPLY, keys, words).command())
        for chunk in waiting:
            commands.append(command("HSET", self._generation.chunks, chunk.chunk, chunk.record))
        replies = self._link.with_retries(lambda: self._link.run(commands))
        for piece, reply in zip(pieces, replies, strict=False):
            self._counts[piece.name.bucket] = parse_bucket_counts(reply)
            self._sent_pieces[piece.name.bucket] += 1

    def become_live(self, expected: LiveState) -> int | None:
        link = self._link
        applied_pieces = {bucket: pieces for bucket, (pieces, _, _) in self._counts.items()}
        if link.with_retries(link.run_ids) != self._run_ids or applied_pieces != self._sent_pieces:
            raise _restarted_error()
        _, before = expected.revision or _NO_REVISION
        is_number = before.isdigit() and len(before) < 19  # otherwise it is damaged
        wanted = rebuilt_version(
            int(before) if is_number else 0,
            self._newer_than,
            len(self._chunks),
            self._transactions.clock_ns(),
        )
        version = link.with_retries(lambda: self._replace_live(expected, wanted))
        if version is not None:
            self._transactions.invalidate_generation(self._identity)
        return version

    def _replace_live(self, expected: LiveState, wanted: int) -> int | None:
        """Returns None if the live state is not `expected`."""
        generation, keys = self._generation, DatasetKeys(self._identity)
        words = list[Word]()
        for bucket, counts in self._counts.items():
            words += (bucket, " ".join(map(str, counts)))
        try:
            (version,) = self._transactions.run_head_script(
                REPLACE_LIVE,
                [NAMES_KEY, DEAD_KEY, *keys.all, generation.chunks],
                self._name,
                self._identity.bytes,
                generation.name,
                generation.buckets,
                *(expected.revision or _NO_REVISION),
                wanted,
                sum(files for _, files, _ in self._counts.values()),
                sum(total for _, _, total in self._counts.values()),
                len(self._chunks),
                chunks_digest(self._chunks).to_bytes(16, "big"),
                max(self._chunks, default=LOWEST),
                self._head_run_id,
                *words,
            )
        except ScriptRejected as rejected:
            return self._rejected(rejected.word)
        return as_count(version)

    def _rejected(self, word: str) -> int | None:
        with suppress(NoSuchDataset, CorruptError):
            head = self._transactions.read_head(self._identity)
            if head.generation.name == self._generation.name:
                return head.dataset.version  # an earlier try succeeded, but its reply was lost
        if word == "lost":
            raise MetadataError(
                f"Redis has lost data of the rebuild of {self._name!r}", advice="run it again"
            )
        return None

    def discard(self) -> None:
        try:
            self._link.with_retries(
                lambda: remove_generation(self._transactions, self._generation, 0)
            )
        except DieselError as error:
            log.info("keys of a failed rebuild stay until the next rebuild or deletion: %s", error)


def _restarted_error() -> BusyError:
    return BusyError("Redis has been restarted in the middle of a rebuild", advice="run it again")


def remove_abandoned(transactions: RedisTransactions) -> None:
    """Remove generations that belong to no dataset and no rebuild. Begins no further one after
    `_CLEAN_S`; a later call goes on."""
    end_s = time.monotonic() + _CLEAN_S
    for name, state in packed_dict(transactions.link.execute("HGETALL", DEAD_KEY)).items():
        buckets = int.from_bytes(state[STATE.size :], "little")
        if len(name) != GENERATION_BYTES or not 1 <= buckets <= BUCKETS_MAX:
            # Not written by DIESEL-FS
            transactions.link.execute("HDEL", DEAD_KEY, name)
            continue
        transactions.link.extend_deadline()
        remove_generation(transactions, Generation(name, buckets), _ABANDONED_S)
        if time.monotonic() > end_s:
            return


def remove_generation(transactions: RedisTransactions, generation: Generation, age_s: int) -> None:
    """Remove the keys of a generation that no dataset has, unless its last heartbeat is younger
    than `age_s` seconds."""
    link = transactions.link
    try:
        (unused_s,) = transactions.run_head_script(
            CLAIM_ABANDONED, [DEAD_KEY], generation.name, age_s
        )
    except (UnknownDataset, ScriptRejected):
        return
    if not _exists(link, generation):
        if as_count(unused_s) >= _ABANDONED_S:
            link.execute("HDEL", DEAD_KEY, generation.name)
        return
    reader = GenerationReader(link, generation, link.extend_deadline)
    for bucket in range(generation.buckets):
        with suppress(PartialScan):  # a later call removes the rest
            for page in reader.hash_pages(generation.key(bucket, b"f")):
                folders = [FolderId(folder) for folder in page]
                keys = [generation.entries(folder) for folder in folders]
                keys += [generation.below(folder) for folder in folders]
                for portion in in_portions(keys, _KEYS_AT_ONCE):
                    link.execute("UNLINK", *portion)
            link.execute("UNLINK", *generation.script_keys(bucket))
    link.execute("UNLINK", generation.chunks)


def _exists(link: RedisLink, generation: Generation) -> bool:
    commands = [command("EXISTS", generation.chunks)]
    for bucket in range(generation.buckets):
        commands.append(command("EXISTS", *generation.script_keys(bucket)))
    return any(link.run(commands))
