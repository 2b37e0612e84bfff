"""`ImportanceSampler`: draws, reports, ranks that agree, and resume in mid-epoch."""

import copy
import io
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from diesel_fs.errors import ConflictError, UsageError
from diesel_fs.torch import (
    AutoDataLoader,
    ChunkShuffleSampler,
    DieselDataset,
    GradientNorm,
    Importance,
    ImportanceSampler,
)
from diesel_fs.torch.hook.diesel_hook.prediction import predict
from tests.rows import each_row
from tests.trees import write

from .stores import packed

FILES = 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    top = tmp_path_factory.mktemp("importance")
    chance = random.Random(1)
    files = {f"c{n % 3}/{n:03}.bin": chance.randbytes(4_000 + n) for n in range(FILES)}
    return packed(write(top / "src", files), top / "store")


@pytest.fixture(scope="module")
def pets(url: str) -> Iterator[DieselDataset]:
    with DieselDataset("pets", loader=len, extensions=".bin", url=url) as dataset:
        yield dataset


def losses_of(indices: list[int]) -> torch.Tensor:
    return torch.tensor([float(index) for index in indices])


def train(sampler: ImportanceSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    given = list(sampler)
    sampler.update(given, losses_of(given))
    return given


def test_warm_up_epochs_have_all_samples_and_later_ones_a_share(pets: DieselDataset) -> None:
    sampler = ImportanceSampler(pets, share=0.4, warm_up=2)
    for epoch, length in enumerate([60, 60, 24, 24, 24]):
        sampler.set_epoch(epoch)
        assert len(sampler) == length
        given = train(sampler, epoch)
        assert len(given) == len({*given}) == length


def test_samples_with_a_high_loss_come_more_often(pets: DieselDataset) -> None:
    sampler = ImportanceSampler(pets, share=0.5)
    train(sampler, 0)
    counts = np.zeros(FILES)
    for epoch in range(1, 60):
        counts[train(sampler, epoch)] += 1
    assert counts[45:].mean() > 4 * counts[:15].mean()
    assert counts[55:].min() > 45


def test_the_order_of_the_drawn_samples_is_chunk_wise(pets: DieselDataset) -> None:
    sampler, plain = ImportanceSampler(pets, group_size=1), ChunkShuffleSampler(pets, group_size=1)
    assert list(sampler) == list(plain)  # the warm-up
    train(sampler, 0)
    sampler.set_epoch(1)
    chunks = pets.snapshot.chunk_of(pets.entries())[list(sampler)]
    assert np.count_nonzero(np.diff(chunks)) + 1 == len({*chunks.tolist()})


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_with_the_indices_of_their_samples(pets: DieselDataset, workers: int) -> None:
    """A loop may set the next epoch before an epoch has ended. Batches out of order are refused:
    their losses would be counted for other samples."""
    sampler = ImportanceSampler(pets, seed=3)

    def loader(**named: bool) -> "DataLoader[list[torch.Tensor]]":
        return DataLoader(pets, batch_size=7, sampler=sampler, num_workers=workers, **named)

    batch: list[torch.Tensor]
    for epoch in range(3):
        seen, expected = 0, len(sampler)
        for indices, batch in sampler.enumerate(loader()):
            assert [4_000 + int(pets.samples[at][0][-7:-4]) for at in indices] == batch[0].tolist()
            sampler.update(indices, torch.rand(len(indices)))
            seen += len(indices)
            if seen == expected:
                sampler.set_epoch(epoch + 1)
        assert seen == expected
    with pytest.raises(UsageError, match="enumerate takes a DataLoader over this sampler"):
        next(iter(sampler.enumerate(DataLoader(pets))))
    if workers:
        with pytest.raises(UsageError, match="in the order of their samples"):
            next(iter(sampler.enumerate(loader(in_order=False))))


def test_weights_belong_to_the_draw(pets: DieselDataset) -> None:
    sampler = ImportanceSampler(pets, share=0.5, floor=0.25)
    with pytest.raises(UsageError, match="epoch 0 has not begun"):
        sampler.weights([0])
    assert sampler.weights(train(sampler, 0)).tolist() == [1.0] * FILES
    given = torch.tensor(train(sampler, 1))
    found = sampler.weights(given)
    assert (found.shape, found.dtype) == ((30,), torch.float32)
    assert 0.5 <= float(found.min()) < 0.6
    assert float(found.max()) <= 0.5 / 0.25 + 1e-5
    assert (found[given.argsort()].diff() <= 1e-6).all(), "by loss"


def test_wrong_shapes_and_indices_are_refused(pets: DieselDataset) -> None:
    sampler = ImportanceSampler(pets)
    with pytest.raises(UsageError, match='reduction="none"'):
        sampler.update([1, 2], torch.tensor(0.5))
    with pytest.raises(UsageError, match="for 3 samples"):
        sampler.update([1, 2, 3], torch.zeros(2))
    with pytest.raises(UsageError, match="for 4 samples"):
        sampler.update(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2))
    list(sampler)
    for wrong in (FILES, -1):
        with pytest.raises(UsageError, match=f"a sample {wrong}; there are 60"):
            sampler.weights([wrong])
        sampler.update([wrong], torch.zeros(1))
        with pytest.raises(UsageError, match=f"a sample {wrong}; there are 60"):
            sampler.state_dict()
    bad = {"share": 0, "floor": 0.9, "warm_up": -1, "importance": GradientNorm}
    for name, value in bad.items():
        with pytest.raises(UsageError, match=f"bad {name}"):
            ImportanceSampler(pets, **{name: value})  # type: ignore[arg-type]  # bad on purpose


@each_row(
    "losses",
    [
        torch.tensor([3.0, 4.0, 5.0], dtype=torch.float16),
        torch.tensor([3.0, 4.0, 5.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([3, 4, 5]),
        np.array([3.0, 4.0, 5.0]),
        [3.0, 4.0, 5.0],
    ],
)
def test_losses_of_any_kind_are_taken(pets: DieselDataset, losses: torch.Tensor) -> None:
    sampler = ImportanceSampler(pets)
    for indices in ([7, 8, 9], np.array([7, 8, 9], np.uint8), torch.tensor([[7], [8], [9]])):
        sampler.update(indices, losses)
    list(sampler)
    assert sampler.importance[7:10].tolist() == [3, 4, 5]


@each_row(
    "indices", [[0.5, 1], torch.zeros(2), torch.tensor([True, False]), ["a", "b"], [[1], [2, 3]]]
)
def test_indices_must_be_whole_numbers(pets: DieselDataset, indices: list[int]) -> None:
    sampler = ImportanceSampler(pets)
    list(sampler)
    with pytest.raises(UsageError, match="whole numbers"):
        sampler.update(indices, torch.zeros(2))
    with pytest.raises(UsageError, match="whole numbers"):
        sampler.weights(indices)


def test_reported_arrays_may_be_changed_and_bad_losses_are_ignored(pets: DieselDataset) -> None:
    sampler = ImportanceSampler(pets)
    losses = torch.full((2,), 2.0, requires_grad=True)
    for indices in (row := [1, 2]), (array := np.array([3, 4])), (tensor := torch.tensor([5, 6])):
        sampler.update(indices, losses)
    row.clear()
    array[:], tensor[:] = FILES, FILES
    with torch.no_grad():
        losses.zero_()
    list(sampler)
    known = sampler.importance
    assert np.flatnonzero(~np.isnan(known)).tolist() == [1, 2, 3, 4, 5, 6]
    assert known[1:7].tolist() == [2] * 6
    sampler.update([1, 2, 3, 4], torch.tensor([torch.nan, torch.inf, -1.0, 9.0]))
    train(sampler, 0)
    sampler.set_epoch(1)
    list(sampler)
    assert sampler.ignored == 3


def test_one_bad_index_loses_no_other_report(pets: DieselDataset) -> None:
    sampler = ImportanceSampler(pets)
    sampler.update([1, 2], torch.tensor([3.0, 4.0]))
    sampler.update([FILES, 5, -1], torch.tensor([1.0, 6.0, 1.0]))
    with pytest.raises(UsageError, match=f"a sample {FILES}; there are {FILES}"):
        sampler.state_dict()
    list(sampler)
    assert sampler.importance[[1, 2, 5]].tolist() == [3, 4, 6]


def test_a_missing_set_epoch_warns(pets: DieselDataset, caplog: pytest.LogCaptureFixture) -> None:
    sampler = ImportanceSampler(pets)
    first = list(sampler)
    assert list(sampler) == first  # iterating alone is no training
    assert not caplog.records
    for _ in range(3):
        sampler.update(first, losses_of(first))
        assert list(sampler) == first
    (logged,) = (record.getMessage() for record in caplog.records)
    assert "epoch 0 begins again" in logged
    assert "call set_epoch" in logged
    sampler.set_epoch(1)
    assert len(list(sampler)) < len(first)
    assert len(caplog.records) == 1


def test_a_missing_update_logs_warnings(
    pets: DieselDataset, caplog: pytest.LogCaptureFixture
) -> None:
    """A sampler that gets updates, and is on no mount, logs nothing."""
    sampler, forgetful = ImportanceSampler(pets, substitute=True), ImportanceSampler(pets)
    with caplog.at_level(logging.WARNING):
        for epoch in range(2):
            train(sampler, epoch)
        assert (sampler.substituted, caplog.records) == (0, [])
        for epoch in range(4):
            forgetful.set_epoch(epoch)
            list(forgetful)
    assert [record.getMessage() for record in caplog.records] == [
        "no loss was reported, so samples are drawn at random: call update"
    ]


def test_losses_of_nan_log_warnings(pets: DieselDataset, caplog: pytest.LogCaptureFixture) -> None:
    sampler = ImportanceSampler(pets, warm_up=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        samples = list(sampler)
        sampler.update(samples, torch.full((len(samples),), torch.nan))
    (logged,) = (record.getMessage() for record in caplog.records)
    assert f"all {FILES} reported losses are infinite, negative or NaN" in logged


def run_ranks(
    url: str, tmp_path: Path, world: int, *fault: str, local_worlds: str = ""
) -> list[tuple[int, str, str]]:
    program = Path(__file__).with_name("importance_ranks.py")
    command = [sys.executable, str(program), url, str(tmp_path / "meeting"), str(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *fault], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=os.environ | {"LOCAL_WORLD_SIZE": local_worlds[rank : rank + 1]},
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, *each) for rank, each in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("subset", ["rank 1 reads another dataset, version or selection"] * 2),
        ("report", ["rank 1 has reported samples that do not exist", "a sample 60; there are 60"]),
    ],
)
def test_differing_ranks_are_refused(url: str, tmp_path: Path, fault: str, said: list[str]) -> None:
    for expected, (code, _, error) in zip(said, run_ranks(url, tmp_path, 2, fault), strict=True):
        assert code == 1
        assert expected in error


def test_other_measures_of_importance(pets: DieselDataset) -> None:
    class Margin(Importance):
        def measure(self, losses: Tensor, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
            assert outputs is not None
            return outputs.max(1).values

    outputs = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 3])
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    [gradient] = torch.autograd.grad(losses.sum(), outputs, retain_graph=True)
    for kind, expected in (
        (GradientNorm(), gradient.norm(dim=1)),
        (Margin(), outputs.detach().max(1).values.clamp(0)),
    ):
        sampler = ImportanceSampler(pets, importance=kind)
        sampler.update([0, 1, 2, 3], losses, outputs, targets)
        list(sampler)
        found = torch.from_numpy(sampler.importance[:4]).nan_to_num(0)
        assert torch.allclose(found, expected.float(), atol=1e-5)
    sampler = ImportanceSampler(pets, importance=GradientNorm())
    with pytest.raises(UsageError, match="the gradient norm needs outputs"):
        sampler.update([0, 1, 2, 3], losses)
    one_hot = torch.nn.functional.one_hot(targets, 5).double()
    sampler.update([0, 1, 2, 3], losses, outputs, one_hot)


def test_a_run_resumed_in_mid_epoch_reads_the_rest_and_draws_alike(pets: DieselDataset) -> None:
    whole = ImportanceSampler(pets, share=np.float64(0.5), floor=np.float64(0.125), seed=5)
    for epoch in range(2):
        train(whole, epoch)
    whole.set_epoch(2)
    iterator = iter(whole)
    first = [next(iterator) for _ in range(11)]
    whole.update(first, losses_of(first) + 100)
    checkpoint = io.BytesIO()
    torch.save(whole.state_dict(received=11), checkpoint)
    checkpoint.seek(0)
    state = torch.load(checkpoint, weights_only=True)
    left = list(iterator)

    other = ImportanceSampler(pets)
    other.update([1], torch.ones(1))  # forgotten when the state is loaded
    other.load_state_dict(state)
    assert len(other) == len(left)
    other.set_epoch(2)
    assert list(other) == left
    assert torch.equal(other.weights(left), whole.weights(left))
    for sampler in (whole, other):
        sampler.update(left, losses_of(left) + 100)
    assert train(other, 3) == train(whole, 3)
    assert np.array_equal(other.importance, whole.importance)


@each_row("workers", [0, 2])
def test_T2_enumerate_counts_the_delivered_samples(pets: DieselDataset, workers: int) -> None:
    """The count holds after the last batch, too, and after the loop has left."""
    options: dict[str, object] = {"num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"
    for stop in (1, 3, FILES):
        sampler, resumed = ImportanceSampler(pets, seed=5), ImportanceSampler(pets)
        seen: list[int] = []
        loader = DataLoader(range(FILES), batch_size=8, sampler=sampler, **options)
        for number, (indices, _) in enumerate(sampler.enumerate(loader), 1):
            seen += indices.tolist()
            resumed.load_state_dict(sampler.state_dict())
            if number == stop:
                break
        resumed.load_state_dict(sampler.state_dict())
        assert seen + list(resumed) == list(ImportanceSampler(pets, seed=5))


def test_a_state_between_epochs(pets: DieselDataset) -> None:
    sampler, other = ImportanceSampler(pets, seed=1), ImportanceSampler(pets)
    train(sampler, 0)
    sampler.set_epoch(1)
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    other.set_epoch(1)
    assert list(other) == list(sampler)


@each_row(
    ("change", "match"),
    [
        ({"share": None}, "no share"),
        ({"share": 7.0}, "bad share"),
        ({"warm_up": "1"}, "no warm-up"),
        ({"agreed": torch.zeros(3)}, "for 60 samples"),
        ({"reported": None}, "for 60 samples"),
        ({"agreed": torch.full((FILES,), -1.0)}, "bad importance"),
        ({"replaced": [[1], [FILES]]}, "bad substitutes"),
        ({"replaced": "x"}, "bad substitutes"),
        ({"nodes": 0}, "bad nodes"),
    ],
)
def test_bad_states_are_refused(pets: DieselDataset, change: dict[str, object], match: str) -> None:
    sampler = ImportanceSampler(pets, share=0.25)
    train(sampler, 0)
    sampler.set_epoch(1)
    before = list(sampler)
    with pytest.raises(UsageError, match=match):
        sampler.load_state_dict({**sampler.state_dict(received=0), **change})
    with pytest.raises(ConflictError, match="another dataset"):
        sampler.load_state_dict({**sampler.state_dict(received=0), "identity": "x"})
    assert list(sampler) == before


@pytest.mark.parametrize("local_worlds", ["", "111", "122"])
def test_ranks_agree_on_the_reports_of_all(url: str, tmp_path: Path, local_worlds: str) -> None:
    """They may be on several nodes, some of which have more ranks than others."""
    ended = run_ranks(url, tmp_path, 3, local_worlds=local_worlds)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    tables = {said.split("|")[0] for _, said, _ in ended}
    assert len(tables) == 1  # all have the same importance
    epochs = [said.strip().split("|")[1:] for _, said, _ in ended]
    for parts in zip(*epochs, strict=True):
        samples = [int(each) for part in parts for each in part.split(",")]
        assert len(samples) == len({*samples}) == 30  # each sample on one rank


def rank_of(pets: DieselDataset, rank: int, world: int) -> ImportanceSampler:
    return ImportanceSampler(pets, share=0.4, seed=4, rank=rank, world=world)


@each_row("variable", ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"])
def test_an_important_sample_stays_on_its_node(
    pets: DieselDataset, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    ranks = [rank_of(pets, rank, 4) for rank in range(4)]
    losses = torch.arange(FILES).float()
    nodes: dict[int, set[int]] = {}
    for epoch in range(6):
        parts = []
        for sampler in ranks:
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
            sampler.update(range(FILES), losses)  # as if the ranks exchanged them
        given = [sample for part in parts for sample in part]
        assert len({*map(len, parts)}) == 1
        if epoch:
            assert len({*given}) == FILES * 2 // 5
            for rank, part in enumerate(parts):
                for sample in part:
                    nodes.setdefault(sample, set()).add(rank // 2)
    high = range(FILES - FILES // 5, FILES)
    assert all(len(nodes[sample]) == 1 for sample in high)
    assert {min(nodes[sample]) for sample in high} == {0, 1}
    assert any(len(found) == 2 for found in nodes.values())  # the others go to any node


@each_row("ranks_of_a_node", ["", "1"])
def test_the_remaining_samples_of_an_epoch_are_dealt_to_another_world(
    pets: DieselDataset, monkeypatch: pytest.MonkeyPatch, ranks_of_a_node: str
) -> None:
    """The ranks are all on one node, or on several nodes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_a_node)
    states, given = [], list[int]()
    for rank in range(3):
        sampler = rank_of(pets, rank, 3)
        sampler.update(range(FILES), torch.arange(FILES).float())
        sampler.set_epoch(1)
        given += [sample for sample, _ in zip(sampler, range(4), strict=False)]
        states.append(sampler.state_dict(4))
    for rank in range(2):
        resumed = rank_of(pets, rank, 2)
        resumed.load_state_dict(states[rank])
        resumed.set_epoch(1)
        given += list(resumed)
    assert len(given) == len({*given}) == FILES * 2 // 5


def test_the_hook_predicts_an_epoch_without_a_trace(pets: DieselDataset) -> None:
    """It predicts only this epoch: the next one depends on the reports of this one."""
    sampler = ImportanceSampler(pets, seed=4)
    train(sampler, 0)
    for epoch, foreseen in ((1, BatchSampler(sampler, 8, drop_last=False)), (2, sampler)):
        sampler.set_epoch(epoch)
        [order] = predict(foreseen, ahead=2)
        given = list(sampler)
        assert order.indices.tolist() == given
        sampler.update(given, losses_of(given))


def test_an_auto_data_loader_resumes_it(pets: DieselDataset) -> None:
    def loader_of() -> "AutoDataLoader[list[torch.Tensor]]":
        return AutoDataLoader(pets, batch_size=6, sampler=ImportanceSampler(pets, seed=8))

    loader, resumed = loader_of(), loader_of()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = []
        for number, (sizes, _) in enumerate(loader):
            batches.append(sizes.tolist())
            if (epoch, number) == (1, 1):
                state = loader.state_dict()
        loader.sampler.update(range(FILES), torch.arange(FILES))
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(1)
    assert [sizes.tolist() for sizes, _ in resumed] == batches[2:]
