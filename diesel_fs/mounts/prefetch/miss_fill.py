"""What is pushed where no plan says what comes: chunks that were missed, or all of them in turn.

Owned here: `MissFill`: which chunks wait, and whether telling of further misses would change
anything. Not owned: room (`planner.py`), and how soon a chunk may come again (`members.py`). Used
by one thread.
"""

from itertools import islice

from ...orders.plan import Entries
from .members import ChunkEntries
from .resident_set import ResidentSet


class MissFill:
    """The chunks to push into room that is free: those missed first, then, if all, in turn."""

    def __init__(
        self, members: ChunkEntries, held: ResidentSet, chunk_count: int, *, everything: bool
    ) -> None:
        self._members = members
        self._held = held
        self._count = chunk_count
        self._missed: dict[int, None] = {}
        self._next_in_turn = 0 if everything else chunk_count  # the next chunk in turn
        self.in_turn_count = chunk_count if everything else 0
        """How many chunks are to be pushed in turn."""
        self._too_large_bytes: int | None = None  # of what last had no room

    def missed(self, chunk: int, need_bytes: int, room_bytes: int, now_s: float) -> None:
        """A file of a chunk was read by request; it alone needs so much room."""
        if need_bytes > room_bytes:
            self._too_large_bytes = need_bytes
        elif self._members.may_push(chunk, now_s):
            self._missed[chunk] = None

    def next(self, room_bytes: int) -> Entries | None:
        """The entries to push next, of one chunk; None where none is left or has room."""
        while self._missed:
            chunk = next(iter(self._missed))
            del self._missed[chunk]
            entries = self._held.missing(self._members.of(chunk))
            if len(entries) and self._fits(entries, room_bytes):
                return entries
        while self._next_in_turn < self._count:
            entries = self._held.missing(self._members.of(self._next_in_turn))
            if not self._fits(entries, room_bytes):
                return None  # full; it goes on where there is room again
            self._next_in_turn += 1
            if len(entries):
                return entries
        return None

    @property
    def done_count(self) -> int:
        """How many of those have had their turn."""
        return self._next_in_turn - (self._count - self.in_turn_count)

    def has_room(self, room_bytes: int) -> bool:
        """Whether the next miss may lead to a push; where the last had no room, none will."""
        return self._too_large_bytes is None or room_bytes >= self._too_large_bytes

    def upcoming(self, count: int) -> list[Entries]:
        """What will probably come next, at most so many chunks."""
        found = list(map(self._members.of, islice(self._missed, count)))
        turn = range(self._next_in_turn, min(self._next_in_turn + count - len(found), self._count))
        return [*found, *map(self._members.of, turn)]

    def _fits(self, entries: Entries, room_bytes: int) -> bool:
        need = self._held.bytes_of(entries)
        fits = need <= room_bytes
        self._too_large_bytes = None if fits else need
        return fits
