"""Trains a small network once for each order of a dataset, and tests it: URL SEED JSON.

JSON is a list of [name, dataset, group size], with group size 0 for full shuffle, then a mapping of
the other numbers (`accuracy.py`). The orders are those of `Dataset.shuffle`; all images are
read by `read_many` in the order of their entries, and kept in memory. All networks of a seed begin
with the same weights, so that their results are pairs. One thread: torch then gives the same result
each time.
"""

import json
import math
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from diesel_fs import Dataset, connect
from diesel_fs.orders.quality import design_effect

from ..inputs import Indices
from .small_images import CHANNELS, CLASSES, SIDE, Pixels, decoded, labels_of, made_images

RATE = 0.05  # the highest learning rate
MOMENTUM, WEIGHT_DECAY, WARM_UP = 0.9, 5e-4, 0.2
WIDTH = 8  # channels behind the first layer
TESTED = 500  # images at once

Images = tuple[torch.Tensor, torch.Tensor]
"""The pixels as floats, channel before row, and the labels."""


def network(seed: int, width: int = WIDTH) -> nn.Module:
    """A network with the weights of a seed: two convolutions, the first with `width` channels, and
    one linear layer."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(CHANNELS, width, 5, padding=2),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (SIDE // 4) ** 2, CLASSES),
    )
    network: nn.Module = layers.to(memory_format=torch.channels_last)
    return network


def tensors(pixels: Pixels, labels: Sequence[int] | Indices) -> Images:
    """Images as a network takes them."""
    floats = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 128) / 64
    return floats.contiguous(memory_format=torch.channels_last), torch.tensor(labels)


def read_all(dataset: Dataset) -> Images:
    """All images of a dataset, in the order of their entries; the class is the folder's name."""
    files = dataset.snapshot.files()
    pixels = np.stack([decoded(content) for content in dataset.read_many(files)])
    labels = [
        int(path.split(b"/")[0].removeprefix(b"class")) for path in dataset.snapshot.paths(files)
    ]
    return tensors(pixels, labels)


def trained(
    dataset: Dataset, images: Images, group_size: int, seed: int, numbers: dict[str, int]
) -> tuple[nn.Module, Indices]:
    """A network trained with a batch of SGD after the other, in the dataset's order of each epoch,
    and that order in epoch 0, as places among the images.

    The learning rate goes up, and then down to nothing (one cycle).
    """
    pixels, labels = images
    batch = numbers["batch"]
    steps = max(len(labels) // batch, 1)
    model = network(seed).train()
    optimizer = torch.optim.SGD(
        model.parameters(), RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=numbers["epochs"] * steps, pct_start=WARM_UP
    )
    files = dataset.snapshot.files()
    group_size = group_size or dataset.snapshot.chunk_count
    orders = [
        np.searchsorted(files, dataset.shuffle(seed=seed, epoch=epoch, group_size=group_size))
        for epoch in range(numbers["epochs"])
    ]
    for places in map(torch.from_numpy, orders):
        for step in range(steps):
            some = places[step * batch : (step + 1) * batch]
            loss = nn.functional.cross_entropy(model(pixels[some]), labels[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model, orders[0]


def percent_right(model: nn.Module, images: Images) -> float:
    """How many of the images a network knows."""
    model.eval()
    right = 0
    with torch.no_grad():
        for pixels, labels in zip(images[0].split(TESTED), images[1].split(TESTED), strict=True):
            right += int((model(pixels).argmax(dim=1) == labels).sum())
    return 100 * right / len(images[1])


def main(url: str, seed: str, orders: str, numbers: str) -> None:
    """Print the percentage of right answers by order, and the processor time of all."""
    torch.set_num_threads(1)
    counts: dict[str, int] = json.loads(numbers)
    test = tensors(
        made_images(counts["test_images"], counts["test_seed"]), labels_of(counts["test_images"])
    )
    report: dict[str, float] = {}
    with ExitStack() as stack:
        read: dict[str, tuple[Dataset, Images]] = {}
        for name, dataset_name, group_size in json.loads(orders):
            if dataset_name not in read:
                dataset = stack.enter_context(connect(dataset_name, url=url))
                read[dataset_name] = dataset, read_all(dataset)
            dataset, images = read[dataset_name]
            report["chunks"] = dataset.snapshot.chunk_count
            model, first = trained(dataset, images, group_size, int(seed), counts)
            report[name] = percent_right(model, test)
            effect = design_effect(images[1].numpy(), first, counts["batch"])
            report[f"{name}, design effect"] = math.nan if effect is None else effect
            print(f"  seed {seed}, {name}: {report[name]:.2f} %", file=sys.stderr, flush=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({**report, "processor_s": used.ru_utime + used.ru_stime}))


if __name__ == "__main__":
    main(*sys.argv[1:])
