"""Two loaders of a dataset of which a part lies on the local disk and the rest in a store, file by
file.

    python ssd_program.py stock|clairvoyant OPTIONS     (JSON: the fields of `Places`, then of
                                                         `training_program.Options`)

`stock` is PyTorch's `DataLoader` with worker processes. `clairvoyant` does what NoPFS does on one
node (Dryden et al., SC 2021): it knows the order of each epoch, threads read files in this order
into a staging buffer, a part of the memory holds files for the whole training, and the disk holds
others. All files are read equally often, so which ones is of no account. The pages of the local
files are dropped before each epoch: with random orders, memory for a quarter of them would find
some 3 % of them again.
"""

import http.client
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from urllib.parse import urlsplit

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tests.bench.experiments.training_program import (
    Content,
    Options,
    be_quiet,
    content,
    paths_of,
    report,
    train,
)

THREADS, PIECE = 16, 8  # of the clairvoyant loader, and the files that a thread reads at once
STAGING_DIVISOR = 4  # the staging buffer's part of the memory


@dataclass(frozen=True)
class Places:
    """`source` has all files, of which the part `local` counts as on the disk; `url` has all as
    objects. The clairvoyant loader has `memory_bytes`, and files have `file_bytes`."""

    source: str
    url: str
    local: float
    memory_bytes: int
    file_bytes: int


class Files(Dataset[Content]):  # type: ignore[misc] # mypy skips torch
    """The files at their places. Any process, any thread."""

    def __init__(self, places: Places, paths: list[str]) -> None:
        self.paths, self._source = paths, places.source
        parts = urlsplit(places.url)
        self._host, self._prefix = parts.netloc, parts.path
        order = np.random.default_rng(99).permutation(len(paths))
        self.is_local = np.zeros(len(paths), np.bool_)
        self.is_local[order[: round(places.local * len(paths))]] = True
        self._connections: threading.local | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Content:
        if self.is_local[index]:
            with open(f"{self._source}/{self.paths[index]}", "rb") as file:
                return content(file.read())
        if self._connections is None:
            self._connections = threading.local()
        connection = getattr(self._connections, "it", None)
        if connection is None:
            connection = self._connections.it = http.client.HTTPConnection(self._host)
        connection.request("GET", f"{self._prefix}/{self.paths[index]}")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise OSError(f"{self.paths[index]}: the store answered {answer.status}")
        return content(body)

    def drop_pages(self) -> None:
        for index in np.flatnonzero(self.is_local).tolist():
            file = os.open(f"{self._source}/{self.paths[index]}", os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


class Clairvoyant:
    """The loader in the manner of NoPFS."""

    def __init__(self, files: Files, places: Places, batch: int) -> None:
        self._files, self._batch = files, batch
        staged = places.memory_bytes // STAGING_DIVISOR
        self._pieces_ahead = max(staged // (PIECE * places.file_bytes), 1)
        kept = (places.memory_bytes - staged) // places.file_bytes
        # What is in memory need not be on the disk
        wanted = [*np.flatnonzero(~files.is_local).tolist(), *np.flatnonzero(files.is_local)]
        self._kept: dict[int, Content | None] = dict.fromkeys(wanted[:kept])
        self._threads = ThreadPoolExecutor(THREADS)
        self._epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._epoch += 1
        order = np.random.default_rng(self._epoch).permutation(len(self._files)).tolist()
        pieces = iter([order[at : at + PIECE] for at in range(0, len(order), PIECE)])
        staged: deque[Future[list[Content]]] = deque()
        batch: list[Content] = []
        while True:
            room = self._pieces_ahead - len(staged)
            staged.extend(self._threads.submit(self._read, each) for each in islice(pieces, room))
            if not staged:
                break
            batch += staged.popleft().result()
            if len(batch) >= self._batch:
                yield torch.from_numpy(np.stack(batch[: self._batch]))
                del batch[: self._batch]
        if batch:
            yield torch.from_numpy(np.stack(batch))

    def _read(self, indices: Sequence[int]) -> list[Content]:
        found = []
        for index in indices:
            kept = self._kept.get(index)
            if kept is None:
                kept = self._files[index]
                if index in self._kept:
                    self._kept[index] = kept
            found.append(kept)
        return found


def main(kind: str, text: str) -> None:
    fields = json.loads(text)
    places = Places(**{name: fields.pop(name) for name in Places.__dataclass_fields__})
    options = Options(**fields)
    files = Files(places, paths_of(options.list))
    loader = (
        Clairvoyant(files, places, options.batch)
        if kind == "clairvoyant"
        else DataLoader(
            files,
            batch_size=options.batch,
            shuffle=True,
            num_workers=options.workers,
            persistent_workers=True,
        )
    )
    epochs = []
    for _ in range(options.epochs):
        files.drop_pages()
        epochs += train(loader, replace(options, epochs=1))
    report(epochs)
    sys.stdout.flush()
    os._exit(0)  # without waiting for connections of idle threads


if __name__ == "__main__":
    be_quiet()
    main(*sys.argv[1:])
