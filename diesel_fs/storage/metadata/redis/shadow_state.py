"""Rebuilds a dataset in Redis as a new generation, beside the one that readers see.

A generation (see `keys.py`) that is being built, or that has been replaced or dropped, is listed in
the hash `dead`. A rebuild writes a heartbeat there every 20 s. A generation without a heartbeat for
10 minutes is taken for dead, and its keys are removed in small steps, as are those of generations
that were replaced or dropped. It stays listed for 10 more minutes, since a writer that has not
noticed may still write some keys.

A rebuild does not rely on the state that it replaces: that may be damaged.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from ..store import Batch, chunks_digest, log, rebuilt_version
from .bucket_scripts import APPLY
from .head import ScriptRejected, UnknownDataset
from .head_scripts import CLAIM_ABANDONED, HEARTBEAT, REPLACE_LIVE
from .keys import (
    BUCKET_KEYS,
    BUCKETS_MAX,
    DEAD_KEY,
    GENERATION_BYTES,
    NAMES_KEY,
    STATE,
    DatasetKeys,
    FolderId,
    Generation,
)
from .link import Command, RedisLink, ScriptCommand, Word, in_portions
from .pieces import CutBatch, cut_batch
from .replies import as_count, listed, octets, packed_dict
from .rows import GenerationReader, PartialScan
from .transactions import (
    BucketCounts,
    RedisTransactions,
    chunk_record,
    parse_bucket_counts,
    piece_keys,
)

_ROWS_AT_ONCE = 16_384
_BYTES_AT_ONCE = 16 << 20
_HEARTBEAT_S = 20.0
_CLEAN_S = 3.0
_ABANDONED_S = 600
_KEYS_AT_ONCE = 1000

_NO_STATE = (b"", b"0")


def new_generation(buckets: int) -> Generation:
    """A generation with a random name that was never used before."""
    return Generation(secrets.token_hex(8).encode(), buckets)


class RedisShadowState(ShadowState):
    """The shadow state of one rebuild of a dataset. Of one thread."""

    def __init__(
        self,
        link: RedisLink,
        commits: RedisTransactions,
        generation: Generation,
        name: str,
        identity: UUID,
        clock_ns: Callable[[], int],
        newer_than: int,
    ) -> None:
        self._newer_than = newer_than
        self._link = link
        self._commits = commits
        self._generation = generation
        self._name = name
        self._identity = identity
        self._clock_ns = clock_ns
        self._known: dict[ChunkId, None] = {}
        self._counts: dict[int, BucketCounts] = {}  # by bucket, as its script returned them last
        self._pieces = Counter[int]()  # how many pieces were sent to each bucket
        self._waiting: list[tuple[CutBatch, Batch]] = []
        self._rows = 0
        self._bytes = 0
        self._heartbeat_s = -_HEARTBEAT_S
        self._run_id = b""
        self._runs: Sequence[str] = ()

    def begin(self) -> None:
        self._link.with_retries(self._revision)
        self._runs = self._link.with_retries(self._link.run_ids)
        self._heartbeat()

    def live_state(self) -> LiveState:
        return self._link.with_retries(self._live_state_once)

    def _live_state_once(self) -> LiveState:
        revision = self._revision()
        if not revision:
            return NO_LIVE_STATE
        key = DatasetKeys(self._identity).chunks
        try:
            (reply,) = self._link.run([Command(key, ("HKEYS", key))])
            found = frozenset(ChunkId(octets(chunk, 16)) for chunk in listed(reply))
        except CorruptError as error:  # no reader can use them either
            log.warning(
                "the rebuild of %s replaces a damaged list of chunks: %s", self._name, error.message
            )
            found = frozenset()
        return LiveState(revision, found)

    def _revision(self) -> tuple[bytes, ...]:
        """Generation and version of the live state; empty where there is no such dataset."""
        name, identity = self._name, self._identity
        key = DatasetKeys(identity).head
        (owner,) = self._link.run([Command(NAMES_KEY, ("HGET", NAMES_KEY, name))])
        if isinstance(owner, bytes) and len(owner) == 16 and owner != identity.bytes:
            raise ConflictError(f"dataset {name!r} has the identity {UUID(bytes=owner)}")
        words = ("HMGET", key, "name", "generation", "version")
        try:
            ((known, generation, version),) = map(listed, self._link.run([Command(key, words)]))
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
        """Report that this rebuild is alive, if it is time to. Raises BusyError where Redis has
        been restarted.
        """
        if time.monotonic() < self._heartbeat_s + _HEARTBEAT_S:
            return
        generation = self._generation
        words = generation.name, generation.buckets
        (run,) = self._link.with_retries(
            lambda: self._commits.run_head_script(HEARTBEAT, [DEAD_KEY], *words)
        )
        if self._run_id and run != self._run_id:
            raise _restarted_error()
        self._run_id = octets(run)
        self._heartbeat_s = time.monotonic()

    def add(self, batch: Batch) -> None:
        self._heartbeat()
        self._known[batch.chunk.id] = None
        self._waiting.append((cut_batch(batch, self._generation), batch))
        self._rows += len(batch.rows)
        self._bytes += sum(len(piece.packed) for piece in self._waiting[-1][0].pieces)
        if self._rows >= _ROWS_AT_ONCE or self._bytes >= _BYTES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        self._heartbeat()
        waiting, self._waiting, self._rows, self._bytes = self._waiting, [], 0, 0
        self._add(waiting)

    def _add(self, cuts: Sequence[tuple[CutBatch, Batch]]) -> None:
        generation = self._generation
        commands = list[Command]()
        runs = list[tuple[int, Command]]()
        for each, batch in cuts:
            words = ("HSET", generation.chunks, each.chunk, chunk_record(each, batch))
            commands.append(Command(generation.chunks, words))
            for piece in each.pieces:
                keys = piece_keys(generation, piece.name.bucket, piece.folders)
                run = ScriptCommand(APPLY, keys, (b"", piece.name.field, piece.packed))
                runs.append((piece.name.bucket, run.command()))
        replies = self._link.with_retries(
            lambda: self._link.run([*(command for _, command in runs), *commands])
        )
        for (bucket, _), reply in zip(runs, replies, strict=False):
            self._counts[bucket] = parse_bucket_counts(reply)
            self._pieces[bucket] += 1

    def become_live(self, expected: LiveState) -> int | None:
        link = self._link
        applied_pieces = {bucket: pieces for bucket, (pieces, _, _) in self._counts.items()}
        if link.with_retries(link.run_ids) != self._runs or applied_pieces != self._pieces:
            raise _restarted_error()
        _, before = expected.revision or _NO_STATE
        is_number = before.isdigit() and len(before) < 19  # otherwise it is damaged
        number = rebuilt_version(
            int(before) if is_number else 0, self._newer_than, len(self._known), self._clock_ns()
        )
        version = link.with_retries(lambda: self._replace_live(expected, number))
        if version is not None:
            self._commits.invalidate_generation(self._identity)
        return version

    def _replace_live(self, expected: LiveState, number: int) -> int | None:
        """Run REPLACE_LIVE. Returns the version, or None where another state is live."""
        generation, keys = self._generation, DatasetKeys(self._identity)
        words = list[Word]()
        for bucket, counts in self._counts.items():
            words += (bucket, " ".join(map(str, counts)))
        try:
            (version,) = self._commits.run_head_script(
                REPLACE_LIVE,
                [
                    NAMES_KEY,
                    DEAD_KEY,
                    keys.head,
                    keys.chunks,
                    keys.counts,
                    keys.pending,
                    keys.begun,
                    keys.commit_locks,
                    generation.chunks,
                ],
                self._name,
                self._identity.bytes,
                generation.name,
                generation.buckets,
                *(expected.revision or _NO_STATE),
                number,
                sum(files for _, files, _ in self._counts.values()),
                sum(total for _, _, total in self._counts.values()),
                len(self._known),
                chunks_digest(self._known).to_bytes(16, "big"),
                max(self._known, default=LOWEST),
                self._run_id,
                *words,
            )
        except ScriptRejected as refused:
            return self._rejected(refused.word)
        return as_count(version)

    def _rejected(self, word: str) -> int | None:
        try:
            head = self._commits.read_head(self._identity)
        except (NoSuchDataset, CorruptError):
            head = None
        if head is not None and head.generation.name == self._generation.name:
            return head.dataset.version  # an earlier try succeeded, but its reply was lost
        if word == "lost":
            raise MetadataError(
                f"Redis has lost data of the rebuild of {self._name!r}", advice="run it again"
            )
        return None

    def discard(self) -> None:
        try:
            self._link.with_retries(
                lambda: remove_generation(self._link, self._commits, self._generation, 0)
            )
        except DieselError as error:
            log.info("keys of a failed rebuild stay until the next rebuild or deletion: %s", error)


def _restarted_error() -> BusyError:
    return BusyError("Redis has been restarted in the middle of a rebuild", advice="run it again")


def remove_abandoned(link: RedisLink, commits: RedisTransactions) -> None:
    """Remove generations that no dataset has and nobody builds, for some seconds."""
    (reply,) = link.run([Command(DEAD_KEY, ("HGETALL", DEAD_KEY))])
    end_s = time.monotonic() + _CLEAN_S
    for name, state in packed_dict(reply).items():
        buckets = int.from_bytes(state[STATE.size :], "little")
        if len(name) != GENERATION_BYTES or not 1 <= buckets <= BUCKETS_MAX:
            link.run([Command(DEAD_KEY, ("HDEL", DEAD_KEY, name))])  # not written by DIESEL-FS
            continue
        link.extend_deadline()
        remove_generation(link, commits, Generation(name, buckets), _ABANDONED_S)
        if time.monotonic() > end_s:
            return


def remove_generation(
    link: RedisLink, commits: RedisTransactions, generation: Generation, age_s: int
) -> None:
    """Remove a generation that no dataset has, unless its last heartbeat is younger than `age_s`
    seconds.
    """
    try:
        (age,) = commits.run_head_script(CLAIM_ABANDONED, [DEAD_KEY], generation.name, age_s)
    except (UnknownDataset, ScriptRejected):
        return
    if not _exists(link, generation):
        if as_count(age) >= _ABANDONED_S:
            link.run([Command(DEAD_KEY, ("HDEL", DEAD_KEY, generation.name))])
        return
    reader = GenerationReader(link, generation, link.extend_deadline)
    for bucket in range(generation.buckets):
        with suppress(PartialScan):  # a later call removes the rest
            for page in reader.hash_pages(bucket, b"f"):
                folders = [FolderId(folder) for folder in page]
                names = [generation.entries(folder) for folder in folders]
                names += [generation.below(folder) for folder in folders]
                for some in in_portions(names, _KEYS_AT_ONCE):
                    link.run([Command(some[0], ("UNLINK", *some))])
            keys = [generation.key(bucket, what) for what in BUCKET_KEYS]
            link.run([Command(keys[0], ("UNLINK", *keys))])
    link.run([Command(generation.chunks, ("UNLINK", generation.chunks))])


def _exists(link: RedisLink, generation: Generation) -> bool:
    """Whether a generation has any keys."""
    commands = [Command(generation.chunks, ("EXISTS", generation.chunks))]
    for bucket in range(generation.buckets):
        keys = [generation.key(bucket, what) for what in BUCKET_KEYS]
        commands.append(Command(keys[0], ("EXISTS", *keys)))
    return any(link.run(commands))
