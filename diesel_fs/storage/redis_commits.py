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

A crash before 3 leaves rubbish (`sweep`), after it work for the next one (`settled`). Each step may
be repeated. Where Redis has lost pieces between 3 and 4, `n` tells it from their having been
applied, and the answer is MetadataBehind.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from uuid import UUID

from diesel_fs.chunk_id import LOWEST
from diesel_fs.entries import ChunkId
from diesel_fs.errors import BusyError, CorruptError, DieselError, MetadataBehind, NoSpaceError
from diesel_fs.storage.metadata import DIGEST_MODULUS, HOLD_S_MAX, Batch, chunk_digest
from diesel_fs.storage.redis_bucket_scripts import APPLY, FOLDERS, UNAPPLY
from diesel_fs.storage.redis_errors import UNWRITABLE, Again
from diesel_fs.storage.redis_head import Head, Heads, Refused, Unknown, has_lost, no_such
from diesel_fs.storage.redis_keys import (
    CHUNK,
    FORGETS,
    GENERATION_BYTES,
    SCHEMA,
    SCHEMA_KEY,
    STATE,
    TRANSACTION_BYTES,
    DatasetKeys,
    FolderId,
    Generation,
    PieceName,
    Places,
    Plan,
    pack_places,
    unpack_plan,
)
from diesel_fs.storage.redis_link import Command, RedisLink, ScriptCommand, Word
from diesel_fs.storage.redis_pieces import Cut, Piece, cut, folders_of
from diesel_fs.storage.redis_replies import listed, octets, whole
from diesel_fs.storage.redis_scripts import ABANDON, APPLIED, BEGIN, COMMIT, FORGET

_HOLD_POLL_S = 0.02
_PIECES_AT_ONCE = 64
_SETTLE_ROUNDS = 8
_TRIES_MAX = 20
_SWEEP_S = 60.0
_ABANDONED_S = 600
"""A transaction that has been under way for so long has lost its writer, or is started again."""

Tally = tuple[int, int, int]
"""Of a bucket: pieces that have been applied, files, bytes."""

Begun = tuple[Generation, Plan]
"""A transaction that may have left something."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Of a chunk that is forgotten: where it was, and what goes with each of its pieces."""

    places: Places
    pieces: Sequence[Piece]


class Unsettled(Exception):
    """There is always something that has been committed and not applied."""


class Commits(Heads):
    """The transactions of all datasets of a store."""

    def __init__(self, link: RedisLink, clock_ns: Callable[[], int]) -> None:
        super().__init__(link)
        self._clock_ns = clock_ns
        self._swept_s = -_SWEEP_S
        self._generations: dict[UUID, Generation] = {}  # a stale one is refused by every script

    def look(self, identity: UUID) -> Head:
        head = super().look(identity)
        self._generations[identity] = head.generation
        return head

    def settled(self, identity: UUID, *, wholly: bool = True) -> Head:
        """What a dataset's head said, everything that it named having been applied since.

        `wholly`: nothing was named any more, so its counts are those of its version. Raises
        Unsettled where others keep committing.
        """
        for _ in range(_SETTLE_ROUNDS):
            head = self.look(identity)
            for packed in head.unapplied:
                try:
                    self._settle(identity, head, packed)
                except NoSpaceError as error:
                    raise _not_applied(head, error) from error
                except Again as again:
                    if again.why != UNWRITABLE:
                        raise
                    raise _not_applied(head, again.final) from again
            if not head.unapplied or not wholly:
                return head
        raise Unsettled

    def _settle(self, identity: UUID, head: Head, packed: bytes) -> None:
        generation = head.generation
        if packed[:GENERATION_BYTES] != generation.name:  # nobody's: it would stay for ever
            self._tell_applied(identity, generation, packed)
        else:
            self._apply(identity, generation, unpack_plan(packed, generation.buckets))

    def forget_generation(self, identity: UUID) -> None:
        """A dataset has another one now."""
        self._generations.pop(identity, None)

    # Committing

    def commit(
        self,
        identity: UUID,
        batches: Mapping[ChunkId, Batch],
        deadline: float,
        before: list[Begun],
        run: str = "",
    ) -> int:
        """One try to fold batches in; the version after that.

        `before`: what earlier tries may have left, which goes first. `run`: of Redis, for which
        the caller will vouch. Raises Restarted.
        """
        while before:
            self._abandon(identity, *before[-1])
            before.pop()
        if not batches:
            return self.settled(identity, wholly=False).marker.version
        transaction = _new_transaction()
        generation = self._generations.get(identity) or self.look(identity).generation
        for _ in range(_TRIES_MAX):
            cuts = [cut(batch, generation) for batch in batches.values()]
            plan = _plan(generation, transaction, cuts)
            before[:] = [(generation, plan)]
            try:
                known = self._begin(identity, generation, plan)
                if all(known):
                    return self.settled(identity, wholly=False).marker.version
                if any(known):
                    batches = {
                        chunk: batch
                        for (chunk, batch), flag in zip(batches.items(), known, strict=True)
                        if not flag
                    }
                    continue
                return self._write(identity, generation, plan, cuts, batches, deadline, run)
            except Unknown:
                raise no_such(identity) from None
            except Refused:  # it was rebuilt, or swept up, or somebody has just committed one
                generation = self.look(identity).generation
                transaction = _new_transaction()
        raise BusyError(f"dataset {identity} does not hold still")

    def _begin(self, identity: UUID, generation: Generation, plan: Plan) -> list[bool]:
        """Which chunks are known already."""
        keys = DatasetKeys(identity)
        _, known, begun = self.ask(
            BEGIN,
            [keys.marker, keys.chunks, keys.begun],
            generation.name,
            plan.transaction,
            plan.pack(),
            *(chunk for chunk, _ in plan.chunks),
        )
        if whole(begun) > 1 and time.monotonic() > self._swept_s + _SWEEP_S:
            self._swept_s = time.monotonic()
            self.sweep(identity, generation)
        return [flag == 1 for flag in listed(known)]

    def _write(
        self,
        identity: UUID,
        generation: Generation,
        plan: Plan,
        cuts: Sequence[Cut],
        batches: Mapping[ChunkId, Batch],
        deadline: float,
        run: str,
    ) -> int:
        pieces = [piece for each in cuts for piece in each.pieces]
        try:
            self._stage(generation, plan.transaction, pieces)
            version, waiting = self._decide(identity, plan, cuts, batches, deadline, run)
        except (Again, Unknown):
            raise  # it may have been decided; what has not is abandoned by the next try
        except Refused:
            self._drop(identity, generation, plan)
            raise
        except DieselError:
            with suppress(Exception):  # sweeping up later does as well
                self._abandon(identity, generation, plan)
            raise
        if waiting > 1 and any(batch.moved for batch in batches.values()):
            self.settled(identity, wholly=False)  # what purge moved comes after its sources
            return version
        self._apply(identity, generation, plan, {piece.name: piece for piece in pieces})
        return version

    def _stage(self, generation: Generation, transaction: bytes, pieces: Sequence[Piece]) -> None:
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            commands = []
            for piece in pieces[start : start + _PIECES_AT_ONCE]:
                key = generation.key(piece.name.bucket, b"x")
                field = transaction + piece.name.field
                commands.append(Command(key, ("HSET", key, field, piece.packed)))
            self._link.renew()
            self._link.run(commands)

    def _decide(
        self,
        identity: UUID,
        plan: Plan,
        cuts: Sequence[Cut],
        batches: Mapping[ChunkId, Batch],
        deadline: float,
        run: str,
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
                version, waiting = self.ask(
                    COMMIT,
                    [
                        keys.marker,
                        keys.chunks,
                        keys.unapplied,
                        keys.begun,
                        keys.holds,
                        keys.tallies,
                    ],
                    plan.generation,
                    plan.transaction,
                    plan.pack(),
                    self._clock_ns() // 1000,
                    run,
                    HOLD_S_MAX,
                    *words,
                )
            except Refused as refused:
                if refused.word != "held":
                    raise
                if time.monotonic() > deadline:
                    raise BusyError(f"an export holds commits to dataset {identity} back") from None
                time.sleep(_HOLD_POLL_S)
                self._link.renew()  # it has answered
                continue
            return whole(version), whole(waiting)

    def forget(
        self, identity: UUID, generation: Generation, going: Mapping[ChunkId, Leaving]
    ) -> None:
        """One try to forget chunks, of which every place is a hole or a tombstone to be dropped.

        Raises Refused("moved") where one of them is not known, or the generation another.
        """
        transaction = FORGETS + secrets.token_bytes(TRANSACTION_BYTES - len(FORGETS))
        chunks = [(chunk, leaving.places) for chunk, leaving in going.items()]
        plan = Plan(generation.name, transaction, chunks)
        keys = DatasetKeys(identity)
        self.ask(
            BEGIN,
            [keys.marker, keys.chunks, keys.begun],
            generation.name,
            transaction,
            plan.pack(),
            LOWEST,  # which nobody has: there is something to be done
        )
        try:
            self._stage(
                generation, transaction, [p for each in going.values() for p in each.pieces]
            )
            words: list[Word] = []
            for chunk in going:
                words += (chunk, (DIGEST_MODULUS - chunk_digest(chunk)).to_bytes(17, "big")[1:])
            self.ask(
                FORGET,
                [keys.marker, keys.chunks, keys.unapplied, keys.begun, keys.holds],
                generation.name,
                transaction,
                plan.pack(),
                self._clock_ns() // 1000,
                HOLD_S_MAX,
                *words,
            )
        except Again:
            raise  # it may have been decided; what has not is swept up
        except Refused:
            self._drop(identity, generation, plan)
            raise
        except (Unknown, DieselError):
            with suppress(Exception):  # sweeping up later does as well
                self._abandon(identity, generation, plan)
            raise
        self._unapply(identity, generation, plan)

    def _unapply(self, identity: UUID, generation: Generation, plan: Plan) -> None:
        """What a transaction that forgets says. A piece that does not wait has been done."""
        names = list(plan.pieces())
        for start in range(0, len(names), _PIECES_AT_ONCE):
            some = names[start : start + _PIECES_AT_ONCE]
            of_pieces = self._folders_of(generation, plan, some)
            self._link.renew()
            self._link.scripts(
                ScriptCommand(
                    UNAPPLY,
                    piece_keys(generation, name.bucket, of_pieces[name]),
                    (plan.transaction + name.field, name.field),
                )
                for name in some
            )
        self._tell_applied(identity, generation, plan.pack())

    def _apply(
        self,
        identity: UUID,
        generation: Generation,
        plan: Plan,
        own: Mapping[PieceName, Piece] | None = None,
    ) -> None:
        """What a transaction that commits says; `own`: of the writer, who still has its pieces."""
        if plan.transaction.startswith(FORGETS):
            self._unapply(identity, generation, plan)
            return
        names = list(plan.pieces())
        tallies: dict[int, Tally] = {}
        for start in range(0, len(names), _PIECES_AT_ONCE):
            some = names[start : start + _PIECES_AT_ONCE]
            if own is None:
                folders = self._folders_of(generation, plan, some)
            else:
                folders = {name: own[name].folders for name in some}
            runs = [
                ScriptCommand(
                    APPLY,
                    piece_keys(generation, name.bucket, folders[name]),
                    (plan.transaction + name.field, name.field),
                )
                for name in some
            ]
            self._link.renew()
            replies = self._link.scripts(runs)
            gone = [i for i, reply in enumerate(replies) if reply is None]
            if gone:
                if not self._is_named(identity, plan):
                    return  # rebuilt or dropped, or others have applied it and gone further
                if own is None:
                    raise has_lost(self.look(identity).marker.name)
                again = [
                    runs[i]._replace(arguments=(*runs[i].arguments, own[some[i]].packed))
                    for i in gone
                ]
                for i, reply in zip(gone, self._link.scripts(again), strict=True):
                    replies[i] = reply
            for name, reply in zip(some, replies, strict=True):
                tallies[name.bucket] = tally_of(reply)
        words = [word for bucket, tally in tallies.items() for word in (bucket, *tally)]
        self._tell_applied(identity, generation, plan.pack(), *words)

    def _tell_applied(
        self, identity: UUID, generation: Generation, packed: bytes, *words: Word
    ) -> None:
        keys = DatasetKeys(identity)
        with suppress(Refused):  # it has been rebuilt or dropped since
            applied = [keys.marker, keys.unapplied, keys.tallies]
            self.ask(APPLIED, applied, generation.name, packed, *words)

    def _folders_of(
        self, generation: Generation, plan: Plan, names: Sequence[PieceName]
    ) -> dict[PieceName, Sequence[FolderId]]:
        """The folders of somebody else's pieces, as far as they wait."""
        replies = self._link.scripts(
            ScriptCommand(
                FOLDERS, [generation.key(name.bucket, b"x")], [plan.transaction + name.field]
            )
            for name in names
        )
        return {
            name: folders_of(reply) if isinstance(reply, bytes) else []
            for name, reply in zip(names, replies, strict=True)
        }

    def _is_named(self, identity: UUID, plan: Plan) -> bool:
        """Whether a plan is still to be applied."""
        head = self.look(identity)
        return head.generation.name == plan.generation and plan.pack() in head.unapplied

    # Rubbish

    def _abandon(self, identity: UUID, generation: Generation, plan: Plan) -> None:
        """Take an own transaction back, unless it has been decided."""
        try:
            self.ask(ABANDON, [DatasetKeys(identity).begun], plan.transaction, 0)
        except (Unknown, Refused):
            return  # it has been decided, or swept up, or was never begun
        self._drop(identity, generation, plan)

    def _drop(self, identity: UUID, generation: Generation, plan: Plan) -> None:
        """Remove the pieces of a transaction that is not, and never will be, decided."""
        keys = DatasetKeys(identity)
        commands = []
        for name in plan.pieces():
            key = generation.key(name.bucket, b"x")
            commands.append(Command(key, ("HDEL", key, plan.transaction + name.field)))
        commands.append(Command(keys.begun, ("HDEL", keys.begun, plan.transaction)))
        with suppress(Exception):  # sweeping up later does as well
            self._link.run(commands)

    def sweep(self, identity: UUID, generation: Generation, age_s: int = _ABANDONED_S) -> None:
        """Remove what writers have left that died before they committed."""
        keys = DatasetKeys(identity)
        (reply,) = self._link.run([Command(keys.begun, ("HKEYS", keys.begun))])
        transactions = [octets(each) for each in listed(reply)]
        answers = self._link.scripts(
            ScriptCommand(ABANDON, [SCHEMA_KEY, keys.begun], [SCHEMA, transaction, age_s])
            for transaction in transactions
        )
        for transaction, answer in zip(transactions, answers, strict=True):
            match answer:
                case [b"ok", bytes(packed)]:
                    try:
                        plan = unpack_plan(packed, generation.buckets)
                    except CorruptError:
                        plan = Plan(generation.name, transaction, [])
                    if plan.generation == generation.name:
                        self._drop(identity, generation, plan)


def piece_keys(generation: Generation, bucket: int, folders: Sequence[FolderId]) -> list[bytes]:
    """The keys that `APPLY` gets."""
    keys = generation.script_keys(bucket)
    for folder in folders:
        keys += (generation.entries(folder), generation.below(folder))
    return keys


def chunk_record(each: Cut, batch: Batch, version: int = 0) -> bytes:
    """What stands in `c` of a chunk."""
    info = CHUNK.pack(batch.chunk.object_bytes, batch.uploaded_ns, each.entries, version)
    return info + pack_places(each.places)


def tally_of(reply: object) -> Tally:
    """What `APPLY` answers."""
    pieces, files, total = (listed(reply) + [None] * 3)[:3]
    return whole(pieces), whole(files), whole(total)


def _not_applied(head: Head, why: DieselError) -> MetadataBehind:
    """The error where what was committed last is not seen yet, and Redis takes no writes."""
    name = head.marker.name
    return MetadataBehind(f"what was last committed to {name!r} is not applied yet: {why.message}")


def _new_transaction() -> bytes:
    """The name of one that brings chunks."""
    while (name := secrets.token_bytes(TRANSACTION_BYTES)).startswith(FORGETS):
        pass
    return name


def _plan(generation: Generation, transaction: bytes, cuts: Sequence[Cut]) -> Plan:
    return Plan(generation.name, transaction, [(each.chunk, each.places) for each in cuts])


assert STATE.size == 9  # what the scripts skip
