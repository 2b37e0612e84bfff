"""Adds chunks to a dataset in Redis, and removes them: all chunks of a transaction or none.

A script is atomic, but touches one slot only, and a dataset has many. So a commit first writes its
pieces (`keys.py`) to keys that no reader reads. Then one script in the head's slot commits. Every
reader and writer applies all pending pieces before it reads entries, so nobody sees the new version
without its entries, or entries of a later version.

    1  BEGIN    Record the changes, so that others can remove the pieces if the writer dies.
    2  (HSET)   Write the pieces to the hash `x` of each bucket.
    3  COMMIT   Record chunks, version, counts of chunks, and the changes as pending. Refused while
                commits are locked.
    4  APPLY    For each piece: update entries, holes and counts of its bucket; remove the piece.
    5  APPLIED  Add the buckets' counts to the head; remove the changes from the pending ones.

To remove chunks, step 2 lists the entries to remove, and step 4 is UNAPPLY. A full Redis refuses
steps 1 to 3, except those of a removal and of a commit that makes room (`CommitBatch.makes_room`):
otherwise the memory would stay full.

Concurrency. Each of steps 1, 3 and 5 is one script, as is each piece of step 4. Between two
scripts, anything may happen: other writers commit, readers apply the same pieces, the writer dies,
Redis restarts, or a rebuild replaces the generation.

- Two writers may prepare (1, 2) at once, each in fields named after its transaction. COMMIT decides
  the order. It writes nothing unless the generation is live, no lock is held, the transaction was
  not abandoned, and each chunk is still unknown (or known, if it is to be removed).
- Several clients may apply the same changes at once. APPLY records a piece in the hash `n`, so it
  is applied once. A later client gets the bucket's counts without a change, and APPLIED ignores
  counts of fewer pieces than it has seen.
- Purge's copies must follow the entries that they replace, so their writer applies all earlier
  changes first. Other entries give the same state in every order.

Every step may be repeated. After a crash before step 3 the pieces are removed later
(`remove_abandoned_transactions`); after it, the next reader or writer applies them
(`apply_pending`). A piece that is missing, also from the hash `n`, was lost by Redis:
MetadataBehind is raised.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from operator import not_
from typing import Self
from uuid import UUID

from ....errors import BusyError, CorruptError, DieselError, MetadataBehind, NoSpaceError
from ....format.chunk_id import LOWEST
from ....format.entries import ChunkId
from ..store import (
    COMMIT_LOCK_S_MAX,
    DIGEST_MODULUS,
    CommitBatch,
    chunk_digest,
    commits_locked_error,
    no_such_dataset_error,
)
from .bucket_scripts import APPLY, READ_PIECE_FOLDERS, STAGE, UNAPPLY, LoadedScript
from .errors import UNWRITABLE, RetryLater
from .head import HeadReader, RedisHead, ScriptRejected, UnknownDataset, lost_data_error
from .head_scripts import ABANDON, APPLIED, BEGIN, COMMIT
from .keys import (
    GENERATION_BYTES,
    REMOVAL_PREFIX,
    SCHEMA,
    SCHEMA_KEY,
    STATE,
    TRANSACTION_BYTES,
    Changes,
    DatasetKeys,
    FolderId,
    Generation,
    PieceName,
    unpack_changes,
)
from .link import RedisCommand, RedisLink, ScriptCommand, Word, command, in_portions
from .pieces import BucketPiece, ChunkPieces, cut_batch, folders_of
from .replies import as_count, listed, octets

_LOCK_POLL_S = 0.02

_PIECES_AT_ONCE = 64
_APPLY_ROUNDS_MAX = 8  # before a reader locks commits
_TRIES_MAX = 20
_CLEAN_INTERVAL_S = 60.0  # between searches for abandoned transactions
_ABANDONED_S = 600
"""The writer of an older transaction is dead, or must start again."""

BucketCounts = tuple[int, int, int]
"""Applied pieces, files, bytes of the files."""


@dataclass(frozen=True)
class Transaction:
    """`changes` lists the chunks and their pieces, which are in the buckets of `generation`."""

    identity: UUID
    generation: Generation
    changes: Changes
    frees: bool = False  # a full Redis must accept it, since it makes room

    @classmethod
    def of(
        cls,
        identity: UUID,
        generation: Generation,
        name: bytes,
        chunks: Sequence[ChunkPieces],
        *,
        frees: bool,
    ) -> Self:
        counts = [(each.chunk, each.piece_counts) for each in chunks]
        return cls(identity, generation, Changes(generation.name, name, counts), frees)

    @cached_property
    def keys(self) -> DatasetKeys:
        return DatasetKeys(self.identity)

    @cached_property
    def words(self) -> tuple[bytes, bytes, bytes, int]:
        """The first arguments of BEGIN and COMMIT."""
        return self.generation.name, self.changes.transaction, self.changes.pack(), int(self.frees)

    def staged_piece(self, name: PieceName) -> tuple[bytes, bytes]:
        return self.generation.key(name.bucket, b"x"), self.changes.transaction + name.field

    def stage_command(self, piece: BucketPiece) -> RedisCommand:
        key, field = self.staged_piece(piece.name)
        if self.frees:
            return ScriptCommand(STAGE, (key,), (field, piece.packed)).command()
        return command("HSET", key, field, piece.packed)

    def script_command(
        self, script: LoadedScript, name: PieceName, folders: Sequence[FolderId]
    ) -> ScriptCommand:
        _, field = self.staged_piece(name)
        keys = piece_keys(self.generation, name.bucket, folders)
        return ScriptCommand(script, keys, (field, name.field))


class PendingCommits(Exception):
    """Other writers keep committing: some changes are always pending."""


class RedisTransactions(HeadReader):
    """Thread-safe."""

    def __init__(self, link: RedisLink, clock_ns: Callable[[], int]) -> None:
        super().__init__(link)
        self.clock_ns = clock_ns
        self._cleaned_s = -_CLEAN_INTERVAL_S  # monotonic time of the last search
        self._generations: dict[UUID, Generation] = {}  # as read last: a stale one is refused

    def read_head(self, identity: UUID) -> RedisHead:
        head = super().read_head(identity)
        self._generations[identity] = head.generation
        return head

    def apply_pending(self, identity: UUID, *, until_empty: bool = True) -> RedisHead:
        """Apply all pending changes; returns the head. `until_empty`: until none are pending, since
        only then do the head's counts belong to its version. Raises PendingCommits if others keep
        committing."""
        for _ in range(_APPLY_ROUNDS_MAX):
            head = self.read_head(identity)
            for packed in head.pending:
                try:
                    self._apply_one_pending(identity, head, packed)
                except NoSpaceError as error:
                    raise _not_applied(head, error) from error
                except RetryLater as passing:
                    if passing.reason != UNWRITABLE:
                        raise
                    raise _not_applied(head, passing.last_error) from passing
            if not head.pending or not until_empty:
                return head
        raise PendingCommits

    def _apply_one_pending(self, identity: UUID, head: RedisHead, packed: bytes) -> None:
        generation = head.generation
        if packed[:GENERATION_BYTES] != generation.name:  # of an old generation: drop the changes
            self._report_applied(identity, generation, packed)
        else:
            changes = unpack_changes(packed, generation.buckets)
            self._apply(Transaction(identity, generation, changes))

    def invalidate_generation(self, identity: UUID) -> None:
        self._generations.pop(identity, None)

    # Committing

    def commit(
        self,
        identity: UUID,
        batches: Mapping[ChunkId, CommitBatch],
        deadline: float,
        earlier_tries: list[Transaction],
        run_id: str = "",
    ) -> int:
        """Try once to commit batches, after removing what `earlier_tries` may have left; returns
        the new version. Waits until `deadline` (monotonic time) while commits are locked. `run_id`
        is the run of Redis that the caller is going to confirm. Raises StoreRestarted."""
        while earlier_tries:
            self._abandon(earlier_tries[-1])
            earlier_tries.pop()
        if not batches:
            return self.apply_pending(identity, until_empty=False).dataset.version
        name = _new_transaction_name()
        generation = self._generations.get(identity) or self.read_head(identity).generation
        for _ in range(_TRIES_MAX):
            chunks = [cut_batch(batch, generation) for batch in batches.values()]
            frees = all(batch.makes_room for batch in batches.values())
            transaction = Transaction.of(identity, generation, name, chunks, frees=frees)
            earlier_tries[:] = [transaction]
            try:
                known = self._begin(transaction, batches)
                if all(known):
                    return self.apply_pending(identity, until_empty=False).dataset.version
                if any(known):
                    batches = dict(compress(batches.items(), map(not_, known)))
                    continue
                version, pending = self._write(transaction, chunks, deadline, run_id)
                if pending > 1 and any(batch.by_purge for batch in batches.values()):
                    # Purge's copies must follow the entries that they replace
                    self.apply_pending(identity, until_empty=False)
                else:
                    own_pieces = chain.from_iterable(each.pieces for each in chunks)
                    self._apply(transaction, {piece.name: piece for piece in own_pieces})
                return version
            except UnknownDataset:
                raise no_such_dataset_error(identity) from None
            except ScriptRejected:  # rebuilt, removed as abandoned, or a chunk was just committed
                generation = self.read_head(identity).generation
                name = _new_transaction_name()
        raise changing_error(identity)

    def _begin(self, transaction: Transaction, chunks: Iterable[ChunkId]) -> list[bool]:
        keys = transaction.keys
        _, known, begun = self.run_head_script(
            BEGIN, [keys.head, keys.chunks, keys.begun], *transaction.words, *chunks
        )
        if as_count(begun) > 1 and time.monotonic() > self._cleaned_s + _CLEAN_INTERVAL_S:
            self._cleaned_s = time.monotonic()
            self.remove_abandoned_transactions(transaction.identity, transaction.generation)
        return [flag == 1 for flag in listed(known)]

    def _write(
        self,
        transaction: Transaction,
        chunks: Sequence[ChunkPieces],
        deadline: float,
        run_id: str = "",
    ) -> tuple[int, int]:
        """Waits as `commit`. Returns the new version and the number of pending changes."""
        with self._undone_on_error(transaction):
            pieces = chain.from_iterable(each.pieces for each in chunks)
            for portion in in_portions(pieces, _PIECES_AT_ONCE):
                self.link.extend_deadline()
                self.link.run([*map(transaction.stage_command, portion)])
            return self._commit_head(transaction, chunks, deadline, run_id)

    @contextmanager
    def _undone_on_error(self, transaction: Transaction) -> Iterator[None]:
        """Remove a failed transaction's pieces, unless it may have been committed."""
        try:
            yield
        except (RetryLater, UnknownDataset):
            raise  # the next try removes the pieces, or they are removed as abandoned
        except ScriptRejected:
            self._drop(transaction)
            raise
        except DieselError:
            with suppress(Exception):  # as above
                self._abandon(transaction)
            raise

    def _commit_head(
        self,
        transaction: Transaction,
        chunks: Sequence[ChunkPieces],
        deadline: float,
        run_id: str,
    ) -> tuple[int, int]:
        added, words = Counter[int](), list[Word]()
        for each in chunks:
            digest = chunk_digest(each.chunk)
            if each.record:
                added.update(dict(each.piece_counts))
            else:
                digest = DIGEST_MODULUS - digest
            words += (each.chunk, each.record, (digest % DIGEST_MODULUS).to_bytes(16, "big"))
        words[:0] = [len(added), *chain.from_iterable(added.items())]
        keys = transaction.keys
        names = [
            keys.head, keys.chunks, keys.pending, keys.begun, keys.commit_locks, keys.counts,
        ]  # fmt: skip
        while True:
            clock_us = self.clock_ns() // 1000
            try:
                version, pending = self.run_head_script(
                    COMMIT, names, *transaction.words, clock_us, run_id, COMMIT_LOCK_S_MAX, *words
                )
            except ScriptRejected as rejected:
                if rejected.word != "held":
                    raise
                if time.monotonic() > deadline:
                    raise commits_locked_error(transaction.identity) from None
                time.sleep(_LOCK_POLL_S)
                self.link.extend_deadline()
                continue
            return as_count(version), as_count(pending)

    def forget(
        self,
        identity: UUID,
        generation: Generation,
        chunks: Sequence[ChunkPieces],
        deadline: float,
    ) -> None:
        """Try once to remove chunks in which every place is a hole, or a tombstone to be dropped.
        Waits as `commit`. Raises ScriptRejected("moved") if a chunk is not known, or the generation
        was replaced."""
        name = REMOVAL_PREFIX + secrets.token_bytes(TRANSACTION_BYTES - len(REMOVAL_PREFIX))
        transaction = Transaction.of(identity, generation, name, chunks, frees=True)
        # No chunk has the ID `LOWEST`, so the script does not find all known
        self._begin(transaction, [LOWEST])
        self._write(transaction, chunks, deadline)
        self._apply(transaction)

    # Applying

    def _apply(
        self, transaction: Transaction, own_pieces: Mapping[PieceName, BucketPiece] | None = None
    ) -> None:
        """`own_pieces`: the writer's copies, which replace pieces that Redis has lost."""
        identity, generation = transaction.identity, transaction.generation
        changes = transaction.changes
        is_removal = changes.transaction.startswith(REMOVAL_PREFIX)
        script = UNAPPLY if is_removal else APPLY
        counts: dict[int, BucketCounts] = {}
        for names in in_portions(changes.pieces(), _PIECES_AT_ONCE):
            if own_pieces is None:
                folders = self._folders_of(transaction, names)
            else:
                folders = {name: own_pieces[name].folders for name in names}
            runs = [transaction.script_command(script, name, folders[name]) for name in names]
            self.link.extend_deadline()
            replies = self.link.run_scripts(runs)
            if is_removal:
                continue  # a removal without a piece: it has been applied
            missing = [i for i, reply in enumerate(replies) if reply is None]
            if missing:
                if not self._is_pending(transaction):
                    return  # rebuilt or dropped, or others have applied it and removed its chunks
                if own_pieces is None:
                    raise lost_data_error(self.read_head(identity).dataset.name)
                again = [
                    runs[i]._replace(arguments=(*runs[i].arguments, own_pieces[names[i]].packed))
                    for i in missing
                ]
                for i, reply in zip(missing, self.link.run_scripts(again), strict=True):
                    replies[i] = reply
            for name, reply in zip(names, replies, strict=True):
                counts[name.bucket] = parse_bucket_counts(reply)
        words = [word for bucket, each in counts.items() for word in (bucket, *each)]
        self._report_applied(identity, generation, changes.pack(), *words)

    def _report_applied(
        self, identity: UUID, generation: Generation, packed: bytes, *words: Word
    ) -> None:
        keys = DatasetKeys(identity)
        with suppress(ScriptRejected):  # rebuilt or dropped since
            applied = [keys.head, keys.pending, keys.counts]
            self.run_head_script(APPLIED, applied, generation.name, packed, *words)

    def _folders_of(
        self, transaction: Transaction, names: Sequence[PieceName]
    ) -> dict[PieceName, Sequence[FolderId]]:
        staged = [transaction.staged_piece(name) for name in names]
        replies = self.link.run_scripts(
            ScriptCommand(READ_PIECE_FOLDERS, [key], [field]) for key, field in staged
        )
        return {
            name: folders_of(reply) if isinstance(reply, bytes) else []
            for name, reply in zip(names, replies, strict=True)
        }

    def _is_pending(self, transaction: Transaction) -> bool:
        head, changes = self.read_head(transaction.identity), transaction.changes
        return head.generation.name == changes.generation and changes.pack() in head.pending

    # Removing what failed transactions left

    def _abandon(self, transaction: Transaction) -> None:
        """Undo this process's transaction, unless it was committed."""
        try:
            self.run_head_script(
                ABANDON, [transaction.keys.begun], transaction.changes.transaction, 0
            )
        except (UnknownDataset, ScriptRejected):
            return  # committed or removed already, or never begun
        self._drop(transaction)

    def _drop(self, transaction: Transaction) -> None:
        staged = map(transaction.staged_piece, transaction.changes.pieces())
        commands = [command("HDEL", key, field) for key, field in staged]
        commands.append(command("HDEL", transaction.keys.begun, transaction.changes.transaction))
        with suppress(Exception):  # they are removed as abandoned later
            self.link.run(commands)

    def remove_abandoned_transactions(self, identity: UUID, generation: Generation) -> None:
        keys = DatasetKeys(identity)
        reply = self.link.execute("HKEYS", keys.begun)
        names = [octets(each) for each in listed(reply)]
        answers = self.link.run_scripts(
            ScriptCommand(ABANDON, [SCHEMA_KEY, keys.begun], [SCHEMA, name, _ABANDONED_S])
            for name in names
        )
        for name, answer in zip(names, answers, strict=True):
            match answer:
                case [b"ok", bytes(packed)]:
                    try:
                        changes = unpack_changes(packed, generation.buckets)
                    except CorruptError:
                        changes = Changes(generation.name, name, [])
                    if changes.generation == generation.name:
                        self._drop(Transaction(identity, generation, changes))


def piece_keys(generation: Generation, bucket: int, folders: Sequence[FolderId]) -> list[bytes]:
    """The keys of `APPLY` and `UNAPPLY` for a piece with entries in these folders."""
    keys = generation.script_keys(bucket)
    for folder in folders:
        keys += (generation.entries(folder), generation.below(folder))
    return keys


def parse_bucket_counts(reply: object) -> BucketCounts:
    pieces, files, total = (listed(reply) + [None] * 3)[:3]
    return as_count(pieces), as_count(files), as_count(total)


def changing_error(identity: UUID) -> BusyError:
    """Other writers kept changing the dataset until tries or time were used up."""
    return BusyError(f"dataset {identity} kept changing", advice="try again")


def _not_applied(head: RedisHead, cause: DieselError) -> MetadataBehind:
    """A reader cannot apply pending changes, because Redis takes no writes."""
    name = head.dataset.name
    return MetadataBehind(
        f"the last commits to {name!r} cannot be read yet, they are not applied: {cause.message}"
    )


def _new_transaction_name() -> bytes:
    while (name := secrets.token_bytes(TRANSACTION_BYTES)).startswith(REMOVAL_PREFIX):
        pass
    return name


assert STATE.size == 9  # the scripts skip 9 bytes
