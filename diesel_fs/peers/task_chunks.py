"""Reads parts of the chunks of one version of a dataset for a reader in a task, from wherever they
are.

A part comes from a chunk that this process has mapped, else from the chunk's owner (the master of
this or another node), else from the object store. Chunks of this node that are read often are
pinned (the master keeps them until they are unpinned) and mapped: from then on a read of them is a
look-up and a slice. The master has checked them whole, so nobody checks them again; what comes over
a connection is unchecked.

`link.py` has the connections to this node's master, `owner_link.py` those to the owners,
`mapped_chunks.py` the mappings. Thread-safe; a forked child may go on with its parent's object.
"""

import logging
import os
import socket
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from ..errors import DieselError
from ..format.chunk import parse_preamble
from ..format.entries import Bytes
from ..format.snapshot.reader import Snapshot
from ..storage.objects.store import ReadParts
from . import wire
from .handshake import Connector, connect_blocking
from .link import MasterLink
from .mapped_chunks import MappedChunks
from .membership import INSTANCE_BYTES, Member
from .owner_link import Answer, OwnerLink, PendingRead
from .owner_table import OwnerTableView

log = logging.getLogger("diesel.task")

PIN_COST_S = 60e-6
"""What it costs to pin a chunk: an exchange with the master, and the mapping."""

READ_COST_S = 40e-6
PART_S = 2e-6
BYTES_PER_S = 8e9
"""What a read over the connection to this node's master costs more than a read of a mapped chunk: a
share of the request, the work for each part, and the copies. A chunk is mapped when its reads have
cost as much as mapping it (ski rental): then both together cost at most twice the minimum, whatever
is read."""

PINS_PER_READ_MAX = 32
"""Chunks that one read pins at most, so that it does not wait for more."""

EAGER_BYTES = 1 << 20
"""A chunk of which one request wants so much is pinned first: the copies of that cost more than to
hear that the chunk is not here."""

READS_REMEMBERED = 64
"""Of so many requests the nodes that answered are remembered, to report the one that sent damaged
bytes."""

HEARTBEAT_S = 1.0
"""How often a reader that has mapped chunks tells its master which ones it has unmapped, and hears
which ones the master revokes, where no read does."""

COUNTS = (
    "mapped_reads",
    "local_reads",
    "peer_reads",
    "store_reads",
    "timed_out",
    "pins",
    "damaged",
)
"""Parts by where they came from (mapped memory, this node's master, another node, the object
store), late answers, chunks that were pinned, and parts that did not match their checksums."""

_Remembered = tuple[wire.Parts, npt.NDArray[np.int32]] | tuple[int, int, int, int]
"""Parts and the ranks of the nodes that were asked for them; or one part, and the rank."""

ReadStored = Callable[[Sequence[tuple[int, int, int]]], Iterator[memoryview]]
"""Reads parts (chunk, start, bytes) from the object store."""

_MAPPED, _NOBODY = -2, -1  # in place of a rank: in a mapped chunk; no node has it


class TaskChunks:
    """The chunks of one version, as one process of the task reads them (`ChunkReader`)."""

    def __init__(
        self,
        master: MasterLink,
        mapped: MappedChunks,
        snapshot: Snapshot,
        read_stored: ReadStored,
        *,
        through_master: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """With `through_master`, other nodes are asked by this node's master."""
        self._master = master
        self._mapped = mapped
        self._identity, self._version = snapshot.identity, snapshot.version
        self._ids = snapshot.chunk_ids
        self._sizes: list[int] = snapshot.chunk_sizes.tolist()
        self.read_stored = read_stored
        self._through_master = through_master
        self._heartbeat_s = heartbeat_s
        self._heartbeat_pid = 0  # the process that has started the heartbeat thread
        self._closed = threading.Event()
        self._read_cost_s = np.zeros(len(self._sizes), np.float32)  # of each chunk, since its pin
        self._recent: deque[_Remembered] = deque(maxlen=READS_REMEMBERED)
        # By rank; those to this node's master by their flags, as negative numbers
        self._links: dict[int, OwnerLink] = {}
        self._members: dict[int, Member] = {}
        self._connector: Connector | None = None
        self._table: OwnerTableView | None = None  # to which the links belong,
        self._generation = -1  # and its generation
        self._is_closed = False
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._reset_after_fork()
        _ALL.add(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """The rank of this node; -1 before its master's first answer."""
        return self._master.rank

    # Reading

    def begin(self, parts: wire.Parts) -> "TaskParts":
        """See `ChunkReader`. Several parts have at most `wire.PARTS_MAX` parts and
        `wire.PARTS_BYTES_MAX` bytes.

        The parts are sorted by where they come from, and from then on handled in groups: very
        little is done for each part.
        """
        chunks = parts[:, 0]
        is_mapped = self._mapped.is_kept.take(chunks)
        if is_mapped.all():
            held = self._mapped.find_many(chunks.tolist())
            if not all(held):  # a chunk was given up at this moment
                return self.begin(parts)
            self.counts["mapped_reads"] += len(held)
            return TaskParts(self, parts, None, _slices(held, parts))
        table = self._current_table()
        if table is None:
            ranks: npt.NDArray[np.int32] = np.full(len(parts), _NOBODY, np.int32)
        else:
            ranks = table.owners.take(chunks)
        ranks[is_mapped] = _MAPPED
        order = ranks.argsort(kind="stable")
        ranks, by_rank = ranks.take(order), parts.take(order, axis=0)
        sorted_ranks: list[int] = ranks.tolist()
        own = self._master.rank
        first, last = bisect_left(sorted_ranks, own), bisect_right(sorted_ranks, own)
        if first < last and self._pin_worthwhile(by_rank[first:last]):
            return self.begin(parts)
        mapped = bisect_right(sorted_ranks, _MAPPED)
        held = self._mapped.find_many(by_rank[:mapped, 0].tolist())
        if not all(held):
            return self.begin(parts)
        self.counts["mapped_reads"] += mapped
        begun = TaskParts(self, by_rank, order, _slices(held, by_rank[:mapped]))
        first = bisect_right(sorted_ranks, _NOBODY)
        while first < len(sorted_ranks):
            rank = sorted_ranks[first]
            last = bisect_right(sorted_ranks, rank, first)
            if begun.ask(self._link(rank), first, last) and rank == own:
                self._add_cost(by_rank[first:last])
            first = last
        self._recent.append((by_rank, ranks))
        return begun

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        """See `ChunkReader`. Few operations, as there are very many such reads: after each wait for
        a node they are several times slower than else."""
        link, rank = None, _NOBODY
        if not self._mapped.is_kept[chunk]:
            table = self._table
            if table is not None and table.generation_of[0] == self._generation:
                rank = table.owner_of[chunk]
                link = self._links.get(rank)
        if link is None or link.is_refused or table is not self._master.owners:
            found = self.try_part(chunk, start, size)
            if found is not None:
                return found
        else:
            content = link.read_one(chunk, start, size)
            if content is not None:
                self.counts["peer_reads"] += 1
                self._recent.append((chunk, start, size, rank))
                return content, False
        self.counts["store_reads"] += 1
        return next(self.read_stored([(chunk, start, size)])), False

    def try_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool] | None:
        """As `read_part`, but None where the task does not have the part."""
        view = self._mapped.find(chunk)
        if view is not None:
            self.counts["mapped_reads"] += 1
            return view[start : start + size], True
        table = self._current_table()
        rank = _NOBODY if table is None else table.owner_of[chunk]
        if rank == self._master.rank:
            return self._try_own(chunk, start, size)
        link = None if rank == _NOBODY else self._link(rank)
        content = None if link is None else link.read_one(chunk, start, size)
        if content is None:
            return None
        self.counts["peer_reads"] += 1
        self._recent.append((chunk, start, size, rank))
        return content, False

    def _try_own(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool] | None:
        """As `try_part`, of a chunk of this node that is not mapped."""
        if self._read_cost_s.item(chunk) >= PIN_COST_S or size >= EAGER_BYTES:
            view = self.pin(chunk, fetch=False)
            self._read_cost_s[chunk] = 0.0  # also where it was not here: do not ask at each read
            if view is not None:
                self.counts["mapped_reads"] += 1
                return view[start : start + size], True
        content = self._own_link(wire.LOAD).read_one(chunk, start, size)
        if content is None:
            return None
        self.counts["local_reads"] += 1
        self._read_cost_s[chunk] += READ_COST_S + PART_S + size / BYTES_PER_S
        self._recent.append((chunk, start, size, self._master.rank))
        return content, False

    def pin(self, chunk: int, *, fetch: bool) -> memoryview | None:
        """Pin and map a chunk; None where the master does not have it. With `fetch`, the master may
        fetch it."""
        descriptor = self._master.pin(chunk, fetch=fetch)
        if descriptor is None:
            return None
        size = self._sizes[chunk]
        try:
            if os.fstat(descriptor).st_size < size:
                return None
            view = self._mapped.keep(chunk, descriptor, size)
            parse_preamble(view, identity=self._identity, id=self._ids[chunk], object_bytes=size)
        except DieselError as error:
            log.error("the task's master gave another chunk than %d: %s", chunk, error)
            self._mapped.drop_damaged(chunk)
            return None
        except OSError:  # no address space, or too many mappings
            return None
        finally:
            os.close(descriptor)
        self.counts["pins"] += 1
        self._start_heartbeat()
        return view

    def report_damage(self, chunk: int, start: int, size: int) -> None:
        """A part did not match its checksum: tell the master which node gave it, where that is
        known."""
        rank = self._master.rank if self._mapped.drop_damaged(chunk) else -1
        for remembered in reversed(list(self._recent)):
            if rank >= 0:
                break
            if len(remembered) == 4:
                other, first, count, asked = remembered
                if other == chunk and first <= start and start + size <= first + count:
                    rank = asked
                continue
            parts, ranks = remembered
            inside = (parts[:, 0] == chunk) & (parts[:, 1] <= start)
            inside &= parts[:, 1].astype(np.int64) + parts[:, 2] >= start + size
            if len(places := np.flatnonzero(inside)):
                rank = int(ranks[places[0]])
        if rank < 0:
            return
        self.counts["damaged"] += 1
        if rank != self._master.rank and (link := self._links.get(rank)) is not None:
            link.record_damage()
        part = wire.DamagedPart(chunk, start, size, rank)
        self._master.notify(wire.LOCAL_DAMAGED, 1, wire.damaged_body(part))  # one part

    def stats(self) -> dict[str, object]:
        """Where parts came from, and the connections to the nodes."""
        links = dict(self._links)
        late = sum(each.counts["timed_out"] for each in links.values())
        return {
            **self.counts,
            "timed_out": self.counts["timed_out"] + late,
            "links": {str(rank): each.stats() for rank, each in sorted(links.items())},
        }

    def close(self) -> None:
        """Close the connections. Views that were given out stay valid; their chunks are unpinned
        with the last view. Repeatable."""
        self._mapped.release_all()
        if self._mapped.has_unmapped and self._master.is_connected:
            self._master.return_unmapped()
        self._master.stop_connecting()
        self._closed.set()
        with self._lock:
            self._is_closed = True
            links, self._links = self._links, {}
        for each in links.values():
            each.close()
        if not self._mapped.has_mapped:
            self._master.close()

    # The owners

    def _current_table(self) -> OwnerTableView | None:
        """Which node owns each chunk, after a look whether the members are as before; None where
        the master has never answered."""
        table = self._master.owners
        if table is not None and table is self._table and table.generation == self._generation:
            return table
        if table is None and self._master.connect():
            table = self._master.owners
        if table is not None:
            self._refresh(table)
        return table

    def _refresh(self, table: OwnerTableView) -> None:
        """Learn the members anew. Links to members that are as before stay."""
        generation = table.generation
        view = self._master.task_view()
        if view is None:
            return
        dropped = []
        with self._lock:
            if self._is_closed:
                return
            connector = Connector(
                view.rank, b"", self._identity, self._version, view.task, view.secret,
                has_tls=view.has_tls, is_client=True,
            )  # fmt: skip
            members = {each.rank: each for each in view.members}
            is_new_task, is_new_master = connector != self._connector, table is not self._table
            for key in list(self._links):
                is_other = is_new_task or members.get(key) != self._members.get(key)
                if is_new_master if key < 0 else is_other:
                    dropped.append(self._links.pop(key))
            self._table, self._generation = table, generation
            self._connector, self._members = connector, members
        for each in dropped:
            each.close()
            self.counts["timed_out"] += each.counts["timed_out"]

    def _link(self, rank: int) -> OwnerLink | None:
        """The link by which a node is asked; None where the node is not known."""
        own = self._master.rank
        if rank != own:
            if self._through_master:
                return self._own_link(wire.LOAD | wire.THROUGH)
            link = self._links.get(rank) or self._new_link(rank)
            if link is not None and link.is_refused:  # as it has too many connections, for one
                return self._own_link(wire.LOAD | wire.THROUGH)
            return link
        return self._own_link(wire.LOAD)

    def _own_link(self, flags: int) -> OwnerLink:
        """The link to this node's master for requests with these flags."""
        key = -flags
        link = self._links.get(key)
        if link is None:
            with self._lock:
                link = self._links.get(key)
                if link is None:
                    link = OwnerLink(self._master.rank, self._master.open_data, flags=flags)
                    self._links[key] = link
        return link

    def _new_link(self, rank: int) -> OwnerLink | None:
        with self._lock:
            member, connector = self._members.get(rank), self._connector
            if member is None or connector is None or self._is_closed:
                return None
            if rank not in self._links:

                def connect(member: Member = member) -> socket.socket:
                    mine = replace(connector, instance=os.urandom(INSTANCE_BYTES))
                    return connect_blocking(mine, member)

                self._links[rank] = OwnerLink(rank, connect)
            return self._links[rank]

    def _pin_worthwhile(self, parts: wire.Parts) -> bool:
        """Pin and map those chunks of this node for which that is worth it; whether the master had
        any of them."""
        chunks, sizes = parts[:, 0], parts[:, 2]
        is_due = self._read_cost_s.take(chunks) >= PIN_COST_S
        if int(sizes.sum(dtype=np.int64)) >= EAGER_BYTES:
            rows = np.unique(chunks, return_inverse=True)[1]
            is_due |= np.bincount(rows, weights=sizes)[rows] >= EAGER_BYTES
        has_pinned = False
        if is_due.any():
            for chunk in np.unique(chunks[is_due])[:PINS_PER_READ_MAX].tolist():
                has_pinned |= self.pin(chunk, fetch=False) is not None
                self._read_cost_s[chunk] = 0.0  # also where it is not here: do not ask each time
        return has_pinned

    def _add_cost(self, parts: wire.Parts) -> None:
        """These parts of this node's chunks are read over a connection."""
        cost_s = READ_COST_S / len(parts) + PART_S + parts[:, 2] / BYTES_PER_S
        np.add.at(self._read_cost_s, parts[:, 0], cost_s)

    # Heartbeat

    def _start_heartbeat(self) -> None:
        """Start the heartbeat thread, unless this process has one."""
        if self._heartbeat_pid == os.getpid():
            return
        self._heartbeat_pid = os.getpid()
        self._closed = ended = threading.Event()
        weakref.finalize(self, ended.set)
        threading.Thread(
            target=_run_heartbeat, args=(self._master, self._mapped, ended, self._heartbeat_s),
            name="diesel-task", daemon=True,
        ).start()  # fmt: skip


class TaskParts:
    """Parts that are being read (`PartsInFlight`)."""

    __slots__ = ("_asked", "_contents", "_ends", "_given", "_order", "_owner", "_parts")

    def __init__(
        self,
        owner: TaskChunks,
        parts: wire.Parts,
        order: npt.NDArray[np.intp] | None,
        contents: list[memoryview],
    ) -> None:
        """`order` has the caller's position of each part (None: they are in their order);
        `contents` are those of the first parts, which have been checked."""
        self._owner = owner
        self._parts = parts
        self._order = order
        self._given = len(contents)
        self._contents: list[memoryview | None] = [*contents]
        self._contents += [None] * (len(parts) - len(contents))
        # Where each part would end if all lay one behind the other
        self._ends: list[int] = [] if order is None else parts[:, 2].cumsum(dtype=np.int64).tolist()
        self._asked: list[tuple[OwnerLink, PendingRead, int, int]] = []

    def ask(self, link: OwnerLink | None, first: int, last: int) -> bool:
        """Ask a node for these parts; whether it was asked."""
        if link is None:
            return False
        ends = self._ends
        size = ends[last - 1] - (ends[first - 1] if first else 0)
        pending = link.begin(self._parts[first:last], size)
        if pending is None:
            return False
        self._asked.append((link, pending, first, last))
        return True

    def finish(self) -> ReadParts:
        """See `PartsInFlight`."""
        contents, order = self._contents, self._order
        if order is None:
            return ReadParts(cast(list[memoryview], contents), None, self._given)
        counts, given = self._owner.counts, self._given
        own = self._owner.rank
        for link, pending, first, last in self._asked:
            answer = link.finish(pending)
            if answer is not None:
                count = self._place(answer, first, last)
                counts["local_reads" if link.rank == own else "peer_reads"] += count
                given += count
        if given < len(contents):
            absent = [place for place, content in enumerate(contents) if content is None]
            counts["store_reads"] += len(absent)
            wanted = map(tuple, self._parts[absent].tolist())
            for place, content in zip(absent, self._owner.read_stored([*wanted]), strict=True):
                contents[place] = content
        return ReadParts(cast(list[memoryview], contents), order, self._given)

    def _place(self, answer: Answer, first: int, last: int) -> int:
        """Put the contents of an answer at their places; returns how many there are."""
        payload, ends = answer.payload, self._ends
        base = ends[first - 1] if first else 0
        if not answer.statuses:
            begin = 0
            for place in range(first, last):
                end = ends[place] - base
                self._contents[place] = payload[begin:end]
                begin = end
            return last - first
        begin = count = 0
        for place, status in zip(range(first, last), answer.statuses, strict=True):
            if status == wire.GIVEN:
                end = begin + int(self._parts[place, 2])
                self._contents[place] = payload[begin:end]
                begin, count = end, count + 1
        return count


def _slices(views: "Sequence[memoryview | None]", parts: wire.Parts) -> list[memoryview]:
    """The parts of chunks whose views these are, none of which is None."""
    starts, sizes = parts[:, 1].tolist(), parts[:, 2].tolist()
    held = cast(Sequence[memoryview], views)
    return [
        view[start : start + size] for view, start, size in zip(held, starts, sizes, strict=True)
    ]


def _run_heartbeat(
    link: MasterLink, mapped: MappedChunks, ended: threading.Event, every_s: float
) -> None:
    """Tell the master which chunks were unmapped, and learn which ones it revokes, until the store
    is closed (`ended`) and no view of its chunks is left."""
    while not (ended.wait(every_s) and not mapped.has_mapped):
        if ended.is_set():
            link.stop_connecting()
            mapped.release_all()
            time.sleep(every_s)
        quiet_s = time.monotonic() - link.exchanged_s
        if mapped.has_unmapped or (mapped.has_mapped and quiet_s >= every_s):
            link.return_unmapped()
    link.close()


_ALL: "weakref.WeakSet[TaskChunks]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for each in list(_ALL):
        each._reset_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
