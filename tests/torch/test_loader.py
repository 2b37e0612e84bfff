"""`AutoDataLoader` gives the batches of a stock `DataLoader`, with any number of workers."""

import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from diesel_fs.errors import UsageError
from diesel_fs.torch import AutoDataLoader, ChunkShuffleSampler, DieselDataset
from diesel_fs.torch.workers import Measured
from tests.examples import examples
from tests.processes import is_running
from tests.rows import each_row
from tests.trees import write

from .stores import packed

SAMPLES = 101

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers:
    """Gives an index, a random number of the worker's, and the worker's process."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        if index == 77 and os.environ.get("FAIL_AT_77"):
            raise LookupError("sample 77")
        return index, torch.rand(1).item(), os.getpid()


class InPlace(Sampler[int]):  # type: ignore[misc]  # mypy skips torch
    """A sampler that draws when an iterator is requested."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SAMPLES


class Script:
    """A controller that returns these numbers, one after another."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.measurements: list[Measured] = []

    def decide(self, measured: Measured) -> int:
        self.measurements.append(measured)
        return self.numbers.pop(0) if self.numbers else measured.workers


Batches = list[tuple[list[int], list[float]]]


def batches(loader: "DataLoader[object]", epochs: int = 2) -> tuple[list[Batches], object]:
    random.seed(5)
    torch.manual_seed(5)
    given_: list[Batches] = []
    for _ in range(epochs):
        given_.append([])
        for index, chance, _ in loader:
            given_[-1].append((torch.as_tensor(index).tolist(), torch.as_tensor(chance).tolist()))
        torch.rand(1)
    return given_, (random.random(), torch.rand(2).tolist())


def auto(dataset: object, **named: object) -> AutoDataLoader[list[torch.Tensor]]:
    return AutoDataLoader(dataset, **named)  # type: ignore[arg-type]  # all by their names


def indices(given_: list[Batches]) -> list[list[list[int]]]:
    return [[index for index, _ in epoch] for epoch in given_]


def options(kind: str) -> dict[str, object]:
    match kind:
        case "random":
            return {"batch_size": 7, "shuffle": True}
        case "own generator":
            own = torch.Generator().manual_seed(9)
            return {"batch_size": 7, "shuffle": True, "generator": own, "drop_last": True}
        case "weighted":
            return {"batch_size": 9, "sampler": WeightedRandomSampler([1.0, 2.0] * 50, 90)}
        case "in place":
            return {"batch_size": 7, "sampler": InPlace()}
        case "batches":
            return {"batch_sampler": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]] * 6}
        case _:
            return {"batch_size": None, "shuffle": True}


FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}
KINDS = ["random", "own generator", "weighted", "in place", "batches", "no batches"]


@each_row(("kind", "persistent"), [*((kind, False) for kind in KINDS), ("random", True)])
def test_it_is_a_stock_loader_while_the_number_stays(kind: str, persistent: bool) -> None:
    """Even the random numbers of the workers are the same."""
    workers = {**FORKED, "num_workers": 2, "persistent_workers": persistent}
    expected = batches(DataLoader(Numbers(), **options(kind), **workers))
    ours = auto(Numbers(), **options(kind), **workers, controller=Script([]), tune_every=2)
    assert batches(ours) == expected
    assert len(ours) == len(expected[0][0])


@examples(8)
@given(
    kind=st.sampled_from(KINDS), schedule=st.lists(st.integers(0, 4), max_size=6),
    start=st.integers(0, 3), every=st.integers(1, 5), persistent=st.booleans(),
)  # fmt: skip
def test_the_sequence_is_that_of_a_stock_loader_for_any_schedule(
    kind: str, schedule: list[int], start: int, every: int, persistent: bool
) -> None:
    persistent = persistent and start > 0
    if persistent:
        schedule = [max(each, 1) for each in schedule]
    named: dict[str, object] = {"num_workers": start}
    if start:
        named |= {"multiprocessing_context": "fork", "persistent_workers": persistent}
    expected, states = batches(DataLoader(Numbers(), **options(kind), **named))
    script = Script(schedule)
    ours = auto(Numbers(), **options(kind), **named, controller=script, tune_every=every)
    found, our_states = batches(ours)
    assert indices(found)[0] == indices(expected)[0]
    if start and 0 not in schedule:  # otherwise the dataset draws from this
        assert indices(found) == indices(expected)
        assert our_states == states
    drawn = [chance for epoch in found for _, chance in epoch]
    assert len({str(each) for each in drawn}) == len(drawn), "no worker repeats random numbers"


@pytest.mark.deep
def test_spawned_workers_change_too() -> None:
    script = Script([1])
    loader = auto(
        TensorDataset(torch.arange(SAMPLES)), batch_size=10, num_workers=2, controller=script,
        multiprocessing_context="spawn", tune_every=3, persistent_workers=True,
    )  # fmt: skip
    for _ in range(2):
        found = [each for [batch] in loader for each in batch.tolist()]
        assert found == list(range(SAMPLES))
        assert loader.num_workers == 1
    assert script.measurements[0].workers == 2


def test_the_processes_change_with_the_number() -> None:
    script = Script([3, 1])
    loader = auto(Numbers(), batch_size=4, **FORKED, controller=script, tune_every=3)
    processes = [int(batch[2][0]) for batch in loader]
    assert len(set(processes)) == 5
    assert len(set(processes[:3])) == 1
    for measured in script.measurements:
        assert measured.batch_samples == pytest.approx(4, abs=1)
        assert 0 < measured.fetch_s < 10
        assert 0 <= measured.request_s < 10
        assert 0 < measured.worker_bytes < 1 << 32


def test_a_failing_sample_is_raised_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT_77", "1")
    loader = auto(Numbers(), batch_size=10, **FORKED, controller=Script([2, 1]), tune_every=2)
    found: list[list[int]] = []
    left = iter(loader)
    for _ in range(len(loader)):
        try:
            found.append(next(left)[0].tolist())
        except LookupError:
            found.append([-1])
    assert next(left, None) is None
    whole = [list(range(at, min(at + 10, SAMPLES))) for at in range(0, SAMPLES, 10)]
    assert found == [[-1] if 77 in each else each for each in whole]


class Slow:
    """Samples that take time, as from a store."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def test_a_loop_that_waits_gets_more_workers() -> None:
    """The whole path with our own controller: workers that wait for a store do not need a core
    each."""
    loader = auto(Slow(), batch_size=2, **FORKED, tune_every=5, workers_max=4)
    assert [batch.tolist() for batch in loader] == [[at, at + 1] for at in range(0, 400, 2)]
    assert loader.num_workers > 1


class Stream(IterableDataset[int]):  # type: ignore[misc]  # mypy skips torch
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_unsupported_datasets_and_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="IterableDataset"):
        auto(Stream())
    with pytest.raises(UsageError, match="order"):
        auto(Numbers(), in_order=False)
    for name in ("workers_max", "tune_every", "memory_bytes"):
        with pytest.raises(UsageError, match=name):
            auto(Numbers(), **{name: 0})
    loader = auto(Numbers(), shuffle=True)
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(UsageError, match="ChunkShuffleSampler"):
            call()


class Reversed(BatchSampler):  # type: ignore[misc] # mypy skips torch
    """Gives its last batch first."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from reversed(list(super().__iter__()))


def test_T2_no_state_with_batches_in_an_order_of_their_own(pets: DieselDataset) -> None:
    for kind in (BatchSampler, Reversed):
        sampler = ChunkShuffleSampler(pets)
        loader = auto(pets, batch_sampler=kind(sampler, 4, False), num_workers=0)
        next(iter(loader))
        if kind is BatchSampler:
            assert loader.state_dict()["position"] == 4
        else:
            with pytest.raises(UsageError, match="come from a Reversed, which may sort or skip"):
                loader.state_dict()


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DieselDataset]:
    top: Path = tmp_path_factory.mktemp("loader")
    files = {f"c{n % 3}/{n:03}.bin": bytes([n]) * 9000 for n in range(50)}
    url = packed(write(top / "src", files), top / "store")
    with DieselDataset("pets", loader=len, extensions=".bin", url=url) as dataset:
        yield dataset


def first_bytes(rows: list[tuple[bytes, int]]) -> list[int]:
    return [content[0] for content, _ in rows]


@pytest.mark.parametrize("workers", range(3))
def test_it_counts_the_samples_that_the_loop_receives(pets: DieselDataset, workers: int) -> None:
    pets.loader = bytes

    def loader() -> AutoDataLoader[list[torch.Tensor]]:
        context = {"multiprocessing_context": "fork"} if workers else {}
        sampler = ChunkShuffleSampler(pets, group_size=2)
        return auto(
            pets, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=first_bytes,
            controller=Script([2, 1, 2, 1] if workers else []), tune_every=2, **context,
        )  # fmt: skip

    expected = list(loader())
    assert sorted(each for batch in expected for each in batch) == list(range(50))
    for stop in (0, 1, 5, len(expected)):
        first = loader()
        found: list[object] = []
        for batch in first if stop else ():
            found.append(batch)
            if len(found) == stop:
                break
        state = first.state_dict()
        second = loader()
        second.load_state_dict(state)
        second.sampler.set_epoch(0)
        found += list(second)
        assert found == expected, stop
        second.sampler.set_epoch(1)
        assert second.state_dict()["position"] == 0
        assert second.state_dict()["epoch"] == 1


def test_a_loader_that_is_dropped_ends_its_workers_at_once() -> None:
    """It does not wait for the garbage collector, which may run in a forked worker."""
    gc.collect()
    gc.disable()
    try:
        for persistent in (False, True):
            loader = auto(
                Numbers(), batch_size=4, **FORKED, persistent_workers=persistent,
                controller=Script([2, 1]), tune_every=2,
            )  # fmt: skip
            left = iter(loader)
            processes = {int(next(left)[2][0]) for _ in range(9)}
            assert any(is_running(each) for each in processes)
            del left, loader
            assert not any(is_running(each) for each in processes)
    finally:
        gc.enable()
