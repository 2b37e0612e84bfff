"""Keeps what a mount reads on a local disk in the order in which it will be read next.

`ORDER_LOG.md` says what an order log is, what lies where in it, and what a crash leaves behind.
`OrderLogs` has the logs of one version of a dataset: of each order that is being read the current
log, and the log of the next epoch, to which what is read is copied meanwhile. Where the next order
is not known yet, what is read is written in the order in which it comes; the next epoch then reads
it entry by entry, which still spares the store.

Every entry is checked when it is read, so a log can be wrong or lost at any time: what it does not
give is read from the store. A failure of the disk is said once, and the logs pause.

Concurrency: one thread calls. A thread of this module makes layouts, writes and releases, in the
order in which that was begun; `add` waits where the disk is more than one write behind. Segments
are read ahead by further threads.
"""

import contextlib
import errno
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from os import POSIX_FADV_DONTNEED, POSIX_FADV_WILLNEED

import numpy as np
from xxhash import xxh3_64_intdigest

from ..errors import BusyError, FormatError
from ..format.entries import Kind
from ..format.snapshot.layout import MANY_EXTENTS, kinds
from ..format.snapshot.reader import Snapshot
from ..orders.plan import NO_ENTRIES, Entries
from ..system.syscalls import punch_hole
from .coalescing_reader import Batch, BatchSource
from .disk.folder import DISK_PAUSE_S
from .disk.logs import OrderLogFiles
from .log_addresses import LogAddresses
from .log_layout import (
    BLOCK_BYTES,
    SEGMENT_BYTES,
    LogCut,
    LogIdentity,
    LogLayout,
    Mask,
    Places,
    header_bytes,
    parse_header,
)

log = logging.getLogger("diesel.mount")

STAGED_BYTES = 64 << 20
"""What is collected before it is written: with it, an entry's neighbours in the next log."""

WORTHWHILE_FILE_BYTES = 32 << 10
"""Files of fewer bytes on average profit from a log (`is_log_worthwhile`)."""

SEGMENTS_HELD, SEGMENTS_AHEAD = 2, 2
"""Of each stream: segments that are in memory since some of their entries are yet to be asked for,
and those that are read ahead."""

SAVED_AT_ONCE, LAST_SEGMENTS = 2, 8
"""At most so many segments that a reader has passed are read at once for the next logs, so that
pushes go on; and so many of an order that it has read to its end, some 32 MiB."""

_GAP_BYTES = 64 << 10  # reading so much for nothing costs less than one more read
_NO_LIMIT = 1 << 62
_TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, slots=True, eq=False)
class LogPlan:
    """What one stream reads: in this epoch and in the next one, each None where it is not known.
    Two are equal where they have the same arrays."""

    name: str
    current: Entries | None
    following: Entries | None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LogPlan)
            and self.name == other.name
            and self.current is other.current
            and self.following is other.following
        )

    __hash__ = None  # type: ignore[assignment]  # it is compared only


@dataclass(slots=True, eq=False)
class _Log:
    """One log: its file, and what is in it."""

    identity: LogIdentity
    layout: LogLayout
    file: int
    is_recovered: bool
    """Whether some of `is_present` is a guess: the entries were written by another process."""

    is_present: Mask = field(init=False)  # by place
    is_sure: Mask = field(init=False)  # by place: this process has written it, or will soon
    is_written: Mask = field(init=False)  # by place: this process has written it
    is_delivered: Mask = field(init=False)  # by place: was read since the log is the current one
    has_header: Mask = field(init=False)  # by segment
    is_released: Mask = field(init=False)  # by segment
    passed: int = 0  # segments that the reader has passed

    def __post_init__(self) -> None:
        places, segments = len(self.layout.entries), self.layout.segments
        self.is_present = np.zeros(places, np.bool_)
        self.is_sure = np.zeros(places, np.bool_)
        self.is_written = np.zeros(places, np.bool_)
        self.is_delivered = np.zeros(places, np.bool_)
        self.has_header = np.zeros(segments, np.bool_)
        self.is_released = np.zeros(segments, np.bool_)


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment in memory: the content at each of its places, and which of them are right."""

    contents: list[memoryview]
    is_right: Mask


@dataclass(slots=True, eq=False)
class _Staged:
    """Contents that wait to be written."""

    entries: list[Entries] = field(default_factory=list)
    contents: list[memoryview] = field(default_factory=list)
    bytes: int = 0


class OrderLogs:
    """The order logs of one version of a dataset (see the module)."""

    def __init__(
        self,
        snapshot: Snapshot,
        files: OrderLogFiles,
        *,
        staged_bytes: int = STAGED_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        addresses: LogAddresses | None = None,
    ) -> None:
        """`close` closes `files`. `addresses` tells another process where entries lie."""
        self._addresses = addresses
        self._snapshot, self._files = snapshot, files
        self._staged_bytes, self._segment_bytes = staged_bytes, segment_bytes
        columns = snapshot.columns
        self._is_logged: Mask = (columns.size > 0) & (columns.flags & MANY_EXTENTS == 0)
        self._is_logged &= kinds(columns.flags) == Kind.FILE
        self._logs: dict[int, _Log] = {}  # by the digest of the order
        # By stream: the digest of the order that it reads; of the log that it reads from; and of
        # the one that is written for its next epoch
        self._current: dict[str, int] = {}
        self._sources: dict[str, int] = {}
        self._following: dict[str, int] = {}
        self._announced: dict[str, int | None] = {}  # the order of the next epoch
        self._in_order: frozenset[int] = frozenset()  # the orders that are being read
        self._next: frozenset[int] = frozenset()  # the logs that are being written
        self._orders: dict[int, Entries] = {}  # by digest
        self._digests: dict[int, tuple[Entries, int]] = {}  # by the array's id; it keeps the array
        self._plans: list[LogPlan] = []
        # Segments that are being read ahead, and the places of what they have
        self._reading: OrderedDict[tuple[int, int], tuple[Future[memoryview], Places]]
        self._reading = OrderedDict()
        self._segments: OrderedDict[tuple[int, int], _Segment] = OrderedDict()
        self._staged = _Staged()
        self._releasing: list[tuple[_Log, int]] = []  # when what is staged is written
        self._writing: Future[None] | None = None
        self._changing: Future[None] | None = None
        self._paused_until_s = 0.0
        self._read_s = 0.0  # that all reads have taken together
        self._said: set[str] = set()
        self._can_punch = True
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        self._thread = ThreadPoolExecutor(1, "order-log")
        self._readers = ThreadPoolExecutor(SEGMENTS_AHEAD, "order-log-read")

    # The plan

    def set_plan(self, plans: Sequence[LogPlan]) -> None:
        """The streams read these orders now and next. Logs of other orders are removed; those that
        are new are made, or taken over as another process has left them, in the background."""
        if plans == self._plans:
            return
        self._save_last(plans)
        self._plans = [*plans]
        self._flush_staged()  # to the logs that were next until now
        self._segments.clear()  # so that what is read again is written to the new ones
        self._reading.clear()
        known, self._digests = self._digests, {}
        orders = dict(self._orders)  # by digest
        for each in plans:
            for order in (each.current, each.following):
                if order is not None:
                    digest = known[id(order)][1] if id(order) in known else self._hash(order)
                    self._digests[id(order)] = order, digest
                    orders[digest] = order
        sources, following = dict[str, int](), dict[str, int]()
        for each in plans:
            # What the reader wants lies in the log of its order; or, where that was not foreseen,
            # in the one that was written while it read the epoch before
            written, announced = self._following.get(each.name), self._announced.get(each.name)
            before = self._sources.get(each.name, written)
            if (current := self._digest(each.current)) is not None:
                is_another = self._current.get(each.name) != current
                source = written if is_another and written is not None else before
                is_there = current in self._logs or source is None
                sources[each.name] = current if is_there or source is None else source
                if is_another and announced is not None and announced != current:
                    self._say(
                        "another order",
                        "%s reads another order than was announced: what the log of that one has is"
                        " read file by file",
                        each.name,
                    )
            next_log = self._digest(each.following)
            if next_log is None and each.name in sources:
                next_log = sources[each.name]
            if next_log is not None:
                following[each.name] = next_log
        currents = [(each.name, each.current) for each in plans if each.current is not None]
        read = {each.name: self._digest(each.current) for each in plans}
        self._current = {name: digest for name, digest in read.items() if digest is not None}
        self._sources, self._following = sources, following
        self._announced = {each.name: self._digest(each.following) for each in plans}
        self._in_order = frozenset(self._current.values())
        self._next = frozenset(following.values())
        wanted = {*sources.values(), *self._next, *self._in_order}
        self._orders = {digest: orders[digest] for digest in wanted}
        gone = [self._logs.pop(digest) for digest in self._logs.keys() - wanted]
        arrivals = _interleaved([order for _, order in currents])
        self._changing = self._thread.submit(
            self._change_logs, gone, self._orders, self._next, arrivals
        )

    def _hash(self, order: Entries) -> int:
        return LogIdentity.of(self._snapshot.identity, self._snapshot.version, order).order

    def _digest(self, order: Entries | None) -> int | None:
        return None if order is None else self._digests[id(order)][1]

    def settle(self) -> None:
        """Wait until the logs are made, and what was added is written."""
        self._flush_staged()
        self._thread.submit(lambda: None).result()

    def passed(self, name: str, position: int) -> None:
        """The reader of a stream has read all before this position of its current order: release
        the segments there, some at a time where they have to be read for the next logs first."""
        digest = self._current.get(name)
        found = self._logs.get(-1 if digest is None else digest)
        if found is not None:
            behind = int(np.searchsorted(found.layout.position_behind, position, "right"))
            segments = range(found.passed, behind)
            saved = self._save(found, segments, SAVED_AT_ONCE)
            self._release_unless_next(found, segments[:saved])
            found.passed += saved

    def _save_last(self, plans: Sequence[LogPlan]) -> None:
        """Where a reader goes on to its next epoch: save what is left of the log of the last one.
        Of an order that was given up in its middle, too much is left."""
        stays = {id(order) for each in plans for order in (each.current, each.following)}
        for each in self._plans:
            found = self._logs.get(self._digests.get(id(each.current), (None, -1))[1])
            if found is not None and id(each.current) not in stays:
                left = np.flatnonzero(~found.is_released).tolist()
                if len(left) <= LAST_SEGMENTS:
                    self._save(found, left, LAST_SEGMENTS)

    def _save(self, found: _Log, segments: Sequence[int], most: int) -> int:
        """Have what the next logs lack of these segments written there, before they are released: a
        reader that outruns the mount passes segments that the mount has not read. At most so many
        are read. Returns how many of the segments, from the first on, may be released."""
        is_paused = time.monotonic() < self._paused_until_s
        if is_paused or found.identity.order in self._next:  # those are not released
            return len(segments)
        first = found.layout.first
        for at, segment in enumerate(segments):
            some = slice(int(first[segment]), int(first[segment + 1]))
            entries = found.layout.entries[some][found.is_present[some]]
            if found.is_released[segment] or not self._lacking(entries).any():
                continue
            if not most:
                return at
            most -= 1
            try:
                self._segment(found, segment)
            except OSError as error:
                self._pause("read", error)
                break
        return len(segments)

    # Reading

    def read(self, entries: Entries) -> tuple[list[Batch], Entries]:
        """What the logs have of these files, checked; and the files that they do not have. The
        contents stay valid as long as they are used."""
        start_s = time.monotonic()
        batches: list[Batch] = []
        for each in self._readable():
            if not len(entries):
                break
            places = each.layout.find(entries)
            is_here = places >= 0
            is_here[is_here] = each.is_present[places[is_here]]
            if is_here.any():
                batch, is_read = self._read_from(each, entries[is_here], places[is_here])
                is_here[is_here] = is_read
                batches += batch
                entries = entries[~is_here]
        self._counts["log_misses"] += len(entries)
        self._read_s += time.monotonic() - start_s
        return batches, entries

    def prefetch(self, entries: Entries) -> None:
        """These files will be asked for soon: begin to read them. Call it once for each."""
        for each in self._readable():
            places = each.layout.find(entries)
            places = places[places >= 0]
            places = places[each.is_present[places]]
            if not len(places):
                continue
            if each.identity.order in self._in_order:
                for segment in np.unique(each.layout.segment_of(places)).tolist():
                    if len(self._reading) >= SEGMENTS_AHEAD * len(self._in_order):
                        # One may have been read ahead for nothing, as the mount had all its files
                        digest, oldest = next(iter(self._reading))
                        if digest != each.identity.order or oldest >= segment - SEGMENTS_AHEAD:
                            return
                        del self._reading[digest, oldest]
                    self._begin_segment(each, segment)
            else:
                sizes = self._snapshot.columns.size[each.layout.entries[places]].tolist()
                offsets = each.layout.offset(places).tolist()
                with contextlib.suppress(OSError):
                    for start, size in zip(offsets, sizes, strict=True):
                        os.posix_fadvise(each.file, start, size, POSIX_FADV_WILLNEED)

    def read_cost_s(self, count: int) -> float:
        """About how long it takes to get so many files out of the logs."""
        hits = self._counts["log_hits"]
        return self._read_s / hits * count if hits else 0.0

    def holds(self, order: Entries) -> bool:
        """Whether most of an order can be read from its own log."""
        found = self._logs.get(self._digests.get(id(order), (order, -1))[1])
        return found is not None and bool(2 * np.count_nonzero(found.is_present) >= len(order))

    def missing(self, entries: Entries) -> Entries:
        """Those of these files that no log has."""
        for each in self._readable():
            places = each.layout.find(entries)
            is_here = places >= 0
            is_here[is_here] = each.is_present[places[is_here]]
            entries = entries[~is_here]
        return entries

    def _readable(self) -> list[_Log]:
        """The logs, those that are in the order of a reader first."""
        if time.monotonic() < self._paused_until_s:
            return []
        return sorted(
            [*self._logs.values()], key=lambda each: each.identity.order not in self._in_order
        )

    def _read_from(self, found: _Log, entries: Entries, places: Places) -> tuple[list[Batch], Mask]:
        """The contents of entries that a log should have, and of which it has them."""
        order = np.argsort(places)
        places, entries = places[order], entries[order]
        try:
            if found.identity.order in self._in_order:
                contents, is_right = self._from_segments(found, places)
            else:
                contents = self._one_by_one(found, places)
                is_right = self._check(found, places, contents)
                lacking = np.flatnonzero(is_right & self._lacking(entries))
                self._stage(entries[lacking], [contents[at] for at in lacking.tolist()])
        except OSError as error:
            self._pause("read", error)
            return [], np.zeros(len(entries), np.bool_)
        if not is_right.all():
            contents = [contents[at] for at in np.flatnonzero(is_right).tolist()]
        self._counts["log_hits"] += len(contents)
        self._counts["log_hit_bytes"] += sum(map(len, contents))
        self._deliver(found, places[is_right])
        is_read = np.zeros(len(entries), np.bool_)
        is_read[order[is_right]] = True
        right = entries[is_right].astype(np.int64)
        return [Batch(right, np.zeros(len(right), np.int64), contents)], is_read

    def _check(self, found: _Log, places: Places, contents: Sequence[memoryview]) -> Mask:
        """Which of these contents are those of their entries."""
        checksums = self._snapshot.columns.checksum[found.layout.entries[places]]
        sums = np.fromiter(map(xxh3_64_intdigest, contents), np.uint64, len(contents))
        is_right: Mask = sums == checksums
        if not is_right.all():
            self._note_wrong(found, places[~is_right])
        return is_right

    def _from_segments(self, found: _Log, places: Places) -> tuple[list[memoryview], Mask]:
        """The contents at these ascending places, out of their segments, each read whole; and which
        of them are right."""
        layout = found.layout
        segments = layout.segment_of(places)
        is_right = np.zeros(len(places), np.bool_)
        contents: list[memoryview] = []
        cuts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(places)]
        for first, behind in pairwise(cuts):
            number, some = int(segments[first]), places[first:behind]
            segment = self._segment(found, number)
            some = some - layout.first[number]
            is_right[first:behind] = segment.is_right[some]
            contents += map(segment.contents.__getitem__, some.tolist())
        return contents, is_right

    def _cut(
        self, found: _Log, number: int, content: memoryview, places: Places
    ) -> list[memoryview]:
        """The contents at these places out of the bytes of their segment."""
        begins = found.layout.offset(places) - found.layout.start[number]
        sizes = self._snapshot.columns.size[found.layout.entries[places]].astype(np.int64)
        spans = zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
        return [content[begin:end] for begin, end in spans]

    def _segment(self, found: _Log, number: int) -> _Segment:
        """A segment, which may have been read ahead. When it has come, all that it has is written
        to the next logs, also what the mount still has in memory. Raises OSError."""
        key = found.identity.order, number
        segment = self._segments.get(key)
        if segment is not None:
            self._segments.move_to_end(key)
            return segment
        self._begin_segment(found, number)
        reading, places = self._reading.pop(key)
        content = reading.result()
        first, behind = int(found.layout.first[number]), int(found.layout.first[number + 1])
        whole = self._cut(found, number, content, np.arange(first, behind))
        contents = whole if len(places) == len(whole) else [whole[at - first] for at in places]
        is_right = self._check(found, places, contents)
        segment = _Segment(whole, np.zeros(behind - first, np.bool_))
        segment.is_right[places[is_right] - first] = True
        if found.identity.order not in self._next:
            entries = found.layout.entries[places]
            lacking = is_right & self._lacking(entries)
            if not lacking.all():
                contents = [contents[at] for at in np.flatnonzero(lacking).tolist()]
            self._stage(entries[lacking], contents)
        self._segments[key] = segment
        while len(self._segments) > SEGMENTS_HELD * max(len(self._in_order), 1):
            (digest, other), _ = self._segments.popitem(last=False)
            if (log_of_other := self._logs.get(digest)) is not None:
                self._release_unless_next(log_of_other, [other])
        return segment

    def _begin_segment(self, found: _Log, number: int) -> None:
        """Begin to read a segment, unless that is done."""
        key = found.identity.order, number
        if key not in self._segments and key not in self._reading:
            start, end = int(found.layout.start[number]), int(found.layout.end[number])
            first, behind = int(found.layout.first[number]), int(found.layout.first[number + 1])
            # What is there before the read begins: more may come meanwhile
            places = np.flatnonzero(found.is_present[first:behind]) + first
            reading = self._readers.submit(_read_once, found.file, start, end - start)
            self._reading[key] = reading, places
            self._counts["log_reads"] += 1

    def _one_by_one(self, found: _Log, places: Places) -> list[memoryview]:
        """The contents at these ascending places; those that lie near each other are read
        together."""
        begins = found.layout.offset(places)
        ends = begins + self._snapshot.columns.size[found.layout.entries[places]].astype(np.int64)
        cuts = [0, *(np.flatnonzero(begins[1:] - ends[:-1] > _GAP_BYTES) + 1).tolist(), len(places)]
        contents: list[memoryview] = []
        for first, behind in pairwise(cuts):
            start = int(begins[first])
            read = np.empty(int(ends[behind - 1]) - start, np.uint8).data
            read = read[: _read_into(found.file, start, read)].toreadonly()
            self._counts["log_reads"] += 1
            some = zip((begins[first:behind] - start).tolist(),
                       (ends[first:behind] - start).tolist(), strict=True)  # fmt: skip
            contents += [read[begin:end] for begin, end in some]
        return contents

    def _note_wrong(self, found: _Log, places: Places) -> None:
        """The contents at these places are not those of their entries."""
        found.is_present[places] = found.is_sure[places] = found.is_written[places] = False
        if self._addresses is not None:
            self._addresses.remove(found.identity.order, found.layout.entries[places])
        # A segment may be released while it is read: what is missing then is not damaged
        places = places[~found.is_released[found.layout.segment_of(places)]]
        self._counts["log_wrong"] += len(places)
        if len(places) and not found.is_recovered:  # else they may never have been written
            self._say(
                f"damage {found.identity.order}",
                "%d files in the order log %s are damaged: they are read from the store",
                len(places), found.identity.file_name,
            )  # fmt: skip

    def _deliver(self, found: _Log, places: Places) -> None:
        """Entries of a log were read: release the segments of which none is left."""
        if found.identity.order in self._next:  # the next epoch reads them again
            return
        found.is_delivered[places] = True
        first = found.layout.first
        done = []
        for segment in np.unique(found.layout.segment_of(places)).tolist():
            some = slice(int(first[segment]), int(first[segment + 1]))
            if not (found.is_present[some] & ~found.is_delivered[some]).any():
                done.append(segment)
        self._release_unless_next(found, done)

    def _release_unless_next(self, found: _Log, segments: Sequence[int]) -> None:
        """Release segments, unless the next epoch reads this log again."""
        if found.identity.order not in self._next:
            self._release(found, [each for each in segments if not found.is_released[each]])

    # Writing

    def add(self, batch: Batch) -> None:
        """These contents were read from elsewhere: those that the next logs have and lack are
        copied, and written there. Contents are whole files."""
        entries = batch.entries.astype(np.uint32)
        some = np.flatnonzero(self._lacking(entries)).tolist()
        if some:
            contents = [batch.contents[at] for at in some]
            joined, begin = memoryview(b"".join(contents)), 0
            for at, content in enumerate(contents):
                contents[at] = joined[begin : begin + len(content)]
                begin += len(content)
            self._stage(entries[some], contents)

    def _stage(self, entries: Entries, contents: Sequence[memoryview]) -> None:
        """Have contents written to the next logs, which stay valid."""
        if not len(entries) or time.monotonic() < self._paused_until_s:
            return
        for found in self._next_logs():
            places = found.layout.find(entries)
            found.is_sure[places[places >= 0]] = True
        self._staged.entries.append(entries)
        self._staged.contents += contents
        self._staged.bytes += sum(map(len, contents))
        if self._staged.bytes >= self._staged_bytes:
            self._flush_staged()

    def _next_logs(self) -> list[_Log]:
        return [found for digest in self._next if (found := self._logs.get(digest))]

    def lacking(self, entries: Entries) -> Entries:
        """Those of these files that a next log should have, and lacks."""
        return entries[self._lacking(entries)]

    def _lacking(self, entries: Entries) -> Mask:
        if self._changing is not None and not self._changing.done():
            return self._is_logged[entries]  # logs are being made, and written to after that
        wanted = np.zeros(len(entries), np.bool_)
        for each in self._next_logs():
            places = each.layout.find(entries)
            is_there = places >= 0
            is_there[is_there] = ~each.is_sure[places[is_there]]
            wanted |= is_there
        return wanted

    def flush(self) -> None:
        """Begin to write what was added, though it is little. Does not wait."""
        if self._staged.contents and (self._writing is None or self._writing.done()):
            self._flush_staged()

    def _flush_staged(self) -> None:
        """Begin to write what is staged; waits where the write before is not done."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        staged, self._staged = self._staged, _Staged()
        if staged.contents:
            self._writing = self._thread.submit(self._write, staged, self._next)
        self._punch_released()

    def _release(self, found: _Log, segments: Sequence[int]) -> None:
        """Free the room of segments, once what was read of them is written to the next logs."""
        for segment in segments:
            found.is_released[segment] = True
            self._releasing.append((found, segment))
        if not self._staged.contents:
            self._punch_released()

    def _punch_released(self) -> None:
        releasing, self._releasing = self._releasing, []
        for found, segment in releasing:
            self._thread.submit(self._punch, found, segment)

    # In the thread of this module

    def _change_logs(
        self,
        gone: Sequence[_Log],
        wanted: Mapping[int, Entries],
        following: frozenset[int],
        arrivals: Entries,
    ) -> None:
        """Remove the logs that are not wanted, and make those that are not there."""
        try:
            # Those that were made meanwhile, by an earlier call
            late = [self._logs.pop(digest) for digest in self._logs.keys() - wanted.keys()]
            for each in [*gone, *late]:
                if self._addresses is not None:
                    self._addresses.remove_log(each.identity.order, each.layout.entries)
                self._files.remove(each.identity.file_name, each.file)
            total = sum(len(wanted[digest]) for digest in following)
            for digest in sorted(wanted, key=following.__contains__):  # current ones first
                share = len(wanted[digest]) / max(total, 1)
                if digest not in self._logs:
                    self._make(digest, wanted[digest], arrivals, share, is_new=digest in following)
                elif digest not in following:
                    os.fdatasync(self._logs[digest].file)
        except OSError as error:
            self._pause("write", error)
        except Exception:  # files are read from the store then
            log.exception("unexpected error in an order log")

    def _limit_bytes(self) -> int:
        """The bytes that the logs of one epoch may take together."""
        limit_bytes = self._files.limit_bytes - 2 * self._staged_bytes - 2 * self._segment_bytes
        return max(limit_bytes if self._can_punch else limit_bytes // 2, 0)

    def _make(
        self, digest: int, order: Entries, arrivals: Entries, share: float, *, is_new: bool
    ) -> None:
        """Open or make the log of an order, which may have this part of the room for the logs of an
        epoch. One that would be only read is not made. Raises OSError."""
        identity = LogIdentity(self._snapshot.identity, self._snapshot.version, digest)
        try:
            file = self._files.open(identity.file_name)
        except BusyError as error:
            self._say(f"busy {digest}", "this mount has no order log: %s", error.message)
            return
        size = os.fstat(file).st_size
        if not size and not is_new:
            self._files.remove(identity.file_name, file)
            return
        try:
            self._check_punching(file)
            cut = LogCut(order, self._snapshot.columns.size, self._is_logged, self._segment_bytes)
            headers = self._read_headers(file, cut, identity) if size else {}
            if headers:
                entries, right = cut.from_headers(headers)
            else:
                entries, right = cut.by_arrival(arrivals), []
            limit_bytes = int(self._limit_bytes() * share) if is_new else _NO_LIMIT
            made = _Log(identity, LogLayout(cut, entries, limit_bytes), file, bool(headers))
        except BaseException:
            os.close(file)
            raise
        for segment in right:
            if segment < made.layout.segments:
                made.has_header[segment] = True
                first, behind = made.layout.first[segment : segment + 2]
                made.is_present[first:behind] = True
        self._counts["log_recovered"] += bool(headers)
        self._logs[digest] = made

    def _check_punching(self, file: int) -> None:
        """Find out whether the file system can release parts of a file."""
        try:
            end = -(-os.fstat(file).st_size // BLOCK_BYTES) * BLOCK_BYTES
            punch_hole(file, end, BLOCK_BYTES)  # behind its end, where nothing is
        except OSError as error:
            if error.errno in _TAKES_NOTHING:
                raise
            self._can_punch = False
            self._say(
                "punch",
                "the file system of the cache folder cannot release parts of a file (%s): each of"
                " the two order logs gets half of the cache's size",
                error.strerror,
            )

    def _read_headers(self, file: int, cut: LogCut, identity: LogIdentity) -> dict[int, Entries]:
        """The headers that a file has, by segment."""
        layout = LogLayout(cut, cut.entries, _NO_LIMIT)  # segments lie alike in all layouts
        found = {}
        for segment in range(layout.segments):
            count = int(layout.first[segment + 1] - layout.first[segment])
            room = memoryview(bytearray(header_bytes(count)))
            room = room[: _read_into(file, int(layout.start[segment]), room)]
            with contextlib.suppress(FormatError):
                found[segment] = parse_header(room, segment, cut, identity)
        return found

    def _write(self, staged: _Staged, digests: frozenset[int]) -> None:
        """Write what was staged to those of these logs that lack it."""
        entries = np.concatenate(staged.entries)
        try:
            for digest in digests:
                found = self._logs.get(digest)
                if found is not None:
                    self._write_to(found, entries, staged.contents)
        except OSError as error:
            self._pause("write", error)
        except Exception:  # files are read from the store then
            log.exception("unexpected error in an order log")

    def _write_to(self, found: _Log, entries: Entries, contents: Sequence[memoryview]) -> None:
        layout = found.layout
        places = layout.find(entries)
        rows = np.flatnonzero(places >= 0)
        rows = rows[~found.is_written[places[rows]]]
        _, first = np.unique(places[rows], return_index=True)
        rows = rows[first]  # by place, each once
        places = places[rows]
        segments = layout.segment_of(places)
        is_open = ~found.is_released[segments]
        rows, places, segments = rows[is_open], places[is_open], segments[is_open]
        if not len(rows):
            return
        sizes = self._snapshot.columns.size[layout.entries[places]].astype(np.int64)
        padding = -sizes % layout.unit
        is_padded = bool(padding.any())
        with_header = np.unique(segments[~found.has_header[segments]]).tolist()
        headers = {segment: layout.header(segment, found.identity) for segment in with_header}
        total = int((sizes + padding).sum()) + sum(map(len, headers.values()))
        if not self._files.take_room(total):
            found.is_sure[places] = False
            self._say("full", "the order log is full: what does not fit is read from the store")
            self._counts["log_refused"] += len(rows)
            return
        for segment, header in headers.items():
            _write_all(found.file, header, int(layout.start[segment]))
            found.has_header[segment] = True
        runs = (np.diff(places) != 1) | (np.diff(segments) != 0)
        cuts = [0, *(np.flatnonzero(runs) + 1).tolist(), len(places)]
        offsets = layout.offset(places)
        for begin, behind in pairwise(cuts):
            pieces: list[memoryview | bytes] = [
                contents[row] for row in rows[begin:behind].tolist()
            ]
            if is_padded:
                zeros = map(bytes, padding[begin:behind].tolist())
                pieces = [each for pair in zip(pieces, zeros, strict=True) for each in pair]
            _write_all(found.file, b"".join(pieces), int(offsets[begin]))
        os.posix_fadvise(found.file, 0, 0, POSIX_FADV_DONTNEED)
        found.is_present[places] = found.is_sure[places] = found.is_written[places] = True
        if self._addresses is not None:
            self._addresses.put(found.identity.order, layout.entries[places], offsets)
        self._counts["log_writes"] += len(cuts) - 1 + len(headers)
        self._counts["log_written_bytes"] += total

    def _punch(self, found: _Log, segment: int) -> None:
        if self._logs.get(found.identity.order) is not found:
            return
        some = slice(int(found.layout.first[segment]), int(found.layout.first[segment + 1]))
        found.is_present[some] = False
        if self._addresses is not None:
            self._addresses.remove(found.identity.order, found.layout.entries[some])
        if not self._can_punch or not (found.has_header[segment] or found.is_recovered):
            return
        start, end = int(found.layout.start[segment]), int(found.layout.end[segment])
        try:
            before = os.fstat(found.file).st_blocks
            punch_hole(found.file, start, end - start)
            freed = (before - os.fstat(found.file).st_blocks) * 512
            self._files.give_room(freed)
            self._counts["log_released_bytes"] += freed
        except OSError as error:
            self._pause("write", error)

    # The whole

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is here, in bytes."""
        return {
            **self._counts,
            "log_bytes": sum(
                os.fstat(each.file).st_blocks * 512 for each in [*self._logs.values()]
            ),
            "log_staged_bytes": self._staged.bytes,
            "log_next_entries": sum(
                int(np.count_nonzero(found.is_written)) for found in self._next_logs()
            ),
        }

    def close(self) -> None:
        """Write what is staged, and let go of the files, which stay for the next mount. Logs that
        hold nothing are removed."""
        with contextlib.suppress(OSError):
            self.settle()
        self._thread.shutdown()
        self._readers.shutdown(cancel_futures=True)
        for each in self._logs.values():
            if each.is_present.any():
                os.close(each.file)
            else:
                self._files.remove(each.identity.file_name, each.file)
        self._logs.clear()
        self._files.close()

    def _pause(self, doing: str, error: OSError) -> None:
        self._paused_until_s = time.monotonic() + DISK_PAUSE_S
        self._say(
            f"{doing} {error.errno}",
            "cannot %s the order log (%s): files are read from the store; tried again every %.0f s",
            doing, error.strerror, DISK_PAUSE_S,
        )  # fmt: skip

    def _say(self, what: str, message: str, *details: object) -> None:
        """Log a warning, once of each kind."""
        if what not in self._said:
            self._said.add(what)
            log.warning(message, *details)


def is_log_worthwhile(snapshot: Snapshot, memory_bytes: int, *, is_next_known: bool) -> bool:
    """The rule of `--cache-layout auto`: whether order logs are worth their writes to the disk
    (`ORDER_LOG.md`)."""
    sizes = snapshot.columns.size
    total_bytes, files = int(sizes.sum(dtype=np.int64)), int(np.count_nonzero(sizes))
    is_small = total_bytes < WORTHWHILE_FILE_BYTES * max(files, 1)
    return bool(is_next_known and is_small and total_bytes > memory_bytes)


class LoggedReader:
    """Contents of files out of order logs, and of another reader what these do not have."""

    def __init__(self, reader: BatchSource, logs: OrderLogs) -> None:
        """Both are this reader's from now on."""
        self._reader, self._logs = reader, logs
        self._rests: dict[bytes, Entries] = {}  # of announced units: what no log has

    def batches(self, entries: Entries) -> Iterator[Batch]:
        """As `BatchSource.batches`; those out of the logs come first."""
        batches, rest = self._logs.read(entries)
        yield from batches
        if len(rest):
            for batch in self._reader.batches(rest):
                self._logs.add(batch)
                yield batch

    def prefetch(self, units: Sequence[Entries]) -> None:
        """As `BatchSource.prefetch`."""
        before, self._rests = self._rests, {}
        for entries in units:
            key = entries.tobytes()
            rest = before.get(key)
            if rest is None:
                self._logs.prefetch(entries)
                rest = self._logs.missing(entries)
            self._rests[key] = rest
        self._reader.prefetch([*self._rests.values()])

    def read_costs(self, units: Sequence[Entries]) -> Sequence[tuple[float, float]]:
        """As `BatchSource.read_costs`; for what the logs have by what reads of them have taken."""
        rests = [self._logs.missing(unit) for unit in units]
        costs = self._reader.read_costs(rests)
        logged = [
            self._logs.read_cost_s(len(u) - len(r)) for u, r in zip(units, rests, strict=True)
        ]
        return [
            (latency_s, transfer_s + log_s)
            for (latency_s, transfer_s), log_s in zip(costs, logged, strict=True)
        ]

    @property
    def is_slow(self) -> bool:
        """Whether reads of the store take long, as far as is known."""
        return self._reader.is_slow

    def stats(self) -> dict[str, int]:
        """Figures of what was read."""
        return {**self._reader.stats(), **self._logs.stats()}

    def close(self) -> None:
        """Stop reading ahead, and let go of the logs."""
        self._reader.close()
        self._logs.close()


_COUNTS = (
    *("log_hits", "log_hit_bytes", "log_misses", "log_reads", "log_writes", "log_written_bytes"),
    *("log_released_bytes", "log_wrong", "log_refused", "log_recovered"),
)


def _interleaved(orders: Sequence[Entries]) -> Entries:
    """Orders that are read side by side, as one: at each moment each is at the same part."""
    if len(orders) < 2:
        return orders[0] if orders else NO_ENTRIES
    moments = [np.linspace(0, 1, len(order), endpoint=False) for order in orders]
    return np.concatenate(orders)[np.argsort(np.concatenate(moments), kind="stable")]


def _read_once(file: int, start: int, size: int) -> memoryview:
    """This part of a file, which is not kept in the kernel's page cache; shorter at the file's end.
    Raises OSError."""
    content = np.empty(size, np.uint8).data
    content = content[: _read_into(file, start, content)].toreadonly()
    os.posix_fadvise(file, start, size, POSIX_FADV_DONTNEED)
    return content


def _read_into(file: int, start: int, buffer: memoryview) -> int:
    """Read from `start` on; how many bytes there were. Raises OSError."""
    done = 0
    while done < len(buffer):
        got = os.preadv(file, [buffer[done:]], start + done)
        if not got:
            break
        done += got
    return done


def _write_all(file: int, content: bytes, start: int) -> None:
    view = memoryview(content)
    while view:
        done = os.pwrite(file, view, start)
        start, view = start + done, view[done:]
