"""A training script that knows nothing of DIESEL-FS: ordinary datasets, PyTorch's `DataLoader`.

    python training_program.py OPTIONS        (JSON: the fields of `Options`, and `source`)

`source` is a folder with the files, or the URL of a store's bucket that has each file as an object;
`list` names a file with their NUL-terminated paths. Samples are the bytes of files, not decoded.
Each batch is summed, as a copy to an accelerator reads it; then the loop sleeps, in the place of
the model, so that a batch takes `compute_s` in all. What each epoch took is printed as JSON.
"""

import http.client
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

Content = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Options:
    """How to train."""

    epochs: int
    batch: int
    workers: int
    compute_s: float
    list: str


@dataclass
class Epoch:
    """What an epoch took, from the request for its iterator to its end. `waited_s` is the time in
    which the loop waited for batches or for the start of workers, `sum` adds all bytes as 64-bit
    words modulo 2^64."""

    seconds: float = 0.0
    waited_s: float = 0.0
    files: int = 0
    bytes: int = 0
    sum: int = 0


class Folder(Dataset[Content]):  # type: ignore[misc] # mypy skips torch
    """The files below a folder, as torchvision's `DatasetFolder` reads them."""

    def __init__(self, root: str, paths: list[str]) -> None:
        self.samples = [(os.path.join(root, path), 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Content:
        path, _ = self.samples[index]
        with open(path, "rb") as file:
            return content(file.read())


class Objects(Dataset[Content]):  # type: ignore[misc] # mypy skips torch
    """The objects below a URL, one request each, over one connection of each worker."""

    def __init__(self, url: str, paths: list[str]) -> None:
        parts = urlsplit(url)
        self._host, self._prefix, self._paths = parts.netloc, parts.path, paths
        self._connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Content:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host)
        self._connection.request("GET", f"{self._prefix}/{self._paths[index]}")
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise OSError(f"{self._paths[index]}: the store answered {answer.status}")
        return content(body)


def content(data: bytes) -> Content:
    """The bytes of a file as a sample, without a copy."""
    return np.frombuffer(data, np.uint8)


def train(loader: Iterable[torch.Tensor], options: Options) -> list[Epoch]:
    """Iterate the loader, whose batches are tensors of bytes, and measure each epoch."""
    epochs = []
    for _ in range(options.epochs):
        epoch = Epoch()
        asked_s = start_s = time.perf_counter()
        batches = iter(loader)
        while True:
            batch = next(batches, None)
            got_s = time.perf_counter()
            epoch.waited_s += got_s - asked_s
            if batch is None:
                break
            epoch.files += len(batch)
            epoch.bytes += batch.numel()
            epoch.sum += int(batch.view(torch.int64).sum())
            del batch  # as `batch = batch.to(device)` does
            time.sleep(max(0.0, got_s + options.compute_s - time.perf_counter()))
            asked_s = time.perf_counter()
        epoch.seconds = time.perf_counter() - start_s
        epoch.sum %= 1 << 64
        epochs.append(epoch)
    return epochs


def report(epochs: list[Epoch]) -> None:
    """Print the epochs."""
    print(json.dumps([asdict(epoch) for epoch in epochs]))


def be_quiet() -> None:
    """Hide the warning that samples cannot be written to, which nobody does."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def main(text: str) -> None:
    """Train, and print the epochs."""
    be_quiet()
    said = json.loads(text)
    source = said.pop("source")
    options = Options(**said)
    with open(options.list, "rb") as file:
        paths = [os.fsdecode(path) for path in file.read().split(b"\0")[:-1]]
    kind = Objects if source.startswith("http://") else Folder
    loader = DataLoader(
        kind(source, paths),
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    report(train(loader, options))


if __name__ == "__main__":
    main(sys.argv[1])
