"""Reads all files of a dataset twice through `read_many`: URL DATASET SEED indices|paths.

First pass: every byte summed by the caller, so every chunk is fetched and every checksum verified.
Second pass, in another order: the views only. Connecting is timed apart.
"""

import json
import os
import sys
import time

import numpy as np

from diesel_fs import Dataset, connect

from ..inputs import Indices


def order(dataset: Dataset, generator: np.random.Generator, by: str) -> Indices | list[str]:
    """All files in random order, named by indices or by paths."""
    indices = generator.permutation(dataset.snapshot.files())
    if by == "indices":
        return indices
    return [os.fsdecode(path) for path in dataset.snapshot.paths(indices)]


def main(url: str, name: str, seed: str, by: str) -> None:
    """Print the seconds of each part, the number of files, and the sum of their 64-bit words."""
    generator = np.random.default_rng(int(seed))
    start_s = time.perf_counter()
    with connect(name, url=url) as dataset:
        connected_s = time.perf_counter()
        wanted = order(dataset, generator, by)

        first_s, total, files = time.perf_counter(), 0, 0
        for view in dataset.read_many(wanted):
            total += int(np.frombuffer(view, np.uint64).sum())
            files += 1
        first_end_s = time.perf_counter()

        wanted = order(dataset, generator, by)
        second_s, content_bytes = time.perf_counter(), 0
        for view in dataset.read_many(wanted):
            content_bytes += len(view)
        second_end_s = time.perf_counter()
    report = {
        "connect_s": connected_s - start_s,
        "first_s": first_end_s - first_s,
        "second_s": second_end_s - second_s,
        "files": files,
        "sum": total % 2**64,
        "bytes": content_bytes,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
