"""The limits of one worker process, with their reasons: connections, requests, bytes, and times.

No class here has a lock: all but `RateLimiter` belong to the event loop.
"""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

import numpy as np
import trio

from diesel_fs.format.entries import CHUNK_RANGE
from diesel_fs.net.frames import REQUEST_LIMITS
from diesel_fs.net.messages import Message

GREETING_S = 5.0
LOGIN_S = 5.0
"""Time for TLS and the greeting, and again for the login: each takes two packets at most."""

AUTHENTICATE_S = 4.0
"""A client gives up after 10 s."""

IDLE_S = 300.0
"""Clients close unused connections sooner."""

FRAME_S = 10.0
BYTES_PER_S_MIN = 256 << 10
"""A frame, in either direction, takes at most `FRAME_S` plus its size at this rate."""

HEARTBEAT_S = 1.0
"""The pause between two beats by which a worker shows the supervisor that its loop runs."""

DRAIN_S = 30.0
"""Time for requests under way when the server stops."""

BUDGET_WAIT_S = 10.0
THREAD_WAIT_S = 10.0
"""After this wait for memory, or for a thread, a request is refused with `RETRY_AFTER_S`."""

RETRY_AFTER_S = 1.0

CONNECTIONS_MAX = 8192
"""Each takes some 20 KB. A process that may open fewer files takes fewer."""

GREETING_MAX = 1024
"""Connections before their login, from everywhere."""

GREETING_PER_NETWORK_MAX = 256
"""Connections of one network before their login: enough for the processes of a node, which start at
once and log in within milliseconds. Beyond it, a random one of them is closed, so that a client
that connects all the time does not keep out users with a key."""

REFUSING_S = 2.0

REFUSING_MAX = 64
"""Beyond this number at once, clients are closed without a sentence."""

FILES_RESERVED = 256
"""These descriptors are for stores, caches and logs."""

REQUESTS_PER_CONNECTION_MAX = 64
"""With more requests under way, a connection is not read until one has ended."""

REQUESTS_MAX = 2048
REQUESTS_PER_USER_MAX = REQUESTS_MAX * 3 // 4
"""Requests under way, in all and of one user: the rest is left to other users."""

BUDGET_BYTES = 2 * (REQUEST_LIMITS.payload_bytes + REQUEST_LIMITS.head_bytes)
"""Memory for one user's largest request, and as much for the others."""

SHARE_BYTES = BUDGET_BYTES // 2

RATE_KEYS_MAX = 4096

SMALL_BYTES = 64 << 10
"""Sizes up to this are not taken from the budget: the number of requests is limited, too."""

HEAD_FACTOR = 6
"""Python objects of a head with many small items take this multiple of its bytes."""

_PIECE_BYTES = 16 << 20  # a snapshot: one piece is being sent, one made
_LIST_BYTES = 8 << 20  # a list: names and columns, and their frame
_PATH_BYTES = 96  # a path in `stat`: the path and its columns, and their frame
_PAYLOAD_MAX = REQUEST_LIMITS.payload_bytes


def answer_bytes(message: Message) -> int:
    """Estimates from the request alone."""
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
    """Returns an IPv4 address, or the first 64 bits of an IPv6 address. Another text stays as it
    is."""
    try:
        found = ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
    return str(found)


class Rate(NamedTuple):
    """Allows `burst` events at once, and then one every `each_s` seconds."""

    burst: int
    each_s: float


class RateLimiter:
    """Counts events by key. Beyond `keys_max` keys, the one silent for longest is forgotten."""

    def __init__(
        self, rate: Rate, clock: Callable[[], float], keys_max: int = RATE_KEYS_MAX
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._keys_max = keys_max
        self._free_s: OrderedDict[Hashable, float] = OrderedDict()  # when the burst is free again

    def is_full(self, key: Hashable) -> bool:
        burst_s = self._rate.burst * self._rate.each_s
        return self._free_s.get(key, 0) - self._clock() > burst_s - self._rate.each_s

    def add(self, key: Hashable) -> None:
        now_s = self._clock()
        self._free_s[key] = max(now_s, self._free_s.pop(key, now_s)) + self._rate.each_s
        if len(self._free_s) > self._keys_max:
            self._free_s.popitem(last=False)


@dataclass(slots=True)
class _WaitingRequest:
    owner: str
    size: int
    granted: trio.Event = field(default_factory=trio.Event)


class FairByteBudget:
    """Memory for requests, with a limit for all and one for each owner (a user). First come, first
    served; but an owner that waits only for its own share does not keep others waiting."""

    def __init__(self, most: int = BUDGET_BYTES, share: int = SHARE_BYTES) -> None:
        self._most = most
        self._share = share
        self.held = 0
        self._held_by: Counter[str] = Counter()
        self._queue: deque[_WaitingRequest] = deque()

    async def acquire(self, owner: str, size: int, seconds: float) -> bool:
        """The caller must `release` the bytes. Returns False if they were not free within
        `seconds`, or if `size` exceeds an owner's share."""
        if size > self._share:
            return False
        if not self._queue and self._fits(owner, size):
            self._grant(owner, size)
            return True
        waiting = _WaitingRequest(owner, size)
        self._queue.append(waiting)
        self._serve()  # all requests before this one may be waiting only for their owners' shares
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
    """`sentence` is for the client, `reason` for the metrics."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class ConnectionLimits:
    """Counts all connections, those before their login by network, and those after it by user."""

    def __init__(
        self,
        most: int = CONNECTIONS_MAX,
        *,
        greeting: int = GREETING_MAX,
        per_network: int = GREETING_PER_NETWORK_MAX,
    ) -> None:
        self.most = most
        self.per_user = max(1, most * 3 // 4)
        self._greeting_most = greeting
        self._per_network = per_network
        self.all = 0
        self._greeting: dict[object, tuple[str, Callable[[], None]]] = {}
        self._by_user: Counter[str] = Counter()

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Held while a connection lasts. Raises LimitReached."""
        if self.all >= self.most:
            raise LimitReached("connections", f"it has {self.most} connections, which is its limit")
        self.all += 1
        try:
            yield
        finally:
            self.all -= 1

    @contextmanager
    def greeting(self, network: str, leave: Callable[[], None]) -> Iterator[None]:
        """Held until a connection has logged in. Beyond a limit, calls `leave` of a random one of
        them, which closes it: of this network if that has too many, otherwise of the network with
        most."""
        by_network = Counter(each for each, _ in self._greeting.values())
        if by_network[network] >= self._per_network:
            self._dismiss(network)
        elif len(self._greeting) >= self._greeting_most:
            self._dismiss(by_network.most_common(1)[0][0])
        key = object()
        self._greeting[key] = network, leave
        try:
            yield
        finally:
            self._greeting.pop(key, None)

    def _dismiss(self, network: str) -> None:
        keys = [key for key, (each, _) in self._greeting.items() if each == network]
        _, leave = self._greeting.pop(random.choice(keys))  # noqa: S311  # it needs no secrecy
        leave()

    @contextmanager
    def user(self, name: str) -> Iterator[None]:
        """Held from a login to the end of the connection. Raises LimitReached."""
        if self._by_user[name] >= self.per_user:
            raise LimitReached("user", f"you have {self.per_user} connections, which is the limit")
        self._by_user[name] += 1
        try:
            yield
        finally:
            count_down(self._by_user, name)


def count_down(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
