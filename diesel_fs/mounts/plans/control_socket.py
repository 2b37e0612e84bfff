"""Serves the control socket of a mount, and limits its clients.

Over this socket (CONTROL.md), other programs announce which files they will read. Only root and the
daemon's user get answers; if the mount is for other users too, every user that can reach the socket
does. `commands.py` carries the requests out in the prefetch worker. A client that exceeds a limit
or sends malformed frames is disconnected, with one line in the log; other clients do not notice.

Concurrency: trio, in the server of the mount. Each connection has a task, which answers requests in
their order. Everything has a deadline except the wait for a client's next request.
"""

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import trio

from ...errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    DieselError,
    PermissionDenied,
    UsageError,
)
from ...net.messages import LENGTH, Message, error_message, frame, unpack
from ..prefetch.link import WorkerLink
from .control_wire import FRAME_BYTES_MAX, HELLO_BYTES_MAX, PROTOCOL, REQUESTS
from .socket_folder import PREFIX, open_private, remove_dead_sockets, short_path

log = logging.getLogger("diesel.mount")

CONNECTIONS_MAX = 64
"""Enough for 16 ranks with a few processes each. Idle connections may stay."""

FRAME_DEADLINE_S = 10.0
"""A client may take this long to send the rest of a frame after its first byte, or to receive an
answer."""

ANSWER_DEADLINE_S = 15.0
"""How long to wait for the prefetch worker, which may be busy with earlier messages."""

LARGE_BYTES = 1 << 20
"""Only one of all connections receives a larger frame at a time, so that these do not fill the
memory."""

_PEER = struct.Struct("3i")  # process, user, group


class ControlSocket:
    def __init__(
        self,
        folder: Path,
        hello: Message,
        stats: Callable[[], Message],
        link: WorkerLink,
        *,
        any_user: bool = False,
        frame_deadline_s: float = FRAME_DEADLINE_S,
    ) -> None:
        """`hello` has the facts that each client gets in the mount's first answer. With `any_user`,
        clients may belong to any user, for example in a container to which the socket is bound; the
        private folder keeps everybody else out."""
        self._frame_deadline_s = frame_deadline_s
        self._folder = folder
        self._hello = hello
        self._stats = stats
        self._link = link
        self._socket: socket.socket | None = None
        self._users = None if any_user else {0, os.geteuid()}
        self._connections = 0
        self._large_frames = trio.Lock()  # held while one is received
        self._name = f"{PREFIX}{secrets.token_hex(8)}"
        self.has_worker = False
        """Whether the prefetch worker has begun; nothing may be sent to it before. The mount's
        server sets this. It stays true when the worker ends, which `link.alive` shows."""

    @property
    def _takes_plans(self) -> bool:
        return self.has_worker and self._link.alive

    def set_hello(self, hello: Message) -> None:
        """For clients that connect later."""
        self._hello = hello

    @property
    def path(self) -> bytes:
        """Empty while there is no socket."""
        return b"" if self._socket is None else os.fsencode(self._folder / self._name)

    def listen(self) -> None:
        """Makes the socket and listens on it; removes the sockets of killed daemons. Raises
        DieselError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            remove_dead_sockets(self._folder)
            with open_private(self._folder) as folder:
                # Another daemon would remove a socket that has its final name but no listener yet
                temporary = f".new-{self._name}"
                listener.bind(short_path(folder, temporary))
                os.chmod(short_path(folder, temporary), 0o600 if self._users else 0o666)
                listener.listen(CONNECTIONS_MAX)
                os.rename(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            listener.close()
            raise PermissionDenied(
                f"cannot make a socket in {self._folder}: {error.strerror or error}"
            ) from error
        self._socket = listener

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with suppress(OSError), open_private(self._folder) as folder:
                os.unlink(self._name, dir_fd=folder)

    async def run(self) -> None:
        """Call it after `listen`."""
        if self._socket is None:
            return
        listener = trio.socket.from_stdlib_socket(self._socket)
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    accepted, _ = await listener.accept()
                except OSError as error:  # no descriptor is left, or the client has disconnected
                    log.error("the control socket cannot accept a connection: %s", error)
                    await trio.sleep(0.1)
                    continue
                nursery.start_soon(self._serve_client, accepted)

    async def _serve_client(self, accepted: trio.socket.SocketType) -> None:
        self._connections += 1
        stream = trio.SocketStream(accepted)
        try:
            async with stream:
                self._check_peer(accepted)
                await self._serve_requests(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            log.info("a client of the control socket has disconnected or is too slow: %r", error)
        except DieselError as error:
            log.warning("a client of the control socket was disconnected: %s", error)
        except Exception:
            log.exception("unexpected error while serving a client of the control socket")
        finally:
            self._connections -= 1

    def _check_peer(self, accepted: trio.socket.SocketType) -> None:
        packed = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process, user, _ = _PEER.unpack(packed)
        if self._users is not None and user not in self._users:
            raise PermissionDenied(f"process {process} belongs to user {user}")
        if self._connections > CONNECTIONS_MAX:
            raise BusyError(f"process {process}: too many connections (at most {CONNECTIONS_MAX})")

    async def _serve_requests(self, stream: trio.SocketStream) -> None:
        with trio.fail_after(self._frame_deadline_s):
            hello = await self._received(stream, HELLO_BYTES_MAX)
        if hello is None:
            return
        if set(hello) != {"diesel_control"} or type(hello["diesel_control"]) is not int:
            raise CorruptError("its first message was not a hello")
        if hello["diesel_control"] != PROTOCOL:
            refusal = UsageError(
                f"the mount speaks version {PROTOCOL} of the control protocol,"
                f" not {hello['diesel_control']}"
            )
            await self._send(stream, error_message(refusal))
            raise refusal
        await self._send(
            stream, {"diesel_control": PROTOCOL, **self._hello, "plans": self._takes_plans}
        )
        while (message := await self._received(stream, FRAME_BYTES_MAX)) is not None:
            try:
                answer = await self._answer(message)
            except DieselError as error:
                answer = error_message(error)
            await self._send(stream, {**answer, "version": self._hello.get("version")})

    async def _received(self, stream: trio.SocketStream, bytes_max: int) -> Message | None:
        """The client's next message; None if the client has ended the connection. Raises
        CorruptError, trio.TooSlowError."""
        first = await stream.receive_some(1)
        if not first:
            return None
        head = bytearray(first)
        with trio.fail_after(self._frame_deadline_s):
            await _fill(stream, head, LENGTH.size)
        (length,) = LENGTH.unpack(head)
        if length > bytes_max:
            raise CorruptError(f"a frame of {length} bytes (at most {bytes_max})")
        body = bytearray()
        async with AsyncExitStack() as locks:
            if length > LARGE_BYTES:
                await locks.enter_async_context(self._large_frames)
            with trio.fail_after(self._frame_deadline_s):
                await _fill(stream, body, length)
            return unpack(body)

    async def _send(self, stream: trio.SocketStream, message: Message) -> None:
        with trio.fail_after(self._frame_deadline_s):
            await stream.send_all(frame(message, FRAME_BYTES_MAX))

    async def _answer(self, message: Message) -> Message:
        """Raises DieselError."""
        do = message.get("do")
        if type(do) is not str or do not in REQUESTS:
            raise UsageError(f"no request {str(do)[:64]!r}")
        if "id" in message:  # the link to the worker numbers its requests by it
            raise UsageError("a message: unknown field 'id'")
        if not self._takes_plans:
            return self._answer_without_worker(do)
        answer = await self._link.request(message, ANSWER_DEADLINE_S)
        if answer is None and not self._link.alive:  # the worker has ended since
            return self._answer_without_worker(do)
        if answer is None:
            raise DeadlineError(
                f"the mount's prefetch worker did not answer within {ANSWER_DEADLINE_S:g} s"
            )
        if do == "stats" and "error" not in answer:
            stats = self._stats()
            # The worker's last report has more keys than its answer now, which is newer
            reported, current = stats.get("residency"), answer.get("residency")
            if isinstance(reported, dict) and isinstance(current, dict):
                stats["residency"] = {**reported, **current}
            return {"stats": stats}
        return answer

    def _answer_without_worker(self, do: str) -> Message:
        """Answers only requests for statistics. Raises DieselError for all others."""
        if do == "stats":
            return {"stats": self._stats()}
        raise DieselError(
            "the mount's prefetch worker does not run: nothing is pushed ahead",
            advice="mount again",
        )


async def _fill(stream: trio.SocketStream, body: bytearray, length: int) -> None:
    """Receives until `body` has `length` bytes. Raises CorruptError if the connection ends
    before."""
    while len(body) < length:
        received = await stream.receive_some(min(length - len(body), LARGE_BYTES))
        if not received:
            raise CorruptError("the connection ended within a frame")
        body += received
