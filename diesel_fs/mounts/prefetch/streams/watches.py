"""Records which marker files (`markers.py`) the worker watches for opens (inotify), and for which
streams. Several streams may need the watch of one file.
"""

from dataclasses import dataclass, field

import numpy as np

from ....orders.plan import Entries

MARKERS_MAX = 2_048
"""The most watches of all streams together: a quarter of the lowest limit for a user."""


@dataclass(slots=True)
class Watches:
    users: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """For each watched entry, the streams that need the watch, and the entry's position in each."""
    unneeded: dict[int, None] = field(default_factory=dict)
    """Entries that are watched although no stream needs it; an ordered set."""

    def add(self, entry: int, name: str, position: int) -> bool:
        """Note that a stream needs a watch. Returns whether the worker has to make it."""
        users = self.users.setdefault(entry, [])
        users.append((name, position))
        if entry in self.unneeded:
            del self.unneeded[entry]
            return False
        return len(users) == 1

    def remove(self, name: str, markers: list[tuple[int, int]]) -> None:
        """`markers` are pairs of position and entry."""
        for position, entry in markers:
            users = self.users.get(entry, [])
            if (name, position) in users:
                users.remove((name, position))
                if not users:
                    del self.users[entry]
                    self.unneeded[entry] = None

    def is_watched(self, entry: int) -> bool:
        return entry in self.users or entry in self.unneeded

    def take_unneeded(self) -> Entries:
        """The worker must stop watching these."""
        entries = np.fromiter(self.unneeded, np.uint32)
        self.unneeded.clear()
        return entries
