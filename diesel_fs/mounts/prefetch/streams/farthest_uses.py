"""Finds the entries that readers come to last, by going through their orders backwards.

If memory is full, the entry whose next use is the farthest is dropped first (Belady's MIN). For
each stream, a place moves from the end of its order towards its reader, and the entries that it
passes are offered to the caller. The *edge* is how far ahead of the readers the places are now. A
stream's place goes back to the end when its epochs change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....orders.plan import Entries
from .stream_order import StreamEpoch
from .stream_tracker import StreamTracker

PIECE_POSITIONS = 4_096
"""Positions that are offered together. Most of their files are not resident."""


@dataclass(slots=True)
class _Place:
    """Everything from `position` on has been offered."""

    epochs: Sequence[StreamEpoch]
    position: int


@dataclass(slots=True)
class FarthestUses:
    trackers: dict[str, StreamTracker]  # by stream
    _places: dict[str, _Place] = field(default_factory=dict)

    def restart(self) -> None:
        self._places.clear()

    def edge(self) -> int:
        """How many positions ahead of the readers the search is: it has offered all entries with a
        farther next use. 0 if everything has been offered."""
        found = self._farthest()
        return 0 if found is None else found[1].position - found[0].reader.high

    def next(self) -> Entries | None:
        """The entries at the next positions, the farthest first; None if all have been offered.
        Readers may come to some of them sooner, at other positions. An entry may occur twice."""
        found = self._farthest()
        if found is None:
            return None
        tracker, place = found
        state = next(each for each in place.epochs if each.base < place.position <= each.end)
        least = max(tracker.reader.high, state.base)
        end, place.position = place.position, max(place.position - PIECE_POSITIONS, least)
        return state.epoch.entries[place.position - state.base : end - state.base][::-1]

    def _farthest(self) -> tuple[StreamTracker, _Place] | None:
        """The stream whose place is farthest ahead of its reader; None if no place is ahead."""
        farthest, most = None, 0
        for name in self._places.keys() - self.trackers.keys():
            del self._places[name]
        for name, tracker in self.trackers.items():
            epochs = tracker.order.next_epochs()
            place = self._places.get(name)
            if place is None or place.epochs != epochs:
                end = epochs[-1].end if epochs else 0
                place = self._places[name] = _Place(epochs, end)
            ahead = place.position - tracker.reader.high
            if ahead > most and place.position > epochs[0].base:
                farthest, most = (tracker, place), ahead
        return farthest
