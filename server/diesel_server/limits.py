"""What a worker takes on at once: connections, requests, threads, bytes; and for how long.

Owned here: the numbers and their reasons, and the counting. Not owned: what is said to whom is one
too many (`listener.py`, `connection.py`). All limits are of one worker process.

Concurrency: trio; nothing here is touched by other threads.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

import numpy as np
import trio

from diesel_fs.format.entries import CHUNK_RANGE
from diesel_fs.net.frames import REQUEST_LIMITS
from diesel_fs.net.messages import Message

GREETING_S = 5.0
LOGIN_S = 5.0
"""For TLS and the greeting, and then for the login: both fit two packets."""

AUTHENTICATE_S = 4.0
"""For looking the account up; a client gives up after 10 s."""

IDLE_S = 300.0
"""Without any request; clients close connections that they do not use sooner."""

FRAME_S = 10.0
BYTES_PER_S_MIN = 256 << 10
"""A frame takes at most `FRAME_S` and what it takes at this rate; likewise an answer."""

HEARTBEAT_S = 1.0
"""Between a worker's signs of life."""

DRAIN_S = 30.0
"""For what is under way when the server is told to stop."""

BUDGET_WAIT_S = 10.0
THREAD_WAIT_S = 10.0
"""Who waits longer for memory or a thread is told to come again."""

RETRY_AFTER_S = 1.0

CONNECTIONS_MAX = 8192
"""Some 20 KB each; fewer where the process may not open so many files."""

GREETING_MAX = 1024
"""Connections without a login, from everywhere."""

GREETING_PER_ADDRESS_MAX = 256
"""A node's processes all start at once, and are through within milliseconds. Where there are more,
one has to go, by lot: so who knocks all the time does not keep out those who have a key."""

REFUSING_S = 2.0
REFUSING_MAX = 64
"""Connections that are being told that they are too many; others are closed without a word."""

FILES_BESIDE = 256
"""Descriptors that are left to stores, caches and logs."""

REQUESTS_PER_CONNECTION_MAX = 64
"""More of one connection are not read before one of these is over."""

REQUESTS_MAX = 2048
REQUESTS_PER_USER_MAX = REQUESTS_MAX * 3 // 4
"""Some are left for others."""

BUDGET_BYTES = 2 * (REQUEST_LIMITS.payload_bytes + REQUEST_LIMITS.head_bytes)
"""For payloads under way: the largest of one user leaves room for those of others."""

SHARE_BYTES = BUDGET_BYTES // 2
"""What one user may hold of it."""

SMALL_BYTES = 64 << 10
"""Not worth counting: requests are counted, too."""

_HEAD_FACTOR = 6  # what a head of many small items takes as objects
_PIECE_BYTES = 16 << 20  # of a snapshot: one is sent, one is made
_LIST_BYTES = 8 << 20  # of a list: its names and columns, and the frame that they are copied into
_PATH_BYTES = 96  # of a path in `stat`: itself and its columns, likewise
_PAYLOAD_MAX = REQUEST_LIMITS.payload_bytes


def head_memory(head_bytes: int) -> int:
    """What a head may take in memory."""
    return head_bytes * _HEAD_FACTOR


def answer_bytes(message: Message) -> int:
    """What the answer to a request may take in memory, from the request alone."""
    if message.get("do") == "snapshot":
        return _PIECE_BYTES
    if message.get("do") == "list":
        return _LIST_BYTES
    paths = message.get("paths")
    if message.get("do") == "stat" and type(paths) is bytes:
        return _PATH_BYTES * (paths.count(b"\0") + 1)
    parts = message.get("parts")
    if message.get("do") != "read" or type(parts) is not bytes or len(parts) % CHUNK_RANGE.itemsize:
        return 0
    size: int = np.frombuffer(parts, CHUNK_RANGE)["size"].sum(dtype=np.int64).item()
    return min(_PAYLOAD_MAX, size)


def network_of(address: str) -> str:
    """What stands for somebody's network: an IPv4 address, 64 bits of an IPv6 address."""
    try:
        found = ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
    return str(found)


@dataclass(slots=True)
class _Waiting:
    owner: str
    size: int
    granted: trio.Event = field(default_factory=trio.Event)


class FairByteBudget:
    """Bytes that may be held at once, in all and by one owner. First come, first served, except
    that who has had its share keeps nobody else waiting."""

    def __init__(self, most: int = BUDGET_BYTES, share: int = SHARE_BYTES) -> None:
        self._most = most
        self._share = share
        self.held = 0
        self._held_by: Counter[str] = Counter()
        self._queue: deque[_Waiting] = deque()

    async def acquire(self, owner: str, size: int, seconds: float) -> bool:
        """Take `size` bytes as soon as they are there; False where that takes too long."""
        if size > self._share:
            return False
        if not self._queue and self._fits(owner, size):
            self._grant(owner, size)
            return True
        waiting = _Waiting(owner, size)
        self._queue.append(waiting)
        self._serve()  # those before it may be waiting for their own shares
        try:
            with trio.move_on_after(seconds):
                await waiting.granted.wait()
                return True
        except BaseException:
            if waiting.granted.is_set():
                self.release(owner, size)
            raise
        finally:
            if not waiting.granted.is_set():
                self._queue.remove(waiting)
                self._serve()
        return waiting.granted.is_set()

    def release(self, owner: str, size: int) -> None:
        """Give bytes back."""
        self.held -= size
        self._held_by[owner] -= size
        if self._held_by[owner] <= 0:
            del self._held_by[owner]
        self._serve()

    def _fits(self, owner: str, size: int) -> bool:
        return self.held + size <= self._most and self._held_by[owner] + size <= self._share

    def _grant(self, owner: str, size: int) -> None:
        self.held += size
        self._held_by[owner] += size

    def _serve(self) -> None:
        for waiting in list(self._queue):
            if self.held + waiting.size > self._most:
                return
            if self._fits(waiting.owner, waiting.size):
                self._queue.remove(waiting)
                self._grant(waiting.owner, waiting.size)
                waiting.granted.set()


class LimitReached(Exception):
    """One too many: the sentence for the client, and the reason for the metrics."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class ConnectionLimits:
    """How many connections there are: in all, without a login by network, with one by user."""

    def __init__(
        self,
        most: int = CONNECTIONS_MAX,
        *,
        greeting: int = GREETING_MAX,
        per_address: int = GREETING_PER_ADDRESS_MAX,
    ) -> None:
        self.most = most
        self.per_user = max(1, most * 3 // 4)  # some room is left for others
        self._greeting_most = greeting
        self._per_address = per_address
        self.all = 0
        self._greeting: dict[object, tuple[str, Callable[[], None]]] = {}
        self._by_user: Counter[str] = Counter()

    @contextmanager
    def connection(self) -> Iterator[None]:
        """One connection, from its beginning to its end. Raises LimitReached."""
        if self.all >= self.most:
            raise LimitReached(
                "connections", f"it has all {self.most} connections that it can have"
            )
        self.all += 1
        try:
            yield
        finally:
            self.all -= 1

    @contextmanager
    def greeting(self, network: str, leave: Callable[[], None]) -> Iterator[None]:
        """The time before a connection's login is done. It may be told to `leave`, since where
        there are too many one goes, by lot: of this network, or else of the one that has most."""
        by_network = Counter(each for each, _ in self._greeting.values())
        if by_network[network] >= self._per_address:
            self._dismiss(network)
        elif len(self._greeting) >= self._greeting_most:
            self._dismiss(by_network.most_common(1)[0][0])
        own = object()
        self._greeting[own] = network, leave
        try:
            yield
        finally:
            self._greeting.pop(own, None)

    def _dismiss(self, network: str) -> None:
        of_it = [key for key, (each, _) in self._greeting.items() if each == network]
        self._greeting.pop(random.choice(of_it))[1]()  # noqa: S311  # no secret hangs on it

    @contextmanager
    def user(self, name: str) -> Iterator[None]:
        """A user's connection, from its login on. Raises LimitReached."""
        if self._by_user[name] >= self.per_user:
            raise LimitReached("user", f"you have {self.per_user} connections, which is the limit")
        self._by_user[name] += 1
        try:
            yield
        finally:
            less(self._by_user, name)


def less(counts: Counter[str], key: str) -> None:
    """One less, and none is not there."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
