"""Markers from a Redis that stands by itself, in the loop: a look costs no thread.

Owned here: connections of the loop's own, their sockets and deadlines. Not owned: what is asked and
what the replies prove (`storage/metadata/redis/pipelined_head.py`), and everything else that is
asked of Redis: what fails here in any way is asked again the long way (`head_cache.py`), which
knows more of failures. Behind TLS or sentinels, and for a cluster, there is only the long way.

In the loop of one worker. A connection is lent to one look at a time, and closed where that has not
come to its end.
"""

import socket
from contextlib import suppress

import trio

from diesel_fs.storage.metadata.redis.address import RedisAddress, parse_redis_url
from diesel_fs.storage.metadata.redis.pipelined_head import (
    MalformedReply,
    PipelinedHeadRead,
    Replies,
    encode_command,
)
from diesel_fs.storage.metadata.store import DatasetHead
from diesel_fs.urls import RepositoryUrl

READ_S = 1.0
"""For one look, a connection perhaps included; the long way has more time."""

OPEN_S = 1.0
"""So long nobody tries again where that has just taken too long, or there was no connection."""

_CONNECTIONS_MAX = 8
_GLANCES_MAX = 4096
_RECEIVE_BYTES = 64 << 10


class PipelinedHeadReads:
    """Looks at the markers of a Redis."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._reads: dict[str, PipelinedHeadRead] = {}
        self._idle: list[socket.socket] = []
        self._connection_slots = trio.Semaphore(_CONNECTIONS_MAX)
        self._rests_until_s = 0.0

    async def head(self, name: str) -> DatasetHead | None:
        """A marker by a look that began after the call; None proves nothing. One look for each
        name at a time."""
        if trio.current_time() < self._rests_until_s:
            return None
        glance = self._reads.get(name)
        if glance is None:
            if len(self._reads) >= _GLANCES_MAX:
                self._reads.clear()
            glance = self._reads[name] = PipelinedHeadRead(name)
        with trio.move_on_after(READ_S) as scope:
            await self._read(glance)
        if scope.cancelled_caught:
            self._open_breaker()
        return glance.head

    def close(self) -> None:
        """Let go of the connections that are not in use. Repeatable."""
        while self._idle:
            self._idle.pop().close()

    def _open_breaker(self) -> None:
        self._rests_until_s = trio.current_time() + OPEN_S

    async def _read(self, glance: PipelinedHeadRead) -> None:
        request = glance.begin()
        try:
            self._connection_slots.acquire_nowait()
        except trio.WouldBlock:
            await self._connection_slots.acquire()
        connection: socket.socket | None = None
        try:
            connection = self._idle.pop() if self._idle else await self._connected()
            await _send(connection, request)
            while not glance.feed(await _received(connection)):
                pass
            self._idle.append(connection)
            connection = None
        except (OSError, MalformedReply):
            self.close()  # they are no better
            if connection is None:
                self._open_breaker()
        finally:
            self._connection_slots.release()
            if connection is not None:
                connection.close()

    async def _connected(self) -> socket.socket:
        """A connection on which commands are carried out. Raises OSError, MalformedReply."""
        address = self._address
        if address.socket:
            stream = await trio.open_unix_socket(address.socket)
        else:
            stream = await trio.open_tcp_stream(*address.hosts[0])
        connection = socket.socket(fileno=stream.socket.detach())
        try:
            connection.setblocking(False)
            await self._log_in(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _log_in(self, connection: socket.socket) -> None:
        address, words = self._address, list[list[str]]()
        if address.password:
            words.append(["AUTH", *filter(None, [address.user]), address.password])
        if address.database:
            words.append(["SELECT", str(address.database)])
        if not words:
            return
        replies = Replies(len(words))
        await _send(connection, b"".join(map(encode_command, words)))
        while not replies.feed(await _received(connection)):
            pass
        if any(isinstance(reply, Exception) for reply in replies.found):
            raise MalformedReply("it does not let us in")


async def _send(connection: socket.socket, content: bytes) -> None:
    left = memoryview(content)
    while True:
        with suppress(BlockingIOError):
            left = left[connection.send(left) :]
        if not left:
            return
        await trio.lowlevel.wait_writable(connection)


async def _received(connection: socket.socket) -> bytes:
    """The next bytes. Raises OSError, also at the end."""
    await trio.lowlevel.wait_readable(connection)
    received = connection.recv(_RECEIVE_BYTES)
    if not received:
        raise ConnectionResetError
    return received


def pipelined_heads(url: RepositoryUrl) -> PipelinedHeadReads | None:
    """Looks at the markers of a repository's Redis; None where there is only the long way."""
    if not url.meta:
        return None
    address = parse_redis_url(url.meta)
    return PipelinedHeadReads(address) if address.kind == "redis" and not address.tls else None
