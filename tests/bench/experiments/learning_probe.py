"""Trains a small network once for each order of a dataset, or each way of choosing samples, and
prints the percentage of right answers on other images.

    URL SEED orders NUMBERS JSON            a list of [name, dataset, group size]
    URL SEED ways NUMBERS JSON [FILE]       a list of ways; empty: all of them

NUMBERS is a mapping (`accuracy.py`, `importance.py`). Networks of a seed begin with the same
weights, so results are pairs; SGD trains them in one cycle. A processor runs one thread, for torch
to give the same result each time. `orders` are those of `Dataset.shuffle` (group size 0: full
shuffle); all images are kept in memory. `ways` also prints the number of samples trained with, and
uses a GPU if there is one. With FILE, only the full order is trained, and each epoch's losses go
there.
"""

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diesel_fs import Dataset, connect
from diesel_fs.orders.importance import Values, is_low, substituted
from diesel_fs.orders.quality import design_effect
from diesel_fs.torch import DieselDataset, GradientNorm, ImportanceSampler

from ..inputs import Indices
from .small_images import (
    CHANNELS,
    CLASSES,
    SIDE,
    Pixels,
    decoded,
    labels_of,
    made_images,
    made_long_tail,
)

RATE = 0.05  # the highest learning rate
MOMENTUM, WEIGHT_DECAY, WARM_UP = 0.9, 5e-4, 0.2
WIDTH = 8  # channels behind the first layer
TESTED = 500  # images at once

FULL, UNIFORM, IMPORTANCE = "full order", "uniform subsampling", "importance"
WEIGHTED, GRADIENT = "importance, weighted", "importance, gradient norm"
WEIGHTED_FLOOR = 0.2  # otherwise weights have no limit, and a few great ones end the training
FROM_LOW, FROM_HIGH = "importance, substitutes of low", "importance, substitutes of high"
WAYS = (FULL, UNIFORM, IMPORTANCE, WEIGHTED, GRADIENT, FROM_LOW, FROM_HIGH)

CACHE = 0.2
"""The share of the samples that a cache keeps, of which a tenth is for those of low importance."""

Images = tuple[torch.Tensor, torch.Tensor]
"""The pixels as floats, channel before row, and the labels."""


def network(seed: int, width: int = WIDTH) -> nn.Module:
    """A network with the weights of a seed: two convolutions, the first with `width` channels, and
    one linear layer."""
    torch.manual_seed(seed)
    first, second = (
        [
            nn.Conv2d(*channels, size, padding=size // 2),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(channels[1]),
        ]
        for channels, size in (((CHANNELS, width), 5), ((width, 2 * width), 3))
    )
    last = [nn.Flatten(), nn.Linear(2 * width * (SIDE // 4) ** 2, CLASSES)]
    layers = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *last)
    network: nn.Module = layers.to(memory_format=torch.channels_last)
    return network


def tensors(pixels: Pixels, labels: Sequence[int] | Indices) -> Images:
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


def fit(
    model: nn.Module,
    batches: Iterator[torch.Tensor],
    steps: int,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    optimizer = torch.optim.SGD(
        model.parameters(), RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps, pct_start=WARM_UP
    )
    for some in batches:
        loss = loss_of(some)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def percent_right(model: nn.Module, images: Images) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for pixels, labels in zip(images[0].split(TESTED), images[1].split(TESTED), strict=True):
            right += int((model(pixels).argmax(dim=1) == labels).sum())
    return 100 * right / len(images[1])


def trained_in_order(
    dataset: Dataset, images: Images, group_size: int, seed: int, numbers: dict[str, int]
) -> tuple[nn.Module, Indices]:
    """A network trained in the dataset's order of each epoch, and that order in epoch 0, as places
    among the images."""
    pixels, labels = images
    batch, epochs = numbers["batch"], numbers["epochs"]
    steps = max(len(labels) // batch, 1)
    model = network(seed).train()
    files = dataset.snapshot.files()
    shuffled = partial(
        dataset.shuffle, seed=seed, group_size=group_size or dataset.snapshot.chunk_count
    )
    orders = [np.searchsorted(files, shuffled(epoch=epoch)) for epoch in range(epochs)]
    batches = (
        places[step * batch : (step + 1) * batch]
        for places in map(torch.from_numpy, orders)
        for step in range(steps)
    )
    cross_entropy = nn.functional.cross_entropy
    fit(
        model,
        batches,
        epochs * steps,
        lambda some: cross_entropy(model(pixels[some]), labels[some]),
    )
    return model, orders[0]


def in_orders(
    url: str, seed: int, numbers: dict[str, int], orders: list[tuple[str, str, int]]
) -> dict[str, float]:
    """The percentage of right answers by order, and a measure of the evenness of the batches."""
    tested = numbers["test_images"]
    test = tensors(made_images(tested, numbers["test_seed"]), labels_of(tested))
    report: dict[str, float] = {}
    with ExitStack() as stack:
        read: dict[str, tuple[Dataset, Images]] = {}
        for name, dataset_name, group_size in orders:
            if dataset_name not in read:
                dataset = stack.enter_context(connect(dataset_name, url=url))
                read[dataset_name] = dataset, read_all(dataset)
            dataset, images = read[dataset_name]
            report["chunks"] = dataset.snapshot.chunk_count
            model, first = trained_in_order(dataset, images, group_size, seed, numbers)
            report[name] = percent_right(model, test)
            effect = design_effect(images[1].numpy(), first, numbers["batch"])
            report[f"{name}, design effect"] = math.nan if effect is None else effect
            progress(seed, name, report[name])
    return report


class Chooser:
    """The samples of an epoch, chosen in one way."""

    def __init__(self, way: str, data: DieselDataset, seed: int, numbers: dict[str, float]) -> None:
        self.way, self.seed, share = way, seed, numbers["share"]
        self.sampler = ImportanceSampler(
            data, share=1.0 if way == FULL else share, seed=seed, warm_up=int(numbers["warm_up"]),
            floor=WEIGHTED_FLOOR if way == WEIGHTED else 0.0,
            importance=GradientNorm() if way == GRADIENT else None,
        )  # fmt: skip

    def epoch(self, number: int) -> Indices:
        """The samples of an epoch, in the order of reading."""
        self.sampler.set_epoch(number)
        given = np.array(list(self.sampler))
        if number < self.sampler.warm_up or self.way in (FULL, IMPORTANCE, WEIGHTED, GRADIENT):
            return given
        draw = np.random.default_rng((self.seed, number))
        count = len(self.sampler.importance)
        if self.way == UNIFORM:
            return draw.permutation(count)[: len(given)]
        # The cache has the samples of the highest importance. iCache loads packages of others all
        # the time, so any sample of low importance may be there when one is missed.
        values = np.nan_to_num(self.sampler.importance, nan=np.inf)
        chances = self.sampler.rule.probabilities(values, self.seed, number)
        low = is_low(chances)
        is_cached = np.zeros(count, np.bool_)
        kept = int(0.9 * CACHE * count)
        is_cached[np.argsort(-values, kind="stable")[:kept]] = True
        if self.way == FROM_HIGH:
            places = np.flatnonzero(low[given] & ~is_cached[given])
            given[places] = draw.choice(np.flatnonzero(is_cached), len(places))
            return given
        missed = low & ~is_cached
        in_packages = np.ones(count, np.bool_)
        in_packages[given] = False  # others than those drawn
        one_chunk = np.zeros(count, np.int64)
        places, others = substituted(
            given, low, ~missed | in_packages, low & in_packages, one_chunk, self.seed, number
        )
        given[places] = others
        return given


def trained_by(
    chooser: Chooser, images: Images, seed: int, numbers: dict[str, float], device: str
) -> tuple[nn.Module, int, list[Values]]:
    """A network, the number of samples it was trained with, and the importances after each
    epoch."""
    pixels, labels = images
    batch, lengths = int(numbers["batch"]), []
    for number in range(int(numbers["epochs"])):
        chooser.sampler.set_epoch(number)
        lengths.append(len(chooser.sampler) // batch)
    model = network(seed, int(numbers["width"])).train().to(device)
    count, left = 0, list[Values]()

    def batches() -> Iterator[torch.Tensor]:
        for number, steps in enumerate(lengths):
            order = torch.from_numpy(chooser.epoch(number))
            for step in range(steps):
                yield order[step * batch : (step + 1) * batch]
            left.append(chooser.sampler.importance)

    def loss_of(some: torch.Tensor) -> torch.Tensor:
        nonlocal count
        places, indices = some.to(device), some.numpy()
        outputs = model(pixels[places])
        losses = nn.functional.cross_entropy(outputs, labels[places], reduction="none")
        chooser.sampler.update(indices, losses, outputs, labels[places])
        if chooser.way == WEIGHTED:
            losses = losses * chooser.sampler.weights(indices, device)
        count += len(indices)
        mean: torch.Tensor = losses.mean()
        return mean

    fit(model, batches(), sum(lengths), loss_of)
    return model, count, left


def in_ways(
    url: str, seed: int, numbers: dict[str, float], ways: Sequence[str], losses_file: str = ""
) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tested = int(numbers["test_images"])
    test = tensors(made_long_tail(tested, int(numbers["test_seed"])), labels_of(tested))
    test = test[0].to(device), test[1].to(device)
    report: dict[str, float] = {}
    with DieselDataset("images", loader=decoded, extensions=".ppm", url=url) as data:
        pixels = np.stack([np.asarray(data[index][0], np.uint8) for index in range(len(data))])
        images = tensors(pixels, [target for _, target in data.samples])
        images = images[0].to(device), images[1].to(device)
        for way in (FULL,) if losses_file else ways or WAYS:
            chooser = Chooser(way, data, seed, numbers)
            model, count, left = trained_by(chooser, images, seed, numbers, device)
            report |= {way: percent_right(model, test), f"{way}, samples": count}
            if losses_file:
                Path(losses_file).write_bytes(np.stack(left).tobytes())
            progress(seed, way, report[way])
    return report


def progress(seed: int, what: str, percent: float) -> None:
    print(f"  seed {seed}, {what}: {percent:.2f} %", file=sys.stderr, flush=True)


def main(url: str, seed: str, what: str, numbers: str, trained: str, *files: str) -> None:
    torch.set_num_threads(1)
    measure = in_orders if what == "orders" else in_ways
    report = measure(url, int(seed), json.loads(numbers), json.loads(trained), *files)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({**report, "processor_s": used.ru_utime + used.ru_stime}))


if __name__ == "__main__":
    main(*sys.argv[1:])
