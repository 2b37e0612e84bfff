"""`ImportanceSampler` on real mounts: draws are plans, and the mount keeps important files."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from diesel_fs.client.dataset import connect
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest, mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.plans.control import Control
from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.torch import ImportanceSampler
from tests.mounts.keeping_daemon import PROGRAM
from tests.tiers import fast_first
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

FILES, SIZE = 3000, 8192
STEP = 30
"""Files that are read between two checks of the mount: fewer than it always pushes ahead."""


class Files(Dataset[int]):  # type: ignore[misc]  # mypy skips torch
    def __init__(self, root: Path) -> None:
        self.samples = [(str(path), 0) for path in sorted(root.glob("*/*"))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        file = os.open(self.samples[index][0], os.O_RDONLY)  # `open` would ask the mount, too
        try:
            return int(os.read(file, SIZE)[:6])
        finally:
            os.close(file)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = (tmp_path_factory.mktemp("importance") / "store").as_uri()
    with connect("ds", found, create=True) as written:
        for number in range(FILES):
            written.put(b"%06d" % number + bytes(SIZE - 6), f"{number % 7}/{number:06}")
    return found


@contextmanager
def mounted(url: str, folder: Path, session: str) -> Iterator[Path]:
    folder.mkdir()
    made = MountRequest(
        url, "ds", str(folder), session=session, log_file=f"{folder}.log",
        memory_bytes=FILES * SIZE * 3 // 5, task_options=TaskOptions(evict="importance"),
    )  # fmt: skip
    mount(made, program=PROGRAM)
    try:
        yield folder
    finally:
        if mounted_at(str(folder)):
            umount(folder, force=True)


@pytest.fixture(params=fast_first(["native", "kernel"]))
def at(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Iterator[Path]:
    with mounted(url, tmp_path / "mount", request.param) as folder:
        yield folder


def residency(control: Control) -> Mapping[str, object]:
    found = control.stats()["residency"]
    assert isinstance(found, dict)
    return found


def counted(control: Control, name: str) -> int:
    return int(str(residency(control)[name]))


def read_epoch(data: Files, sampler: ImportanceSampler, epoch: int, control: Control) -> list[int]:
    """Read an epoch, only up to the position that the mount has reached, as if the loop were
    slow."""
    sampler.set_epoch(epoch)
    given = list(sampler)
    name = f"importance:{os.getpid()}:{sampler.rank}"
    for at in range(0, len(given), STEP):
        some = given[at : at + STEP]
        wait_until(lambda: frontier(control, name) >= at + len(some))  # noqa: B023  # called at once
        for index in some:
            assert data[index] == int(data.samples[index][0][-6:])
        if at + len(some) < len(given):
            control.progress(name, at + len(some), epoch)
    return given


def frontier(control: Control, name: str) -> int:
    streams = residency(control)["streams"]
    assert isinstance(streams, list)
    [found] = [each["frontier"] for each in streams if each["name"] == name]
    return int(found)


def test_the_mount_keeps_important_files(at: Path) -> None:
    data = Files(at)
    sampler = ImportanceSampler(data, share=0.5, seed=1)
    chance = np.random.default_rng(0)
    losses = chance.permutation(FILES).astype(np.float32)  # hard and easy lie side by side
    kept, lengths = [], []
    with Control.connect(at) as control:
        for epoch in range(4):
            before = counted(control, "kept_entries")
            pushed = counted(control, "pushed_entries")
            given = read_epoch(data, sampler, epoch, control)
            kept.append(counted(control, "kept_entries") - before)
            lengths.append(len(given))
            pushed = counted(control, "pushed_entries") - pushed
            assert pushed <= 1.05 * (len(given) - kept[-1]), "what is kept is not pushed again"
            sampler.update(given, torch.from_numpy(losses[given]))
        entries = sampler._files.files.entries
        is_kept = control.resident(entries)
    hits = np.array(kept[2:]) / np.array(lengths[2:])
    capacity = 0.45  # of the files; a full order would find at most this part in memory
    assert hits.mean() > capacity
    ranks = losses.argsort().argsort() / FILES
    assert ranks[is_kept].mean() > ranks[~is_kept].mean() + 0.3


def test_no_file_is_kept_twice(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mounts stand for two nodes, with a rank each."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    losses = torch.from_numpy(np.random.default_rng(0).permutation(FILES).astype(np.float32))
    with ExitStack() as stack:
        folders = [tmp_path / "one", tmp_path / "two"]
        jobs = []
        for rank, folder in enumerate(folders):
            data = Files(stack.enter_context(mounted(url, folder, "native")))
            sampler = ImportanceSampler(data, share=0.5, seed=1, rank=rank, world=2)
            jobs.append((data, sampler, stack.enter_context(Control.connect(folder))))
        for epoch in range(5):
            for data, sampler, control in jobs:
                read_epoch(data, sampler, epoch, control)
                sampler.update(range(FILES), losses)  # as if the ranks exchanged theirs
        kept = [control.resident(sampler._files.files.entries) for _, sampler, control in jobs]
    is_high = losses.numpy() >= FILES * 4 // 5
    high = [np.count_nonzero(each & is_high) for each in kept]
    assert min(high) > 0.3 * np.count_nonzero(is_high)
    assert np.count_nonzero(kept[0] & kept[1] & is_high) < 0.02 * sum(high)


def test_two_jobs_measure_their_gain(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another job uses the mount, an epoch begins with the batches that are timed, and has
    the same samples as without."""
    data = Files(at)
    entries = Snapshot((at / ".diesel/snapshot").read_bytes()).files()
    monkeypatch.setenv("SLURM_JOB_ID", "ours")
    sampler = ImportanceSampler(data, share=0.8, seed=2)
    loader: DataLoader[torch.Tensor] = DataLoader(data, batch_size=8, sampler=sampler)
    with Control.connect(at) as control:
        assert control.values(entries, np.ones(len(entries)), job="other", benefit=3) == 1
        for epoch in range(3):
            sampler.set_epoch(epoch)
            given: list[int] = []
            for indices, _ in sampler.enumerate(loader):
                if len(given) == 48:
                    state = sampler.state_dict(48)
                given += indices.tolist()
                sampler.update(indices, torch.rand(len(indices)))
            assert len(given) == len({*given}) == len(sampler)
            if epoch < 1:
                assert sampler.benefit == 1.0
        assert control.values(entries, np.ones(len(entries)), job="other", benefit=3) == 2
    assert sampler.benefit != 1.0
    resumed = ImportanceSampler(data)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert list(resumed) == given[48:]


def test_training_goes_on_without_the_mount(at: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Files(at)
    sampler = ImportanceSampler(data)
    umount(at)
    with caplog.at_level(logging.WARNING):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            given = list(sampler)
            sampler.update(given, torch.rand(len(given)))
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert f"the mount on {at} did not get the importances" in messages[0]


def test_substitutes_come_from_the_memory_of_the_mount(at: Path) -> None:
    data = Files(at)
    sampler = ImportanceSampler(data, share=0.5, substitute=True)
    with Control.connect(at) as control:
        given = read_epoch(data, sampler, 0, control)
        sampler.update(given, torch.rand(len(given)))
        assert sampler.substituted == 0
        given = read_epoch(data, sampler, 1, control)
    plain = ImportanceSampler(data, share=0.5)
    plain.load_state_dict({**sampler.state_dict(len(given)), "position": 0, "replaced": None})
    plain.set_epoch(1)
    drawn = list(plain)
    assert len(given) == len({*given}) == len(drawn)
    assert 0 < sampler.substituted == len({*given} - {*drawn})
    resumed = ImportanceSampler(data, share=0.5, substitute=True)
    resumed.load_state_dict({**sampler.state_dict(len(given)), "position": 7})
    resumed.set_epoch(1)
    assert list(resumed) == given[7:]
