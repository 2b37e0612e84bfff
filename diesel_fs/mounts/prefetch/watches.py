"""Which entries have an inotify watch, for which streams and positions; which need it no more.

Owned here: `Watches`. Not owned: making and removing watches (`page_cache.py`). Used by one thread.
"""

from dataclasses import dataclass, field

import numpy as np

from ...orders.plan import Entries


@dataclass(slots=True)
class Watches:
    """Which entries have a watch, for which streams and positions; and which need it no longer."""

    users: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    unneeded: dict[int, None] = field(default_factory=dict)

    def add(self, entry: int, name: str, position: int) -> bool:
        """Whether the watch has to be made."""
        users = self.users.setdefault(entry, [])
        users.append((name, position))
        if entry in self.unneeded:
            del self.unneeded[entry]  # it still stands
            return False
        return len(users) == 1

    def remove(self, name: str, markers: list[tuple[int, int]]) -> None:
        """One use less of each (position, entry) of a stream."""
        for position, entry in markers:
            users = self.users.get(entry, [])
            if (name, position) in users:
                users.remove((name, position))
                if not users:
                    del self.users[entry]
                    self.unneeded[entry] = None

    def is_watched(self, entry: int) -> bool:
        """Whether an open of the entry is told."""
        return entry in self.users or entry in self.unneeded

    def take_unneeded(self) -> Entries:
        """The entries whose watch may go; it counts as gone."""
        entries = np.fromiter(self.unneeded, np.uint32)
        self.unneeded.clear()
        return entries
