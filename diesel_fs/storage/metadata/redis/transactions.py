"""Transactions on a dataset in Redis: how chunks get in, all of them whole or nothing.

A commit writes its pieces beside the state (`x`), where nobody sees them, and then, in one script
in the head's slot, records its chunks, moves the version and names the pieces as to be applied.
From then on it is done: whoever looks at the dataset next, its writer or anybody else, first
applies what is named there, so nobody sees the version without its entries, nor the other way.

    1  BEGIN    says what will be written, so that somebody can sweep it up
    2  `x`      the pieces, each in its bucket
    3  COMMIT   chunks, version, counts of chunks, plan; refused while somebody holds commits back
    4  APPLY    each piece once, in its bucket: entries, holes, the bucket's tally; the piece goes
    5  APPLIED  the tallies reach the marker, the plan goes

A chunk is forgotten in the same way: what goes with each of its pieces (`x`), then FORGET in the
head, then UNAPPLY in its buckets.

A crash before 3 leaves rubbish (`remove_abandoned_transactions`), after it work for the next one
(`apply_pending`). Each step may be repeated. Where Redis has lost pieces between 3 and 4, `n` tells
it from their having been applied, and the answer is MetadataBehind.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from uuid import UUID

from diesel_fs.errors import BusyError, CorruptError, DieselError, MetadataBehind, NoSpaceError
from diesel_fs.format.chunk_id import LOWEST
from diesel_fs.format.entries import ChunkId
from diesel_fs.storage.metadata.redis.bucket_scripts import APPLY, READ_PIECE_FOLDERS, UNAPPLY
from diesel_fs.storage.metadata.redis.errors import UNWRITABLE, RetryLater
from diesel_fs.storage.metadata.redis.head import (
    HeadReader,
    RedisHead,
    ScriptRejected,
    UnknownDataset,
    lost_data_error,
    no_such_dataset_error,
)
from diesel_fs.storage.metadata.redis.head_scripts import ABANDON, APPLIED, BEGIN, COMMIT, FORGET
from diesel_fs.storage.metadata.redis.keys import (
    CHUNK,
    GENERATION_BYTES,
    REMOVAL_PREFIX,
    SCHEMA,
    SCHEMA_KEY,
    STATE,
    TRANSACTION_BYTES,
    ApplyPlan,
    DatasetKeys,
    FolderId,
    Generation,
    PieceCounts,
    PieceName,
    pack_piece_counts,
    unpack_plan,
)
from diesel_fs.storage.metadata.redis.link import Command, RedisLink, ScriptCommand, Word
from diesel_fs.storage.metadata.redis.pieces import BucketPiece, CutBatch, cut_batch, folders_of
from diesel_fs.storage.metadata.redis.replies import as_count, listed, octets
from diesel_fs.storage.metadata.store import COMMIT_LOCK_S_MAX, DIGEST_MODULUS, Batch, chunk_digest

_HOLD_POLL_S = 0.02
_PIECES_AT_ONCE = 64
_APPLY_ROUNDS_MAX = 8
_TRIES_MAX = 20
_SWEEP_S = 60.0
_ABANDONED_S = 600
"""A transaction that has been under way for so long has lost its writer, or is started again."""

BucketCounts = tuple[int, int, int]
"""Of a bucket: pieces that have been applied, files, bytes."""

BegunTransaction = tuple[Generation, ApplyPlan]
"""A transaction that may have left something."""


@dataclass(frozen=True, slots=True)
class ChunkRemoval:
    """Of a chunk that is forgotten: where it was, and what goes with each of its pieces."""

    places: PieceCounts
    pieces: Sequence[BucketPiece]


class PendingCommits(Exception):
    """There is always something that has been committed and not applied."""


class RedisTransactions(HeadReader):
    """The transactions of all datasets of a store."""

    def __init__(self, link: RedisLink, clock_ns: Callable[[], int]) -> None:
        super().__init__(link)
        self._clock_ns = clock_ns
        self._swept_s = -_SWEEP_S
        self._generations: dict[UUID, Generation] = {}  # a stale one is refused by every script

    def read_head(self, identity: UUID) -> RedisHead:
        head = super().read_head(identity)
        self._generations[identity] = head.generation
        return head

    def apply_pending(self, identity: UUID, *, until_empty: bool = True) -> RedisHead:
        """What a dataset's head said, everything that it named having been applied since.

        `until_empty`: nothing was named any more, so its counts are those of its version. Raises
        Unsettled where others keep committing.
        """
        for _ in range(_APPLY_ROUNDS_MAX):
            head = self.read_head(identity)
            for packed in head.pending:
                try:
                    self._apply_one_pending(identity, head, packed)
                except NoSpaceError as error:
                    raise _not_applied(head, error) from error
                except RetryLater as again:
                    if again.reason != UNWRITABLE:
                        raise
                    raise _not_applied(head, again.last_error) from again
            if not head.pending or not until_empty:
                return head
        raise PendingCommits

    def _apply_one_pending(self, identity: UUID, head: RedisHead, packed: bytes) -> None:
        generation = head.generation
        if packed[:GENERATION_BYTES] != generation.name:  # nobody's: it would stay for ever
            self._report_applied(identity, generation, packed)
        else:
            self._apply(identity, generation, unpack_plan(packed, generation.buckets))

    def invalidate_generation(self, identity: UUID) -> None:
        """A dataset has another one now."""
        self._generations.pop(identity, None)

    # Committing

    def commit(
        self,
        identity: UUID,
        batches: Mapping[ChunkId, Batch],
        deadline: float,
        earlier_tries: list[BegunTransaction],
        run_id: str = "",
    ) -> int:
        """One try to fold batches in; the version after that.

        `earlier_tries`: what earlier tries may have left, which goes first. `run_id`: of Redis, for
        which the caller will vouch. Raises Restarted.
        """
        while earlier_tries:
            self._abandon(identity, *earlier_tries[-1])
            earlier_tries.pop()
        if not batches:
            return self.apply_pending(identity, until_empty=False).dataset.version
        transaction = _new_transaction()
        generation = self._generations.get(identity) or self.read_head(identity).generation
        for _ in range(_TRIES_MAX):
            cuts = [cut_batch(batch, generation) for batch in batches.values()]
            plan = _plan(generation, transaction, cuts)
            earlier_tries[:] = [(generation, plan)]
            try:
                known = self._begin(identity, generation, plan)
                if all(known):
                    return self.apply_pending(identity, until_empty=False).dataset.version
                if any(known):
                    batches = {
                        chunk: batch
                        for (chunk, batch), flag in zip(batches.items(), known, strict=True)
                        if not flag
                    }
                    continue
                return self._write(identity, generation, plan, cuts, batches, deadline, run_id)
            except UnknownDataset:
                raise no_such_dataset_error(identity) from None
            except (
                ScriptRejected
            ):  # it was rebuilt, or swept up, or somebody has just committed one
                generation = self.read_head(identity).generation
                transaction = _new_transaction()
        raise BusyError(f"dataset {identity} does not hold still")

    def _begin(self, identity: UUID, generation: Generation, plan: ApplyPlan) -> list[bool]:
        """Which chunks are known already."""
        keys = DatasetKeys(identity)
        _, known, begun = self.run_head_script(
            BEGIN,
            [keys.head, keys.chunks, keys.begun],
            generation.name,
            plan.transaction,
            plan.pack(),
            *(chunk for chunk, _ in plan.chunks),
        )
        if as_count(begun) > 1 and time.monotonic() > self._swept_s + _SWEEP_S:
            self._swept_s = time.monotonic()
            self.remove_abandoned_transactions(identity, generation)
        return [flag == 1 for flag in listed(known)]

    def _write(
        self,
        identity: UUID,
        generation: Generation,
        plan: ApplyPlan,
        cuts: Sequence[CutBatch],
        batches: Mapping[ChunkId, Batch],
        deadline: float,
        run_id: str,
    ) -> int:
        pieces = [piece for each in cuts for piece in each.pieces]
        try:
            self._stage(generation, plan.transaction, pieces)
            version, waiting = self._commit_head(identity, plan, cuts, batches, deadline, run_id)
        except (RetryLater, UnknownDataset):
            raise  # it may have been decided; what has not is abandoned by the next try
        except ScriptRejected:
            self._drop(identity, generation, plan)
            raise
        except DieselError:
            with suppress(Exception):  # sweeping up later does as well
                self._abandon(identity, generation, plan)
            raise
        if waiting > 1 and any(batch.by_purge for batch in batches.values()):
            self.apply_pending(
                identity, until_empty=False
            )  # what purge moved comes after its sources
            return version
        self._apply(identity, generation, plan, {piece.name: piece for piece in pieces})
        return version

    def _stage(
        self, generation: Generation, transaction: bytes, pieces: Sequence[BucketPiece]
    ) -> None:
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            commands = []
            for piece in pieces[start : start + _PIECES_AT_ONCE]:
                key = generation.key(piece.name.bucket, b"x")
                field = transaction + piece.name.field
                commands.append(Command(key, ("HSET", key, field, piece.packed)))
            self._link.extend_deadline()
            self._link.run(commands)

    def _commit_head(
        self,
        identity: UUID,
        plan: ApplyPlan,
        cuts: Sequence[CutBatch],
        batches: Mapping[ChunkId, Batch],
        deadline: float,
        run_id: str,
    ) -> tuple[int, int]:
        """The new version, and how many plans are waiting to be applied."""
        keys = DatasetKeys(identity)
        added = Counter[int]()
        for each in cuts:
            added.update(dict(each.places))
        words: list[Word] = [len(added), *chain.from_iterable(added.items())]
        for each in cuts:
            batch = batches[each.chunk]
            words += (
                each.chunk,
                chunk_record(each, batch),
                chunk_digest(each.chunk).to_bytes(16, "big"),
            )
        while True:
            try:
                version, waiting = self.run_head_script(
                    COMMIT,
                    [
                        keys.head,
                        keys.chunks,
                        keys.pending,
                        keys.begun,
                        keys.commit_locks,
                        keys.counts,
                    ],
                    plan.generation,
                    plan.transaction,
                    plan.pack(),
                    self._clock_ns() // 1000,
                    run_id,
                    COMMIT_LOCK_S_MAX,
                    *words,
                )
            except ScriptRejected as refused:
                if refused.word != "held":
                    raise
                if time.monotonic() > deadline:
                    raise BusyError(f"an export holds commits to dataset {identity} back") from None
                time.sleep(_HOLD_POLL_S)
                self._link.extend_deadline()  # it has answered
                continue
            return as_count(version), as_count(waiting)

    def forget(
        self, identity: UUID, generation: Generation, removals: Mapping[ChunkId, ChunkRemoval]
    ) -> None:
        """One try to forget chunks, of which every place is a hole or a tombstone to be dropped.

        Raises Refused("moved") where one of them is not known, or the generation another.
        """
        transaction = REMOVAL_PREFIX + secrets.token_bytes(TRANSACTION_BYTES - len(REMOVAL_PREFIX))
        chunks = [(chunk, leaving.places) for chunk, leaving in removals.items()]
        plan = ApplyPlan(generation.name, transaction, chunks)
        keys = DatasetKeys(identity)
        self.run_head_script(
            BEGIN,
            [keys.head, keys.chunks, keys.begun],
            generation.name,
            transaction,
            plan.pack(),
            LOWEST,  # which nobody has: there is something to be done
        )
        try:
            self._stage(
                generation, transaction, [p for each in removals.values() for p in each.pieces]
            )
            words: list[Word] = []
            for chunk in removals:
                words += (chunk, (DIGEST_MODULUS - chunk_digest(chunk)).to_bytes(17, "big")[1:])
            self.run_head_script(
                FORGET,
                [keys.head, keys.chunks, keys.pending, keys.begun, keys.commit_locks],
                generation.name,
                transaction,
                plan.pack(),
                self._clock_ns() // 1000,
                COMMIT_LOCK_S_MAX,
                *words,
            )
        except RetryLater:
            raise  # it may have been decided; what has not is swept up
        except ScriptRejected:
            self._drop(identity, generation, plan)
            raise
        except (UnknownDataset, DieselError):
            with suppress(Exception):  # sweeping up later does as well
                self._abandon(identity, generation, plan)
            raise
        self._apply_removal(identity, generation, plan)

    def _apply_removal(self, identity: UUID, generation: Generation, plan: ApplyPlan) -> None:
        """What a transaction that forgets says. A piece that does not wait has been done."""
        names = list(plan.pieces())
        for start in range(0, len(names), _PIECES_AT_ONCE):
            some = names[start : start + _PIECES_AT_ONCE]
            of_pieces = self._folders_of(generation, plan, some)
            self._link.extend_deadline()
            self._link.run_scripts(
                ScriptCommand(
                    UNAPPLY,
                    piece_keys(generation, name.bucket, of_pieces[name]),
                    (plan.transaction + name.field, name.field),
                )
                for name in some
            )
        self._report_applied(identity, generation, plan.pack())

    def _apply(
        self,
        identity: UUID,
        generation: Generation,
        plan: ApplyPlan,
        own_pieces: Mapping[PieceName, BucketPiece] | None = None,
    ) -> None:
        """What a transaction that commits says; `own_pieces`: of the writer, who still has its
        pieces."""
        if plan.transaction.startswith(REMOVAL_PREFIX):
            self._apply_removal(identity, generation, plan)
            return
        names = list(plan.pieces())
        tallies: dict[int, BucketCounts] = {}
        for start in range(0, len(names), _PIECES_AT_ONCE):
            some = names[start : start + _PIECES_AT_ONCE]
            if own_pieces is None:
                folders = self._folders_of(generation, plan, some)
            else:
                folders = {name: own_pieces[name].folders for name in some}
            runs = [
                ScriptCommand(
                    APPLY,
                    piece_keys(generation, name.bucket, folders[name]),
                    (plan.transaction + name.field, name.field),
                )
                for name in some
            ]
            self._link.extend_deadline()
            replies = self._link.run_scripts(runs)
            gone = [i for i, reply in enumerate(replies) if reply is None]
            if gone:
                if not self._is_pending(identity, plan):
                    return  # rebuilt or dropped, or others have applied it and gone further
                if own_pieces is None:
                    raise lost_data_error(self.read_head(identity).dataset.name)
                again = [
                    runs[i]._replace(arguments=(*runs[i].arguments, own_pieces[some[i]].packed))
                    for i in gone
                ]
                for i, reply in zip(gone, self._link.run_scripts(again), strict=True):
                    replies[i] = reply
            for name, reply in zip(some, replies, strict=True):
                tallies[name.bucket] = parse_bucket_counts(reply)
        words = [word for bucket, tally in tallies.items() for word in (bucket, *tally)]
        self._report_applied(identity, generation, plan.pack(), *words)

    def _report_applied(
        self, identity: UUID, generation: Generation, packed: bytes, *words: Word
    ) -> None:
        keys = DatasetKeys(identity)
        with suppress(ScriptRejected):  # it has been rebuilt or dropped since
            applied = [keys.head, keys.pending, keys.counts]
            self.run_head_script(APPLIED, applied, generation.name, packed, *words)

    def _folders_of(
        self, generation: Generation, plan: ApplyPlan, names: Sequence[PieceName]
    ) -> dict[PieceName, Sequence[FolderId]]:
        """The folders of somebody else's pieces, as far as they wait."""
        replies = self._link.run_scripts(
            ScriptCommand(
                READ_PIECE_FOLDERS,
                [generation.key(name.bucket, b"x")],
                [plan.transaction + name.field],
            )
            for name in names
        )
        return {
            name: folders_of(reply) if isinstance(reply, bytes) else []
            for name, reply in zip(names, replies, strict=True)
        }

    def _is_pending(self, identity: UUID, plan: ApplyPlan) -> bool:
        """Whether a plan is still to be applied."""
        head = self.read_head(identity)
        return head.generation.name == plan.generation and plan.pack() in head.pending

    # Rubbish

    def _abandon(self, identity: UUID, generation: Generation, plan: ApplyPlan) -> None:
        """Take an own transaction back, unless it has been decided."""
        try:
            self.run_head_script(ABANDON, [DatasetKeys(identity).begun], plan.transaction, 0)
        except (UnknownDataset, ScriptRejected):
            return  # it has been decided, or swept up, or was never begun
        self._drop(identity, generation, plan)

    def _drop(self, identity: UUID, generation: Generation, plan: ApplyPlan) -> None:
        """Remove the pieces of a transaction that is not, and never will be, decided."""
        keys = DatasetKeys(identity)
        commands = []
        for name in plan.pieces():
            key = generation.key(name.bucket, b"x")
            commands.append(Command(key, ("HDEL", key, plan.transaction + name.field)))
        commands.append(Command(keys.begun, ("HDEL", keys.begun, plan.transaction)))
        with suppress(Exception):  # sweeping up later does as well
            self._link.run(commands)

    def remove_abandoned_transactions(
        self, identity: UUID, generation: Generation, age_s: int = _ABANDONED_S
    ) -> None:
        """Remove what writers have left that died before they committed."""
        keys = DatasetKeys(identity)
        (reply,) = self._link.run([Command(keys.begun, ("HKEYS", keys.begun))])
        transactions = [octets(each) for each in listed(reply)]
        answers = self._link.run_scripts(
            ScriptCommand(ABANDON, [SCHEMA_KEY, keys.begun], [SCHEMA, transaction, age_s])
            for transaction in transactions
        )
        for transaction, answer in zip(transactions, answers, strict=True):
            match answer:
                case [b"ok", bytes(packed)]:
                    try:
                        plan = unpack_plan(packed, generation.buckets)
                    except CorruptError:
                        plan = ApplyPlan(generation.name, transaction, [])
                    if plan.generation == generation.name:
                        self._drop(identity, generation, plan)


def piece_keys(generation: Generation, bucket: int, folders: Sequence[FolderId]) -> list[bytes]:
    """The keys that `APPLY` gets."""
    keys = generation.script_keys(bucket)
    for folder in folders:
        keys += (generation.entries(folder), generation.below(folder))
    return keys


def chunk_record(each: CutBatch, batch: Batch, version: int = 0) -> bytes:
    """What stands in `c` of a chunk."""
    info = CHUNK.pack(batch.chunk.object_bytes, batch.uploaded_ns, each.entries, version)
    return info + pack_piece_counts(each.places)


def parse_bucket_counts(reply: object) -> BucketCounts:
    """What `APPLY` answers."""
    pieces, files, total = (listed(reply) + [None] * 3)[:3]
    return as_count(pieces), as_count(files), as_count(total)


def _not_applied(head: RedisHead, why: DieselError) -> MetadataBehind:
    """The error where what was committed last is not seen yet, and Redis takes no writes."""
    name = head.dataset.name
    return MetadataBehind(f"what was last committed to {name!r} is not applied yet: {why.message}")


def _new_transaction() -> bytes:
    """The name of one that brings chunks."""
    while (name := secrets.token_bytes(TRANSACTION_BYTES)).startswith(REMOVAL_PREFIX):
        pass
    return name


def _plan(generation: Generation, transaction: bytes, cuts: Sequence[CutBatch]) -> ApplyPlan:
    return ApplyPlan(generation.name, transaction, [(each.chunk, each.places) for each in cuts])


assert STATE.size == 9  # what the scripts skip
