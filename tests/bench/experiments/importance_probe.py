"""Trains a small network by importance and otherwise, and tests it: URL SEED JSON [FILE [WAYS]].

JSON is a mapping of numbers (`importance.py`). Each way of choosing the samples of an epoch
has the same weights to begin with. Prints, for each way, the percentage of right answers on other
images, and with how many samples it was trained. WAYS are their names, with | between; without,
all of them. With FILE only the full order is trained, and the losses that each epoch has left go
there. On a processor it has one thread, so that torch gives the same result each time; where there
is a GPU, that is used.
"""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diesel_fs.orders.importance import Values, is_low, substituted
from diesel_fs.torch import DieselDataset, GradientNorm, ImportanceSampler

from ..inputs import Indices
from .accuracy_probe import (
    MOMENTUM,
    RATE,
    WARM_UP,
    WEIGHT_DECAY,
    Images,
    network,
    percent_right,
    tensors,
)
from .small_images import decoded, labels_of, made_long_tail

FULL, UNIFORM, IMPORTANCE = "full order", "uniform subsampling", "importance"
WEIGHTED, GRADIENT = "importance, weighted", "importance, gradient norm"
WEIGHTED_FLOOR = (
    0.2  # else weights have no limit, and a few batches with great ones end the training
)
FROM_LOW, FROM_HIGH = "importance, substitutes of low", "importance, substitutes of high"
WAYS = (FULL, UNIFORM, IMPORTANCE, WEIGHTED, GRADIENT, FROM_LOW, FROM_HIGH)

CACHE = 0.2
"""The share of the samples that a cache keeps, of which a tenth is for those of low importance."""


class Chooser:
    """Which samples an epoch has, one way of choosing them."""

    def __init__(self, way: str, data: DieselDataset, seed: int, numbers: dict[str, float]) -> None:
        self.way, self.seed, share = way, seed, numbers["share"]
        measured = GradientNorm() if way == GRADIENT else None
        self.sampler = ImportanceSampler(
            data,
            share=1.0 if way == FULL else share,
            floor=WEIGHTED_FLOOR if way == WEIGHTED else 0.0,
            warm_up=int(numbers["warm_up"]),
            seed=seed,
            importance=measured,
        )

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


def trained(
    chooser: Chooser, images: Images, seed: int, numbers: dict[str, float], device: str
) -> tuple[nn.Module, int, list[Values]]:
    """A network, the number of samples it was trained with, and the importances after each epoch.

    The learning rate goes up, and then down to nothing over all batches (one cycle).
    """
    pixels, labels = images
    batch, epochs = int(numbers["batch"]), int(numbers["epochs"])
    lengths = []
    for number in range(epochs):
        chooser.sampler.set_epoch(number)
        lengths.append(len(chooser.sampler) // batch)
    model = network(seed, int(numbers["width"])).train().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=sum(lengths), pct_start=WARM_UP
    )
    count, left = 0, list[Values]()
    for number, steps in enumerate(lengths):
        order = chooser.epoch(number)
        for step in range(steps):
            some = order[step * batch : (step + 1) * batch]
            places = torch.from_numpy(some).to(device)
            outputs = model(pixels[places])
            losses = nn.functional.cross_entropy(outputs, labels[places], reduction="none")
            chooser.sampler.update(some, losses, outputs, labels[places])
            if chooser.way == WEIGHTED:
                losses = losses * chooser.sampler.weights(some, device)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            schedule.step()
            count += len(some)
        left.append(chooser.sampler.importance)
    return model, count, left


def loaded(data: DieselDataset) -> Images:
    """All images of a dataset, and their classes."""
    pixels = np.stack([np.asarray(data[index][0], np.uint8) for index in range(len(data))])
    return tensors(pixels, [target for _, target in data.samples])


def main(url: str, seed: str, numbers: str, losses_file: str = "", ways: str = "") -> None:
    """Print what each way has reached."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts: dict[str, float] = json.loads(numbers)
    tested = int(counts["test_images"])
    to_device: Callable[[Images], Images] = lambda images: (  # noqa: E731  # one line
        images[0].to(device), images[1].to(device)
    )  # fmt: skip
    test = to_device(tensors(made_long_tail(tested, int(counts["test_seed"])), labels_of(tested)))
    report: dict[str, float] = {}
    with DieselDataset("images", loader=decoded, extensions=".ppm", url=url) as data:
        images = to_device(loaded(data))
        chosen = tuple(ways.split("|")) if ways else WAYS
        for way in (FULL,) if losses_file else chosen:
            chooser = Chooser(way, data, int(seed), counts)
            model, count, left = trained(chooser, images, int(seed), counts, device)
            report[way] = percent_right(model, test)
            report[f"{way}, samples"] = count
            if losses_file:
                Path(losses_file).write_bytes(np.stack(left).tobytes())
            print(f"  seed {seed}, {way}: {report[way]:.2f} %", file=sys.stderr, flush=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({**report, "processor_s": used.ru_utime + used.ru_stime}))


if __name__ == "__main__":
    main(*sys.argv[1:])
