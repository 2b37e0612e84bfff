"""Reads all files of a dataset twice in one process: URL DATASET SEED BY FIRST.

BY is the way of naming files: `indices` or `paths` for `read_many`, or `dataset` for batches with
`DieselDataset`, as a `DataLoader` reads them, with a loader that returns the bytes. Each pass
has its own random order. The first one sums every byte (FIRST is `sum`), so that every chunk is
fetched and every checksum verified, or it only counts them (`count`); then a further pass, which is
not timed, sums the contents. The second pass counts. Connecting is not in the figures.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module

import numpy as np

from diesel_fs import connect

from ..inputs import Indices

BATCH = 64

Content = bytes | memoryview
Reader = Callable[[], Callable[[], Iterable[Content]]]
"""Draws an order, and returns a function that reads all files in it."""


def by_many(
    url: str, name: str, generator: np.random.Generator, by: str
) -> tuple[AbstractContextManager[object], Reader]:
    dataset = connect(name, url=url)

    def drawn() -> Callable[[], Iterable[Content]]:
        indices: Indices = generator.permutation(dataset.snapshot.files())
        if by == "indices":
            return lambda: dataset.read_many(indices)
        paths = [os.fsdecode(path) for path in dataset.snapshot.paths(indices)]
        return lambda: dataset.read_many(paths)

    return dataset, drawn


def by_dataset(
    url: str, name: str, generator: np.random.Generator
) -> tuple[AbstractContextManager[object], Reader]:
    """Readers by `DieselDataset`, a batch a call, as a `DataLoader` reads."""
    dataset = import_module("diesel_fs.torch").DieselDataset(
        name, loader=bytes, extensions=".bin", url=url
    )

    def drawn() -> Callable[[], Iterable[Content]]:
        order = generator.permutation(len(dataset)).tolist()

        def read() -> Iterator[bytes]:
            for at in range(0, len(order), BATCH):
                for content, _ in dataset.__getitems__(order[at : at + BATCH]):
                    yield content

        return read

    return dataset, drawn


def total(contents: Iterable[Content]) -> tuple[int, int]:
    files = words = 0
    for content in contents:
        words += int(np.frombuffer(content, np.uint64).sum())
        files += 1
    return files, words % 2**64


def main(url: str, name: str, seed: str, by: str, first: str) -> None:
    """Print the seconds of each pass, the number of files and bytes, and the sum of their words."""
    generator = np.random.default_rng(int(seed))
    opened, draw = (
        by_dataset(url, name, generator) if by == "dataset" else by_many(url, name, generator, by)
    )
    seconds, found, read_bytes = [], (0, 0), 0
    with opened:
        for number in range(2):
            read = draw()
            start_s = time.perf_counter()
            if first == "sum" and not number:
                found = total(read())
            else:
                read_bytes = 0
                for content in read():
                    read_bytes += len(content)
            seconds.append(time.perf_counter() - start_s)
        if first == "count":
            found = total(draw()())
    files, words = found
    print(json.dumps({"seconds": seconds, "files": files, "bytes": read_bytes, "sum": words}))


if __name__ == "__main__":
    main(*sys.argv[1:])
