"""`AutoDataLoader`: a `DataLoader` that adapts its number of workers to the speed of the loop.

The batches and their order are those of a stock `DataLoader`, and each epoch draws as much from
this process's random generators. The workers' random numbers are also the same, until the number of
workers changes.

An epoch is a chain of **segments**: each is the iterator of a stock `DataLoader` with workers of
its own. All segments draw indices from one iterator over the sampler. To change the number of
workers, the loader lets the old segment draw no more, and starts the next one. The loop gets the
batches that the old workers have prepared while the new workers prepare the following ones. So no
batch is lost, repeated or reordered, and the loop does not wait. Until the old workers end, both
groups use memory.

DLCache (section III-E) adds and pauses single workers, which would need the inner parts of torch's
iterator; this module uses only `_get_iterator` and `_reset`, as torchdata does. Not safe for
concurrent use.
"""

import inspect
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Never, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..errors import UsageError
from ..system.available_memory import default_memory_bytes
from .dataset import DieselDataset
from .sampler import ChunkShuffleSampler
from .timing import OnItsWay, Report, TimedCollate, arrived
from .workers import Controller, Measured, WorkerController, WorkerLimits

if TYPE_CHECKING:
    from torch.utils.data import Sampler

TUNE_EVERY = 50
"""The batches between two decisions on the number of workers: few averages then include a start
of workers."""

_PAUSE_FACTOR = 10
"""A time from a batch to the loop's next request that exceeds this many times the median counts as
a validation or a checkpoint, and is left out."""

_Batch = TypeVar("_Batch", covariant=True)


class AutoDataLoader(DataLoader[_Batch], Generic[_Batch]):  # type: ignore[misc]  # mypy skips torch
    """A `DataLoader` (same arguments) that tunes its number of workers every `tune_every` batches.

    `num_workers` is the number at the start; as an attribute it is the current one. `workers_max`
    is by default the number of cores that this process may use, and `memory_bytes` (for all workers
    together) half of the available memory; both are then divided by LOCAL_WORLD_SIZE. `controller`
    decides on the number of workers (None: a `WorkerController`).

    The loader refuses an `IterableDataset`, since the samples of each worker would depend on the
    number of workers, and `in_order=False`, since batches would have no order.
    """

    def __init__(
        self,
        dataset: object,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: "Sampler[int] | Iterable[int] | None" = None,
        batch_sampler: "Sampler[list[int]] | Iterable[list[int]] | None" = None,
        num_workers: int = 1,
        collate_fn: Callable[[Never], object] | None = None,
        *arguments: object,
        workers_max: int | None = None,
        memory_bytes: int | None = None,
        tune_every: int = TUNE_EVERY,
        controller: Controller | None = None,
        **named: object,
    ) -> None:
        """Raises UsageError for refused arguments and bad limits, and as `DataLoader`."""
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "AutoDataLoader cannot read an IterableDataset: which samples its workers give"
                " depends on their number",
                advice="use a dataset with indices, or a DataLoader",
            )
        if not named.get("in_order", True):
            raise UsageError(
                "AutoDataLoader keeps the order of batches", advice="leave out in_order=False"
            )
        for name, value in (("workers_max", workers_max), ("tune_every", tune_every)):
            if value is not None and value < 1:
                raise UsageError(f"bad {name} {value}: it is at least 1")
        if memory_bytes is not None and memory_bytes < 1:
            raise UsageError(f"bad memory_bytes {memory_bytes}: it is at least 1")
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            *arguments, **named,
        )  # fmt: skip
        shares = _processes_on_this_node()
        self._tune_every = tune_every
        self._controller = controller or WorkerController(
            WorkerLimits(
                workers_max or max(len(os.sched_getaffinity(0)) // shares, 1),
                memory_bytes or default_memory_bytes() // shares,
            )
        )
        self._progress = _Progress()

    def state_dict(self) -> dict[str, object]:
        """The state of the loader's `ChunkShuffleSampler` after the batches that the loop has
        received. Raises UsageError for another sampler, and for a batch sampler that may change the
        order."""
        sampler = self._chunk_sampler()
        return sampler.state_dict(self._progress.received if sampler.has_begun else None)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state, so that the next iteration gives the rest of its epoch. Raises as
        `state_dict` and `ChunkShuffleSampler.load_state_dict`."""
        self._chunk_sampler().load_state_dict(state)
        self._progress = _Progress()

    def _chunk_sampler(self) -> ChunkShuffleSampler:
        found, batches = self.sampler, self.batch_sampler
        if batches is not None:
            found = getattr(batches, "sampler", found)
            # The hook of `dlcmd run` wraps the method.
            own = inspect.unwrap(getattr(type(batches), "__iter__", BatchSampler))
            if own is not inspect.unwrap(BatchSampler.__iter__):
                raise UsageError(
                    f"the batches come from a {type(batches).__name__}, which may sort or skip"
                    " samples, so the loader does not know which of them were received",
                    advice="give the loader batch_size and a ChunkShuffleSampler, or have the"
                    " batch sampler keep its own place",
                )
        if not isinstance(found, ChunkShuffleSampler):
            raise UsageError(
                f"the sampler is a {type(found).__name__}, which has no state",
                advice="give the loader a ChunkShuffleSampler",
            )
        return found

    def _get_iterator(self) -> "_AutoIterator[_Batch]":
        made = _AutoIterator(self)
        self._progress = made.progress
        return made


@dataclass(slots=True)
class _Progress:
    """How far the loop is in an epoch. The loader and its current iterator share it."""

    received: int = 0
    """The samples in the batches up to the loop's last one."""


class _AutoIterator(Iterator[_Batch]):
    """The iterator of an `AutoDataLoader` for one epoch, or, with persistent workers, for all
    epochs.

    It must not refer to its loader, which refers to it if workers persist: the garbage collector
    may run in a forked worker, would free the circle there, and so end the workers.
    """

    def __init__(self, loader: AutoDataLoader[_Batch]) -> None:
        self._loader = weakref.ref(loader)
        self._index_sampler: Iterable[object] = loader._index_sampler
        self._controller = loader._controller
        self._tune_every = loader._tune_every
        self._setting = _Setting.of(loader)
        self._workers: int = loader.num_workers
        self._made = 0  # the number of segments
        # Some samplers draw random numbers when an iterator is requested. So this takes the steps
        # of torch's iterator in their order: request an iterator of the sampler, draw the seed of
        # the workers, and with workers request another iterator.
        unused = iter(self._index_sampler)
        generator = loader.generator
        state = torch.get_rng_state() if generator is None else generator.get_state()
        self._first_generator = torch.Generator()  # the first segment draws the same seed
        self._first_generator.set_state(state)
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        self._segments: deque[_Segment] = deque()
        self._start(iter(self._index_sampler) if self._workers else unused)
        self._segments.append(self._segment())

    def __iter__(self) -> "_AutoIterator[_Batch]":
        return self

    def __len__(self) -> int:
        return len(cast("Sized", self._index_sampler))

    def __next__(self) -> _Batch:
        self._window.requested(time.monotonic())
        while True:
            segment = self._segments[0]
            try:
                batch, report = next(segment.batches)
            except StopIteration:
                if len(self._segments) == 1:
                    raise
                self._segments.popleft()
                continue
            except Exception:
                self._pass_over(segment)  # the loop may continue after a failed batch
                raise
            break
        samples, sample_bytes = self._pass_over(segment)
        self.progress.received = self._passed
        self._window.add(segment.workers, samples, sample_bytes, Report(*report))
        if len(self._segments) == 1 and self._window.batches >= self._tune_every:
            self._tune()
        self._window.left(time.monotonic())
        return cast("_Batch", batch)

    def _reset(self, loader: AutoDataLoader[_Batch]) -> None:
        """Begin an epoch with the same workers. `DataLoader` calls it if workers persist."""
        self._start(iter(self._index_sampler))
        loader._progress = self.progress
        while len(self._segments) > 1:
            self._segments.popleft()
        self._segments[0].begin(self._source)

    def _start(self, sampled: Iterator[object]) -> None:
        self._source = _Source(sampled)
        self._passed = 0  # samples of the batches that the loop got, or that failed
        self._window = _Window()
        self.progress = _Progress()

    def _segment(self) -> "_Segment":
        generator = self._first_generator
        if self._made:  # with the same seed, new workers would repeat the old ones' random numbers
            generator = torch.Generator().manual_seed((self._base_seed + self._made) % 2**63)
        self._made += 1
        return _Segment(self._setting, self._workers, self._source, generator)

    def _tune(self) -> None:
        measured = self._window.measured(self._setting.prefetch)
        self._window = _Window()
        if measured is None:
            return
        wanted = self._controller.decide(measured)
        if wanted == self._workers or self._source.is_over:
            return
        self._segments[0].close()
        self._workers = wanted
        loader = self._loader()
        if loader is not None:
            loader.num_workers = wanted
        self._segments.append(self._segment())

    def _pass_over(self, segment: "_Segment") -> tuple[int, float]:
        """Count the segment's next batch as received. Returns its number of samples, and their mean
        file size."""
        samples, sample_bytes = segment.sizes.popleft() if segment.sizes else (0, 0.0)
        self._passed += samples
        return samples, sample_bytes


class _Source:
    """The iterator over the sampler, from which all segments of an epoch draw."""

    def __init__(self, inner: Iterator[object]) -> None:
        self._inner = inner
        self.is_over = False

    def draw(self) -> object:
        try:
            return next(self._inner)
        except StopIteration:
            self.is_over = True
            raise


@dataclass(frozen=True, slots=True)
class _Setting:
    dataset: object
    has_batches: bool
    """Whether the sampler gives batches of indices, instead of single ones."""
    prefetch: int
    always: dict[str, object]
    with_workers: dict[str, object]
    """The arguments that torch accepts only with workers."""

    @classmethod
    def of(cls, loader: AutoDataLoader[_Batch]) -> "_Setting":
        always = {
            "collate_fn": TimedCollate(loader.collate_fn),
            "pin_memory": loader.pin_memory,
            "worker_init_fn": loader.worker_init_fn,
        }
        with_workers = {
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
        prefetch = loader.prefetch_factor or 2
        has_batches = loader.batch_sampler is not None
        return cls(loader.dataset, has_batches, prefetch, always, with_workers)


class _Segment:
    """One `DataLoader`'s iterator, with a constant number of workers (see the module)."""

    def __init__(
        self, setting: _Setting, workers: int, source: _Source, generator: torch.Generator
    ) -> None:
        self.workers = workers
        self.sizes: deque[tuple[int, float]] = deque()
        """For each batch that was drawn and that the loop has not received: its number of samples,
        and their mean file size in bytes (0: not known)."""
        self._hand_over = _HandOver(source, self.sizes, setting.dataset, workers)
        options = {**setting.always, "num_workers": workers, "generator": generator}
        if workers:
            options |= setting.with_workers
        if setting.has_batches:
            options["batch_sampler"] = self._hand_over
        else:
            options |= {"batch_size": None, "sampler": self._hand_over}
        self._inner: DataLoader[object] = DataLoader(setting.dataset, **options)
        # Not `iter(...)`: the hook of `dlcmd run` must watch only the `AutoDataLoader`.
        self.batches: Iterator[tuple[object, tuple[float, ...]]] = self._inner._get_iterator()

    def begin(self, source: _Source) -> None:
        self.sizes.clear()
        self._hand_over.source = source
        if self.workers:
            self.batches._reset(self._inner)  # type: ignore[attr-defined]  # torch's
        else:
            self.batches = self._inner._get_iterator()

    def close(self) -> None:
        """Draw no further batches. Those that were drawn still come."""
        self._hand_over.source = None


class _HandOver:
    """The sampler of a segment's `DataLoader`: draws from the source until the segment is closed,
    and notes the size of each batch."""

    def __init__(
        self, source: _Source, sizes: deque[tuple[int, float]], dataset: object, workers: int
    ) -> None:
        self.source: _Source | None = source
        self._sizes = sizes
        self._dataset = dataset if isinstance(dataset, DieselDataset) else None
        self._has_workers = workers > 0

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if self.source is None:
            raise StopIteration
        indices = self.source.draw()
        count = len(indices) if isinstance(indices, Sized) else 1
        sample_bytes = 0.0
        if self._dataset is not None and count:
            wanted = indices if isinstance(indices, Sized) else [indices]
            sample_bytes = self._dataset.mean_bytes(cast("list[int]", wanted))
        self._sizes.append((count, sample_bytes))
        return OnItsWay(indices) if self._has_workers else arrived(indices)


class _Window:
    def __init__(self) -> None:
        self._left_s = 0.0  # time at which the loop got its last batch
        self._workers = 0
        self._clear()

    def _clear(self) -> None:
        self.batches = 0
        self._reports: list[Report] = []
        self._samples: list[int] = []
        self._sample_bytes: list[float] = []
        self._request_s: list[float] = []

    def requested(self, now_s: float) -> None:
        if self._left_s:
            self._request_s.append(now_s - self._left_s)

    def left(self, now_s: float) -> None:
        self._left_s = now_s

    def add(self, workers: int, samples: int, sample_bytes: float, report: Report) -> None:
        if workers != self._workers:  # other workers' measurements do not apply
            self._clear()
            self._workers = workers
        self.batches += 1
        self._samples.append(samples)
        self._sample_bytes.append(sample_bytes)
        self._reports.append(report)

    def measured(self, prefetch: int) -> Measured | None:
        """The averages; None if there are too few measurements. `prefetch` is the number of batches
        that each worker prepares ahead."""
        usual = [each for each in self._reports if not each.is_first]
        if not usual or not self._request_s:
            return None
        pause_s = _PAUSE_FACTOR * statistics.median(self._request_s)
        worker_bytes = 0.0
        if self._workers:
            in_hand = prefetch * statistics.fmean(each.batch_bytes for each in usual)
            worker_bytes = in_hand + max(each.process_bytes for each in usual)
        return Measured(
            workers=self._workers,
            fetch_s=statistics.fmean(each.fetch_s for each in usual),
            request_s=statistics.fmean(each for each in self._request_s if each <= pause_s),
            batch_samples=statistics.fmean(self._samples),
            sample_bytes=statistics.fmean(self._sample_bytes),
            worker_bytes=worker_bytes,
        )


def _processes_on_this_node() -> int:
    """The number of training processes on this machine, from torchrun's variable, or 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and int(text) else 1
