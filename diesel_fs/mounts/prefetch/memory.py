"""Counts the memory for resident files: the budget, its free part, and each stream's share."""

from dataclasses import dataclass

from .resident_set import ResidentSet
from .streams.stream_tracker import StreamTracker

KNOWN_ENTRY_BYTES = 1_150
"""Kernel memory for one file's name and inode: measured as 1.5 GB for 1.28 million files."""
KNOWN_DIVISOR = 8
"""The kernel must know a file's name before its content can be pushed. Names count for at most an
eighth of the budget: those of small files take a quarter of the memory of their contents, whatever
the budget is, and the kernel frees names and contents alike."""

AHEAD_DIVISOR, AHEAD_BYTES_MIN = 16, 32 << 20
"""If the memory is split (`memory_split.py`), streams claim a sixteenth of the part that is not for
important entries ahead of their readers. If that is less than 32 MiB, they claim 32 MiB, but no
more than half of the part."""


def ahead_bytes(part_bytes: int) -> int:
    return max(part_bytes // AHEAD_DIVISOR, min(part_bytes // 2, AHEAD_BYTES_MIN))


@dataclass(slots=True)
class Memory:
    budget_bytes: int
    resident_set: ResidentSet
    trackers: dict[str, StreamTracker]  # of all streams, by name
    known_entries: int = 0  # names that the kernel knows
    ahead_part: float = 1.0  # of the contents' memory, the part not for important entries
    has_substitutes: bool = False  # see `Importances.set`
    _share_bytes: int = 0  # of each stream; 0: to be computed

    def set_known_entries(self, count: int) -> None:
        """The kernel knows `count` names, in all."""
        self.known_entries = count
        self._share_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """If it is smaller, the next decisions drop entries."""
        self.budget_bytes = budget_bytes
        self._share_bytes = 0

    def shares_changed(self) -> None:
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
        """Each stream's share. The streams get it if it is computed again."""
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
