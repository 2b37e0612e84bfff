"""Chunk-wise orders of torch's samplers keep their lengths, seeds and rules."""

from collections import Counter
from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from diesel_fs.torch.hook.diesel_hook.chunk_wise import Grouping, mark
from diesel_fs.torch.hook.diesel_hook.prediction import predict

chunk_lists = st.lists(st.integers(-1, 8), min_size=1, max_size=60).filter(
    lambda chunks: any(chunk >= 0 for chunk in chunks)
)
group_sizes = st.integers(1, 4)


def marked(sampler: Sampler[int], chunks: list[int], group_size: int) -> Sampler[int]:
    assert mark(sampler, Grouping(torch.tensor(chunks), group_size)) is None
    return sampler


def has_groups(order: list[int], chunks: list[int], group_size: int) -> bool:
    """Whether an order can be cut so that each part has the samples of `group_size` chunks, and no
    chunk is in two parts."""
    seen: set[int] = set()
    current: set[int] = set()
    for chunk in [chunks[index] for index in order if chunks[index] >= 0]:
        if chunk in seen:
            return False
        if chunk not in current and len(current) == group_size:
            seen |= current
            current = set()
        current.add(chunk)
    return True


@given(chunk_lists, group_sizes, st.integers(0, 1000))
def test_a_random_order_goes_by_groups(chunks: list[int], group_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampler = marked(RandomSampler(range(len(chunks)), generator=generator), chunks, group_size)
    orders = [[*sampler], [*sampler]]
    for order in orders:
        assert sorted(order) == [*range(len(chunks))]
        assert has_groups(order, chunks, group_size)
    again = RandomSampler(range(len(chunks)), generator=torch.Generator().manual_seed(seed))
    assert [*marked(again, chunks, group_size)] == orders[0]


@given(chunk_lists, group_sizes, st.integers(1, 200))
def test_numbers_and_global_generators_stay(chunks: list[int], group_size: int, count: int) -> None:
    size = len(chunks)
    torch.manual_seed(count)
    plain = [*RandomSampler(range(size), num_samples=count)]
    after = torch.rand(1).item()
    torch.manual_seed(count)
    sampler = marked(RandomSampler(range(size), num_samples=count), chunks, group_size)
    order = [*sampler]
    assert torch.rand(1).item() == after
    assert len(order) == len(plain)
    for start in range(0, count, size):
        part = order[start : start + size]
        assert len({*part}) == len(part), "each sample once before any comes twice"
        assert has_groups(part, chunks, group_size)


@settings(deadline=None)
@given(chunk_lists, group_sizes, st.integers(1, 6), st.booleans(), st.integers(0, 3))
def test_ranks_share_the_samples_as_distributed_sampler_does(
    chunks: list[int], group_size: int, world: int, drop_last: bool, epoch: int
) -> None:
    full, ours = [], []
    for rank in range(world):
        data = range(len(chunks))
        sampler = DistributedSampler(data, world, rank, seed=3, drop_last=drop_last)
        sampler.set_epoch(epoch)
        full.append([*sampler])
        ours.append([*marked(sampler, chunks, group_size)])
    assert [*map(len, ours)] == [*map(len, full)]
    counts, expected = Counter(chain(*ours)), Counter(chain(*full))
    assert sorted(counts.values()) == sorted(expected.values()), (
        "the same number repeated or left out"
    )


@given(chunk_lists, group_sizes, st.data())
def test_a_subset_keeps_members(chunks: list[int], group_size: int, data: st.DataObject) -> None:
    known = [index for index, chunk in enumerate(chunks) if chunk >= 0]
    some = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1))
    generator = torch.Generator().manual_seed(1)
    order = [*marked(SubsetRandomSampler(some, generator=generator), chunks, group_size)]
    assert sorted(order) == sorted(some)
    assert has_groups(order, chunks, group_size)


def test_a_chunk_wise_order_is_predicted() -> None:
    chunks = [index // 5 for index in range(100)]
    sampler = marked(RandomSampler(range(100), generator=torch.Generator()), chunks, 3)
    [now, later] = predict(BatchSampler(sampler, 7, drop_last=False), 1)
    assert now.indices.tolist() == [*sampler]
    assert later.indices.tolist() == [*sampler]


def test_only_random_unweighted_samplers_become_chunk_wise() -> None:
    grouping = Grouping(torch.tensor([0, 1] * 5), 1)
    in_order = SequentialSampler(range(10))
    assert mark(in_order, grouping) is None
    assert [*in_order] == [*range(10)]
    for sampler, is_whole, shown in (
        (WeightedRandomSampler([1.0] * 10, 10), True, "a WeightedRandomSampler keeps its order"),
        (RandomSampler(range(10), replacement=True), True, "with replacement keeps its order"),
        (DistributedSampler(range(10), 2, 0), False, "files that are learned keeps its order"),
        (RandomSampler(range(9)), True, "other indices"),
    ):
        assert shown in str(mark(sampler, grouping, is_whole=is_whole))
