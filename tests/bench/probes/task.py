"""A reader of a task on one of its nodes: it reads commands as lines of JSON, and prints answers
so.

The first line has the arguments of `connect`; the answer is the number of files. Then:

    {"do": "touch", "part": K, "of": N}                   a file of each chunk of that part {"do":
    "batches", "seed": S, "count": N, "size": M}   random files, so many in one request {"do":
    "singles", "seed": S, "count": N} {"do": "epoch", "seed": S, "size": M}                 all
    files in random order {"do": "chunks"}                                      all chunks of the
    store, one after the other {"do": "stats"}                                       how much it has
    read from where
"""

import json
import random
import sys
import time

import numpy as np

from diesel_fs import Dataset, connect
from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.open import open_configured
from diesel_fs.settings import load_settings
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly


def touch(dataset: Dataset, part: int, of: int) -> dict[str, float]:
    files = dataset.snapshot.files()
    first = np.unique(dataset.snapshot.chunk_of(files), return_index=True)[1]
    wanted = files[np.sort(first)][part::of]
    start_s = time.perf_counter()
    read = sum(map(len, dataset.read_many(wanted)))
    return {"s": time.perf_counter() - start_s, "bytes": read, "chunks": len(wanted)}


def batches(dataset: Dataset, seed: int, count: int, size: int) -> dict[str, float]:
    draw, files = np.random.default_rng(seed), dataset.snapshot.files()
    wanted = [draw.choice(files, size, replace=False) for _ in range(count)]
    read = sum(map(len, dataset.read_many(wanted[0])))
    worst_s = 0.0
    start_s = before_s = time.perf_counter()
    for some in wanted:
        read += sum(map(len, dataset.read_many(some)))
        now_s = time.perf_counter()
        worst_s, before_s = max(worst_s, now_s - before_s), now_s
    return {"files/s": count * size / (before_s - start_s), "bytes": read, "worst_s": worst_s}


def singles(dataset: Dataset, seed: int, count: int) -> dict[str, float]:
    draw, files = random.Random(seed), dataset.snapshot.files().tolist()
    wanted = draw.choices(files, k=count)
    dataset.get(wanted[0])
    start_s = time.perf_counter()
    for index in wanted:
        dataset.get(index)
    return {"files/s": count / (time.perf_counter() - start_s)}


def epoch(dataset: Dataset, seed: int, size: int) -> dict[str, float]:
    order = np.random.default_rng(seed).permutation(dataset.snapshot.files())
    start_s = time.perf_counter()
    read = 0
    for first in range(0, len(order), size):
        read += sum(map(len, dataset.read_many(order[first : first + size])))
    seconds = time.perf_counter() - start_s
    return {"files/s": len(order) / seconds, "s": seconds, "bytes": read}


def chunks(name: str) -> dict[str, float]:
    with open_configured(load_settings({})) as repository:
        view = repository.view(name)
        names = [chunk_object(view.identity, chunk) for chunk in view.chunk_ids]
        sizes = view.chunk_sizes.tolist()
        room = np.zeros(max(sizes), np.uint8).data
        repository.objects.read_into(names[0], 0, room[:96])
        start_s = time.perf_counter()
        for chunk, size in zip(names, sizes, strict=True):
            repository.objects.read_into(chunk, 0, room[:size])
        return {"s": time.perf_counter() - start_s, "bytes": sum(sizes)}


def main() -> None:
    """Connect, and run the commands."""
    open_buckets_directly()  # it never forks
    words = json.loads(sys.stdin.readline())
    with connect(**words) as dataset:
        print(json.dumps({"files": len(dataset)}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            match order.pop("do"):
                case "touch":
                    answer: object = touch(dataset, **order)
                case "batches":
                    answer = batches(dataset, **order)
                case "singles":
                    answer = singles(dataset, **order)
                case "epoch":
                    answer = epoch(dataset, **order)
                case "chunks":
                    answer = chunks(words["dataset"])
                case "stats":
                    answer = dataset.task_stats()["client"]
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
