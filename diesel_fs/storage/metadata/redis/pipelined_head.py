"""A dataset's marker by one round trip to a Redis that stands by itself.

Owned here: what is asked in one go, and when the replies prove just what `RedisMetadata.head`
finds out step by step. Not owned: sockets (the server's), and what to do where nothing is proved:
then the long way is gone, which applies what waits, waits for a Redis that is away, and says why.

What is sent are the commands of the long way, in its order. What it learns on the way (identity,
generation, buckets) is taken from the replies of before, and replies that say otherwise prove
nothing but what to send next. They must come from one connection to one Redis, which carries out
one after the other: nodes of a cluster would be asked at once.

No input or output. Of one look at a time.
"""

from collections.abc import Sequence
from uuid import UUID

from hiredis import HiredisError, Reader

from diesel_fs.errors import DieselError
from diesel_fs.storage.metadata.redis.head import (
    ScriptRejected,
    UnknownDataset,
    parse_head,
    read_head_command,
)
from diesel_fs.storage.metadata.redis.keys import NAMES_KEY, DatasetKeys, Generation
from diesel_fs.storage.metadata.redis.link import Word
from diesel_fs.storage.metadata.redis.replies import number
from diesel_fs.storage.metadata.store import DatasetHead


class MalformedReply(Exception):
    """What was received are no replies of a Redis: the connection is of no more use."""


class Replies:
    """Replies to some commands that are sent together, from bytes as they come."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._reader = Reader(notEnoughData=_MORE)
        self.found: list[object] = []

    def feed(self, received: bytes) -> bool:
        """Whether all are there now. Raises MalformedReply."""
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
            raise MalformedReply("it says more than it was asked for")
        return True


class PipelinedHeadRead:
    """What is asked about the dataset of one name, and what has been learnt of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._identity: UUID | None = None
        self._generation: Generation | None = None
        self._buckets: Sequence[int] = ()
        self._request, self._count = self._asked()
        self._replies: Replies | None = None
        self._received = b""
        self._proof = b""
        self._proved: DatasetHead | None = None
        self.head: DatasetHead | None = None

    def begin(self) -> bytes:
        """A look begins with sending this, on a connection on which nothing else is under way."""
        self._replies, self._received, self.head = None, b"", None
        return self._request

    def feed(self, received: bytes) -> bool:
        """Whether all is there that comes back; then `head` is what it proves, if anything.

        Raises MalformedReply.
        """
        if self._replies is None:
            if self._proof and received == self._proof:  # what was proof before
                self.head = self._proved
                return True
            self._replies = Replies(self._count)
        self._received += received
        if not self._replies.feed(received):
            return False
        self.head = self._check_replies(self._replies.found)
        if self.head is None:
            self._proof, (self._request, self._count) = b"", self._asked()
        else:
            self._proof, self._proved = self._received, self.head
        return True

    def _check_replies(self, replies: Sequence[object]) -> DatasetHead | None:
        """What replies prove, and what to ask for next time."""
        named, *rest = replies
        identity = UUID(bytes=named) if isinstance(named, bytes) and len(named) == 16 else None
        if identity is None or identity != self._identity:
            self._identity, self._generation = identity, None
            return None
        try:
            head = parse_head(identity, rest[0])
        except (
            UnknownDataset,
            ScriptRejected,
            DieselError,
        ):  # among them a script that it does not have
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

    def _asked(self) -> tuple[bytes, int]:
        """What is sent, and how many replies that has."""
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
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        octets = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(octets), octets))
    return b"".join(parts)
