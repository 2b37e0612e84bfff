"""Reads a mount's files from order logs, and copies them to the logs of the next epoch.

`LoggedReader` puts `OrderLogs` in front of another reader of a mount's prefetch worker.

Concurrency: one thread calls. `writer.py` has a thread of its own, and `segments.py` reads ahead in
others.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from os import POSIX_FADV_WILLNEED

import numpy as np

from ...format.snapshot.reader import Snapshot
from ...orders.plan import Entries
from ..disk.logs import OrderLogFiles
from ..readers.coalescing_reader import BatchSource, ExtentBatch
from .addresses import LogAddresses
from .layout import SEGMENT_BYTES, Mask, Places
from .log_set import Log, LogSet, read_into
from .segments import SegmentReader
from .streams import LogPlan, StreamLogs
from .writer import LogWriter

STAGED_BYTES = 64 << 20
"""Bytes collected before a write. If they are more, one write has more neighbours of the next
epoch."""

WORTHWHILE_FILE_BYTES = 32 << 10
"""If files are smaller on average, a log is worth its writes to a disk whose speed is unknown."""

SAVED_AT_ONCE, LAST_SEGMENTS = 2, 8
"""Segments that a reader has passed are read whole if the next logs lack some of their entries: at
most `SAVED_AT_ONCE` in one call, so that pushes go on; at the end of an epoch all that are left,
unless these are more than `LAST_SEGMENTS`."""

_GAP_BYTES = 64 << 10  # reading this many unwanted bytes costs less than one more read


class OrderLogs:
    def __init__(
        self,
        snapshot: Snapshot,
        files: OrderLogFiles,
        *,
        staged_bytes: int = STAGED_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        addresses: LogAddresses | None = None,
    ) -> None:
        """`close` closes `files`. `staged_bytes` are collected before a write. `addresses`, if any,
        shows the mount's server where entries lie."""
        self._snapshot = snapshot
        self._streams = StreamLogs(snapshot.identity, snapshot.version)
        self._set = LogSet(snapshot, addresses)
        self._writer = LogWriter(
            self._set, files, staged_bytes=staged_bytes, segment_bytes=segment_bytes
        )
        self._segments = SegmentReader(self._set, self._writer)
        self._read_s = 0.0  # that all reads have taken together

    # The plan

    def set_plan(self, plans: Sequence[LogPlan]) -> None:
        """Set the orders that the streams read in this epoch and the next one. In the background,
        logs are made, taken over from other processes, rewritten and removed."""
        if plans == self._streams.plans:
            return
        self._save_last(plans)
        self._writer.flush()  # to the logs that were next until now
        self._segments.clear()  # contents that are read again shall be written to the new logs
        for name in self._streams.set_plans(plans, self._set.by_order):
            self._set.warn(
                "another order",
                "%s reads another order than was announced: its log is rewritten for this one, or"
                " read file by file",
                name,
            )
        self._set.current_orders = self._streams.current_orders
        self._set.next = frozenset(self._streams.following.values())
        self._writer.change(self._streams.wanted())

    def settle(self) -> None:
        """Wait until the logs are made, and all contents are written."""
        self._writer.settle()

    def passed(self, name: str, position: int) -> None:
        """Note that the reader of a stream has read all before this position of its current order:
        release the segments before that, after they were read for the next logs if need be."""
        self._writer.tidy()
        found = self._set.by_order.get(self._streams.current(name))
        if found is not None:
            behind = int(np.searchsorted(found.layout.position_behind, position, "right"))
            segments = range(found.passed, behind)
            saved = self._save(found, segments, SAVED_AT_ONCE)
            self._writer.release(found, segments[:saved])
            found.passed += saved

    def _save_last(self, plans: Sequence[LogPlan]) -> None:
        """For each reader that goes on to its next epoch, save the rest of its log, unless too much
        is left, as when an order was given up in its middle."""
        stays = {id(order) for each in plans for order in (each.current, each.following)}
        for each in self._streams.plans:
            found = self._log_of(each.current)
            if found is not None and id(each.current) not in stays:
                left = np.flatnonzero(~found.is_released).tolist()
                if len(left) <= LAST_SEGMENTS:
                    self._save(found, left, LAST_SEGMENTS)

    def _save(self, found: Log, segments: Sequence[int], most: int) -> int:
        """Read the segments of which the next logs lack entries, so that these get them: a reader
        that outruns the mount passes segments that the mount has not read. Reads at most `most`
        segments. Returns how many of `segments`, from the first on, may be released."""
        if self._set.is_paused or found.order in self._set.next:  # nothing to save
            return len(segments)
        for at, segment in enumerate(segments):
            some = found.places_in(segment)
            entries = found.layout.entries[some][found.is_present[some]]
            if found.is_released[segment] or not self._writer.lacking(entries).any():
                continue
            if not most:
                return at
            most -= 1
            try:
                self._segments.load(found, segment)
            except OSError as error:
                self._set.pause("read", error)
                break
        return len(segments)

    # Reading

    def read(self, entries: Entries) -> tuple[list[ExtentBatch], Entries]:
        """The checked contents of the files that logs have, and the other files. The contents stay
        valid as long as they are referenced."""
        start_s = time.monotonic()
        batches: list[ExtentBatch] = []
        for each in self._set.readable():
            if not len(entries):
                break
            places, is_here = each.find_present(entries)
            if is_here.any():
                batch, is_read = self._read_from(each, entries[is_here], places[is_here])
                is_here[is_here] = is_read
                batches += batch
                entries = entries[~is_here]
        self._set.counts["log_misses"] += len(entries)
        self._read_s += time.monotonic() - start_s
        return batches, entries

    def prefetch(self, entries: Entries) -> None:
        """Begin to read those of these files that the logs have. Call it once for each file, before
        `read`."""
        for each in self._set.readable():
            places, is_here = each.find_present(entries)
            places = places[is_here]
            if not len(places):
                continue
            if self._set.is_read_whole(each):
                numbers = np.unique(each.layout.segment_of(places)).tolist()
                if not self._segments.prefetch(each, numbers):
                    return
            else:
                sizes = self._snapshot.columns.size[each.layout.entries[places]].tolist()
                offsets = each.layout.offset(places).tolist()
                with contextlib.suppress(OSError):
                    for start, size in zip(offsets, sizes, strict=True):
                        os.posix_fadvise(each.file, start, size, POSIX_FADV_WILLNEED)

    def read_cost_s(self, count: int) -> float:
        """The seconds that `count` files from the logs take, by the mean until now; 0 before the
        first read."""
        hits = self._set.counts["log_hits"]
        return self._read_s / hits * count if hits else 0.0

    def holds(self, order: Entries) -> bool:
        """Whether logs have at least half of an order."""
        return 2 * len(self.missing(order)) <= len(order)

    def _log_of(self, order: Entries | None) -> Log | None:
        digest = self._streams.digest(order)
        return None if digest is None else self._set.by_order.get(digest)

    def missing(self, entries: Entries) -> Entries:
        """The files among these that no log has."""
        return self._set.missing(entries)

    def lacking(self, entries: Entries) -> Entries:
        """The files among these that a next log should have and lacks."""
        return entries[self._writer.lacking(entries)]

    def _read_from(
        self, found: Log, entries: Entries, places: Places
    ) -> tuple[list[ExtentBatch], Mask]:
        """Returns the contents at these places that were right, and for each entry whether it is
        among them."""
        order = np.argsort(places)
        places, entries = places[order], entries[order]
        try:
            if self._set.is_read_whole(found):
                contents, is_right = self._segments.contents(found, places)
            else:
                contents = self._one_by_one(found, places)
                is_right = self._set.check(found, places, contents)
                lacking = np.flatnonzero(is_right & self._writer.lacking(entries))
                self._writer.stage(entries[lacking], [contents[at] for at in lacking.tolist()])
        except OSError as error:
            self._set.pause("read", error)
            return [], np.zeros(len(entries), np.bool_)
        if not is_right.all():
            contents = [contents[at] for at in np.flatnonzero(is_right).tolist()]
        self._set.counts["log_hits"] += len(contents)
        self._set.counts["log_hit_bytes"] += sum(map(len, contents))
        self._deliver(found, places[is_right])
        is_read = np.zeros(len(entries), np.bool_)
        is_read[order[is_right]] = True
        right = entries[is_right].astype(np.int64)
        return [ExtentBatch(right, np.zeros(len(right), np.int64), contents)], is_read

    def _one_by_one(self, found: Log, places: Places) -> list[memoryview]:
        """The contents at these ascending places; near ones are read together."""
        begins = found.layout.offset(places)
        ends = begins + self._set.snapshot.columns.size[found.layout.entries[places]].astype(
            np.int64
        )
        cuts = [0, *(np.flatnonzero(begins[1:] - ends[:-1] > _GAP_BYTES) + 1).tolist(), len(places)]
        contents: list[memoryview] = []
        for first, behind in pairwise(cuts):
            start = int(begins[first])
            read = np.empty(int(ends[behind - 1]) - start, np.uint8).data
            read = read[: read_into(found.file, start, read)].toreadonly()
            self._set.counts["log_reads"] += 1
            some = zip((begins[first:behind] - start).tolist(),
                       (ends[first:behind] - start).tolist(), strict=True)  # fmt: skip
            contents += [read[begin:end] for begin, end in some]
        return contents

    def _deliver(self, found: Log, places: Places) -> None:
        """Note that entries were read, and release the segments that are read to the end."""
        if found.order in self._set.next:  # the next epoch reads them again
            return
        found.is_delivered[places] = True
        if found.is_filling:  # more entries may come to its segments
            return
        segments = np.unique(found.layout.segment_of(places)).tolist()
        self._writer.release(found, [each for each in segments if found.is_done(each)])

    def add(self, batch: ExtentBatch) -> None:
        """Take contents of whole files from elsewhere: copies those that the next logs lack."""
        entries = batch.entries.astype(np.uint32)
        some = np.flatnonzero(self._writer.lacking(entries)).tolist()
        if some:
            contents = [batch.contents[at] for at in some]
            joined, begin = memoryview(b"".join(contents)), 0
            for at, content in enumerate(contents):
                contents[at] = joined[begin : begin + len(content)]
                begin += len(content)
            self._writer.stage(entries[some], contents)

    def flush(self) -> None:
        """Begin to write the staged contents, even if they are few. Does not wait."""
        self._writer.flush_if_idle()

    # The logs as a whole

    def stats(self) -> dict[str, int]:
        """Counts since the start, and the sizes of the logs, in bytes."""
        files = [each.file for each in [*self._set.by_order.values()]]
        next_entries = (np.count_nonzero(each.is_written) for each in self._set.next_logs())
        return {
            **self._set.counts,
            "log_bytes": sum(os.fstat(file).st_blocks * 512 for file in files),
            "log_staged_bytes": self._writer.staged_bytes,
            "log_next_entries": int(sum(next_entries)),
        }

    def close(self) -> None:
        """Write the staged contents, and close the files, which stay for the next mount."""
        self._segments.close()
        self._writer.close()


def is_log_worthwhile(snapshot: Snapshot, memory_bytes: int, file_bytes_max: int) -> bool:
    """Whether order logs are worth their writes, once the orders are known (`ORDER_LOG.md`).
    `memory_bytes` is the mount's memory for contents. From a mean size of `file_bytes_max` on,
    reads of single files are as fast on that disk."""
    sizes = snapshot.columns.size
    total_bytes, files = int(sizes.sum(dtype=np.int64)), int(np.count_nonzero(sizes))
    return total_bytes > memory_bytes and total_bytes < file_bytes_max * files


class LoggedReader:
    """Reads files from order logs, and from another reader the files that the logs do not have."""

    def __init__(self, reader: BatchSource, logs: OrderLogs) -> None:
        """`close` closes `reader` and `logs`."""
        self._reader, self._logs = reader, logs
        # The entries that no log has, of each announced unit (by its entries, as bytes)
        self._rests: dict[bytes, Entries] = {}

    def batches(self, entries: Entries) -> Iterator[ExtentBatch]:
        """As `BatchSource.batches`; the contents from the logs come first."""
        batches, rest = self._logs.read(entries)
        yield from batches
        if len(rest):
            for batch in self._reader.batches(rest):
                self._logs.add(batch)
                yield batch

    def prefetch(self, units: Sequence[Entries]) -> None:
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
        """As `BatchSource.read_costs`; entries in logs add to the transfer."""
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
        return self._reader.is_slow

    def stats(self) -> dict[str, int]:
        return {**self._reader.stats(), **self._logs.stats()}

    def close(self) -> None:
        """Stop reading ahead, and close the reader and the logs."""
        self._reader.close()
        self._logs.close()
