"""The shared metadata store: a Redis, its replicas under sentinels, or a Redis Cluster.

Owned here: datasets and holds, and that whoever reads gets one state. Not owned: keys
(`redis_keys.py`), how chunks get in (`redis_commits.py`) and rebuilds (`redis_generations.py`),
the fold itself (`redis_scripts.py`), reading entries (`redis_rows.py`), connections and errors
(`redis_link.py`).

Every question starts with the head of its dataset, in whose name what is committed and not yet
applied is applied first, and ends with asking whether the generation that was read still stands; so
"no such file" is never said out of ignorance. An export starts again where the version has moved,
and holds commits back after some tries.

What survives a power cut: with `appendonly yes` on Redis 7.2 or later, everything that was
committed before `durable` returned. Older ones cannot say when their log is on disk (with
`appendfsync everysec` within some two seconds, with `always` at once), and one without a log
forgets what came after its last snapshot. The chunks keep it all: the marker then differs from
their listing, and what is missing is folded in.

Safe from threads, processes and forked children.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt

from diesel_fs.chunk_id import chunk_id_text
from diesel_fs.entries import ChunkId, ChunkInfo, Kind, Rows, Stamp, split
from diesel_fs.errors import (
    BusyError,
    DieselError,
    MetadataBehind,
    NoSuchDataset,
    NotFoundError,
    UsageError,
)
from diesel_fs.storage.metadata import (
    HOLD_S_MAX,
    Batch,
    Changes,
    ChunkRecord,
    Hold,
    Marker,
    MetadataStore,
    StampedRows,
)
from diesel_fs.storage.redis_address import parse_redis_url
from diesel_fs.storage.redis_commits import (
    Commits,
    Head,
    Leaving,
    Refused,
    Unknown,
    Unsettled,
    no_such,
)
from diesel_fs.storage.redis_forgetting import Candidate, Lost, in_portions, leaving
from diesel_fs.storage.redis_generations import Building, clean, new_generation
from diesel_fs.storage.redis_keys import (
    CHUNK,
    DEAD_KEY,
    HEAD,
    HOLES_PER_FIELD,
    NAMES_KEY,
    DatasetKeys,
    FolderId,
    Places,
    entry_stamp,
    folder_id,
    hole_fields,
    piece_names,
    unpack_places,
)
from diesel_fs.storage.redis_link import DEADLINE_S, Command, RedisLink, log
from diesel_fs.storage.redis_pieces import unpack_paths
from diesel_fs.storage.redis_rows import (
    Found,
    GenerationReader,
    chunks_of,
    columns,
    kind_of,
    packed_dict,
)
from diesel_fs.storage.redis_scripts import CREATE, DROP, HOLD

_CLUSTER_BUCKETS = 64
"""Enough to spread over the nodes of a cluster, few enough to ask them all at once."""

_HOLD_POLL_S = 0.02
_TRIES_WITHOUT_HOLD = 3
_TRIES_MAX = 20
_PATHS_AT_ONCE = 10_000
_FIELDS_AT_ONCE = 500

T = TypeVar("T")


class _Chunk(NamedTuple):
    """A chunk's record."""

    object_bytes: int
    uploaded_ns: int
    entries: int
    version: int
    places: Places


class _Moved(Exception):
    """What was being read is not there any more."""


class RedisMetadata(MetadataStore):
    """A metadata store in Redis."""

    def __init__(
        self,
        link: RedisLink,
        clock_ns: Callable[[], int] = time.time_ns,
        *,
        buckets: int = 0,
    ) -> None:
        self._link = link
        self._clock_ns = clock_ns
        self._buckets = buckets or (_CLUSTER_BUCKETS if link.is_cluster else 1)
        self._commits = Commits(link, clock_ns)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        deadline_s: float = DEADLINE_S,
        clock_ns: Callable[[], int] = time.time_ns,
        environment: Mapping[str, str] | None = None,
        buckets: int = 0,
        store: UUID | None = None,
    ) -> Self:
        """Open the store at a URL (`redis_address.py`); an empty Redis is an empty store.

        `buckets` is over how many slots new datasets spread; `store` is the object store that it
        must belong to. Raises ConfigError, MetadataError where it cannot be reached, is a replica
        or throws keys away, NewerVersionError.
        """
        link = RedisLink.open(parse_redis_url(url, environment), deadline_s)
        opened = cls(link, clock_ns, buckets=buckets)
        try:
            link.patiently(opened._commits.check_schema)
            if store is not None:
                link.patiently(lambda: opened._commits.bind(store))
        except BaseException:
            link.close()
            raise
        return opened

    def __repr__(self) -> str:
        return f"RedisMetadata({self._link.address})"

    def close(self) -> None:
        self._link.close()

    # Datasets

    def markers(self) -> list[Marker]:
        return sorted(self._link.patiently(self._markers), key=lambda marker: marker.name)

    def _markers(self) -> list[Marker]:
        found = []
        for identity in self._names().values():
            try:
                found.append(self._settled(identity).marker)
            except NoSuchDataset:
                continue
            except MetadataBehind:  # one dataset's fault hides no other; its own calls say so
                found.append(self._commits.look(identity).marker)
        return found

    def marker(self, name: str) -> Marker:
        return self._link.patiently(lambda: self._marker(name))

    def _marker(self, name: str) -> Marker:
        (reply,) = self._link.run([Command(NAMES_KEY, ("HGET", NAMES_KEY, name))])
        if not isinstance(reply, bytes):
            raise NoSuchDataset(f"the metadata store knows no dataset {name!r}")
        return self._settled(UUID(bytes=reply)).marker

    def _names(self) -> dict[bytes, UUID]:
        (reply,) = self._link.run([Command(NAMES_KEY, ("HGETALL", NAMES_KEY))])
        return {name: UUID(bytes=identity) for name, identity in packed_dict(reply).items()}

    def _settled(self, identity: UUID) -> Head:
        """The head after all that is committed has been applied; no bucket has lost anything."""
        with _Holding(self, identity) as holding:
            while True:
                try:
                    head = self._commits.settled(identity)
                except Unsettled:
                    holding.begin()
                    continue
                if self._commits.check(identity, head):
                    return head

    def create(self, name: str, identity: UUID) -> Marker:
        self._link.patiently(lambda: self._create(name, identity))
        self._clean()
        return self._link.patiently(lambda: self._settled(identity)).marker

    def _create(self, name: str, identity: UUID) -> None:
        generation = new_generation(self._buckets)
        keys = [NAMES_KEY, DatasetKeys(identity).marker]
        words = name, identity.bytes, generation.name, generation.buckets
        self._commits.ask(CREATE, keys, *words)

    def drop(self, identity: UUID) -> None:
        keys = DatasetKeys(identity)
        own = [keys.marker, keys.chunks, keys.tallies, keys.unapplied, keys.begun, keys.holds]
        self._link.patiently(lambda: self._commits.ask(DROP, [NAMES_KEY, DEAD_KEY, *own]))
        self._clean()

    def rebuild(self, name: str, identity: UUID, batches: Iterable[Batch]) -> int:
        generation = new_generation(self._buckets)
        building = Building(self._link, self._commits, self.hold, generation, identity)
        version = building.run(name, batches, lambda: self._clock_ns() // 1000)
        self._clean()
        return version

    def _clean(self) -> None:
        try:
            self._link.patiently(lambda: clean(self._link, self._commits))
        except DieselError as error:
            log.info("what dropped datasets have left stays for now: %s", error)

    # Commits

    def commit(self, identity: UUID, *batches: Batch) -> int:
        by_chunk = {batch.check().chunk.id: batch for batch in batches}
        end = time.monotonic() + self._link.deadline_s
        return self._link.patiently(lambda: self._commits.commit(identity, by_chunk, end))

    def forget(
        self, identity: UUID, chunks: Iterable[ChunkId], *, tombstones: bool = False
    ) -> frozenset[ChunkId]:
        wanted = sorted(set(chunks))
        end = time.monotonic() + self._link.deadline_s
        for some in in_portions(wanted):
            attempt = partial(self._forget, identity, some, end, tombstones=tombstones)
            while not self._link.patiently(attempt):
                pass
        return frozenset(wanted).difference(record.id for record in self.chunks(identity))

    def _forget(
        self, identity: UUID, chunks: Sequence[ChunkId], end: float, *, tombstones: bool
    ) -> bool:
        """One try; whether it was not in vain."""

        def read(head: Head, reader: GenerationReader) -> tuple[Head, dict[ChunkId, Leaving]]:
            key = DatasetKeys(identity).chunks
            (packed,) = self._link.run([Command(key, ("HMGET", key, *chunks))])
            assert isinstance(packed, list)
            candidates = {}
            for chunk, each in zip(chunks, packed, strict=True):
                if each is not None and chunk != head.marker.newest:
                    record = _chunk_record(each, head.first)
                    holes = frozenset(self._holes(head, chunk, record).tolist())
                    candidates[chunk] = Candidate(record.entries, record.places, holes)
            try:
                return head, leaving(
                    self._link, head.generation, reader, candidates, tombstones=tombstones
                )
            except Lost:
                raise _Moved from None

        head, going = self._read_once(identity, read, one_state=False)
        if not going:
            return True
        try:
            self._commits.forget(identity, head.generation, going)
        except Unknown:
            raise no_such(identity) from None
        except Refused as refused:
            if time.monotonic() > end:
                raise BusyError(f"dataset {identity} does not hold still") from None
            if refused.word == "held":
                time.sleep(_HOLD_POLL_S)
            return False
        return True

    def durable(self) -> None:
        self._link.patiently(lambda: self._link.wait_durable(HEAD + b"sync"))

    def hold(self, identity: UUID, seconds: float) -> Hold:
        if not 0 < seconds <= HOLD_S_MAX:
            raise UsageError(f"commits cannot be held back for {seconds:g} s")
        token, keys = secrets.token_bytes(16), DatasetKeys(identity)
        now_s = self._clock_ns() / 1e9
        words = token, repr(now_s + seconds), repr(now_s), HOLD_S_MAX
        try:
            self._link.patiently(lambda: self._commits.ask(HOLD, [keys.marker, keys.holds], *words))
        except Unknown:
            raise no_such(identity) from None

        def release() -> None:
            gone = Command(keys.holds, ("HDEL", keys.holds, token))
            self._link.patiently(lambda: self._link.run([gone]))

        return Hold(release)

    # Reading

    def lookup(
        self, identity: UUID, paths: Iterable[bytes], *, tombstones: bool = False
    ) -> StampedRows:
        wanted = [*dict.fromkeys(paths)]

        def read(_: Head, reader: GenerationReader) -> list[bytes | None]:
            found = list[bytes | None]()
            for start in range(0, len(wanted), _PATHS_AT_ONCE):
                found += _find(reader, wanted[start : start + _PATHS_AT_ONCE])
            return found

        entries = self._read(identity, read)
        chosen = [
            (path, entry)
            for path, entry in zip(wanted, entries, strict=True)
            if entry is not None and (tombstones or kind_of(entry) != Kind.TOMBSTONE)
        ]
        rows = columns((split(path)[0], [split(path)[1]], [entry]) for path, entry in chosen)
        stamps: list[Stamp] = [entry_stamp(entry) for _, entry in chosen]
        return StampedRows(
            folders=rows.folders,
            folder=rows.folder,
            names=rows.names,
            records=rows.records,
            chunk=rows.chunk,
            chunks=rows.chunks,
            tails=rows.tails,
            stamps=stamps,
        )

    def children(self, identity: UUID, folder: bytes, *, tombstones: bool = False) -> Rows:
        def read(_: Head, reader: GenerationReader) -> dict[bytes, bytes]:
            return reader.children(folder_id(folder))

        rows = self._read(identity, read)
        names = sorted(
            name for name, entry in rows.items() if tombstones or kind_of(entry) != Kind.TOMBSTONE
        )
        return columns([(folder, names, [rows[name] for name in names])] if names else [])

    def changes(self, identity: UUID, since: int) -> Changes:
        def read(head: Head, reader: GenerationReader) -> Changes:
            chunks = self._chunk_table(head)
            if since > 0:
                found = list(self._newer(head, reader, chunks, since))
            else:
                found = list(reader.everything())
            infos = [ChunkInfo(chunk, chunks[chunk].object_bytes) for chunk in sorted(chunks)]
            return Changes(head.marker, columns(found, list(chunks)), infos)

        return self._read(identity, read, one_state=True)

    def _newer(
        self,
        head: Head,
        reader: GenerationReader,
        chunks: Mapping[ChunkId, _Chunk],
        since: int,
    ) -> Iterator[Found]:
        """The entries, tombstones too, of which a chunk was committed after version `since`."""
        new = {chunk for chunk, record in chunks.items() if record.version > since}
        commands = []
        for chunk in new:
            for name in piece_names(chunk, chunks[chunk].places):
                key = head.generation.key(name.bucket, b"n")
                commands.append(Command(key, ("HGET", key, name.field)))
        named: dict[FolderId, dict[bytes, None]] = {}
        for start in range(0, len(commands), _FIELDS_AT_ONCE):
            for reply in self._link.run(commands[start : start + _FIELDS_AT_ONCE]):
                if not isinstance(reply, bytes):
                    raise _Moved
                for folder, names in unpack_paths(reply):
                    named.setdefault(folder, {}).update(dict.fromkeys(names))
        rows: dict[FolderId, list[tuple[bytes, bytes]]] = {}
        asked = {folder: [*names] for folder, names in named.items()}
        for folder, base, entry in reader.entries(asked):
            if not new.isdisjoint(chunks_of(entry)):
                rows.setdefault(folder, []).append((base, entry))
        paths = reader.paths(rows)
        for folder, some in rows.items():
            yield paths[folder], [base for base, _ in some], [entry for _, entry in some]

    def chunks(self, identity: UUID) -> list[ChunkRecord]:
        def read(head: Head, reader: GenerationReader) -> list[ChunkRecord]:
            chunks = self._chunk_table(head)
            holes = dict.fromkeys(chunks, 0)
            for bucket in range(head.generation.buckets):
                for page in reader.hash_pages(bucket, b"h"):
                    for field, bitmap in page.items():
                        chunk = ChunkId(field[:16])
                        if chunk in holes:
                            holes[chunk] += int.from_bytes(bitmap, "little").bit_count()
            return [
                ChunkRecord(
                    chunk, record.object_bytes, record.uploaded_ns, record.entries, holes[chunk]
                )
                for chunk, record in sorted(chunks.items())
            ]

        return self._read(identity, read, one_state=True)

    def holes(self, identity: UUID, chunk: ChunkId) -> npt.NDArray[np.uint32]:
        def read(head: Head, _: GenerationReader) -> npt.NDArray[np.uint32]:
            key = DatasetKeys(identity).chunks
            (packed,) = self._link.run([Command(key, ("HGET", key, chunk))])
            if not isinstance(packed, bytes):
                raise NotFoundError(f"chunk {chunk_id_text(chunk)} has not been committed")
            return self._holes(head, chunk, _chunk_record(packed, head.first))

        return self._read(identity, read)

    def _holes(self, head: Head, chunk: ChunkId, record: _Chunk) -> npt.NDArray[np.uint32]:
        found = [np.zeros(0, np.uint32)]
        for bucket, _pieces in record.places:
            key = head.generation.key(bucket, b"h")
            fields = [*hole_fields(chunk, record.entries)]
            (bitmaps,) = self._link.run([Command(key, ("HMGET", key, *fields))])
            assert isinstance(bitmaps, list)
            for block, bitmap in enumerate(bitmaps):
                if bitmap is not None:
                    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
                    places = np.flatnonzero(bits) + block * HOLES_PER_FIELD
                    found.append(places.astype(np.uint32))
        return np.sort(np.concatenate(found))

    def _chunk_table(self, head: Head) -> dict[ChunkId, _Chunk]:
        keys = DatasetKeys(head.marker.identity)
        cursor, found = b"0", dict[ChunkId, _Chunk]()
        while True:
            scan = Command(keys.chunks, ("HSCAN", keys.chunks, cursor, "COUNT", 2000))
            (reply,) = self._link.run([scan])
            assert isinstance(reply, list | tuple)
            for chunk, packed in packed_dict(reply[1]).items():
                found[ChunkId(chunk)] = _chunk_record(packed, head.first)
            cursor = b"%d" % int(reply[0])
            if cursor == b"0":
                return found

    def _read(
        self,
        identity: UUID,
        read: Callable[[Head, GenerationReader], T],
        *,
        one_state: bool = False,
    ) -> T:
        """What `read` finds in a generation that stands; `one_state`: at the version of its head.

        Where commits keep moving the version, they are held back.
        """
        return self._link.patiently(lambda: self._read_once(identity, read, one_state))

    def _read_once(
        self, identity: UUID, read: Callable[[Head, GenerationReader], T], one_state: bool
    ) -> T:
        with _Holding(self, identity) as holding:
            for tries in range(_TRIES_MAX):
                if one_state and tries >= _TRIES_WITHOUT_HOLD:
                    holding.begin()
                try:
                    head = self._commits.settled(identity, wholly=one_state)
                except Unsettled:
                    continue
                reader = GenerationReader(self._link, head.generation, holding.renew)
                try:
                    found = read(head, reader)
                except _Moved:
                    continue
                except DieselError:
                    if self._stands(identity, head, one_state):
                        raise
                    continue  # half of it was of another state
                if self._stands(identity, head, one_state):
                    return found
        raise BusyError(f"dataset {identity} does not hold still")

    def _stands(self, identity: UUID, head: Head, one_state: bool) -> bool:
        """Whether what was read since `head` is true; as `one_state`, that of its version."""
        if not self._commits.check(identity, head):
            return False
        if not one_state:
            return True
        # Nothing of a commit is applied before the version has moved.
        now = self._commits.look(identity)
        return now.marker.version == head.marker.version and now.generation == head.generation


def _chunk_record(packed: bytes, first: int) -> _Chunk:
    object_bytes, uploaded_ns, entries, version = CHUNK.unpack_from(packed)
    places = unpack_places(packed[CHUNK.size :])
    return _Chunk(object_bytes, uploaded_ns, entries, version or first, places)


def _find(reader: GenerationReader, paths: list[bytes]) -> list[bytes | None]:
    """The entry at each path."""
    folders: dict[bytes, FolderId] = {}
    asked: dict[FolderId, list[bytes]] = {}
    keys = []
    for path in paths:
        folder, name = split(path)
        if folder not in folders:
            folders[folder] = folder_id(folder)
        asked.setdefault(folders[folder], []).append(name)
        keys.append((folders[folder], name))
    found = {(folder, name): entry for folder, name, entry in reader.entries(asked)}
    return [found.get(key) for key in keys]


class _Holding:
    """A hold that is begun when it is needed, renewed while it is, and released at the end."""

    def __init__(self, store: MetadataStore, identity: UUID) -> None:
        self._store = store
        self._identity = identity
        self._hold: Hold | None = None
        self._since_s = 0.0

    def begin(self) -> None:
        """Hold commits back from now on."""
        before, self._hold = self._hold, self._store.hold(self._identity, HOLD_S_MAX)
        self._since_s = time.monotonic()
        if before is not None:
            before.release()

    def renew(self) -> None:
        """Called again and again while something long goes on."""
        if self._hold is not None and time.monotonic() > self._since_s + HOLD_S_MAX / 3:
            self.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            self._hold.release()
