"""Parts of chunks as a request to a server has them."""

from collections.abc import Sequence

import numpy as np

from diesel_fs.format.entries import CHUNK_RANGE, ChunkRanges

Part = tuple[bytes, int, int]
"""A chunk's ID, where the part starts, and its size."""


def records(parts: Sequence[Part]) -> ChunkRanges:
    found = np.zeros(len(parts), CHUNK_RANGE)
    for i, (chunk, start, size) in enumerate(parts):
        found[i] = (np.void(chunk), start, size)
    return found
