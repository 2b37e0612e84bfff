"""The keys and values of the Redis metadata store, described once. Pure.

A generation is one building of a dataset's state; a rebuild makes the next one aside. Its folders
are spread over buckets, and the hash tag of a bucket's keys is generation and bucket, so that a
cluster spreads them and a script touches one slot. What belongs to the store and to datasets as
wholes is small and lies in one slot, the head's. Every key starts with `dfs:` (for an ACL,
`~dfs:*`); nothing that a user chose is ever part of a key's pattern: folders are named by hashes.

    dfs:{head}:schema   STRING  `SCHEMA`; a store with another one is refused
    dfs:{head}:store    STRING  UUID of the object store (32 digits) whose chunks all this describes
    dfs:{head}:names    HASH    name of a dataset -> identity (16 bytes)
    dfs:{head}:users    HASH    name of a user -> account, a line of JSON (`accounts.py`); `=` ->
                                token of this state. Not derived: nothing makes it again
    dfs:{head}:dead     HASH    generation -> state, `time`, buckets: to be deleted, or being built
    dfs:{head}:m:ID     HASH    the marker: name, generation, buckets, version, first (the version
                                of chunks whose record says 0), files, bytes, chunks, digest,
                                newest, run (of Redis, which somebody vouched for: `CONFIRM`)
    dfs:{head}:c:ID     HASH    chunk -> `CHUNK` and where its pieces are (`PieceCounts`)
    dfs:{head}:t:ID     HASH    bucket -> "pieces files bytes", as last told by the bucket;
                                n, bucket -> how many pieces are committed: when all are applied
                                and a bucket has fewer, it has lost some
    dfs:{head}:u:ID     LIST    plans that are committed and perhaps not yet applied, in order
    dfs:{head}:b:ID     HASH    transaction -> state, `time`, plan: begun, not committed
    dfs:{head}:h:ID     HASH    token -> until, by Redis's clock: who holds commits back
    dfs:{head}:k:GEN    HASH    the `c:` of a generation that is being built; renamed at its end

    dfs:{GEN.B}:x       HASH    transaction, chunk, piece -> packed piece: waits to be applied; of a
                                transaction that forgets, what goes with that piece
    dfs:{GEN.B}:n       HASH    chunk, piece -> paths: the piece has been applied, and named these
    dfs:{GEN.B}:t       HASH    pieces (that have been applied), files, bytes
    dfs:{GEN.B}:h       HASH    chunk, number of 1,024 places -> bitmap of holes, 128 bytes
    dfs:{GEN.B}:d       HASH    folder -> how many of its entries are tombstones
    dfs:{GEN.B}:f       HASH    folder -> its parent (16 bytes), its name: the bucket's index
    dfs:{GEN.B}:p       HASH    folder, stamp, number, name -> an extent of an incomplete version,
                                and before it the number of the one that came before it
    dfs:{GEN.B}:q       HASH    folder, name -> of each incomplete version: stamp, count of the
                                extents that are there, number of the one that came last
    dfs:{GEN.B}:e:F     HASH    name -> entry: the state, tombstones too
    dfs:{GEN.B}:s:F     SET     names of the folders below; says nothing about which exist

    dfs:{task.T}:m      HASH    rank -> instance (16 bytes), since (u64, us), what is kept of that
                                master; `secret` of the task; `state`: when any of it last changed
    dfs:{task.T}:u      ZSET    rank -> until (us), by Redis's clock; both end with the last

    dfs:{sync.N}:       HASH    written to a node whose log is waited for; N chooses the node

ID is an identity (32 digits), GEN 16 digits, F a folder: 16 bytes, the hash of its parent and name;
T a task: 32 digits, from the hash of its dataset, user and name.
An **entry** is `RECORD` (48 bytes) and the ID of the chunk that holds it (16), and, unless its
stamp is its own place and it has no tail, stamp (20) and tail; nearly all have 64 bytes.

A file takes some 150 bytes besides its name; that is there as it is (`e:`) and, packed by LZ4, in
`n`. All but `users` is made again from the chunks by `rebuild`: from `x` to `s`, and `c`,
`t`, `m`; `u`, `b` and `h` start empty. Tasks are no metadata: whoever is in one says so every few
seconds.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, NewType
from uuid import UUID

from diesel_fs.format.chunk import ENTRIES_MAX
from diesel_fs.format.entries import RECORD, ROOT, ChunkId, Stamp
from diesel_fs.storage.metadata.redis.replies import corrupt_store_error

SCHEMA = 2
HEAD = b"dfs:{head}:"
BUCKETS_MAX = 16_384
SCHEMA_KEY = HEAD + b"schema"
STORE_KEY = HEAD + b"store"
NAMES_KEY = HEAD + b"names"
DEAD_KEY = HEAD + b"dead"
USERS_KEY = HEAD + b"users"
USERS_TOKEN = b"="  # no user has this name

CHUNK = struct.Struct("<QqIQ")
"""Of a chunk: bytes of its object, when it was uploaded (ns), entries, version (or 0)."""
PIECE_COUNT = struct.Struct("<HH")
"""A bucket, and how many pieces of a chunk are in it."""
STATE = struct.Struct("<cQ")
"""A state (`b`: begun, `x`: abandoned) and when it was written, in seconds of Redis's clock."""

FOLDER_BYTES = 16
PLAIN_BYTES = RECORD.itemsize + 16
EXTENDED_BYTES = PLAIN_BYTES + 20

HOLES_PER_FIELD = 1024
TRANSACTION_BYTES = 16
GENERATION_BYTES = 16
REMOVAL_PREFIX = b"forget"
"""How the transactions begin that remove chunks; those that bring some never do."""

FolderId = NewType("FolderId", bytes)
NO_FOLDER = FolderId(bytes(FOLDER_BYTES))
"""The parent of the root."""

PieceCounts = Sequence[tuple[int, int]]
"""Buckets and how many pieces of a chunk are in each."""


def child_folder(parent: FolderId, name: bytes) -> FolderId:
    """The name of a folder in keys."""
    return FolderId(blake2b(parent + name, digest_size=FOLDER_BYTES).digest())


ROOT_FOLDER = child_folder(NO_FOLDER, b"")


def steps(path: bytes) -> list[bytes]:
    """The names on the way to a folder, below the root."""
    return path.split(b"/") if path != ROOT else []


def folder_id(path: bytes) -> FolderId:
    """The name of the folder at a path in keys."""
    folder = ROOT_FOLDER
    for name in steps(path):
        folder = child_folder(folder, name)
    return folder


@dataclass(frozen=True)
class DatasetKeys:
    """A dataset's keys in the head's slot."""

    identity: UUID

    @cached_property
    def _end(self) -> bytes:
        return b":" + self.identity.hex.encode()

    @property
    def head(self) -> bytes:
        return HEAD + b"m" + self._end

    @property
    def chunks(self) -> bytes:
        return HEAD + b"c" + self._end

    @property
    def counts(self) -> bytes:
        return HEAD + b"t" + self._end

    @property
    def pending(self) -> bytes:
        return HEAD + b"u" + self._end

    @property
    def begun(self) -> bytes:
        return HEAD + b"b" + self._end

    @property
    def commit_locks(self) -> bytes:
        return HEAD + b"h" + self._end


@dataclass(frozen=True)
class Generation:
    """One building of a dataset's state: the keys of its buckets."""

    name: bytes
    buckets: int

    @property
    def chunks(self) -> bytes:
        """Its chunks while it is being built."""
        return HEAD + b"k:" + self.name

    @cached_property
    def _prefixes(self) -> Sequence[bytes]:
        return [b"dfs:{%s.%d}:" % (self.name, bucket) for bucket in range(self.buckets)]

    def bucket(self, folder: FolderId) -> int:
        """The bucket of a folder."""
        return int.from_bytes(folder[:4], "big") % self.buckets

    def key(self, bucket: int, what: bytes) -> bytes:
        """One of a bucket's own keys."""
        return self._prefixes[bucket] + what

    def entries(self, folder: FolderId) -> bytes:
        """The entries of a folder."""
        return self._prefixes[self.bucket(folder)] + b"e:" + folder

    def below(self, folder: FolderId) -> bytes:
        """The names of the folders in a folder."""
        return self._prefixes[self.bucket(folder)] + b"s:" + folder

    def of_folders(self, folder: FolderId, what: bytes) -> bytes:
        """One of the own keys of a folder's bucket."""
        return self.key(self.bucket(folder), what)

    def script_keys(self, bucket: int) -> list[bytes]:
        """The own keys that the script which applies a piece gets, in its order."""
        return [self._prefixes[bucket] + what for what in BUCKET_KEYS]


BUCKET_KEYS = (b"x", b"n", b"t", b"h", b"d", b"f", b"p", b"q")


class PieceName(NamedTuple):
    """Which piece of what."""

    chunk: ChunkId
    bucket: int
    number: int

    @property
    def field(self) -> bytes:
        """In `n`."""
        return self.chunk + self.number.to_bytes(2, "big")


@dataclass(frozen=True, slots=True)
class ApplyPlan:
    """What one transaction has to apply: chunks, and where their pieces are."""

    generation: bytes
    transaction: bytes
    chunks: Sequence[tuple[ChunkId, PieceCounts]]

    def pack(self) -> bytes:
        """As it stands in lists and hashes."""
        parts = [self.generation, self.transaction]
        for chunk, places in self.chunks:
            parts += [chunk, len(places).to_bytes(2, "big"), pack_piece_counts(places)]
        return b"".join(parts)

    def pieces(self) -> Iterator[PieceName]:
        """In the order in which they must be applied."""
        for chunk, places in self.chunks:
            yield from piece_names(chunk, places)


def unpack_plan(packed: bytes, buckets: int = BUCKETS_MAX) -> ApplyPlan:
    """The plan that was packed, for a generation of so many buckets. Raises CorruptError."""
    chunks, at = [], GENERATION_BYTES + TRANSACTION_BYTES
    if len(packed) < at:
        raise corrupt_store_error("a plan that is too short")
    while at < len(packed):
        count = int.from_bytes(packed[at + 16 : at + 18], "big")
        end = at + 18 + count * PIECE_COUNT.size
        if end > len(packed):
            raise corrupt_store_error("a plan that is too short")
        places = unpack_piece_counts(packed[at + 18 : end], buckets)
        chunks.append((ChunkId(packed[at : at + 16]), places))
        at = end
    transaction = packed[GENERATION_BYTES : GENERATION_BYTES + TRANSACTION_BYTES]
    return ApplyPlan(packed[:GENERATION_BYTES], transaction, chunks)


def piece_names(chunk: ChunkId, places: PieceCounts) -> Iterator[PieceName]:
    """The pieces of a chunk."""
    for bucket, pieces in places:
        yield from (PieceName(chunk, bucket, number) for number in range(pieces))


def pack_piece_counts(places: PieceCounts) -> bytes:
    """As they stand behind `CHUNK`."""
    return b"".join(PIECE_COUNT.pack(*each) for each in places)


def unpack_piece_counts(packed: bytes, buckets: int = BUCKETS_MAX) -> PieceCounts:
    """The places that were packed, in so many buckets. Raises CorruptError."""
    if len(packed) % PIECE_COUNT.size:
        raise corrupt_store_error("a list of places that is too short")
    places = [(bucket, pieces) for bucket, pieces in PIECE_COUNT.iter_unpack(packed)]
    if any(bucket >= buckets for bucket, _ in places):
        raise corrupt_store_error("a place in a bucket that is not there")
    return places


class ChunkFacts(NamedTuple):
    """What `c` has of a chunk."""

    object_bytes: int
    uploaded_ns: int
    entries: int
    version: int
    piece_counts: PieceCounts


def unpack_chunk(packed: bytes, first: int, buckets: int) -> ChunkFacts:
    """What was packed of a chunk; `first` is the version of one that has none of its own.

    Raises CorruptError.
    """
    if len(packed) < CHUNK.size:
        raise corrupt_store_error("a chunk's record that is too short")
    object_bytes, uploaded_ns, entries, version = CHUNK.unpack_from(packed)
    if entries > ENTRIES_MAX:
        raise corrupt_store_error("a chunk of too many entries")
    places = unpack_piece_counts(packed[CHUNK.size :], buckets)
    return ChunkFacts(object_bytes, uploaded_ns, entries, version or first, places)


def check_entry(entry: bytes) -> bytes:
    """A packed entry, if it can be one. Raises CorruptError."""
    if len(entry) != PLAIN_BYTES and len(entry) < EXTENDED_BYTES:
        raise corrupt_store_error("an entry of another length")
    return entry


def task_keys(digest: bytes) -> tuple[bytes, bytes]:
    """The keys of a task, by what stands for its name: `m` and `u`."""
    prefix = b"dfs:{task.%s}:" % digest[:16].hex().encode()
    return prefix + b"m", prefix + b"u"


def sync_key(number: int) -> bytes:
    """A key of some slot; another number gives another one."""
    return b"dfs:{sync.%d}:" % number


def entry_stamp(entry: bytes) -> Stamp:
    """The stamp of a packed entry."""
    if len(check_entry(entry)) == PLAIN_BYTES:
        return Stamp(entry[48:64] + entry[39:35:-1])  # the place stands little-endian in the record
    return Stamp(entry[PLAIN_BYTES:EXTENDED_BYTES])


def hole_fields(chunk: ChunkId, entries: int) -> Iterable[bytes]:
    """The fields of `h` in which a chunk's holes may be."""
    blocks = -(-entries // HOLES_PER_FIELD)
    return (chunk + block.to_bytes(4, "big") for block in range(blocks))
