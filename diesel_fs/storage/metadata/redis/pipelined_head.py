"""Reads a dataset's head from a single Redis in one round trip, for the server's many readers
(`diesel_server/requests/pipelined_heads.py`, which does the input and output).

`RedisMetadata.head` needs a dataset's identity, generation and buckets before it can request the
counts. Here the same commands are sent at once, with these values from the last replies. If the new
replies confirm them, they prove the head. Otherwise `head` is None, the next request uses the new
values, and the caller falls back to `RedisMetadata.head`, which also applies pending commits, waits
for Redis, and raises errors.

All replies must come over one connection from one Redis, which runs commands in order. redis-py is
not used: its client for threads takes a thread for each read, and its asyncio client does not run
in trio's loop. Not safe for concurrent use.
"""

from collections.abc import Sequence
from uuid import UUID

from hiredis import HiredisError, Reader, pack_command

from ....errors import DieselError
from ..store import DatasetHead
from .head import ScriptRejected, UnknownDataset, parse_head, read_head_command
from .keys import NAMES_KEY, DatasetKeys, Generation
from .link import Word
from .replies import number


class MalformedReply(Exception):
    """The received bytes are not a Redis's: close the connection."""


class Replies:
    def __init__(self, count: int) -> None:
        self._count = count
        self._reader = Reader(notEnoughData=_MORE)
        self.found: list[object] = []

    def feed(self, received: bytes) -> bool:
        """Returns whether all replies are complete. Raises MalformedReply."""
        try:
            self._reader.feed(received)
            while len(self.found) < self._count:
                reply = self._reader.gets()
                if reply is _MORE:
                    return False
                self.found.append(reply)
        except HiredisError as error:
            raise MalformedReply(str(error)) from None
        if self._reader.has_data():
            raise MalformedReply("there are more replies than commands")
        return True


class PipelinedHeadRead:
    """Repeated reads of one dataset's head, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._identity: UUID | None = None
        self._generation: Generation | None = None
        self._buckets: Sequence[int] = ()
        self._request, self._count = self._commands()
        self._replies: Replies | None = None
        self._received = b""
        self._proof = b""  # the received bytes that proved `_proved`
        self._proved: DatasetHead | None = None
        self.head: DatasetHead | None = None

    def begin(self) -> bytes:
        """Return the bytes to send over a connection without other requests."""
        self._replies, self._received, self.head = None, b"", None
        return self._request

    def feed(self, received: bytes) -> bool:
        """Returns whether the replies are complete. Then `head` is the proven head, or None. Raises
        MalformedReply."""
        if self._replies is None:
            if self._proof and received == self._proof:  # the same proof
                self.head = self._proved
                return True
            self._replies = Replies(self._count)
        self._received += received
        if not self._replies.feed(received):
            return False
        self.head = self._check_replies(self._replies.found)
        if self.head is None:
            self._proof, (self._request, self._count) = b"", self._commands()
        else:
            self._proof, self._proved = self._received, self.head
        return True

    def _check_replies(self, replies: Sequence[object]) -> DatasetHead | None:
        """The proven head; otherwise remembers what to request next."""
        named, *rest = replies
        identity = UUID(bytes=named) if isinstance(named, bytes) and len(named) == 16 else None
        if identity is None or identity != self._identity:
            self._identity, self._generation = identity, None
            return None
        try:
            head = parse_head(identity, rest[0])
        except (UnknownDataset, ScriptRejected, DieselError):  # the script is not loaded, too
            return None
        buckets = sorted(head.pieces_by_bucket)
        if head.generation != self._generation or buckets != self._buckets:
            self._generation, self._buckets = head.generation, buckets
            return None
        *applied_counts, generation = rest[1:]
        if head.pending or generation != head.generation.name:
            return None
        try:
            lost = any(
                number(there) < head.pieces_by_bucket[bucket]
                for bucket, there in zip(buckets, applied_counts, strict=True)
            )
        except DieselError:
            return None
        return None if lost else head.dataset

    def _commands(self) -> tuple[bytes, int]:
        commands: list[Sequence[Word]] = [("HGET", NAMES_KEY, self._name)]
        if self._identity is not None:
            commands.append(read_head_command(self._identity).command().words)
            if self._generation is not None:
                for bucket in self._buckets:
                    commands.append(("HGET", self._generation.key(bucket, b"t"), "pieces"))
                commands.append(("HGET", DatasetKeys(self._identity).head, "generation"))
        return b"".join(map(encode_command, commands)), len(commands)


_MORE = object()


def encode_command(words: Sequence[Word]) -> bytes:
    packed: bytes = pack_command(tuple(words))  # type: ignore[arg-type]  # its stub takes one word
    return packed
