"""Parts of chunks as a request to a server has them, and a reader of them."""

from collections.abc import Sequence

import numpy as np

from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.cache.tiers import CacheTier
from diesel_fs.format.entries import CHUNK_RANGE, ChunkRanges
from diesel_fs.format.object_names import chunk_object

from .conftest import Counting
from .disk_tier import Chunks

Part = tuple[bytes, int, int]
"""A chunk's ID, the start of the part, and its size."""


def records(parts: Sequence[Part]) -> ChunkRanges:
    found = np.zeros(len(parts), CHUNK_RANGE)
    for i, (chunk, start, size) in enumerate(parts):
        found[i] = (np.void(chunk), start, size)
    return found


class Ranges:
    def __init__(self, store: Counting, chunks: Chunks, tier: CacheTier) -> None:
        self.store, self.chunks, self.tier = store, chunks, tier
        self.keys = list(chunks)
        self.contents = {bytes(key.id): content for key, content in chunks.items()}
        self.cache = ReadThroughCache(store, tier)
        self.reader = RangeReader(self.cache)

    def read(self, *parts: Part, fresh: bool = False) -> list[memoryview]:
        return self.reader.read(self.keys[0].identity, records(parts), fresh=fresh)

    def expected(self, *parts: Part) -> bytes:
        return b"".join(self.contents[name][start : start + size] for name, start, size in parts)

    def check(self, *parts: Part) -> list[memoryview]:
        answer = self.read(*parts)
        assert b"".join(answer) == self.expected(*parts)
        return answer

    def check_part(self, number: int, times: int = 1) -> None:
        for _ in range(times):
            self.check((self.keys[number].id, 200, 50))

    def is_quiet(self) -> bool:
        """Whether nothing waits to be fetched; one fetch may still be in progress."""
        return not self.cache._missed and not self.cache._datasets

    def has_all(self) -> bool:
        return all(map(self.tier.holds, self.keys)) and self.is_quiet()

    def fetched(self) -> list[int]:
        """Return the numbers of the chunks that were read whole, in order."""
        whole = [(chunk_object(*key), 0, len(content)) for key, content in self.chunks.items()]
        return [whole.index(read) for read in self.store.reads if read in whole]

    def close(self) -> None:
        self.reader.close()
        self.cache.close()
