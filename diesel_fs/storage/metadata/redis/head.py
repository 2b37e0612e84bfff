"""The head of each dataset in Redis: its marker, where its state is, and how it is asked.

Owned here: what stands in the head's slot, read back as values or refused as damaged; that what was
read since is of the dataset still; that a Redis which is opened is one of ours. Not owned: how the
state changes (`transactions.py`, `shadow_state.py`), keys (`keys.py`).

Nothing is remembered. Safe from threads, processes and forked children.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from diesel_fs.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    DieselError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSuchDataset,
)
from diesel_fs.format.entries import ChunkId
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.metadata.redis.bucket_scripts import Script
from diesel_fs.storage.metadata.redis.head_scripts import CONFIRM, NEEDS_REPAIR, READ_HEAD
from diesel_fs.storage.metadata.redis.keys import (
    BUCKETS_MAX,
    SCHEMA,
    SCHEMA_KEY,
    STORE_KEY,
    DatasetKeys,
    Generation,
)
from diesel_fs.storage.metadata.redis.link import Command, RedisLink, ScriptCommand, Word
from diesel_fs.storage.metadata.redis.replies import (
    as_count,
    corrupt_store_error,
    listed,
    number,
    octets,
    packed_dict,
)
from diesel_fs.storage.metadata.store import DatasetHead, StoreRestarted

_HEADS_AT_ONCE = 100
_GENERATION = re.compile(rb"[0-9a-f]{16}")


class UnknownDataset(Exception):
    """There is no such dataset (or whatever else was asked for)."""


class ScriptRejected(Exception):
    """A head script did nothing, and says why."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


@dataclass(frozen=True, slots=True)
class RedisHead:
    """What a dataset's head says."""

    dataset: DatasetHead
    generation: Generation
    first: int  # the version of chunks whose record says 0
    pending: Sequence[bytes]  # plans
    pieces_by_bucket: Mapping[int, int]  # of each bucket, how many are committed


class HeadReader:
    """The heads of all datasets of a store."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    def run_head_script(
        self, script: Script, keys: Sequence[bytes], *arguments: Word
    ) -> list[object]:
        """A head script's answer, without its first word; raises what that word means."""
        (reply,) = self._link.run_scripts([_run_of(script, keys, *arguments)])
        return _check_reply(reply)

    def check_schema(self) -> None:
        """Raises NewerVersionError or MetadataError where another kind of program was here."""
        (found,) = self._link.run([Command(SCHEMA_KEY, ("GET", SCHEMA_KEY))])
        if found is not None and found != b"%d" % SCHEMA:
            raise _other_schema(octets(found))

    def bind_object_store(self, store: UUID) -> None:
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

    def read_head(self, identity: UUID) -> RedisHead:
        """What a dataset's head says. Raises NoSuchDataset, CorruptError."""
        (found,) = self.read_heads([identity])
        if isinstance(found, Exception):
            raise found
        return found

    def read_heads(self, identities: Sequence[UUID]) -> list[RedisHead | DieselError]:
        """What the heads of some datasets say, or what is wrong with each."""
        found: list[RedisHead | DieselError] = []
        for start in range(0, len(identities), _HEADS_AT_ONCE):
            some, runs = identities[start : start + _HEADS_AT_ONCE], []
            for identity in some:
                runs.append(read_head_command(identity))
            self._link.extend_deadline()
            for identity, reply in zip(some, self._link.run_scripts(runs), strict=True):
                try:
                    found.append(parse_head(identity, reply))
                except UnknownDataset:
                    found.append(no_such_dataset_error(identity))
                except CorruptError as error:
                    found.append(error)
        return found

    def have_lost_pieces(self, heads: Sequence[RedisHead]) -> list[bool]:
        """Of each head, whether a bucket has lost what it had told it. Proves nothing where the
        generation does not stand any more.
        """
        commands = []
        for head in heads:
            for bucket in sorted(head.pieces_by_bucket):
                key = head.generation.key(bucket, b"t")
                commands.append(Command(key, ("HGET", key, "pieces")))
        replies = iter(self._link.run(commands))
        told = [
            [(n, number(next(replies))) for _, n in sorted(h.pieces_by_bucket.items())]
            for h in heads
        ]
        return [any(there < pieces for pieces, there in each) for each in told]

    def is_live_generation(self, identity: UUID, head: RedisHead) -> bool:
        """Whether what was read since `head` was of the dataset: its generation still stands.

        Raises MetadataBehind where a bucket has lost what it had told the head.
        """
        (lost,), key = self.have_lost_pieces([head]), DatasetKeys(identity).head
        (name,) = self._link.run([Command(key, ("HGET", key, "generation"))])
        if name == head.generation.name and lost:
            raise lost_data_error(head.dataset.name)
        return name == head.generation.name

    def is_unchanged(self, identity: UUID, head: RedisHead) -> bool:
        """Whether what was read since `head`, with all that it named applied, was of that state:
        nothing of a commit is applied before the version has moved. Raises as `is_live_generation`.
        """
        (lost,), key = self.have_lost_pieces([head]), DatasetKeys(identity).head
        words = ("HMGET", key, "generation", "version")
        ((name, version),) = map(listed, self._link.run([Command(key, words)]))
        if name == head.generation.name and lost:
            raise lost_data_error(head.dataset.name)
        return name == head.generation.name and number(version) == head.dataset.version

    def needs_repair(self, identity: UUID) -> str:
        """As `MetadataStore.needs_repair`."""
        (current,) = self._of(identity, NEEDS_REPAIR)
        return octets(current).decode(errors="replace")

    def confirm(self, identity: UUID, run: str) -> None:
        """What this run of Redis knows of a dataset is all there is. Raises Restarted."""
        self._of(identity, CONFIRM, run)

    def _of(self, identity: UUID, script: Script, *arguments: Word) -> list[object]:
        try:
            return self.run_head_script(script, [DatasetKeys(identity).head], *arguments)
        except UnknownDataset:
            raise no_such_dataset_error(identity) from None


def open_link(
    url: str,
    *,
    deadline_s: float,
    store: UUID | None = None,
    environment: Mapping[str, str] | None = None,
) -> RedisLink:
    """The Redis at a URL (`address.py`), once it is known to hold nothing of other programs
    and, from now on, nothing of other repositories: `store` is the object store it belongs to.

    Raises ConfigError, MetadataError where it cannot be reached, is a replica or throws keys away,
    NewerVersionError.
    """
    link = RedisLink.open(parse_redis_url(url, environment), deadline_s)
    heads = HeadReader(link)
    try:
        link.with_retries(heads.check_schema)
        if store is not None:
            link.with_retries(lambda: heads.bind_object_store(store))
    except BaseException:
        link.close()
        raise
    return link


def read_head_command(identity: UUID) -> ScriptCommand:
    """What asks for a dataset's head."""
    keys = DatasetKeys(identity)
    return _run_of(READ_HEAD, [keys.head, keys.pending, keys.counts])


def parse_head(identity: UUID, reply: object) -> RedisHead:
    """The head in the reply to `read_head_command`. Raises Unknown, CorruptError, and what the
    store is."""
    return _head(identity, *_check_reply(reply))


def _run_of(script: Script, keys: Sequence[bytes], *arguments: Word) -> ScriptCommand:
    return ScriptCommand(script, (SCHEMA_KEY, *keys), (SCHEMA, *arguments))


def _check_reply(reply: object) -> list[object]:
    """What comes after the first word of an answer; raises what that word means."""
    word, *rest = listed(reply) or [b""]
    match word, *rest:
        case b"ok", *_:
            return rest
        case b"schema", found:
            raise _other_schema(octets(found))
        case b"conflict", bytes(name), bytes(identity):
            shown = UUID(bytes=identity) if len(identity) == 16 else "another"
            found = f"dataset {name.decode(errors='replace')!r} has the identity {shown}"
            raise ConflictError(f"{found}: a name and an identity belong to each other alone")
        case b"none", *_:
            raise UnknownDataset
        case b"damaged", *_:
            raise corrupt_store_error("a marker or counts that nobody of us has written")
        case b"restarted", bytes(run):
            raise StoreRestarted(run.decode(errors="replace"))
    raise ScriptRejected(octets(word).decode(errors="replace"))


def _head(identity: UUID, fields: object, unapplied: object, tallies: object) -> RedisHead:
    found = packed_dict(fields)
    buckets, generation = as_count(found.get(b"buckets")), found.get(b"generation", b"")
    if not _GENERATION.fullmatch(generation) or not 1 <= buckets <= BUCKETS_MAX:
        raise corrupt_store_error("a marker without a generation")
    try:
        name = octets(found.get(b"name")).decode()
    except UnicodeDecodeError:
        raise corrupt_store_error("a dataset whose name is none") from None
    marker = DatasetHead(
        identity,
        name,
        as_count(found.get(b"version")),
        as_count(found.get(b"files")),
        as_count(found.get(b"bytes")),
        as_count(found.get(b"chunks")),
        int.from_bytes(octets(found.get(b"digest"), 16), "big"),
        ChunkId(octets(found.get(b"newest"), 16)),
    )
    pieces = {}
    for field, count in packed_dict(tallies).items():
        if field.startswith(b"n"):
            bucket = as_count(field[1:])
            if bucket >= buckets:
                raise corrupt_store_error("a count of a bucket that is not there")
            pieces[bucket] = as_count(count)
    plans = [octets(plan) for plan in listed(unapplied)]
    first = as_count(found.get(b"first"))
    return RedisHead(marker, Generation(generation, buckets), first, plans, pieces)


def no_such_dataset_error(identity: UUID) -> NoSuchDataset:
    """The error for a dataset that is not known."""
    return NoSuchDataset(f"the metadata store knows no dataset with identity {identity}")


def lost_data_error(name: str) -> MetadataBehind:
    """The error for a dataset of which something has gone."""
    return MetadataBehind(
        f"the metadata store has lost something of dataset {name!r}",
        advice="run `dlcmd recover`: it makes the metadata again from the chunks",
    )


def _other_schema(packed: bytes) -> DieselError:
    shown = packed.decode(errors="replace")[:20]
    told = f"the metadata store has schema {shown}, and this program knows {SCHEMA}"
    if packed.isdigit() and int(shown) > SCHEMA:
        return NewerVersionError(told, advice="use a newer program")
    return MetadataError(told, advice="use the program that made it, or an empty Redis and recover")
