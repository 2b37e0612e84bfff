"""Requests and replies, and the dispatcher that runs the handler of each request.

A handler is an `async` function that gives one reply, or an `async` generator that gives several
(each but the last has `more` in its message). It must not block the worker's event loop: threads do
blocking work, a few for each kind, so a store that hangs delays only one kind. A handler raises
`DieselError`; the connection logs any other exception as a bug and answers without its text.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from diesel_fs.errors import BusyError, UsageError
from diesel_fs.format.entries import Bytes
from diesel_fs.net.messages import Message
from diesel_fs.storage.accounts.account import Account

from ..limits import THREAD_WAIT_S

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    message: Message
    payload: memoryview
    account: Account
    peer: str  # the client's address:port
    secured: bool = False  # whether it came over TLS


@dataclass(frozen=True, slots=True)
class Reply:
    """The connection adds the request's `id`. The parts of the payload are sent without being
    joined."""

    message: Message = field(default_factory=dict)
    payload: Sequence[Bytes] = ()


Handler = Callable[[Request], Awaitable[Reply]] | Callable[[Request], AsyncGenerator[Reply, None]]


class ThreadsBusy(BusyError):
    """No thread was free in time. Nothing of the request has been done."""


class HandlerThreads:
    """At most `count` threads for one kind of work."""

    def __init__(self, count: int) -> None:
        self._limiter = trio.CapacityLimiter(count)
        self._unlimited = trio.CapacityLimiter(math.inf)  # `_limiter` has counted already

    async def run(self, work: Callable[[], T]) -> T:
        """The work goes on if the client goes away. Raises as `work` does; ThreadsBusy if no thread
        is free within `THREAD_WAIT_S`."""
        token = object()
        with trio.move_on_after(THREAD_WAIT_S) as scope:
            await self._limiter.acquire_on_behalf_of(token)
        if scope.cancelled_caught:
            raise ThreadsBusy("the server is overloaded")
        try:
            return await trio.to_thread.run_sync(work, limiter=self._unlimited)
        finally:
            self._limiter.release_on_behalf_of(token)


class Dispatcher:
    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    async def run(
        self, do: str, request: Request, send: Callable[[Reply], Awaitable[None]]
    ) -> None:
        """Sends each reply as soon as it is there. Raises UsageError for an unknown request, and
        the errors of the handler and of `send`; then a generator is closed."""
        handler = self._handlers.get(do)
        if handler is None:
            raise UsageError(
                f"this server does not know the request {do[:64]!r}", advice="update the server"
            )
        found = handler(request)
        if not isinstance(found, AsyncGenerator):
            await send(await found)
            return
        is_complete = False
        async with aclosing(found) as replies:
            async for reply in replies:
                await send(reply)
                is_complete = reply.message.get("more") is not True
        if not is_complete:
            raise RuntimeError("a handler ended without the answer that it had promised")
