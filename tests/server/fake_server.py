"""A server with test requests and without a repository.

`ThreadedServer` runs one in a thread of this process. As a program, `python -m
tests.server.fake_server` is `diesel-server` with workers (`--worker`) that serve these requests:

    echo      gives the payload back, and `text`
    sleep     answers after `seconds`; `blocking_sleep` keeps a thread for that time
    count     `n` answers
    give      a payload of `bytes`
    bug       raises an error that is no DieselError
    fail      raises the error `kind` with `message`
"""

import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Self
from uuid import UUID

import trio

from diesel_fs import metrics
from diesel_fs.credentials import Credentials
from diesel_fs.errors import PermissionDenied, error_by_class_name
from diesel_fs.metrics import MetricCells
from diesel_fs.net import keys
from diesel_fs.net.client import ServerLink
from diesel_fs.net.endpoints import listen
from diesel_fs.net.frames import login_challenge
from diesel_fs.net.messages import Fields
from diesel_fs.net.tls import Certificate
from diesel_fs.storage.accounts.account import Account
from diesel_fs.urls import HostPort, parse_url
from diesel_server import main as server_main
from diesel_server.connections.connection import ConnectionContext
from diesel_server.connections.listener import Listener, most_connections
from diesel_server.limits import ConnectionLimits, FairByteBudget
from diesel_server.process import supervisor
from diesel_server.process.wiring import Wiring
from diesel_server.process.worker import run_worker
from diesel_server.process.worker_config import WorkerConfig
from diesel_server.requests.dispatcher import Dispatcher, Handler, HandlerThreads, Reply, Request

STORE = UUID(int=7)
SEED = bytes(range(32))
ME = Credentials("me", SEED)


class OneUser:
    revoked = False

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        public = keys.public_key(SEED)
        known = user == ME.user and not self.revoked
        if not known or not keys.verify(public, signature, login_challenge(nonce, binding, user)):
            raise PermissionDenied("no such user, or another key")
        return Account(user, public)

    def current(self, account: Account) -> Account:
        if self.revoked:
            raise PermissionDenied("the account is not valid any more")
        return account


async def echo(request: Request) -> Reply:
    text = Fields(request.message, "echo").text("text", "")
    return Reply({"text": text, "peer": request.peer}, [request.payload])


async def sleep(request: Request) -> Reply:
    await trio.sleep(Fields(request.message, "sleep").number("seconds"))
    return Reply({"slept": True})


def blocking_sleep(threads: HandlerThreads) -> Handler:
    async def handle(request: Request) -> Reply:
        seconds = Fields(request.message, "sleep").number("seconds")
        await threads.run(lambda: time.sleep(seconds))
        return Reply({"slept": True})

    return handle


async def count(request: Request) -> AsyncGenerator[Reply, None]:
    n = Fields(request.message, "count").integer("n")
    for i in range(n):
        yield Reply({"i": i, "more": i < n - 1}, [b"x" * i])


async def progress(request: Request) -> AsyncGenerator[Reply, None]:
    for i in range(Fields(request.message, "progress").integer("n")):
        yield Reply({"i": i, "more": True})
        await trio.sleep(0.01)
    yield Reply({"done": True})


async def give(request: Request) -> Reply:
    fields = Fields(request.message, "give")
    return Reply({}, [bytes(1 << 20)] * (fields.integer("bytes") >> 20))


async def bug(request: Request) -> Reply:
    raise KeyError("secret")


async def fail(request: Request) -> Reply:
    fields = Fields(request.message, "fail")
    raise error_by_class_name(fields.text("kind"), fields.text("message"), "")


HANDLERS: Mapping[str, Handler] = {
    "echo": echo,
    "sleep": sleep,
    "blocking_sleep": blocking_sleep(HandlerThreads(8)),
    "count": count,
    "progress": progress,
    "give": give,
    "bug": bug,
    "fail": fail,
}


class ThreadedServer:
    def __init__(
        self,
        handlers: Mapping[str, Handler] | None = None,
        *,
        certificate: Certificate | None = None,
        count: ConnectionLimits | None = None,
        budget: FairByteBudget | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        store: UUID = STORE,
    ) -> None:
        self.cells: MetricCells = metrics.private_cells()
        self.login = OneUser()
        self.service: ConnectionContext | None = None
        self.sockets = listen(HostPort(host, port))
        self.port = int(self.sockets[0].getsockname()[1])
        self.host = host
        self._certificate = certificate
        self._made = threading.Event()
        self._listener: Listener | None = None
        self._token: trio.lowlevel.TrioToken | None = None

        async def serve() -> None:
            self.service = ConnectionContext(
                store_id=store,
                login=self.login,
                dispatcher=Dispatcher(HANDLERS if handlers is None else handlers),
                cells=self.cells,
                count=count or ConnectionLimits(100),
                budget=budget or FairByteBudget(),
            )
            self._listener = Listener(self.sockets, self.service, certificate)
            self._token = trio.lowlevel.current_trio_token()
            self._made.set()
            await self._listener.run()

        self._thread = threading.Thread(target=trio.run, args=(serve,), daemon=True)
        self._thread.start()
        assert self._made.wait(10)

    @property
    def url(self) -> str:
        scheme = "diesel" if self._certificate is None else "diesel+tls"
        return f"{scheme}://{self.place}"

    @property
    def place(self) -> str:
        return str(HostPort(self.host, self.port))

    def link(self, credentials: Credentials = ME, *, open_s: float = 5.0) -> ServerLink:
        return ServerLink(parse_url(self.url), credentials, open_s=open_s)

    def stop(self, seconds: float = 40.0) -> None:
        """Stop as SIGTERM does. Return when the server has ended."""
        self.begin_stop()
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        for each in self.sockets:
            each.close()

    def begin_stop(self) -> None:
        assert self._token is not None
        assert self._listener is not None
        try:
            self._token.run_sync_soon(self._listener.stop)
        except trio.RunFinishedError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def links(
    servers: Sequence[ThreadedServer], credentials: Credentials = ME, *, first: int | None = None
) -> ServerLink:
    url = "diesel://" + ",".join(server.place for server in servers)
    return ServerLink(parse_url(url), credentials, first=first)


def wire_stand_in(config: WorkerConfig, cells: MetricCells) -> Wiring:
    limits = ConnectionLimits(most_connections())
    return Wiring(ConnectionContext(STORE, OneUser(), Dispatcher(HANDLERS), cells, limits))


PROGRAM = (sys.executable, "-m", "tests.server.fake_server")

if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        run_worker(wire_stand_in)
    supervisor.PROGRAM = (*PROGRAM, "--worker")
    server_main.main()
