"""A training script with datasets that do not list their files.

`learned.py ROOT WORKERS START [NAME...]` iterates a loader of each dataset, or only of the named
ones, in four epochs with a pause between them, and prints their samples as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Iterator

import soundfile  # type: ignore[import-untyped] # it has no types
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

EPOCHS = 4


class Pairs(Dataset[tuple[int, int]]):  # type: ignore[misc] # mypy skips torch
    """Each sample is two files; it makes their names itself."""

    def __init__(self, root: str, count: int) -> None:
        self.root = root
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        name = f"{self.root}/c{index % 5}/{index:04}"
        other = f"{self.root}/c{(index + 1) % 5}/{index + 1:04}"
        with open(name, "rb") as image, open(other) as label:
            return sum(map(len, image)), int(label.seekable())


class Native(Pairs):
    """Each sample is one file, which a library written in C reads."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        sound, _ = soundfile.read(
            f"{self.root}/c{index % 5}/{index:04}",
            format="RAW", samplerate=8000, channels=1, subtype="PCM_U8",
        )  # fmt: skip
        return int(sound.shape[0]), index


class Batches(Pairs):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [super(Batches, self).__getitem__(index) for index in indices]


class Memory(Pairs):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


def datasets(root: str) -> Iterator[tuple[str, Dataset[tuple[int, int]]]]:
    pairs = Pairs(root, 100)
    yield "pairs", pairs
    yield "native", Native(root, 100)
    yield "batches", Batches(root, 100)
    yield "subset", Subset(Pairs(root, 100), range(0, 100, 2))
    yield "parts", ConcatDataset([Native(root, 20), Subset(Pairs(root, 100), range(50, 70))])
    yield "memory", Memory(root, 100)


def main() -> None:
    root, workers, start, *names = sys.argv[1:]
    os.chdir(root)
    found: dict[str, list[object]] = {}
    pause_s = 0.2 if "DIESEL_JOIN" in os.environ else 0.0  # `dlcmd run` learns meanwhile
    for name, dataset in datasets("."):
        if names and name not in names:
            continue
        loader = DataLoader(
            dataset, batch_size=10, shuffle=True, num_workers=int(workers),
            multiprocessing_context=start if int(workers) else None,
            persistent_workers=name == "parts" and int(workers) > 0,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        found[name] = given = []
        for _ in range(EPOCHS):
            given += [[each.tolist() for each in batch] for batch in loader]
            time.sleep(pause_s)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
