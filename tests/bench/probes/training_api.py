"""Reads all files of a dataset as training does, in one process: URL DATASET SEED many|dataset.

`many` reads them with `read_many`, `dataset` in batches with `DieselDataset`, whose loader returns
the bytes. Each of two passes has its own random order; a further one, which is not timed, sums the
contents.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module

import numpy as np

from diesel_fs import connect

BATCH = 64
PASSES = 2

Reader = Callable[[list[int]], Iterable[bytes | memoryview]]


def measure(read: Reader, files: int, generator: np.random.Generator) -> dict[str, object]:
    """The seconds of each pass, and what was read."""
    seconds = []
    for _ in range(PASSES):
        order = generator.permutation(files).tolist()
        start_s, read_bytes = time.perf_counter(), 0
        for content in read(order):
            read_bytes += len(content)
        seconds.append(time.perf_counter() - start_s)
    contents = read(list(range(files)))
    total = sum(int(np.frombuffer(content, np.uint64).sum()) for content in contents)
    return {"seconds": seconds, "files": files, "bytes": read_bytes, "sum": total % 2**64}


def by_many(url: str, name: str) -> tuple[AbstractContextManager[object], Reader, int]:
    """Readers by `read_many`."""
    dataset = connect(name, url=url)
    entries = np.asarray(dataset.snapshot.files())
    return dataset, lambda order: dataset.read_many(entries[order]), len(entries)


def by_dataset(url: str, name: str) -> tuple[AbstractContextManager[object], Reader, int]:
    """Readers by `DieselDataset`, a batch a call, as a `DataLoader` reads."""
    dataset = import_module("diesel_fs.torch").DieselDataset(
        name, loader=bytes, extensions=".bin", url=url
    )

    def read(order: list[int]) -> Iterator[bytes]:
        for at in range(0, len(order), BATCH):
            for content, _ in dataset.__getitems__(order[at : at + BATCH]):
                yield content

    return dataset, read, len(dataset)


def main(url: str, name: str, seed: str, by: str) -> None:
    """Print the passes."""
    opened, read, files = (by_many if by == "many" else by_dataset)(url, name)
    with opened:
        print(json.dumps(measure(read, files, np.random.default_rng(int(seed)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
