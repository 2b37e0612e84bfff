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
from diesel_fs.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    DieselError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSuchDataset,
)
from diesel_fs.storage.metadata import (
    DIGEST_MODULUS,
    HOLD_S_MAX,
    Batch,
    Marker,
    chunk_digest,
)
from diesel_fs.storage.redis_keys import (
    CHUNK,
    FORGETS,
    SCHEMA,
    SCHEMA_KEY,
    STATE,
    STORE_KEY,
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
from diesel_fs.storage.redis_link import Again, Command, RedisLink, ScriptCommand, Word
from diesel_fs.storage.redis_pieces import Cut, Piece, cut, folders_of
from diesel_fs.storage.redis_scripts import (
    ABANDON,
    APPLIED,
    APPLY,
    BEGIN,
    COMMIT,
    FORGET,
    LOOK,
    UNAPPLY,
    Script,
)

_HOLD_POLL_S = 0.02
_PIECES_AT_ONCE = 64
_SETTLE_ROUNDS = 8
_BEGUN_MANY = 8
_SWEEP_S = 60.0
_ABANDONED_S = 600
"""A transaction that has been under way for so long has lost its writer, or is started again."""

Tally = tuple[int, int, int]
"""Of a bucket: pieces that have been applied, files, bytes."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a dataset's head says."""

    marker: Marker
    generation: Generation
    first: int  # the version of chunks whose record says 0
    unapplied: Sequence[bytes]  # plans
    pieces: Mapping[int, int]  # of each bucket, how many are committed


@dataclass(frozen=True, slots=True)
class Leaving:
    """Of a chunk that is forgotten: where it was, and what goes with each of its pieces."""

    places: Places
    pieces: Sequence[Piece]


class Commits:
    """The transactions of all datasets of a store."""

    def __init__(self, link: RedisLink, clock_ns: Callable[[], int]) -> None:
        self._link = link
        self._clock_ns = clock_ns
        self._swept_s = -_SWEEP_S
        self._generations: dict[UUID, Generation] = {}  # a stale one is refused by every script

    def ask(self, script: Script, keys: Sequence[bytes], *arguments: Word) -> list[object]:
        """A head script's answer, without its first word; raises what that word means."""
        run = ScriptCommand(script, (SCHEMA_KEY, *keys), (SCHEMA, *arguments))
        (reply,) = self._link.scripts([run])
        assert isinstance(reply, list)
        word, *rest = reply
        match word:
            case b"ok":
                return rest
            case b"schema":
                _refuse_schema(int(rest[0]))
            case b"conflict":
                found = f"dataset {rest[0].decode()!r} has the identity {UUID(bytes=rest[1])}"
                raise ConflictError(f"{found}: a name and an identity belong to each other alone")
            case b"none":
                raise Unknown
        raise Refused(word.decode())

    def check_schema(self) -> None:
        """Raises NewerVersionError or MetadataError where another kind of program was here."""
        (found,) = self._link.run([Command(SCHEMA_KEY, ("GET", SCHEMA_KEY))])
        if isinstance(found, bytes) and int(found) != SCHEMA:
            _refuse_schema(int(found))

    def bind(self, store: UUID) -> None:
        """From now on this Redis describes the chunks of that object store, and of no other: names
        of two repositories would be taken for each other's. Raises ConfigError.
        """
        bound = Command(STORE_KEY, ("SET", STORE_KEY, store.hex, "NX"))
        _, found = self._link.run([bound, Command(STORE_KEY, ("GET", STORE_KEY))])
        if isinstance(found, bytes) and found != store.hex.encode():
            raise ConfigError(
                f"the Redis {self._link.address} has the metadata of another object store"
                f" ({found.decode(errors='replace')[:32]}, not {store.hex})",
                advice="give each repository a database of its own: redis://host:port/1",
            )

    def look(self, identity: UUID) -> Head:
        """What a dataset's head says. Raises NoSuchDataset."""
        keys = DatasetKeys(identity)
        try:
            fields, unapplied, tallies = self.ask(LOOK, [keys.marker, keys.unapplied, keys.tallies])
        except Unknown:
            raise no_such(identity) from None
        head = _head(identity, fields, unapplied, tallies)
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
                plan = unpack_plan(packed)
                if plan.generation == head.generation.name:
                    self._apply(identity, head.generation, plan)
            if not head.unapplied or not wholly:
                return head
        raise Unsettled

    def forget_generation(self, identity: UUID) -> None:
        """A dataset has another one now."""
        self._generations.pop(identity, None)

    def check(self, identity: UUID, head: Head, buckets: Sequence[int] | None = None) -> bool:
        """Whether what was read since `head` was of the dataset: its generation still stands.

        Raises MetadataBehind where a bucket has lost what it had told the head.
        """
        generation, keys = head.generation, DatasetKeys(identity)
        chosen = sorted(head.pieces if buckets is None else head.pieces.keys() & set(buckets))
        commands = []
        for bucket in chosen:
            key = generation.key(bucket, b"t")
            commands.append(Command(key, ("HGET", key, "pieces")))
        replies = self._link.run(commands)
        (name,) = self._link.run([Command(keys.marker, ("HGET", keys.marker, "generation"))])
        if name != generation.name:
            return False
        for bucket, reply in zip(chosen, replies, strict=True):
            if int(reply or 0) < head.pieces[bucket]:  # type: ignore[call-overload]
                raise _lost(head.marker.name)
        return True

    # Committing

    def commit(self, identity: UUID, batches: Mapping[ChunkId, Batch], deadline: float) -> int:
        """One try to fold batches in; the version after that."""
        if not batches:
            return self.settled(identity, wholly=False).marker.version
        transaction = _new_transaction()
        generation = self._generations.get(identity) or self.look(identity).generation
        while True:
            cuts = [cut(batch, generation) for batch in batches.values()]
            try:
                known = self._begin(identity, generation, transaction, cuts)
                if all(known):
                    return self.settled(identity, wholly=False).marker.version
                if any(known):
                    batches = {
                        chunk: batch
                        for (chunk, batch), flag in zip(batches.items(), known, strict=True)
                        if not flag
                    }
                    continue
                return self._write(identity, generation, transaction, cuts, batches, deadline)
            except Unknown:
                raise no_such(identity) from None
            except Refused:  # it was rebuilt, or swept up, or somebody has just committed one
                generation = self.look(identity).generation
                transaction = _new_transaction()

    def _begin(
        self, identity: UUID, generation: Generation, transaction: bytes, cuts: Sequence[Cut]
    ) -> list[bool]:
        """Which chunks are known already."""
        keys, plan = DatasetKeys(identity), _plan(generation, transaction, cuts)
        _, known, begun = self.ask(
            BEGIN,
            [keys.marker, keys.chunks, keys.begun],
            generation.name,
            transaction,
            plan.pack(),
            *(each.chunk for each in cuts),
        )
        assert isinstance(known, list)
        assert isinstance(begun, int)
        if begun > _BEGUN_MANY and time.monotonic() > self._swept_s + _SWEEP_S:
            self._swept_s = time.monotonic()
            self.sweep(identity, generation)
        return [flag == 1 for flag in known]

    def _write(
        self,
        identity: UUID,
        generation: Generation,
        transaction: bytes,
        cuts: Sequence[Cut],
        batches: Mapping[ChunkId, Batch],
        deadline: float,
    ) -> int:
        plan = _plan(generation, transaction, cuts)
        pieces = [piece for each in cuts for piece in each.pieces]
        try:
            self._stage(generation, transaction, pieces)
            version, waiting = self._decide(identity, plan, cuts, batches, deadline)
        except (Again, Refused, Unknown):
            raise  # it may have been decided; what has not is swept up
        except DieselError:
            self._forget(identity, generation, plan)
            raise
        if waiting > 1 and any(batch.moved for batch in batches.values()):
            self.settled(identity, wholly=False)  # what purge moved comes after its sources
            return version
        self._apply(identity, generation, plan, {piece.name: piece.folders for piece in pieces})
        return version

    def _stage(self, generation: Generation, transaction: bytes, pieces: Sequence[Piece]) -> None:
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            commands = []
            for piece in pieces[start : start + _PIECES_AT_ONCE]:
                key = generation.key(piece.name.bucket, b"x")
                field = transaction + piece.name.field
                commands.append(Command(key, ("HSET", key, field, piece.packed)))
            self._link.run(commands)

    def _decide(
        self,
        identity: UUID,
        plan: Plan,
        cuts: Sequence[Cut],
        batches: Mapping[ChunkId, Batch],
        deadline: float,
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
            now_ns = self._clock_ns()
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
                    now_ns // 1000,
                    repr(now_ns / 1e9),
                    HOLD_S_MAX,
                    *words,
                )
            except Refused as refused:
                if refused.word != "held":
                    raise
                if time.monotonic() > deadline:
                    raise BusyError(f"an export holds commits to dataset {identity} back") from None
                time.sleep(_HOLD_POLL_S)
                continue
            assert isinstance(version, bytes)
            assert isinstance(waiting, int)
            return int(version), waiting

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
            now_ns = self._clock_ns()
            words: list[Word] = []
            for chunk in going:
                words += (chunk, (DIGEST_MODULUS - chunk_digest(chunk)).to_bytes(17, "big")[1:])
            self.ask(
                FORGET,
                [keys.marker, keys.chunks, keys.unapplied, keys.begun, keys.holds],
                generation.name,
                transaction,
                plan.pack(),
                now_ns // 1000,
                repr(now_ns / 1e9),
                HOLD_S_MAX,
                *words,
            )
        except Again:
            raise  # it may have been decided; what has not is swept up
        except (Refused, Unknown, DieselError):
            self._forget(identity, generation, plan)
            raise
        self._unapply(identity, generation, plan)

    def _unapply(self, identity: UUID, generation: Generation, plan: Plan) -> None:
        """What a transaction that forgets says. A piece that does not wait has been done."""
        names = list(plan.pieces())
        for start in range(0, len(names), _PIECES_AT_ONCE):
            some = names[start : start + _PIECES_AT_ONCE]
            of_pieces = self._folders_of(generation, plan, some)
            self._link.scripts(
                ScriptCommand(
                    UNAPPLY,
                    piece_keys(generation, name.bucket, of_pieces[name]),
                    (plan.transaction + name.field, name.field),
                )
                for name in some
            )
        keys = DatasetKeys(identity)
        with suppress(Refused):  # it has been rebuilt or dropped since
            applied = [keys.marker, keys.unapplied, keys.tallies]
            self.ask(APPLIED, applied, generation.name, plan.pack())

    def _apply(
        self,
        identity: UUID,
        generation: Generation,
        plan: Plan,
        folders: Mapping[PieceName, Sequence[FolderId]] | None = None,
    ) -> None:
        if plan.transaction.startswith(FORGETS):
            self._unapply(identity, generation, plan)
            return
        names = list(plan.pieces())
        tallies: dict[int, Tally] = {}
        for start in range(0, len(names), _PIECES_AT_ONCE):
            some = names[start : start + _PIECES_AT_ONCE]
            of_pieces = folders or self._folders_of(generation, plan, some)
            runs = [
                ScriptCommand(
                    APPLY,
                    piece_keys(generation, name.bucket, of_pieces[name]),
                    (plan.transaction + name.field, name.field),
                )
                for name in some
            ]
            for name, reply in zip(some, self._link.scripts(runs), strict=True):
                if reply is None:
                    self._check_lost(identity, plan)
                    return
                tallies[name.bucket] = tally_of(reply)
        words = [word for bucket, tally in tallies.items() for word in (bucket, *tally)]
        keys = DatasetKeys(identity)
        try:
            self.ask(
                APPLIED,
                [keys.marker, keys.unapplied, keys.tallies],
                generation.name,
                plan.pack(),
                *words,
            )
        except Refused:  # it has been rebuilt or dropped since
            return

    def _folders_of(
        self, generation: Generation, plan: Plan, names: Sequence[PieceName]
    ) -> dict[PieceName, Sequence[FolderId]]:
        """The folders of somebody else's pieces, as far as they wait."""
        commands = []
        for name in names:
            key = generation.key(name.bucket, b"x")
            commands.append(Command(key, ("HGET", key, plan.transaction + name.field)))
        replies = self._link.run(commands)
        return {
            name: folders_of(reply) if isinstance(reply, bytes) else []
            for name, reply in zip(names, replies, strict=True)
        }

    def _check_lost(self, identity: UUID, plan: Plan) -> None:
        """A piece is neither waiting nor applied: another has dropped it, or Redis has lost it."""
        head = self.look(identity)
        if head.generation.name == plan.generation and plan.pack() in head.unapplied:
            raise _lost(head.marker.name)

    # Rubbish

    def _forget(self, identity: UUID, generation: Generation, plan: Plan) -> None:
        """Take an own transaction back that has not been decided."""
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
        assert isinstance(reply, list)
        for transaction in reply:
            try:
                (packed,) = self.ask(ABANDON, [keys.begun], transaction, age_s)
            except (Unknown, Refused):
                continue
            assert isinstance(packed, bytes)
            plan = unpack_plan(packed)
            if plan.generation == generation.name:
                self._forget(identity, generation, plan)


class Unknown(Exception):
    """There is no such dataset (or whatever else was asked for)."""


class Unsettled(Exception):
    """There is always something that has been committed and not applied."""


class Refused(Exception):
    """A head script did nothing, and says why."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


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
    assert isinstance(reply, list)
    pieces, files, total = (int(each) for each in reply)
    return pieces, files, total


def _new_transaction() -> bytes:
    """The name of one that brings chunks."""
    while (name := secrets.token_bytes(TRANSACTION_BYTES)).startswith(FORGETS):
        pass
    return name


def _plan(generation: Generation, transaction: bytes, cuts: Sequence[Cut]) -> Plan:
    return Plan(generation.name, transaction, [(each.chunk, each.places) for each in cuts])


def _head(identity: UUID, fields: object, unapplied: object, tallies: object) -> Head:
    assert isinstance(fields, list)
    assert isinstance(unapplied, list)
    assert isinstance(tallies, list)
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    marker = Marker(
        identity,
        found[b"name"].decode(),
        int(found[b"version"]),
        int(found[b"files"]),
        int(found[b"bytes"]),
        int(found[b"chunks"]),
        int.from_bytes(found[b"digest"], "big"),
        ChunkId(found[b"newest"]),
    )
    told = zip(tallies[::2], tallies[1::2], strict=True)
    pieces = {int(field[1:]): int(count) for field, count in told if field.startswith(b"n")}
    generation = Generation(found[b"generation"], int(found[b"buckets"]))
    return Head(marker, generation, int(found[b"first"]), unapplied, pieces)


def no_such(identity: UUID) -> NoSuchDataset:
    """The error for a dataset that is not known."""
    return NoSuchDataset(f"the metadata store knows no dataset with identity {identity}")


def _lost(name: str) -> MetadataBehind:
    return MetadataBehind(
        f"the metadata store has lost something of dataset {name!r}",
        advice="run `dlcmd recover`: it makes the metadata again from the chunks",
    )


def _refuse_schema(found: int) -> None:
    told = f"the metadata store has schema {found}, and this program knows {SCHEMA}"
    if found > SCHEMA:
        raise NewerVersionError(told, advice="use a newer program")
    raise MetadataError(told, advice="use the program that made it, or an empty Redis and recover")


assert STATE.size == 9  # what the scripts skip
