"""A training script that knows nothing of DIESEL-FS: `training.py ROOT WORKERS START [NAME...]`.

It iterates loaders with samplers of each kind, twice each, and prints as JSON the files that they
gave and the states of the random generators afterwards. With NAMEs there are only the loaders of
these names.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

BATCH = 16


class Folder(Dataset[tuple[str, int]]):  # type: ignore[misc] # mypy skips torch
    """All files below a folder, as torchvision's `DatasetFolder` lists them."""

    def __init__(self, root: str) -> None:
        found = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
        self.samples = [(path, 0) for path in sorted(found)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, int]:
        path, _ = self.samples[index]
        with open(path, "rb") as file:
            return os.path.basename(path), sum(file.read())


class InPlace(Sampler[int]):  # type: ignore[misc] # mypy skips torch
    """A sampler of the user's own, which changes when it is iterated."""

    def __init__(self, count: int) -> None:
        self.order = list(range(count))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


Loader: TypeAlias = "DataLoader[object]"


def loaders(files: Folder, workers: int, start: str) -> Iterator[tuple[str, Loader]]:
    count = len(files)
    own = torch.Generator().manual_seed(3)
    parts = torch_data.ConcatDataset([Subset(files, range(n, count, 3)) for n in range(2)])

    def loader(data: object = files, batch: int | None = BATCH, **named: object) -> Loader:
        named |= {"num_workers": workers, "multiprocessing_context": start if workers else None}
        return DataLoader(data, batch_size=batch, **named)

    yield "sequential", loader()
    yield "random", loader(shuffle=True)
    yield "random, last dropped", loader(shuffle=True, drop_last=True)
    yield "own generator", loader(shuffle=True, generator=own)
    yield "shared generator", loader(sampler=RandomSampler(files, generator=own))
    drawn = RandomSampler(files, replacement=True, num_samples=100, generator=own)
    yield "replacement", loader(sampler=drawn)
    yield "subset", loader(sampler=torch_data.SubsetRandomSampler(range(0, count, 2)))
    weights = [1.0, 2.0] * (count // 2)
    yield "weighted", loader(sampler=torch_data.WeightedRandomSampler(weights, count))
    yield "distributed", loader(sampler=DistributedSampler(files, 3, 1, seed=4))
    yield "parts", loader(parts, shuffle=True)
    yield "in place", loader(sampler=InPlace(count))
    batches = BatchSampler(RandomSampler(files), 7, drop_last=False)
    yield "batches", loader(batch=1, batch_sampler=batches)
    yield "no batches", loader(batch=None, sampler=RandomSampler(files))
    yield "a list", loader(batch=None, sampler=[5, 3, 1])
    if workers:
        yield "persistent", loader(shuffle=True, persistent_workers=True)


def states() -> Sequence[object]:
    return [random.random(), np.random.rand(), torch.rand(2).tolist()]


def main() -> None:
    root, workers, start, *names = sys.argv[1:]
    seeds: list[Callable[[int], object]] = [random.seed, np.random.seed, torch.manual_seed]
    for seed in seeds:
        seed(5)
    found: dict[str, object] = {}
    for name, loader in loaders(Folder(root), int(workers), start):
        if names and name not in names:
            continue
        given = []
        for epoch in range(2):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            given += [[names, torch.as_tensor(sums).tolist()] for names, sums in loader]
            torch.rand(1)
        found[name] = [given, states()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
