"""An object store in a bucket, for processes that may fork: a program of ours speaks to the bucket.

The library that speaks to buckets hangs in a forked child, and users' training processes fork. So
this process starts a **helper** (`proxy_process.py`), in which that library runs, and passes each
call of `ObjectStore` on to it. Owned here: the helper's life, and the messages between the two.

The helper serves any number of connections, one call at a time on each. A socket pair is its
**control**: over it this process, and each of its forked children, sends the other end of a new
connection. So children share their parent's helper, use no connection of the parent's, and the
helper ends when the last of these processes has, or rests: then nobody holds our end of the control
any more. Where a helper was killed, each process that notices it starts another one.

A message is a frame: the lengths of its head and of its payload, the head (msgpack), the payload.

    to the helper    [method, arguments...]; the payload is what is to be put
    from it          {"value": ...}; the payload is what was read
                     {"error": class, "message": ..., "advice": ..., "offset": ...}

Any thread; after a fork, the child too.
"""

import logging
import os
import socket
import struct
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self, cast

import msgpack

from ....errors import DieselError, FormatError, ObjectStoreError
from ....format.entries import Bytes
from ....net.messages import parse_error
from ....settings import state_folder
from ....system import daemons
from ..store import ObjectInfo, ObjectStore, check_range

log = logging.getLogger("diesel.objects")

HELPER = (sys.executable, "-m", "diesel_fs.storage.objects.cloud.proxy_process")

START_S = 90.0
"""How long a helper may take to come up: it asks for the store first, and tries that again."""

ANSWER_TIMEOUT_S = 600.0
"""How long an answer may take. The helper has shorter deadlines of its own, by size: this is for
one that was stopped."""

NAMES_AT_ONCE = 10_000
"""Of a listing, in one answer."""

_FRAME = struct.Struct("<IQ")
_PARTS_AT_ONCE = 64  # in one system call
_LOG = "buckets.log"


class HelperDisconnected(Exception):
    """Nobody is at the other end of a connection any more, or does not answer."""


def send_frame(to: socket.socket, head: object, payload: Sequence[Bytes] = ()) -> None:
    """Send a message. Raises Gone."""
    body: bytes = msgpack.packb(head)
    views = [memoryview(part).cast("B") for part in payload if len(part)]
    front = _FRAME.pack(len(body), sum(view.nbytes for view in views)) + body
    parts = [memoryview(front), *views]
    first = 0
    try:
        while first < len(parts):
            sent = to.sendmsg(parts[first : first + _PARTS_AT_ONCE])
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]
    except OSError as error:
        raise HelperDisconnected(str(error)) from error


def receive_frame(at: socket.socket, room: memoryview | None = None) -> tuple[object, memoryview]:
    """The head and the payload of a message; the payload in `room`, where it has just that size,
    else in memory of its own. Raises Gone."""
    body_bytes, total = _FRAME.unpack(_filled(at, memoryview(bytearray(_FRAME.size))))
    head: object = msgpack.unpackb(_filled(at, memoryview(bytearray(body_bytes))))
    if room is None or len(room) != total:
        room = memoryview(bytearray(total))
    return head, _filled(at, room)


def _filled(at: socket.socket, room: memoryview) -> memoryview:
    left = room
    try:
        while len(left):
            count = at.recv_into(left)
            if not count:
                raise HelperDisconnected("the connection has ended")
            left = left[count:]
    except OSError as error:
        raise HelperDisconnected(str(error)) from error
    return room


_Batch = list[str] | list[tuple[str, int, int]]


class _Open:
    """The sockets that a proxy holds."""

    def __init__(self, control: socket.socket | None) -> None:
        self.control = control
        self.idle: list[socket.socket] = []

    def close(self) -> None:
        """Let go of all: where nobody else holds the control, the helper ends. Repeatable."""
        for each in (*self.idle, *filter(None, [self.control])):
            each.close()
        self.control, self.idle = None, []


class CloudProxy(ObjectStore):
    """The store that a helper has open."""

    fork_safe = True

    def __init__(self, place: str, control: socket.socket, store_id: uuid.UUID) -> None:
        self.store_id = store_id
        self._place = place
        self._open = _Open(control)
        weakref.finalize(self, self._open.close)
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        _proxies.add(self)

    @classmethod
    def open(cls, place: str, *, create: bool = False) -> Self:
        """The store at `s3://bucket/prefix` (gs://, az:// likewise). Raises as `open_cloud`."""
        return cls(place, *_started(place, create=create))

    # Calls

    def _call(
        self, *call: object, payload: Sequence[Bytes] = (), room: memoryview | None = None
    ) -> tuple[object, memoryview]:
        """The value and the bytes that a call gives; where the helper has gone, another one is
        asked. Raises what the call raised."""
        try:
            return self._asked(call, payload, room)
        except HelperDisconnected:
            pass
        try:
            return self._asked(call, payload, room)
        except HelperDisconnected as gone:
            raise self._lost() from gone

    def _asked(
        self, call: Sequence[object], payload: Sequence[Bytes], room: memoryview | None
    ) -> tuple[object, memoryview]:
        """As `_call`, once. Raises Gone; then another helper is started for the next call."""
        control = self._helper()
        connection = None
        try:
            connection = self._taken(control)
            send_frame(connection, call, payload)
            answer, body = receive_frame(connection, room)
        except BaseException as error:  # a Ctrl-C, too: the rest of the answer is still to come
            if connection is not None:
                connection.close()
            if isinstance(error, HelperDisconnected):
                self._leave(control)
            raise
        self._give_back(connection, control)
        assert isinstance(answer, dict)
        if (found := parse_error(answer)) is not None:
            if isinstance(found, FormatError):
                found.offset = answer["offset"]
            raise found
        return answer["value"], body

    def _taken(self, control: socket.socket) -> socket.socket:
        """A connection of the caller's own to the helper behind `control`. Raises Gone."""
        with self._lock:
            if self._open.control is control and self._open.idle:
                return self._open.idle.pop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"+"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise HelperDisconnected(str(error)) from error
        ours.settimeout(ANSWER_TIMEOUT_S)
        self._all.add(ours)
        return ours

    def _give_back(self, connection: socket.socket, control: socket.socket) -> None:
        with self._lock:
            if self._open.control is control:
                self._open.idle.append(connection)
                return
        connection.close()  # its helper has gone meanwhile

    def _helper(self) -> socket.socket:
        """The control of the helper, which is started where there is none."""
        with self._lock:
            if self._open.control is None:
                made, store_id = _started(self._place, create=False)
                if store_id != self.store_id:
                    made.close()
                    raise ObjectStoreError(f"another store is at {self._place} now ({store_id})")
                self._open.control = made
            return self._open.control

    def _leave(self, control: socket.socket) -> None:
        """The helper behind `control` has gone."""
        with self._lock:
            if self._open.control is control:
                log.warning("the helper that speaks to %s has ended: another starts", self._place)
                self._open.close()

    def close_idle(self) -> None:
        with self._lock:
            self._open.close()

    def _lost(self) -> ObjectStoreError:
        return ObjectStoreError(
            f"the helper that speaks to {self._place} has ended", advice=f"its log is {_log_path()}"
        )

    def _forget(self) -> None:
        """Called in a forked child: the connections that there are belong to the parent."""
        self._lock = threading.Lock()
        self._open.idle = []
        for each in list(self._all):
            each.close()
        self._all = weakref.WeakSet()

    # The store

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Not sent again where a helper has gone: whether the object is there is unknown then."""
        try:
            self._asked(("put", name), parts, None)
        except HelperDisconnected as gone:
            raise self._lost() from gone

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        self._call("replace", name, payload=parts)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        _, found = self._call("get", name, start, length)
        whole = found.obj
        assert isinstance(whole, bytearray)
        return whole

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        room = memoryview(buffer).cast("B")
        check_range(name, start, len(room))
        self._call("get", name, start, len(room), room=room)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for batch in self._batches("list", prefix, after):
            yield from (ObjectInfo(*each) for each in cast("list[tuple[str, int, int]]", batch))

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        for batch in self._batches("names", prefix, after):
            yield from cast("list[str]", batch)

    def _batches(self, listing: str, prefix: str, after: str) -> Iterator[_Batch]:
        """The answers of the helper to one listing, each of `NAMES_AT_ONCE` items but the last."""
        while True:
            value, _ = self._call(listing, prefix, after)
            batch = cast("_Batch", value)
            yield batch
            if len(batch) < NAMES_AT_ONCE:
                return
            last = batch[-1]
            after = last if isinstance(last, str) else last[0]

    def stat(self, name: str) -> ObjectInfo:
        value, _ = self._call("stat", name)
        return ObjectInfo(*cast("tuple[str, int, int]", value))

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def foreign(self, prefix: str = "") -> Iterator[str]:
        value, _ = self._call("foreign", prefix)
        return iter(cast("list[str]", value))


def _started(place: str, *, create: bool) -> tuple[socket.socket, uuid.UUID]:
    """Our end of a new helper's control, and the store that it has opened. Raises DieselError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*HELPER, place, str(theirs.fileno()), *["--create"] * create]
    with theirs, daemons.log_file(_log_path()) as file:
        start = file.tell()
        try:
            said = daemons.start(
                command, b"", file, log, daemon_name=f"the helper that speaks to {place}",
                deadline_s=START_S, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        except BaseException as error:
            ours.close()
            if isinstance(error, DieselError):
                daemons.add_log_tail(error, file, start)
            raise
    return ours, uuid.UUID(hex=str(said["store"]))


def _log_path() -> Path:
    """Where helpers log; nowhere for a user without a home."""
    try:
        return state_folder() / _LOG
    except DieselError:
        return Path(os.devnull)


_proxies: "weakref.WeakSet[CloudProxy]" = weakref.WeakSet()


def _forget_all() -> None:
    for proxy in list(_proxies):
        proxy._forget()


os.register_at_fork(after_in_child=_forget_all)
