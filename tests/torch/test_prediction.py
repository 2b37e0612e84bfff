"""The hook predicts the order of a sampler of torch, and leaves no trace."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from diesel_fs.torch import ChunkShuffleSampler, DieselDataset
from diesel_fs.torch.hook.diesel_hook.prediction import BetweenEpochs, predict
from tests.rows import each_row
from tests.trees import write

from .stores import packed

KINDS = ("sequential", "random", "replacement", "subset", "weighted", "distributed")


def sampler_of(kind: str, count: int, seed: int | None) -> Sampler[int]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    data = range(count)
    match kind:
        case "sequential":
            return SequentialSampler(data)
        case "random":
            return RandomSampler(data, generator=generator)
        case "replacement":
            return RandomSampler(data, replacement=True, num_samples=70, generator=generator)
        case "subset":
            return SubsetRandomSampler(range(0, count, 2), generator=generator)
        case "weighted":
            return WeightedRandomSampler([1.0 + each for each in data], count, generator=generator)
        case _:
            return DistributedSampler(data, 3, 2, seed=seed or 0)


def flat(sampler: object) -> list[int]:
    assert isinstance(sampler, Sampler)
    return [index for each in sampler for index in (each if isinstance(each, list) else [each])]


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS), count=st.integers(1, 100), drop_last=st.booleans(),
    seed=st.none() | st.integers(0, 1 << 30), batch=st.none() | st.integers(1, 40),
    chance=st.integers(0, 1 << 30),
)  # fmt: skip
def test_the_order_and_all_generators_are_the_same_as_without_the_hook(
    kind: str, count: int, seed: int | None, batch: int | None, drop_last: bool, chance: int
) -> None:
    """`chance` seeds the global generators, from which a sampler without its own draws."""

    def fresh() -> Sampler[int] | BatchSampler:
        random.seed(chance)
        np.random.seed(chance % (1 << 32))
        torch.manual_seed(chance)
        inner = sampler_of(kind, count, seed)
        return inner if batch is None else BatchSampler(inner, batch, drop_last)

    untouched = fresh()
    expected = [flat(untouched), torch.rand(2).tolist(), random.random(), np.random.rand()]
    sampler = fresh()
    orders = predict(sampler, 2)
    assert orders[0].indices.tolist() == expected[0]
    assert [flat(sampler), torch.rand(2).tolist(), random.random(), np.random.rand()] == expected
    if batch is not None and expected[0]:
        assert orders[0].bounds[0] == min(batch, len(orders[0].indices))


@each_row("kind", KINDS)
@each_row("seed", [None, 7])
def test_later_epochs_that_depend_on_nothing_are_predicted(kind: str, seed: int | None) -> None:
    sampler = sampler_of(kind, 50, seed)
    orders = [each.indices.tolist() for each in predict(sampler, 2)]
    if seed is None and kind not in ("sequential", "distributed"):
        assert len(orders) == 1, "the global generator may be used in between"
        return
    given = []
    for epoch in range(3):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        given.append(flat(sampler))
    assert orders == given


@each_row("kind", ["random", "replacement", "subset", "weighted"])
@each_row("draws", [0, 1, 3])
def test_the_global_generator_is_predicted_if_nothing_else_is_drawn(kind: str, draws: int) -> None:
    """Before its last epoch the program draws something else; then no further epoch is
    predicted."""
    torch.manual_seed(3)
    sampler, between = BatchSampler(sampler_of(kind, 50, None), 8, drop_last=False), BetweenEpochs()
    foreseen: list[int] = []
    for epoch in range(5):
        for _ in range(draws):  # as torch's loaders do
            torch.empty((), dtype=torch.int64).random_()
        state = torch.get_rng_state()
        orders = [each.indices.tolist() for each in predict(sampler, 2, between=between)]
        assert torch.equal(torch.get_rng_state(), state)
        assert len(orders) == (1 if epoch in (0, 4) else 3)
        given = flat(sampler)
        assert given == orders[0]
        if epoch in (2, 3):
            assert given == foreseen
        foreseen = orders[1] if len(orders) > 1 else []
        if epoch == 3:
            torch.rand(1)


def test_a_sampler_that_is_not_known_is_not_iterated() -> None:
    class Own(Sampler[int]):  # type: ignore[misc] # mypy skips torch
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("it was iterated")

    class Derived(SequentialSampler):  # type: ignore[misc] # mypy skips torch
        pass

    batches = BatchSampler(Own(), 3, drop_last=False)
    for unknown in (Own(), batches, Derived(range(3)), ["no", "indices"]):
        assert predict(unknown, 1) == []


@each_row("batch", [None, 4])
def test_a_chunk_wise_order_and_its_rest_are_predicted(batch: int | None, tmp_path: Path) -> None:
    files = {f"c{n % 3}/{n:03}.bin": bytes([n]) * 9000 for n in range(30)}
    url = packed(write(tmp_path / "src", files), tmp_path / "store")
    with DieselDataset("pets", loader=len, extensions=".bin", url=url) as dataset:
        sampler = ChunkShuffleSampler(dataset, rank=1, world=2, group_size=2)
        outer = sampler if batch is None else BatchSampler(sampler, batch, drop_last=False)
        assert flat(outer)[:8] == flat(outer)[:8]
        state = sampler.state_dict(received=8)
        for start in (0, 8):
            if start:
                sampler.load_state_dict(state)
            orders = [each.indices.tolist() for each in predict(outer, 2)]
            assert len(orders[0]) == 15 - start
            for epoch, order in enumerate(orders):
                sampler.set_epoch(epoch)
                assert flat(outer) == order
            sampler.set_epoch(0)


@each_row(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_generator_that_the_loader_shares_is_predicted(workers: int, persistent: bool) -> None:
    """Torch draws the seed of its workers from it, too."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(
        range(40), batch_size=7, shuffle=True, generator=generator, num_workers=workers,
        persistent_workers=persistent, multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # as when an epoch begins
    assert loader.batch_sampler is not None
    foreseen = predict(loader.batch_sampler, 2, None, None if persistent else generator)
    generator.manual_seed(5)
    given = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert [order.indices.tolist() for order in foreseen] == given
