"""Ranks of a training job in lockstep, as `lobster_ranks` runs them: each a process with a loader.

    python lobster_program.py OPTIONS        (JSON: the fields of `Options`)

The loader is one of these:

- `plan`: PyTorch's, of files in the rank's mount; the rank announces their order, as `dlcmd run`
  does;
- `store`: PyTorch's, of files that lie in the store one by one;
- `nopfs`: a policy like that of NoPFS (Dryden et al., SC 2021) for the same files: threads of
  each rank fetch files in the order of access into a staging buffer. The rest of the rank's memory
  holds the files that this rank reads most often in the whole training. A file that another rank
  holds is read from there, at no cost (the caches are a folder in memory that all ranks see).

How long each rank waited in each iteration of each epoch is printed as JSON, and for NoPFS the
number of files that were in the staging buffer when the loader wanted them. Between two epochs the
program prints a line, and waits for one.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from urllib.parse import urlsplit

from torch.utils.data import DataLoader

from diesel_fs.errors import UsageError
from diesel_fs.mounts.plans.control import Control, drawn

START_S = 300.0


@dataclass(frozen=True)
class Options:
    """`orders` has a file for each epoch and rank: JSON, a list of paths. `mounts` has the rank's
    mount point, `store` the URL below which files lie one by one, `cache` the folder of NoPFS, and
    `sizes` a file with the size of each path. NoPFS gets `rank_bytes` and `staging_bytes`."""

    loader: str
    orders: list[list[str]]
    batch: int
    compute_s: float
    workers: int
    seed: int
    mounts: list[str]
    store: str
    cache: str
    sizes: str
    rank_bytes: int
    staging_bytes: int


class _Files:
    """A dataset of paths. Its items are the sizes of their contents."""

    def __init__(self, paths: Sequence[str], options: Options, rank: int) -> None:
        self._paths, self._options, self._rank = paths, options, rank
        self._store: _Store | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: int) -> int:
        if self._options.loader == "plan":
            with open(f"{self._options.mounts[self._rank]}/{self._paths[at]}", "rb") as file:
                return len(file.read())
        self._store = self._store or _Store(self._options.store)  # in the worker
        return len(self._store.get(self._paths[at]))


class _Store:
    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._link = HTTPConnection(place.hostname or "", place.port)
        self._path = place.path

    def get(self, path: str) -> bytes:
        self._link.request("GET", f"{self._path}/{path}")
        answer = self._link.getresponse()
        content = answer.read()
        assert answer.status == 200, answer.status
        return content


def _most_read(counts: dict[str, int], sizes: dict[str, int], options: Options) -> set[str]:
    """The files that a rank of NoPFS holds, chosen at the start."""
    kept, left_bytes = set(), options.rank_bytes
    for path in sorted(counts, key=lambda each: -counts[each]):
        if sizes[path] <= left_bytes:
            left_bytes -= sizes[path]
            kept.add(path)
    return kept


class _NoPfs:
    """The files of one rank, in the order of access. `hits`: those that were in memory when they
    were taken."""

    def __init__(self, options: Options, rank: int, orders: Sequence[Sequence[str]]) -> None:
        self._options, self._rank = options, rank
        self._order = [path for order in orders for path in order]
        counts: dict[str, int] = {}
        for path in self._order:
            counts[path] = counts.get(path, 0) + 1
        self._kept = _most_read(counts, json.loads(Path(options.sizes).read_text()), options)
        self._staged_bytes = 0
        self._staged: dict[int, bytes] = {}
        self._next = 0
        self._changed = threading.Condition()
        self.hits = 0
        for _ in range(options.workers):
            threading.Thread(target=self._fetch, daemon=True).start()

    def _fetch(self) -> None:
        store = _Store(self._options.store)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._staged_bytes < self._options.staging_bytes)
                at, self._next = self._next, self._next + 1
            if at >= len(self._order):
                return
            content = self._content(store, self._order[at])
            with self._changed:
                self._staged[at] = content
                self._staged_bytes += len(content)
                self._changed.notify_all()

    def _content(self, store: _Store, path: str) -> bytes:
        held = Path(self._options.cache, path.replace("/", "_"))
        try:
            return held.read_bytes()
        except FileNotFoundError:
            content = store.get(path)
        if path in self._kept:
            made = held.with_name(f"{held.name}.{self._rank}.{threading.get_ident()}")
            made.write_bytes(content)
            made.rename(held)
        return content

    def take(self, at: int) -> int:
        with self._changed:
            self.hits += at in self._staged
            self._changed.wait_for(lambda: at in self._staged)
            content = self._staged.pop(at)
            self._staged_bytes -= len(content)
            self._changed.notify_all()
        return len(content)

    def batches(self, first: int, count: int) -> Iterator[list[int]]:
        for start in range(first, first + count, self._options.batch):
            end = min(start + self._options.batch, first + count)
            yield [self.take(at) for at in range(start, end)]


def read(
    rank: int, options: Options, barrier: Barrier, results: "multiprocessing.Queue[object]"
) -> None:
    orders: list[list[str]] = [json.loads(Path(each[rank]).read_text()) for each in options.orders]
    nopfs = None if options.loader != "nopfs" else _NoPfs(options, rank, orders)
    took: list[list[float]] = []
    size = first = 0
    with ExitStack() as stack:
        link, stream = None, f"rank{rank}"
        if options.loader == "plan":
            link = stack.enter_context(Control.connect(options.mounts[rank]))
        for epoch, order in enumerate(orders):
            if link is not None:
                world = len(options.mounts)
                epochs = [
                    drawn(epoch=each, rank=rank, world=world, seed=options.seed, kind="full")
                    for each in range(epoch, min(epoch + 2, len(orders)))
                ]
                lag = options.workers * 2 * options.batch
                if not epoch:
                    link.announce(stream, epochs, lag_entries=lag)
                elif len(epochs) > 1:
                    link.extend(stream, epochs[1:])
            if nopfs is not None:
                batches: Iterator[list[int]] = nopfs.batches(first, len(order))
            else:
                loader: DataLoader[list[int]] = DataLoader(
                    _Files(order, options, rank),
                    options.batch, num_workers=options.workers, collate_fn=list,
                )  # fmt: skip
                batches = iter(loader)
            first += len(order)
            took.append([])
            for number in range(-(-len(order) // options.batch)):
                barrier.wait(START_S)
                begun_s = time.monotonic()
                size += sum(next(batches))
                took[-1].append(time.monotonic() - begun_s)
                barrier.wait(START_S)
                position = (number + 1) * options.batch
                if link is not None and position < len(order):
                    with suppress(UsageError):  # the mount has seen the end of the epoch already
                        link.progress(stream, position, epoch)
                time.sleep(options.compute_s)
            del batches
            barrier.wait(START_S)
            results.put((rank, epoch, size, took[-1], 0 if nopfs is None else nopfs.hits))
            if not rank:  # the bench counts at the store between two epochs
                print("epoch", flush=True)
                sys.stdin.readline()
            barrier.wait(START_S)


def main(text: str) -> None:
    options = Options(**json.loads(text))
    ranks = range(len(options.orders[0]))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(ranks)), context.Queue()
    processes = [
        context.Process(target=_ranks_own, args=(os.dup(0), rank, options, barrier, results))
        for rank in ranks
    ]
    for process in processes:
        process.start()
    found: list[object] = []
    while len(found) < len(ranks) * len(options.orders) and None not in found:
        found.append(results.get(timeout=600.0))
    assert None not in found, "a rank has failed"
    for process in processes:
        process.join()
    print(json.dumps(found))


def _ranks_own(
    stdin: int,
    rank: int,
    options: Options,
    barrier: Barrier,
    results: "multiprocessing.Queue[object]",
) -> None:
    sys.stdin = os.fdopen(stdin)  # multiprocessing has closed it
    try:
        read(rank, options, barrier, results)
    except BaseException:
        barrier.abort()
        results.put(None)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
