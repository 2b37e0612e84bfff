"""A reader of a task on one of its nodes: it reads orders as lines of JSON, and prints answers so.

The first line has the arguments of `connect`; the answer is the number of files. With `clients` it
opens the dataset so many times: many clients in one process. Then:

    {"do": "touch", "part": K, "of": N}      a file of each chunk of that part
    {"do": "batches", "seed": S, "count": N, "size": M}     random files, so many in one request
    {"do": "steady_batches", "seed": S, "seconds": T, "start_s": B, "size": M}
    {"do": "steady_singles", "seed": S, "seconds": T, "start_s": B}
    {"do": "steady_gather", "seed": S, "seconds": T, "start_s": B, "size": M}
    {"do": "series", "seed": S, "seconds": T, "start_s": B, "size": M, "bucket_s": U}
    {"do": "epoch", "seed": S, "size": M}    all files in random order
    {"do": "chunks"}                         all chunks of the store, one after the other
    {"do": "stats"}                          how much it has read from where
    {"do": "read"}                           each client reads a file of each chunk; how many files
                                             were right, and how many had to come from the store

`steady_gather` gathers as many random files with numpy from one array of all contents, which it
reads at first. The answer of `series` has the files a second of each U seconds (`answering.py`).
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache

import numpy as np
import numpy.typing as npt

from diesel_fs import Dataset, connect
from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.open import open_configured
from diesel_fs.settings import load_settings
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly

from ..answering import DRAWN, DRAWN_SINGLES, answer_orders, calls_per_s, series_of

Indices = npt.NDArray[np.int64]


class Reader:
    """A reader of a dataset; its public methods are the orders."""

    def __init__(self, clients: Sequence[Dataset], name: str) -> None:
        self._clients, self._dataset, self._name = clients, clients[0], name

    def touch(self, part: int, of: int) -> dict[str, float]:
        """Read the first file of each chunk of a part."""
        wanted = np.sort(self._first_files())[part::of]
        start_s = time.perf_counter()
        read = sum(map(len, self._dataset.read_many(wanted)))
        return {"s": time.perf_counter() - start_s, "bytes": read, "chunks": len(wanted)}

    def read(self) -> dict[str, int]:
        """Read a file of each chunk with each client."""
        wanted = self._first_files()
        expected = self._dataset.stat_many(wanted).size.tolist()
        right, from_store = 0, 0
        for client in self._clients:
            sizes = map(len, client.read_many(wanted))
            right += sum(size == known for size, known in zip(sizes, expected, strict=True))
            counts = client.task_stats()["client"]
            assert isinstance(counts, dict)
            from_store += counts["store_reads"]
        files = len(self._clients) * len(wanted)
        return {"right": right, "from_store": from_store, "files": files}

    def batches(self, seed: int, count: int, size: int) -> dict[str, float]:
        """Read so many random batches."""
        wanted = self._batches(seed, count, size)
        read = sum(map(len, self._dataset.read_many(wanted[0])))
        worst_s = 0.0
        start_s = before_s = time.perf_counter()
        for some in wanted:
            read += sum(map(len, self._dataset.read_many(some)))
            now_s = time.perf_counter()
            worst_s, before_s = max(worst_s, now_s - before_s), now_s
        return {"files/s": count * size / (before_s - start_s), "bytes": read, "worst_s": worst_s}

    def steady_batches(
        self, seed: int, seconds: float, start_s: float, size: int
    ) -> dict[str, float]:
        """Read random batches, each with one call."""

        def read(some: Indices) -> None:
            sum(map(len, self._dataset.read_many(some)))

        wanted = self._batches(seed, DRAWN, size)
        read(wanted[0])
        return {"files/s": size * calls_per_s(read, wanted, seconds, start_s)}

    def steady_singles(self, seed: int, seconds: float, start_s: float) -> dict[str, float]:
        """Read random files one by one."""
        files: list[int] = self._dataset.snapshot.files().tolist()
        wanted = random.Random(seed).choices(files, k=DRAWN_SINGLES)
        self._dataset.get(wanted[0])
        return {"files/s": calls_per_s(self._dataset.get, wanted, seconds, start_s)}

    def steady_gather(
        self, seed: int, seconds: float, start_s: float, size: int
    ) -> dict[str, float]:
        """Gather random files from one array of all contents with numpy, a batch with one call."""
        contents, draw = self._contents(), np.random.default_rng(seed)
        wanted = [draw.choice(len(contents), size, replace=False) for _ in range(DRAWN)]
        return {"files/s": size * calls_per_s(contents.__getitem__, wanted, seconds, start_s)}

    def series(
        self, seed: int, seconds: float, start_s: float, size: int, bucket_s: float
    ) -> dict[str, float]:
        """Read random batches all the time; the files a second of each part of the time."""

        def read(some: Indices) -> None:
            sum(map(len, self._dataset.read_many(some)))

        wanted = self._batches(seed, DRAWN, size)
        return series_of(read, wanted, seconds, start_s, size, bucket_s)

    def epoch(self, seed: int, size: int) -> dict[str, float]:
        """Read all files once."""
        order = np.random.default_rng(seed).permutation(self._dataset.snapshot.files())
        start_s = time.perf_counter()
        read = 0
        for first in range(0, len(order), size):
            read += sum(map(len, self._dataset.read_many(order[first : first + size])))
        seconds = time.perf_counter() - start_s
        return {"files/s": len(order) / seconds, "s": seconds, "bytes": read}

    def chunks(self) -> dict[str, float]:
        """Read all chunks of the store."""
        with open_configured(load_settings({})) as repository:
            view = repository.view(self._name)
            names = [chunk_object(view.identity, chunk) for chunk in view.chunk_ids]
            sizes = view.chunk_sizes.tolist()
            room = np.zeros(max(sizes), np.uint8).data
            repository.objects.read_into(names[0], 0, room[:96])
            start_s = time.perf_counter()
            for chunk, size in zip(names, sizes, strict=True):
                repository.objects.read_into(chunk, 0, room[:size])
            return {"s": time.perf_counter() - start_s, "bytes": sum(sizes)}

    def stats(self) -> object:
        return self._dataset.task_stats()["client"]

    def _first_files(self) -> Indices:
        """A file of each chunk."""
        snapshot = self._dataset.snapshot
        files = snapshot.files()
        first: Indices = files[np.unique(snapshot.chunk_of(files), return_index=True)[1]]
        return first

    def _batches(self, seed: int, count: int, size: int) -> Sequence[Indices]:
        draw, files = np.random.default_rng(seed), self._dataset.snapshot.files()
        return [draw.choice(files, size, replace=False) for _ in range(count)]

    @cache  # noqa: B019  # there is one reader, which lives as long as the program
    def _contents(self) -> npt.NDArray[np.uint8]:
        """The contents of all files, which have one size, one a row."""
        files = self._dataset.snapshot.files()
        content = b"".join(self._dataset.read_many(files))
        return np.frombuffer(content, np.uint8).reshape(len(files), -1)


def main() -> None:
    """Connect, and run the orders."""
    open_buckets_directly()  # it never forks
    words = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        count = words.pop("clients", 1)
        clients = [stack.enter_context(connect(**words)) for _ in range(count)]
        print(json.dumps({"files": len(clients[0])}), flush=True)
        answer_orders(Reader(clients, words["dataset"]))


if __name__ == "__main__":
    main()
