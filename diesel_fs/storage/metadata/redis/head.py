"""Reads the head of a dataset in Redis: its version, counts and generation (`keys.py`). Nothing is
cached.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from ....errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    DieselError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
)
from ....format.entries import ChunkId
from ..store import DatasetHead, StoreRestarted, corrupt_store_error, no_such_dataset_error
from .address import parse_redis_url
from .bucket_scripts import LoadedScript
from .head_scripts import CONFIRM, NEEDS_REPAIR, READ_HEAD
from .keys import BUCKETS_MAX, SCHEMA, SCHEMA_KEY, STORE_KEY, DatasetKeys, Generation
from .link import RedisLink, ScriptCommand, Word, command, in_portions
from .replies import as_count, listed, number, octets, packed_dict

_HEADS_AT_ONCE = 100
_GENERATION = re.compile(rb"[0-9a-f]{16}")


class UnknownDataset(Exception):
    """A head script's key does not exist: usually, the dataset was dropped."""


class ScriptRejected(Exception):
    """A head script did nothing, because something has changed. `word` is the reason: "moved"
    (another generation is live, or another writer was faster), "held" (commits are locked), "young"
    (the transaction or generation to be removed is not old enough), "lost" (Redis has lost
    data)."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


@dataclass(frozen=True, slots=True)
class RedisHead:
    dataset: DatasetHead
    generation: Generation
    first: int  # the version of chunks from a rebuild: their records have 0
    pending: Sequence[bytes]  # packed changes, committed and perhaps not applied yet
    pieces_by_bucket: Mapping[int, int]  # the number of committed pieces in each bucket


class HeadReader:
    def __init__(self, link: RedisLink) -> None:
        self.link = link

    def run_head_script(
        self, script: LoadedScript, keys: Sequence[bytes], *arguments: Word
    ) -> list[object]:
        """Run a script on the head's slot. Returns the reply without its first word. Raises
        UnknownDataset, ScriptRejected, DieselError."""
        (reply,) = self.link.run_scripts([_head_script(script, keys, *arguments)])
        return _check_reply(reply)

    def check_schema(self) -> None:
        found = self.link.execute("GET", SCHEMA_KEY)
        if found not in (None, b"%d" % SCHEMA):
            raise _other_schema(octets(found))

    def bind_object_store(self, store: UUID) -> None:
        """Bind this Redis to one repository's object store, for ever. Raises ConfigError if it is
        bound to another: datasets of two repositories would be mixed."""
        found = self.link.execute("GET", STORE_KEY)
        if found is None:  # with a full memory, Redis refuses even a SET that changes nothing
            bound = command("SET", STORE_KEY, store.hex, "NX")
            _, found = self.link.run([bound, command("GET", STORE_KEY)])
        if isinstance(found, bytes) and found != store.hex.encode():
            raise ConfigError(
                f"the Redis {self.link.address} has the metadata of another object store"
                f" ({found.decode(errors='replace')[:32]}, not {store.hex})",
                advice="give each repository a database of its own: redis://host:port/1",
            )

    def read_head(self, identity: UUID) -> RedisHead:
        (found,) = self.read_heads([identity])
        if isinstance(found, Exception):
            raise found
        return found

    def read_heads(self, identities: Sequence[UUID]) -> list[RedisHead | DieselError]:
        found: list[RedisHead | DieselError] = []
        for some in in_portions(identities, _HEADS_AT_ONCE):
            runs = [*map(read_head_command, some)]
            self.link.extend_deadline()
            for identity, reply in zip(some, self.link.run_scripts(runs), strict=True):
                try:
                    found.append(parse_head(identity, reply))
                except UnknownDataset:
                    found.append(no_such_dataset_error(identity))
                except CorruptError as error:
                    found.append(error)
        return found

    def have_lost_pieces(self, heads: Sequence[RedisHead]) -> list[bool]:
        """For each head, whether some bucket has fewer pieces than were committed. Valid only if
        the head's generation is still the dataset's, and all pending changes were applied."""
        buckets = [
            (i, head.generation.key(bucket, b"t"), committed)
            for i, head in enumerate(heads)
            for bucket, committed in head.pieces_by_bucket.items()
        ]
        replies = self.link.run([command("HGET", key, "pieces") for _, key, _ in buckets])
        lost = {
            i
            for (i, _, committed), applied in zip(buckets, replies, strict=True)
            if number(applied) < committed
        }
        return [i in lost for i in range(len(heads))]

    def is_unchanged(self, head: RedisHead, *, or_newer: bool = False) -> bool:
        """Whether all that was read since `head` belongs to its version: it must still be current,
        since a commit changes it before its pieces are applied. With `or_newer`, only the
        generation must be current. The caller has applied pending changes. Raises MetadataBehind if
        a bucket has lost pieces."""
        (lost,), key = self.have_lost_pieces([head]), DatasetKeys(head.dataset.identity).head
        name, version = listed(self.link.execute("HMGET", key, "generation", "version"))
        if name != head.generation.name:
            return False
        if lost:
            raise lost_data_error(head.dataset.name)
        return or_newer or number(version) == head.dataset.version

    def needs_repair(self, identity: UUID) -> str:
        """Redis's run ID, if it was not confirmed; else ""."""
        (current,) = self._run_on_head(identity, NEEDS_REPAIR)
        return octets(current).decode(errors="replace")

    def confirm(self, identity: UUID, run: str) -> None:
        """Record that this run of Redis has lost nothing of a dataset. Raises StoreRestarted if
        another run has begun."""
        self._run_on_head(identity, CONFIRM, run)

    def _run_on_head(self, identity: UUID, script: LoadedScript, *arguments: Word) -> list[object]:
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
    """Connect to the Redis at a URL (`address.py`), and bind it to the object store `store`. Raises
    ConfigError for a bad URL or a Redis of another repository; MetadataError if Redis cannot be
    reached, is a replica or may evict keys; NewerVersionError."""
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
    keys = DatasetKeys(identity)
    return _head_script(READ_HEAD, [keys.head, keys.pending, keys.counts])


def parse_head(identity: UUID, reply: object) -> RedisHead:
    """The reply is one to `read_head_command`. Raises UnknownDataset, CorruptError, and errors of
    the store's schema."""
    return _unpack_head(identity, *_check_reply(reply))


def _head_script(script: LoadedScript, keys: Sequence[bytes], *arguments: Word) -> ScriptCommand:
    return ScriptCommand(script, (SCHEMA_KEY, *keys), (SCHEMA, *arguments))


def _check_reply(reply: object) -> list[object]:
    """The reply without its first word, which is "ok" or names the error to raise."""
    word, *rest = listed(reply) or [b""]
    match word, *rest:
        case b"ok", *_:
            return rest
        case b"schema", found:
            raise _other_schema(octets(found))
        case b"conflict", bytes(name), bytes(identity):
            shown = UUID(bytes=identity) if len(identity) == 16 else "another"
            found = f"dataset {name.decode(errors='replace')!r} has the identity {shown}"
            raise ConflictError(f"{found}: each name belongs to one identity")
        case b"none", *_:
            raise UnknownDataset
        case b"damaged", *_:
            raise corrupt_store_error("a head or counts that DIESEL-FS did not write")
        case b"restarted", bytes(run):
            raise StoreRestarted(run.decode(errors="replace"))
    raise ScriptRejected(octets(word).decode(errors="replace"))


def _unpack_head(identity: UUID, reply: object, pending: object, counts: object) -> RedisHead:
    """The arguments are the values of the keys `m:` (`reply`), `u:` and `t:`."""
    fields = packed_dict(reply)
    buckets, generation = as_count(fields.get(b"buckets")), fields.get(b"generation", b"")
    if not _GENERATION.fullmatch(generation) or not 1 <= buckets <= BUCKETS_MAX:
        raise corrupt_store_error("a head without a generation")
    try:
        name = octets(fields.get(b"name")).decode()
    except UnicodeDecodeError:
        raise corrupt_store_error("a dataset whose name is not UTF-8") from None
    version, files, total, chunks = (
        as_count(fields.get(field)) for field in (b"version", b"files", b"bytes", b"chunks")
    )
    digest = int.from_bytes(octets(fields.get(b"digest"), 16), "big")
    newest = ChunkId(octets(fields.get(b"newest"), 16))
    dataset = DatasetHead(identity, name, version, files, total, chunks, digest, newest)
    pieces = {}
    for field, count in packed_dict(counts).items():
        if field.startswith(b"n"):
            bucket = as_count(field[1:])
            if bucket >= buckets:
                raise corrupt_store_error("a count of a bucket that does not exist")
            pieces[bucket] = as_count(count)
    changes = [octets(each) for each in listed(pending)]
    first = as_count(fields.get(b"first"))
    return RedisHead(dataset, Generation(generation, buckets), first, changes, pieces)


def lost_data_error(name: str) -> MetadataBehind:
    return MetadataBehind(
        f"the metadata store has lost data of dataset {name!r}",
        advice="run `dlcmd recover`: it makes the metadata again from the chunks",
    )


def _other_schema(packed: bytes) -> DieselError:
    shown = packed.decode(errors="replace")[:20]
    message = f"the metadata store has schema {shown}, and this program knows {SCHEMA}"
    if packed.isdigit() and int(shown) > SCHEMA:
        return NewerVersionError(message, advice="use a newer diesel-fs")
    return MetadataError(
        message, advice="use the version that wrote it, or an empty Redis and `dlcmd recover`"
    )
