"""The client's end of a master's socket (`PEERS.md`, section 4): connections, and whether to ask.

Owned here: which connections are kept, how long a master may take, and when one that has failed is
asked again. Not owned: what is asked for and what becomes of it (`client.py`), mappings
(`mapped.py`), starting a master (`launch.py`).

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
from .client_connection import WINDOW_BYTES, Connection, Failed, Refused
from .mapped import MappedChunks

log = logging.getLogger("diesel.task")

DEADLINE_S = 5.0
"""For an answer: a master answers within what its own deadlines add up to, or it hangs."""

PAUSE_S, PAUSE_S_MAX = 1.0, 16.0
"""How long a master that has failed is not asked, and to what that doubles while it goes on."""

IDLE_CONNECTIONS_MAX = 8


class Given(NamedTuple):
    """What a READ has brought: of each part where in the window it lies, and its source."""

    window: memoryview
    offsets: npt.NDArray[np.uint32]
    sources: npt.NDArray[np.uint16]


class Loan(NamedTuple):
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
        revive: Callable[[bool], bool] | None = None,
    ) -> None:
        """`mapped` is what it has lent: told when the master wants chunks back, or has gone.

        `revive` starts a master in the place of one that was killed, and says whether it has; it
        may take its time, and is called in a thread, whenever there is none to connect to. It is
        told whether there has ever been one for us.
        """
        self._path = os.fspath(path)
        self._identity = identity
        self._version = version
        self._mapped = mapped
        self._deadline_s = deadline_s
        self._first_pause_s = self._pause_s = pause_s
        self._failed_s = self._not_before_s = 0.0
        self._said = self._said_of_none = ""
        self._closed = False
        self._revive = revive
        self.rank = -1
        self.exchanged_s = 0.0
        self.counts = {"requests": 0, "failures": 0, "not_asked": 0}
        self._begin_again()
        _LINKS.add(self)

    def _begin_again(self) -> None:
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._reviving = threading.Lock()
        self._idle: list[Connection] = []
        self._dropped: deque[Connection] = deque()  # by whoever collects garbage: no lock
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
        self._not_before_s, self._pause_s, self._said = 0.0, self._first_pause_s, ""

    def read(self, parts: wire.Parts) -> "Reading | None":
        """Ask for parts, of no more than the window in all; to be used with `with`, as the window
        is the caller's until then. None where the master does not answer."""
        begun = self.begin(parts)
        return None if begun is None else begun.reading()

    def begin(self, parts: wire.Parts) -> "Begun | None":
        """As `read`, of which the answer is waited for later."""
        connection = self._taken()
        if connection is None:
            return None
        start_s = time.monotonic()
        body = parts.astype("<u4", copy=False).tobytes()
        request = wire.local_request(wire.LOCAL_READ, len(parts), body)
        if not self._put(connection, start_s, request):
            return None
        return Begun(self, connection, start_s, parts)

    def lend(self, chunk: int, *, fetch: bool) -> Loan | None:
        """Ask for a whole chunk. None where the master does not answer."""
        connection = self._taken()
        if connection is None:
            return None
        start_s = time.monotonic()
        answer = self._asked(
            connection,
            start_s,
            wire.LOCAL_LEND,
            1,
            wire.chunks_body([chunk]),
            flags=wire.LOAD if fetch else 0,
            takes=True,
        )
        if answer is None:
            return None
        source = wire.parse_source(answer[0])
        self._give_back(connection)
        return Loan(source, answer[1])

    def tell(self, kind: int, count: int, body: bytes, *, send: int = -1) -> bool:
        """A request whose answer says nothing; whether it came."""
        connection = self._taken(asks=False)
        if connection is None:
            return False
        if self._asked(connection, time.monotonic(), kind, count, body, send=send) is None:
            return False
        self._give_back(connection)
        return True

    def show(self, body: bytes, snapshot: int) -> bool:
        """Another version, whose snapshot is in a file; whether the master knows it now. Then the
        connection speaks of that one, and ends."""
        connection = self._taken(asks=False)
        if connection is None:
            return False
        start_s = time.monotonic()
        answer = self._asked(connection, start_s, wire.LOCAL_SHOW, 0, body, send=snapshot)
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
        answer = self._asked(connection, time.monotonic(), wire.LOCAL_STATS, 0, b"")
        if answer is None:
            return b""
        text = bytes(answer[0])
        self._give_back(connection)
        return text

    def settle(self) -> None:
        """Return what is mapped no more; hear what is wanted back."""
        while True:
            chunks = self._mapped.unmapped()
            some = chunks[: wire.RETURNED_MAX]
            if not self.tell(wire.LOCAL_RETURN, len(some), wire.chunks_body(some)):
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
        for connection in (*getattr(self, "_idle", ()), *getattr(self, "_dropped", ())):
            connection.close()

    def _asked(
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
            connection.put(request, send=send)
        except Failed as error:
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
            answer = connection.take(kind, count, takes=takes)
        except Refused as error:  # the connection is as good as before
            self._give_back(connection)
            self._note_failure(start_s, str(error))
            return None
        except Failed as error:
            self._fail(connection, start_s, str(error))
            return None
        except BaseException:  # a signal's: who knows how far it got
            connection.close()
            raise
        if connection.wanted:
            self._mapped.give_up(connection.wanted)
        if self._not_before_s and kind in (wire.LOCAL_READ, wire.LOCAL_LEND):
            log.info("the task's master answers again")
            self.retry()
        return answer

    def _taken(self, *, asks: bool = True) -> Connection | None:
        """A connection of the caller's own, where the master is to be asked; where it `asks` for
        nothing, any that there is will do."""
        with self._lock:
            if self._closed and not self._idle:
                return None
            waits = asks and time.monotonic() < self._not_before_s
            if self._idle and not waits:
                return self._idle.pop()
        if not waits and (connection := self._heard_out()) is not None:
            return connection
        start_s = time.monotonic()
        probes = self._not_before_s > 0
        if probes and (start_s < self._not_before_s or not self._probing.acquire(blocking=False)):
            self.counts["not_asked"] += 1
            return None
        try:
            connection = Connection(self._path, self._identity, self._version, self._deadline_s)
        except Failed as error:
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
                self._mapped.forget()
            self._open.add(connection)
        return connection

    def _bring_back(self) -> None:
        assert self._revive is not None
        if self._reviving.acquire(blocking=False):
            try:
                if self._revive(self.rank >= 0):
                    self.retry()
                self._said_of_none = ""
            except DieselError as error:
                if str(error) != self._said_of_none:
                    log.warning("the task has no master on this node: %s", error)
                self._said_of_none = str(error)
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
        connection.unheard = count
        if self._closed:
            connection.close()
        else:
            self._dropped.append(connection)

    def _heard_out(self) -> Connection | None:
        """One whose answer nobody has waited for, once that has come."""
        connection = self._dropped_one()
        start_s = time.monotonic()
        try:
            if connection is not None:
                connection.take(wire.LOCAL_READ, connection.unheard)
        except Refused:
            return connection
        except Failed as error:
            assert connection is not None
            self._fail(connection, start_s, str(error))
            return None
        return connection

    def _dropped_one(self) -> Connection | None:
        try:
            return self._dropped.popleft()
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
            self._not_before_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        if why and why != self._said:
            log.warning("the task's master cannot be asked (%s): reading from the store", why)
            self._said = why


class Begun:
    """A READ that has been sent; its answer may be waited for, or not."""

    def __init__(
        self, link: MasterLink, connection: Connection, start_s: float, parts: wire.Parts
    ) -> None:
        self._link = link
        self._connection: Connection | None = connection
        self._start_s = start_s
        self._parts = parts

    def reading(self) -> "Reading | None":
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
            offsets, sources = wire.parse_placed(answer[0], parts[:, 2], WINDOW_BYTES)
        except DieselError as error:
            self._link._fail(connection, start_s, str(error))
            return None
        return Reading(self._link, connection, Given(connection.window, offsets, sources))

    def __del__(self) -> None:
        connection: Connection | None = getattr(self, "_connection", None)
        if connection is not None and not connection.is_closed:
            self._link._drop(connection, len(self._parts))


class Reading:
    """The answer to a READ, as long as its window is ours."""

    def __init__(self, link: MasterLink, connection: Connection, given: Given) -> None:
        self._link = link
        self._connection = connection
        self.given = given

    def __enter__(self) -> Given:
        return self.given

    def __exit__(self, *_: object) -> None:
        self._link._give_back(self._connection)


_LINKS: "weakref.WeakSet[MasterLink]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_LINKS):
        for connection in list(link._open):
            connection.close()  # the child's copy of a descriptor; the parent's goes on
        link._begin_again()


os.register_at_fork(after_in_child=_after_fork_in_child)
