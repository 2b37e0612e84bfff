"""Finds the stream to which an open or a READ of a file belongs. The functions keep no state.

An open or a READ does not name the reader, and a file may be in several orders. The reader that is
nearest to the file, in its own order, has probably asked for it.
"""

import math

from .changes import Streams
from .markers import MARKER_STRIDE
from .stream_tracker import StreamTracker
from .watches import Watches


def note_open(streams: Streams, watches: Watches, entry: int, now_s: float) -> None:
    """Note that a watched entry was opened: a sign for each stream whose reader is near it."""
    users = tuple(watches.users.get(entry, ()))
    if not users:
        return
    found = {name: _nearest(each, entry) for name, each in streams.trackers.items()}
    least = min(distance for _, distance in found.values())
    for name in {name for name, _ in users}:
        tracker = streams.trackers[name]
        high = tracker.reader.high
        positions = [position for user, position in users if user == name]
        nearest = min(positions, key=lambda position: abs(position - high))
        if abs(nearest - high) <= least + MARKER_STRIDE:
            # The order may have the file at an earlier place, too, to which the reader comes first:
            # the end of an epoch may have a file that is a marker at the start of the next
            first, _ = found[name]
            tracker.reader.note_open(first if high <= first < nearest else nearest, now_s)


def _nearest(tracker: StreamTracker, entry: int) -> tuple[int, int]:
    return tracker.order.nearest_position(entry, tracker.reader.high)


def nearest_stream(streams: Streams, entry: int) -> tuple[StreamTracker | None, int]:
    """The stream whose reader is nearest to an entry, and the entry's position in it; None and -1
    if none has the entry."""
    nearest: tuple[StreamTracker | None, int] = None, -1
    least = math.inf
    for tracker in streams.trackers.values():
        position, distance = _nearest(tracker, entry)
        if position >= 0 and distance < least:
            nearest, least = (tracker, position), distance
    return nearest


def stream_of_read(
    streams: Streams, entry: int, now_s: float, *, is_sure: bool
) -> tuple[StreamTracker | None, int]:
    """Return `nearest_stream` if that stream's reader probably made the READ, which is then noted
    as a sign; otherwise None and -1. `is_sure`: as in `ReaderPosition.note_read`."""
    tracker, position = nearest_stream(streams, entry)
    if tracker is None:
        return None, -1
    if position < tracker.claims.floor:  # claims ended too early, or it is another program's
        streams.release(tracker, tracker.note_late_read(position, now_s), "given up")
    if position < tracker.reader.low and tracker.reader.is_far(position):
        return None, -1
    if not tracker.reader.note_read(position, now_s, is_sure=is_sure):
        return None, -1
    return tracker, position
