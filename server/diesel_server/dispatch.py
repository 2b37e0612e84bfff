"""Running handlers: in the loop or in threads, one answer or many.

Owned here: which kind a handler is, threads and how many there are for what, closing generators.
Not owned: what handlers do, how answers are sent, what errors become (`connection.py`).

Concurrency: a handler that is no `async` one runs in a thread; a client that goes away does not
stop it, but a generator is closed after the answer that it is at. Kinds of work have threads of
their own, so that a metadata store that hangs does not keep reads waiting, nor jobs anything.
"""

import inspect
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from typing import TypeVar

import trio

from diesel_fs.errors import BusyError, UsageError

from .limits import THREAD_WAIT_S
from .requests import Handler, Reply, Request

JOBS = frozenset(("verify", "recover", "purge", "delete_dataset"))
READS = frozenset(("read", "snapshot"))

_THREADS = {"jobs": 16, "reads": 48, "others": 48}
_LATER_WAIT_S = 60.0  # for the next part of an answer that has begun

T = TypeVar("T")

Answers = Reply | Iterator[Reply] | Awaitable[Reply] | AsyncIterator[Reply]

Send = Callable[[Reply, bool], Awaitable[None]]
"""Sends an answer; whether another follows."""


class ThreadsBusy(BusyError):
    """No thread was free in time; nothing has begun."""


class Dispatcher:
    """The handlers of a server, and the threads that they run in."""

    def __init__(
        self, handlers: Mapping[str, Handler], threads: Mapping[str, int] | None = None
    ) -> None:
        self._handlers = {do: (handler, _is_async(handler)) for do, handler in handlers.items()}
        self._limiters = {
            kind: trio.CapacityLimiter(count) for kind, count in (threads or _THREADS).items()
        }
        self._unlimited = trio.CapacityLimiter(math.inf)

    async def run(self, do: str, request: Request, send: Send) -> None:
        """Answer a request. Raises whatever the handler does; ThreadsBusy; what `send` raises."""
        handler, is_async = self._handlers.get(do, (None, False))
        if handler is None:
            raise UsageError(
                f"this server does not know the request {do[:64]!r}", advice="update the server"
            )
        found: Answers
        if is_async:
            found = handler(request)
        else:
            plain: Callable[[Request], Answers] = handler
            found = await self._in_thread(do, lambda: plain(request), THREAD_WAIT_S)
        if inspect.iscoroutine(found):
            await send(await found, False)
        elif isinstance(found, Reply):
            await send(found, False)
        elif isinstance(found, Iterator):
            await self._send_all(do, found, send)
        elif isinstance(found, AsyncIterator):
            async with aclosing(_Parts(found)) as replies:
                await _send_parts(replies.next, send)
        else:
            await send(await found, False)

    async def _send_all(self, do: str, replies: Iterator[Reply], send: Send) -> None:
        async def following() -> Reply | None:
            return await self._in_thread(do, lambda: next(replies, None), _LATER_WAIT_S)

        try:
            await _send_parts(following, send)
        finally:
            if isinstance(replies, Generator):
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(replies.close, limiter=self._unlimited)

    async def _in_thread(self, do: str, work: Callable[[], T], wait_s: float) -> T:
        kind = "jobs" if do in JOBS else "reads" if do in READS else "others"
        limiter, token = self._limiters[kind], object()
        with trio.move_on_after(wait_s) as scope:
            await limiter.acquire_on_behalf_of(token)
        if scope.cancelled_caught:
            raise ThreadsBusy("the server is overloaded")
        try:
            return await trio.to_thread.run_sync(work, limiter=self._unlimited)
        finally:
            limiter.release_on_behalf_of(token)


def _is_async(handler: Handler) -> bool:
    """Whether it runs in the loop."""
    return inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler)


class _Parts:
    """The replies of an `async` handler, closed where it can be."""

    def __init__(self, replies: AsyncIterator[Reply]) -> None:
        self._replies = replies

    async def next(self) -> Reply | None:
        """The next one; None at the end."""
        return await anext(self._replies, None)

    async def aclose(self) -> None:
        """For a generator: it sees the end."""
        if isinstance(self._replies, AsyncGenerator):
            await self._replies.aclose()


async def _send_parts(following: Callable[[], Awaitable[Reply | None]], send: Send) -> None:
    """Send replies, each but the last with `more`: hence each waits for the one after it, unless
    it says by itself that there is one."""
    waiting: Reply | None = None
    ended = False
    while True:
        reply = await following()
        if waiting is not None:
            await send(waiting, reply is not None)
            ended, waiting = reply is None, None
        if reply is None:
            if not ended:
                raise RuntimeError("a handler ended without the answer that it had promised")
            return
        if reply.message.get("more") is True:
            await send(reply, True)
        else:
            waiting = reply
