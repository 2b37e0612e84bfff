"""Chunk IDs (FORMAT.md, section 3) and stamps: their fields, their text, and a writer's next ID.

A chunk ID has a timestamp, the **writer part** (machine and process), and a counter. A **stamp**
orders two entries of one path: the ID of the chunk in which the entry begins, and the entry's place
(its number) there.
"""

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import ConflictError
from .entries import ChunkId, Stamp

ALPHABET = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
TEXT_CHARS = 22  # ceil(128 / 6)
LOWEST = ChunkId(bytes(16))
"""Less than every real ID. It stands for the newest ID of a dataset without chunks."""

_VALUE = {character: value for value, character in enumerate(ALPHABET)}
_STAMP = struct.Struct(">16sI")
_FOLLOW_STEP_MAX = 4095
"""The most by which a writer raises the process part to follow another's ID."""
_PROCESS_MAX = 0xFFFFFF
_COUNTER_MAX = 0xFFFFFF
_SECONDS_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, order=True)
class IdFields:
    """Fields of a chunk ID (the DIESEL paper, Table 1), in its order."""

    seconds: int  # since 1970
    machine: int  # a hardware address
    process: int  # random: containers share process numbers
    counter: int

    def id(self) -> ChunkId:
        return ChunkId(
            self.seconds.to_bytes(4)
            + self.machine.to_bytes(6)
            + self.process.to_bytes(3)
            + self.counter.to_bytes(3)
        )


def id_fields(chunk: ChunkId) -> IdFields:
    return IdFields(*map(int.from_bytes, (chunk[:4], chunk[4:10], chunk[10:13], chunk[13:])))


def id_seconds(chunk: ChunkId) -> int:
    return int.from_bytes(chunk[:4])


def lowest_id(seconds: int) -> ChunkId:
    """The lowest ID of a second: a listing from it on has all chunks since then."""
    return IdFields(min(max(seconds, 0), _SECONDS_MAX), 0, 0, 0).id()


def chunk_id_text(chunk: ChunkId) -> str:
    """The ID as 22 characters, which sort as IDs do."""
    number = int.from_bytes(chunk) << 4
    return "".join(ALPHABET[number >> shift & 63] for shift in range(126, -1, -6))


def parse_chunk_id(text: str) -> ChunkId:
    """Parse the text of `chunk_id_text`. Raises ValueError."""
    if len(text) != TEXT_CHARS:
        raise ValueError(f"a chunk ID has {TEXT_CHARS} characters, not {len(text)}")
    number = 0
    for character in text:
        if character not in _VALUE:
            raise ValueError(f"no chunk ID holds the character {character!r}")
        number = number << 6 | _VALUE[character]
    if number & 15:
        raise ValueError("the last bits of a chunk ID's text are zero")
    return ChunkId((number >> 4).to_bytes(16))


def stamp(chunk: ChunkId, place: int) -> Stamp:
    return Stamp(_STAMP.pack(chunk, place))


def stamp_fields(value: Stamp) -> tuple[ChunkId, int]:
    chunk, place = _STAMP.unpack(value)
    return ChunkId(chunk), place


def same_writer(one: ChunkId, other: ChunkId) -> bool:
    return one[4:13] == other[4:13]


class IdSource:
    """Makes one process's IDs, each greater than its last and than the newest committed one.
    Thread-safe. `machine` is a hardware address, `clock` gives seconds since 1970, and `entropy(n)`
    n random bytes. If `process_number()` changes, this is a forked child, and draws another process
    part."""

    def __init__(
        self,
        machine: int,
        clock: Callable[[], float],
        entropy: Callable[[int], bytes],
        process_number: Callable[[], int],
    ) -> None:
        self._machine = machine & 0xFFFFFFFFFFFF
        self._clock = clock
        self._entropy = entropy
        self._process_number = process_number
        self._drawn_by = -1
        self._writer = (0, 0)
        self._seconds = 0
        self._counter = 0
        self._lock = threading.Lock()

    def next(self, newest: ChunkId, writer_of: ChunkId | None = None) -> ChunkId:
        """Return an ID greater than `newest`, the dataset's newest committed one. A chunk that
        continues a file passes the file's first chunk as `writer_of`, and gets its writer part: no
        other writer may add extents. Raises ConflictError after 2106, when the timestamps end."""
        if self._process_number() != self._drawn_by:
            self._lock = threading.Lock()  # it may have been held at the fork
        with self._lock:
            if self._process_number() != self._drawn_by:
                self._drawn_by = self._process_number()
                self._writer = self._machine, self._random(3)
                self._seconds = self._counter = 0
            fields = self._next_fields(id_fields(newest), writer_of)
            if fields.seconds > _SECONDS_MAX:
                raise ConflictError(
                    "the timestamps of chunk IDs end in 2106, and the dataset's next one is later",
                    advice="only a copy into a new dataset helps (`dlcmd get`, then `dlcmd put`),"
                    " by a clock that is right",
                )
            self._seconds, self._counter = fields.seconds, fields.counter
            return fields.id()

    def _next_fields(self, newest: IdFields, writer_of: ChunkId | None) -> IdFields:
        """Rules 1 to 3 of FORMAT.md, section 3."""
        seconds = max(int(self._clock()), newest.seconds, self._seconds)
        counter = self._counter + 1 if seconds == self._seconds else 0
        if counter > _COUNTER_MAX:
            seconds, counter = seconds + 1, 0
        if writer_of is None:
            own = IdFields(seconds, *self._writer, counter)
        else:
            first = id_fields(writer_of)
            own = IdFields(seconds, first.machine, first.process, counter)
        if own > newest:
            return own
        # `newest` is another writer's, of this second (rule 3)
        process = newest.process + 1 + self._random(2) % _FOLLOW_STEP_MAX
        if writer_of is not None or process > _PROCESS_MAX:
            return replace(own, seconds=newest.seconds + 1, counter=0)
        self._writer = newest.machine, process
        return IdFields(seconds, *self._writer, counter)

    def _random(self, byte_count: int) -> int:
        return int.from_bytes(self._entropy(byte_count))
