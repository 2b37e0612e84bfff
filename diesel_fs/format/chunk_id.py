"""Chunk IDs and stamps: their fields, their text, and how a writer makes the next ID.

A chunk ID (FORMAT.md, section 3) is 16 bytes that order chunks by time. A **stamp** orders the
versions of a path: it is the ID of the version's first chunk, and the entry's place in that chunk.

Pure: the caller passes the clock, the process number and the random numbers. `IdSource` has a lock
of its own and may be used from any thread.
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
"""Smaller than every ID that is ever made: the newest ID of a dataset without chunks."""

_VALUE = {character: value for value, character in enumerate(ALPHABET)}
_STAMP = struct.Struct(">16sI")
_FOLLOW_STEP_MAX = 4095
_PROCESS_MAX = 0xFFFFFF
_COUNTER_MAX = 0xFFFFFF
_SECONDS_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, order=True)
class IdFields:
    """The four fields of a chunk ID (the DIESEL paper, Table 1); they sort as the ID does."""

    seconds: int
    machine: int
    process: int
    counter: int

    def id(self) -> ChunkId:
        """The ID itself, 16 bytes."""
        return ChunkId(
            self.seconds.to_bytes(4, "big")
            + self.machine.to_bytes(6, "big")
            + self.process.to_bytes(3, "big")
            + self.counter.to_bytes(3, "big")
        )


def id_fields(chunk: ChunkId) -> IdFields:
    """The fields of an ID."""
    number = int.from_bytes
    return IdFields(
        number(chunk[:4], "big"),
        number(chunk[4:10], "big"),
        number(chunk[10:13], "big"),
        number(chunk[13:], "big"),
    )


def id_seconds(chunk: ChunkId) -> int:
    """The timestamp of an ID, in seconds since 1970."""
    return int.from_bytes(chunk[:4], "big")


def lowest_id(seconds: int) -> ChunkId:
    """The smallest ID of a second: a listing "since" a time starts there."""
    return IdFields(min(max(seconds, 0), _SECONDS_MAX), 0, 0, 0).id()


def chunk_id_text(chunk: ChunkId) -> str:
    """The text of an ID: 22 characters that sort as the ID does."""
    number = int.from_bytes(chunk, "big") << 4
    return "".join(ALPHABET[number >> shift & 63] for shift in range(126, -1, -6))


def parse_chunk_id(text: str) -> ChunkId:
    """The ID with this text. Raises ValueError for text that `chunk_id_text` cannot return."""
    if len(text) != TEXT_CHARS:
        raise ValueError(f"a chunk ID has {TEXT_CHARS} characters, not {len(text)}")
    number = 0
    for character in text:
        if character not in _VALUE:
            raise ValueError(f"no chunk ID holds the character {character!r}")
        number = number << 6 | _VALUE[character]
    if number & 15:
        raise ValueError("the last bits of a chunk ID's text are zero")
    return ChunkId((number >> 4).to_bytes(16, "big"))


def stamp(chunk: ChunkId, place: int) -> Stamp:
    """The stamp of the entry at `place` of `chunk`."""
    return Stamp(_STAMP.pack(chunk, place))


def stamp_fields(value: Stamp) -> tuple[ChunkId, int]:
    """The chunk and the place that a stamp names."""
    chunk, place = _STAMP.unpack(value)
    return ChunkId(chunk), place


def same_writer(one: ChunkId, other: ChunkId) -> bool:
    """Whether two IDs have the same machine and process part."""
    return one[4:13] == other[4:13]


class IdSource:
    """Makes the IDs of one process, each greater than its last and than the newest committed one.

    `clock` returns seconds since 1970, `entropy(n)` n random bytes, and `process` the process
    number: after a fork it differs, and the random part is drawn again. Thread-safe.
    """

    def __init__(
        self,
        machine: int,
        clock: Callable[[], float],
        entropy: Callable[[int], bytes],
        process: Callable[[], int],
    ) -> None:
        self._machine = machine & 0xFFFFFFFFFFFF
        self._clock = clock
        self._entropy = entropy
        self._process = process
        self._drawn_by = -1
        self._writer = (0, 0)
        self._seconds = 0
        self._counter = 0
        self._lock = threading.Lock()

    def next(self, newest: ChunkId, writer_of: ChunkId | None = None) -> ChunkId:
        """The next ID, greater than `newest` (the rules are in FORMAT.md, section 3).

        With `writer_of`, the ID has that ID's machine and process part. Raises ConflictError if the
        ID would be later than 2106, when the timestamps end.
        """
        if self._process() != self._drawn_by:
            self._lock = threading.Lock()  # the old lock may have been held at the fork
        with self._lock:
            if self._process() != self._drawn_by:
                self._drawn_by = self._process()
                self._writer = self._machine, self._draw(3)
                self._seconds = self._counter = 0
            chosen = self._successor(id_fields(newest), writer_of)
            if chosen.seconds > _SECONDS_MAX:
                raise ConflictError(
                    "the timestamps of chunk IDs end in 2106, and the dataset's next one is later",
                    advice="only a copy into a new dataset helps (`dlcmd get`, then `dlcmd put`),"
                    " by a clock that is right",
                )
            self._seconds, self._counter = chosen.seconds, chosen.counter
            return chosen.id()

    def _successor(self, newest: IdFields, writer_of: ChunkId | None) -> IdFields:
        """The smallest ID that rules 1 to 3 of FORMAT.md, section 3, allow."""
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
        process = newest.process + 1 + self._draw(2) % _FOLLOW_STEP_MAX
        if writer_of is not None or process > _PROCESS_MAX:
            return replace(own, seconds=newest.seconds + 1, counter=0)
        self._writer = newest.machine, process
        return IdFields(seconds, *self._writer, counter)

    def _draw(self, width: int) -> int:
        return int.from_bytes(self._entropy(width), "big")
