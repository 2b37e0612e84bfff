"""Simulates the epochs of a training job: hits, bytes, requests, and the time that each rank waits.

Mounts read in a fixed order, so the source of each read does not depend on time. `forecast` finds
the sources first (`reads.py`, `kept.py`), then simulates time by iterations:

- The ranks begin an iteration together, when the slowest has ended the one before (data parallel).
  Each rank then waits for its batch, and computes for `batch / images_per_s`.
- A node loads its pushes one after the other, as soon as its window has room. A push occupies the
  memory of its files until these have been read. A cache of files may lend the window its free
  memory, and the memory of files that are not used again. DataLoader workers read up to two batches
  each ahead of the model.
- A push takes as long as the slowest of its parts: the store, other nodes, the SSD, and pushing
  into the kernel. (Lobster, ICPP 2022, section 4.3, equation 1, adds these parts, since its threads
  read one file after the other; a mount reads in parallel.) The store serves a node at the store's
  rate, or more slowly if latency limits the parallel requests. A node that is loading no push also
  waits for the latency of one request.
- The files of a push arrive evenly, in the order of their places in the chunks. A file that is
  needed before the window has room for it is loaded at once.

A file is **kept** if a cache has held it since an earlier use, and **on time** if it is in the
node's memory when its rank begins to wait for the batch, kept there or loaded. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cache.fetching.coalesce import ReadLimits
from ..format.snapshot.reader import Indices
from ..mounts.prefetch.streams.units import PAGE_BYTES
from .kept import ORDER_LOG, STORE, TIERS, EpochSources, Layout, OnProgress, looks_ahead, replay
from .nodes import CONNECTIONS, ForecastJob
from .reads import EpochReads, ForecastFiles, Mask, Numbers, cut_epoch, epoch_order

IMBALANCE = 0.1
"""In an imbalanced iteration the waits of two ranks differ by more than this part of its compute
time."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpochForecast:
    """One epoch of all ranks together.

    `files` and `bytes` count the reads that each tier of `TIERS` served. `store_bytes` may be more
    than the store's `bytes`, since chunks are fetched whole. `on_time` is a fraction of all files,
    `imbalanced` of all iterations. `stall_s` is the time that each rank waited for its own batches.
    """

    files: tuple[int, ...]
    bytes: tuple[int, ...]
    store_bytes: int
    store_requests: int
    written_bytes: int
    seconds: float
    compute_s: float
    stall_s: tuple[float, ...]
    on_time: float
    imbalanced: float

    @property
    def kept(self) -> float:
        return 1 - self.files[STORE] / max(sum(self.files), 1)

    @property
    def stalled(self) -> float:
        """The part of the epoch in which ranks waited for reads, their own or others'."""
        return 1 - self.compute_s / self.seconds


@dataclass(frozen=True, slots=True)
class Forecast:
    policy: str
    layout: Layout
    job: ForecastJob
    epochs: tuple[EpochForecast, ...]

    @property
    def later(self) -> EpochForecast:
        """The last epoch, which stands for all but the first."""
        return self.epochs[-1]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.epochs)

    @property
    def price(self) -> float:
        store = self.job.store
        return sum(store.price(each.store_requests, each.store_bytes) for each in self.epochs)


def layout_of(policy: str) -> Layout:
    return "log" if policy == ORDER_LOG else "chunks"


def read_epochs(
    job: ForecastJob, files: ForecastFiles, given: Indices | None = None
) -> list[EpochReads]:
    """`given` is the user's order of all ranks, or None to draw one."""
    return [
        cut_epoch(job, files, epoch_order(job, files, epoch, given)) for epoch in range(job.epochs)
    ]


def forecast(
    job: ForecastJob,
    files: ForecastFiles,
    policy: str,
    *,
    given: Indices | None = None,
    reads: Sequence[EpochReads] | None = None,
    layout: Layout | None = None,
    progress: OnProgress = lambda _: None,
) -> Forecast:
    """Simulate a job with one policy. Raises UsageError for an unknown policy.

    `given`: as in `read_epochs`. `reads`: the result of `read_epochs`, which is the same for all
    policies; None computes it. `layout` replaces that of `layout_of`.
    """
    reads = read_epochs(job, files, given) if reads is None else reads
    layout = layout or layout_of(policy)
    following = None  # policies that look ahead need it, or the last epoch would differ
    if looks_ahead(policy, layout):
        following = cut_epoch(job, files, epoch_order(job, files, job.epochs, given))
    sources = replay(job, files, reads, policy, layout, following, progress)
    return Forecast(policy, layout, job, timed(job, files, reads, sources))


def timed(
    job: ForecastJob,
    files: ForecastFiles,
    reads: Sequence[EpochReads],
    sources: Sequence[EpochSources],
    *,
    shares_memory: bool = True,
) -> tuple[EpochForecast, ...]:
    """Simulate the time of each epoch, given its sources (`kept.replay`). With `shares_memory`, a
    cache of files lends the mount's window the memory that holds no file of later use."""
    clock = _Clock(job, files, reads, sources, shares_memory=shares_memory)
    done = []
    for number, (each, found) in enumerate(zip(reads, sources, strict=True)):
        passed = clock.pass_epoch(number)
        stored = files.stored[each.file]
        tiers = range(len(TIERS))
        done.append(
            EpochForecast(
                files=tuple(np.bincount(found.source, minlength=len(TIERS)).tolist()),
                bytes=tuple(int(stored[found.source == tier].sum()) for tier in tiers),
                store_bytes=int(found.store_bytes.sum()),
                store_requests=int(found.requests.sum()),
                written_bytes=found.written_bytes,
                seconds=passed.seconds,
                compute_s=passed.compute_s,
                stall_s=tuple(passed.stall_s.tolist()),
                on_time=passed.on_time,
                imbalanced=passed.imbalanced,
            )
        )
    return tuple(done)


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """The fields of `EpochForecast` that depend on time."""

    seconds: float
    compute_s: float
    stall_s: Seconds
    on_time: float
    imbalanced: float


class _Lane:
    def __init__(
        self, pushes: Numbers, pages_bytes: Seconds, needed: Numbers, room: Seconds
    ) -> None:
        """`pushes` has the numbers of the node's pushes (all nodes are counted together), in order,
        and `pages_bytes` the memory of each.

        By iteration, counted through all epochs: `needed` is the number of pushes that must have
        begun by then, and `room` the memory in bytes of all pushes that may have begun by then,
        including those whose files have been read.
        """
        self.pushes = pushes
        self.needed = needed.tolist()
        self.with_room = np.cumsum(pages_bytes).searchsorted(room, side="right").tolist()
        self.begun = 0  # pushes that have begun
        self.free_s = 0.0  # when the last push that has begun ends


class _Clock:
    def __init__(
        self,
        job: ForecastJob,
        files: ForecastFiles,
        reads: Sequence[EpochReads],
        sources: Sequence[EpochSources],
        *,
        shares_memory: bool,
    ) -> None:
        self._job = job
        self._shares_memory = shares_memory
        self._reads = reads
        self._now_s = 0.0
        self._iteration = 0
        counts = [len(each.rank) for each in reads]
        # Pushes before each epoch
        self._base = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._service = np.concatenate(
            [
                _service_s(job, files, each, found)
                for each, found in zip(reads, sources, strict=True)
            ]
        )
        self._latency = np.concatenate([_latency_s(job, each) for each in sources])
        self._end = np.full(len(self._service), np.inf)  # when each push has arrived
        self._resident = [
            _by_place(each, each.place[found.is_resident])
            for each, found in zip(reads, sources, strict=True)
        ]
        self._lanes = self._make_lanes(files, sources)

    def _make_lanes(self, files: ForecastFiles, sources: Sequence[EpochSources]) -> list[_Lane]:
        job, lanes = self._job, []
        pages = []  # by push
        for each, found in zip(self._reads, sources, strict=True):
            loaded = ~found.is_resident
            push = each.push[each.access[loaded]]
            size = files.pages[each.file[loaded]].astype(np.int64) * PAGE_BYTES
            pages.append(np.bincount(push, size, len(each.rank)))
        for node in range(job.nodes):
            ranks = slice(node * job.ranks, (node + 1) * job.ranks)
            mine = [each.rank // job.ranks == node for each in self._reads]
            pushes = [
                np.flatnonzero(flags) + base for flags, base in zip(mine, self._base, strict=False)
            ]
            needed, read, begun, read_before = [], [], 0, 0.0
            for number, each in enumerate(self._reads):
                place_in_lane = np.cumsum(mine[number]) + begun
                starts = np.arange(0, each.push_of.shape[1], job.batch)
                last = np.maximum.reduceat(each.push_of[ranks], starts, axis=1).max(axis=0)
                needed.append(place_in_lane[last])
                begun = int(place_in_lane[-1])
                mine_rows = ~sources[number].is_resident & mine[number][each.push[each.access]]
                place = each.place[mine_rows] % each.push_of.shape[1]
                size = files.pages[each.file[mine_rows]].astype(np.int64) * PAGE_BYTES
                by_place = np.cumsum(np.bincount(place, size, each.push_of.shape[1]))
                ahead = starts + 2 * job.workers * job.batch
                behind = np.minimum(ahead, each.push_of.shape[1]) - 1
                read.append(np.where(ahead > 0, by_place[behind], 0.0) + read_before)
                read_before += float(by_place[-1])
            lanes.append(
                _Lane(
                    np.concatenate(pushes),
                    np.concatenate([size[flags] for size, flags in zip(pages, mine, strict=True)]),
                    np.concatenate(needed),
                    np.concatenate(read) + self._window(files, node),
                )
            )
        return lanes

    def _window(self, files: ForecastFiles, node: int) -> Seconds:
        """The bytes of a node's window, by iteration: with `shares_memory` also the part of the
        cache's memory that holds no useful file. A file is useful from its last use before a hit
        until that hit."""
        job, numbers, rows, hits, first = self._job, [], [], [], 0
        for each, resident in zip(self._reads, self._resident, strict=True):
            length = each.push_of.shape[1]
            mine = each.rank[each.push[each.access]] // job.ranks == node
            numbers.append(each.place[mine] % length // job.batch + first)
            rows.append(each.file[mine])
            flags = np.zeros(len(rows[-1]), np.bool_)
            hits.append(flags if resident is None else resident.reshape(-1)[each.place[mine]])
            first += -(-length // job.batch)
        window = np.full(first, float(job.node.window_bytes))
        if not self._shares_memory or not any(flags.any() for flags in hits):
            return window
        iteration, file, is_hit = (np.concatenate(each) for each in (numbers, rows, hits))
        by_file = np.argsort(file, kind="stable")
        used = np.flatnonzero(is_hit[by_file])  # the entry before a hit is the file's earlier use
        size = files.stored[file[by_file[used]]]
        of_use = np.bincount(iteration[by_file[used - 1]], size, first)
        of_use -= np.bincount(iteration[by_file[used]], size, first)
        return window + job.node.memory_bytes - np.cumsum(of_use)

    def pass_epoch(self, number: int) -> _Passed:
        """Must be called once for each epoch, in order."""
        job, reads = self._job, self._reads[number]
        push_of = reads.push_of
        base = int(self._base[number])
        stall_s = np.zeros(job.world)
        length = push_of.shape[1]
        on_time = imbalanced = iterations = 0
        compute_s = waited_s = 0.0
        resident = self._resident[number]
        for start in range(0, length, job.batch):
            behind = min(start + job.batch, length)
            now_s = self._now_s
            for lane in self._lanes:
                self._load(lane, now_s)
            push = push_of[:, start:behind] + base
            arrival = self._end[push]
            arrival -= self._service[push] * (1 - reads.arrived_of[:, start:behind])
            if resident is not None:
                arrival[resident[:, start:behind]] = 0.0
            on_time += int(np.count_nonzero(arrival <= now_s))
            waits = np.maximum(arrival.max(axis=1) - now_s, 0.0)
            stall_s += waits
            slowest, batch_s = float(waits.max()), (behind - start) / job.images_per_s
            imbalanced += slowest - float(waits.min()) > IMBALANCE * batch_s
            compute_s += batch_s
            waited_s += slowest
            self._now_s += slowest + batch_s
            iterations += 1
            self._iteration += 1
        return _Passed(
            compute_s + waited_s,
            compute_s,
            stall_s,
            on_time / (length * job.world),
            imbalanced / max(iterations, 1),
        )

    def _load(self, lane: _Lane, now_s: float) -> None:
        """Begin the pushes that have room in the node's window, and those that the current
        iteration needs."""
        until = max(lane.with_room[self._iteration], lane.needed[self._iteration])
        if until <= lane.begun:
            return
        pushes = lane.pushes[lane.begun : until]
        service = self._service[pushes]
        begin_s = lane.free_s
        if begin_s < now_s or not now_s:  # nothing was under way
            begin_s = now_s + float(self._latency[pushes[0]])
        ends = begin_s + np.cumsum(service)
        self._end[pushes] = ends
        lane.begun, lane.free_s = until, float(ends[-1])


def _service_s(
    job: ForecastJob, files: ForecastFiles, reads: EpochReads, found: EpochSources
) -> Seconds:
    """The latency of the first request is not included."""
    node, store = job.node, job.store
    mean_bytes = found.store_bytes / np.maximum(found.requests, 1)
    ahead_bytes = ReadLimits.within(node.window_bytes).ahead_bytes
    at_once = np.clip(ahead_bytes / np.maximum(mean_bytes, 1), 1, CONNECTIONS)
    asking_s = found.requests * store.request_s + found.store_bytes / store.connection_bytes_per_s
    store_s = np.maximum(found.store_bytes / store.bytes_per_s, asking_s / at_once)
    loaded = ~found.is_resident
    push = reads.push[reads.access[loaded]]
    push_bytes = np.bincount(push, files.stored[reads.file[loaded]], len(reads.rank))
    # The epoch's writes take the disk's time too, spread evenly over the bytes read
    written = found.written_bytes * push_bytes / max(push_bytes.sum(), 1)
    disk_s = found.disk_bytes / node.disk_read_bytes_per_s + written / node.disk_write_bytes_per_s
    peer_s = found.peer_bytes / node.network_bytes_per_s
    slowest_s: Seconds = push_bytes / node.push_bytes_per_s
    for seconds in (store_s, disk_s, peer_s):
        np.maximum(slowest_s, seconds, out=slowest_s)
    return slowest_s


def _latency_s(job: ForecastJob, found: EpochSources) -> Seconds:
    """The time until the first byte of each push arrives if its node is loading no other push."""
    network_s = np.where(found.peer_bytes > 0, job.node.network_request_s, 0.0)
    return np.where(found.requests > 0, job.store.request_s, network_s)


def _by_place(reads: EpochReads, places: npt.NDArray[np.int32]) -> Mask | None:
    if not len(places):
        return None
    flags = np.zeros(reads.push_of.size, np.bool_)
    flags[places] = True
    return flags.reshape(reads.push_of.shape)
