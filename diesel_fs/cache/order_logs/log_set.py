"""The order logs that exist, and which entries each of them has.

The threads of `logs.py` and `writer.py` share the logs. A change of a log's mask is one numpy
assignment; a thread that still sees the old value reads from the store, or finds a wrong checksum.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import POSIX_FADV_DONTNEED

import numpy as np
from xxhash import xxh3_64_intdigest

from ...format.entries import Kind
from ...format.snapshot.layout import MANY_EXTENTS, kinds
from ...format.snapshot.reader import Snapshot
from ...net.breaker import CircuitBreaker
from ...orders.plan import Entries
from ..disk.folder import DISK_PAUSE_S
from .addresses import LogAddresses
from .layout import LogIdentity, LogLayout, Mask, Places

log = logging.getLogger("diesel.mount")

_COUNTS = (
    *("log_hits", "log_hit_bytes", "log_misses", "log_reads", "log_writes", "log_written_bytes"),
    *("log_released_bytes", "log_wrong", "log_refused", "log_recovered", "log_rewritten"),
)


@dataclass(slots=True, eq=False)
class Log:
    """One log: its file, and which of its entries are there."""

    order: int
    """The digest of the order in which a stream reads it. It is that of `identity`, unless the log
    has only those files of the order that older logs had."""
    identity: LogIdentity
    layout: LogLayout
    file: int
    is_recovered: bool
    """Whether another process has left it: then `is_present` is partly a guess, by headers."""

    is_present: Mask = field(init=False)  # by place
    is_sure: Mask = field(init=False)  # by place: this process wrote it, or staged it (`writer.py`)
    is_written: Mask = field(init=False)  # by place: this process has written it
    is_delivered: Mask = field(init=False)  # by place: a reader has got it in this epoch
    has_header: Mask = field(init=False)  # by segment: the header is in the file
    is_released: Mask = field(init=False)  # by segment: its room is free again, or soon will be
    passed: int = 0  # segments that the reader has passed
    is_filling: bool = False
    """Whether contents of older logs are still being copied to it (`writer.py`)."""

    def __post_init__(self) -> None:
        places, segments = len(self.layout.entries), self.layout.segments
        self.is_present = np.zeros(places, np.bool_)
        self.is_sure = np.zeros(places, np.bool_)
        self.is_written = np.zeros(places, np.bool_)
        self.is_delivered = np.zeros(places, np.bool_)
        self.has_header = np.zeros(segments, np.bool_)
        self.is_released = np.zeros(segments, np.bool_)

    def places_in(self, segment: int) -> "slice[int, int, None]":
        return slice(int(self.layout.first[segment]), int(self.layout.first[segment + 1]))

    def find_present(self, entries: Entries) -> tuple[Places, Mask]:
        """The place of each entry, and whether its content is there."""
        places = self.layout.find(entries)
        is_here = places >= 0
        is_here[is_here] = self.is_present[places[is_here]]
        return places, is_here

    def is_done(self, segment: int) -> bool:
        """Whether readers have got all that a segment has."""
        some = self.places_in(segment)
        return not (self.is_present[some] & ~self.is_delivered[some]).any()


class LogSet:
    """The logs of one version of a dataset, with their counts, pauses and warnings."""

    def __init__(self, snapshot: Snapshot, addresses: LogAddresses | None) -> None:
        """`addresses`, if any, shows the mount's server where entries lie."""
        self.snapshot = snapshot
        self.addresses = addresses
        columns = snapshot.columns
        self.is_logged: Mask = (columns.size > 0) & (columns.flags & MANY_EXTENTS == 0)
        """By entry: whether it is a file with content in one extent."""
        self.is_logged &= kinds(columns.flags) == Kind.FILE
        self.by_order: dict[int, Log] = {}
        """The logs by `Log.order`."""
        self.current_orders: frozenset[int] = frozenset()
        """The digests of the orders that are being read."""
        self.next: frozenset[int] = frozenset()
        """Those of the logs that are written for the next epoch (the *next logs*)."""
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        self._breaker = CircuitBreaker(1, DISK_PAUSE_S)
        self._warned: set[str] = set()

    def next_logs(self) -> list[Log]:
        return [found for digest in self.next if (found := self.by_order.get(digest))]

    def is_read_whole(self, found: Log) -> bool:
        """Whether a log's segments are read whole: a reader has its order, and the log is not being
        filled."""
        return found.order in self.current_orders and not found.is_filling

    def readable(self) -> list[Log]:
        """The logs to read from; none during a pause. Those in the order of a current reader come
        first. Those that are being filled come last: a file is in the older log until it is in the
        new one."""
        if self.is_paused:
            return []
        return sorted(
            [*self.by_order.values()],
            key=lambda each: (each.is_filling, not self.is_read_whole(each)),
        )

    def missing(self, entries: Entries) -> Entries:
        for each in self.readable():
            _, is_here = each.find_present(entries)
            entries = entries[~is_here]
        return entries

    def lacking(self, entries: Entries) -> Mask:
        """For each of these files, whether a next log has a place for it but not its content."""
        wanted = np.zeros(len(entries), np.bool_)
        for each in self.next_logs():
            places = each.layout.find(entries)
            is_there = places >= 0
            is_there[is_there] = ~each.is_sure[places[is_there]]
            wanted |= is_there
        return wanted

    def pieces(
        self, found: Log, places: Places, content: memoryview, start: int
    ) -> list[memoryview]:
        """The contents at these places out of the bytes of a log's file from `start` on."""
        begins = found.layout.offset(places) - start
        sizes = self.snapshot.columns.size[found.layout.entries[places]].astype(np.int64)
        spans = zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
        return [content[begin:end] for begin, end in spans]

    def check(self, found: Log, places: Places, contents: Sequence[memoryview]) -> Mask:
        """Whether each content that was read at these places has its entry's checksum. Wrong ones
        count as absent from now on."""
        checksums = self.snapshot.columns.checksum[found.layout.entries[places]]
        sums = np.fromiter(map(xxh3_64_intdigest, contents), np.uint64, len(contents))
        is_right: Mask = sums == checksums
        if not is_right.all():
            self._note_wrong(found, places[~is_right])
        return is_right

    def _note_wrong(self, found: Log, places: Places) -> None:
        found.is_present[places] = found.is_sure[places] = found.is_written[places] = False
        if self.addresses is not None:
            self.addresses.remove(found.identity.order, found.layout.entries[places])
        # A segment may be released while it is read: then its contents are gone, not damaged
        places = places[~found.is_released[found.layout.segment_of(places)]]
        self.counts["log_wrong"] += len(places)
        # In a log that was taken over, the contents may never have been written
        if len(places) and not found.is_recovered:
            self.warn(
                f"damage {found.identity.order}",
                "%d files in the order log %s are damaged: they are read from the store",
                len(places), found.identity.file_name,
            )  # fmt: skip

    @property
    def is_paused(self) -> bool:
        """Whether the disk failed a short time ago."""
        return self._breaker.is_open(time.monotonic())

    def pause(self, doing: str, error: OSError) -> None:
        """Leave the logs alone for a while. `doing`: for the warning."""
        self._breaker.open(time.monotonic())
        self.warn(
            f"{doing} {error.errno}",
            "cannot %s the order log (%s): files are read from the store; tried again every %.0f s",
            doing, error.strerror, DISK_PAUSE_S,
        )  # fmt: skip

    def warn(self, kind: str, message: str, *details: object) -> None:
        """Log a warning, unless one of this kind was logged before."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *details)


def read_once(file: int, start: int, size: int) -> memoryview:
    """Read a part of a file, and drop it from the page cache. Shorter at the file's end. Raises
    OSError."""
    content = np.empty(size, np.uint8).data
    content = content[: read_into(file, start, content)].toreadonly()
    os.posix_fadvise(file, start, size, POSIX_FADV_DONTNEED)
    return content


def read_into(file: int, start: int, buffer: memoryview) -> int:
    """Fill `buffer` from `start` on. Returns the number of bytes, fewer only at the file's end.
    Raises OSError."""
    done = 0
    while done < len(buffer):
        got = os.preadv(file, [buffer[done:]], start + done)
        if not got:
            break
        done += got
    return done
