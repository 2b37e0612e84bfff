"""Counts the memory for resident files: the budget, its free part, and each stream's share.

The kernel's memory for the names of files counts for a part of the budget; the rest is for
contents. Streams with epochs left to read get equal shares of the contents' part, or of a part of
it if important entries are kept (`memory_split.py`).
"""

from dataclasses import dataclass

from .resident_set import ResidentSet
from .streams.stream_tracker import StreamTracker

KNOWN_ENTRY_BYTES = 1_150
"""Kernel memory for the name and inode of one file: measured as 1.5 GB for 1.28 million files."""
KNOWN_DIVISOR = 8
"""The kernel must know a file's name before its content can be pushed. The kernel's memory for
names counts for at most this part (an eighth) of the budget: names of small files take a quarter of
the memory of their contents, whatever the budget is, and the kernel frees names and contents
alike."""

AHEAD_DIVISOR, AHEAD_BYTES_MIN = 16, 32 << 20
"""If the memory is split (`memory_split.py`), streams share a sixteenth of the part that is not for
important entries, to claim entries ahead of their readers. Of a small part they share more: 32 MiB,
but no more than half of it."""


def ahead_bytes(part_bytes: int) -> int:
    """The bytes that streams share, if `part_bytes` of the memory are not for important entries."""
    return max(part_bytes // AHEAD_DIVISOR, min(part_bytes // 2, AHEAD_BYTES_MIN))


@dataclass(slots=True)
class Memory:
    """The account of one planner's memory."""

    budget_bytes: int
    resident_set: ResidentSet
    trackers: dict[str, StreamTracker]  # of all streams, by name
    known_entries: int = 0  # names that the kernel knows
    ahead_part: float = 1.0  # of the contents' memory: the part not for important entries; 1: all
    has_substitutes: bool = False  # see `Importances.set`
    _share_bytes: int = 0  # of each stream; 0: to be computed

    def set_known_entries(self, count: int) -> None:
        """Report how many names the worker has made known to the kernel, in all."""
        self.known_entries = count
        self._share_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. If it is smaller, the next decisions drop entries."""
        self.budget_bytes = budget_bytes
        self._share_bytes = 0

    def shares_changed(self) -> None:
        """Have the shares computed again at the next `share_bytes`."""
        self._share_bytes = 0

    def orders_changed(self) -> None:
        """Note that streams have other epochs: the next uses of entries have changed, and perhaps
        the number of streams that share the memory."""
        self.resident_set.eviction.note_new_orders()
        self._share_bytes = 0

    def contents_bytes(self) -> int:
        """The part of the budget for contents: without the kernel's memory for names."""
        known_bytes = self.known_entries * KNOWN_ENTRY_BYTES
        return self.budget_bytes - min(known_bytes, self.budget_bytes // KNOWN_DIVISOR)

    def room_bytes(self) -> int:
        """The free part of the budget; below 0 if the budget has become too small."""
        return self.contents_bytes() - self.resident_set.bytes

    def active_count(self) -> int:
        """How many streams have epochs left to read."""
        return sum(1 for tracker in self.trackers.values() if tracker.order.epochs)

    def share_bytes(self) -> int:
        """Each stream's share of the budget. If shares have to be computed again, the streams get
        the new one."""
        if not self._share_bytes:
            shared_bytes = int(self.contents_bytes() * self.ahead_part)
            if self.ahead_part < 1:
                ahead = ahead_bytes(shared_bytes)
                low_bytes = shared_bytes - ahead
                self.resident_set.eviction.low_bytes_max = low_bytes if self.has_substitutes else 0
                shared_bytes = ahead
            self._share_bytes = max(shared_bytes // max(self.active_count(), 1), 1)
            for tracker in self.trackers.values():
                tracker.give_share(self._share_bytes)
        return self._share_bytes
