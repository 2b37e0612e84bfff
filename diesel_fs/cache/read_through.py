"""The fast tier of a server: whole chunks on a shelf, filled behind the reads of those who wait.

Owned here: which chunks are fetched for the shelf, when, and in which order; what a read of the
store costs; the counts by tier. Not owned: the shelf (`tiers.py`, `disk.py`), merging reads
(`range_reader.py`), the object store.

`ReadThroughCache` is the object store that a server's repository stands on: what is read through
its methods comes from the store itself, so that verifying and recovering see the truth; it hears of
deletions alone. What is served to readers goes through `find`, `read_store` and `record_miss`.

A miss brings its own chunk first and then, where the shelf is a disk's, the rest of its dataset in
order. In memory there is room for less: there a chunk is fetched once it is paid for, which is when
its misses have cost as much as fetching it does (rent, then buy: at most twice what was needed,
whatever is asked for).

Fetching yields: unless the chunk is paid for, no fetch begins while somebody waits for the store,
in this process or in another that shares the shelf; but were there always somebody, the shelf would
never fill, so after `PATIENCE_S` one begins, and then the fetcher rests `REST_FACTOR` times as long
as that took.

Any thread. The fetchers are threads of this process, begun by the first miss; not in forked
children.
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
from ..net.budget import MemoryBudget
from ..storage.objects.store import ObjectInfo, ObjectStore, StoreWrapper
from .tiers import CacheHandle, CacheTier, ChunkKey, verify_chunk

log = logging.getLogger("diesel.cache")

FETCHERS = 2
"""Fetches for the shelf at once per process: the second hides the store's latency; the rest of its
bandwidth is for who waits."""

PATIENCE_S = 0.2
REST_FACTOR = 4.0
"""While somebody always waits, a fifth of a fetcher's time at most."""

WORTH_MEMORY_S = 0.0005
"""Where a request costs less, the store is as near as memory (a folder's page cache: 0.02 ms)."""

FETCH_BYTES_MAX = 256 << 20
"""Memory of chunks that are being fetched, per process; a larger chunk goes alone."""

RETRY_S = 60.0
"""Before the rest of a dataset is looked at again, a failure tried again, or a full shelf."""

_FETCH_WAIT_S = 60.0
_LISTING_POLL_S = 0.05
_MISSED_MAX = 1024  # chunks that wait to be fetched; more misses bring the dataset in order
_OFFERED_BYTES_MAX = 64 << 20  # of readers' own copies that wait to be put on the shelf
_NOTED_MAX = 65_536
_CLOSE_S = 5.0

Noted = TypeVar("Noted")

Counted = Callable[[str, int, int], None]
"""Told of reads: by which tier (`memory`, `disk`, `store`), how many, and their bytes."""


class ReadCostModel:
    """What reading from the store costs, as far as it has been seen.

    Two numbers, each a moving average: they only weigh one way of reading against another. Threads
    may lose one another's samples.
    """

    def __init__(self) -> None:
        self.request_s = 0.005
        self.bytes_per_s = 100e6

    def observe(self, size: int, seconds: float) -> None:
        """A read of `size` bytes took so long."""
        if size <= _SMALL_BYTES:
            self.request_s += (min(seconds, 1.0) - self.request_s) / 8
        elif size >= _LARGE_BYTES:
            rate = size / max(seconds - self.request_s, seconds / 4, 1e-6)
            self.bytes_per_s += (rate - self.bytes_per_s) / 8

    @property
    def gap_bytes(self) -> int:
        """Bytes that nobody wants and that cost as much as another request."""
        return int(min(max(self.request_s * self.bytes_per_s, _GAP_MIN), _GAP_MAX))

    def read_s(self, size: int) -> float:
        """Seconds for one read of so many bytes."""
        return self.request_s + size / self.bytes_per_s


_SMALL_BYTES, _LARGE_BYTES = 64 << 10, 1 << 20
_GAP_MIN, _GAP_MAX = 4 << 10, 4 << 20


@dataclass(slots=True)
class _Missed:
    """A chunk to be fetched: what a reader had of it, where that was all; whether it is paid
    for."""

    content: memoryview | None = None
    is_admitted: bool = False


class ReadThroughCache(StoreWrapper):
    """A store with a shelf in front of it, or with none (`shelf` None): see the module."""

    def __init__(
        self,
        inner: ObjectStore,
        shelf: CacheTier | None = None,
        *,
        counted: Counted | None = None,
    ) -> None:
        super().__init__(inner)
        self.costs = ReadCostModel()
        self._tier = shelf
        self._counted = counted
        self._counts: Counter[str] = Counter()
        self._work = threading.Condition()
        self._waiting = 0  # readers that wait for the store
        self._missed: OrderedDict[ChunkKey, _Missed] = OrderedDict()
        self._fetching: dict[ChunkKey, _Missed] = {}
        self._offered_bytes = 0
        self._datasets: OrderedDict[UUID, Iterator[ObjectInfo]] = OrderedDict()
        self._not_before: OrderedDict[ChunkKey | UUID, float] = OrderedDict()
        self._full_until_s = 0.0
        self._credit_s: OrderedDict[ChunkKey, float] = (
            OrderedDict()
        )  # seconds that misses have cost
        self._listing = threading.Lock()
        self._budget = MemoryBudget(FETCH_BYTES_MAX)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def delete(self, name: str) -> None:
        self.inner.delete(name)
        key = _key_of(name)
        if key is not None and self._tier is not None:
            self._tier.drop(key)

    # For who serves readers

    def find(self, key: ChunkKey) -> CacheHandle | None:
        """The chunk where it stands on the shelf. Close it."""
        return None if self._tier is None else self._tier.find(key)

    def count(self, held: CacheHandle | None, reads: int, size: int) -> None:
        """So many reads were served by the shelf (`held`) or by the store."""
        kind = "store" if held is None or self._tier is None else self._tier.kind
        with self._work:
            self._counts[f"{kind}_reads"] += reads
            self._counts[f"{kind}_bytes"] += size
        if self._counted is not None:
            self._counted(kind, reads, size)

    def read_store(self, key: ChunkKey, start: int, buffer: memoryview) -> None:
        """Read from the store for somebody who waits. Raises as `read_into`."""
        with self._work:
            self._waiting += 1
            self._counts["store_requests"] += 1
        if self._tier is not None:
            self._tier.note_reading(begins=True)
        begun_s = time.monotonic()
        try:
            self.inner.read_into(chunk_object(*key), start, buffer)
        finally:
            if self._tier is not None:
                self._tier.note_reading(begins=False)
            with self._work:
                self._waiting -= 1
                if not self._waiting:
                    self._work.notify_all()
        self.costs.observe(len(buffer), time.monotonic() - begun_s)

    def record_miss(self, key: ChunkKey, start: int, content: memoryview) -> None:
        """A reader had to be served from the store: these bytes, which will not change, from
        `start` on. They are used where they are the whole chunk."""
        shelf = self._tier
        if shelf is None or self._closed:
            return
        shelf.note_use(key.identity)
        with self._work:
            now_s = time.monotonic()
            if now_s < max(self._full_until_s, self._not_before.get(key, 0.0)):
                return
            bought = self._admit(key, start, len(content))
            if not bought and not shelf.prefetches_datasets:
                return
            missed = self._fetching.get(key) or self._missed.get(key)
            if missed is None and len(self._missed) < _MISSED_MAX:
                missed = self._missed[key] = _Missed(self._kept(key, start, content))
            if missed is not None and bought:
                missed.is_admitted = True
                if key in self._missed:
                    self._missed.move_to_end(key, last=False)
            if (
                shelf.prefetches_datasets
                and key.identity not in self._datasets
                and now_s >= self._not_before.get(key.identity, 0.0)
            ):
                self._datasets[key.identity] = self.inner.list(chunk_prefix(key.identity))
            self._begin()
            self._work.notify_all()

    def report_damage(self, key: ChunkKey) -> None:
        """A reader says that bytes of this chunk were damaged."""
        if self._tier is not None:
            self._tier.report_damage(key)

    def stats(self) -> dict[str, int]:
        """Counts since the tier was made: reads and bytes by tier, and what was fetched."""
        return dict(self._counts)

    def close(self) -> None:
        """End the fetchers, and the shelf. Repeatable."""
        with self._work:
            self._closed = True
            self._missed.clear()
            self._datasets.clear()
            self._work.notify_all()
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        if self._tier is not None:
            self._tier.close()

    # What is worth fetching; with the lock

    def _admit(self, key: ChunkKey, start: int, size: int) -> bool:
        """Whether the misses of a chunk have cost as much as fetching it would have."""
        if self.costs.request_s < WORTH_MEMORY_S:
            return False
        rent_s = self._credit_s.pop(key, 0.0) + self.costs.read_s(size)
        if rent_s >= self.costs.read_s(max(CHUNK_BYTES_DEFAULT, start + size)):
            return True
        _note(self._credit_s, key, rent_s)
        return False

    def _kept(self, key: ChunkKey, start: int, content: memoryview) -> memoryview | None:
        """A reader's bytes, where they are the whole chunk and few others are kept."""
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
            except Exception:  # whatever it is, readers are served without
                log.exception("a chunk could not be fetched ahead")
                time.sleep(1.0)

    def _fetch_next(self) -> None:
        """What was missed first, then the rest of its dataset; waits where there is nothing."""
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
            self._bring_next_of(identity)

    def _bring_next_of(self, identity: UUID) -> None:
        """The next chunk of a dataset; at the end of its chunks, or of the room, it is done."""
        if not self._listing.acquire(blocking=False):
            with self._work:  # another fetcher looks for what comes next
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
        """The next chunk of a dataset that is not on the shelf."""
        shelf, infos = self._tier, self._datasets.get(identity)
        assert shelf is not None
        with contextlib.suppress(DieselError):  # a listing that fails begins again with a miss
            for info in infos or ():
                key = _key_of(info.name)
                if self._closed:
                    break
                if key is None or shelf.holds(key):
                    continue
                if time.monotonic() >= self._not_before.get(key, 0.0):
                    return info
        return None

    def _claim(self, key: ChunkKey, missed: _Missed) -> bool:
        """Whether a chunk is now the caller's to fetch. With the lock."""
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
        """Put a chunk that was claimed on the shelf; False where it is no use to go on with
        others."""
        try:
            return self._insert(key, missed, size)
        finally:
            with self._work:
                del self._fetching[key]
                self._offered_bytes -= len(missed.content or b"")

    def _insert(self, key: ChunkKey, missed: _Missed, size: int) -> bool:
        shelf = self._tier
        assert shelf is not None
        if shelf.holds(key):
            return True
        try:
            if missed.content is not None:
                size = len(missed.content)
            elif not size:
                size = self.inner.stat(chunk_object(*key)).bytes
            place = shelf.reserve(key, size)
        except NoSpaceError:
            self._full_until_s = time.monotonic() + RETRY_S
            return False
        except DieselError as error:
            return self._failed(key, error)
        if place is None:
            return True
        try:
            content = self._whole(key, missed, size)
        except (DieselError, MemoryError) as error:
            place.cancel()
            return self._failed(key, error)
        except BaseException:
            place.cancel()
            raise
        place.commit(content)
        with self._work:
            self._counts["kept_chunks"] += 1
        return True

    def _failed(self, key: ChunkKey, error: Exception) -> bool:
        """Leave a chunk alone for a while; whether others may fare better."""
        with self._work:
            _note(self._not_before, key, time.monotonic() + RETRY_S)
        if isinstance(error, FormatError):
            log.warning("not kept in the cache: %s", error)
        return isinstance(error, (FormatError, ObjectMissing))

    def _whole(self, key: ChunkKey, missed: _Missed, size: int) -> memoryview:
        """The chunk, checked, in memory that may be kept."""
        shelf, content = self._tier, missed.content
        assert shelf is not None
        if content is None or not shelf.prefetches_datasets:
            # What stays in memory is counted by the shelf, and not taken out of a reader's answer
            room = (
                self._budget.allocate(size, _FETCH_WAIT_S)
                if shelf.prefetches_datasets
                else np.empty(size, np.uint8).data
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
        """Until nobody waits for the store, or the chunk is paid for; True where the patience ended
        before."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._closed and not missed.is_admitted:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return True
            with self._work:
                if self._waiting and not missed.is_admitted:
                    self._work.wait(left_s)
                    continue
            if self._tier is None or not self._tier.others_read():
                return False
            time.sleep(min(left_s, 0.01))
        return False

    def _rest(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        with self._work:
            while not self._closed and (left_s := until_s - time.monotonic()) > 0:
                self._work.wait(left_s)


def _key_of(name: str) -> ChunkKey | None:
    """The key of a chunk object's name; None for other objects."""
    identity, chunk = identity_of_object(name), chunk_of_object(name)
    return None if identity is None or chunk is None else ChunkKey(identity, chunk)


def _note(notes: "OrderedDict[Noted, float]", what: "Noted", value: float) -> None:
    """Note a number; the oldest notes go where there are too many."""
    notes[what] = value
    notes.move_to_end(what)
    if len(notes) > _NOTED_MAX:
        notes.popitem(last=False)
