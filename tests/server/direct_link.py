"""A link to handlers in this process: requests and answers go through msgpack, but no socket.

Its loop is a thread of its own.
"""

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar
from uuid import UUID

import msgpack
import trio

from diesel_fs.errors import DieselError
from diesel_fs.format.entries import Bytes
from diesel_fs.net.client import Answer, RpcClient
from diesel_fs.net.messages import Message, error_message, parse_error, unpack
from diesel_fs.storage.accounts.account import Account
from diesel_server.requests.dispatcher import Handler, Reply, Request

T = TypeVar("T")

ITEMS_MAX = 1 << 22


class Loop:
    def __init__(self) -> None:
        self._ready = threading.Event()
        self._end = trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._ready.set()
        await self._end.wait()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        return trio.from_thread.run(work, trio_token=self._token)

    def close(self) -> None:
        trio.from_thread.run_sync(self._end.set, trio_token=self._token)
        self._thread.join(30)
        assert not self._thread.is_alive()


class DirectLink(RpcClient):
    def __init__(
        self, loop: Loop, handlers: Mapping[str, Handler], account: Account, store: UUID
    ) -> None:
        self._loop = loop
        self._handlers = handlers
        self._account = account
        self._store = store
        self.requests: list[str] = []

    @property
    def store_id(self) -> UUID:
        return self._store

    def call(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        room: memoryview | None = None,
        **_ignored: object,
    ) -> Answer:
        *_, answer = self._answers(message, payload)
        if room is not None:
            assert len(answer.payload) == len(room)
            room[:] = answer.payload
            return Answer(answer.message, room)
        return answer

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        yield from self._answers(message, ())

    def close_idle(self) -> None: ...

    def close(self) -> None: ...

    def _answers(self, message: Message, payload: Sequence[Bytes]) -> Iterator[Answer]:
        do = str(message["do"])
        self.requests.append(do)
        head = unpack(msgpack.packb({**message, "id": 1}), ITEMS_MAX)
        request = Request(head, memoryview(b"".join(payload)), self._account, "test")
        replies = self._loop.run(lambda: _all(self._handlers[do], request))
        for reply in replies:
            answer = unpack(msgpack.packb(reply.message), ITEMS_MAX)
            error = parse_error(answer)
            if error is not None:
                raise error
            yield Answer(answer, memoryview(b"".join(reply.payload)))


async def _all(handler: Handler, request: Request) -> list[Reply]:
    try:
        found = handler(request)
        if isinstance(found, AsyncGenerator):
            return [reply async for reply in found]
        return [await found]
    except DieselError as error:
        return [Reply(error_message(error))]
