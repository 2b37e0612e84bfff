"""The control socket of a mount: who may speak, how long, how much; CONTROL.md describes the rest.

Owned here: the socket's place in a private folder, its listeners' limits, the hello. Not owned: the
bytes of frames and messages (`control_wire.py`), what messages do (`commands.py`, in the
helper, to which they are passed on).

Only the user that the daemon runs as, and root, are answered. Whoever sends what is no frame is cut
off with one line in the log, and nobody else notices.

Concurrency: trio, in the server: a task for each connection, which answers in the order of asking.
Nothing waits without a deadline but for the next request.
"""

import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
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
from .control_wire import FRAME_BYTES_MAX, HELLO_BYTES_MAX, PROTOCOL

log = logging.getLogger("diesel.mount")

CONNECTIONS_MAX = 64
"""16 ranks with a few processes each; those that only wait may stay."""

FRAME_DEADLINE_S = 10.0
"""For the rest of a frame once its first byte has come, for the hello, and for taking an answer."""

ANSWER_DEADLINE_S = 15.0
"""For the helper, which may be in the middle of fetching a chunk."""

LARGE_BYTES = 1 << 20
"""Of frames beyond this one is received at a time, so that all together cannot fill the memory."""

UNNAMED_SOCKET_S_MAX = 60.0
"""A socket that has not got its name for so long was left behind."""

REQUESTS = frozenset(
    ("announce", "extend", "replace", "withdraw", "progress", "value", "resident", "stats")
)

_PEER = struct.Struct("3i")  # process, user, group


class ControlSocket:
    """One mount's control socket, from `listen` to `close`."""

    def __init__(
        self, folder: Path, hello: Message, stats: Callable[[], Message], link: WorkerLink
    ) -> None:
        self._folder = folder
        self._hello = hello
        self._stats = stats
        self._link = link
        self._socket: socket.socket | None = None
        self._users = {0, os.geteuid()}
        self._connections = 0
        self._large = trio.Lock()
        self._name = f"control-{secrets.token_hex(8)}"
        self.has_worker = False
        """Whether the helper has begun: before that, nothing may be told to it."""

    @property
    def _takes_plans(self) -> bool:
        return self.has_worker and self._link.alive

    def set_hello(self, hello: Message) -> None:
        """Who says hello from now on hears this."""
        self._hello = hello

    @property
    def path(self) -> bytes:
        """Where it is; empty while there is none."""
        return b"" if self._socket is None else os.fsencode(self._folder / self._name)

    def listen(self) -> None:
        """Makes the socket, and takes away those that dead daemons left. Raises DieselError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with _opened(self._folder) as folder:
                _tidy(folder)
                # It gets its name once it listens: else another daemon could take it for a dead one
                new = f".new-{self._name}"
                listener.bind(_short(folder, new))
                os.chmod(_short(folder, new), 0o600)
                listener.listen(CONNECTIONS_MAX)
                os.rename(new, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            listener.close()
            raise PermissionDenied(
                f"cannot make a socket in {self._folder}: {error.strerror or error}"
            ) from error
        self._socket = listener

    def close(self) -> None:
        """Takes the socket away."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with suppress(OSError), _opened(self._folder) as folder:
                os.unlink(self._name, dir_fd=folder)

    async def run(self) -> None:
        """Answers, until it is cancelled."""
        if self._socket is None:
            return
        listener = trio.socket.from_stdlib_socket(self._socket)
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    accepted, _ = await listener.accept()
                except OSError as error:  # no descriptor left, or whoever knocked has gone
                    log.error("the control socket cannot answer: %s", error)
                    await trio.sleep(0.1)
                    continue
                nursery.start_soon(self._serve_client, accepted)

    async def _serve_client(self, accepted: trio.socket.SocketType) -> None:
        """One connection, to its end."""
        self._connections += 1
        stream = trio.SocketStream(accepted)
        try:
            async with stream:
                self._check_peer(accepted)
                await self._serve_requests(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            log.info("a client of the control socket has gone: %r", error)
        except DieselError as error:
            log.warning("a client of the control socket was cut off: %s", error)
        except Exception:
            log.exception("a client of the control socket met a bug")
        finally:
            self._connections -= 1

    def _check_peer(self, accepted: trio.socket.SocketType) -> None:
        packed = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process, user, _ = _PEER.unpack(packed)
        if user not in self._users:
            raise PermissionDenied(f"process {process} belongs to user {user}")
        if self._connections > CONNECTIONS_MAX:
            raise BusyError(f"process {process} is one too many (at most {CONNECTIONS_MAX})")

    async def _serve_requests(self, stream: trio.SocketStream) -> None:
        with trio.fail_after(FRAME_DEADLINE_S):
            hello = await self._received(stream, HELLO_BYTES_MAX)
        if hello is None:
            return
        if set(hello) != {"diesel_control"} or type(hello["diesel_control"]) is not int:
            raise CorruptError("it did not say hello")
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
        """The next message; None at the end. Raises CorruptError, trio.TooSlowError."""
        first = await stream.receive_some(1)
        if not first:
            return None
        head = bytearray(first)
        with trio.fail_after(FRAME_DEADLINE_S):
            await _fill(stream, head, LENGTH.size)
        (length,) = LENGTH.unpack(head)
        if length > bytes_max:
            raise CorruptError(f"a frame of {length} bytes (at most {bytes_max})")
        body = bytearray()
        async with AsyncExitStack() as held:
            if length > LARGE_BYTES:
                await held.enter_async_context(self._large)
            with trio.fail_after(FRAME_DEADLINE_S):
                await _fill(stream, body, length)
            return unpack(body)

    async def _send(self, stream: trio.SocketStream, message: Message) -> None:
        with trio.fail_after(FRAME_DEADLINE_S):
            await stream.send_all(frame(message, FRAME_BYTES_MAX))

    async def _answer(self, message: Message) -> Message:
        """What becomes of a request. Raises DieselError."""
        do = message.get("do")
        if type(do) is not str or do not in REQUESTS:
            raise UsageError(f"no request {str(do)[:64]!r}")
        if "id" in message:
            raise UsageError("a message: unknown field 'id'")
        if not self._takes_plans:
            return self._without_helper(do)
        answer = await self._link.request(message, ANSWER_DEADLINE_S)
        if answer is None and not self._link.alive:  # it has ended since
            return self._without_helper(do)
        if answer is None:
            raise DeadlineError(f"the mount's helper did not answer within {ANSWER_DEADLINE_S:g} s")
        if do == "stats" and "error" not in answer:
            stats = self._stats()
            held, fresh = stats.get("residency"), answer.get("residency")
            if isinstance(held, dict) and isinstance(fresh, dict):
                stats["residency"] = {**held, **fresh}
            return {"stats": stats}
        return answer

    def _without_helper(self, do: str) -> Message:
        """What becomes of a request that nobody carries out. Raises DieselError."""
        if do == "stats":
            return {"stats": self._stats()}
        if self.has_worker:
            raise DieselError(
                "the mount's helper has ended: nothing is pushed any more", advice="mount again"
            )
        raise UsageError(
            "this mount pushes nothing ahead, so plans have no effect",
            advice="mount with --session kernel",
        )


async def _fill(stream: trio.SocketStream, body: bytearray, length: int) -> None:
    """Receives until there are so many bytes. Raises CorruptError at an early end."""
    while len(body) < length:
        received = await stream.receive_some(min(length - len(body), LARGE_BYTES))
        if not received:
            raise CorruptError("a frame ends early")
        body += received


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder that is ours and private. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(1, "others may enter it")
        yield descriptor
    finally:
        os.close(descriptor)


def _short(folder: int, name: str) -> str:
    """A path for a socket, which has room for 107 bytes alone."""
    return f"/proc/self/fd/{folder}/{name}"


def _tidy(folder: int) -> None:
    """Takes away the sockets of daemons that were killed."""
    for name in os.listdir(folder):
        with suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            if name.startswith("control-"):
                dead = not _listens(_short(folder, name))
            else:
                dead = (
                    name.startswith(".new-") and time.time() - found.st_ctime > UNNAMED_SOCKET_S_MAX
                )
            if dead:
                os.unlink(name, dir_fd=folder)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True
