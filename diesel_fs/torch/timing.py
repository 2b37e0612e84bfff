"""Measures, in a worker of an `AutoDataLoader`, how long the preparation of a batch takes.

The time begins when the worker takes the indices of the batch (`OnItsWay`), and ends when the batch
has been collated (`TimedCollate`). A spawned worker imports this module, so the module imports
little.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

_MEMORY_EVERY = 25  # batches between two measurements of a worker's memory: each takes about 1 ms

_began_s = 0.0  # when this process took the current batch's indices


class OnItsWay:
    """The indices of a batch on their way to a worker. Their unpickling in the worker gives the
    plain indices and records the time (`arrived`)."""

    def __init__(self, indices: object) -> None:
        self._indices = indices

    def __reduce__(self) -> tuple[object, ...]:
        return arrived, (self._indices,)


def arrived(indices: object) -> object:
    """Record that this process now begins to prepare the batch with these indices. Returns
    `indices`."""
    global _began_s  # noqa: PLW0603  (one batch at a time in a worker; torch loads it by name)
    _began_s = time.perf_counter()
    return indices


class Report(NamedTuple):
    """The measurements of one batch."""

    fetch_s: float
    """The preparation: from the arrival of the indices to the end of collating."""
    batch_bytes: float
    process_bytes: float
    """The worker's own memory, measured every 25 batches; 0: not measured yet."""
    is_first: float
    """1 for the first batch of a worker, which also loads modules and opens files."""


class TimedCollate:
    """The `collate_fn` of a loader: calls the user's, and adds a `Report` (as a plain tuple) to the
    batch."""

    def __init__(self, inner: Callable[[object], object]) -> None:
        self._inner = inner
        self._batches = 0
        self._process_bytes = 0.0

    def __call__(self, data: object) -> tuple[object, tuple[float, ...]]:
        batch = self._inner(data)
        fetch_s = time.perf_counter() - _began_s
        if self._batches % _MEMORY_EVERY == 1:
            self._process_bytes = _own_bytes()
        self._batches += 1
        is_first = float(self._batches == 1)
        return batch, (fetch_s, _held_bytes(batch), self._process_bytes, is_first)


def _own_bytes() -> float:
    """The memory of this process in bytes, without the memory that it shares with its parent. 0 if
    it cannot be read."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1]) * 1024
    return float(total)


def _held_bytes(batch: object) -> float:
    """The bytes of the tensors, arrays and byte strings in a batch."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return float(batch.nbytes)
    if isinstance(batch, bytes | bytearray | memoryview):
        return float(len(batch))
    if isinstance(batch, Mapping):
        return sum(map(_held_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_held_bytes, batch))
    return 0.0
