"""A training script without a model, for `importance.py`: reads all files of a mount in six
epochs, as fast as its loader gives them.

    python importance_program.py MOUNT WAY SHARE COUNTS [JOB]
    python importance_program.py overhead SAMPLES

WAY: announced (the full order), sampled (the mount gets no importances), importance, substitute.
COUNTS: the URL of the store's counts (`tests/bench/store.py`).

Losses are drawn once by a seed, and change a little from epoch to epoch, as those of a network do.
A JOB is a number: the losses of each are another multiple of the same ones, as those of different
networks are.
The second form prints the sampler's time and memory for SAMPLES samples without files.
"""

import json
import os
import sys
import time
import urllib.request

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import diesel_fs.torch
from diesel_fs.mounts.plans.control import Control
from diesel_fs.orders.shuffle import ChunkedFiles
from diesel_fs.torch import ImportanceSampler
from diesel_fs.torch import sampler as module
from diesel_fs.torch.sources import SampleSource

EPOCHS, BATCH, WORKERS = 6, 64, 2
BATCH_OF_JOBS = 32  # 20 such batches of samples in memory are timed, and no more may be there
COUNTED = 3  # the last epochs
CHANGE = 0.2
JOBS_DIFFER = 0.7


class Files(Dataset[int]):  # type: ignore[misc]  # mypy skips torch
    """All files of a mount; a sample is the length of its content."""

    def __init__(self, root: str) -> None:
        found = [os.path.join(top, name) for top, _, names in os.walk(root) for name in names]
        self.samples = [(path, 0) for path in sorted(found)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index][0], "rb") as file:
            return len(file.read())


def counted(mount: str, store: str) -> npt.NDArray[np.int64]:
    """Until now: requests and bytes of the store, and entries that the mount kept for readers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(store) as answer:
        counts = json.load(answer)
    with Control.connect(mount) as control:
        residency = control.stats()["residency"]
    assert isinstance(residency, dict)
    return np.array([counts["requests"], counts["bytes"], residency["kept_entries"]])


class Untold(ImportanceSampler):
    """Tells the mount nothing about importance."""

    def _send_importance(self, probabilities: npt.NDArray[np.float32]) -> None:
        pass


def train(mount: str, way: str, share: float, store: str, job: int = 0) -> None:
    data = Files(mount)
    count = len(data)
    rng = np.random.default_rng(1)
    losses = rng.exponential(1, count).astype(np.float32)
    if job:
        rng = np.random.default_rng((1, job))
        losses *= rng.lognormal(0, JOBS_DIFFER, count).astype(np.float32)
    sampler: ImportanceSampler | None = None
    if way != "announced":
        kind = Untold if way == "sampled" else ImportanceSampler
        sampler = kind(data, share=share, substitute=way == "substitute", seed=1 + job)
    diesel_fs.torch.join(ahead=0)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        data, batch_size=BATCH_OF_JOBS if job else BATCH, num_workers=WORKERS, generator=generator,
        sampler=sampler if sampler is not None else RandomSampler(data, generator=generator),
    )  # fmt: skip
    seconds: list[float] = []
    read = size = replaced = 0
    counts = np.zeros(3, np.int64)
    sizes: torch.Tensor
    for epoch in range(EPOCHS):
        before = counted(mount, store)
        begun_s = time.monotonic()
        if sampler is not None:
            sampler.set_epoch(epoch)
            lengths = []
            for indices, sizes in sampler.enumerate(loader):
                sampler.update(indices, torch.from_numpy(losses[indices]))
                lengths.append(sizes)
            replaced += sampler.substituted
        else:
            lengths = list(loader)
        seconds.append(time.monotonic() - begun_s)
        if epoch >= EPOCHS - COUNTED:
            got = torch.cat(lengths)
            read, size = read + len(got), size + int(got.sum())
            counts += counted(mount, store) - before
        losses *= rng.lognormal(-0.05, CHANGE, count).astype(np.float32)
    requests, fetched, kept = counts.tolist()
    figures = {
        "seconds": seconds, "kept": kept / read, "substituted": replaced,
        "requests": requests / COUNTED, "bytes": fetched / COUNTED,
        "requests_over_missed": requests / max(read - kept, 1),
        "bytes_over_missed": fetched / max(size * (1 - kept / read), 1),
        "benefit": 1.0 if sampler is None else sampler.benefit,
    }  # fmt: skip
    print(json.dumps(figures))


def overhead(count: int) -> None:
    """Time and memory of the sampler for samples without files."""
    entries = np.arange(count)
    files = ChunkedFiles(entries, entries // 1000, np.zeros((count // 1000 + 1, 16), np.uint8))
    module.sample_files = lambda _: SampleSource("x", "x", 1, files, None)  # type: ignore[attr-defined,assignment]  # patched
    sampler = ImportanceSampler(None)
    rng = np.random.default_rng(1)
    batches = np.array_split(rng.permutation(count), max(count // 256, 1))
    losses = [
        torch.from_numpy(rng.exponential(1, len(each)).astype(np.float32)) for each in batches
    ]
    begun_s = time.perf_counter()
    for indices, some in zip(batches, losses, strict=True):
        sampler.update(indices, some)
    update_s = time.perf_counter() - begun_s
    sampler.set_epoch(1)
    begun_s = time.perf_counter()
    iterator = iter(sampler)
    next(iterator)
    draw_s = time.perf_counter() - begun_s
    assert sampler._last is not None
    held = 0
    for each in (
        files.entries, files.chunks, sampler._table.agreed, sampler._table.reported,
        sampler._draws[0].probabilities, sampler._draws[0].samples, sampler._last.samples,
    ):  # fmt: skip
        held += each.nbytes
    print(json.dumps({"update_s": update_s, "draw_s": draw_s, "bytes": held}))


def main(*words: str) -> None:
    if words[0] == "overhead":
        overhead(int(words[1]))
    else:
        train(words[0], words[1], float(words[2]), words[3], *map(int, words[4:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
