"""An object store in a bucket for processes that may fork: a helper process speaks to the bucket.

`cloud/__init__.py` says why. This process starts a **helper** (`proxy_process.py`), and forwards
each call of `ObjectStore` to it. Over a socket pair, the **control** socket, this process and each
of its forked children send the helper one end of a new connection, which serves one call at a time.
So children share their parent's helper, but none of its connections. The helper ends when no
process holds our end of the control socket. A process that notices that its helper was killed
starts another.

A message is a frame: the lengths of its head and of its payload (u32, u64), the head (msgpack), the
payload.

    to the helper      [method, arguments...]; the payload is the content of a put
    from the helper    {"value": ...}; the payload is the bytes of a read
                       {"error": class, "message": ..., "advice": ..., "offset": ...}

Any thread, and any forked child.
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
from ....system.vectored_io import byte_views, write_all
from ..store import Housekeeping, ObjectInfo, ObjectStore, check_range

log = logging.getLogger("diesel.objects")

HELPER = (sys.executable, "-m", "diesel_fs.storage.objects.cloud.proxy_process")

START_S = 90.0
"""A helper first opens the store, with retries."""

ANSWER_TIMEOUT_S = 600.0
"""For a helper that was stopped (SIGSTOP): its own deadlines, which depend on the size, are
shorter."""

NAMES_AT_ONCE = 10_000  # in one answer to a listing

_FRAME = struct.Struct("<IQ")
_LOG = "buckets.log"


class HelperDisconnected(Exception):
    """The other end of a connection is closed, or does not answer in time."""


def send_frame(to: socket.socket, head: object, payload: Sequence[Bytes] = ()) -> None:
    body: bytes = msgpack.packb(head)
    views = byte_views(payload)
    front = _FRAME.pack(len(body), sum(map(len, views))) + body
    try:
        write_all(to.sendmsg, [memoryview(front), *views])
    except OSError as error:
        raise HelperDisconnected(str(error)) from error


def receive_frame(at: socket.socket, room: memoryview | None = None) -> tuple[object, memoryview]:
    """A message's head and payload. The payload is in `room` if that has exactly its size,
    otherwise in new memory. Raises HelperDisconnected."""
    body_bytes, total = _FRAME.unpack(_receive_exactly(at, memoryview(bytearray(_FRAME.size))))
    head: object = msgpack.unpackb(_receive_exactly(at, memoryview(bytearray(body_bytes))))
    if room is None or len(room) != total:
        room = memoryview(bytearray(total))
    return head, _receive_exactly(at, room)


def _receive_exactly(at: socket.socket, room: memoryview) -> memoryview:
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
"""Names, or (name, bytes, modified_ns)."""


class _Sockets:
    def __init__(self, control: socket.socket | None) -> None:
        self.control = control
        self.idle: list[socket.socket] = []

    def close(self) -> None:
        """The helper then ends, unless another process holds the control socket. Repeatable."""
        for each in (*self.idle, *filter(None, [self.control])):
            each.close()
        self.control, self.idle = None, []


class CloudProxy(ObjectStore):
    fork_safe = True

    def __init__(self, url: str, control: socket.socket, store_id: uuid.UUID) -> None:
        """Callers use `open`."""
        self.store_id = store_id
        self._url = url
        self._sockets = _Sockets(control)
        weakref.finalize(self, self._sockets.close)
        self._lock = threading.Lock()
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        _proxies.add(self)

    @classmethod
    def open(cls, url: str, *, create: bool = False) -> Self:
        """Raises as `open_cloud`."""
        return cls(url, *_start_helper(url, create=create))

    # Calls

    def _call(
        self, *call: object, payload: Sequence[Bytes] = (), room: memoryview | None = None
    ) -> tuple[object, memoryview]:
        """Returns the value and the bytes of the answer. If the helper has ended, the call is
        repeated once with a new one. Raises the error of the call."""
        try:
            return self._call_once(call, payload, room)
        except HelperDisconnected:
            pass
        try:
            return self._call_once(call, payload, room)
        except HelperDisconnected as error:
            raise self._helper_ended() from error

    def _call_once(
        self, call: Sequence[object], payload: Sequence[Bytes], room: memoryview | None
    ) -> tuple[object, memoryview]:
        """Raises HelperDisconnected; the next call then starts another helper."""
        control = self._control()
        connection = None
        try:
            connection = self._take_connection(control)
            send_frame(connection, call, payload)
            answer, body = receive_frame(connection, room)
        except BaseException as error:  # a Ctrl-C, too: the rest of the answer would come next
            if connection is not None:
                connection.close()
            if isinstance(error, HelperDisconnected):
                self._drop_helper(control)
            raise
        self._give_back(connection, control)
        assert isinstance(answer, dict)
        if (found := parse_error(answer)) is not None:
            if isinstance(found, FormatError):
                found.offset = answer["offset"]
            raise found
        return answer["value"], body

    def _take_connection(self, control: socket.socket) -> socket.socket:
        with self._lock:
            if self._sockets.control is control and self._sockets.idle:
                return self._sockets.idle.pop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"+"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise HelperDisconnected(str(error)) from error
        ours.settimeout(ANSWER_TIMEOUT_S)
        self._connections.add(ours)
        return ours

    def _give_back(self, connection: socket.socket, control: socket.socket) -> None:
        with self._lock:
            if self._sockets.control is control:
                self._sockets.idle.append(connection)
                return
        connection.close()  # its helper has ended meanwhile

    def _control(self) -> socket.socket:
        with self._lock:
            if self._sockets.control is None:
                control, store_id = _start_helper(self._url, create=False)
                if store_id != self.store_id:
                    control.close()
                    raise ObjectStoreError(f"another store is at {self._url} now ({store_id})")
                self._sockets.control = control
            return self._sockets.control

    def _drop_helper(self, control: socket.socket) -> None:
        with self._lock:
            if self._sockets.control is control:
                log.warning(
                    "the helper process for %s has ended; the next call starts another", self._url
                )
                self._sockets.close()

    def _helper_ended(self) -> ObjectStoreError:
        return ObjectStoreError(
            f"the helper process for {self._url} has ended", advice=f"its log is {_log_path()}"
        )

    def _forget_parents_connections(self) -> None:
        """In a forked child: the connections belong to the parent."""
        self._lock = threading.Lock()
        self._sockets.idle = []
        for each in list(self._connections):
            each.close()
        self._connections = weakref.WeakSet()

    # The store

    @property
    def housekeeping(self) -> Housekeeping:
        return _ProxyHousekeeping(self)

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Not repeated if the helper ends: it is then unknown whether the object was written."""
        try:
            self._call_once(("put", name), parts, None)
        except HelperDisconnected as error:
            raise self._helper_ended() from error

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

    def _batches(self, listing: str, prefix: str, after: str) -> Iterator[_Batch]:
        """Each answer but the last has `NAMES_AT_ONCE` items."""
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


class _ProxyHousekeeping(Housekeeping):
    _store: CloudProxy

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        for batch in self._store._batches("names", prefix, after):
            yield from cast("list[str]", batch)

    def foreign(self, prefix: str = "") -> Iterator[str]:
        value, _ = self._store._call("foreign", prefix)
        return iter(cast("list[str]", value))

    def close_idle(self) -> None:
        with self._store._lock:
            self._store._sockets.close()


def _start_helper(url: str, *, create: bool) -> tuple[socket.socket, uuid.UUID]:
    """Returns our end of the control socket, and the store's UUID. Raises DieselError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*HELPER, url, str(theirs.fileno()), *["--create"] * create]
    with theirs, daemons.log_file(_log_path()) as file:
        start = file.tell()
        try:
            ready = daemons.start(
                command, b"", file, log, daemon_name=f"the helper process for {url}",
                deadline_s=START_S, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        except BaseException as error:
            ours.close()
            if isinstance(error, DieselError):
                daemons.add_log_tail(error, file, start)
            raise
    return ours, uuid.UUID(hex=str(ready["store"]))


def _log_path() -> Path:
    """The log of all helpers; /dev/null for a user without a home folder."""
    try:
        return state_folder() / _LOG
    except DieselError:
        return Path(os.devnull)


_proxies: "weakref.WeakSet[CloudProxy]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for proxy in list(_proxies):
        proxy._forget_parents_connections()


os.register_at_fork(after_in_child=_after_fork_in_child)
