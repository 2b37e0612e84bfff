"""The object store of a reader in a task: it asks this node's master for chunks first, and reads
the rest from the store behind it.

A read takes bytes from chunks that are mapped, else through the window (memory shared with the
master) of a connection, else from the inner store. Chunks that are read often are pinned (the
master keeps them until they are unpinned) and mapped. `link.py` has the connections,
`mapped_chunks.py` the mappings. The caller checks the bytes, and reports damage by `read_uncached`.

A reader never gets an error because of a master. Thread-safe; a forked child may go on with its
parent's object.
"""

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..format.object_names import chunk_of_object, identity_of_object
from ..format.snapshot.reader import Snapshot
from ..repository.interface import Repository
from ..repository.private_copies import snapshot_descriptor
from ..storage.objects.store import ObjectStore, Part, StoreWrapper, batched_parts, check_range
from . import wire
from .launch import is_alive, join, restart_killed, wait_until_gone
from .link import DEADLINE_S, PAUSE_S, WINDOW_BYTES, MasterLink, PendingRead
from .mapped_chunks import MappedChunks
from .options import TaskOptions, TaskRequest

PIN_COST_S = 60e-6
"""What it costs to pin a chunk: an exchange with the master, and the mapping."""

READ_COST_S = 60e-6
PART_S = 2e-6
BYTES_PER_S = 8e9
"""What a read through the window costs more than a read of a mapped chunk: a share of the exchange,
the work for each part, and two copies. A chunk is mapped when its reads have cost as much as
mapping it (ski rental): then both together cost at most twice the minimum, whatever is read."""

PINS_PER_READ_MAX = 32
"""Chunks that one read pins at most, so that it does not wait for more."""

EAGER_BYTES = 1 << 20
"""A chunk of which one request wants so much is pinned first: two copies of that cost more than to
hear that the chunk is not here."""

READS_REMEMBERED = 64
"""Of so many requests the sources are remembered, to report the node that sent damaged bytes."""

HEARTBEAT_S = 1.0
"""How often a reader that has mapped chunks tells its master which ones it has unmapped, and hears
which ones the master revokes, where no read does."""

MASTER_END_WAIT_S = 1.0
"""How long to wait for a master that may be ending."""

_JOIN_ATTEMPTS = 3


def master_request(
    options: TaskOptions, repository: Repository, snapshot: Snapshot, *, memory_bytes: int
) -> TaskRequest:
    """The request for a master with these options, for a version of a dataset."""
    credentials = repository.credentials
    return TaskRequest(
        **{each.name: getattr(options, each.name) for each in fields(TaskOptions)},
        url=repository.url.full_url,
        user=credentials.user if credentials is not None else "",
        key=credentials.key_text if credentials is not None else "",
        dataset=snapshot.dataset,
        identity=snapshot.identity.hex,
        version=snapshot.version,
        memory_bytes=memory_bytes,
    )


@dataclass(slots=True)
class _ReadBatch:
    """Parts that are read together: the contents so far, and what the master is asked for."""

    parts: Sequence[Part]
    found: list[memoryview | None]  # the contents of each part
    records: wire.Parts  # the parts that are not mapped
    places: list[int]  # the position in `parts` of each record
    pending: PendingRead | None = None


class TaskStore(StoreWrapper):
    """The objects of a repository; chunks of one version of a dataset are read through the node's
    master."""

    batches_reads = True
    can_pin = True

    def __init__(
        self,
        inner: ObjectStore,
        path: str | os.PathLike[str],
        snapshot: Snapshot,
        *,
        deadline_s: float = DEADLINE_S,
        pause_s: float = PAUSE_S,
        heartbeat_s: float = HEARTBEAT_S,
        request: TaskRequest | None = None,
    ) -> None:
        """`path` is the master's socket; the first read connects. With `request`, a master that was
        killed is started again."""
        super().__init__(inner)
        self._path = os.fspath(path)
        self._request = request
        self._identity = snapshot.identity
        self._sizes: list[int] = snapshot.chunk_sizes.tolist()
        # Its last item, at -1, is for names that are not a chunk's
        self._size_column = np.append(snapshot.chunk_sizes.astype(np.int64), 0)
        self._numbers = {chunk: at for at, chunk in enumerate(snapshot.chunk_ids)}
        self._number_by_name: dict[str, int] = {}
        self._mapped = MappedChunks()
        self._link = MasterLink(
            path, snapshot.identity, snapshot.version, self._mapped,
            deadline_s=deadline_s, pause_s=pause_s,
            restart=None if request is None else partial(_restart_master, request, Path(path)),
        )  # fmt: skip
        self._read_cost_s = np.zeros(len(self._sizes), np.float32)  # of each chunk, since its pin
        self._recent: deque[tuple[wire.Parts, npt.NDArray[np.uint16]]] = deque(
            maxlen=READS_REMEMBERED
        )
        self._heartbeat_s = heartbeat_s
        self._heartbeat_pid = 0  # the process that has started the heartbeat thread
        self._closed = threading.Event()
        self._counts = dict.fromkeys(
            ("mapped_reads", "master_reads", "store_reads", "pins", "damaged"), 0
        )

    @classmethod
    def join(
        cls,
        inner: ObjectStore,
        request: TaskRequest,
        snapshot: Snapshot,
        *,
        wait_s: float = MASTER_END_WAIT_S,
    ) -> "TaskStore":
        """Join a task: find its master on this node, or start it; a master that may be ending is
        waited for. Raises DieselError."""
        for _ in range(_JOIN_ATTEMPTS):
            socket_path = join(request)
            store = cls(inner, socket_path, snapshot, request=request)
            if store.connect() or not wait_until_gone(socket_path, wait_s):
                break  # else the master has just ended: it was idle, or serves another version
        return store

    def connect(self) -> bool:
        """Whether the master answers."""
        return self._link.connect()

    # Reading

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        room = memoryview(buffer)
        number = self._number(name)
        if number < 0 or not len(room) or start + len(room) > self._sizes[number]:
            self.inner.read_into(name, start, buffer)
            return
        for at in range(0, len(room), WINDOW_BYTES):
            piece = room[at : at + WINDOW_BYTES]
            if not self._read_one(number, start + at, piece):
                self._counts["store_reads"] += 1
                self.inner.read_into(name, start + at, room[at:])
                return

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        yield from self.read_parts([(name, start, size) for start, size in ranges])

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """Reads as many parts together as one exchange takes, and one exchange ahead: the first one
        is in flight when this returns. Bytes of mapped chunks are not copied."""
        groups = batched_parts(parts, wire.PARTS_MAX, WINDOW_BYTES)
        first = next(groups, None)
        return iter(()) if first is None else self._read_groups(self._begin(first), groups)

    def _read_groups(
        self, begun: _ReadBatch, groups: Iterator[Sequence[Part]]
    ) -> Iterator[memoryview]:
        for parts in groups:
            following = self._begin(parts)
            yield from self._finish(begun)
            begun = following
        yield from self._finish(begun)

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        number = self._number(name)
        view = None if number < 0 else self._mapped.find(number)
        if view is None:
            return self.inner.read_nowait(name, start, buffer)
        found = view[start : start + len(buffer)]
        if len(found) != len(buffer):
            return False
        buffer[:] = found
        self._counts["mapped_reads"] += 1
        return True

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Read from the inner store; the node that gave these bytes before is reported for
        damage."""
        number = self._number(name)
        if number >= 0:
            self._report(number, start, len(buffer))
        self.inner.read_uncached(name, start, buffer)

    def pin(self, name: str, on_revoke: Callable[[], None]) -> memoryview | None:
        number = self._number(name)
        if number < 0:
            return None
        view = self._mapped.find(number)
        if view is None:
            view = self._pin_chunk(number, fetch=True)
        if view is not None:
            self._mapped.on_revoke(number, on_revoke)
        return view

    def can_pin_nowait(self, name: str) -> bool:
        number = self._number(name)
        return number >= 0 and self._mapped.find(number) is not None

    # The master

    def switch_version(self, snapshot: Snapshot) -> bool:
        """Tell the master that its clients have switched to another version of the dataset. Returns
        whether it answered."""
        try:
            file = snapshot_descriptor(snapshot)
        except OSError:
            return False
        try:
            body = wire.switch_version_body(snapshot.version)
            return self._link.switch_version(body, file)
        finally:
            os.close(file)

    def at_version(self, snapshot: Snapshot) -> "TaskStore":
        """The store for another version of the dataset, through the same master, which is told of
        that version. This store stays as it is."""
        is_announced = self.switch_version(snapshot)
        request = self._request and replace(self._request, version=snapshot.version)
        store = TaskStore(self.inner, self._path, snapshot, request=request)
        store._link.rank = self._link.rank  # it is still this node's master
        if is_announced:
            store.connect()  # else the master would count as idle until the first read
        return store

    def stats(self) -> dict[str, object]:
        """What the master reports, and where this reader's bytes came from."""
        text = self._link.stats()
        try:
            reported = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            reported = {}
        return {
            **(reported if isinstance(reported, dict) else {}),
            "answers": bool(text),
            "client": {
                **self._counts,
                "mapped_chunks": len(self._mapped),
                "mapped_bytes": self._mapped.kept_bytes,
                **self._link.counts,
            },
        }

    def retry(self) -> None:
        """Ask the master again at once: another reader has announced this version to it."""
        self._link.retry()

    def close(self) -> None:
        """Release the master. Views that were given out stay valid; their chunks are unpinned with
        the last view. Repeatable."""
        self._mapped.release_all()
        if self._mapped.has_unmapped and self._link.is_connected:
            self._link.return_unmapped()
        self._closed.set()
        if not self._mapped.has_mapped:
            self._link.close()

    # Parts

    def _number(self, name: str) -> int:
        """The number of a chunk by its object's name; -1 for all other objects."""
        number = self._number_by_name.get(name)
        if number is None:
            chunk = chunk_of_object(name)
            known = chunk is not None and identity_of_object(name) == self._identity
            number = self._numbers.get(chunk, -1) if known and chunk is not None else -1
            if number >= 0:
                self._number_by_name[name] = number
        return number

    def _begin(self, parts: Sequence[Part]) -> _ReadBatch:
        """Send the request for as many parts as one exchange takes, or for one part of any size."""
        names, starts, sizes = zip(*parts, strict=True)
        numbers = list(map(self._number_by_name.get, names))
        if None in numbers:
            for part in parts:
                check_range(*part)
            numbers = list(map(self._number, names))
        columns = np.array((numbers, starts, sizes), np.int64)
        chunk, start, size = columns
        fits = (start >= 0) & (size > 0) & (size <= WINDOW_BYTES)
        fits &= start + size <= self._size_column[chunk]
        places = np.flatnonzero(fits)
        batch = _ReadBatch(
            parts, [None] * len(parts), columns.T[places].astype(np.uint32, "C"), places.tolist()
        )
        if batch.places:
            find = self._mapped.find
            self._take_mapped(
                batch, {chunk: find(chunk) for chunk in set(batch.records[:, 0].tolist())}
            )
            self._take_mapped(batch, self._pin_worthwhile(batch.records))
        if batch.places:
            batch.pending = self._link.begin(batch.records)
        return batch

    def _finish(self, batch: _ReadBatch) -> Iterable[memoryview]:
        """The contents of all parts, in their order."""
        self._receive_batch(batch)
        found, parts = batch.found, batch.parts
        absent = [place for place, content in enumerate(found) if content is None]
        small = [place for place in absent if parts[place][2] <= WINDOW_BYTES]
        self._counts["store_reads"] += len(small)
        rest = self.inner.read_parts([parts[place] for place in small])
        for place, content in zip(small, rest, strict=True):
            found[place] = content
        for place in absent:
            if found[place] is None:  # larger than a window
                name, start, size = parts[place]
                room = np.empty(size, np.uint8).data
                self.read_into(name, start, room)
                found[place] = room.toreadonly()
        return [content for content in found if content is not None]

    def _receive_batch(self, batch: _ReadBatch) -> None:
        """Receive what the master gives of the parts that it was asked for."""
        reading = None if batch.pending is None else batch.pending.wait()
        if reading is None:
            return
        records = batch.records
        with reading as given:
            sources, starts = given.sources.copy(), given.offsets.tolist()
            ends = (given.offsets + records[:, 2]).tolist()
            copy = np.empty(max(ends), np.uint8).data  # the next request reuses the window
            copy[:] = given.window[: len(copy)]
        window = copy.toreadonly()
        has = sources != wire.SOURCE_NONE
        for place, start, end, is_given in zip(
            batch.places, starts, ends, has.tolist(), strict=True
        ):
            if is_given:
                batch.found[place] = window[start:end]
        self._record_sources(records, sources, int(np.count_nonzero(has)))
        here = records[sources == wire.SOURCE_HERE]
        if len(here):
            cost_s = READ_COST_S / len(records) + PART_S + here[:, 2] / BYTES_PER_S
            np.add.at(self._read_cost_s, here[:, 0], cost_s)

    def _take_mapped(self, batch: _ReadBatch, views: Mapping[int, memoryview | None]) -> None:
        """Take parts from chunks that are mapped; `views` has the mapping of each chunk, if any."""
        if not any(view is not None for view in views.values()):
            return
        rows = []
        for row, (place, part) in enumerate(zip(batch.places, batch.records.tolist(), strict=True)):
            chunk, start, size = part
            view = views.get(chunk)
            if view is None:
                rows.append(row)
            else:
                batch.found[place] = view[start : start + size].toreadonly()
        self._counts["mapped_reads"] += len(batch.places) - len(rows)
        batch.records = batch.records[rows]
        batch.places = [batch.places[row] for row in rows]

    def _read_one(self, chunk: int, start: int, room: memoryview) -> bool:
        """Fill `room` with one part, where the master has it. Few operations, as there are very
        many such reads."""
        size = len(room)
        view = self._mapped.find(chunk)
        if view is None and (self._read_cost_s.item(chunk) >= PIN_COST_S or size >= EAGER_BYTES):
            view = self._pin_chunk(chunk, fetch=False)
            self._read_cost_s[chunk] = 0.0
        if view is not None:
            self._counts["mapped_reads"] += 1
            room[:] = view[start : start + size]
            return True
        records = np.array(((chunk, start, size),), np.uint32)
        reading = self._link.read(records)
        if reading is None:
            return False
        with reading as given:
            sources = given.sources.copy()
            source, at = sources.item(0), given.offsets.item(0)
            if source != wire.SOURCE_NONE:
                room[:] = given.window[at : at + size]
        if source == wire.SOURCE_HERE:
            self._read_cost_s[chunk] += READ_COST_S + PART_S + size / BYTES_PER_S
        self._record_sources(records, sources, int(source != wire.SOURCE_NONE))
        return source != wire.SOURCE_NONE

    def _record_sources(
        self, records: wire.Parts, sources: npt.NDArray[np.uint16], given: int
    ) -> None:
        """Remember which node gave which parts."""
        self._counts["master_reads"] += given
        self._recent.append((records, sources))

    def _pin_worthwhile(self, records: wire.Parts) -> dict[int, memoryview]:
        """Pin and map the chunks for which that is worth it, as far as the master has them."""
        chunks = records[:, 0]
        is_due = self._read_cost_s[chunks] >= PIN_COST_S
        if int(records[:, 2].sum(dtype=np.int64)) >= EAGER_BYTES:
            wanted_bytes = np.bincount(
                np.unique(chunks, return_inverse=True)[1], weights=records[:, 2]
            )
            is_due |= wanted_bytes[np.unique(chunks, return_inverse=True)[1]] >= EAGER_BYTES
        found: dict[int, memoryview] = {}
        if not is_due.any():
            return found
        for chunk in np.unique(chunks[is_due])[:PINS_PER_READ_MAX].tolist():
            view = self._pin_chunk(chunk, fetch=False)
            self._read_cost_s[chunk] = 0.0  # also where it was not here: do not ask at each read
            if view is not None:
                found[chunk] = view
        return found

    def _pin_chunk(self, chunk: int, *, fetch: bool) -> memoryview | None:
        """Pin and map a chunk; None where the master does not have it. With `fetch`, the master may
        fetch it."""
        pinned = self._link.pin(chunk, fetch=fetch)
        if pinned is None or pinned.descriptor < 0:
            return None
        size = self._sizes[chunk]
        try:
            if os.fstat(pinned.descriptor).st_size < size:
                return None
            view = self._mapped.keep(chunk, pinned.descriptor, size)
        except OSError:  # no address space, or too many mappings
            return None
        finally:
            os.close(pinned.descriptor)
        self._counts["pins"] += 1
        self._start_heartbeat()
        return view

    def _report(self, chunk: int, start: int, size: int) -> None:
        """Tell the master which node sent damaged bytes, where that is known."""
        source = wire.SOURCE_HERE if self._mapped.drop_damaged(chunk) else wire.SOURCE_NONE
        for records, sources in reversed(list(self._recent)):
            if source != wire.SOURCE_NONE:
                break
            inside = (records[:, 0] == chunk) & (records[:, 1] <= start)
            inside &= records[:, 1].astype(np.int64) + records[:, 2] >= start + size
            if len(places := np.flatnonzero(inside)):
                source = int(sources[places[0]])
                break
        if source != wire.SOURCE_NONE:
            self._counts["damaged"] += 1
            part = wire.DamagedPart(chunk, start, size, source)
            self._link.notify(wire.LOCAL_DAMAGED, 1, wire.damaged_body(part))  # one part

    # Heartbeat

    def _start_heartbeat(self) -> None:
        """Start the heartbeat thread, unless this process has one."""
        if self._heartbeat_pid == os.getpid():
            return
        self._heartbeat_pid = os.getpid()
        self._closed = ended = threading.Event()
        weakref.finalize(self, ended.set)
        threading.Thread(
            target=_run_heartbeat, args=(self._link, self._mapped, ended, self._heartbeat_s),
            name="diesel-task", daemon=True,
        ).start()  # fmt: skip


def _restart_master(request: TaskRequest, socket_path: Path, has_served: bool) -> bool:
    """Start a master at this socket where it was killed, and returns whether it was started.
    `has_served` says whether the master has served this reader. Where it has not, it served readers
    of another version, which may have ended by now: a master is started where there is none. Raises
    DieselError."""
    if has_served:
        return restart_killed(request, socket_path)
    return not is_alive(socket_path) and join(request) == socket_path and is_alive(socket_path)


def _run_heartbeat(
    link: MasterLink, mapped: MappedChunks, ended: threading.Event, every_s: float
) -> None:
    """Tell the master which chunks were unmapped, and learn which ones it revokes, until the store
    is closed (`ended`) and no view of its chunks is left."""
    while not (ended.wait(every_s) and not mapped.has_mapped):
        if ended.is_set():
            mapped.release_all()
            time.sleep(every_s)
        quiet_s = time.monotonic() - link.exchanged_s
        if mapped.has_unmapped or (mapped.has_mapped and quiet_s >= every_s):
            link.return_unmapped()
    link.close()
