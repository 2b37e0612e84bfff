"""`ChunkShuffleSampler`: the order is chunk-wise, ranks get the parts that `DistributedSampler`
would give, and a run that stops anywhere reads exactly the rest.
"""

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from diesel_fs import connect
from diesel_fs.errors import ConflictError, NoSuchPath, UsageError
from diesel_fs.torch import ChunkShuffleSampler, DieselDataset
from tests.cli.conftest import Dlcmd
from tests.cli.conftest import dlcmd as dlcmd
from tests.examples import examples
from tests.rows import each_row
from tests.trees import write

from .stores import packed

FILES = 29
PREFETCH = 2


def contents(count: int) -> dict[str, bytes]:
    chance = random.Random(1)
    return {f"c{n % 3}/{n:03}.bin": chance.randbytes(12_000 + 17 * n) for n in range(count)}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    top = tmp_path_factory.mktemp("sampler")
    return packed(write(top / "src", contents(FILES)), top / "store")


@pytest.fixture(scope="module")
def pets(url: str) -> Iterator[DieselDataset]:
    with DieselDataset("pets", loader=len, extensions=".bin", url=url) as dataset:
        yield dataset


@each_row(("rank", "world", "drop_last"), [(0, 1, False), (1, 3, False), (2, 3, True)])
def test_the_order_is_that_of_the_dataset(
    pets: DieselDataset, url: str, rank: int, world: int, drop_last: bool
) -> None:
    sampler = ChunkShuffleSampler(
        pets, rank=rank, world=world, seed=4, group_size=2, drop_last=drop_last
    )
    sampler.set_epoch(2)
    with connect("pets", url) as dataset:
        expected = dataset.shuffle(
            seed=4, epoch=2, group_size=2, rank=rank, world=world, drop_last=drop_last
        )
        assert [pets.samples[at][0] for at in sampler] == [
            dataset.snapshot.path(at).decode() for at in expected.tolist()
        ]
    assert len(sampler) == len(expected)


def test_epochs_differ_and_repeat(pets: DieselDataset) -> None:
    sampler = ChunkShuffleSampler(pets)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first
    assert list(ChunkShuffleSampler(pets, seed=1)) != first


Phase = tuple[int, bool, int, int]
"""World, drop_last, batches that the loop received, and workers."""

PHASES = st.lists(
    st.tuples(st.integers(1, 8), st.booleans(), st.integers(0, 9), st.integers(0, 4)), max_size=3
)


def stopped(sampler: ChunkShuffleSampler, batch: int, batches: int, workers: int) -> Sequence[int]:
    """The samples that a loop received until it stopped; the workers have taken more."""
    drawn = list(islice(BatchSampler(sampler, batch, False), batches + workers * PREFETCH))
    return [each for part in drawn[:batches] for each in part]


def ranks(data: object, world: int, drop_last: bool, state: object) -> list[ChunkShuffleSampler]:
    made = [
        ChunkShuffleSampler(data, rank=rank, world=world, group_size=2, drop_last=drop_last)
        for rank in range(world)
    ]
    for each in made:
        each.set_epoch(3)
        if state is not None:
            each.load_state_dict(json.loads(json.dumps(state)))
            each.set_epoch(3)  # loops do this
    return made


@examples(150)
@given(
    files=st.integers(0, FILES), batch=st.integers(1, 4), phases=PHASES, last=st.integers(1, 8),
    drop_last=st.booleans(),
)  # fmt: skip
def test_after_any_stops_and_changes_the_remaining_samples_are_read(
    pets: DieselDataset, files: int, batch: int, phases: list[Phase], last: int, drop_last: bool
) -> None:
    data = Subset(pets, range(files))
    [alone] = ranks(data, 1, False, None)
    order, received, state = list(alone), Counter[int](), None
    for world, drops, batches, workers in phases:
        samplers = ranks(data, world, drops, state)
        states = []
        for sampler in samplers:
            whole = list(copy.copy(sampler))
            assert len(sampler) == len(whole)
            got = stopped(sampler, batch, batches, workers)
            assert got == whole[: batches * batch]
            received.update(got)
            states.append(sampler.state_dict(received=batches * batch))
        assert all(each == states[0] for each in states), "a state serves all ranks"
        state = states[0]
        for sampler, again in zip(samplers, ranks(data, world, drops, state), strict=True):
            rest = list(again)  # with the same world each rank goes on in its own part
            assert rest == list(_part(sampler))[batches * batch :]
    left = [each for each in order if each not in received]
    samplers = ranks(data, last, drop_last, state)
    final = Counter(each for sampler in samplers for each in sampler)
    if not phases or phases[-1][:2] != (last, drop_last):
        expected = Counter(
            left[at]
            for rank in range(last)
            for at in DistributedSampler(left, last, rank, shuffle=False, drop_last=drop_last)
        )
        assert final == expected


def _part(sampler: ChunkShuffleSampler) -> Iterator[int]:
    again = copy.copy(sampler)
    again.load_state_dict(sampler.state_dict(received=0))
    return iter(again)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_resumes(pets: DieselDataset, workers: int) -> None:
    def loader() -> tuple[ChunkShuffleSampler, DataLoader[object]]:
        sampler = ChunkShuffleSampler(pets, group_size=2)
        return sampler, DataLoader(
            range(len(pets)), batch_size=4, sampler=sampler, num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip

    expected = [batch.tolist() for batch in loader()[1]]
    sampler, first = loader()
    assert [batch.tolist() for batch in islice(first, 3)] == expected[:3]
    state = sampler.state_dict(received=3 * 4)
    sampler, second = loader()
    sampler.load_state_dict(state)
    assert len(second) == len(expected) - 3
    assert [batch.tolist() for batch in second] == expected[3:]
    assert [batch.tolist() for batch in second] == expected, "the next epoch is whole"


def test_after_join_states_are_whole(pets: DieselDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_run.py` tests that the hook has counted. A number that it counted before the iteration,
    or that is greater than the number of samples handed out, belongs to another iteration."""
    whole, counted = list(ChunkShuffleSampler(pets)), [0]
    monkeypatch.setattr("diesel_fs.torch.sampler.counted_by_hook", lambda _: counted[0])
    for before, after, expected in ((0, 0, 0), (0, 5, 5), (0, 9, 9), (0, 10, None), (4, 4, None)):
        sampler, resumed = ChunkShuffleSampler(pets), ChunkShuffleSampler(pets)
        counted[0] = before
        list(islice(sampler, 9))
        counted[0] = after
        if expected is None:
            with pytest.raises(UsageError, match="it is not known how many"):
                sampler.state_dict()
        else:
            resumed.load_state_dict(sampler.state_dict())
            assert list(resumed) == whole[expected:]


class Sorted(BatchSampler):  # type: ignore[misc] # mypy skips torch
    """Takes samples from another sampler, and gives them in batches of another order."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from sorted(super().__iter__(), key=sum)


class Skips(BatchSampler):  # type: ignore[misc] # mypy skips torch
    """Leaves out two batches, as accelerate's `SkipBatchSampler`."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from islice(super().__iter__(), 2, None)


@each_row("around", [list, BatchSampler, Sorted, Skips])
def test_T2_a_state_that_would_lose_samples_is_not_saved(pets: DieselDataset, around: type) -> None:
    """The sampler alone cannot know how many samples its loop has received."""
    sampler = ChunkShuffleSampler(pets)
    assert sampler.state_dict()["position"] == 0
    next(iter(sampler if around is list else around(sampler, 4, False)))
    with pytest.raises(UsageError, match="it is not known how many") as caught:
        sampler.state_dict()
    assert "state_dict(received=batches * batch_size)" in str(caught.value.advice)
    assert sampler.state_dict(received=4 if around is BatchSampler else 0)["epoch"] == 0
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


def test_T2_torchdata_alone_gets_a_state_without_the_number(pets: DieselDataset) -> None:
    """It has the number in the state of the iterator, which is always whole."""
    sampler, resumed = ChunkShuffleSampler(pets), ChunkShuffleSampler(pets)
    iterator = iter(sampler)
    for position in range(3):
        assert iterator.state_dict()["position"] == position  # type: ignore[attr-defined]
        next(iterator)
    scope = {"__name__": "torchdata.stateful_dataloader.sampler", "sampler": sampler}
    state = eval("sampler.state_dict()", scope)  # noqa: S307  (of ours)
    resumed.load_state_dict(state)
    with pytest.raises(UsageError, match="number of samples that had been received"):
        next(iter(resumed))
    resumed.load_state_dict({**state, "position": 1})
    assert len(list(resumed)) == FILES - 1
    list(sampler)
    assert iter(sampler).state_dict()["position"] == 0  # type: ignore[attr-defined]


def test_T2_resuming_a_finished_epoch_logs_a_warning_unless_the_loop_set_it(
    pets: DieselDataset, caplog: pytest.LogCaptureFixture
) -> None:
    sampler, resumed = ChunkShuffleSampler(pets), ChunkShuffleSampler(pets)
    whole = list(sampler)
    state = sampler.state_dict(received=FILES)
    for sets_epoch in (True, False, False):
        resumed.load_state_dict(state)
        if sets_epoch:
            resumed.set_epoch(0)
        assert list(resumed) == []
        assert list(resumed) == whole
        assert bool(caplog.records) != sets_epoch
    [logged] = [record.getMessage() for record in caplog.records]
    assert "gives nothing: call set_epoch(1)" in logged


def test_impossible_numbers_are_refused(pets: DieselDataset) -> None:
    sampler = ChunkShuffleSampler(pets)
    with pytest.raises(UsageError, match="no sample has been handed out"):
        sampler.state_dict(received=4)
    list(islice(sampler, 3))
    with pytest.raises(UsageError, match="only 3 samples"):
        sampler.state_dict(received=4)
    with pytest.raises(UsageError, match="received"):
        sampler.state_dict(received=-1)
    for bad in ({"rank": 1}, {"world": 0}, {"seed": -1}, {"group_size": 0}):
        with pytest.raises(UsageError):
            ChunkShuffleSampler(pets, **bad)  # type: ignore[arg-type]  # by name
    good = sampler.state_dict(received=2)
    for name, value in (
        ("position", 30), ("position", "2"), ("world", 0), ("partitions", 3), ("partitions", [[1]]),
        ("partitions", [[1, False, 99]]), ("epoch", None), ("format", 9), ("group_size", 0),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            ChunkShuffleSampler(pets).load_state_dict({**good, name: value})
    with pytest.raises(UsageError, match="not a state"):
        ChunkShuffleSampler(pets).load_state_dict({})


def test_a_state_of_other_samples_names_both(pets: DieselDataset, tmp_path: Path) -> None:
    source = write(tmp_path / "src", contents(FILES))
    place = packed(source, tmp_path / "store")

    def opened() -> DieselDataset:
        return DieselDataset("pets", loader=len, extensions=".bin", url=place)

    with opened() as another:
        both = f"pets@{pets.version}.*pets@{another.version}.*another dataset"
        with pytest.raises(ConflictError, match=both):
            ChunkShuffleSampler(another).load_state_dict(ChunkShuffleSampler(pets).state_dict())
        own = ChunkShuffleSampler(another).state_dict()
        with pytest.raises(ConflictError, match="another selection"):
            ChunkShuffleSampler(Subset(another, range(5))).load_state_dict(own)
    write(source, {"c1/new.bin": b"new"})
    packed(source, tmp_path / "store")
    with opened() as newer:
        both = f"pets@{own['version']}.*pets@{newer.version}.*another version"
        with pytest.raises(ConflictError, match=both):
            ChunkShuffleSampler(newer).load_state_dict(own)
        with pytest.raises(UsageError, match="of one version"):
            ChunkShuffleSampler(ConcatDataset([newer, pets]))


def test_rank_and_world_are_those_of_torch_distributed(pets: DieselDataset, tmp_path: Path) -> None:
    assert (ChunkShuffleSampler(pets).rank, ChunkShuffleSampler(pets).world) == (0, 1)
    meeting = f"file://{tmp_path}/meet"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        assert ChunkShuffleSampler(pets).world == 1
        assert ChunkShuffleSampler(pets, rank=2, world=5).rank == 2
    finally:
        torch.distributed.destroy_process_group()


class OnDisk:
    """A dataset with a list of paths, as torchvision's."""

    def __init__(self, samples: Sequence[object]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.fuse
def test_a_dataset_on_a_mount_has_the_same_order(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", contents(FILES))
    dlcmd("put", "--chunk-size", "64K", source, "pets")
    dlcmd("mount", "pets", tmp_path / "mnt")
    try:
        paths = sorted(
            os.path.join(top, name) for top, _, names in os.walk(tmp_path / "mnt") for name in names
        )
        mounted = OnDisk([(path, 0) for path in paths])
        url = dlcmd.store.as_uri()
        with DieselDataset("pets", loader=len, extensions=".bin", url=url) as dataset:
            expected = ChunkShuffleSampler(dataset, group_size=2)
            found = ChunkShuffleSampler(mounted, group_size=2)
            assert list(found) == list(expected)
            assert found.state_dict(received=3) == expected.state_dict(received=3)
            parts = ConcatDataset([Subset(mounted, range(9)), Subset(mounted, range(9, FILES))])
            assert list(ChunkShuffleSampler(parts, group_size=2)) == list(expected)
        with pytest.raises(NoSuchPath, match="absent"):
            ChunkShuffleSampler(OnDisk([*paths, f"{tmp_path}/mnt/absent"]))
        with pytest.raises(NoSuchPath, match="hostname"):
            ChunkShuffleSampler(OnDisk([*paths, "/etc/hostname"]))
    finally:
        dlcmd("umount", tmp_path / "mnt")
    with pytest.raises(UsageError, match="not on a mount"):
        ChunkShuffleSampler(OnDisk(paths))
    with pytest.raises(UsageError, match="not a path"):
        ChunkShuffleSampler(OnDisk([3]))
    with pytest.raises(UsageError, match="are not known"):
        ChunkShuffleSampler(range(3))
