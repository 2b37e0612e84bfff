"""`ChunkShuffleSampler`: a chunk-wise random order for a `DataLoader`, divided among ranks. Its
place can be saved and resumed.

The order is that of DIESEL (ICPP 2020), section 4.3 (`orders/shuffle.py`). Unlike with torch's
`DistributedSampler`, each rank gets a contiguous part (`orders/parts.py`).

A saved state has the dataset's version and the number of samples that each rank has received.
Workers take batches ahead of the loop, so the sampler cannot count that number. The caller of
`state_dict` passes it, or the hook of `dlcmd run` and `join` counts it; or torchdata's
`StatefulDataLoader` keeps the state of the iterator (`_Iteration`) for each batch. A state that
could not be resumed exactly is refused when it is saved, since at the time of loading it is too
late. Not safe for concurrent use.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType

import numpy as np
import torch.distributed
from torch.utils.data import Sampler

from ..errors import ConflictError, UsageError
from ..format.snapshot.reader import Indices
from ..orders.parts import Partition, part_length, part_positions, remaining
from ..orders.shuffle import GROUP_SIZE_DEFAULT, WORLD_MAX, check_number, group_ends
from .dataset import DieselDataset
from .join import received as counted_by_hook
from .sources import SampleSource, sample_files

log = logging.getLogger("diesel.torch")

_STATE_FORMAT = 1
_BLOCK = 4096  # indices that become Python numbers at a time


@dataclass(frozen=True, slots=True)
class EpochPlace:
    epoch: int
    partitions: tuple[Partition, ...] = ()
    """The earlier divisions of this epoch among another number of ranks, if the run has resumed."""
    position: int | None = 0
    """The position in this rank's part of the samples that `partitions` left; None: not known."""


class ChunkShuffleSampler(Sampler[int]):  # type: ignore[misc]  # mypy skips torch
    """A sampler that gives this rank's part of each epoch in chunk-wise random order.

    `dataset` is a `DieselDataset`, or a dataset with files on a mount, such as torchvision's
    `ImageFolder`, or a `Subset` or `ConcatDataset` of these. `rank` and `world` are by default
    those of torch.distributed, or 0 and 1. `group_size` is the number of chunks whose samples are
    shuffled together. If the order cannot be cut into equal parts, `drop_last` leaves out its last
    samples; otherwise its first samples come again at the end.
    """

    def __init__(
        self,
        dataset: object,
        *,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        group_size: int = GROUP_SIZE_DEFAULT,
        drop_last: bool = False,
    ) -> None:
        """Raises UsageError for numbers out of range and for a dataset without known files,
        NoSuchPath for a file that its mount does not have."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if world is None:
            world = torch.distributed.get_world_size() if is_distributed else 1
        if rank is None:
            rank = torch.distributed.get_rank() if is_distributed else 0
        check_number("world", world, 1, WORLD_MAX)
        check_number("rank", rank, 0, world - 1)
        check_number("seed", seed)
        check_number("group size", group_size, 1)
        self.rank, self.world = int(rank), int(world)  # a state holds Python's numbers, not numpy's
        self.seed, self.group_size = int(seed), int(group_size)
        self.drop_last = drop_last
        self.epoch = 0
        self._files: SampleSource = sample_files(dataset)
        self._digest = self._files.digest
        self._diesel_dataset = dataset if isinstance(dataset, DieselDataset) else None
        self._next: EpochPlace | None = None  # the start of the next iteration; None: the beginning
        self._last: _Iteration | None = None  # the iteration that began last in this epoch
        self._has_set_epoch = True  # False after a state was loaded
        self._warned: list[str] = []

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; each epoch has its own order. If `epoch` is that
        of a loaded state, the sampler keeps the state's place. Raises UsageError for a number out
        of range."""
        check_number("epoch", epoch)
        if self._next is not None and self._next.epoch != epoch:
            self._next = None
        if epoch != self.epoch:
            self._last = None
        self.epoch, self._has_set_epoch = int(epoch), True

    def __len__(self) -> int:
        """The number of samples of the current iteration, or, if none is going on, of the next."""
        if self._next is None and self._last is not None and not self._last.is_over:
            return self._last.length
        place = self._next or EpochPlace(self.epoch)
        return max(self._part_length(place) - (place.position or 0), 0)

    def __iter__(self) -> "Iterator[int]":
        return _Iteration(self)

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has given a sample since the epoch was set or a state loaded."""
        return self._last is not None and self._next is None

    def state_dict(self, received: int | None = None) -> dict[str, object]:
        """The state from which another run reads exactly the rest of the epoch; it is the same on
        all ranks.

        `received` is the number of samples that the loop has received since its iteration began:
        batches times the batch size, with a shorter last batch counted as a full one. README.md
        lists the loaders that need not pass it. No number is right with a batch sampler that
        reorders or skips samples, since the state means the first `received` samples. Raises
        UsageError if the number is needed and was not passed, or if the iteration has not given
        that many samples.
        """
        last = self._last if self._next is None else None
        if last is None:
            if received:
                raise UsageError(
                    f"received is {received}, but no sample has been handed out in epoch"
                    f" {self.epoch}"
                )
            return self._state(self._next or EpochPlace(self.epoch))
        if received is None and last.given:
            received = last.received()
            if received is None:
                if _is_torchdata(sys._getframe(1)):  # it has the number in the iterator's state
                    return self._state(last.place)
                raise UsageError(
                    f"it is not known how many of the {last.given} samples of epoch {self.epoch}"
                    " that were handed out the loop has received, so a state would lose some",
                    advice="save with state_dict(received=batches * batch_size), or call"
                    " diesel_fs.torch.join() before the loop; a batch sampler of your own must"
                    " keep its own place. Between epochs, call set_epoch with the next one first",
                )
        received = received or 0
        check_number("received", received)
        if received > last.given and not last.is_over:
            raise UsageError(
                f"received is {received}, but only {last.given} samples have been handed out in"
                " this iteration",
                advice="count the samples that the loop has received since its iteration began",
            )
        return self._state(last.start, min(int(received), last.length))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state, so that the next iteration gives the rest of its epoch.

        Seed, epoch and group size become those of the state. If `world` or `drop_last` differs, the
        samples that no rank has received are divided anew. Raises ConflictError for a state of
        another dataset, version or selection of samples, and UsageError for a malformed state.
        """
        place = self._load(state)
        if place.position is not None:  # otherwise torchdata loads an iterator's state next
            self.epoch = place.epoch
        self._next, self._last, self._has_set_epoch = place, None, False

    def _load(self, state: Mapping[str, object]) -> EpochPlace:
        """Take over a state's seed and group size. Returns its place, with the position in this
        sampler's part."""
        self._check_origin(state)
        numbers = _StateNumbers(state)
        seed, group_size = numbers.get("seed"), numbers.get("group_size", 1)
        epoch = numbers.get("epoch")
        partitions = numbers.partitions()
        partition = Partition(numbers.get("world", 1, WORLD_MAX), bool(state.get("drop_last")), 0)
        position = None if state.get("position", 0) is None else numbers.get("position")
        left = self._count(epoch)
        for each in (*partitions, replace(partition, position=position or 0)):
            if each.position > part_length(left, each.world, drop_last=each.drop_last):
                raise UsageError(f"the state has a position {each.position} beyond the epoch's end")
            left = len(remaining(np.arange(left), each))
        self.seed, self.group_size = seed, group_size
        if position is not None and (partition.world, partition.drop_last) != (
            self.world,
            self.drop_last,
        ):
            if position:
                partitions = (*partitions, replace(partition, position=position))
            position = 0
        return EpochPlace(epoch, partitions, position)

    def _check_origin(self, state: Mapping[str, object]) -> None:
        """Raise ConflictError if the state is of other samples, UsageError if it is no state."""
        files = self._files
        if state.get("format") != _STATE_FORMAT or "identity" not in state:
            raise UsageError(f"this is not a state of {type(self).__name__}")
        there = f"{state.get('dataset')}@{state.get('version')}"
        if state["identity"] != files.identity:
            text = f"the state is of {there}, and this sampler reads {files}, another dataset"
            raise ConflictError(text, advice="load it with the dataset that it names")
        if state.get("version") != files.version:
            raise ConflictError(
                f"the state is of {there}, and this sampler reads {files}, another version",
                advice=f"open or mount {there}, or start the epoch anew",
            )
        if (state.get("samples"), state.get("digest")) != (len(files), self._digest):
            raise ConflictError(
                f"the state is of {state.get('samples')} samples of {there}, and this sampler reads"
                f" another selection of {len(files)}",
                advice="give the same folder, filter and subset",
            )

    def _state(self, place: EpochPlace, received: int = 0) -> dict[str, object]:
        files = self._files
        position = None if place.position is None else place.position + received
        return {
            "format": _STATE_FORMAT,
            "dataset": files.dataset,
            "identity": files.identity,
            "version": files.version,
            "samples": len(files),
            "digest": self._digest,
            "seed": self.seed,
            "epoch": place.epoch,
            "group_size": self.group_size,
            "partitions": [
                [each.world, each.drop_last, each.position] for each in place.partitions
            ],
            "world": self.world,
            "drop_last": self.drop_last,
            "position": position,
        }

    def _count(self, epoch: int) -> int:
        """The number of samples of an epoch, of all ranks together."""
        return len(self._files)

    def _shuffled(self, place: EpochPlace) -> tuple[Indices, Indices]:
        """All samples of an epoch in order, before it is divided into parts, and the group of
        each."""
        return self._files.files.shuffled(self.seed, place.epoch, self.group_size)

    def _part_length(self, place: EpochPlace) -> int:
        left = self._count(place.epoch)
        for partition in place.partitions:
            left = len(remaining(np.arange(left), partition))
        return part_length(left, self.world, drop_last=self.drop_last)

    def _begin(self, iteration: "_Iteration", own: EpochPlace | None) -> tuple[EpochPlace, Indices]:
        """Begin an iteration, at the place `own` if a state was loaded into the iteration itself.
        Returns its place and its samples."""
        place = own or self._next or EpochPlace(self.epoch)
        if place.position is None:
            raise UsageError(
                "the loaded state does not have the number of samples that had been received",
                advice="save it with state_dict(received=...); or, if you know the number, load"
                ' {**state, "position": NUMBER}',
            )
        samples, ends = self._part(place)
        if own is None and place.position and not len(samples) and not self._has_set_epoch:
            self._warn_once(
                f"the loaded state is at the end of epoch {place.epoch}, so this iteration"
                f" gives nothing: call set_epoch({place.epoch + 1}) to begin the next epoch"
            )
        if self._diesel_dataset is not None:
            self._diesel_dataset.announce(samples, ends)
        self._next, self._last = None, iteration
        return place, samples

    def _part(self, place: EpochPlace) -> tuple[Indices, Indices]:
        """This rank's samples from the place on, and the ends of their groups."""
        sequence, group = self._shuffled(place)
        order = np.arange(len(sequence))
        for partition in place.partitions:
            order = remaining(order, partition)
        part = part_positions(len(order), self.rank, self.world, drop_last=self.drop_last)
        chosen = order[part[place.position :]]
        return sequence[chosen], group_ends(group[chosen])

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.append(warning)
            log.warning("%s", warning)


class _Iteration(Iterator[int]):
    """One iteration over a sampler. It begins only when its first sample is requested, since torch
    makes iterators that it does not use."""

    def __init__(self, sampler: ChunkShuffleSampler) -> None:
        self._sampler = sampler
        self._own: EpochPlace | None = None  # of a state that was loaded into this iteration
        self._left: Iterator[int] | None = None
        self.start = EpochPlace(0)
        self.samples: Indices = np.empty(0, np.int64)
        self.given = 0
        self.delivered: int | None = None
        """How many samples `ImportanceSampler.enumerate` has delivered; None without it."""
        self._is_counted = False  # by the hook of `dlcmd run` or `join`, from the beginning

    def received(self) -> int | None:
        """The number of samples that the loop has received; None if nothing counts them."""
        if self.delivered is not None:
            return self.delivered
        counted = counted_by_hook(self._sampler) if self._is_counted else None
        # A greater number was counted in another iteration.
        return None if counted is None or counted > self.given else counted

    @property
    def length(self) -> int:
        return len(self.samples)

    @property
    def is_over(self) -> bool:
        return self._left is not None and self.given >= self.length

    @property
    def place(self) -> EpochPlace:
        """The start of this iteration, with an unknown position: torchdata keeps it in the
        iterator's state."""
        return replace(self.start, position=None)

    def __next__(self) -> int:
        if self._left is None:
            self.start, self.samples = self._sampler._begin(self, self._own)
            self._is_counted = counted_by_hook(self._sampler) == 0  # not 0: it counts another loop
            self._left = _python_numbers(self.samples)
        sample = next(self._left)
        self.given += 1
        return sample

    def state_dict(self) -> dict[str, object]:
        sampler = self._sampler
        if self._left is None:
            return sampler._state(self._own or sampler._next or EpochPlace(sampler.epoch))
        return sampler._state(self.start, self.given)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._own = self._sampler._load(state)
        self._sampler._next = None


def _is_torchdata(frame: FrameType | None) -> bool:
    """Whether the innermost caller outside this package is torchdata."""
    package = __name__.partition(".")[0]
    while frame is not None:
        caller = str(frame.f_globals.get("__name__")).partition(".")[0]
        if caller != package:
            return caller == "torchdata"
        frame = frame.f_back
    return False


def _python_numbers(samples: Indices) -> Iterator[int]:
    for start in range(0, len(samples), _BLOCK):
        yield from samples[start : start + _BLOCK].tolist()


class _StateNumbers:
    """Reads the numbers of a state. Raises UsageError for malformed ones."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state

    def get(self, name: str, lowest: int = 0, highest: int = 2**63 - 1) -> int:
        return _number(name, self._state.get(name), lowest, highest)

    def partitions(self) -> tuple[Partition, ...]:
        rows = self._state.get("partitions")
        if not isinstance(rows, list | tuple):
            raise UsageError("this is not a state of ChunkShuffleSampler: it has no partitions")
        found = []
        for row in rows:
            if not isinstance(row, list | tuple) or len(row) != 3:
                raise UsageError(f"bad partition {row!r} in a state of ChunkShuffleSampler")
            world = _number("world", row[0], 1, WORLD_MAX)
            found.append(Partition(world, bool(row[1]), _number("position", row[2])))
        return tuple(found)


def _number(name: str, value: object, lowest: int = 0, highest: int = 2**63 - 1) -> int:
    if not isinstance(value, int):
        raise UsageError(f"bad {name} {value!r} in a state of ChunkShuffleSampler")
    check_number(name, value, lowest, highest)
    return value
