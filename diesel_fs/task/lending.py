"""Who has borrowed which memory of the cache, and what is wanted back.

Owned here: the books. Not owned: the memory, and when it is given up (`holdings.py`). One thread.

Borrowed memory takes its room until it is returned, whether it can still be found here or not. A
borrower returns a chunk as often as it got a descriptor of other memory than it had: so one that
asks twice, and gets the same twice, returns it once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .memory import Sealed


class Lending:
    """What is lent, by borrower and chunk. Chunks have the numbers that they had when lent."""

    def __init__(self) -> None:
        self._of: defaultdict[int, dict[int, list[Sealed]]] = defaultdict(dict)
        self._borrowers: dict[Sealed, int] = {}
        self._wanted: set[Sealed] = set()
        self.bytes = 0

    def lend(self, borrower: int, chunk: int, memory: Sealed) -> None:
        """Note it."""
        has = self._of[borrower].setdefault(chunk, [])
        if memory not in has:
            has.append(memory)
            if memory not in self._borrowers:
                self.bytes += memory.bytes
            self._borrowers[memory] = self._borrowers.get(memory, 0) + 1

    def take_back(self, borrower: int, chunks: Iterable[int]) -> Iterator[Sealed]:
        """A borrower returns chunks; what nobody has any more. What it never had is passed by."""
        has = self._of.get(borrower, {})
        for chunk in chunks:
            if memories := has.get(chunk):
                memory = memories.pop(0)
                if not memories:
                    del has[chunk]
                if self._returned(memory):
                    yield memory

    def gone(self, borrower: int) -> Iterator[Sealed]:
        """A borrower has ended; what nobody has any more."""
        for memories in self._of.pop(borrower, {}).values():
            for memory in memories:
                if self._returned(memory):
                    yield memory

    def is_lent(self, memory: Sealed) -> bool:
        """Whether anybody has it."""
        return memory in self._borrowers

    def want_back(self, memory: Sealed) -> None:
        """It is to be given up."""
        if memory in self._borrowers:
            self._wanted.add(memory)

    def is_wanted(self, memory: Sealed) -> bool:
        """Whether it is to be given up when it is returned."""
        return memory in self._wanted

    def wanted_back(self, borrower: int) -> list[int]:
        """The chunks that a borrower should return."""
        return [
            chunk
            for chunk, memories in self._of.get(borrower, {}).items()
            if not self._wanted.isdisjoint(memories)
        ]

    def _returned(self, memory: Sealed) -> bool:
        self._borrowers[memory] -= 1
        if self._borrowers[memory]:
            return False
        del self._borrowers[memory]
        self._wanted.discard(memory)
        self.bytes -= memory.bytes
        return True
