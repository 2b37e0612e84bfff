"""Serves a server's readers from a cache tier, and fills that tier with the chunks that they miss.

`ReadThroughCache` wraps the object store of a server's repository. Its store methods read the store
itself, so that verify and recover see the store's own bytes. For a client, the server calls `find`;
if the tier lacks the chunk, it calls `read_store` and then `record_miss`. Fetcher threads bring the
missed chunks into the tier, whole and checked.

Which chunks: a tier on a disk gets the missed chunk, and then the rest of its dataset. A tier in
memory has less room, so it gets a chunk only once the misses on it have cost as much time as
fetching it does (ski rental: at most twice the cost of the best choice, whatever is read). Such a
chunk is *admitted*.

When: fetching gives way to readers. Unless its chunk is admitted, no fetch begins while a reader
waits for the store, in this process or in another that shares the tier. If readers always wait, a
fetch begins all the same after `PATIENCE_S`, and then its thread rests for `REST_FACTOR` times the
duration of that fetch.

Safe from any thread, but not in forked children: the first miss starts the fetchers' threads.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import numpy as np

from ..errors import DieselError, FormatError, NoSpaceError, ObjectMissing
from ..format.chunk import CHUNK_BYTES_DEFAULT, parse_preamble
from ..format.object_names import chunk_object, chunk_of_object, chunk_prefix, identity_of_object
from ..net.breaker import CircuitBreaker
from ..net.budget import MemoryBudget
from ..storage.objects.store import ObjectInfo, ObjectStore, StoreWrapper
from .policies.costs import ReadCosts
from .tiers import CacheHandle, CacheTier, ChunkKey, verify_chunk

log = logging.getLogger("diesel.cache")

FETCHERS = 2
"""Fetches at once per process. The second hides the store's latency; more would take bandwidth from
readers that wait."""

PATIENCE_S = 0.2
REST_FACTOR = 4.0
"""How fetchers give way (see the module): at most a fifth of their time if readers always wait."""

SLOW_REQUEST_S = 0.0005
"""No chunk is admitted if the store answers faster than this: about as fast as the tier would (a
folder in the page cache takes 0.02 ms)."""

FETCH_BYTES_MAX = 256 << 20
"""Memory, per process, of chunks that are being fetched for a tier on a disk. A larger chunk is
fetched alone."""

RETRY_S = 60.0
"""The pause after a failed fetch (for that chunk), after the tier was full (for all chunks), and
after a dataset's last chunk (before the dataset is listed again)."""

_FETCH_WAIT_S = 60.0
_LISTING_POLL_S = 0.05
_MISSED_MAX = 1024  # chunks that wait to be fetched; further misses only fetch the dataset in order
_OFFERED_BYTES_MAX = 64 << 20  # whole chunks that readers have read and that wait for the tier
_NOTED_MAX = 65_536  # the most keys that `_note` leaves in a table
_CLOSE_S = 5.0

Noted = TypeVar("Noted")

Counted = Callable[[str, int, int], None]
"""Called with the place that served reads (`memory`, `disk`, `store`), their number and
their bytes."""


@dataclass(slots=True)
class _Missed:
    content: memoryview | None = None
    is_admitted: bool = False  # its misses have cost as much as fetching it


class ReadThroughCache(StoreWrapper):
    def __init__(
        self,
        inner: ObjectStore,
        tier: CacheTier,
        *,
        counted: Counted = lambda *_: None,
    ) -> None:
        super().__init__(inner)
        self.costs = ReadCosts()
        self._tier = tier
        self._counted = counted
        self._counts: Counter[str] = Counter()
        self._work = threading.Condition()
        self._waiting = 0  # readers that wait for the store now
        self._missed: OrderedDict[ChunkKey, _Missed] = OrderedDict()
        self._fetching: dict[ChunkKey, _Missed] = {}
        self._offered_bytes = 0
        # Datasets to fetch whole, by identity: the rest of the listing
        self._datasets: OrderedDict[UUID, Iterator[ObjectInfo]] = OrderedDict()
        # When a chunk, or a dataset by its identity, is tried again
        self._not_before: OrderedDict[ChunkKey | UUID, float] = OrderedDict()
        self._full_tier = CircuitBreaker(1, RETRY_S)
        self._credit_s: OrderedDict[ChunkKey, float] = OrderedDict()  # what misses have cost
        self._listing = threading.Lock()
        self._budget = MemoryBudget(FETCH_BYTES_MAX)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def delete(self, name: str) -> None:
        self.inner.delete(name)
        key = _key_of(name)
        if key is not None:
            self._tier.drop(key)

    # For reads of clients

    def find(self, key: ChunkKey) -> CacheHandle | None:
        """The caller closes the chunk."""
        return self._tier.find(key)

    def count(self, held: CacheHandle | None, reads: int, size: int) -> None:
        """Count reads that the tier (`held` is its chunk) or the store (None) has served."""
        kind = "store" if held is None else self._tier.kind
        with self._work:
            self._counts[f"{kind}_reads"] += reads
            self._counts[f"{kind}_bytes"] += size
        self._counted(kind, reads, size)

    def read_store(self, key: ChunkKey, start: int, buffer: memoryview) -> None:
        """Read for a client that waits. Raises as `ObjectStore.read_into`."""
        with self._work:
            self._waiting += 1
            self._counts["store_requests"] += 1
        self._tier.note_reading(begins=True)
        begun_s = time.monotonic()
        try:
            self.inner.read_into(chunk_object(*key), start, buffer)
        finally:
            self._tier.note_reading(begins=False)
            with self._work:
                self._waiting -= 1
                if not self._waiting:
                    self._work.notify_all()
        self.costs.observe(len(buffer), time.monotonic() - begun_s)

    def record_miss(self, key: ChunkKey, start: int, content: memoryview) -> None:
        """Note that a reader got these bytes of a chunk out of the store. The caller does not
        change `content` afterwards: a whole chunk may go into the tier."""
        tier = self._tier
        if self._closed:
            return
        tier.note_use(key.identity)
        with self._work:
            now_s = time.monotonic()
            if self._full_tier.is_open(now_s) or now_s < self._not_before.get(key, 0.0):
                return
            admitted = self._admit(key, start, len(content))
            if not admitted and not tier.prefetches_datasets:
                return
            missed = self._fetching.get(key) or self._missed.get(key)
            if missed is None and len(self._missed) < _MISSED_MAX:
                missed = self._missed[key] = _Missed(self._whole_chunk(key, start, content))
            if missed is not None and admitted:
                missed.is_admitted = True
                if key in self._missed:
                    self._missed.move_to_end(key, last=False)
            if (
                tier.prefetches_datasets
                and key.identity not in self._datasets
                and now_s >= self._not_before.get(key.identity, 0.0)
            ):
                self._datasets[key.identity] = self.inner.list(chunk_prefix(key.identity))
            self._begin()
            self._work.notify_all()

    def report_damage(self, key: ChunkKey) -> None:
        self._tier.report_damage(key)

    def stats(self) -> dict[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        """Repeatable."""
        with self._work:
            self._closed = True
            self._missed.clear()
            self._datasets.clear()
            self._work.notify_all()
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        self._tier.close()

    # Which chunks are worth fetching. Called with the lock

    def _admit(self, key: ChunkKey, start: int, size: int) -> bool:
        if self.costs.latency_s < SLOW_REQUEST_S:
            return False
        credit_s = self._credit_s.pop(key, 0.0) + self.costs.read_s(size)
        if credit_s >= self.costs.read_s(max(CHUNK_BYTES_DEFAULT, start + size)):
            return True
        _note(self._credit_s, key, credit_s)
        return False

    def _whole_chunk(self, key: ChunkKey, start: int, content: memoryview) -> memoryview | None:
        """`content` if it is a whole chunk and `_OFFERED_BYTES_MAX` leaves room, else None."""
        size = len(content)
        if not start and self._offered_bytes + size <= _OFFERED_BYTES_MAX:
            with contextlib.suppress(FormatError):
                parse_preamble(content, identity=key.identity, id=key.id, object_bytes=size)
                self._offered_bytes += size
                return content
        return None

    # The fetchers

    def _begin(self) -> None:
        if not self._threads:
            for number in range(FETCHERS):
                name = f"tier-{number}"
                thread = threading.Thread(target=self._fetch_always, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _fetch_always(self) -> None:
        while not self._closed:
            try:
                self._fetch_next()
            except Exception:  # a bug here must not stop the server
                log.exception("unexpected error while fetching a chunk into the cache")
                time.sleep(1.0)

    def _fetch_next(self) -> None:
        """Wait for work, then fetch one chunk: a missed one (admitted ones first), else the next of
        a dataset."""
        with self._work:
            while not (self._missed or self._datasets or self._closed):
                self._work.wait()
            if self._closed:
                return
            taken = self._missed.popitem(last=False) if self._missed else None
            is_mine = taken is not None and self._claim(*taken)
            identity = next(iter(self._datasets), None)
        if taken is not None:
            if is_mine:
                self._load_claimed(*taken)
        elif identity is not None:
            self._fetch_next_of(identity)

    def _fetch_next_of(self, identity: UUID) -> None:
        """After the dataset's last chunk, and if the tier is full, the dataset is forgotten for a
        while."""
        if not self._listing.acquire(blocking=False):
            with self._work:  # another fetcher is listing
                self._work.wait(_LISTING_POLL_S)
            return
        try:
            info = self._next_absent(identity)
        finally:
            self._listing.release()
        key, missed = None if info is None else _key_of(info.name), _Missed()
        with self._work:
            if key is not None and not self._claim(key, missed):
                return
        if info is None or key is None or not self._load_claimed(key, missed, info.bytes):
            with self._work:
                self._datasets.pop(identity, None)
                _note(self._not_before, identity, time.monotonic() + RETRY_S)

    def _next_absent(self, identity: UUID) -> ObjectInfo | None:
        infos = self._datasets.get(identity)
        with contextlib.suppress(DieselError):  # the next miss begins another listing
            for info in infos or ():
                key = _key_of(info.name)
                if self._closed:
                    break
                if key is None or self._tier.holds(key):
                    continue
                if time.monotonic() >= self._not_before.get(key, 0.0):
                    return info
        return None

    def _claim(self, key: ChunkKey, missed: _Missed) -> bool:
        """Whether the caller shall fetch a chunk: not if another fetcher does, or if it failed a
        short time ago; then `missed` is dropped. Called with the lock."""
        other = self._fetching.get(key)
        if other is None and time.monotonic() >= self._not_before.get(key, 0.0):
            self._fetching[key] = missed
            return True
        if other is not None and missed.is_admitted:
            other.is_admitted = True
            self._work.notify_all()
        self._offered_bytes -= len(missed.content or b"")
        return False

    def _load_claimed(self, key: ChunkKey, missed: _Missed, size: int = 0) -> bool:
        """Returns whether to go on with other chunks: False if the tier is full or the store
        fails."""
        try:
            return self._insert(key, missed, size)
        finally:
            with self._work:
                del self._fetching[key]
                self._offered_bytes -= len(missed.content or b"")

    def _insert(self, key: ChunkKey, missed: _Missed, size: int) -> bool:
        if self._tier.holds(key):
            return True
        try:
            if missed.content is not None:
                size = len(missed.content)
            elif not size:
                size = self.inner.stat(chunk_object(*key)).bytes
            reservation = self._tier.reserve(key, size)
        except NoSpaceError:
            self._full_tier.open(time.monotonic())
            return False
        except DieselError as error:
            return self._failed(key, error)
        if reservation is None:
            # The tier has the chunk, or another thread or process is bringing it
            return True
        try:
            content = self._checked_chunk(key, missed, size)
        except (DieselError, MemoryError) as error:
            reservation.cancel()
            return self._failed(key, error)
        except BaseException:
            reservation.cancel()
            raise
        reservation.commit(content)
        with self._work:
            self._counts["kept_chunks"] += 1
        return True

    def _failed(self, key: ChunkKey, error: Exception) -> bool:
        """Wait before this chunk is tried again. Returns whether to go on with other chunks."""
        with self._work:
            _note(self._not_before, key, time.monotonic() + RETRY_S)
        if isinstance(error, FormatError):
            log.warning("a damaged chunk is not kept in the cache: %s", error)
        return isinstance(error, (FormatError, ObjectMissing))

    def _checked_chunk(self, key: ChunkKey, missed: _Missed, size: int) -> memoryview:
        content, in_memory = missed.content, self._tier.kind == "memory"
        if content is None or in_memory:
            # The tier in memory keeps `room`, and counts it itself. A reader's bytes are copied, as
            # the reader's whole answer would stay in memory with them. For other tiers the budget
            # has `room` back when the last view of it is gone.
            room = (
                np.empty(size, np.uint8).data
                if in_memory
                else self._budget.allocate(size, _FETCH_WAIT_S)
            )
            if content is None:
                self._fetch(key, room, missed)
            else:
                room[:] = content
            content = room
        verify_chunk(key, content)
        return content

    def _fetch(self, key: ChunkKey, room: memoryview, missed: _Missed) -> None:
        was_busy = self._wait_until_quiet(missed)
        begun_s = time.monotonic()
        self.inner.read_into(chunk_object(*key), 0, room)
        took_s = time.monotonic() - begun_s
        self.costs.observe(len(room), took_s)
        with self._work:
            self._counts["fetched_chunks"] += 1
            self._counts["fetched_bytes"] += len(room)
        if was_busy:
            self._rest(took_s * REST_FACTOR)

    def _wait_until_quiet(self, missed: _Missed) -> bool:
        """Wait at most `PATIENCE_S`. Returns whether the time ended first, so that the thread must
        rest later."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._closed and not missed.is_admitted:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return True
            with self._work:
                if self._waiting and not missed.is_admitted:
                    self._work.wait(left_s)
                    continue
            if not self._tier.others_read():
                return False
            time.sleep(min(left_s, 0.01))
        return False

    def _rest(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        with self._work:
            while not self._closed and (left_s := until_s - time.monotonic()) > 0:
                self._work.wait(left_s)


def _key_of(name: str) -> ChunkKey | None:
    identity, chunk = identity_of_object(name), chunk_of_object(name)
    return None if identity is None or chunk is None else ChunkKey(identity, chunk)


def _note(notes: "OrderedDict[Noted, float]", what: "Noted", value: float) -> None:
    notes[what] = value
    notes.move_to_end(what)
    if len(notes) > _NOTED_MAX:
        notes.popitem(last=False)
