"""Makes, writes and removes order logs, in a thread of its own.

Contents that were read are *staged*: collected until there are enough of them to be worth a write.
Among more contents there are more neighbours of the next epoch, which are written together. A
segment that was read is *released*: its part of the file is punched out, so that it takes no room.
The thread makes logs, writes and releases in the order of the calls.

Concurrency: one thread calls; the methods below "In the thread" run in the writer's own thread. The
caller waits only if the disk is more than one write behind.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from os import POSIX_FADV_DONTNEED

import numpy as np

from ...errors import BusyError, FormatError
from ...orders.plan import Entries
from ...system.syscalls import punch_hole
from ..disk.logs import OrderLogFiles
from .layout import (
    BLOCK_BYTES,
    LogCut,
    LogIdentity,
    LogLayout,
    Mask,
    header_bytes,
    parse_header,
)
from .log_set import Log, LogSet, read_into

log = logging.getLogger("diesel.mount")

_NO_LIMIT = 1 << 62
_TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(slots=True, eq=False)
class _Staged:
    """Contents that wait to be written."""

    entries: list[Entries] = field(default_factory=list)
    contents: list[memoryview] = field(default_factory=list)
    bytes: int = 0


class LogWriter:
    """Writes the logs of a set, and releases the segments that were read."""

    def __init__(
        self, logs: LogSet, files: OrderLogFiles, *, staged_bytes: int, segment_bytes: int
    ) -> None:
        """`staged_bytes` is the size of a write, `segment_bytes` that of a segment. `close` closes
        `files`."""
        self._set, self._files = logs, files
        self._staged_bytes, self._segment_bytes = staged_bytes, segment_bytes
        self._staged = _Staged()
        self._releasing: list[tuple[Log, int]] = []  # to release after the staged contents
        self._writing: Future[None] | None = None
        self._changing: Future[None] | None = None
        self._can_punch = True
        self._thread = ThreadPoolExecutor(1, "order-log")

    @property
    def staged_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._staged.bytes

    def change(
        self, wanted: Mapping[int, Entries], following: frozenset[int], arrivals: Entries
    ) -> None:
        """Begin to remove the logs that are not `wanted` (orders by digest), and to make the wanted
        logs that are missing. The logs of `following` will be written; new ones are laid out for
        entries that come in the order `arrivals`."""
        gone = [self._set.by_order.pop(each) for each in self._set.by_order.keys() - wanted.keys()]
        self._changing = self._thread.submit(self._change_logs, gone, wanted, following, arrivals)

    def lacking(self, entries: Entries) -> Mask:
        """For each of these files, whether a next log should have it and lacks it."""
        if self._changing is not None and not self._changing.done():
            # Logs are still being made, which will take any file
            return self._set.is_logged[entries]
        return self._set.lacking(entries)

    def stage(self, entries: Entries, contents: Sequence[memoryview]) -> None:
        """Collect contents for a write to the next logs. The caller must not change them."""
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
        """Begin to write the staged contents. Waits for the write before, if that is not done."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        staged, self._staged = self._staged, _Staged()
        if staged.contents:
            self._writing = self._thread.submit(self._write, staged, self._set.next)
        self._punch_released()

    def flush_if_idle(self) -> None:
        """Begin to write the staged contents, even if they are few. Does not wait."""
        if self._staged.contents and (self._writing is None or self._writing.done()):
            self.flush()

    def release(self, found: Log, segments: Sequence[int]) -> None:
        """Free the room of segments, once their contents are written to the next logs. Does nothing
        if the next epoch reads this log again."""
        if found.identity.order in self._set.next:
            return
        for segment in segments:
            if not found.is_released[segment]:
                found.is_released[segment] = True
                self._releasing.append((found, segment))
        if not self._staged.contents:
            self._punch_released()

    def settle(self) -> None:
        """Wait until the logs are made, and the staged contents are written."""
        self.flush()
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Write the staged contents, and close the files, which stay for the next mount. Logs that
        hold nothing are removed."""
        with contextlib.suppress(OSError):
            self.settle()
        self._thread.shutdown()
        for each in self._set.by_order.values():
            if each.is_present.any():
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

    def _change_logs(
        self,
        gone: Sequence[Log],
        wanted: Mapping[int, Entries],
        following: frozenset[int],
        arrivals: Entries,
    ) -> None:
        """Remove logs (`gone`, and others that are not wanted), and make the missing ones."""
        try:
            # Logs that an earlier call has made since `change` looked
            late = [
                self._set.by_order.pop(digest)
                for digest in self._set.by_order.keys() - wanted.keys()
            ]
            for each in [*gone, *late]:
                if self._set.addresses is not None:
                    self._set.addresses.remove_log(each.identity.order, each.layout.entries)
                self._files.remove(each.identity.file_name, each.file)
            total = sum(len(wanted[digest]) for digest in following)
            for digest in sorted(wanted, key=following.__contains__):  # current ones first
                share = len(wanted[digest]) / max(total, 1)
                if digest not in self._set.by_order:
                    self._make(digest, wanted[digest], arrivals, share, is_new=digest in following)
                elif digest not in following:
                    os.fdatasync(self._set.by_order[digest].file)
        except OSError as error:
            self._set.pause("write", error)
        except Exception:  # files are read from the store then
            log.exception("unexpected error in an order log")

    def _limit_bytes(self) -> int:
        """The bytes that the logs of one epoch may take together."""
        limit_bytes = self._files.limit_bytes - 2 * self._staged_bytes - 2 * self._segment_bytes
        return max(limit_bytes if self._can_punch else limit_bytes // 2, 0)

    def _make(
        self, digest: int, order: Entries, arrivals: Entries, share: float, *, is_new: bool
    ) -> None:
        """Open or make the log of an order, which may take `share` (a fraction) of the room for the
        logs of one epoch. `is_new`: whether it will be written; a log that would only be read is
        not made. Raises OSError."""
        identity = LogIdentity(self._set.snapshot.identity, self._set.snapshot.version, digest)
        try:
            file = self._files.open(identity.file_name)
        except BusyError as error:
            self._set.warn(f"busy {digest}", "this mount has no order log: %s", error.message)
            return
        size = os.fstat(file).st_size
        if not size and not is_new:
            self._files.remove(identity.file_name, file)
            return
        try:
            self._check_punching(file)
            cut = LogCut(
                order, self._set.snapshot.columns.size, self._set.is_logged, self._segment_bytes
            )
            headers = self._read_headers(file, cut, identity) if size else {}
            if headers:
                entries, right = cut.from_headers(headers)
            else:
                entries, right = cut.by_arrival(arrivals), []
            limit_bytes = int(self._limit_bytes() * share) if is_new else _NO_LIMIT
            made = Log(identity, LogLayout(cut, entries, limit_bytes), file, bool(headers))
        except BaseException:
            os.close(file)
            raise
        for segment in right:
            if segment < made.layout.segments:
                made.has_header[segment] = True
                first, behind = made.layout.first[segment : segment + 2]
                made.is_present[first:behind] = True
        self._set.counts["log_recovered"] += bool(headers)
        self._set.by_order[digest] = made

    def _check_punching(self, file: int) -> None:
        """Find out whether the file system can release parts of a file."""
        try:
            end = -(-os.fstat(file).st_size // BLOCK_BYTES) * BLOCK_BYTES
            punch_hole(file, end, BLOCK_BYTES)  # behind its end, where nothing is
        except OSError as error:
            if error.errno in _TAKES_NOTHING:
                raise
            self._can_punch = False
            self._set.warn(
                "punch",
                "the file system of the cache folder cannot release parts of a file (%s): each of"
                " the two order logs gets half of the cache's size",
                error.strerror,
            )

    def _read_headers(self, file: int, cut: LogCut, identity: LogIdentity) -> dict[int, Entries]:
        """The entries that the headers of a file list, by segment; without unsound headers."""
        layout = LogLayout(cut, cut.entries, _NO_LIMIT)  # segments lie alike in all layouts
        found = {}
        for segment in range(layout.segments):
            count = int(layout.first[segment + 1] - layout.first[segment])
            room = memoryview(bytearray(header_bytes(count)))
            room = room[: read_into(file, int(layout.start[segment]), room)]
            with contextlib.suppress(FormatError):
                found[segment] = parse_header(room, segment, cut, identity)
        return found

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

    def _write_to(self, found: Log, entries: Entries, contents: Sequence[memoryview]) -> None:
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
        sizes = self._set.snapshot.columns.size[layout.entries[places]].astype(np.int64)
        padding = -sizes % layout.unit
        is_padded = bool(padding.any())
        with_header = np.unique(segments[~found.has_header[segments]]).tolist()
        headers = {segment: layout.header(segment, found.identity) for segment in with_header}
        total = int((sizes + padding).sum()) + sum(map(len, headers.values()))
        if not self._files.take_room(total):
            found.is_sure[places] = False
            self._set.warn(
                "full", "the order log is full: what does not fit is read from the store"
            )
            self._set.counts["log_refused"] += len(rows)
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
        if self._set.addresses is not None:
            self._set.addresses.put(found.identity.order, layout.entries[places], offsets)
        self._set.counts["log_writes"] += len(cuts) - 1 + len(headers)
        self._set.counts["log_written_bytes"] += total

    def _punch(self, found: Log, segment: int) -> None:
        if self._set.by_order.get(found.identity.order) is not found:
            return
        some = slice(int(found.layout.first[segment]), int(found.layout.first[segment + 1]))
        found.is_present[some] = False
        if self._set.addresses is not None:
            self._set.addresses.remove(found.identity.order, found.layout.entries[some])
        if not self._can_punch or not (found.has_header[segment] or found.is_recovered):
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
