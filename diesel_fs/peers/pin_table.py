"""Who has borrowed which memory of the cache, and what is wanted back.

Owned here: the books. Not owned: the memory, and when it is given up (`node_cache.py`). One thread.

Borrowed memory takes its room until it is returned, whether it can still be found here or not. A
borrower returns a chunk as often as it got a descriptor of other memory than it had: so one that
asks twice, and gets the same twice, returns it once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .sealed_memory import SealedMemory


class PinTable:
    """What is lent, by borrower and chunk. Chunks have the numbers that they had when lent."""

    def __init__(self) -> None:
        self._by_pinner: defaultdict[int, dict[int, list[SealedMemory]]] = defaultdict(dict)
        self._pin_counts: dict[SealedMemory, int] = {}
        self._revoked: set[SealedMemory] = set()
        self.bytes = 0

    def pin(self, borrower: int, chunk: int, memory: SealedMemory) -> None:
        """Note it."""
        has = self._by_pinner[borrower].setdefault(chunk, [])
        if memory not in has:
            has.append(memory)
            if memory not in self._pin_counts:
                self.bytes += memory.bytes
            self._pin_counts[memory] = self._pin_counts.get(memory, 0) + 1

    def unpin(self, borrower: int, chunks: Iterable[int]) -> Iterator[SealedMemory]:
        """A borrower returns chunks; what nobody has any more. What it never had is passed by."""
        has = self._by_pinner.get(borrower, {})
        for chunk in chunks:
            if memories := has.get(chunk):
                memory = memories.pop(0)
                if not memories:
                    del has[chunk]
                if self._drop_pin(memory):
                    yield memory

    def unpin_all(self, borrower: int) -> Iterator[SealedMemory]:
        """A borrower has ended; what nobody has any more."""
        for memories in self._by_pinner.pop(borrower, {}).values():
            for memory in memories:
                if self._drop_pin(memory):
                    yield memory

    def is_pinned(self, memory: SealedMemory) -> bool:
        """Whether anybody has it."""
        return memory in self._pin_counts

    def revoke(self, memory: SealedMemory) -> None:
        """It is to be given up."""
        if memory in self._pin_counts:
            self._revoked.add(memory)

    def is_revoked(self, memory: SealedMemory) -> bool:
        """Whether it is to be given up when it is returned."""
        return memory in self._revoked

    def revoked(self, borrower: int) -> list[int]:
        """The chunks that a borrower should return."""
        return [
            chunk
            for chunk, memories in self._by_pinner.get(borrower, {}).items()
            if not self._revoked.isdisjoint(memories)
        ]

    def _drop_pin(self, memory: SealedMemory) -> bool:
        self._pin_counts[memory] -= 1
        if self._pin_counts[memory]:
            return False
        del self._pin_counts[memory]
        self._revoked.discard(memory)
        self.bytes -= memory.bytes
        return True
