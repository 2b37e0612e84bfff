"""Replaces the random orders of torch's samplers by chunk-wise orders (`dlcmd run --shuffle
chunk`).

Chunk-wise shuffle (DIESEL, ICPP 2020, section 4.3): the chunks are shuffled and cut into groups,
and the samples of each group are shuffled. Lengths, seeds and `drop_last` stay those of the
sampler. A `DistributedSampler` gives each rank a contiguous part, so that most chunks are read by
one rank only.

A chunk-wise sampler has the attribute `_diesel_chunks` (a `Grouping`). Its copies also have it, so
their orders can be predicted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

_MARK = "_diesel_chunks"
_installed: list[bool] = []  # not empty once torch's classes are wrapped


class _Tensor(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: object) -> _Tensor: ...
    def __lt__(self, other: int) -> _Tensor: ...
    def __add__(self, other: _Tensor) -> _Tensor: ...
    def __floordiv__(self, other: int) -> _Tensor: ...
    def clone(self) -> _Tensor: ...
    def sum(self) -> float: ...
    def tolist(self) -> list[int]: ...


class _Sampler(Protocol):
    """A sampler of torch. Each class has some of these attributes."""

    data_source: Sequence[object]
    dataset: Sequence[object]
    indices: Sequence[int]
    generator: object
    num_samples: int
    total_size: int
    replacement: bool
    shuffle: bool
    seed: int
    epoch: int
    rank: int
    num_replicas: int
    drop_last: bool


class Grouping(NamedTuple):
    chunks: _Tensor
    """The number of each sample's chunk; -1: not known."""
    group_size: int
    """Chunks in a group."""


def _install() -> None:
    if _installed:
        return
    _installed.append(True)
    data = sys.modules["torch.utils.data"]
    _replace(data.RandomSampler, _random)
    _replace(data.SubsetRandomSampler, _subset)
    _replace(sys.modules["torch.utils.data.distributed"].DistributedSampler, _distributed)


def mark(sampler: object, grouping: Grouping, *, is_whole: bool = True) -> str | None:
    """Make a sampler of torch chunk-wise if it is random. Returns a note for the user if a random
    order stays as it is, otherwise None.

    `is_whole` is False if only this process knows the chunks, so that other ranks would compute
    another order.
    """
    dataset_size = len(grouping.chunks)
    data = sys.modules["torch.utils.data"]
    distributed = sys.modules["torch.utils.data.distributed"].DistributedSampler
    name = type(sampler).__name__
    if type(sampler).__module__.startswith("torchdata."):  # these draw by methods of their own
        return f"a {name} of torchdata keeps its order"
    if isinstance(sampler, data.RandomSampler):
        if sampler.replacement:
            return f"a {name} with replacement keeps its order"
        size = len(sampler.data_source)
    elif isinstance(sampler, distributed):
        if not sampler.shuffle:
            return None
        if not is_whole:
            return f"a {name} of files that are learned keeps its order"
        size = len(sampler.dataset)
    elif isinstance(sampler, data.SubsetRandomSampler):
        size = dataset_size
    else:
        is_meant = isinstance(sampler, data.SequentialSampler)
        is_meant = is_meant or name in ("ChunkShuffleSampler", "ImportanceSampler")
        return None if is_meant else f"a {name} keeps its order"
    if size != dataset_size:
        return f"a {name} of other indices than those of its dataset keeps its order"
    _install()
    vars(sampler)[_MARK] = grouping
    return None


def chunk_wise(grouping: Grouping, generator: object) -> list[int]:
    """The samples in chunk-wise order, as indices of `grouping.chunks`, drawn from a generator of
    torch. Samples without a known chunk are spread over the others' chunks."""
    torch = sys.modules["torch"]
    chunks, group_size = grouping
    unknown = chunks < 0
    if unknown.sum():
        known = torch.unique(chunks[~unknown])  # type: ignore[operator] # a tensor of bool
        drawn = torch.randint(len(known), (int(unknown.sum()),), generator=generator)
        chunks = chunks.clone()
        chunks[unknown] = known[drawn]  # type: ignore[index] # a tensor
    numbers, inverse = torch.unique(chunks, return_inverse=True)
    group = torch.randperm(len(numbers), generator=generator) // group_size
    # Equal keys are rare. A stable sort puts them in the same order on every rank.
    keys = group[inverse] + torch.rand(len(chunks), generator=generator, dtype=torch.float64)
    order: list[int] = torch.argsort(keys, stable=True).tolist()
    return order


def _replace(kind: type, ordered: Callable[[_Sampler, Grouping], Iterator[int]]) -> None:
    original = kind.__iter__  # type: ignore[attr-defined] # every sampler has it

    @functools.wraps(original)
    def __iter__(self: _Sampler) -> Iterator[int]:
        grouping = vars(self).get(_MARK)
        return original(self) if grouping is None else ordered(self, grouping)

    kind.__iter__ = __iter__  # type: ignore[attr-defined] # as above


def _random(sampler: _Sampler, grouping: Grouping) -> Iterator[int]:
    torch = sys.modules["torch"]
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    left = sampler.num_samples
    while left > 0:
        order = chunk_wise(grouping, generator)[:left]
        yield from order
        left -= len(order)


def _subset(sampler: _Sampler, grouping: Grouping) -> Iterator[int]:
    indices = sys.modules["torch"].as_tensor(sampler.indices)
    inside = Grouping(grouping.chunks[indices], grouping.group_size)
    for position in chunk_wise(inside, sampler.generator):
        yield sampler.indices[position]


def _distributed(sampler: _Sampler, grouping: Grouping) -> Iterator[int]:
    """Give each rank a contiguous part, unlike torch."""
    generator = sys.modules["torch"].Generator()
    generator.manual_seed(sampler.seed + sampler.epoch)
    order = chunk_wise(grouping, generator)
    start = sampler.rank * sampler.num_samples
    for position in range(start, start + sampler.num_samples):
        yield order[position % len(order)]
