"""Predicts the order that a sampler is about to give, without any effect on the program.

The samplers of torch, torchdata, accelerate, timm and diesel_fs are known: they draw from torch's
global generator or one of their own, and change nothing else. A copy of the sampler (its *twin*),
with copies of its generators, is iterated to the end; then the global generator gets its state
back. So the sampler itself draws the same numbers as without the hook. Other samplers are not
predicted, since their iteration might have other effects.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Protocol

_KNOWN = frozenset(
    {
        ("torch.utils.data.sampler", "SequentialSampler"),
        ("torch.utils.data.sampler", "RandomSampler"),
        ("torch.utils.data.sampler", "SubsetRandomSampler"),
        ("torch.utils.data.sampler", "WeightedRandomSampler"),
        ("torch.utils.data.sampler", "BatchSampler"),
        ("torch.utils.data.distributed", "DistributedSampler"),
        ("accelerate.data_loader", "SeedableRandomSampler"),
        ("accelerate.data_loader", "BatchSamplerShard"),
        ("accelerate.data_loader", "SkipBatchSampler"),
        ("timm.data.distributed_sampler", "OrderedDistributedSampler"),
        ("timm.data.distributed_sampler", "RepeatAugSampler"),
        ("diesel_fs.torch.sampler", "ChunkShuffleSampler"),
        ("diesel_fs.torch.importance", "ImportanceSampler"),
        ("torchdata.stateful_dataloader.sampler", "RandomSampler"),
        ("torchdata.stateful_dataloader.sampler", "BatchSampler"),
        ("torchdata.stateful_dataloader.sampler", "StatefulDistributedSampler"),
    }
)
DRAWS = frozenset(("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"))
"""The samplers that draw from torch's global generator if they have no generator of their own."""

_COUNT_EPOCHS = frozenset(
    ("DistributedSampler", "StatefulDistributedSampler", "RepeatAugSampler", "ChunkShuffleSampler")
)
"""The samplers that have `epoch` and `set_epoch`."""

_NESTED = ("sampler", "batch_sampler")
"""The attributes with the sampler inside another one."""

ENTRIES_MAX = 1 << 24
"""The most indices of a prediction, since orders may be endless: each takes eight bytes here, and
more in the launcher."""

DRAWING_S_MAX = 1.0
"""The most seconds that a prediction takes, while the loop waits for its first batch."""

_TIMED_ELEMENTS = 1024  # between two readings of the clock

_DRAWS_MAX = 8  # each loader of torch draws once when an epoch begins; programs have few loaders


class BetweenEpochs:
    """Counts the numbers that a program draws from torch's global generator between two epochs of a
    loader.

    In most programs only torch's loaders draw from it, to seed their workers. Then the generator's
    state at the start of an epoch shows how many numbers were drawn since the sampler's own draws
    for the last epoch. The program is expected to draw as many before the next epoch.
    """

    def __init__(self) -> None:
        self.draws = -1
        """The number of draws; -1 if it is not known, or the program draws other numbers."""
        self._behind: object = None  # the state after the sampler's draws for the last epoch

    def begin(self) -> None:
        """Count the draws since the last call of `end`, when an epoch begins."""
        torch = sys.modules["torch"]
        behind, self._behind, self.draws = self._behind, None, -1
        if behind is None:
            return
        now = torch.get_rng_state()
        with _states_kept():
            torch.set_rng_state(behind)
            for count in range(_DRAWS_MAX):
                if torch.equal(torch.get_rng_state(), now):
                    self.draws = count
                    return
                self.draw(1)

    def end(self) -> None:
        """Remember the generator's state when the sampler has drawn all its numbers for an
        epoch."""
        self._behind = sys.modules["torch"].get_rng_state()

    @staticmethod
    def draw(count: int) -> None:
        torch = sys.modules["torch"]
        for _ in range(count):
            torch.empty((), dtype=torch.int64).random_()


class PredictedOrder:
    """The indices that a sampler gives in an epoch, in order."""

    def __init__(self) -> None:
        self.indices = array("q")
        self.bounds = array("q")
        """The position after each batch; empty if the sampler gives single indices."""
        self.is_whole = True
        """Whether the order is complete: the sampler gives no more."""

    def append(self, element: object) -> bool:
        """Add an index, or the indices of a batch. Returns False for anything else."""
        try:
            if isinstance(element, (list, tuple)):
                self.indices.extend(element)
                self.bounds.append(len(self.indices))
            else:
                self.indices.append(element)  # type: ignore[arg-type] # or it raises
        except TypeError:
            return False
        return True


class DrawnIndices:
    """The indices that a sampler has given in an epoch. The first ones can be dropped to save
    memory; positions still count them."""

    def __init__(self) -> None:
        self._kept = PredictedOrder()
        self._dropped = self._dropped_batches = 0
        self._has_batches = False

    @property
    def count(self) -> int:
        """The number of indices, including dropped ones."""
        return self._dropped + len(self._kept.indices)

    def append(self, element: object) -> bool:
        is_known = self._kept.append(element)
        self._has_batches |= bool(self._kept.bounds)
        return is_known

    def between(self, start: int, end: int | None = None) -> array[int]:
        """The indices from the position `start` to before `end`, without dropped ones."""
        last = None if end is None else max(end - self._dropped, 0)
        return self._kept.indices[max(start - self._dropped, 0) : last]

    def end_of(self, batches: int) -> int:
        if self.count and not self._has_batches:  # single indices: each is a batch
            return max(min(batches, self.count), 0)
        at = min(batches - self._dropped_batches, len(self._kept.bounds))
        return self._dropped + self._kept.bounds[at - 1] if at > 0 else self._dropped

    def drop(self, batches: int, least: int) -> None:
        """Drop the indices of the first `batches` batches, if there are at least `least` of
        them."""
        count = self.end_of(batches) - self._dropped
        if count < least:
            return
        kept, whole = PredictedOrder(), self._kept
        kept.indices = whole.indices[count:]
        if whole.bounds:
            behind = whole.bounds[batches - self._dropped_batches :]
            kept.bounds = array("q", (each - count for each in behind))
        self._dropped_batches = batches
        self._dropped += count
        self._kept = kept


def predict(
    sampler: object,
    ahead: int,
    iterator: Iterator[object] | None = None,
    loaders_generator: object = None,
    between: BetweenEpochs | None = None,
) -> list[PredictedOrder]:
    """Predict the orders of this epoch and of at most `ahead` further epochs. The result is empty
    for an unknown sampler.

    `iterator` is the sampler's iterator for this epoch, which has given nothing yet. If it has a
    state (torchdata's), it may have drawn already, and may begin in the middle of the epoch.
    `loaders_generator` is the generator, if any, from which the loader draws the seed of its
    workers at each epoch. `between` lives as long as the loader.
    """
    copies: dict[int, object] = {}
    twin = _twin(sampler, copies)
    if twin is None:
        return []
    orders: list[PredictedOrder] = []
    between = between or BetweenEpochs()
    between.begin()
    with _states_kept():
        while len(orders) <= ahead:
            order = _drawn(_begun(twin, None if orders else iterator))
            if order is None:
                return orders
            orders.append(order)
            if not order.is_whole:
                break
            if len(orders) == 1:
                between.end()
            if not _can_go_on(twin, global_generator_too=between.draws >= 0):
                break
            between.draw(between.draws)
            if id(loaders_generator) in copies:
                torch = sys.modules["torch"]
                generator = copies[id(loaders_generator)]
                torch.empty((), dtype=torch.int64).random_(generator=generator)
    return orders


def _drawn(iterator: Iterator[object]) -> PredictedOrder | None:
    """The elements of an iterator, within `ENTRIES_MAX` and `DRAWING_S_MAX`; None if one is neither
    an index nor a batch of indices."""
    order, end_s = PredictedOrder(), time.monotonic() + DRAWING_S_MAX
    while order.is_whole:
        before = len(order.indices)
        for element in islice(iterator, _TIMED_ELEMENTS):
            if not order.append(element):
                return None
        if len(order.indices) == before:
            return order
        order.is_whole = len(order.indices) < ENTRIES_MAX and time.monotonic() < end_s
    return order


def _begun(twin: Iterable[object], like: Iterator[object] | None) -> Iterator[object]:
    """An iterator of the twin that begins where the sampler's own iterator `like` will begin."""
    begun = iter(twin)
    if hasattr(like, "state_dict") and hasattr(begun, "load_state_dict"):
        state = like.state_dict()  # type: ignore[union-attr] # see the line above
        if "sampler_state" not in state:  # if the sampler itself has a state, the twin has it
            begun.load_state_dict(state)
    return begun


def is_known(sampler: object) -> bool:
    kind = type(sampler)
    return (kind.__module__, kind.__qualname__) in _KNOWN


def _twin(sampler: object, copies: dict[int, object]) -> Iterable[object] | None:
    """A copy that can be iterated without a change to the sampler; None if its class is unknown.
    The copies of its generators are put into `copies`, by the ids of the originals."""
    if isinstance(sampler, (list, tuple, range)):
        return sampler
    if not is_known(sampler):
        return None
    twin = copy.copy(sampler)
    fields = vars(twin)
    for name, value in list(fields.items()):
        if type(value).__name__ == "Generator" and hasattr(value, "get_state"):
            fields[name] = copies.setdefault(id(value), _copied_generator(value))
        elif name in _NESTED and value is not None:
            fields[name] = _twin(value, copies)
            if fields[name] is None:
                return None
    return twin  # type: ignore[return-value] # a sampler


class _Generator(Protocol):
    device: object

    def get_state(self) -> object: ...


def _copied_generator(generator: _Generator) -> object:
    made = sys.modules["torch"].Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made


def _can_go_on(twin: object, *, global_generator_too: bool) -> bool:
    """Move a twin on to the next epoch. Returns False if its order cannot be foreseen.

    A sampler that counts epochs (`set_epoch`) is expected to get the next number. A sampler with
    its own generator continues from that generator's state. With torch's global generator, the
    order depends on all draws of the program until then: `global_generator_too` is whether these
    are known (`BetweenEpochs`).
    """
    name = type(twin).__name__
    if name == "ImportanceSampler":  # it draws by values measured in this epoch
        return False
    if name in DRAWS and getattr(twin, "generator", None) is None and not global_generator_too:
        return False
    if name in _COUNT_EPOCHS:
        twin.set_epoch(twin.epoch + 1)  # type: ignore[attr-defined] # by its name
    nested = (getattr(twin, each, None) for each in _NESTED)
    return all(
        _can_go_on(each, global_generator_too=global_generator_too)
        for each in nested
        if each is not None
    )


@contextmanager
def _states_kept() -> Iterator[None]:
    """Restore the states of the global generators of torch, Python and numpy at the end."""
    torch = sys.modules["torch"]
    # Only if it is imported: its import takes 0.2 s, and gives the generator a random state.
    of_numpy = sys.modules.get("numpy.random")
    states = torch.get_rng_state(), random.getstate()
    state_of_numpy = None if of_numpy is None else of_numpy.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if of_numpy is not None:
            of_numpy.set_state(state_of_numpy)
