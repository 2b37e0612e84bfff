"""Measures how long a worker of an `AutoDataLoader` prepares a batch: from the arrival of its
indices (`OnItsWay`) to the end of its collation (`TimedCollate`).

A spawned worker imports this module, so it imports little.
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
    """The indices of a batch on their way to a worker. Unpickling them there gives the plain
    indices and records the time (`arrived`)."""

    def __init__(self, indices: object) -> None:
        self._indices = indices

    def __reduce__(self) -> tuple[object, ...]:
        return arrived, (self._indices,)


def arrived(indices: object) -> object:
    """Record that this process begins to prepare a batch. Returns `indices`."""
    global _began_s  # noqa: PLW0603  (one batch at a time in a worker; torch loads it by name)
    _began_s = time.perf_counter()
    return indices


class Report(NamedTuple):
    fetch_s: float
    """The preparation: from the arrival of the indices to the end of collating."""
    batch_bytes: float
    process_bytes: float
    """The worker's own memory; 0 until it is first measured."""
    is_first: float
    """1 for the first batch of a worker, which also loads modules and opens files."""


class TimedCollate:
    """A `collate_fn` that calls the user's and adds a `Report` (as a plain tuple) to the batch."""

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
    """The bytes of memory that only this process uses; 0 if they cannot be read."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1]) * 1024
    return float(total)


def _held_bytes(batch: object) -> float:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return float(batch.nbytes)
    if isinstance(batch, bytes | bytearray | memoryview):
        return float(len(batch))
    if isinstance(batch, Mapping):
        return sum(map(_held_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_held_bytes, batch))
    return 0.0
