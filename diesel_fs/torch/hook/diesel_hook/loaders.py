"""Watches the `DataLoader`s of this process, and sends the launcher (see the package) the orders of
their samplers and the progress of their loops.

When `DataLoader` is imported, its `__init__` and `__iter__` are wrapped. When the first epoch of a
loader begins, the `__iter__` of its sampler's class and the `__next__` of its iterator's class are
wrapped, too. All of these methods are public. The hook iterates the sampler only when torch does,
so the sampler draws at the same moments as without the hook. The files of a dataset are sent when
its loader is made, so that the launcher has found them when the first epoch begins.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Protocol

from . import chunk_wise
from .files import NEEDS_NO_MOUNT, KnownDataset, KnownDatasets
from .learning import Learner, LearningWorkers, inside
from .link import HookSettings, Link
from .pace import Pace
from .prediction import DRAWS, BetweenEpochs, DrawnIndices, PredictedOrder, is_known, predict

_LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
"""The loader classes with their own `__init__` and `__iter__`, by module."""

_READ_AHEAD = frozenset(("accelerate", "lightning", "pytorch_lightning"))
"""The packages that take a batch from a loader before the user's loop requests it."""

_PROGRESS_S = 0.1  # between two messages about the position
_MORE_S = 0.02  # between two messages with indices that could not be foreseen

_expected = threading.local()  # `pair`: the sampler that torch will iterate, and its epoch
_loops: weakref.WeakKeyDictionary[object, _Loop] = weakref.WeakKeyDictionary()  # by iterator
_current: weakref.WeakKeyDictionary[object, LoaderEpoch] = weakref.WeakKeyDictionary()  # by sampler
_wrapped: set[type] = set()  # classes of samplers and iterators
_SEEDS = 1 << 63
_DROPPED_MIN = 1 << 18  # indices of received batches are dropped when they are at least this many


class _Loader(Protocol):
    """torch's `DataLoader`."""

    dataset: object
    sampler: object
    batch_sampler: object
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], object] | None
    generator: object
    persistent_workers: bool
    multiprocessing_context: object


class Watch:
    """All that is known about the loaders of this process."""

    def __init__(self, link: Link, settings: HookSettings) -> None:
        self.link = link
        self.ahead = settings["ahead"]
        self.group_size = settings["group_size"]
        self._has_own_seed = settings["own_seed"]
        self.datasets = KnownDatasets(link)
        self._learner = Learner(link)
        self._loaders: weakref.WeakKeyDictionary[object, _LoaderStream] = (
            weakref.WeakKeyDictionary()
        )
        self._between: weakref.WeakKeyDictionary[object, BetweenEpochs] = (
            weakref.WeakKeyDictionary()
        )
        self._kept: weakref.WeakKeyDictionary[object, KnownDataset] = weakref.WeakKeyDictionary()
        """For each loader with persistent workers: the dataset of its first epoch, which the
        workers keep reading."""
        self._count = 0  # the number of loaders that have begun an epoch
        self._groupings: weakref.WeakKeyDictionary[KnownDataset, chunk_wise.Grouping] = (
            weakref.WeakKeyDictionary()
        )
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """Forget the parent's messages: for the launcher, a forked child is another process, which
        has sent nothing yet."""
        self.datasets = KnownDatasets(self.link)
        self._groupings.clear()
        self._loaders.clear()
        self._kept.clear()

    def send_files(self, loader: _Loader) -> KnownDataset | None:
        """Send the files of the loader's dataset, unless the launcher has them. Returns the record
        of the dataset; None if no files belong to its indices."""
        kept = self._kept.get(loader)
        if kept is not None:
            return kept
        if type(loader.sampler).__name__ == "_InfiniteConstantSampler":
            return None  # the sampler of datasets that choose their samples themselves
        return self.datasets.record(loader.dataset)

    def stream(self, loader: _Loader) -> _LoaderStream:
        """A loader's stream, made at the first call."""
        found = self._loaders.get(loader)
        if found is None:
            self._count += 1
            found = self._loaders[loader] = _LoaderStream(self._count, self.link)
        return found

    def begin(self, loader: _Loader) -> LoaderEpoch:
        """An epoch of a loader begins: torch has not requested the sampler's iterator yet."""
        sampler = _index_sampler(loader)
        dataset, record = loader.dataset, self.send_files(loader)
        if record is None and type(dataset).__module__ != NEEDS_NO_MOUNT:
            self.link.note(f"the files of {type(dataset).__name__} are not known: no plan for it")
        if record is not None and loader.num_workers and loader.persistent_workers:
            self._kept[loader] = record
        stream = self.stream(loader)
        stream.epochs += 1
        batches = loader.num_workers * (loader.prefetch_factor or 0)
        epoch = LoaderEpoch(self, sampler, record, stream, batches)
        epoch.between = self._between.setdefault(loader, BetweenEpochs())
        # With persistent workers, torch draws from the generator for the first epoch only
        if not loader.persistent_workers:
            epoch.loaders_generator = loader.generator
        # Whether the loop gets all indices of the sampler `each`, in their order
        is_counted = getattr(loader, "in_order", True)
        for each in _nested(sampler):
            with suppress(TypeError):  # its class allows no weak references
                _current.pop(each, None)
                if is_counted:
                    _current[each] = epoch
            is_counted = is_counted and _passes_all_on(each)
            if self._has_own_seed:
                self._seed(each, stream.number)
        if self.group_size and record is not None:
            *_, innermost = _nested(sampler)
            self._make_chunk_wise(innermost, record)
        return epoch

    def _seed(self, sampler: object, number: int) -> None:
        """Give a sampler that draws from torch's global generator a generator of its own."""
        torch = sys.modules["torch"]
        if type(sampler).__name__ in DRAWS and getattr(sampler, "generator", None) is None:
            generator = torch.Generator()
            generator.manual_seed((torch.initial_seed() + number) % _SEEDS)
            sampler.generator = generator  # type: ignore[attr-defined] # see above

    def _make_chunk_wise(self, sampler: object, record: KnownDataset) -> None:
        grouping = self._groupings.get(record)
        if grouping is None:
            content = self.link.request({"do": "chunks", "dataset": record.number})
            if content is None or len(content) != 8 * record.size:
                self.link.note("a sampler keeps its order: the chunks of its files are not known")
                return
            torch = sys.modules["torch"]
            chunks = torch.frombuffer(bytearray(content), dtype=torch.int64)
            if not (chunks >= 0).any():
                return  # no file is known to lie in a mount
            grouping = chunk_wise.Grouping(chunks, self.group_size)
            if record.is_whole or record.is_learned:  # if not, more chunks will be known later
                self._groupings[record] = grouping
        note = chunk_wise.mark(sampler, grouping, is_whole=record.is_whole)
        if note is not None:
            self.link.note(note)

    def look(self, loader: _Loader, record: KnownDataset) -> LearningWorkers | None:
        """Observe in this epoch which files the dataset opens. Returns the `worker_init_fn` that
        the workers must run for that; None without workers, since this process reads the
        samples."""
        record.begin()
        may_learn = not record.is_learned
        self._learner.stop()
        if loader.num_workers:
            stream = self.stream(loader)
            stream.next_pace = self._pace(loader, stream.pace)
            turns = None if stream.next_pace is None else stream.next_pace.shared
            user_init = loader.worker_init_fn
            return LearningWorkers(self.link.path, record.parts, user_init, may_learn, turns)
        for part in record.parts:
            self._learner.learn(inside(loader.dataset, part.steps), part, may_learn=may_learn)
        return None

    def _pace(self, loader: _Loader, before: Pace | None) -> Pace | None:
        """The pace (`pace.py`) of new workers; `before`: that of the loader's last workers. None if
        processes here cannot share semaphores."""
        workers, at_once = loader.num_workers, loader.num_workers
        if before is not None and before.workers == workers:
            at_once = before.at_once
        context = loader.multiprocessing_context or sys.modules["multiprocessing"].get_context()
        try:
            return Pace(context, workers, at_once)  # type: ignore[arg-type] # a context
        except Exception as error:
            self.link.note(f"cannot measure the workers of a DataLoader: {error!r}")
            return None

    def end(self) -> None:
        """Observe no more in this process: an epoch has been read to its end."""
        self._learner.stop()


class _LoaderStream:
    """The stream of one loader: its epochs are announced to the launcher under one name. The stream
    ends when the garbage collector has freed the loader and its iterator."""

    def __init__(self, number: int, link: Link) -> None:
        self.number = number
        self.name = f"{os.getpid()}.{number}"
        self.epochs = 0  # the number of epochs that have begun
        self.pace: Pace | None = None  # of the workers of the current epoch
        self.next_pace: Pace | None = None  # of the workers that torch starts next
        _when_collected(
            self, functools.partial(link.send_soon, {"do": "left", "stream": self.name})
        )


@dataclass
class _Loop:
    """The epoch that a loader's iterator is giving now. With persistent workers one iterator gives
    all epochs."""

    epoch: LoaderEpoch
    stream: _LoaderStream

    def leave(self) -> None:
        self.epoch.leave()


class LoaderEpoch:
    """One epoch of a loader: the order of its sampler, as far as it is known, and the progress of
    the loop."""

    def __init__(
        self,
        watch: Watch,
        sampler: object,
        record: KnownDataset | None,
        stream: _LoaderStream,
        lag: int,
    ) -> None:
        """`lag` is the number of batches that the workers prepare ahead, in any order. If `record`
        is None, only the loop's progress is sent."""
        self.sampler_kind = type(sampler)
        self._sampler = _weak(sampler)
        self.is_over = False
        self.has_begun = False
        self.has_failed = False
        self.is_counted = True
        """Whether each batch taken from the iterator has reached the user's loop: False if a
        library takes batches ahead of the loop, or a batch has failed."""
        self.loaders_generator: object = None
        """The loader's generator, if the loader draws from it at each epoch."""
        self.between: BetweenEpochs | None = None
        self.pace: Pace | None = None

        self._watch, self.link = watch, watch.link
        self.record = record
        self._dataset = None if record is None else record.number  # the dataset's number
        self._names: dict[str, object] = {"stream": stream.name, "epoch": stream.epochs - 1}
        self._lag = lag
        self._order: PredictedOrder | None = None
        self._drawn = DrawnIndices()
        # The number of batches that the loop has received, now and at the last progress message
        self._received = self._sent = 0
        self._drawn_sent = 0  # the number of sent indices, if the order is not known
        self._drawn_s = 0.0  # when indices were sent last
        self._waited_s = self._computed_s = 0.0
        self._left_s = 0.0  # time at which the loop got its last batch
        self._progress_sent_s = time.monotonic()

    def foresee(self, iterator: Iterator[object] | None = None) -> None:
        """Predict and announce the order of this epoch and of further ones. Called just before the
        sampler's iterator, `iterator`, gives its first element. None: the sampler is a list or
        the like."""
        if self._dataset is None:
            return
        orders = predict(
            self._sampler(), self._watch.ahead, iterator, self.loaders_generator, self.between
        )
        self._order = orders[0] if orders else None
        lag = self._lag * self._batch_size()
        for at, order in enumerate(orders):
            named = {**self._names, "epoch": int(str(self._names["epoch"])) + at}
            self.link.send(
                {"do": "order", "dataset": self._dataset, "lag": lag, "ahead": at, **named},
                memoryview(order.indices),
            )
        if not orders:
            self.link.send(
                {"do": "order", "dataset": self._dataset, "lag": lag, "ahead": 0, **self._names}
            )
            self._note_unforeseen()

    def _note_unforeseen(self) -> None:
        """Note for the user that the order is not known in advance, if there are no workers: then
        an order that is announced while it is drawn comes too late."""
        if not self._lag:
            unknown = (each for each in _nested(self._sampler()) if not is_known(each))
            name = type(next(unknown, self._sampler())).__name__
            self.link.note(
                f"the order of {name} is not known before it is read, so nothing is loaded ahead:"
                " give its DataLoader workers"
            )

    def _batch_size(self) -> int:
        if self._order is not None:
            return self._order.bounds[0] if self._order.bounds else 1
        size = getattr(self._sampler(), "batch_size", None)
        return size if isinstance(size, int) else 1

    def drew(self, element: object) -> None:
        """The sampler has given an index or a batch of indices. If it was not predicted, the rest
        of the prediction is withdrawn, and indices are sent as they are drawn."""
        drawn, position = self._drawn, self._drawn.count
        if not drawn.append(element) or self._dataset is None:
            return
        if self._order is not None:
            new = drawn.between(position)
            foreseen = self._order.indices[position : position + len(new)]
            if foreseen == new:
                return
            is_behind = not self._order.is_whole and position == len(self._order.indices)
            self._order = None
            self._drawn_sent = position
            self._note_unforeseen()
            if not is_behind:  # otherwise the prediction was right, and has ended
                self.link.send({"do": "cut", "position": position, **self._names})
        if time.monotonic() - self._drawn_s >= _MORE_S:
            self._send_drawn()

    def _send_drawn(self) -> None:
        """Send the indices that were drawn since the last call, if they were not predicted."""
        if self._order is None and self._drawn_sent < self._drawn.count:
            new = self._drawn.between(self._drawn_sent)
            self._drawn_sent, self._drawn_s = self._drawn.count, time.monotonic()
            self.link.send({"do": "more", **self._names}, memoryview(new))

    def received(self, before_s: float, after_s: float) -> None:
        """The loop requested a batch at `before_s`, and received it at `after_s`."""
        self._received += 1
        if self.has_failed:
            self.is_counted = False
        if self.record is not None and not self.record.is_learned:
            self.record.saw(self._drawn.between(self.position(-1), self.position()))
        self._waited_s += after_s - before_s
        if self._left_s:
            self._computed_s += before_s - self._left_s
        self._left_s = after_s
        if after_s - self._progress_sent_s >= _PROGRESS_S:
            self.send_progress(after_s)
        elif after_s - self._drawn_s >= _MORE_S and self._dataset is not None:
            self._send_drawn()

    def send_progress(self, now_s: float, *, is_over: bool = False) -> None:
        """Send the loop's position and times since the last message. `is_over`: the loop has read
        the epoch to its end."""
        self._progress_sent_s = now_s
        if self._dataset is not None:
            self._send_drawn()
        measured: dict[str, object] = {}
        with suppress(Exception):  # of multiprocessing, if the program has closed all files
            if self.pace is not None:
                self.pace.tune()
                measured = self.pace.measured()
        self.link.send(
            {
                "do": "progress", **self._names, "position": self.position(), "is_over": is_over,
                "batches": self._received - self._sent, "waited_s": self._waited_s,
                "computed_s": self._computed_s, **measured,
            }
        )  # fmt: skip
        if self._order is not None or self._drawn_sent == self._drawn.count:
            self._drawn.drop(self._received - 1, _DROPPED_MIN)
        self._sent = self._received
        self._waited_s = self._computed_s = 0.0
        if is_over:
            self.is_over = True
            self._watch.end()

    def leave(self) -> None:
        """The loop has dropped the iterator. If the epoch was not read to its end, tell the
        launcher."""
        if not self.is_over:
            self.is_over = True
            foreseen = 0 if self._order is None else len(self._order.indices)
            self.link.send_soon(
                {
                    "do": "left", **self._names, "position": self.position(),
                    "of": max(foreseen, self._drawn.count),
                }
            )  # fmt: skip

    def position(self, more: int = 0) -> int:
        """The number of indices in the received batches and `more` further ones (or, if negative,
        fewer)."""
        return self._drawn.end_of(self._received + more)


@contextmanager
def _expecting_none() -> Iterator[None]:
    """Within this context no iteration of a sampler is watched: a watched sampler may iterate
    samplers inside it, or itself."""
    pair = getattr(_expected, "pair", None)
    _expected.pair = None
    try:
        yield
    finally:
        _expected.pair = pair


class _WatchedSampler:
    """The iterator that torch gets instead of a sampler's: reports each element to the epoch."""

    def __init__(self, inner: Iterator[object], epoch: LoaderEpoch) -> None:
        self._inner = inner
        self._epoch: LoaderEpoch | None = epoch
        self._has_begun = False

    def __iter__(self) -> _WatchedSampler:
        return self

    def __next__(self) -> object:
        if not self._has_begun:
            self._has_begun = True
            self._quietly(lambda epoch: epoch.foresee(self._inner))
        with _expecting_none():
            element = next(self._inner)
        self._quietly(lambda epoch: epoch.drew(element))
        return element

    def _quietly(self, step: Callable[[LoaderEpoch], None]) -> None:
        """Run a step of the watch. If it fails, the epoch is watched no more, and the program goes
        on."""
        if self._epoch is not None:
            try:
                step(self._epoch)
            except Exception as error:
                self._epoch.link.note(f"cannot follow a sampler: {error!r}")
                self._epoch = None


class _Stateful(Protocol):
    """An iterator of torchdata, whose state can be saved and loaded."""

    def __next__(self) -> object: ...
    def __iter__(self) -> Iterator[object]: ...
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


class _WatchedStateful(_WatchedSampler):
    """A `_WatchedSampler` whose state torchdata's loader saves and loads."""

    def __init__(self, inner: _Stateful, epoch: LoaderEpoch) -> None:
        super().__init__(inner, epoch)
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict


def _index_sampler(loader: _Loader) -> object:
    """The sampler that torch iterates: of batches, if the loader has one."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _weak(sampler: object) -> Callable[[], object]:
    """A weak reference: the sampler refers to its epoch (`_current`), so the epoch must not keep
    the sampler alive."""
    try:
        return weakref.ref(sampler)
    except TypeError:  # its class allows no weak references
        return lambda: sampler


def _when_collected(thing: object, act: Callable[[], object]) -> None:
    """Call `act` when the garbage collector has freed `thing`, but not at the end of this process,
    nor in a forked child."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            act()

    weakref.finalize(thing, call).atexit = False


def _nested(sampler: object) -> Iterator[object]:
    """A sampler, the sampler inside it, and so on."""
    seen: list[object] = []
    while sampler is not None and not any(each is sampler for each in seen):
        seen.append(sampler)
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def _passes_all_on(sampler: object) -> bool:
    """Whether a batch sampler gives all indices of the sampler inside it, in the same order:
    torch's do. A user's class may sort, skip or distribute them."""
    kinds = [
        getattr(sys.modules.get(module), "BatchSampler", None)
        for module in ("torch.utils.data", "torchdata.stateful_dataloader.sampler")
    ]
    # The default is a function that is no `__iter__` of a `BatchSampler`
    own = inspect.unwrap(getattr(type(sampler), "__iter__", _passes_all_on))
    return any(kind is not None and own is inspect.unwrap(kind.__iter__) for kind in kinds)


def received(sampler: object) -> int | None:
    """The number of a sampler's indices in the batches that the loop has received in this epoch.

    None if the number is not known, or these are not the first indices of the epoch. That is so if
    no loop iterates the sampler through a `DataLoader` that gives all indices in their order, if a
    library takes batches ahead of the loop, or if the loop continued after a batch that failed.
    """
    try:
        epoch = _current.get(sampler)
    except TypeError:
        return None
    return None if epoch is None or not epoch.is_counted else epoch.position()


def watch(link: Link, settings: HookSettings) -> None:
    """Wrap the loader classes: at once if their module is imported, otherwise when it is."""
    state = Watch(link, settings)
    for name, loader in _LOADERS.items():
        module = sys.modules.get(name)
        if module is not None:
            _wrap_loader(getattr(module, loader), state)
        else:
            sys.meta_path.insert(0, _Finder(name, state))


class _Finder:
    """Wraps the loader class of one module when it is imported."""

    def __init__(self, name: str, state: Watch) -> None:
        self._name = name
        self._state = state
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        run, state = spec.loader.exec_module, self._state

        def run_and_wrap(module: ModuleType) -> None:
            run(module)
            sys.meta_path[:] = [each for each in sys.meta_path if each is not self]
            try:
                _wrap_loader(getattr(module, _LOADERS[name]), state)
            except Exception as error:
                state.link.note(f"cannot follow this version of torch: {error!r}")

        spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign] # of this loader alone
        return spec


def _wrap_loader(kind: type, state: Watch) -> None:
    original_init = kind.__init__  # type: ignore[misc] # a loader's
    original_iter = kind.__iter__  # type: ignore[attr-defined] # likewise

    @functools.wraps(original_init)
    def __init__(self: _Loader, *arguments: object, **named: object) -> None:
        original_init(self, *arguments, **named)
        try:
            state.send_files(self)
        except Exception as error:
            state.link.note(f"cannot find the files of a DataLoader: {error!r}")

    @functools.wraps(original_iter)
    def __iter__(self: _Loader) -> object:
        epoch = workers = None
        user_init = self.worker_init_fn
        try:
            epoch = state.begin(self)
            _wrap_sampler(epoch.sampler_kind, epoch)
            workers = None if epoch.record is None else state.look(self, epoch.record)
        except Exception as error:
            state.link.note(f"cannot follow a DataLoader: {error!r}")
        _expected.pair = None if epoch is None else (_index_sampler(self), epoch)
        if workers is not None:
            self.worker_init_fn = workers
        try:
            iterator = original_iter(self)
        finally:
            _expected.pair = None
            if workers is not None:
                self.worker_init_fn = user_init
        if epoch is not None:
            try:
                _wrap_iterator(type(iterator))
                stream = state.stream(self)
                loop = _loops.get(iterator)
                if loop is None:
                    loop = _loops[iterator] = _Loop(epoch, stream)
                    _when_collected(iterator, loop.leave)
                    stream.pace = stream.next_pace if workers is not None else None
                elif stream.pace is not None:
                    stream.pace.begin_epoch()
                epoch.pace = stream.pace
                loop.epoch = epoch
            except Exception as error:
                state.link.note(f"cannot follow a DataLoader: {error!r}")
        return iterator

    kind.__init__ = __init__  # type: ignore[misc] # of this class alone
    kind.__iter__ = __iter__  # type: ignore[attr-defined] # likewise


def _wrap_sampler(kind: type, epoch: LoaderEpoch) -> None:
    if kind in _wrapped:
        return
    original = kind.__iter__  # type: ignore[attr-defined] # every sampler has it

    @functools.wraps(original)
    def __iter__(self: object) -> object:
        pair = getattr(_expected, "pair", None)
        if pair is None or pair[0] is not self:
            return original(self)
        with _expecting_none():  # `original` may call `super().__iter__()`
            inner = original(self)  # torch may request two iterators, and use the second
        watched = _WatchedStateful if hasattr(inner, "load_state_dict") else _WatchedSampler
        return watched(inner, pair[1])

    try:
        kind.__iter__ = __iter__  # type: ignore[attr-defined] # of whatever class it is
    except TypeError:  # a class such as list: its order does not change, so announce it now
        epoch.foresee()
        return
    _wrapped.add(kind)


def _wrap_iterator(kind: type) -> None:
    # The most basic class with a concrete `__next__`: the `__next__` of subclasses calls it
    owner = [
        each for each in kind.__mro__ if "__next__" in vars(each) and not inspect.isabstract(each)
    ][-1]
    if owner in _wrapped:
        return
    original = owner.__next__  # type: ignore[attr-defined] # see the line above

    @functools.wraps(original)
    def __next__(self: object) -> object:
        loop = _loops.get(self)
        if loop is None:
            return original(self)
        epoch = loop.epoch
        before_s = time.monotonic()
        try:
            batch = original(self)
        except StopIteration:
            epoch.send_progress(time.monotonic(), is_over=True)
            raise
        except Exception:
            epoch.has_failed = True
            raise
        if not epoch.has_begun:
            epoch.has_begun = True
            taker = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            epoch.is_counted = taker not in _READ_AHEAD
        epoch.received(before_s, time.monotonic())
        return batch

    owner.__next__ = __next__  # type: ignore[attr-defined] # as above
    _wrapped.add(owner)
