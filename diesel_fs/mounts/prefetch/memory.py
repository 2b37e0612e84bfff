"""Counts the memory for resident files: the budget, its free part, and each stream's share.

The kernel's memory for the names of files counts for a part of the budget; the rest is for
contents. Streams with epochs left to read get equal shares of the contents' part.
"""

from dataclasses import dataclass

from .resident_set import ResidentSet
from .streams.stream_tracker import StreamTracker

KNOWN_ENTRY_BYTES = 1_150
"""Kernel memory for one file's name and inode: measured as 1.5 GB for 1.28 million files."""
KNOWN_DIVISOR = 8
"""The kernel must know a file's name before its content can be pushed. Names take up to a quarter
as much memory as contents, so those of a large dataset could fill the budget. They count for at
most an eighth of it, since the kernel frees names and contents alike."""


@dataclass(slots=True)
class Memory:
    budget_bytes: int
    resident_set: ResidentSet
    trackers: dict[str, StreamTracker]  # of all streams, by name
    known_entries: int = 0  # names that the kernel knows
    _share_bytes: int = 0  # of each stream; 0: to be computed

    def set_known_entries(self, count: int) -> None:
        """The kernel knows `count` names, in all."""
        self.known_entries = count
        self._share_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """If it is smaller, the next decisions drop entries."""
        self.budget_bytes = budget_bytes
        self._share_bytes = 0

    def orders_changed(self) -> None:
        """The next uses of entries have changed, and perhaps the number of streams."""
        self.resident_set.eviction.note_new_orders()
        self._share_bytes = 0

    def contents_bytes(self) -> int:
        known_bytes = self.known_entries * KNOWN_ENTRY_BYTES
        return self.budget_bytes - min(known_bytes, self.budget_bytes // KNOWN_DIVISOR)

    def room_bytes(self) -> int:
        """Negative if the budget has become too small."""
        return self.contents_bytes() - self.resident_set.bytes

    def active_count(self) -> int:
        return sum(1 for tracker in self.trackers.values() if tracker.order.epochs)

    def share_bytes(self) -> int:
        """Each stream's share. If it has to be computed again, the streams get the new one."""
        if not self._share_bytes:
            self._share_bytes = max(self.contents_bytes() // max(self.active_count(), 1), 1)
            for tracker in self.trackers.values():
                tracker.give_share(self._share_bytes)
        return self._share_bytes
