"""The head of each dataset in Redis: its marker, where its state is, and how it is asked.

Owned here: what stands in the head's slot, read back as values or refused as damaged; that what was
read since is of the dataset still; that a Redis which is opened is one of ours. Not owned: how the
state changes (`redis_commits.py`, `redis_generations.py`), keys (`redis_keys.py`).

Nothing is remembered. Safe from threads, processes and forked children.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from diesel_fs.entries import ChunkId
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
from diesel_fs.storage.metadata import Marker, Restarted
from diesel_fs.storage.redis_address import parse_redis_url
from diesel_fs.storage.redis_bucket_scripts import Script
from diesel_fs.storage.redis_keys import (
    BUCKETS_MAX,
    SCHEMA,
    SCHEMA_KEY,
    STORE_KEY,
    DatasetKeys,
    Generation,
)
from diesel_fs.storage.redis_link import Command, RedisLink, ScriptCommand, Word
from diesel_fs.storage.redis_replies import damaged, listed, number, octets, packed_dict, whole
from diesel_fs.storage.redis_scripts import DOUBT, LOOK, VOUCH

_HEADS_AT_ONCE = 100
_GENERATION = re.compile(rb"[0-9a-f]{16}")


class Unknown(Exception):
    """There is no such dataset (or whatever else was asked for)."""


class Refused(Exception):
    """A head script did nothing, and says why."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


@dataclass(frozen=True, slots=True)
class Head:
    """What a dataset's head says."""

    marker: Marker
    generation: Generation
    first: int  # the version of chunks whose record says 0
    unapplied: Sequence[bytes]  # plans
    pieces: Mapping[int, int]  # of each bucket, how many are committed


class Heads:
    """The heads of all datasets of a store."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    def ask(self, script: Script, keys: Sequence[bytes], *arguments: Word) -> list[object]:
        """A head script's answer, without its first word; raises what that word means."""
        (reply,) = self._link.scripts([_run_of(script, keys, *arguments)])
        return _meant(reply)

    def check_schema(self) -> None:
        """Raises NewerVersionError or MetadataError where another kind of program was here."""
        (found,) = self._link.run([Command(SCHEMA_KEY, ("GET", SCHEMA_KEY))])
        if found is not None and found != b"%d" % SCHEMA:
            raise _other_schema(octets(found))

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
        """What a dataset's head says. Raises NoSuchDataset, CorruptError."""
        (found,) = self.look_at([identity])
        if isinstance(found, Exception):
            raise found
        return found

    def look_at(self, identities: Sequence[UUID]) -> list[Head | DieselError]:
        """What the heads of some datasets say, or what is wrong with each."""
        found: list[Head | DieselError] = []
        for start in range(0, len(identities), _HEADS_AT_ONCE):
            some, runs = identities[start : start + _HEADS_AT_ONCE], []
            for identity in some:
                runs.append(look_run(identity))
            self._link.renew()
            for identity, reply in zip(some, self._link.scripts(runs), strict=True):
                try:
                    found.append(head_in(identity, reply))
                except Unknown:
                    found.append(no_such(identity))
                except CorruptError as error:
                    found.append(error)
        return found

    def have_lost(self, heads: Sequence[Head]) -> list[bool]:
        """Of each head, whether a bucket has lost what it had told it. Proves nothing where the
        generation does not stand any more.
        """
        commands = []
        for head in heads:
            for bucket in sorted(head.pieces):
                key = head.generation.key(bucket, b"t")
                commands.append(Command(key, ("HGET", key, "pieces")))
        replies = iter(self._link.run(commands))
        told = [[(n, number(next(replies))) for _, n in sorted(h.pieces.items())] for h in heads]
        return [any(there < pieces for pieces, there in each) for each in told]

    def is_of(self, identity: UUID, head: Head) -> bool:
        """Whether what was read since `head` was of the dataset: its generation still stands.

        Raises MetadataBehind where a bucket has lost what it had told the head.
        """
        (lost,), key = self.have_lost([head]), DatasetKeys(identity).marker
        (name,) = self._link.run([Command(key, ("HGET", key, "generation"))])
        if name == head.generation.name and lost:
            raise has_lost(head.marker.name)
        return name == head.generation.name

    def stands(self, identity: UUID, head: Head) -> bool:
        """Whether what was read since `head`, with all that it named applied, was of that state:
        nothing of a commit is applied before the version has moved. Raises as `is_of`.
        """
        (lost,), key = self.have_lost([head]), DatasetKeys(identity).marker
        words = ("HMGET", key, "generation", "version")
        ((name, version),) = map(listed, self._link.run([Command(key, words)]))
        if name == head.generation.name and lost:
            raise has_lost(head.marker.name)
        return name == head.generation.name and number(version) == head.marker.version

    def doubt(self, identity: UUID) -> str:
        """As `MetadataStore.doubt`."""
        (current,) = self._of(identity, DOUBT)
        return octets(current).decode(errors="replace")

    def vouch(self, identity: UUID, run: str) -> None:
        """What this run of Redis knows of a dataset is all there is. Raises Restarted."""
        self._of(identity, VOUCH, run)

    def _of(self, identity: UUID, script: Script, *arguments: Word) -> list[object]:
        try:
            return self.ask(script, [DatasetKeys(identity).marker], *arguments)
        except Unknown:
            raise no_such(identity) from None


def open_link(
    url: str,
    *,
    deadline_s: float,
    store: UUID | None = None,
    environment: Mapping[str, str] | None = None,
) -> RedisLink:
    """The Redis at a URL (`redis_address.py`), once it is known to hold nothing of other programs
    and, from now on, nothing of other repositories: `store` is the object store it belongs to.

    Raises ConfigError, MetadataError where it cannot be reached, is a replica or throws keys away,
    NewerVersionError.
    """
    link = RedisLink.open(parse_redis_url(url, environment), deadline_s)
    heads = Heads(link)
    try:
        link.patiently(heads.check_schema)
        if store is not None:
            link.patiently(lambda: heads.bind(store))
    except BaseException:
        link.close()
        raise
    return link


def look_run(identity: UUID) -> ScriptCommand:
    """What asks for a dataset's head."""
    keys = DatasetKeys(identity)
    return _run_of(LOOK, [keys.marker, keys.unapplied, keys.tallies])


def head_in(identity: UUID, reply: object) -> Head:
    """The head in the reply to `look_run`. Raises Unknown, CorruptError, and what the store is."""
    return _head(identity, *_meant(reply))


def _run_of(script: Script, keys: Sequence[bytes], *arguments: Word) -> ScriptCommand:
    return ScriptCommand(script, (SCHEMA_KEY, *keys), (SCHEMA, *arguments))


def _meant(reply: object) -> list[object]:
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
            raise Unknown
        case b"damaged", *_:
            raise damaged("a marker or counts that nobody of us has written")
        case b"restarted", bytes(run):
            raise Restarted(run.decode(errors="replace"))
    raise Refused(octets(word).decode(errors="replace"))


def _head(identity: UUID, fields: object, unapplied: object, tallies: object) -> Head:
    found = packed_dict(fields)
    buckets, generation = whole(found.get(b"buckets")), found.get(b"generation", b"")
    if not _GENERATION.fullmatch(generation) or not 1 <= buckets <= BUCKETS_MAX:
        raise damaged("a marker without a generation")
    try:
        name = octets(found.get(b"name")).decode()
    except UnicodeDecodeError:
        raise damaged("a dataset whose name is none") from None
    marker = Marker(
        identity,
        name,
        whole(found.get(b"version")),
        whole(found.get(b"files")),
        whole(found.get(b"bytes")),
        whole(found.get(b"chunks")),
        int.from_bytes(octets(found.get(b"digest"), 16), "big"),
        ChunkId(octets(found.get(b"newest"), 16)),
    )
    pieces = {}
    for field, count in packed_dict(tallies).items():
        if field.startswith(b"n"):
            bucket = whole(field[1:])
            if bucket >= buckets:
                raise damaged("a count of a bucket that is not there")
            pieces[bucket] = whole(count)
    plans = [octets(plan) for plan in listed(unapplied)]
    first = whole(found.get(b"first"))
    return Head(marker, Generation(generation, buckets), first, plans, pieces)


def no_such(identity: UUID) -> NoSuchDataset:
    """The error for a dataset that is not known."""
    return NoSuchDataset(f"the metadata store knows no dataset with identity {identity}")


def has_lost(name: str) -> MetadataBehind:
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
