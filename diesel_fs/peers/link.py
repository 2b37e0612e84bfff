"""The client's end of a master's socket (`PEERS.md`, section 4): connections, and whether to ask.

Owned here: which connections are kept, how long a master may take, and when one that has failed is
asked again. Not owned: what is asked for and what becomes of it (`client.py`), mappings
(`mapped_chunks.py`), starting a master (`launch.py`).

Nothing raises here because of a master: there is an answer, or none, and who asked reads from the
store. Concurrency: many threads, each exchange on a connection of its own. A forked child makes its
own connections. One is kept as long as the link: with the last one a master ends.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..errors import DieselError
from . import wire
from .client_connection import WINDOW_BYTES, Connection, ExchangeFailed, RequestRejected
from .mapped_chunks import MappedChunks

log = logging.getLogger("diesel.task")

DEADLINE_S = 5.0
"""For an answer: a master answers within what its own deadlines add up to, or it hangs."""

PAUSE_S, PAUSE_S_MAX = 1.0, 16.0
"""How long a master that has failed is not asked, and to what that doubles while it goes on."""

IDLE_CONNECTIONS_MAX = 8


class ReadResult(NamedTuple):
    """What a READ has brought: of each part where in the window it lies, and its source."""

    window: memoryview
    offsets: npt.NDArray[np.uint32]
    sources: npt.NDArray[np.uint16]


class PinResult(NamedTuple):
    """What a LEND has brought; a descriptor to close, or -1."""

    source: int
    descriptor: int


class MasterLink:
    """The master at one socket, asked about one version of one dataset."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: UUID,
        version: int,
        mapped: MappedChunks,
        *,
        deadline_s: float = DEADLINE_S,
        pause_s: float = PAUSE_S,
        restart: Callable[[bool], bool] | None = None,
    ) -> None:
        """`mapped` is what it has lent: told when the master wants chunks back, or has gone.

        `restart` starts a master in the place of one that was killed, and says whether it has; it
        may take its time, and is called in a thread, whenever there is none to connect to. It is
        told whether there has ever been one for us.
        """
        self._path = os.fspath(path)
        self._identity = identity
        self._version = version
        self._mapped = mapped
        self._deadline_s = deadline_s
        self._first_pause_s = self._pause_s = pause_s
        self._failed_s = self._paused_until_s = 0.0
        self._last_warning = self._last_restart_error = ""
        self._closed = False
        self._revive = restart
        self.rank = -1
        self.exchanged_s = 0.0
        self.counts = {"requests": 0, "failures": 0, "not_asked": 0}
        self._reset_after_fork()
        _LINKS.add(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._reviving = threading.Lock()
        self._idle: list[Connection] = []
        self._abandoned: deque[Connection] = deque()  # by whoever collects garbage: no lock
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()

    def connect(self) -> bool:
        """Make sure that there is a connection; whether there is. Whoever asks for anything does
        so by itself."""
        connection = self._taken()
        if connection is None:
            return False
        self._give_back(connection)
        return True

    @property
    def is_connected(self) -> bool:
        """Whether there is any connection: with the last one all that was lent is returned."""
        return bool(self._open)

    def retry(self) -> None:
        """Ask the master again, whatever has been."""
        self._paused_until_s, self._pause_s, self._last_warning = 0.0, self._first_pause_s, ""

    def read(self, parts: wire.Parts) -> "WindowLease | None":
        """Ask for parts, of no more than the window in all; to be used with `with`, as the window
        is the caller's until then. None where the master does not answer."""
        begun = self.begin(parts)
        return None if begun is None else begun.wait()

    def begin(self, parts: wire.Parts) -> "PendingRead | None":
        """As `read`, of which the answer is waited for later."""
        connection = self._taken()
        if connection is None:
            return None
        start_s = time.monotonic()
        body = parts.astype("<u4", copy=False).tobytes()
        request = wire.local_request(wire.LOCAL_READ, len(parts), body)
        if not self._put(connection, start_s, request):
            return None
        return PendingRead(self, connection, start_s, parts)

    def pin(self, chunk: int, *, fetch: bool) -> PinResult | None:
        """Ask for a whole chunk. None where the master does not answer."""
        connection = self._taken()
        if connection is None:
            return None
        start_s = time.monotonic()
        answer = self._exchange(
            connection,
            start_s,
            wire.LOCAL_PIN,
            1,
            wire.chunks_body([chunk]),
            flags=wire.LOAD if fetch else 0,
            takes=True,
        )
        if answer is None:
            return None
        source = wire.parse_source(answer[0])
        self._give_back(connection)
        return PinResult(source, answer[1])

    def notify(self, kind: int, count: int, body: bytes, *, send: int = -1) -> bool:
        """A request whose answer says nothing; whether it came."""
        connection = self._taken(asks=False)
        if connection is None:
            return False
        if self._exchange(connection, time.monotonic(), kind, count, body, send=send) is None:
            return False
        self._give_back(connection)
        return True

    def switch_version(self, body: bytes, snapshot: int) -> bool:
        """Another version, whose snapshot is in a file; whether the master knows it now. Then the
        connection speaks of that one, and ends."""
        connection = self._taken(asks=False)
        if connection is None:
            return False
        start_s = time.monotonic()
        answer = self._exchange(
            connection, start_s, wire.LOCAL_SWITCH_VERSION, 0, body, send=snapshot
        )
        if answer is None:
            return False
        with self._lock:
            self._open.discard(connection)
        connection.close()
        return True

    def stats(self) -> bytes:
        """What the master says of itself, as JSON; nothing where it says nothing."""
        connection = self._taken(asks=False)
        if connection is None:
            return b""
        answer = self._exchange(connection, time.monotonic(), wire.LOCAL_STATS, 0, b"")
        if answer is None:
            return b""
        text = bytes(answer[0])
        self._give_back(connection)
        return text

    def return_unmapped(self) -> None:
        """Return what is mapped no more; hear what is wanted back."""
        while True:
            chunks = self._mapped.take_unmapped()
            some = chunks[: wire.UNPINNED_MAX]
            if not self.notify(wire.LOCAL_UNPIN, len(some), wire.chunks_body(some)):
                return  # with its connections what they were lent is returned
            if not self._mapped.has_unmapped:
                return

    def close(self) -> None:
        """Repeatable. What is under way ends as it can."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in (*idle, *iter(self._dropped_one, None)):
            connection.close()

    def __del__(self) -> None:
        for connection in (*getattr(self, "_idle", ()), *getattr(self, "_abandoned", ())):
            connection.close()

    def _exchange(
        self,
        connection: Connection,
        start_s: float,
        kind: int,
        count: int,
        body: bytes,
        *,
        flags: int = 0,
        send: int = -1,
        takes: bool = False,
    ) -> tuple[memoryview, int] | None:
        """The answer; None after an exchange that failed, whose connection is closed then."""
        request = wire.local_request(kind, count, body, flags)
        if not self._put(connection, start_s, request, send=send):
            return None
        return self._answer(connection, start_s, kind, count, takes=takes)

    def _put(
        self, connection: Connection, start_s: float, request: bytes, *, send: int = -1
    ) -> bool:
        self.counts["requests"] += 1
        try:
            connection.send(request, send=send)
        except ExchangeFailed as error:
            self._fail(connection, start_s, str(error))
            return False
        except BaseException:  # a signal's: who knows how far it got
            connection.close()
            raise
        return True

    def _answer(
        self, connection: Connection, start_s: float, kind: int, count: int, *, takes: bool = False
    ) -> tuple[memoryview, int] | None:
        try:
            answer = connection.receive(kind, count, expects_descriptor=takes)
        except RequestRejected as error:  # the connection is as good as before
            self._give_back(connection)
            self._note_failure(start_s, str(error))
            return None
        except ExchangeFailed as error:
            self._fail(connection, start_s, str(error))
            return None
        except BaseException:  # a signal's: who knows how far it got
            connection.close()
            raise
        if connection.revoked:
            self._mapped.release(connection.revoked)
        if self._paused_until_s and kind in (wire.LOCAL_READ, wire.LOCAL_PIN):
            log.info("the task's master answers again")
            self.retry()
        return answer

    def _taken(self, *, asks: bool = True) -> Connection | None:
        """A connection of the caller's own, where the master is to be asked; where it `asks` for
        nothing, any that there is will do."""
        with self._lock:
            if self._closed and not self._idle:
                return None
            waits = asks and time.monotonic() < self._paused_until_s
            if self._idle and not waits:
                return self._idle.pop()
        if not waits and (connection := self._reuse_abandoned()) is not None:
            return connection
        start_s = time.monotonic()
        probes = self._paused_until_s > 0
        if probes and (start_s < self._paused_until_s or not self._probing.acquire(blocking=False)):
            self.counts["not_asked"] += 1
            return None
        try:
            connection = Connection(self._path, self._identity, self._version, self._deadline_s)
        except ExchangeFailed as error:
            self._note_failure(start_s, str(error))
            if self._revive is not None:
                threading.Thread(target=self._bring_back, name="diesel-revive", daemon=True).start()
            return None
        finally:
            if probes:
                self._probing.release()
        self.rank = connection.rank
        with self._lock:
            if not self._open:  # the first, or another master's
                self._mapped.forget_all()
            self._open.add(connection)
        return connection

    def _bring_back(self) -> None:
        assert self._revive is not None
        if self._reviving.acquire(blocking=False):
            try:
                if self._revive(self.rank >= 0):
                    self.retry()
                self._last_restart_error = ""
            except DieselError as error:
                if str(error) != self._last_restart_error:
                    log.warning("the task has no master on this node: %s", error)
                self._last_restart_error = str(error)
            finally:
                self._reviving.release()

    def _give_back(self, connection: Connection) -> None:
        self.exchanged_s = time.monotonic()
        with self._lock:
            if not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
            self._open.discard(connection)
        connection.close()

    def _drop(self, connection: Connection, count: int) -> None:
        """Nobody waits for the answer about so many parts. The connection stays: with its last one
        a master ends."""
        connection.unread_parts = count
        if self._closed:
            connection.close()
        else:
            self._abandoned.append(connection)

    def _reuse_abandoned(self) -> Connection | None:
        """One whose answer nobody has waited for, once that has come."""
        connection = self._dropped_one()
        start_s = time.monotonic()
        try:
            if connection is not None:
                connection.receive(wire.LOCAL_READ, connection.unread_parts)
        except RequestRejected:
            return connection
        except ExchangeFailed as error:
            assert connection is not None
            self._fail(connection, start_s, str(error))
            return None
        return connection

    def _dropped_one(self) -> Connection | None:
        try:
            return self._abandoned.popleft()
        except IndexError:
            return None

    def _fail(self, connection: Connection, start_s: float, why: str) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)
            idle, self._idle = self._idle, []  # they are the same master's
            idle += iter(self._dropped_one, None)
            for each in idle:
                self._open.discard(each)
        for each in idle:
            each.close()
        self._note_failure(start_s, why)

    def _note_failure(self, start_s: float, why: str) -> None:
        """Several that were under way together have failed once."""
        self.counts["failures"] += 1
        with self._lock:
            if start_s < self._failed_s:
                return
            now_s = self._failed_s = time.monotonic()
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        if why and why != self._last_warning:
            log.warning("the task's master cannot be asked (%s): reading from the store", why)
            self._last_warning = why


class PendingRead:
    """A READ that has been sent; its answer may be waited for, or not."""

    def __init__(
        self, link: MasterLink, connection: Connection, start_s: float, parts: wire.Parts
    ) -> None:
        self._link = link
        self._connection: Connection | None = connection
        self._start_s = start_s
        self._parts = parts

    def wait(self) -> "WindowLease | None":
        """The answer, once; None where the master does not answer."""
        connection, self._connection = self._connection, None
        assert connection is not None
        if connection.is_closed:
            return None
        parts, start_s = self._parts, self._start_s
        answer = self._link._answer(connection, start_s, wire.LOCAL_READ, len(parts))
        if answer is None:
            return None
        try:
            offsets, sources = wire.parse_read_answer(answer[0], parts[:, 2], WINDOW_BYTES)
        except DieselError as error:
            self._link._fail(connection, start_s, str(error))
            return None
        return WindowLease(self._link, connection, ReadResult(connection.window, offsets, sources))

    def __del__(self) -> None:
        connection: Connection | None = getattr(self, "_connection", None)
        if connection is not None and not connection.is_closed:
            self._link._drop(connection, len(self._parts))


class WindowLease:
    """The answer to a READ, as long as its window is ours."""

    def __init__(self, link: MasterLink, connection: Connection, given: ReadResult) -> None:
        self._link = link
        self._connection = connection
        self.given = given

    def __enter__(self) -> ReadResult:
        return self.given

    def __exit__(self, *_: object) -> None:
        self._link._give_back(self._connection)


_LINKS: "weakref.WeakSet[MasterLink]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_LINKS):
        for connection in list(link._open):
            connection.close()  # the child's copy of a descriptor; the parent's goes on
        link._reset_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
