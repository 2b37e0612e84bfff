"""Markers from a Redis that stands by itself, in the loop: a look costs no thread.

Owned here: connections of the loop's own, their sockets and deadlines. Not owned: what is asked and
what the replies prove (`redis_glance.py`), and everything else that is asked of Redis: what fails
here in any way is asked again the long way (`markers.py`), which knows more of failures. Behind TLS
or sentinels, and for a cluster, there is only the long way.

In the loop of one worker. A connection is lent to one look at a time, and closed where that has not
come to its end.
"""

import socket
from contextlib import suppress

import trio

from diesel_fs.storage.metadata import Marker
from diesel_fs.storage.redis_address import RedisAddress, parse_redis_url
from diesel_fs.storage.redis_glance import Glance, NoReplies, Replies, packed
from diesel_fs.urls import RepositoryUrl

GLANCE_S = 1.0
"""For one look, a connection perhaps included; the long way has more time."""

REST_S = 1.0
"""So long nobody tries again where that has just taken too long, or there was no connection."""

_CONNECTIONS_MAX = 8
_GLANCES_MAX = 4096
_RECEIVE_BYTES = 64 << 10


class RedisGlances:
    """Looks at the markers of a Redis."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._glances: dict[str, Glance] = {}
        self._idle: list[socket.socket] = []
        self._places = trio.Semaphore(_CONNECTIONS_MAX)
        self._rests_until_s = 0.0

    async def marker(self, name: str) -> Marker | None:
        """A marker by a look that began after the call; None proves nothing. One look for each
        name at a time."""
        if trio.current_time() < self._rests_until_s:
            return None
        glance = self._glances.get(name)
        if glance is None:
            if len(self._glances) >= _GLANCES_MAX:
                self._glances.clear()
            glance = self._glances[name] = Glance(name)
        with trio.move_on_after(GLANCE_S) as scope:
            await self._look(glance)
        if scope.cancelled_caught:
            self._rest()
        return glance.marker

    def close(self) -> None:
        """Let go of the connections that are not in use. Repeatable."""
        while self._idle:
            self._idle.pop().close()

    def _rest(self) -> None:
        self._rests_until_s = trio.current_time() + REST_S

    async def _look(self, glance: Glance) -> None:
        request = glance.begin()
        try:
            self._places.acquire_nowait()
        except trio.WouldBlock:
            await self._places.acquire()
        connection: socket.socket | None = None
        try:
            connection = self._idle.pop() if self._idle else await self._connected()
            await _send(connection, request)
            while not glance.feed(await _received(connection)):
                pass
            self._idle.append(connection)
            connection = None
        except (OSError, NoReplies):
            self.close()  # they are no better
            if connection is None:
                self._rest()
        finally:
            self._places.release()
            if connection is not None:
                connection.close()

    async def _connected(self) -> socket.socket:
        """A connection on which commands are carried out. Raises OSError, NoReplies."""
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
        await _send(connection, b"".join(map(packed, words)))
        while not replies.feed(await _received(connection)):
            pass
        if any(isinstance(reply, Exception) for reply in replies.found):
            raise NoReplies("it does not let us in")


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


def glances_of(url: RepositoryUrl) -> RedisGlances | None:
    """Looks at the markers of a repository's Redis; None where there is only the long way."""
    if not url.meta:
        return None
    address = parse_redis_url(url.meta)
    return RedisGlances(address) if address.kind == "redis" and not address.tls else None
