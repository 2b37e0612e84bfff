"""Training scripts of other people's libraries, unmodified: under `dlcmd run` they get the same
samples in the same order, and the mount has loaded the files before they are read."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Dlcmd

from .conftest import FILES, PYTHON, Client, Training

pytestmark = pytest.mark.fuse

READS_MAX = FILES // 50
"""2 % of the files: the most READ requests that may reach the mount in an epoch."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes")
RANK = ("--workers", "1")  # of each of two ranks

CLIENTS = {
    "imagenet": ("-m", "scripts.imagenet"),
    "imagenet, no workers": ("-m", "scripts.imagenet", "--workers", "0"),
    "imagenet, DDP": (*TORCHRUN, "-m", "scripts.imagenet", *RANK),
    "timm": ("-m", "scripts.timm_loader"),
    "timm, DDP": (*TORCHRUN, "-m", "scripts.timm_loader", *RANK, "--aug-repeats", "3"),
    "datasets": ("-m", "scripts.hugging_face"),
    "datasets, split": ("-m", "scripts.hugging_face", "--split"),
    "datasets, not decoded": ("-m", "scripts.hugging_face", "--not-decoded"),
    "lightning": ("-m", "scripts.lightning_trainer"),
    "lightning, DDP": ("-m", "scripts.lightning_trainer", *RANK, "--devices", "2"),
    "accelerate": (*LAUNCH, "1", "-m", "scripts.accelerated"),
    "accelerate, DDP": (*LAUNCH, "2", "-m", "scripts.accelerated", *RANK),
    "accelerate, seedable": (
        *LAUNCH, "2", "-m", "scripts.accelerated", *RANK, "--skip", "3",
        "--loaders", json.dumps({"use_seedable_sampler": True, "split_batches": True}),
    ),
    "torchdata": ("-m", "scripts.stateful"),
    "torchdata, no workers": ("-m", "scripts.stateful", "--workers", "0"),
    "torchdata, persistent": ("-m", "scripts.stateful", "--persistent"),
}  # fmt: skip
"""Their paths are known from the first epoch on."""

LATER_CLIENTS = {
    "timm, multi-epochs": (
        "-m", "scripts.timm_loader", "--use-multi-epochs-loader", "--no-prefetcher",
    ),
    "accelerate, dispatched": (
        *LAUNCH, "2", "-m", "scripts.accelerated", *RANK,
        "--loaders", json.dumps({"dispatch_batches": True}),
    ),
    "accelerate, stateful": (
        *LAUNCH, "1", "-m", "scripts.accelerated",
        "--loaders", json.dumps({"use_stateful_dataloader": True}),
    ),
    "torchdata, its state first": ("-m", "scripts.stateful", "--state-first"),
    "cv2": ("-m", "scripts.native_readers", "--reader", "cv2"),
}  # fmt: skip
"""Their first epoch is announced in part, or not at all."""


def trained(client: Client, command: tuple[str, ...]) -> tuple[Training, Training]:
    """Train without and under `dlcmd run`; both must give the same samples."""
    alone = client.train(PYTHON, *command, client.mount, joined=False)
    joined = client.train(PYTHON, *command, client.mount, joined=True)
    print(f"READs of each epoch: {alone.reads} without, {joined.reads} with a plan", joined.report)
    assert [each.name for each in joined.epochs] == [each.name for each in alone.epochs]
    for expected, given in zip(alone.epochs, joined.epochs, strict=True):
        assert given.samples == expected.samples, expected.name
        assert all(expected.samples.values())
    first, second = (alone.samples[name] for name in ("train 0", "train 1"))
    assert first != second
    return alone, joined


def reads_after_the_first_epoch(training: Training) -> int:
    """The most READs of an epoch. Lightning's validation ends before its training epoch does."""
    first = (" 0", "val 1") if "predict 0" in training.reads else (" 0",)
    return max(reads for name, reads in training.reads.items() if not name.endswith(first))


@pytest.mark.parametrize("name", CLIENTS)
def test_the_samples_are_the_same_and_nearly_all_are_pushed(client: Client, name: str) -> None:
    """READs serve the files that the first epoch reads before its order has reached the mount, so
    that epoch is compared with one that has no plan."""
    alone, joined = trained(client, CLIENTS[name])
    assert sum(joined.reads.values()) < sum(alone.reads.values())
    assert reads_after_the_first_epoch(joined) <= READS_MAX
    assert "no plan" not in joined.report
    announced = re.search(r"announced (\d+) of (\d+) epochs", joined.report)
    assert announced is not None, joined.report
    assert announced[1] == announced[2]


@pytest.mark.parametrize("name", LATER_CLIENTS)
def test_the_samples_are_the_same_and_pushed_from_epoch_2(client: Client, name: str) -> None:
    _, joined = trained(client, LATER_CLIENTS[name])
    assert reads_after_the_first_epoch(joined) <= READS_MAX


def test_files_that_h5py_reads_are_learned(dlcmd: Dlcmd, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    subprocess.run([PYTHON, "-c", TABLES, folder], check=True)
    client = Client(dlcmd, folder, tmp_path)
    _, joined = trained(client, ("-m", "scripts.native_readers", "--reader", "h5py"))
    assert reads_after_the_first_epoch(joined) <= READS_MAX
    assert f"learned which files Named reads: those of {TABLE_FILES}" in joined.report


TABLE_FILES = 500
TABLES = f"""
import os, sys
import h5py, numpy
os.makedirs(sys.argv[1] + "/train")
for number in range({TABLE_FILES}):
    with h5py.File(f"{{sys.argv[1]}}/train/{{number:03}}.h5", "w") as file:
        file["data"] = numpy.random.default_rng(number).integers(0, 256, 6000, numpy.uint8)
"""


def test_a_sampler_that_lightning_wraps_gives_the_same_samples(client: Client) -> None:
    """Its order is announced only as far as it has been drawn."""
    trained(client, ("-m", "scripts.lightning_trainer", *RANK, "--devices", "2", "--weighted"))
