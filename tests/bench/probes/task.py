"""A reader of a task on one of its nodes: it reads orders as lines of JSON, and prints answers so.

The first line has the arguments of `connect`; the answer is the number of files. Then:

    {"do": "touch", "part": K, "of": N}      a file of each chunk of that part
    {"do": "batches", "seed": S, "count": N, "size": M}     random files, so many in one request
    {"do": "steady_batches", "seed": S, "seconds": T, "start_s": B, "size": M}
    {"do": "steady_singles", "seed": S, "seconds": T, "start_s": B}
    {"do": "steady_gather", "seed": S, "seconds": T, "start_s": B, "size": M}
    {"do": "series", "seed": S, "seconds": T, "start_s": B, "size": M, "bucket_s": U}
    {"do": "epoch", "seed": S, "size": M}    all files in random order
    {"do": "chunks"}                         all chunks of the store, one after the other
    {"do": "stats"}                          how much it has read from where

Those with `start_s` begin at B of `time.monotonic()`, and last T seconds. `steady_gather` gathers
as many random files with numpy from one array of all contents, which it reads at first. The answer
of `series` has the files a second of each U seconds.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import cycle
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from diesel_fs import Dataset, connect
from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.open import open_configured
from diesel_fs.settings import load_settings
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly

DRAWN, DRAWN_SINGLES = 1024, 1 << 17
"""Batches, and single files, that are drawn before the time counts; they are read again and
again."""

Indices = npt.NDArray[np.int64]
_Wanted = TypeVar("_Wanted")


def touch(dataset: Dataset, part: int, of: int) -> dict[str, float]:
    """Read the first file of each chunk of a part."""
    files = dataset.snapshot.files()
    first = np.unique(dataset.snapshot.chunk_of(files), return_index=True)[1]
    wanted = files[np.sort(first)][part::of]
    start_s = time.perf_counter()
    read = sum(map(len, dataset.read_many(wanted)))
    return {"s": time.perf_counter() - start_s, "bytes": read, "chunks": len(wanted)}


def batches(dataset: Dataset, seed: int, count: int, size: int) -> dict[str, float]:
    """Read so many random batches."""
    wanted = _batches(dataset, seed, count, size)
    read = sum(map(len, dataset.read_many(wanted[0])))
    worst_s = 0.0
    start_s = before_s = time.perf_counter()
    for some in wanted:
        read += sum(map(len, dataset.read_many(some)))
        now_s = time.perf_counter()
        worst_s, before_s = max(worst_s, now_s - before_s), now_s
    return {"files/s": count * size / (before_s - start_s), "bytes": read, "worst_s": worst_s}


def steady_batches(
    dataset: Dataset, seed: int, seconds: float, start_s: float, size: int
) -> dict[str, float]:
    """Read random batches, each with one call."""

    def read(some: Indices) -> None:
        sum(map(len, dataset.read_many(some)))

    wanted = _batches(dataset, seed, DRAWN, size)
    read(wanted[0])
    return {"files/s": size * _calls_per_s(read, wanted, seconds, start_s)}


def steady_singles(dataset: Dataset, seed: int, seconds: float, start_s: float) -> dict[str, float]:
    """Read random files one by one."""
    files: list[int] = dataset.snapshot.files().tolist()
    wanted = random.Random(seed).choices(files, k=DRAWN_SINGLES)
    dataset.get(wanted[0])
    return {"files/s": _calls_per_s(dataset.get, wanted, seconds, start_s)}


def steady_gather(
    dataset: Dataset, seed: int, seconds: float, start_s: float, size: int
) -> dict[str, float]:
    """Gather random files from one array of all contents with numpy, a batch with one call."""
    contents, draw = _contents(dataset), np.random.default_rng(seed)
    wanted = [draw.choice(len(contents), size, replace=False) for _ in range(DRAWN)]
    return {"files/s": size * _calls_per_s(contents.__getitem__, wanted, seconds, start_s)}


def series(
    dataset: Dataset, seed: int, seconds: float, start_s: float, size: int, bucket_s: float
) -> dict[str, float]:
    """Read random batches all the time; the files a second of each part of the time."""
    wanted = _batches(dataset, seed, DRAWN, size)
    buckets = [0] * round(seconds / bucket_s)
    start_s = _wait_until(start_s)
    for some in cycle(wanted):
        sum(map(len, dataset.read_many(some)))
        bucket = int((time.monotonic() - start_s) / bucket_s)
        if bucket >= len(buckets):
            break
        buckets[bucket] += size
    return {str(bucket): count / bucket_s for bucket, count in enumerate(buckets)}


def epoch(dataset: Dataset, seed: int, size: int) -> dict[str, float]:
    """Read all files once."""
    order = np.random.default_rng(seed).permutation(dataset.snapshot.files())
    start_s = time.perf_counter()
    read = 0
    for first in range(0, len(order), size):
        read += sum(map(len, dataset.read_many(order[first : first + size])))
    seconds = time.perf_counter() - start_s
    return {"files/s": len(order) / seconds, "s": seconds, "bytes": read}


def chunks(name: str) -> dict[str, float]:
    """Read all chunks of the store."""
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


def _batches(dataset: Dataset, seed: int, count: int, size: int) -> Sequence[Indices]:
    draw, files = np.random.default_rng(seed), dataset.snapshot.files()
    return [draw.choice(files, size, replace=False) for _ in range(count)]


@cache
def _contents(dataset: Dataset) -> npt.NDArray[np.uint8]:
    """The contents of all files, which have one size, one a row."""
    files = dataset.snapshot.files()
    content = b"".join(dataset.read_many(files))
    return np.frombuffer(content, np.uint8).reshape(len(files), -1)


def _calls_per_s(
    read: Callable[[_Wanted], object], wanted: Iterable[_Wanted], seconds: float, start_s: float
) -> float:
    """Call `read` for some seconds, with what is wanted, again and again."""
    calls, start_s = 0, _wait_until(start_s)
    now_s, end_s = start_s, start_s + seconds
    for each in cycle(wanted):
        read(each)
        calls += 1
        now_s = time.monotonic()
        if now_s >= end_s:
            break
    return calls / (now_s - start_s)


def _wait_until(start_s: float) -> float:
    """Wait until this moment of `time.monotonic()`; the moment when that was over."""
    time.sleep(max(0.0, start_s - time.monotonic()))
    return time.monotonic()


def main() -> None:
    """Connect, and run the orders."""
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
                case "steady_batches":
                    answer = steady_batches(dataset, **order)
                case "steady_singles":
                    answer = steady_singles(dataset, **order)
                case "steady_gather":
                    answer = steady_gather(dataset, **order)
                case "series":
                    answer = series(dataset, **order)
                case "epoch":
                    answer = epoch(dataset, **order)
                case "chunks":
                    answer = chunks(words["dataset"])
                case "stats":
                    answer = dataset.task_stats()["client"]
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
