"""Makes, writes and removes order logs, in a thread of its own.

Contents that were read are *staged*: collected until they are worth a write. A segment that was
read is *released*: its part of the file is punched out, so that it takes no room. The thread makes
logs, writes and releases in the order of the calls.

Concurrency: one thread calls; the methods below "In the thread" run in the writer's own. The caller
waits only if the disk is more than one write behind.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from os import POSIX_FADV_DONTNEED

import numpy as np

from ...orders.plan import NO_ENTRIES, Entries
from ...system.syscalls import punch_hole
from ..disk.logs import OrderLogFiles
from .layout import Mask
from .log_set import Log, LogSet, read_once
from .maker import LogMaker
from .streams import WantedLogs

log = logging.getLogger("diesel.mount")


@dataclass(slots=True, eq=False)
class _Staged:
    """Contents that wait to be written."""

    entries: list[Entries] = field(default_factory=list)
    contents: list[memoryview] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True, eq=False)
class _Rewriting:
    """The older logs whose contents are being moved, and the logs that get them."""

    older: list[Log]
    targets: list[Log]
    _log: int = 0  # the index of the next segment's log, and its number
    _segment: int = 0

    @property
    def is_under_way(self) -> bool:
        """Whether there may be segments to move."""
        return self._log < len(self.older)

    def next_segment(self) -> tuple[Log, int] | None:
        """The next segment to move; None after the last one."""
        while self.is_under_way:
            found, segment = self.older[self._log], self._segment
            self._segment += 1
            if segment >= found.layout.segments:
                self._log, self._segment = self._log + 1, 0
            elif not found.is_released[segment]:
                return found, segment
        return None


class LogWriter:
    def __init__(
        self, logs: LogSet, files: OrderLogFiles, *, staged_bytes: int, segment_bytes: int
    ) -> None:
        """`staged_bytes` is the size of a write. `close` closes `files`."""
        self._set, self._files = logs, files
        self._staged_bytes, self._segment_bytes = staged_bytes, segment_bytes
        self._staged = _Staged()
        self._releasing: list[tuple[Log, int]] = []  # to release after the staged contents
        self._writing: Future[None] | None = None
        self._changing: Future[None] | None = None
        self._maker = LogMaker(
            logs,
            files,
            reserved_bytes=2 * staged_bytes + 2 * segment_bytes,
            segment_bytes=segment_bytes,
        )
        self._rewriting = _Rewriting([], [])
        self._retired: list[Log] = []  # in no set any more; `tidy` removes them
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, "order-log")

    @property
    def staged_bytes(self) -> int:
        return self._staged.bytes

    def change(self, wanted: WantedLogs) -> None:
        """Begin to make the missing logs, to rewrite others for orders that were not foreseen, and
        to remove the rest."""
        self._changing = self._thread.submit(self._change_logs, wanted)

    def lacking(self, entries: Entries) -> Mask:
        """For each of these files, whether a next log should have it and lacks it."""
        if self._changing is not None and not self._changing.done():
            # Logs are still being made, and may want any file
            return self._set.is_logged[entries]
        return self._set.lacking(entries)

    def stage(self, entries: Entries, contents: Sequence[memoryview]) -> None:
        """Collect contents, which must not change, for a write to the next logs."""
        if not len(entries) or self._set.is_paused:
            return
        for found in self._set.next_logs():
            places = found.layout.find(entries)
            found.is_sure[places[places >= 0]] = True
        self._staged.entries.append(entries)
        self._staged.contents += contents
        self._staged.bytes += sum(map(len, contents))
        if self._staged.bytes >= self._staged_bytes:
            self.flush()

    def flush(self) -> None:
        """Begin to write the staged contents. Waits for the write before."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        staged, self._staged = self._staged, _Staged()
        if staged.contents:
            self._writing = self._thread.submit(self._write, staged, self._set.next)
        self._punch_released()

    def flush_if_idle(self) -> None:
        if self._staged.contents and (self._writing is None or self._writing.done()):
            self.flush()

    def release(self, found: Log, segments: Sequence[int]) -> None:
        """Free the room of segments, after the staged contents are written. Does nothing if the
        next epoch reads this log again."""
        if found.order in self._set.next:
            return
        for segment in segments:
            if not found.is_released[segment]:
                found.is_released[segment] = True
                self._releasing.append((found, segment))
        if not self._staged.contents:
            self._punch_released()

    def tidy(self) -> None:
        """Remove the files of logs that are read no more. Does not wait."""
        # Here and not in the thread, which could close a file while the caller reads it
        while self._retired:
            each = self._retired.pop()
            self._thread.submit(self._files.remove, each.identity.file_name, each.file)

    def settle(self) -> None:
        """Wait until all is made, rewritten and written."""
        self.flush()
        is_settled = False
        while not is_settled:
            self._thread.submit(lambda: None).result()
            is_settled = not self._retired and not self._rewriting.is_under_way
            self.tidy()

    def close(self) -> None:
        """Write the staged contents, and close the files, which stay for the next mount. Logs that
        hold nothing are removed."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self.flush()
        self._thread.shutdown()
        for each in [*self._set.by_order.values(), *self._retired]:
            if each.is_present.any() and each not in self._retired:
                os.close(each.file)
            else:
                self._files.remove(each.identity.file_name, each.file)
        self._set.by_order.clear()
        self._files.close()

    # In the thread, but for `_punch_released`

    def _punch_released(self) -> None:
        releasing, self._releasing = self._releasing, []
        for found, segment in releasing:
            self._thread.submit(self._punch, found, segment)

    def _change_logs(self, wanted: WantedLogs) -> None:
        try:
            by_order, following = self._set.by_order, wanted.following
            total = sum(len(wanted.orders[digest]) for digest in following)
            shares = {each: len(wanted.orders[each]) / max(total, 1) for each in following}
            before = frozenset(by_order)
            for digest, order in wanted.orders.items():
                if digest not in by_order:
                    self._note_made(self._maker.open(digest, order, shares.get(digest)))
                elif digest not in following:
                    os.fdatasync(by_order[digest].file)
            opened = [by_order[each] for each in wanted.unforeseen & (by_order.keys() - before)]
            self._begin_rewriting(wanted, opened)
            for digest in following - by_order.keys():
                order = wanted.orders[digest]
                self._note_made(self._maker.make(digest, order, wanted.arrivals, shares[digest]))
        except OSError as error:
            self._set.pause("write", error)
        except Exception:  # files are read from the store then
            log.exception("unexpected error in an order log")

    def _note_made(self, made: Log | None) -> None:
        if made is not None:
            self._set.by_order[made.order] = made

    def _begin_rewriting(self, wanted: WantedLogs, opened: Sequence[Log]) -> None:
        """Make logs for unforeseen orders out of logs that no stream wants any more, and retire the
        others of these. `opened`: logs of current orders that other processes have left, which may
        lack contents. Raises OSError."""
        by_order = self._set.by_order
        older = [each for each in by_order.values() if each.order not in wanted.orders]
        filling = [each for each in by_order.values() if each.is_filling and each not in older]
        unforeseen = {each: wanted.orders[each] for each in wanted.unforeseen - by_order.keys()}
        targets = [each.layout.entries for each in (*filling, *opened)]
        entries = np.concatenate([NO_ENTRIES, *unforeseen.values(), *targets])
        if unforeseen or opened:
            found = self._maker.leftovers(entries, [*by_order.values()])
            by_order.update((each.order, each) for each in found)
            older += found
        is_wanted = np.zeros(len(self._set.is_logged), np.bool_)
        is_wanted[entries] = True
        for each in [*older]:
            has = each.layout.entries[each.is_present]
            if 2 * np.count_nonzero(is_wanted[has]) <= len(has):
                older.remove(each)
                self._retire(each)
        if older:
            filling += opened
            for digest, order in unforeseen.items():
                filling += self._made_of(older, digest, order, wanted)
        for each in filling:
            each.is_filling = True
        was_under_way = self._rewriting.is_under_way
        self._rewriting = _Rewriting(older, filling)
        if not was_under_way:
            self._rewrite()

    def _made_of(
        self, older: list[Log], digest: int, order: Entries, wanted: WantedLogs
    ) -> list[Log]:
        """Make the log of an order out of older logs. Returns it if contents must be moved to it.
        If it is one of the older logs, that leaves these. Raises OSError."""
        more_bytes = 0
        if digest in wanted.following:  # other contents are written to it, too
            more_bytes = self._maker.limit_bytes - sum(each.layout.total_bytes for each in older)
        made = self._maker.make_of_older(digest, order, older, more_bytes)
        if made is None:
            return []
        self._set.by_order[digest] = made
        for each in older:
            if each.file == made.file:
                older.remove(each)
                del self._set.by_order[each.order]
                return []
        return [made]

    def _retire(self, found: Log) -> None:
        """Forget a log. `tidy` removes its file."""
        self._set.by_order.pop(found.order, None)
        if self._set.addresses is not None:
            self._set.addresses.remove_log(found.identity.order, found.layout.entries)
        self._retired.append(found)

    def _rewrite(self) -> None:
        """Move some segments of older logs. Other work of this thread comes between two calls."""
        job = self._rewriting
        try:
            left_bytes = max(self._staged_bytes, 2 * self._segment_bytes)
            some: list[tuple[Log, int]] = []
            while left_bytes > 0 and not self._set.is_paused and (part := job.next_segment()):
                some.append(part)
                left_bytes -= self._segment_bytes
            if some:
                self._move(some, job.targets)
            if job.is_under_way and not self._set.is_paused:
                with contextlib.suppress(RuntimeError):  # the thread ends: the files stay
                    if not self._is_closing:
                        self._thread.submit(self._rewrite)
                return
        except OSError as error:
            self._set.pause("rewrite", error)
        for each in job.targets:
            each.is_filling = False
        for each in job.older:
            self._retire(each)
        self._rewriting = _Rewriting([], [])

    def _move(self, segments: Sequence[tuple[Log, int]], targets: Sequence[Log]) -> None:
        """Move the contents of segments to the logs that want them; those that readers have passed
        already, to the next logs. Raises OSError."""
        entries, contents = list[Entries](), list[memoryview]()
        for found, segment in segments:
            some = found.places_in(segment)
            wanted = found.is_present[some] & ~found.is_delivered[some]
            places = np.flatnonzero(wanted) + some.start
            if len(places):
                start, end = int(found.layout.start[segment]), int(found.layout.end[segment])
                content = read_once(found.file, start, end - start)
                self._set.counts["log_reads"] += 1
                pieces = self._set.pieces(found, places, content, start)
                is_right = self._set.check(found, places, pieces)
                entries.append(found.layout.entries[places[is_right]])
                contents += [pieces[at] for at in np.flatnonzero(is_right).tolist()]
        moved = np.concatenate([NO_ENTRIES, *entries])
        for target in targets:
            if not self._write_to(target, moved, contents, is_final=False):
                self._free(segments)
                self._write_to(target, moved, contents)
        is_left = np.ones(len(moved), np.bool_)
        for target in targets:
            places = target.layout.find(moved)
            is_left &= (places < 0) | ~target.is_written[places]
        left = np.flatnonzero(is_left)
        for following in self._set.next_logs() if len(left) else ():
            self._write_to(following, moved[left], [contents[at] for at in left.tolist()])
        self._set.counts["log_rewritten"] += len(moved) - len(left)
        self._free(segments)

    def _free(self, segments: Sequence[tuple[Log, int]]) -> None:
        for found, segment in segments:
            found.is_released[segment] = True
            self._punch(found, segment)

    def _write(self, staged: _Staged, digests: frozenset[int]) -> None:
        """Write staged contents to those of these logs that lack them."""
        entries = np.concatenate(staged.entries)
        try:
            for digest in digests:
                found = self._set.by_order.get(digest)
                if found is not None:
                    self._write_to(found, entries, staged.contents)
        except OSError as error:
            self._set.pause("write", error)
        except Exception:  # files are read from the store then
            log.exception("unexpected error in an order log")

    def _write_to(
        self,
        found: Log,
        entries: Entries,
        contents: Sequence[memoryview],
        *,
        is_final: bool = True,
    ) -> bool:
        """Write the contents that a log lacks. Returns False if it has no room; then they are lost,
        and this is logged, unless `is_final` is False. Raises OSError."""
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
            return True
        sizes = self._set.snapshot.columns.size[layout.entries[places]].astype(np.int64)
        padding = -sizes % layout.unit
        is_padded = bool(padding.any())
        with_header = np.unique(segments[~found.has_header[segments]]).tolist()
        headers = {segment: layout.header(segment, found.identity) for segment in with_header}
        total = int((sizes + padding).sum()) + sum(map(len, headers.values()))
        if not self._files.take_room(total):
            if not is_final:
                return False
            found.is_sure[places] = False
            self._set.warn(
                "full", "the order log is full: what does not fit is read from the store"
            )
            self._set.counts["log_refused"] += len(rows)
            return False
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
        if self._set.addresses is not None:
            self._set.addresses.put(found.identity.order, layout.entries[places], offsets)
        self._set.counts["log_writes"] += len(cuts) - 1 + len(headers)
        self._set.counts["log_written_bytes"] += total
        return True

    def _punch(self, found: Log, segment: int) -> None:
        if self._set.by_order.get(found.order) is not found:
            return
        some = slice(int(found.layout.first[segment]), int(found.layout.first[segment + 1]))
        found.is_present[some] = False
        if self._set.addresses is not None:
            self._set.addresses.remove(found.identity.order, found.layout.entries[some])
        if not self._maker.can_punch or not (found.has_header[segment] or found.is_recovered):
            return
        start, end = int(found.layout.start[segment]), int(found.layout.end[segment])
        try:
            before = os.fstat(found.file).st_blocks
            punch_hole(found.file, start, end - start)
            freed = (before - os.fstat(found.file).st_blocks) * 512
            self._files.give_room(freed)
            self._set.counts["log_released_bytes"] += freed
        except OSError as error:
            self._set.pause("write", error)


def _write_all(file: int, content: bytes, start: int) -> None:
    view = memoryview(content)
    while view:
        done = os.pwrite(file, view, start)
        start, view = start + done, view[done:]
