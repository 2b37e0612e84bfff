"""A training script that knows nothing of DIESEL-FS: ordinary datasets, PyTorch's `DataLoader`.

    python training_program.py train OPTIONS      (JSON: the fields of `Options`, and `source`)
    python training_program.py decode SECONDS

`source` is a folder with the files, or the URL of a bucket with each file as an object; `list`
names a file with their NUL-terminated paths. `orders` names such a file for each epoch, which the
script reads when the epoch begins; without them the loader shuffles. Samples are undecoded bytes.
Each batch is summed, as a copy to an accelerator reads it; then the loop sleeps, in the place of
the model, until a batch has taken `compute_s`. The times of each epoch are printed as JSON. The
script can also read counters after each epoch, and write down the order of its samples. `decode`
decodes a JPEG of about 110 KiB in a process for each processor, and prints images and bytes a
second.
"""

import http.client
import io
import json
import multiprocessing
import os
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

Content = npt.NDArray[np.uint8]

WIDTH, HEIGHT, QUALITY = 500, 375, 90  # as an image of ImageNet
SMOOTHNESS = 3  # pixels of noise that are one value: with it the file has about 110 KiB


@dataclass(frozen=True)
class Options:
    """`counters` are URLs of JSON, which is read after each epoch, each after a pause of some
    seconds. `order` names a file that gets the sum of each sample, in the order in which the loop
    got them. `sample_s` is how long a worker sleeps over a sample, in the place of its preparation.
    """

    epochs: int
    batch: int
    workers: int
    compute_s: float
    list: str
    counters: tuple[tuple[str, float], ...] = ()
    order: str = ""
    sample_s: float = 0.0


@dataclass
class Epoch:
    """The times of an epoch, from the request for its iterator to its end. `waited_s` is the time
    for which the loop waited for batches or for the start of workers, `sum` adds all bytes as
    64-bit words modulo 2^64. `counts` has what the counters said after it."""

    seconds: float = 0.0
    waited_s: float = 0.0
    files: int = 0
    bytes: int = 0
    sum: int = 0
    counts: list[object] = field(default_factory=list)


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


class Prepared(Dataset[Content]):  # type: ignore[misc] # mypy skips torch
    """Another dataset, whose samples take a time to prepare."""

    def __init__(self, samples: Folder | Objects, sample_s: float) -> None:
        self._samples, self._sample_s = samples, sample_s

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Content:
        time.sleep(self._sample_s)
        return self._samples[index]


class Listed(Sampler[int]):  # type: ignore[misc] # mypy skips torch
    """The order of each epoch, from a list of its own."""

    def __init__(self, paths: Sequence[str], orders: Sequence[str]) -> None:
        self._index = {path: index for index, path in enumerate(paths)}
        self._orders = iter(orders)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[int]:
        return iter([self._index[path] for path in paths_of(next(self._orders))])


def content(data: bytes) -> Content:
    """The bytes of a file as a sample, without a copy."""
    return np.frombuffer(data, np.uint8)


def train(loader: Iterable[torch.Tensor], options: Options) -> list[Epoch]:
    """Iterate the loader, which gives tensors of bytes, and measure each epoch."""
    epochs, order = [], []
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
            sums = batch.view(torch.int64).sum(1)
            epoch.sum += int(sums.sum())
            if options.order:
                order.append(sums.numpy())
            del batch  # as `batch = batch.to(device)` does
            time.sleep(max(0.0, got_s + options.compute_s - time.perf_counter()))
            asked_s = time.perf_counter()
        epoch.seconds = time.perf_counter() - start_s
        epoch.sum %= 1 << 64
        epoch.counts = counted(options)
        epochs.append(epoch)
    if options.order:
        np.concatenate(order).tofile(options.order)
    return epochs


def counted(options: Options) -> list[object]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    found = []
    for url, pause_s in options.counters:
        time.sleep(pause_s)
        with opener.open(url) as answer:
            found.append(json.load(answer))
    return found


def report(epochs: list[Epoch]) -> None:
    print(json.dumps([asdict(epoch) for epoch in epochs]))


def be_quiet() -> None:
    """Hide the warning that samples cannot be written to: nothing writes to them."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def jpeg() -> bytes:
    """An image of noise, which has the size and the number of bytes of a photo."""
    rows, columns = HEIGHT // SMOOTHNESS, WIDTH // SMOOTHNESS + 1
    noise = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8)
    image = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def decoded_per_s(data: bytes, seconds: float) -> float:
    """Images a second of one process."""
    count, start_s = 0, time.perf_counter()
    while (now_s := time.perf_counter()) < start_s + seconds:
        Image.open(io.BytesIO(data)).convert("RGB")
        count += 1
    return count / (now_s - start_s)


def decode(seconds: str) -> None:
    data, processes = jpeg(), len(os.sched_getaffinity(0))
    with multiprocessing.Pool(processes) as pool:
        images = sum(pool.starmap(decoded_per_s, [(data, float(seconds))] * processes))
    print(json.dumps({"images": images, "bytes": images * len(data), "file_bytes": len(data)}))


def train_stock(text: str) -> None:
    fields = json.loads(text)
    source, orders = fields.pop("source"), fields.pop("orders", ())
    options = Options(**fields)
    kind, paths = Objects if source.startswith("http://") else Folder, paths_of(options.list)
    dataset = kind(source, paths)
    loader = DataLoader(
        Prepared(dataset, options.sample_s) if options.sample_s else dataset,
        batch_size=options.batch,
        shuffle=not orders,
        sampler=Listed(paths, orders) if orders else None,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    report(train(loader, options))


def paths_of(listed: str) -> list[str]:
    return [os.fsdecode(path) for path in Path(listed).read_bytes().split(b"\0")[:-1]]


if __name__ == "__main__":
    be_quiet()
    {"train": train_stock, "decode": decode}[sys.argv[1]](sys.argv[2])
