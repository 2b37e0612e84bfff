"""The object store of a reader in a task. Reads of the task's version of the dataset are served by
the task's nodes as far as they have the chunks, the rest by the repository's own object store.

The caller checks the bytes, and reports damage by `read_uncached`. A reader never gets an error
because of a master. Thread-safe; a forked child may go on with its parent's object.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import numpy as np

from ...cache.fetching.stored_parts import StoredParts
from ...format.object_names import chunk_of_object, identity_of_object
from ...format.snapshot.reader import Snapshot
from ...repository.interface import Repository
from ...repository.private_copies import snapshot_descriptor
from ...storage.objects.store import (
    CheckedObject,
    ChunkReader,
    FastReads,
    ObjectStore,
    Part,
    ReadGroup,
    StoreWrapper,
    batched_parts,
    check_range,
)
from .. import local_wire, wire
from ..launch import is_alive, join, restart_killed, wait_until_gone
from ..members.options import TaskOptions, TaskRequest
from .chunk_files import ChunkFiles
from .mapped_chunks import MappedChunks
from .master_link import DEADLINE_S, PAUSE_S, MasterLink
from .task_chunks import HEARTBEAT_S, TaskChunks

READ_BYTES = 8 << 20
"""The most bytes of a request of `read_parts`; a larger part is read alone."""

MASTER_END_WAIT_S = 1.0
"""How long `join` waits for a master that does not accept this reader to end."""

_JOIN_ATTEMPTS = 3


def master_request(
    options: TaskOptions, repository: Repository, snapshot: Snapshot, *, memory_bytes: int
) -> TaskRequest:
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


class TaskStore(StoreWrapper):
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
        files: ChunkFiles | None = None,
    ) -> None:
        """`inner` is the repository's object store, `path` the master's socket; the first read
        connects. With `request`, a killed master is restarted. With `files`, whole chunks that are
        only on this node's disk are read from there: for a caller that keeps what it reads."""
        super().__init__(inner)
        self._path = os.fspath(path)
        self._request = request
        self._files = files
        self._identity = snapshot.identity
        self._sizes: list[int] = snapshot.chunk_sizes.tolist()
        self._version = snapshot.version
        # The last item, at -1, is for objects that are not chunks of this version
        self._size_column = np.append(snapshot.chunk_sizes.astype(np.int64), 0)
        self._numbers = {chunk: at for at, chunk in enumerate(snapshot.chunk_ids)}
        self._number_by_name: dict[str, int] = {}
        self._mapped = MappedChunks(snapshot.chunk_count)
        self._link = link = MasterLink(
            path, snapshot.identity, snapshot.version, self._mapped,
            deadline_s=deadline_s, pause_s=pause_s,
            restart=None if request is None else partial(_restart_master, request, Path(path)),
        )  # fmt: skip
        self._stored = StoredParts(snapshot, inner)
        self._chunks = TaskChunks(
            link, self._mapped, snapshot, self._stored,
            through_master=request is not None and request.peers_through_master,
            files=files,
            heartbeat_s=heartbeat_s,
        )  # fmt: skip

    @classmethod
    def join(
        cls,
        inner: ObjectStore,
        request: TaskRequest,
        snapshot: Snapshot,
        *,
        wait_s: float = MASTER_END_WAIT_S,
        files: ChunkFiles | None = None,
    ) -> "TaskStore":
        """Find or start the task's master on this node. If it does not accept this reader, it may
        be ending: then wait for its end, at most `wait_s`, and try again. Raises DieselError."""
        for _ in range(_JOIN_ATTEMPTS):
            socket_path = join(request)
            store = cls(inner, socket_path, snapshot, request=request, files=files)
            if store.connect() or not wait_until_gone(socket_path, wait_s):
                break  # otherwise the master has just ended: it was idle, or had another version
        return store

    def connect(self) -> bool:
        """Returns whether the master accepts this reader."""
        return self._link.connect()

    # Reading

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        room = memoryview(buffer)
        number = self._number(name)
        if number < 0 or not len(room) or start + len(room) > self._sizes[number]:
            self.inner.read_into(name, start, buffer)
            return
        found = self._chunks.try_part(number, start, len(room))
        if found is None:
            self._chunks.counts["store_reads"] += 1
            self.inner.read_into(name, start, buffer)
        else:
            room[:] = found[0]

    @property
    def fast_reads(self) -> FastReads:
        return _TaskReads(self)

    # The master

    def switch_version(self, snapshot: Snapshot) -> bool:
        """Report that this reader has switched to this version. Returns whether the master accepted
        it."""
        try:
            file = snapshot_descriptor(snapshot)
        except OSError:
            return False
        try:
            body = local_wire.switch_version_body(snapshot.version)
            return self._link.switch_version(body, file)
        finally:
            os.close(file)

    def at_version(self, snapshot: Snapshot) -> "TaskStore":
        """A store for another version, to which the master switches. This store stays usable."""
        is_announced = self.switch_version(snapshot)
        request = self._request and replace(self._request, version=snapshot.version)
        store = TaskStore(self.inner, self._path, snapshot, request=request, files=self._files)
        store._link.rank = self._link.rank
        if is_announced:
            store.connect()  # else the master would count no reader until the first read
        return store

    def send_plan(self, body: bytes) -> int | None:
        return self._link.send_plan(body)

    def stats(self) -> dict[str, object]:
        """Adds whether the master `answers`, and this reader's statistics under `client`."""
        text = self._link.stats()
        try:
            reported = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            reported = {}
        return {
            **(reported if isinstance(reported, dict) else {}),
            "answers": bool(text),
            "client": {
                **self._chunks.stats(),
                "mapped_chunks": len(self._mapped),
                "mapped_bytes": self._mapped.kept_bytes,
                **self._link.counts,
            },
        }

    @property
    def read_counts(self) -> tuple[int, int]:
        """Parts from the task's cache, and from the store."""
        counts = self._chunks.counts
        hits = counts["mapped_reads"] + counts["local_reads"] + counts["peer_reads"]
        return hits, counts["store_reads"]

    def retry(self) -> None:
        """Ask the master again at once: another reader has announced this version."""
        self._link.retry()

    def close(self) -> None:
        """Views stay valid; each chunk is unpinned with its last view. May be called again."""
        self._chunks.close()
        self._stored.close()

    def _number(self, name: str) -> int:
        """The chunk in the object `name`; -1 if it is none of this version."""
        number = self._number_by_name.get(name)
        if number is None:
            chunk = chunk_of_object(name)
            known = chunk is not None and identity_of_object(name) == self._identity
            number = self._numbers.get(chunk, -1) if known and chunk is not None else -1
            if number >= 0:
                self._number_by_name[name] = number
        return number


class _TaskReads(FastReads):
    _store: TaskStore

    batches_reads = True
    can_pin = True

    def __init__(self, store: TaskStore) -> None:
        super().__init__(store)
        self._inner = store.inner.fast_reads

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        yield from self.read_parts([(name, start, size) for start, size in ranges])

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """Reads one batch ahead: the first one is in flight when this returns. Bytes of mapped
        chunks are not copied."""
        batches = batched_parts(parts, wire.PARTS_MAX, READ_BYTES)
        first = next(batches, None)
        return iter(()) if first is None else self._read_batches(self._begin(first), batches)

    def _read_batches(
        self, begun: "_Batch", batches: Iterator[Sequence[Part]]
    ) -> Iterator[memoryview]:
        for parts in batches:
            following = self._begin(parts)
            yield from self._finish(begun)
            begun = following
        yield from self._finish(begun)

    def chunk_reader(self, identity: UUID, version: int) -> ChunkReader | None:
        if (identity, version) == (self._store._identity, self._store._version):
            return self._store._chunks
        return self._inner.chunk_reader(identity, version)

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        number = self._store._number(name)
        view = None if number < 0 else self._store._mapped.find(number)
        if view is None:
            return self._inner.read_nowait(name, start, buffer)
        found = view[start : start + len(buffer)]
        if len(found) != len(buffer):
            return False
        buffer[:] = found
        self._store._chunks.counts["mapped_reads"] += 1
        return True

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Cached bytes were damaged: read from the store, and report the node that gave them."""
        number = self._store._number(name)
        if number >= 0:
            self._store._chunks.report_damage(number, start, len(buffer))
        self._inner.read_uncached(name, start, buffer)

    def pin(self, name: str, on_revoke: Callable[[], None]) -> CheckedObject | None:
        number = self._store._number(name)
        if number < 0:
            return None
        view = self._store._mapped.find(number)
        if view is None:
            found = self._store._chunks.read_whole(number)
        else:
            found = CheckedObject(view, is_shared=True)
        if found is not None and found.is_shared:
            self._store._mapped.on_revoke(number, on_revoke)
        return found

    def can_pin_nowait(self, name: str) -> bool:
        number = self._store._number(name)
        return number >= 0 and self._store._mapped.find(number) is not None

    def _begin(self, parts: Sequence[Part]) -> "_Batch":
        names, starts, sizes = zip(*parts, strict=True)
        numbers = list(map(self._store._number_by_name.get, names))
        if None in numbers:
            for part in parts:
                check_range(*part)
            numbers = list(map(self._store._number, names))
        chunk, start, size = np.array((numbers, starts, sizes), np.int64)
        fits = (start >= 0) & (size > 0) & (start + size <= self._store._size_column[chunk])
        places = np.flatnonzero(fits)
        wanted = np.stack((chunk, start, size), 1)[places].astype(np.uint32)
        reading = self._store._chunks.begin(wanted)
        return _Batch(parts, places.tolist(), reading)

    def _finish(self, batch: "_Batch") -> Iterable[memoryview]:
        parts, places = batch.parts, batch.places
        found: dict[int, memoryview] = {}
        for group in batch.reading:
            found.update(zip(map(places.__getitem__, group.places), group.contents, strict=True))
        others = [part for at, part in enumerate(parts) if at not in found]
        rest = self._inner.read_parts(others) if others else iter(())
        return [found[at] if at in found else next(rest) for at in range(len(parts))]


class _Batch(NamedTuple):
    """`reading` yields the parts at `places`, which are parts of chunks; the others must be read
    from the store."""

    parts: Sequence[Part]
    places: Sequence[int]
    reading: Iterator[ReadGroup]


def _restart_master(request: TaskRequest, socket_path: Path, has_served: bool) -> bool:
    """Restart the master of a link that cannot connect. Returns whether one was started. Raises
    DieselError.

    If the master has served this reader (`has_served`), it is restarted only if it was killed.
    Otherwise it served another version, and may have ended with its readers: then a master is
    started unless one is alive.
    """
    if has_served:
        return restart_killed(request, socket_path)
    return not is_alive(socket_path) and join(request) == socket_path and is_alive(socket_path)
