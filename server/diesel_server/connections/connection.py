"""One client's connection to the server: greeting, login, requests and answers (`WIRE.md`).

This module decides the order of events on a connection, their deadlines, the answer to each error,
and the lines in the log. `channel.py` moves bytes, and `requests/dispatcher.py` runs handlers.

Concurrency: one task reads requests. Each request under way has a task of its own, which answers
it; a lock lets one of these tasks write at a time. Memory for a request is taken from the worker's
budget before its payload is received, and given back after its answer. Every wait has a deadline,
except the wait for the next request while others are under way.
"""

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast
from uuid import UUID

import numpy as np
import trio

from diesel_fs.errors import (
    BusyError,
    CorruptError,
    DieselError,
    ForeignError,
    MetadataError,
    PermissionDenied,
)
from diesel_fs.metrics import MetricCells
from diesel_fs.net import frames as wire
from diesel_fs.net.messages import INTEGER_MAX, Fields, Message, error_message
from diesel_fs.storage.accounts.account import Account

from .. import limits
from ..limits import ConnectionLimits, FairByteBudget, LimitReached
from ..requests.dispatcher import Dispatcher, Reply, Request, ThreadsBusy
from .channel import ClientChannel, ClientGone
from .refusal_log import RefusalLog, dataset_in

log = logging.getLogger("diesel.server")

ACCOUNT_REFRESH_S = 1.0
"""A connection's account is looked up again after this time, so that a removed user or role has an
effect soon."""

SHUTTING_DOWN = "it is shutting down"
_OVERLOADED = "the server is overloaded"
_NOTHING = memoryview(b"")
_LOGIN_THREADS = 16


class Authenticator(Protocol):
    """Threads call the methods, which may block for a limited time."""

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        """Raises PermissionDenied; MetadataError or BusyError if the account cannot be decided now.
        An error's notes are for the log, not the client."""
        ...

    def current(self, account: Account) -> Account:
        """The account as it is now. Raises PermissionDenied if the user was removed or has another
        key."""
        ...


@dataclass(slots=True)
class ConnectionContext:
    store_id: UUID
    login: Authenticator
    dispatcher: Dispatcher
    cells: MetricCells
    count: ConnectionLimits = field(default_factory=ConnectionLimits)
    budget: FairByteBudget = field(default_factory=FairByteBudget)
    logins: trio.CapacityLimiter = field(
        default_factory=lambda: trio.CapacityLimiter(_LOGIN_THREADS)
    )
    takes_payload: Callable[[Account, str, int], bool] = lambda *_: True
    """Whether a user may send a payload: by the account, the request's `do`, and the bytes."""
    redactions: Mapping[str, str] = field(default_factory=dict)
    """Texts that clients must not see (all spellings of a store's address), with replacements,
    longest first. Everything that a connection sends goes through `redacted`."""
    under_way: int = 0  # requests
    by_user: Counter[str] = field(default_factory=Counter)  # requests under way
    is_draining: bool = False  # the server shuts down
    refusals: RefusalLog = field(init=False)

    def __post_init__(self) -> None:
        self.refusals = RefusalLog(self.cells)

    def redacted(self, value: object) -> object:
        match value:
            case str():
                for place, words in self.redactions.items():
                    value = value.replace(place, words)
                return value
            case dict():
                return {key: self.redacted(each) for key, each in value.items()}
            case list() | tuple():
                return [*map(self.redacted, value)]
        return value


@dataclass(frozen=True, slots=True)
class _Rejection:
    """With `retry_after_s`, nothing has been done: the client may send the request again after this
    time, here or to another server. `reason` is for the metrics."""

    reason: str
    error: DieselError
    retry_after_s: float | None = None

    @property
    def outcome(self) -> str:
        if isinstance(self.error, PermissionDenied):
            return "refused"
        return "error" if self.retry_after_s is None else "busy"


Opener = Callable[[], Awaitable[tuple[ClientChannel, bytes]]]
"""Opens a channel, perhaps with a TLS handshake. Returns it and the *binding*: bytes of this
channel that the client's login must sign (`WIRE.md`, section 3). Raises ClientGone."""


class ClientConnection:
    """Methods raise ClientGone if the client is gone or too slow, and CorruptError or ForeignError
    for bytes that break the protocol; `run` catches all of them."""

    def __init__(
        self, context: ConnectionContext, opener: Opener, address: str, port: int = 0
    ) -> None:
        self._context = context
        self._opener = opener
        self._address = address
        self._peer = f"{address}:{port}"
        self._channel: ClientChannel | None = None
        self._account = Account("", b"")
        self._account_s = 0.0
        self._secured = False
        self._writing = trio.Lock()
        self._slots = trio.Semaphore(limits.REQUESTS_PER_CONNECTION_MAX)
        self._ids: set[int] = set()
        self._waiting: trio.CancelScope | None = None  # of the wait for the next request
        self._nursery: trio.Nursery | None = None
        self._counted = (0, 0)  # bytes received and sent that the metrics have

    async def run(self) -> None:
        """Raises nothing: a client's error ends only this connection."""
        try:
            with ExitStack() as held:
                if await self._log_in(held):
                    await self._serve_requests()
        except ClientGone as error:
            if str(error):  # of the TLS handshake
                self.note_refusal("greeting", str(error))
        except (CorruptError, ForeignError) as error:
            self.note_refusal("frame", error.message)
            await self._send_final_error(error)
        except Exception:
            log.exception("a connection met a bug: from=%s", self._peer)
        finally:
            self._count_bytes()
            if self._channel is not None:
                self._channel.close()

    async def refuse(self, reason: str, sentence: str) -> None:
        """Logs a refusal, sends the client the sentence, and closes. Call it in place of `run`."""
        self.note_refusal(reason, sentence)
        try:
            with trio.move_on_after(limits.REFUSING_S):
                self._channel, _ = await self._opener()
                await self._channel.receive_exactly(wire.GREETING_BYTES)
                await self._channel.send([wire.refusal(sentence)])
                await self._channel.half_close()
        except ClientGone:
            pass
        finally:
            if self._channel is not None:
                self._channel.close()

    def stop(self) -> None:
        """Lets requests under way finish, and begins no other."""
        if self._waiting is not None and not self._ids:
            self._waiting.cancel()

    # Greeting and login

    async def _log_in(self, held: ExitStack) -> bool:
        """Returns whether the client is a user now. `held` keeps the user's place among the
        connections."""
        account: Account | None = None
        network = limits.network_of(self._address)
        with (
            trio.CancelScope() as dismissed,
            self._context.count.greeting(network, dismissed.cancel),
        ):
            account = await self._authenticated()
        if dismissed.cancelled_caught:
            self.note_refusal("address", "too many clients of its network are logging in")
        if account is None:
            return False
        try:
            held.enter_context(self._context.count.user(account.name))
        except LimitReached as error:
            self.note_refusal(error.reason, error.sentence, user=account.name)
            await self._send_final_error(BusyError(error.sentence))
            return False
        self._account, self._account_s = account, trio.current_time()
        self._context.cells.add("diesel_logins_total")
        welcome: Message = {"user": account.name, "store": str(self._context.store_id)}
        await self._send([wire.frame(welcome, wire.ANSWER_LIMITS)])
        return True

    async def _authenticated(self) -> Account | None:
        with trio.move_on_after(limits.GREETING_S) as greeting:
            nonce, binding = await self._greet()
        if greeting.cancelled_caught:
            self.note_refusal("greeting", "it did not greet in time")
            return None
        if not nonce:
            return None
        with trio.move_on_after(limits.LOGIN_S) as login:
            message = await self._login_frame()
        if login.cancelled_caught:
            self.note_refusal("login", "it did not log in in time")
            return None
        return await self._authenticate(message, nonce, binding)

    async def _greet(self) -> tuple[bytes, bytes]:
        """Returns the nonce for the client (empty if it was refused), and the binding."""
        self._channel, binding = await self._opener()
        self._secured = binding != wire.NO_BINDING
        await self._channel.wait()
        greeting = await self._channel.receive_exactly(wire.GREETING_BYTES)
        try:
            version = wire.parse_greeting(greeting)
        except ForeignError as error:
            self.note_refusal("greeting", error.message)
            return b"", b""
        if version != wire.VERSION:
            sentence = wire.version_mismatch(version)
            self.note_refusal("version", sentence)
            await self._channel.send([wire.refusal(sentence)])
            await self._channel.half_close()
            return b"", b""
        nonce = os.urandom(wire.NONCE_BYTES)
        await self._channel.send([wire.welcome(nonce)])
        return nonce, binding

    async def _login_frame(self) -> Message:
        channel = self._open_channel
        lengths = wire.parse_lengths(
            await channel.receive_exactly(wire.LENGTHS_BYTES), wire.BEFORE_LOGIN_LIMITS
        )
        return wire.parse_head(
            await channel.receive_exactly(lengths.head), wire.BEFORE_LOGIN_LIMITS
        )

    async def _authenticate(self, message: Message, nonce: bytes, binding: bytes) -> Account | None:
        """Returns None if the client has been refused."""
        user = ""
        try:
            if message.get("do") != "login":
                raise PermissionDenied("log in first")
            wire.check_required_fields(message)
            fields = Fields(message, "login")
            user, signature = fields.text("user"), fields.octets("signature")
            with trio.move_on_after(limits.AUTHENTICATE_S):
                return await trio.to_thread.run_sync(
                    self._context.login.authenticate,
                    user,
                    signature,
                    nonce,
                    binding,
                    self._address.strip("[]"),
                    limiter=self._context.logins,
                    abandon_on_cancel=True,
                )
            raise MetadataError("the accounts cannot be looked up now", advice="try again later")
        except DieselError as error:
            why = "; ".join([error.message, *getattr(error, "__notes__", [])])
            self.note_refusal("login", why, user=user, do="login")
            await self._send_final_error(error)
        except Exception:
            log.exception("a login met a bug: from=%s", self._peer)
            await self._send_final_error(DieselError("internal error"))
        return None

    # Requests

    async def _serve_requests(self) -> None:
        ended: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                while await self._wait_for_request():
                    try:
                        self._slots.acquire_nowait()  # unlike `acquire`, no turn of the loop
                    except trio.WouldBlock:
                        await self._slots.acquire()
                    if not await self._receive_request(nursery):
                        self._slots.release()
            except (ClientGone, CorruptError) as error:
                ended = error
                nursery.cancel_scope.cancel()
        try:
            if ended is not None:
                raise ended
        finally:
            ended = None  # breaks a reference cycle that would keep payloads of megabytes alive

    async def _wait_for_request(self) -> bool:
        """Returns False if the client was idle for too long, or if the server shuts down."""
        while not (self._context.is_draining and not self._ids):
            if self._open_channel.has_buffered(1):
                return True
            with trio.CancelScope() as self._waiting:
                self._waiting.deadline = trio.current_time() + limits.IDLE_S
                await self._open_channel.wait()
                return True
            if not self._ids and not self._context.is_draining:
                log.debug("%s has been idle for too long", self._peer)
                return False
        return False

    async def _receive_request(self, nursery: trio.Nursery) -> bool:
        channel, owner = self._open_channel, self._account.name
        lengths = wire.parse_lengths(await self._exactly(wire.LENGTHS_BYTES), wire.REQUEST_LIMITS)
        held = 0
        if lengths.head > limits.SMALL_BYTES:
            held = lengths.head * limits.HEAD_FACTOR
            if not await self._context.budget.acquire(owner, held, limits.BUDGET_WAIT_S):
                self.note_refusal("memory", "no memory for a large message", user=owner)
                await self._send_final_error(BusyError(_OVERLOADED))
                raise ClientGone
        given = False
        try:
            message = wire.parse_head(await self._exactly(lengths.head), wire.REQUEST_LIMITS)
            number, do = message.get("id"), message.get("do")
            if (
                type(number) is not int
                or not 0 <= number <= INTEGER_MAX
                or number in self._ids
                or type(do) is not str
            ):
                raise CorruptError("a request without an id of its own, or without a verb")
            more = lengths.payload + limits.answer_bytes(message)
            rejection = await self._admit(message, do, lengths.payload, more)
            if rejection is not None:
                self._context.cells.add("diesel_requests_total", do, rejection.outcome)
                with self._deadline(lengths.payload):
                    await channel.skip(lengths.payload)
                await self._reject(message, number, do, rejection)
                await trio.lowlevel.checkpoint()  # the buffer may hold hundreds of such requests
                return False
            held += more if more > limits.SMALL_BYTES else 0
            payload = _NOTHING
            if lengths.payload:
                payload = np.empty(lengths.payload, np.uint8).data
                with self._deadline(lengths.payload):
                    await channel.receive_into(payload)
            self._ids.add(number)
            self._context.under_way += 1
            self._context.by_user[owner] += 1
            self._context.cells.set("diesel_requests_under_way", value=self._context.under_way)
            self._context.cells.set("diesel_payload_bytes", value=self._context.budget.held)
            request = Request(message, payload, self._account, self._peer, self._secured)
            nursery.start_soon(self._respond, request, number, do, held)
            given = True
            return True
        finally:
            if held and not given:
                self._context.budget.release(owner, held)

    async def _admit(
        self, message: Message, do: str, payload_bytes: int, size: int
    ) -> _Rejection | None:
        """Returns the rejection; or None, after `size` bytes were taken from the budget (none if
        that is at most SMALL_BYTES)."""
        context = self._context
        try:
            wire.check_required_fields(message)
            await self._refresh_account()
            if payload_bytes and not context.takes_payload(self._account, do, payload_bytes):
                raise PermissionDenied(
                    f"{self._account.name!r} may not send bytes with {do[:64]!r}"
                )
        except DieselError as error:
            return _Rejection("permission", error)
        if context.is_draining:
            busy = BusyError(f"the server refused the request: {SHUTTING_DOWN}")
            return _Rejection("going", busy, 0.0)
        if (
            context.under_way >= limits.REQUESTS_MAX
            or context.by_user[self._account.name] >= limits.REQUESTS_PER_USER_MAX
        ):
            return _Rejection("requests", BusyError(_OVERLOADED), limits.RETRY_AFTER_S)
        if size > limits.SMALL_BYTES and not await context.budget.acquire(
            self._account.name, size, limits.BUDGET_WAIT_S
        ):
            return _Rejection("memory", BusyError(_OVERLOADED), limits.RETRY_AFTER_S)
        return None

    async def _refresh_account(self) -> None:
        if trio.current_time() - self._account_s >= ACCOUNT_REFRESH_S:
            self._account = await trio.to_thread.run_sync(
                self._context.login.current, self._account, limiter=self._context.logins
            )
            self._account_s = trio.current_time()

    async def _reject(self, message: Message, number: int, do: str, rejection: _Rejection) -> None:
        """Answers a rejected request; logs refusals."""
        error = rejection.error
        if isinstance(error, PermissionDenied) or rejection.outcome == "busy":
            self.note_refusal(
                rejection.reason,
                error.message,
                user=self._account.name,
                do=do,
                dataset=dataset_in(message),
            )
        await self._answer_error(number, error, rejection.retry_after_s)

    async def _respond(self, request: Request, number: int, do: str, held: int) -> None:
        """Releases `held` bytes of the budget. Ends the connection if the client does not receive
        the answers."""
        cells, began_s, outcome = self._context.cells, trio.current_time(), "gone"

        async def send(reply: Reply) -> None:
            size = sum(memoryview(part).nbytes for part in reply.payload)
            message = cast(Message, self._context.redacted(reply.message))  # it may have an error
            head = wire.frame({**message, "id": number}, wire.ANSWER_LIMITS, size)
            await self._send([head, *reply.payload], size)

        try:
            try:
                await self._context.dispatcher.run(do, request, send)
                outcome = "ok"
            except ClientGone:
                raise
            except DieselError as error:
                rejection = _Rejection("permission", error)
                if isinstance(error, ThreadsBusy):
                    busy = BusyError(error.message)
                    rejection = _Rejection("threads", busy, limits.RETRY_AFTER_S)
                outcome = rejection.outcome
                await self._reject(request.message, number, do, rejection)
            except Exception:
                log.exception("a bug: do=%r user=%s from=%s", do[:64], request.account.name,
                              self._peer)  # fmt: skip
                outcome = "bug"
                await self._answer_error(number, DieselError("internal error"))
        except ClientGone:
            outcome = "gone"
            assert self._nursery is not None
            self._nursery.cancel_scope.cancel()
        finally:
            self._context.budget.release(request.account.name, held)
            self._context.under_way -= 1
            limits.count_down(self._context.by_user, request.account.name)
            self._ids.discard(number)
            self._slots.release()
            cells.set("diesel_requests_under_way", value=self._context.under_way)
            cells.set("diesel_payload_bytes", value=self._context.budget.held)
            cells.add("diesel_requests_total", do, outcome)
            cells.observe("diesel_request_seconds", do, value=trio.current_time() - began_s)
            self._count_bytes()
            if self._context.is_draining:
                self.stop()

    # Sending

    async def _answer_error(
        self, number: int, error: DieselError, retry_after_s: float | None = None
    ) -> None:
        message: Message = {**self._error_message(error), "id": number}
        if retry_after_s is not None:
            message["retry_after_s"] = retry_after_s
        await self._send([wire.frame(message, wire.ANSWER_LIMITS)])

    def _error_message(self, error: DieselError) -> Message:
        """Leaves out the addresses of this server's store, which only its operator may know. The
        log then gets the whole error."""
        message = error_message(error)
        redacted = cast(Message, self._context.redacted(message))
        if redacted != message:
            log.warning("user=%s from=%s: %s", self._account.name, self._peer, error)
        return redacted

    async def _send(self, parts: "list[bytes | bytearray | memoryview]", size: int = 0) -> None:
        """Sends one frame with a payload of `size` bytes. Raises ClientGone if it takes too
        long."""
        try:
            self._writing.acquire_nowait()
        except trio.WouldBlock:
            await self._writing.acquire()
        try:
            left = self._open_channel.send_now(parts)
            if left:  # mostly nothing, and a deadline costs more than this test
                with self._deadline(size):
                    await self._open_channel.send_left(left)
        finally:
            self._writing.release()

    async def _exactly(self, size: int) -> bytearray:
        if self._open_channel.has_buffered(size):  # mostly so, and a deadline costs more
            return await self._open_channel.receive_exactly(size)
        with self._deadline(size):
            return await self._open_channel.receive_exactly(size)

    @contextmanager
    def _deadline(self, size: int) -> Iterator[None]:
        """Raises ClientGone after the time for `size` bytes of a frame."""
        with trio.move_on_after(limits.FRAME_S + size / limits.BYTES_PER_S_MIN) as scope:
            yield
        if scope.cancelled_caught:
            self.note_refusal("frame", "it was too slow", user=self._account.name)
            raise ClientGone

    async def _send_final_error(self, error: DieselError) -> None:
        try:
            await self._send([wire.frame(self._error_message(error), wire.ANSWER_LIMITS)])
            await self._open_channel.half_close()
        except ClientGone:
            pass

    @property
    def _open_channel(self) -> ClientChannel:
        assert self._channel is not None
        return self._channel

    def note_refusal(
        self, reason: str, why: str, *, user: str = "", do: str = "", dataset: str = ""
    ) -> None:
        self._context.refusals.add(
            reason, why, address=self._peer, user=user, do=do, dataset=dataset
        )

    def _count_bytes(self) -> None:
        if self._channel is None:
            return
        add, before = self._context.cells.add, self._counted
        now = self._counted = self._channel.received_bytes, self._channel.sent_bytes
        add("diesel_received_bytes_total", amount=now[0] - before[0])
        add("diesel_sent_bytes_total", amount=now[1] - before[1])
