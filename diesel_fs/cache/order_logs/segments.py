"""Reads whole segments of order logs, ahead of the stream that reads the log.

A few segments stay in memory, since more of their entries will be read soon. One thread calls;
threads of this module read.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .layout import Mask, Places
from .log_set import Log, LogSet, read_once
from .writer import LogWriter

SEGMENTS_HELD, SEGMENTS_AHEAD = 2, 2
"""The most segments for each stream that stay in memory, and that are being read ahead."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment in memory, by place."""

    contents: list[memoryview]
    is_right: Mask


class SegmentReader:
    def __init__(self, logs: LogSet, writer: LogWriter) -> None:
        self._set, self._writer = logs, writer
        # Segments that are being read ahead, and the places of their contents
        self._reading: OrderedDict[tuple[int, int], tuple[Future[memoryview], Places]]
        self._reading = OrderedDict()
        self._segments: OrderedDict[tuple[int, int], _Segment] = OrderedDict()
        self._readers = ThreadPoolExecutor(SEGMENTS_AHEAD, "order-log-read")

    def clear(self) -> None:
        """Forget all segments, so that `load` stages their entries again, for other logs."""
        self._segments.clear()
        self._reading.clear()

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def prefetch(self, found: Log, numbers: Iterable[int]) -> bool:
        """Begin to read these segments of a log, in ascending order. Returns False if there is no
        room for all."""
        for number in numbers:
            if len(self._reading) >= SEGMENTS_AHEAD * len(self._set.current_orders):
                # A segment may have been read needlessly, as the mount had all its files already
                digest, oldest = next(iter(self._reading))
                if digest != found.order or oldest >= number - SEGMENTS_AHEAD:
                    return False
                del self._reading[digest, oldest]
            self._begin(found, number)
        return True

    def contents(self, found: Log, places: Places) -> tuple[list[memoryview], Mask]:
        """The contents at these ascending places, and which of them are right. Raises OSError."""
        layout = found.layout
        segments = layout.segment_of(places)
        is_right = np.zeros(len(places), np.bool_)
        contents: list[memoryview] = []
        cuts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(places)]
        for first, behind in pairwise(cuts):
            number, some = int(segments[first]), places[first:behind]
            segment = self.load(found, number)
            some = some - layout.first[number]
            is_right[first:behind] = segment.is_right[some]
            contents += map(segment.contents.__getitem__, some.tolist())
        return contents, is_right

    def load(self, found: Log, number: int) -> _Segment:
        """Wait for a segment. The first time, its entries that the next logs lack are staged
        (collected for a write), also those that the mount still has in memory. Raises OSError."""
        key = found.order, number
        segment = self._segments.get(key)
        if segment is not None:
            self._segments.move_to_end(key)
            return segment
        self._begin(found, number)
        reading, places = self._reading.pop(key)
        content = reading.result()
        first, behind = int(found.layout.first[number]), int(found.layout.first[number + 1])
        start = int(found.layout.start[number])
        whole = self._set.pieces(found, np.arange(first, behind), content, start)
        contents = whole if len(places) == len(whole) else [whole[at - first] for at in places]
        is_right = self._set.check(found, places, contents)
        segment = _Segment(whole, np.zeros(behind - first, np.bool_))
        segment.is_right[places[is_right] - first] = True
        if found.order not in self._set.next:
            entries = found.layout.entries[places]
            lacking = is_right & self._writer.lacking(entries)
            if not lacking.all():
                contents = [contents[at] for at in np.flatnonzero(lacking).tolist()]
            self._writer.stage(entries[lacking], contents)
        self._segments[key] = segment
        while len(self._segments) > SEGMENTS_HELD * max(len(self._set.current_orders), 1):
            (digest, other), _ = self._segments.popitem(last=False)
            if (log_of_other := self._set.by_order.get(digest)) is not None:
                self._writer.release(log_of_other, [other])
        return segment

    def _begin(self, found: Log, number: int) -> None:
        """Begin to read a segment, unless it is in memory or being read."""
        key = found.order, number
        if key not in self._segments and key not in self._reading:
            start, end = int(found.layout.start[number]), int(found.layout.end[number])
            first, behind = int(found.layout.first[number]), int(found.layout.first[number + 1])
            # The places that are there before the read begins: more may come meanwhile
            places = np.flatnonzero(found.is_present[first:behind]) + first
            reading = self._readers.submit(read_once, found.file, start, end - start)
            self._reading[key] = reading, places
            self._set.counts["log_reads"] += 1
