"""The keys and values of the Redis metadata store. Pure.

A **generation** is one build of a dataset's state: a rebuild makes a new one beside the live one.
Its folders are spread over **buckets**. All keys of a bucket have the same part in braces, so they
are in one **slot**, the unit that a Redis Cluster assigns to its nodes. A script must touch one
slot only, so it touches one bucket. The small values that describe the store and its datasets as
wholes are in the **head's** slot. A chunk's entries in one bucket are cut into **pieces**; one
script applies one piece. A **transaction** adds or removes chunks; its **changes** list the pieces.

Every key starts with `dfs:` (for an ACL, `~dfs:*`). No name that a user chose is part of a key:
folders are named by hashes.

    dfs:{head}:schema   STRING  `SCHEMA`; a store with another one is refused
    dfs:{head}:store    STRING  UUID of the object store (32 digits) to which the chunks belong
    dfs:{head}:names    HASH    name of a dataset -> identity (16 bytes)
    dfs:{head}:users    HASH    name of a user -> account, a line of JSON (`storage/accounts`); `=`
                                -> token of this state. Not derived: it cannot be rebuilt
    dfs:{head}:dead     HASH    generation -> state, `time`, buckets: being built, or to be deleted
    dfs:{head}:m:ID     HASH    the head: name, generation, buckets, version, first (the version of
                                chunks from a rebuild, whose records have 0), files, bytes,
                                chunks, digest, newest, run (that of Redis, as last confirmed)
    dfs:{head}:c:ID     HASH    chunk -> `CHUNK` and where its pieces are (`PieceCounts`)
    dfs:{head}:t:ID     HASH    bucket -> "pieces files bytes", the counts that it last reported;
                                n, bucket -> number of committed pieces: a bucket that has fewer
                                when all are applied has lost some
    dfs:{head}:u:ID     LIST    changes that are committed and perhaps not applied yet, in order
    dfs:{head}:b:ID     HASH    transaction -> state, `time`, changes: begun, not committed
    dfs:{head}:h:ID     HASH    commit locks: token -> time at which it expires, by Redis's clock
    dfs:{head}:k:GEN    HASH    the `c:` of a generation that is being built; renamed at its end

    dfs:{GEN.B}:x       HASH    transaction, chunk, piece -> packed piece: waits to be applied; if
                                the transaction removes chunks, it lists the entries to remove
    dfs:{GEN.B}:n       HASH    chunk, piece -> its paths: the piece has been applied
    dfs:{GEN.B}:t       HASH    pieces (that have been applied), files, bytes
    dfs:{GEN.B}:h       HASH    chunk, number of 1,024 places -> bitmap of holes, 128 bytes
    dfs:{GEN.B}:d       HASH    folder -> number of its entries that are tombstones
    dfs:{GEN.B}:f       HASH    folder -> its parent (16 bytes), its name: the bucket's index
    dfs:{GEN.B}:p       HASH    folder, stamp, number, name -> the number of the extent that arrived
                                before this one, then this extent (only of incomplete files)
    dfs:{GEN.B}:q       HASH    folder, name -> for each incomplete file: stamp, count of the
                                extents that have arrived, number of the last of them
    dfs:{GEN.B}:e:F     HASH    name -> entry: the state, tombstones too
    dfs:{GEN.B}:s:F     SET     names of the folders below; a folder that is named may not exist

    dfs:{task.T}:m      HASH    rank -> instance (16 bytes), since (u64, us), that master's report;
                                `secret` of the task; `state`: when any of it last changed
    dfs:{task.T}:u      ZSET    rank -> until (us), by Redis's clock; `m`, `u` expire with the last

    dfs:{sync.N}:       HASH    written before waiting for a node's log; N chooses the node

ID is an identity (32 digits), GEN 16 digits, F a folder: 16 bytes, the hash of its parent and name;
T a task: 32 digits, from the hash of its dataset, user and name. An **entry** is `RECORD` (48
bytes) and the ID of the chunk that holds it (16), and, unless its stamp is its own place and it has
no tail, stamp (20) and tail; nearly all have 64 bytes.

A file takes some 150 bytes besides its name, which is stored twice: in `e:`, and packed by LZ4 in
`n`. `rebuild` makes all keys of a dataset again from the chunks; `u`, `b` and `h` start empty.
`users` cannot be made again. A task's keys need no rebuild: its members report every few seconds.
"""

import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, NewType, Self
from uuid import UUID

from ....format.chunk import ENTRIES_MAX
from ....format.entries import RECORD, ROOT, ChunkId, Stamp
from ..store import corrupt_store_error

SCHEMA = 2
HEAD = b"dfs:{head}:"
BUCKETS_MAX = 16_384
SCHEMA_KEY = HEAD + b"schema"
STORE_KEY = HEAD + b"store"
NAMES_KEY = HEAD + b"names"
DEAD_KEY = HEAD + b"dead"
USERS_KEY = HEAD + b"users"
USERS_TOKEN = b"="  # no user can have this name

CHUNK = struct.Struct("<QqIQ")
"""The fixed part of a chunk's record: object's bytes, upload time (ns), entries, version (or 0)."""
PIECE_COUNT = struct.Struct("<HH")
"""A bucket, and the number of the chunk's pieces in it."""
STATE = struct.Struct("<cQ")
"""`b` (begun) or `x` (abandoned), and since when, in seconds by Redis's clock."""

FOLDER_BYTES = 16
CHUNK_ID_BYTES = 16
PLAIN_BYTES = RECORD.itemsize + CHUNK_ID_BYTES
"""The length of a packed entry without stamp and tail."""
EXTENDED_BYTES = PLAIN_BYTES + 20
"""The length of a packed entry with a stamp; its tail follows."""

HOLES_PER_FIELD = 1024
TRANSACTION_BYTES = 16
GENERATION_BYTES = 16
CHANGED_CHUNK = struct.Struct(">16sH")
"""A changed chunk's ID, and the number of piece counts that follow."""
REMOVAL_PREFIX = b"forget"
"""The name of a transaction that removes chunks begins with it."""

FolderId = NewType("FolderId", bytes)
assert RECORD.fields is not None
PLACE_AT = int(RECORD.fields["place"][1])
EXTENTS_AT = int(RECORD.fields["extents"][1])
"""Where these fields of a packed record begin, each a little-endian u32."""

NO_FOLDER = FolderId(bytes(FOLDER_BYTES))
"""Stands for the root's parent, which does not exist."""

PieceCounts = Sequence[tuple[int, int]]
"""Pairs of a bucket and the number of the chunk's pieces in it."""


def child_folder(parent: FolderId, name: bytes) -> FolderId:
    return FolderId(blake2b(parent + name, digest_size=FOLDER_BYTES).digest())


ROOT_FOLDER = child_folder(NO_FOLDER, b"")


def steps(path: bytes) -> list[bytes]:
    return path.split(b"/") if path != ROOT else []


def folder_id(path: bytes) -> FolderId:
    folder = ROOT_FOLDER
    for name in steps(path):
        folder = child_folder(folder, name)
    return folder


class DatasetKeys:
    def __init__(self, identity: UUID) -> None:
        self.head, self.chunks, self.counts, self.pending, self.begun, self.commit_locks = (
            HEAD + letter + b":" + identity.hex.encode()
            for letter in (b"m", b"c", b"t", b"u", b"b", b"h")
        )
        self.all = (
            self.head, self.chunks, self.counts, self.pending, self.begun, self.commit_locks,
        )  # fmt: skip


@dataclass(frozen=True)
class Generation:
    name: bytes
    buckets: int

    @classmethod
    def new(cls, buckets: int) -> Self:
        return cls(secrets.token_hex(GENERATION_BYTES // 2).encode(), buckets)

    @property
    def chunks(self) -> bytes:
        """The key of the generation's chunks while it is being built."""
        return HEAD + b"k:" + self.name

    @cached_property
    def _prefixes(self) -> Sequence[bytes]:
        return [b"dfs:{%s.%d}:" % (self.name, bucket) for bucket in range(self.buckets)]

    def bucket(self, folder: FolderId) -> int:
        return int.from_bytes(folder[:4], "big") % self.buckets

    def key(self, bucket: int | FolderId, letter: bytes) -> bytes:
        """`letter` is one of `BUCKET_KEYS`; `bucket` a number, or a folder in it."""
        number = bucket if isinstance(bucket, int) else self.bucket(bucket)
        return self._prefixes[number] + letter

    def entries(self, folder: FolderId) -> bytes:
        return self._prefixes[self.bucket(folder)] + b"e:" + folder

    def below(self, folder: FolderId) -> bytes:
        """The key of the names of a folder's subfolders."""
        return self._prefixes[self.bucket(folder)] + b"s:" + folder

    def script_keys(self, bucket: int) -> list[bytes]:
        """In the order in which `APPLY` and `UNAPPLY` expect them."""
        return [self._prefixes[bucket] + letter for letter in BUCKET_KEYS]


BUCKET_KEYS = (b"x", b"n", b"t", b"h", b"d", b"f", b"p", b"q")


class PieceName(NamedTuple):
    """The pieces of a chunk in one bucket are numbered from 0."""

    chunk: ChunkId
    bucket: int
    number: int

    @property
    def field(self) -> bytes:
        """In the hash `n`."""
        return self.chunk + self.number.to_bytes(2, "big")


@dataclass(frozen=True, slots=True)
class Changes:
    """One transaction's chunks, and where their pieces are."""

    generation: bytes
    transaction: bytes
    chunks: Sequence[tuple[ChunkId, PieceCounts]]

    def pack(self) -> bytes:
        parts = [self.generation, self.transaction]
        for chunk, counts in self.chunks:
            parts += [CHANGED_CHUNK.pack(chunk, len(counts)), pack_piece_counts(counts)]
        return b"".join(parts)

    def pieces(self) -> Iterator[PieceName]:
        """In the order in which they must be applied."""
        for chunk, counts in self.chunks:
            yield from piece_names(chunk, counts)


def unpack_changes(packed: bytes, buckets: int) -> Changes:
    """Inverse of `Changes.pack`. Raises CorruptError."""
    chunks, at = [], GENERATION_BYTES + TRANSACTION_BYTES
    generation, transaction = packed[:GENERATION_BYTES], packed[GENERATION_BYTES:at]
    try:
        while at != len(packed):
            chunk, count = CHANGED_CHUNK.unpack_from(packed, at)
            start, at = at + CHANGED_CHUNK.size, at + CHANGED_CHUNK.size + count * PIECE_COUNT.size
            chunks.append((ChunkId(chunk), unpack_piece_counts(packed[start:at], buckets)))
    except struct.error:
        raise corrupt_store_error("changes that are too short") from None
    return Changes(generation, transaction, chunks)


def piece_names(chunk: ChunkId, counts: PieceCounts) -> Iterator[PieceName]:
    for bucket, pieces in counts:
        yield from (PieceName(chunk, bucket, number) for number in range(pieces))


def pack_piece_counts(counts: PieceCounts) -> bytes:
    return b"".join(PIECE_COUNT.pack(*each) for each in counts)


def unpack_piece_counts(packed: bytes, buckets: int) -> PieceCounts:
    """Inverse of `pack_piece_counts`. Raises CorruptError."""
    if len(packed) % PIECE_COUNT.size:
        raise corrupt_store_error("a list of piece counts that is too short")
    counts = [(bucket, pieces) for bucket, pieces in PIECE_COUNT.iter_unpack(packed)]
    if any(bucket >= buckets for bucket, _ in counts):
        raise corrupt_store_error("a piece in a bucket that does not exist")
    return counts


class ChunkFacts(NamedTuple):
    """A value in the hash `c`."""

    object_bytes: int
    uploaded_ns: int
    entries: int
    version: int
    piece_counts: PieceCounts


def unpack_chunk(packed: bytes, first: int, buckets: int) -> ChunkFacts:
    """`first` replaces the version 0 of a chunk from a rebuild. Raises CorruptError."""
    if len(packed) < CHUNK.size:
        raise corrupt_store_error("a chunk's record that is too short")
    object_bytes, uploaded_ns, entries, version = CHUNK.unpack_from(packed)
    if entries > ENTRIES_MAX:
        raise corrupt_store_error("a chunk of too many entries")
    counts = unpack_piece_counts(packed[CHUNK.size :], buckets)
    return ChunkFacts(object_bytes, uploaded_ns, entries, version or first, counts)


def check_entry(entry: bytes) -> bytes:
    if len(entry) != PLAIN_BYTES and len(entry) < EXTENDED_BYTES:
        raise corrupt_store_error("an entry of a wrong length")
    return entry


def task_keys(digest: bytes) -> tuple[bytes, bytes]:
    """The keys `m` and `u` of a task (`peers/members/redis_registry.py`)."""
    prefix = b"dfs:{task.%s}:" % digest[:16].hex().encode()
    return prefix + b"m", prefix + b"u"


def sync_key(number: int) -> bytes:
    """The number chooses the slot and so the node."""
    return b"dfs:{sync.%d}:" % number


def entry_place(entry: bytes) -> int:
    return int.from_bytes(entry[PLACE_AT : PLACE_AT + 4], "little")


def entry_stamp(entry: bytes) -> Stamp:
    if len(check_entry(entry)) == PLAIN_BYTES:
        return Stamp(entry[RECORD.itemsize : PLAIN_BYTES] + entry_place(entry).to_bytes(4, "big"))
    return Stamp(entry[PLAIN_BYTES:EXTENDED_BYTES])


def hole_fields(chunk: ChunkId, entries: int) -> Iterable[bytes]:
    """Fields of the hash `h` in which a chunk can have holes."""
    return (chunk + i.to_bytes(4, "big") for i in range(-(-entries // HOLES_PER_FIELD)))
