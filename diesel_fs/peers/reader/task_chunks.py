"""Reads parts of the chunks of one version of a dataset, for a reader in a task.

A part comes from a chunk that this process has mapped, else from the chunk's owner (the master of
this or another node), else from the object store. Chunks of this node that are read often are
pinned (the master keeps them until they are unpinned) and mapped: then a read is a look-up and a
slice. The master has checked mapped chunks whole; bytes from a connection are unchecked.
Thread-safe; a forked child may go on with its parent's object.
"""

import logging
import os
import socket
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import cast

import numpy as np
import numpy.typing as npt

from ...cache.tiers import ChunkKey
from ...errors import DieselError, FormatError
from ...format.chunk import parse_preamble
from ...format.entries import Bytes
from ...format.snapshot.reader import Snapshot
from ...net.tls import TlsSocket
from ...storage.objects.store import CheckedObject, ChunkReader, ReadGroup, give_up
from .. import local_wire, wire
from ..handshake import Connector, connect_blocking
from ..members.membership import INSTANCE_BYTES, Member
from ..members.owner_table import OwnerTableView
from .chunk_files import ChunkFiles
from .mapped_chunks import MAPPED, NOBODY, MappedChunks
from .master_link import MasterLink
from .owner_link import OwnerLink, PendingRead
from .request_socket import start_anew_in_forks

log = logging.getLogger("diesel.task")

PIN_COST_S = 60e-6
"""The time to pin and map a chunk."""

READ_COST_S = 40e-6
PART_S = 2e-6
BYTES_PER_S = 8e9
"""What a read over the connection to this node's master costs more than one from a mapped chunk: a
share of the request, the work for each part, and the copies. A chunk is mapped when its reads have
cost as much as mapping it would (ski rental): then both together cost at most twice the minimum."""

PINS_PER_READ_MAX = 32
"""Pins at once, so that a read does not wait long."""

EAGER_BYTES = 1 << 20
"""If a request wants this many bytes of a chunk, the chunk is pinned first: copying the bytes costs
more than asking in vain for a chunk that is not in memory."""

READS_REMEMBERED = 64
"""Requests that show which node sent damaged bytes."""

HEARTBEAT_S = 1.0
"""How often a reader with mapped chunks reports which ones it has unmapped, and learns which ones
are revoked, unless other requests do so."""

COUNTS = (
    "mapped_reads",
    "file_reads",
    "local_reads",
    "peer_reads",
    "store_reads",
    "timed_out",
    "pins",
    "damaged",
)
"""Parts by source (mapped memory, this node's master, another node, the object store), whole chunks
from files of this node's disk cache, late answers, pinned chunks, damaged parts."""

_STORE_PART_MIN, _READS_AVERAGED = 1 / 16, 8
"""`TaskChunks.is_slow` considers the store only if it gave more than this part of the last reads'
parts (a moving average)."""

_Remembered = tuple[wire.Parts, npt.NDArray[np.int32]] | tuple[int, int, int, int]
"""A request's parts, and the rank that was asked for each; or the chunk, start and bytes of one
part, and the rank."""


class TaskChunks:
    def __init__(
        self,
        master: MasterLink,
        mapped: MappedChunks,
        snapshot: Snapshot,
        stored: ChunkReader,
        *,
        through_master: bool = False,
        files: ChunkFiles | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`stored` reads from the object store, without the cache. `through_master`: ask this
        node's master also for chunks of other nodes, in place of these. `files`: for a reader that
        reads whole chunks from files, too."""
        self._master = master
        self._mapped = mapped
        self._identity, self._version = snapshot.identity, snapshot.version
        self._ids = snapshot.chunk_ids
        self._sizes: list[int] = snapshot.chunk_sizes.tolist()
        self.stored = stored
        self._through_master = through_master
        self._files = files
        self._heartbeat_s = heartbeat_s
        self._heartbeat_pid = 0
        self._closed = threading.Event()
        self._read_cost_s = np.zeros(len(self._sizes), np.float32)  # since each chunk's pin
        self._recent: deque[_Remembered] = deque(maxlen=READS_REMEMBERED)
        self._links: dict[int, OwnerLink] = {}
        self._own_links: dict[int, OwnerLink] = {}
        self._members: dict[int, Member] = {}
        self._connector: Connector | None = None
        # The table, and its generation, by which the links were made
        self._table: OwnerTableView | None = None
        self._generation = -1
        self._is_closed = False
        self._store_part = 1.0  # of the parts read lately
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.start_anew()
        start_anew_in_forks(self)

    def start_anew(self) -> None:
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        return self._master.rank

    # Reading

    def begin(self, parts: wire.Parts) -> Iterator[ReadGroup]:
        """As `ChunkReader.begin`, for at most `wire.PARTS_MAX` parts and `wire.PARTS_BYTES_MAX`
        bytes. Parts are sorted by source and handled in groups, so that each takes little work."""
        self._refresh()
        sources = self._mapped.sources.take(parts[:, 0])
        order = sources.argsort(kind="stable")
        sources, sorted_parts = sources.take(order), parts.take(order, axis=0)
        ranks: list[int] = sources.tolist()
        own = self._master.rank
        first = bisect_left(ranks, own)
        last = bisect_right(ranks, own, first)
        if own >= 0 and first < last and self._pin_worthwhile(sorted_parts[first:last]):
            return self.begin(parts)
        sizes: list[int] = sorted_parts[:, 2].tolist()
        mapped = bisect_right(ranks, MAPPED)
        first = bisect_right(ranks, NOBODY, mapped)
        not_here = list(range(mapped, first))  # positions in `sorted_parts`: parts for the store
        requested = []
        # Until they have these requests, the masters have nothing to do, so send them first
        while first < len(ranks):
            rank = ranks[first]
            last = bisect_right(ranks, rank, first)
            link, pending = self._link(rank), None
            if link is not None:
                pending = link.begin(sorted_parts[first:last], sum(sizes[first:last]))
            if link is None or pending is None:
                not_here += range(first, last)
            else:
                requested.append((link, pending, first, last))
            first = last
        return self._arriving(order, sorted_parts, sources, sizes, mapped, requested, not_here)

    def _arriving(
        self,
        order: npt.NDArray[np.intp],
        parts: wire.Parts,
        sources: npt.NDArray[np.int32],
        sizes: list[int],
        mapped: int,
        requested: list[tuple[OwnerLink, PendingRead, int, int]],
        not_here: list[int],
    ) -> Iterator[ReadGroup]:
        """`parts` are sorted by source; `order` has the caller's position of each. The first
        `mapped` parts are of mapped chunks. `requested` has the links and requests, each with the
        range of its parts (first, behind the last); `not_here` has positions of parts for the
        store."""
        counts, own = self.counts, self._master.rank
        places: list[int] = order.tolist()
        if mapped:
            chunks = parts[:mapped, 0]
            views = self._mapped.find_many(chunks)
            if not all(views):  # a chunk was unmapped just now
                again = self.begin(parts[:mapped])
                yield from (
                    each._replace(places=[places[at] for at in each.places]) for each in again
                )
            else:
                counts["mapped_reads"] += mapped
                yield ReadGroup(places[:mapped], _slices(views, parts[:mapped]), True)
        if mapped < len(places):
            self._recent.append((parts, sources))
        for link, pending, first, last in requested:
            answer = link.finish(pending)
            if answer is None:
                not_here += range(first, last)
                continue
            payload, statuses = answer
            group_places, group_sizes = places[first:last], sizes[first:last]
            if statuses:
                is_given = [status == wire.GIVEN for status in statuses]
                not_here += compress(range(first, last), map(not_, is_given))
                group_places = list(compress(group_places, is_given))
                group_sizes = list(compress(group_sizes, is_given))
            if link.rank == own:
                counts["local_reads"] += len(group_places)
                self._add_cost(parts[first:last])
            else:
                counts["peer_reads"] += len(group_places)
            yield ReadGroup(group_places, _cut(payload, group_sizes), False)
        part = len(not_here) / max(len(places), 1)
        self._store_part += (part - self._store_part) / _READS_AVERAGED
        if not_here:
            counts["store_reads"] += len(not_here)
            reading = self.stored.begin(parts[not_here])
            try:
                for found in reading:
                    # The caller's positions
                    here = [places[not_here[each]] for each in found.places]
                    yield ReadGroup(here, found.contents, False)
            finally:
                give_up(reading)

    @property
    def is_slow(self) -> bool:
        """As `ChunkReader.is_slow`: whether the store is slow, and gives some of the parts."""
        return self._store_part > _STORE_PART_MIN and self.stored.is_slow

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """As `ChunkReader.places`: ranks of owners, `MAPPED` and `NOBODY`, which equal `IN_MEMORY`
        and `IN_STORE`."""
        return self._mapped.sources.take(chunks)

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        """As `ChunkReader.read_part`. Kept short: code that runs just after a wait is several times
        slower."""
        rank = self._mapped.source_of[chunk]
        link = self._links.get(rank)
        table = self._table
        if (
            link is None
            or link.is_refused
            or table is None
            or table is not self._master.owners
            or table.generation_of[0] != self._generation
        ):
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
        return self.stored.read_part(chunk, start, size)

    def try_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool] | None:
        """Returns None if the task does not have the part."""
        view = self._mapped.find(chunk)
        if view is not None:
            self.counts["mapped_reads"] += 1
            return view[start : start + size], True
        self._refresh()
        rank = self._mapped.source_of[chunk]
        if rank == self._master.rank:
            return self._try_own(chunk, start, size)
        link = None if rank < 0 else self._link(rank)
        content = None if link is None else link.read_one(chunk, start, size)
        if content is None:
            return None
        self.counts["peer_reads"] += 1
        self._recent.append((chunk, start, size, rank))
        return content, False

    def _try_own(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool] | None:
        """As `try_part`, for an unmapped chunk that this node owns."""
        if self._read_cost_s.item(chunk) >= PIN_COST_S or size >= EAGER_BYTES:
            view = self.pin(chunk, fetch=False)
            self._read_cost_s[chunk] = 0.0  # even if it was absent: do not ask at each read
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
        """Returns None if the master does not have the chunk, or it cannot be mapped. `fetch`: the
        master fetches an absent chunk."""
        given = self._master.pin(chunk, fetch=fetch)
        return None if given is None else self._map(chunk, given.descriptor)

    def read_whole(self, chunk: int) -> CheckedObject | None:
        """As `pin`, with `fetch`. If this reader takes files, a chunk that is only on this node's
        disk is read from there."""
        files = self._files
        takes_file = files is not None and not files.is_resting
        given = self._master.pin(chunk, fetch=True, takes_file=takes_file)
        if given is None:
            return None
        if files is None or not given.is_file:
            view = self._map(chunk, given.descriptor)
            return None if view is None else CheckedObject(view, is_shared=True)
        key, size = ChunkKey(self._identity, self._ids[chunk]), self._sizes[chunk]
        try:
            content = files.read(key, given.descriptor, size)
        except FormatError as error:
            log.error("a chunk of the disk cache is damaged: %s", error)
            self._report(local_wire.DamagedPart(chunk, 0, size, self._master.rank))
            return None
        if content is None:
            return None
        self.counts["file_reads"] += 1
        return CheckedObject(content, is_shared=False)

    def _map(self, chunk: int, descriptor: int) -> memoryview | None:
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
        """Report to the master which node gave a part that did not match its checksum, if known."""
        rank = self._master.rank if self._mapped.drop_damaged(chunk) else -1
        for remembered in reversed(list(self._recent)):
            if rank >= 0:
                break
            if len(remembered) == 4:
                other, first, count, node = remembered
                if other == chunk and first <= start and start + size <= first + count:
                    rank = node
                continue
            parts, ranks = remembered
            inside = (parts[:, 0] == chunk) & (parts[:, 1] <= start)
            inside &= parts[:, 1].astype(np.int64) + parts[:, 2] >= start + size
            if len(places := np.flatnonzero(inside)):
                rank = int(ranks[places[0]])
        if rank < 0:
            return
        if rank != self._master.rank and (link := self._links.get(rank)) is not None:
            link.record_damage()
        self._report(local_wire.DamagedPart(chunk, start, size, rank))

    def _report(self, part: local_wire.DamagedPart) -> None:
        self.counts["damaged"] += 1
        self._master.notify(local_wire.DAMAGED, 1, local_wire.damaged_body(part))

    def stats(self) -> dict[str, object]:
        links = dict(self._links)
        all_links = [*links.values(), *list(self._own_links.values())]
        late = sum(each.counts["timed_out"] for each in all_links)
        return {
            **self.counts,
            "timed_out": self.counts["timed_out"] + late,
            "links": {str(rank): each.stats() for rank, each in sorted(links.items())},
        }

    def close(self) -> None:
        """As `TaskStore.close`."""
        self._mapped.release_all()
        if self._mapped.has_unmapped and self._master.is_connected:
            self._master.return_unmapped()
        self._master.stop_connecting()
        self._closed.set()
        with self._lock:
            self._is_closed = True
            links = [*self._links.values(), *self._own_links.values()]
            self._links, self._own_links = {}, {}
        for each in links:
            each.close()
        if not self._mapped.has_mapped:
            self._master.close()

    # The owners

    def _refresh(self) -> None:
        """Get owners and members again if the master has announced changes (by the generation of
        its table). Links to unchanged members stay."""
        table = self._master.owners
        if table is None:
            if not self._master.connect():
                return
            table = self._master.owners
        if table is None or (table is self._table and table.generation_of[0] == self._generation):
            return
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
            for rank in list(self._links):
                if is_new_task or members.get(rank) != self._members.get(rank):
                    dropped.append(self._links.pop(rank))
            if is_new_master:
                dropped += self._own_links.values()
                self._own_links = {}
            self._mapped.set_owners(table.owners)
            self._table, self._generation = table, generation
            self._connector, self._members = connector, members
        for each in dropped:
            each.close()
            self.counts["timed_out"] += each.counts["timed_out"]

    def _link(self, rank: int) -> OwnerLink | None:
        """The link to ask for chunks of the node `rank`: to its master, or to this node's."""
        own = self._master.rank
        if rank != own:
            if self._through_master:
                return self._own_link(wire.LOAD | wire.THROUGH)
            link = self._links.get(rank) or self._new_link(rank)
            # Refused, for example because that master has too many connections
            if link is not None and link.is_refused:
                return self._own_link(wire.LOAD | wire.THROUGH)
            return link
        return self._own_link(wire.LOAD)

    def _own_link(self, flags: int) -> OwnerLink:
        link = self._own_links.get(flags)
        if link is None:
            with self._lock:
                link = self._own_links.get(flags)
                if link is None:
                    link = OwnerLink(self._master.rank, self._master.open_data, flags=flags)
                    self._own_links[flags] = link
        return link

    def _new_link(self, rank: int) -> OwnerLink | None:
        with self._lock:
            member, connector = self._members.get(rank), self._connector
            if member is None or connector is None or self._is_closed:
                return None
            if rank not in self._links:

                def connect(member: Member = member) -> socket.socket | TlsSocket:
                    mine = replace(connector, instance=os.urandom(INSTANCE_BYTES))
                    return connect_blocking(mine, member)

                self._links[rank] = OwnerLink(rank, connect)
            return self._links[rank]

    def _pin_worthwhile(self, parts: wire.Parts) -> bool:
        """Pin and map those of these chunks, all of this node, that are worth it; returns whether
        any was mapped."""
        chunks, sizes = parts[:, 0], parts[:, 2]
        is_due = self._read_cost_s.take(chunks) >= PIN_COST_S
        if int(sizes.sum(dtype=np.int64)) >= EAGER_BYTES:
            rows = np.unique(chunks, return_inverse=True)[1]
            is_due |= np.bincount(rows, weights=sizes)[rows] >= EAGER_BYTES
        has_pinned = False
        if is_due.any():
            for chunk in np.unique(chunks[is_due])[:PINS_PER_READ_MAX].tolist():
                has_pinned |= self.pin(chunk, fetch=False) is not None
                self._read_cost_s[chunk] = 0.0  # even if it was absent: do not ask at each read
        return has_pinned

    def _add_cost(self, parts: wire.Parts) -> None:
        cost_s = READ_COST_S / len(parts) + PART_S + parts[:, 2] / BYTES_PER_S
        np.add.at(self._read_cost_s, parts[:, 0], cost_s)

    # Heartbeat

    def _start_heartbeat(self) -> None:
        if self._heartbeat_pid == os.getpid():
            return
        self._heartbeat_pid = os.getpid()
        self._closed = ended = threading.Event()
        weakref.finalize(self, ended.set)
        threading.Thread(
            target=_run_heartbeat, args=(self._master, self._mapped, ended, self._heartbeat_s),
            name="diesel-task", daemon=True,
        ).start()  # fmt: skip


def _cut(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    contents, begin = [], 0
    for size in sizes:
        end = begin + size
        contents.append(payload[begin:end])
        begin = end
    return contents


def _slices(views: "Sequence[memoryview | None]", parts: wire.Parts) -> list[memoryview]:
    starts, sizes = parts[:, 1].tolist(), parts[:, 2].tolist()
    held = cast(Sequence[memoryview], views)
    return [
        view[start : start + size] for view, start, size in zip(held, starts, sizes, strict=True)
    ]


def _run_heartbeat(
    link: MasterLink, mapped: MappedChunks, ended: threading.Event, every_s: float
) -> None:
    """Ends when the `TaskChunks` is closed (`ended`) and no view of its chunks is left."""
    while not (ended.wait(every_s) and not mapped.has_mapped):
        if ended.is_set():
            link.stop_connecting()
            mapped.release_all()
            time.sleep(every_s)
        quiet_s = time.monotonic() - link.exchanged_s
        if mapped.has_unmapped or (mapped.has_mapped and quiet_s >= every_s):
            link.return_unmapped()
    link.close()
