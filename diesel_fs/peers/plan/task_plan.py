"""The plan of a task: which files all readers of all nodes will read, as one master knows it
(`PEERS.md`, section 5).

`TaskPlan` checks the messages of mounts and masters, makes a `ChunkFuture` of them for the node's
cache, and has the cache follow the readers' positions.

The future is made in a thread, if streams were announced or have ended. Streams that stand still
(`STILL_S`) are left out: a validation set that is read later, or a killed job. All else runs in the
master's trio loop; only `run` waits. A wrong message can cost time, but no wrong bytes: readers get
no bytes from here.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import trio

from ...errors import DieselError
from ...format.snapshot.reader import Snapshot
from ...orders.computed import ComputedOrder
from ...orders.plan import EPOCH_NUMBER_MAX, PLAN_ENTRIES_MAX, Entries
from ..node.chunk_future import ChunkFuture
from ..node.node_cache import NodeCache
from .future_build import ChunksOfEntries, FutureBuild, Key, PlannedPart
from .messages import (
    DAMAGED,
    KNOWN_STREAMS_MAX,
    NO_ROOM,
    REFUSED,
    TAKEN,
    UNKNOWN,
    ChunkValues,
    HeldChunks,
    OrderPiece,
    PlannedEpoch,
    PlannedStream,
    Positions,
    StreamEnd,
    order_digest,
    parse_plan,
)
from .publisher import Announcement

log = logging.getLogger("diesel.task")

EXCHANGE_S = 1.0
"""How often masters exchange positions."""

APPLY_S = 0.2
"""How long positions and streams are collected before the cache learns of them."""

STILL_S = 60.0
"""A stream that stands still for this time, while others go on, is left out of the future."""

PARTIAL_ORDERS_MAX = 4
"""Incomplete orders of one sender; a further one replaces the oldest."""

WHOLE_ORDERS_MIN = 8
"""Orders of a whole job that are computed in any case; more only if they fit in the limit of
entries."""

UNUSED_ORDER_S = 60.0
"""How long an order is kept until a stream uses it."""

VALUED_MAX = 256
"""Tables of `ChunkValues`, one for each client of any node; further ones are refused."""

Values = npt.NDArray[np.float32]


@dataclass(slots=True)
class _PartialOrder:
    length: int
    pieces: list[Entries]
    entries: int = 0


@dataclass(slots=True)
class _Order:
    """`since_s`: when it came, or was last used."""

    entries: Entries
    since_s: float


@dataclass(slots=True)
class _KnownStream:
    """`moved_s`: when its reader last went on."""

    stream: PlannedStream
    moved_s: float

    @property
    def epochs(self) -> tuple[PlannedEpoch, ...]:
        """Adds one epoch if its order can be computed."""
        epochs = self.stream.epochs
        last = epochs[-1] if epochs else None
        following = None if last is None or last.computed is None else last.computed.following
        if last is None or following is None or last.number >= EPOCH_NUMBER_MAX:
            return epochs
        return (*epochs, PlannedEpoch(last.number + 1, last.length, computed=following))

    @property
    def position(self) -> int:
        """The position from the start of the first epoch."""
        before = 0
        for epoch in self.epochs:
            if epoch.number == self.stream.at_epoch:
                return before + min(self.stream.position, epoch.length)
            if epoch.number > self.stream.at_epoch:
                return before
            before += epoch.length
        return before


class TaskPlan:
    def __init__(
        self,
        snapshot: Snapshot,
        rank: int,
        cache: NodeCache,
        *,
        entries_max: int = PLAN_ENTRIES_MAX,
    ) -> None:
        """`entries_max` limits the reads of all streams together, and the entries of all
        orders."""
        self._rank = rank
        self._cache = cache
        self._entries_max = entries_max
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[int, int]] = set()
        self._wake = trio.Event()
        self.switch_version(snapshot)

    def switch_version(self, snapshot: Snapshot) -> None:
        """Forget all: orders of the former version mean nothing."""
        self._snapshot = snapshot
        self._chunks: ChunksOfEntries | None = None
        self.known = trio.Event()
        """Set while any stream is known: without one, masters exchange nothing."""

        self._streams: dict[Key, _KnownStream] = {}
        self._orders: dict[bytes, _Order] = {}
        self._partial: dict[tuple[int, str], dict[bytes, _PartialOrder]] = {}
        self._computed: dict[ComputedOrder, Entries] = {}
        self._held: dict[int, npt.NDArray[np.bool_]] = {}
        self._values: dict[tuple[int, int], Values] = {}
        self._values_changed = False
        self._planned: list[PlannedPart] = []
        self._is_dirty = self._held_changed = False
        self._has_future = False
        self._logged.clear()
        self._wake.set()

    # Messages from masters and clients

    def take(self, rank: int, body: bytes, *, client: int = 0) -> int:
        """Take over a message from the master of node `rank`, or from this node's client process
        `client`, if not 0. Returns the answer's status (`messages.py`)."""
        try:
            message = parse_plan(body, len(self._snapshot), self._snapshot.chunk_count)
        except DieselError as error:
            return self._refuse(rank, DAMAGED, error.message)
        match message:
            case OrderPiece():
                return self._take_piece(rank, str(client), message)
            case PlannedStream():
                key = _key_of(client, message.key)
                return self._take_stream(rank, replace(message, key=key))
            case StreamEnd(key):
                ended = (rank, _key_of(client, key))
                self._forget_streams([ended] if ended in self._streams else [])
            case Positions(by_key):
                return self._take_positions(
                    {(rank, _key_of(client, key)): at for key, at in by_key.items()}
                )
            case HeldChunks(first, held):
                mine = self._held.setdefault(rank, np.zeros(self._snapshot.chunk_count, np.bool_))
                mine[first : first + len(held)] = held
                self._held_changed = True
            case ChunkValues(first, values):
                if (rank, client) not in self._values and len(self._values) >= VALUED_MAX:
                    return self._refuse(rank, NO_ROOM, "one more table of values")
                count = self._snapshot.chunk_count
                table = self._values.setdefault((rank, client), np.zeros(count, np.float32))
                table[first : first + len(values)] = values
                self._values_changed = True
        self._wake.set()
        return TAKEN

    def forget(self, rank: int) -> None:
        """The node's master has left. Its next master announces its streams again."""
        self._forget_streams([key for key in self._streams if key[0] == rank])
        self._partial = {key: each for key, each in self._partial.items() if key[0] != rank}
        self._held_changed |= self._held.pop(rank, None) is not None
        self._forget_values([key for key in self._values if key[0] == rank])
        self._wake.set()

    def forget_client(self, client: int) -> None:
        """The client process has ended."""
        prefix = _key_of(client, "")
        mine = [key for key in self._streams if key[0] == self._rank and key[1].startswith(prefix)]
        self._forget_streams(mine)
        self._partial.pop((self._rank, str(client)), None)
        self._forget_values([key for key in self._values if key == (self._rank, client)])
        self._wake.set()

    def _forget_values(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            del self._values[key]
        self._values_changed |= bool(keys)

    def _forget_streams(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._streams[key]
        if keys:
            self._is_dirty = True
            self._wake.set()
        if not self._streams and self.known.is_set():
            self.known = trio.Event()

    def _take_piece(self, rank: int, client: str, piece: OrderPiece) -> int:
        if piece.digest in self._orders:
            self._orders[piece.digest].since_s = trio.current_time()
            return TAKEN
        partial = self._partial.setdefault((rank, client), {})
        order = partial.get(piece.digest)
        if not piece.first:
            self._drop_unused_orders()
            if self._order_entries() + piece.length > self._entries_max:
                return self._refuse(rank, NO_ROOM, f"an order of {piece.length:,} files")
            order = partial[piece.digest] = _PartialOrder(piece.length, [])
            while len(partial) > PARTIAL_ORDERS_MAX:
                del partial[next(iter(partial))]
        if order is None or (order.length, order.entries) != (piece.length, piece.first):
            partial.pop(piece.digest, None)
            return UNKNOWN  # a piece is missing
        order.pieces.append(piece.entries)
        order.entries += len(piece.entries)
        if order.entries == order.length:
            del partial[piece.digest]
            entries = np.concatenate(order.pieces)
            if order_digest(entries) != piece.digest:
                return self._refuse(rank, DAMAGED, "an order that does not match its digest")
            self._orders[piece.digest] = _Order(entries, trio.current_time())
        return TAKEN

    def _take_stream(self, rank: int, stream: PlannedStream) -> int:
        own, key = self._snapshot, (rank, stream.key)
        if (stream.identity, stream.version) != (own.identity, own.version):
            return self._refuse(
                rank, REFUSED,
                f"orders of version {stream.version} of {stream.identity}; the task reads version"
                f" {own.version} of {own.identity}",
            )  # fmt: skip
        orders = {each.digest: self._orders.get(each.digest) for each in _explicit(stream)}
        if None in orders.values():
            return UNKNOWN
        for epoch in _explicit(stream):
            if len(self._orders[epoch.digest].entries) != epoch.length:
                return self._refuse(rank, DAMAGED, "an order of another length")
        known = self._streams.get(key)
        others = sum(_length(each) for other, each in self._streams.items() if other != key)
        new = _KnownStream(stream, trio.current_time())
        if self._whole_orders(new, key) > max(
            self._entries_max // max(len(own), 1), WHOLE_ORDERS_MIN
        ):
            return self._refuse(rank, NO_ROOM, "one more order that has to be computed")
        of_rank = sum(other[0] == rank for other in self._streams)
        if others + _length(new) > self._entries_max or (
            known is None and of_rank >= KNOWN_STREAMS_MAX
        ):
            return self._refuse(rank, NO_ROOM, f"streams of {_length(new):,} reads")
        self._streams[key] = new
        self._is_dirty |= known is None or known.stream.epochs != stream.epochs
        self._drop_unused_orders()
        self.known.set()
        self._wake.set()
        return TAKEN

    def _take_positions(self, at: dict[Key, tuple[int, int]]) -> int:
        status, now_s = TAKEN, trio.current_time()
        for key, (epoch, position) in at.items():
            known = self._streams.get(key)
            if known is None:
                status = UNKNOWN
                continue
            known.stream = replace(known.stream, at_epoch=epoch, position=position)
            known.moved_s = now_s
        self._wake.set()
        return status

    def _refuse(self, rank: int, status: int, what: str) -> int:
        """Log the first refused message of a kind from a node; returns `status`."""
        self._counts["refused"] += 1
        if (rank, status) not in self._logged:
            self._logged.add((rank, status))
            log.warning("node %d announced %s: its reads are not planned for", rank, what)
        return status

    def _whole_orders(self, new: _KnownStream, key: Key) -> int:
        streams = [new, *(each for other, each in self._streams.items() if other != key)]
        epochs = [epoch for each in streams for epoch in each.epochs]
        return len({each.computed.whole for each in epochs if each.computed is not None})

    def _order_entries(self) -> int:
        """Counts incomplete orders, too."""
        partial = sum(each.length for some in self._partial.values() for each in some.values())
        return partial + sum(len(each.entries) for each in self._orders.values())

    def _drop_unused_orders(self) -> None:
        """Orders that came lately stay, as their stream may be coming."""
        used = {each.digest for known in self._streams.values() for each in known.stream.epochs}
        now_s = trio.current_time()
        for digest in [*self._orders]:
            if digest in used:
                self._orders[digest].since_s = now_s
            elif now_s > self._orders[digest].since_s + UNUSED_ORDER_S:
                del self._orders[digest]

    # Publishing

    def announcement(self) -> Announcement:
        mine = {key: each.stream for (rank, key), each in self._streams.items()
                if rank == self._rank}  # fmt: skip
        values = self._sum_of_values([key for key in self._values if key[0] == self._rank])
        held = self._cache.held if self.known.is_set() else None
        return Announcement(mine, self._order_of, values, held)

    def _sum_of_values(self, keys: Collection[tuple[int, int]]) -> Values | None:
        if not keys:
            return None
        total: Values = np.sum([self._values[key] for key in keys], axis=0, dtype=np.float32)
        return total

    def _order_of(self, epoch: PlannedEpoch) -> Entries | None:
        order = self._orders.get(epoch.digest)
        return None if order is None else order.entries

    # The future

    async def run(self) -> None:
        """Pass the plan on to the node's cache, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await trio.sleep(APPLY_S)
            if self._held_changed:
                self._held_changed = False
                held = np.zeros(self._snapshot.chunk_count, np.bool_)
                for each in self._held.values():
                    held |= each
                self._cache.set_held_elsewhere(held)
            if not self._cache.uses_future:
                continue
            if self._values_changed:
                self._values_changed = False
                self._cache.set_values(self._sum_of_values(self._values.keys()))
            moving = self._moving()
            if self._is_dirty or [*moving] != [each.key for each in self._planned]:
                await self._build(moving)
            self._apply_positions()

    def _moving(self) -> dict[Key, _KnownStream]:
        newest_s = max((each.moved_s for each in self._streams.values()), default=0.0)
        return {
            key: each for key, each in self._streams.items() if newest_s < each.moved_s + STILL_S
        }

    async def _build(self, moving: dict[Key, _KnownStream]) -> None:
        self._is_dirty = False
        snapshot = self._snapshot
        parts = [PlannedPart(key, each.epochs, each.position) for key, each in moving.items()]
        if not (parts and snapshot.chunk_count):
            self._planned = parts
            if self._has_future:
                self._cache.set_future(None)
            self._has_future = False
            return
        orders = {digest: each.entries for digest, each in self._orders.items()}
        work = FutureBuild(snapshot, self._chunks, parts, orders, dict(self._computed))
        future: ChunkFuture | None = None
        try:
            future = await trio.to_thread.run_sync(work.future)
        except MemoryError:
            log.warning("no memory for the plan of the task: the cache decides without it")
        if snapshot is not self._snapshot:
            return
        for (rank, _), why in work.bad.items():
            self._refuse(rank, DAMAGED, f"orders that cannot be computed ({why})")
        self._chunks, self._computed = work.chunks, work.computed
        self._planned = parts
        self._has_future = future is not None
        self._counts["futures"] += 1
        self._cache.set_future(future)

    def _apply_positions(self) -> None:
        if not self._has_future:
            return
        for each in self._planned:
            known = self._streams.get(each.key)
            if known is None or known.epochs != each.epochs:
                continue  # the stream's position waits for the next future
            at = known.position - each.start
            if at < 0:  # before the start of the future
                self._is_dirty = True
                self._wake.set()
            if at > 0 and each.ends is not None:
                at = int(each.ends[min(at, len(each.ends)) - 1]) if len(each.ends) else 0
            each.at = max(at, 0)
        self._cache.set_positions([each.at for each in self._planned])

    def stats(self) -> dict[str, int]:
        return {
            "streams": len(self._streams),
            "nodes": len({rank for rank, _ in self._streams}),
            "planned_streams": len(self._planned) if self._has_future else 0,
            "uses_left": self._cache.uses_left,
            "futures": self._counts["futures"],
            "refused": self._counts["refused"],
            "valued_by": len(self._values),
        }


def _key_of(client: int, key: str) -> str:
    """Clients choose keys by themselves, so theirs get a prefix."""
    return f"{client}/{key}" if client else key


def _explicit(stream: PlannedStream) -> list[PlannedEpoch]:
    return [each for each in stream.epochs if each.computed is None]


def _length(known: _KnownStream) -> int:
    return sum(each.length for each in known.epochs)
