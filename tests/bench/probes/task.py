"""A reader of a task on one of its nodes: it reads orders as lines of JSON, and prints answers so.

The first line has the arguments of `connect`; the answer is the number of files. With `clients` it
opens the dataset that often: many clients in one process. Orders (and those of `answering.py`):

    {"do": "touch", "part": K, "of": N}      a file of each chunk of that part
    {"do": "batches", "seed": S, "count": N, "size": M}     random files, M in one request
    {"do": "steady_gather", ...}             as `steady_batches`, with numpy from one array of all
                                             contents, which it reads at first
    {"do": "series", "seed": S, "seconds": T, "start_s": B, "size": M, "bucket_s": U}
                                             random batches: the files a second of each U seconds
    {"do": "epoch", "seed": S, "size": M}    all files in random order
    {"do": "chunks"}                         all chunks of the store, one after the other
    {"do": "stats"}                          the numbers of its reads by source
    {"do": "read"}                           each client reads a file of each chunk; the numbers of
                                             right files, and of files that came from the store
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache

import numpy as np
import numpy.typing as npt

from diesel_fs import Dataset, connect
from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.open import open_configured
from diesel_fs.settings import load_settings
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly

from ..answering import DRAWN, answer_orders, drawn_singles, series_of, steady
from ..inputs import Indices


class Reader:
    """A reader of a dataset; its public methods are the orders."""

    def __init__(self, clients: Sequence[Dataset], name: str) -> None:
        self._clients, self._dataset, self._name = clients, clients[0], name
        self._files = self._dataset.snapshot.files()

    def touch(self, part: int, of: int) -> dict[str, float]:
        return self._timed([np.sort(self._first_files())[part::of]])

    def read(self) -> dict[str, int]:
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
        wanted = self._batches(seed, count, size)
        self._read(wanted[0])
        return self._timed(wanted)

    def epoch(self, seed: int, size: int) -> dict[str, float]:
        order = np.random.default_rng(seed).permutation(self._files)
        return self._timed(np.split(order, range(size, len(order), size)))

    def steady_batches(
        self, seed: int, seconds: float, start_s: float, size: int
    ) -> dict[str, float]:
        return steady(self._read, self._batches(seed, DRAWN, size), seconds, start_s, size)

    def steady_singles(self, seed: int, seconds: float, start_s: float) -> dict[str, float]:
        files: list[int] = self._files.tolist()
        return steady(self._dataset.get, drawn_singles(files, seed), seconds, start_s)

    def steady_gather(
        self, seed: int, seconds: float, start_s: float, size: int
    ) -> dict[str, float]:
        contents, draw = self._contents(), np.random.default_rng(seed)
        wanted = [draw.choice(len(contents), size, replace=False) for _ in range(DRAWN)]
        return steady(contents.__getitem__, wanted, seconds, start_s, size)

    def series(
        self, seed: int, seconds: float, start_s: float, size: int, bucket_s: float
    ) -> dict[str, float]:
        wanted = self._batches(seed, DRAWN, size)
        return series_of(self._read, wanted, seconds, start_s, size, bucket_s)

    def chunks(self) -> dict[str, float]:
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

    def _read(self, some: Indices) -> int:
        """Read a batch with one call; its bytes."""
        return sum(map(len, self._dataset.read_many(some)))

    def _timed(self, batches: Iterable[Indices]) -> dict[str, float]:
        """Read batches, each with one call."""
        files, read, worst_s = 0, 0, 0.0
        start_s = before_s = time.perf_counter()
        for some in batches:
            read += self._read(some)
            files += len(some)
            now_s = time.perf_counter()
            worst_s, before_s = max(worst_s, now_s - before_s), now_s
        seconds = before_s - start_s
        return {"files/s": files / seconds, "s": seconds, "bytes": read, "worst_s": worst_s}

    def _first_files(self) -> Indices:
        """A file of each chunk."""
        chunks = self._dataset.snapshot.chunk_of(self._files)
        first: Indices = self._files[np.unique(chunks, return_index=True)[1]]
        return first

    def _batches(self, seed: int, count: int, size: int) -> Sequence[Indices]:
        draw = np.random.default_rng(seed)
        return [draw.choice(self._files, size, replace=False) for _ in range(count)]

    @cache  # noqa: B019  # there is one reader, which lives as long as the program
    def _contents(self) -> npt.NDArray[np.uint8]:
        """The contents of all files, which have one size, one a row."""
        content = b"".join(self._dataset.read_many(self._files))
        return np.frombuffer(content, np.uint8).reshape(len(self._files), -1)


def main() -> None:
    open_buckets_directly()  # it never forks
    words = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        count = words.pop("clients", 1)
        clients = [stack.enter_context(connect(**words)) for _ in range(count)]
        print(json.dumps({"files": len(clients[0])}), flush=True)
        answer_orders(Reader(clients, words["dataset"]))


if __name__ == "__main__":
    main()
