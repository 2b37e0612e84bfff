"""One client's connection: greeting, login, requests, answers (`WIRE.md`).

Owned here: the order of things on a connection, its deadlines, what errors become, what is logged.
Not owned: bytes (`channel.py`, `wire.py`), how many connections there may be (`listener.py`),
running handlers (`running.py`).

Concurrency: one task reads, a task for each request that is under way answers, one at a time
writes. A request's memory is taken from the budget before anything of it is received, and given
back when its answer has been sent. Nothing waits without a deadline, but for the next request while
others are under way.
"""

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol
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

from . import limits
from .channel import Channel, ConnectionClosed
from .dispatch import Dispatcher, ThreadsBusy
from .limits import ConnectionLimits, FairByteBudget, LimitReached
from .refusal_log import RefusalLog, dataset_in
from .requests import Reply, Request

log = logging.getLogger("diesel.server")

ACCOUNT_REFRESH_S = 1.0
"""A connection's account is looked at again after so long: what was taken away is soon gone."""

SHUTTING_DOWN = "it is going"
_OVERLOADED = "the server is overloaded"
_NOTHING = memoryview(b"")
_LOGINS = 16


class Authenticator(Protocol):
    """Who users are (`authentication.py`). Both may block, for a stated time."""

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        """The account whose key made the signature. Raises PermissionDenied; others where the
        accounts cannot be had. The notes of an error are for the log alone."""
        ...

    def current(self, account: Account) -> Account:
        """The account as it is now. Raises PermissionDenied where it is no more."""
        ...


@dataclass(slots=True)
class ConnectionContext:
    """What the connections of a worker share."""

    store_id: UUID
    login: Authenticator
    runner: Dispatcher
    cells: MetricCells
    refusals: RefusalLog
    count: ConnectionLimits = field(default_factory=ConnectionLimits)
    budget: FairByteBudget = field(default_factory=FairByteBudget)
    logins: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(_LOGINS))
    takes_payload: Callable[[Account, str, int], bool] = lambda *_: True
    redactions: Mapping[str, str] = field(default_factory=dict)
    """Where the store lies, in all ways to write it, the longest first, and what clients are told
    in place of each."""
    under_way: int = 0
    by_user: Counter[str] = field(default_factory=Counter)
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class _Rejection:
    """Why a request is not begun with; `retry_after_s`: it may be sent again, wherever."""

    reason: str
    error: DieselError
    retry_after_s: float | None = None


Opener = Callable[[], Awaitable[tuple[Channel, bytes]]]
"""Makes the channel, by TLS perhaps, and what a login on it is bound to. Raises Gone."""


class Connection:
    """One connection, from `run` to its end."""

    def __init__(
        self, service: ConnectionContext, opener: Opener, address: str, port: int = 0
    ) -> None:
        self._service = service
        self._opener = opener
        self._address = address
        self._peer = f"{address}:{port}"
        self._channel: Channel | None = None
        self._account = Account("", b"")
        self._account_s = 0.0
        self._secured = False
        self._writing = trio.Lock()
        self._slots = trio.Semaphore(limits.REQUESTS_PER_CONNECTION_MAX)
        self._ids: set[int] = set()
        self._waiting: trio.CancelScope | None = None
        self._nursery: trio.Nursery | None = None
        self._counted = [0, 0]

    async def run(self) -> None:
        """Everything. Errors of a client end its connection, and nothing else."""
        try:
            with ExitStack() as held:
                if await self._log_in(held):
                    await self._serve_requests()
        except ConnectionClosed as error:
            if str(error):  # it did not speak TLS, or not as we do
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
        """Tell a client that it is not taken, as soon as it has greeted."""
        self.note_refusal(reason, sentence)
        try:
            with trio.move_on_after(limits.REFUSING_S):
                self._channel, _ = await self._opener()
                await self._channel.receive_exactly(wire.GREETING_BYTES)
                await self._channel.send([wire.refusal(sentence)])
                await self._channel.half_close()
        except ConnectionClosed:
            pass
        finally:
            if self._channel is not None:
                self._channel.close()

    def stop(self) -> None:
        """The server is going: what is under way is finished, nothing else begun."""
        if self._waiting is not None and not self._ids:
            self._waiting.cancel()

    # The beginning

    async def _log_in(self, held: ExitStack) -> bool:
        """Whether the client has proved who it is. Raises Gone, ForeignError, CorruptError."""
        account: Account | None = None
        network = limits.network_of(self._address)
        with trio.CancelScope() as stay, self._service.count.greeting(network, stay.cancel):
            account = await self._authenticated()
        if stay.cancelled_caught:
            self.note_refusal("address", "too many clients of its address log in at this moment")
        if account is None:
            return False
        try:
            held.enter_context(self._service.count.user(account.name))
        except LimitReached as error:
            self.note_refusal(error.reason, error.sentence, user=account.name)
            await self._send_final_error(BusyError(error.sentence))
            return False
        self._account, self._account_s = account, trio.current_time()
        self._service.cells.add("diesel_logins_total")
        welcome: Message = {"user": account.name, "store": str(self._service.store_id)}
        await self._send([wire.frame(welcome, wire.ANSWER_LIMITS)])
        return True

    async def _authenticated(self) -> Account | None:
        """Who the client has proved to be, in time. Raises as `_log_in`."""
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
        """The nonce that the client got, or none, and the binding."""
        self._channel, binding = await self._opener()
        self._secured = binding != wire.NO_BINDING
        await self._channel.wait()
        said = await self._channel.receive_exactly(wire.GREETING_BYTES)
        try:
            version = wire.parse_greeting(said)
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
        """The account that a login proves; None where it proves nothing, and the client knows."""
        user = ""
        try:
            if message.get("do") != "login":
                raise PermissionDenied("log in first")
            wire.check_required_fields(message)
            fields = Fields(message, "login")
            user, signature = fields.text("user"), fields.octets("signature")
            with trio.move_on_after(limits.AUTHENTICATE_S):
                return await trio.to_thread.run_sync(
                    self._service.login.authenticate,
                    user,
                    signature,
                    nonce,
                    binding,
                    self._address.strip("[]"),
                    limiter=self._service.logins,
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
        """Serve requests until there are no more. Raises Gone, CorruptError."""
        ended: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                while await self._wait_for_request():
                    try:
                        self._slots.acquire_nowait()  # which is no turn of the loop
                    except trio.WouldBlock:
                        await self._slots.acquire()
                    if not await self._receive_request(nursery):
                        self._slots.release()
            except (ConnectionClosed, CorruptError) as error:
                ended = error
                nursery.cancel_scope.cancel()
        try:
            if ended is not None:
                raise ended
        finally:
            ended = None  # it holds this frame, and frames that hold payloads: a cycle of megabytes

    async def _wait_for_request(self) -> bool:
        """Wait for the next request; False where there is none to wait for."""
        while not (self._service.is_draining and not self._ids):
            if self._open_channel.has_buffered(1):
                return True
            with trio.CancelScope() as self._waiting:
                self._waiting.deadline = trio.current_time() + limits.IDLE_S
                await self._open_channel.wait()
                return True
            if not self._ids and not self._service.is_draining:
                log.debug("%s has been idle for too long", self._peer)
                return False
        return False

    async def _receive_request(self, nursery: trio.Nursery) -> bool:
        """Receive one request and begin with it; False where that has been refused."""
        channel, owner = self._open_channel, self._account.name
        lengths = wire.parse_lengths(await self._exactly(wire.LENGTHS_BYTES), wire.REQUEST_LIMITS)
        held = 0
        if lengths.head > limits.SMALL_BYTES:
            held = limits.head_memory(lengths.head)
            if not await self._service.budget.acquire(owner, held, limits.BUDGET_WAIT_S):
                self.note_refusal("memory", "no memory for a large message", user=owner)
                await self._send_final_error(BusyError(_OVERLOADED))
                raise ConnectionClosed
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
            refusal = await self._reject_reason(message, do, lengths.payload, more)
            if refusal is not None:
                await self._reject(message, number, do, refusal, lengths.payload)
                return False
            held += more if more > limits.SMALL_BYTES else 0
            payload = _NOTHING
            if lengths.payload:
                payload = np.empty(lengths.payload, np.uint8).data
                with self._deadline(lengths.payload):
                    await channel.receive_into(payload)
            self._ids.add(number)
            self._service.under_way += 1
            self._service.by_user[owner] += 1
            self._service.cells.set("diesel_requests_under_way", value=self._service.under_way)
            self._service.cells.set("diesel_payload_bytes", value=self._service.budget.held)
            request = Request(message, payload, self._account, self._peer, self._secured)
            nursery.start_soon(self._respond, request, number, do, held)
            given = True
            return True
        finally:
            if held and not given:
                self._service.budget.release(owner, held)

    async def _reject_reason(
        self, message: Message, do: str, payload_bytes: int, size: int
    ) -> "_Rejection | None":
        """Why a request is not begun with, else None: then `size` bytes are its own."""
        service = self._service
        try:
            wire.check_required_fields(message)
            await self._look_at_account()
            if payload_bytes and not service.takes_payload(self._account, do, payload_bytes):
                raise PermissionDenied(
                    f"{self._account.name!r} may not send bytes with {do[:64]!r}"
                )
        except DieselError as error:
            return _Rejection("permission", error)
        if service.is_draining:
            return _Rejection("going", BusyError(f"the server refused: {SHUTTING_DOWN}"), 0.0)
        if (
            service.under_way >= limits.REQUESTS_MAX
            or service.by_user[self._account.name] >= limits.REQUESTS_PER_USER_MAX
        ):
            return _Rejection("requests", BusyError(_OVERLOADED), limits.RETRY_AFTER_S)
        if size > limits.SMALL_BYTES and not await service.budget.acquire(
            self._account.name, size, limits.BUDGET_WAIT_S
        ):
            return _Rejection("memory", BusyError(_OVERLOADED), limits.RETRY_AFTER_S)
        return None

    async def _look_at_account(self) -> None:
        if trio.current_time() - self._account_s >= ACCOUNT_REFRESH_S:
            self._account = await trio.to_thread.run_sync(
                self._service.login.current, self._account, limiter=self._service.logins
            )
            self._account_s = trio.current_time()

    async def _reject(
        self, message: Message, number: int, do: str, refusal: "_Rejection", payload_bytes: int
    ) -> None:
        error = refusal.error
        if isinstance(error, BusyError | PermissionDenied):
            self.note_refusal(
                refusal.reason,
                error.message,
                user=self._account.name,
                do=do,
                dataset=dataset_in(message),
            )
        outcome = "busy" if refusal.retry_after_s is not None else "error"
        if isinstance(error, PermissionDenied):
            outcome = "refused"
        self._service.cells.add("diesel_requests_total", do, outcome)
        with self._deadline(payload_bytes):
            await self._open_channel.skip(payload_bytes)
        await self._answer_error(number, error, refusal.retry_after_s)
        await trio.lowlevel.checkpoint()  # there may be hundreds of them in the buffer

    async def _respond(self, request: Request, number: int, do: str, held: int) -> None:
        """Run a request's handler and answer. Ends the connection where it cannot be answered."""
        cells, began_s, outcome = self._service.cells, trio.current_time(), "gone"

        async def send(reply: Reply, more: bool) -> None:
            message: Message = {**reply.message, "id": number}
            if more:
                message["more"] = True
            await self._answer(message, reply)

        try:
            try:
                await self._service.runner.run(do, request, send)
                outcome = "ok"
            except ConnectionClosed:
                raise
            except DieselError as error:
                outcome = await self._answer_failure(request, number, do, error)
            except Exception:
                log.exception("a bug: do=%r user=%s from=%s", do[:64], request.account.name,
                              self._peer)  # fmt: skip
                outcome = "bug"
                await self._answer_error(number, DieselError("internal error"))
        except ConnectionClosed:
            outcome = "gone"
            assert self._nursery is not None
            self._nursery.cancel_scope.cancel()
        finally:
            self._service.budget.release(request.account.name, held)
            self._service.under_way -= 1
            limits.less(self._service.by_user, request.account.name)
            self._ids.discard(number)
            self._slots.release()
            cells.set("diesel_requests_under_way", value=self._service.under_way)
            cells.set("diesel_payload_bytes", value=self._service.budget.held)
            cells.add("diesel_requests_total", do, outcome)
            cells.observe("diesel_request_seconds", do, value=trio.current_time() - began_s)
            self._count_bytes()
            if self._service.is_draining:
                self.stop()

    async def _answer_failure(
        self, request: Request, number: int, do: str, error: DieselError
    ) -> str:
        """Answer a request with the error that its handler raised; the outcome."""
        hint = None
        if isinstance(error, ThreadsBusy):
            error, hint = BusyError(error.message), limits.RETRY_AFTER_S
        outcome = "busy" if hint is not None else "error"
        if isinstance(error, PermissionDenied):
            outcome = "refused"
        if outcome != "error":
            self.note_refusal(
                "threads" if hint is not None else "permission",
                error.message,
                user=request.account.name,
                do=do,
                dataset=dataset_in(request.message),
            )
        await self._answer_error(number, error, hint)
        return outcome

    # Sending

    async def _answer(self, message: Message, reply: Reply) -> None:
        size = sum(memoryview(part).nbytes for part in reply.payload)
        await self._send([wire.frame(message, wire.ANSWER_LIMITS, size), *reply.payload], size)

    async def _answer_error(
        self, number: int, error: DieselError, retry_after_s: float | None = None
    ) -> None:
        message: Message = {**self._error_message(error), "id": number}
        if retry_after_s is not None:
            message["retry_after_s"] = retry_after_s
        await self._send([wire.frame(message, wire.ANSWER_LIMITS)])

    def _error_message(self, error: DieselError) -> Message:
        """An error as a client hears it: where this server's store lies is its operator's alone."""
        found = error_message(error)
        for name in ("message", "advice"):
            for place, words in self._service.redactions.items():
                found[name] = str(found[name]).replace(place, words)
        if found != error_message(error):
            log.warning("user=%s from=%s: %s", self._account.name, self._peer, error)
        return found

    async def _send(self, parts: "list[bytes | bytearray | memoryview]", size: int = 0) -> None:
        """Send a frame, whole or to the connection's end. Raises Gone."""
        try:
            self._writing.acquire_nowait()
        except trio.WouldBlock:
            await self._writing.acquire()
        try:
            left = self._open_channel.send_now(parts)
            if left:  # mostly none is: a deadline costs more than a call
                with self._deadline(size):
                    await self._open_channel.send_left(left)
        finally:
            self._writing.release()

    async def _exactly(self, size: int) -> bytearray:
        """The next so many bytes, within the time for them. Raises Gone."""
        if self._open_channel.has_buffered(size):  # most are, and a deadline costs more than a copy
            return await self._open_channel.receive_exactly(size)
        with self._deadline(size):
            return await self._open_channel.receive_exactly(size)

    @contextmanager
    def _deadline(self, size: int) -> Iterator[None]:
        """Time for a frame's part of so many bytes, and no more. Raises Gone."""
        with trio.move_on_after(limits.FRAME_S + size / limits.BYTES_PER_S_MIN) as scope:
            yield
        if scope.cancelled_caught:
            self.note_refusal("frame", "it was too slow", user=self._account.name)
            raise ConnectionClosed

    async def _send_final_error(self, error: DieselError) -> None:
        """An error that is no request's, at the connection's end."""
        try:
            await self._send([wire.frame(self._error_message(error), wire.ANSWER_LIMITS)])
            await self._open_channel.half_close()
        except ConnectionClosed:
            pass

    @property
    def _open_channel(self) -> Channel:
        assert self._channel is not None
        return self._channel

    def note_refusal(
        self, reason: str, why: str, *, user: str = "", do: str = "", dataset: str = ""
    ) -> None:
        """Log and count that the client is refused something."""
        self._service.refusals.add(
            reason, why, address=self._peer, user=user, do=do, dataset=dataset
        )

    def _count_bytes(self) -> None:
        if self._channel is None:
            return
        counts = [self._channel.received_bytes, self._channel.sent_bytes]
        for name, now, before in zip(
            ("diesel_received_bytes_total", "diesel_sent_bytes_total"),
            counts,
            self._counted,
            strict=True,
        ):
            if now != before:
                self._service.cells.add(name, amount=now - before)
        self._counted = counts
