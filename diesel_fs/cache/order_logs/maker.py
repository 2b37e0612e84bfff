"""Opens and makes the files of order logs, in the thread of `writer.py`.

A log of an order that a stream reads, or will read next, is found by the name of its file. For logs
of other orders, which are unknown, the headers of their segments list the entries.
"""

import contextlib
import errno
import os
from collections.abc import Sequence

import numpy as np

from ...errors import BusyError, FormatError
from ...orders.plan import Entries
from ...system.syscalls import punch_hole
from ..disk.logs import OrderLogFiles
from .layout import (
    BLOCK_BYTES,
    HEAD_BYTES,
    LogCut,
    LogIdentity,
    LogLayout,
    Mask,
    SegmentHeader,
    header_bytes,
    parse_any_header,
    parse_entry_count,
    parse_header,
)
from .log_set import Log, LogSet, read_into

_NO_LIMIT = 1 << 62
_TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_EXTRA_BYTES = 16  # of an entry beside its content, at most: padding, and its part of the header


class LogMaker:
    """Opens and makes logs for a set. The methods raise OSError, and return None for a log that
    another mount uses."""

    def __init__(
        self, logs: LogSet, files: OrderLogFiles, *, reserved_bytes: int, segment_bytes: int
    ) -> None:
        """`reserved_bytes` of the cache's size are not for logs."""
        self._set, self._files = logs, files
        self._reserved_bytes, self._segment_bytes = reserved_bytes, segment_bytes
        self.can_punch = True
        """Whether the file system can release parts of a file."""

    @property
    def limit_bytes(self) -> int:
        """The bytes that the logs of one epoch may take together."""
        limit_bytes = self._files.limit_bytes - self._reserved_bytes
        return max(limit_bytes if self.can_punch else limit_bytes // 2, 0)

    def open(self, digest: int, order: Entries, share: float | None) -> Log | None:
        """The log of an order that another process has left; None also if there is none. It may
        take `share` (a fraction) of the room for the logs of one epoch; None: as much as it has."""
        identity = self._identity(digest)
        with contextlib.suppress(FileNotFoundError):
            file = self._open(identity, makes=False)
            if file is not None and os.fstat(file).st_size:
                with contextlib.ExitStack() as opened:  # after an error it is closed
                    opened.callback(os.close, file)
                    log = self._with_headers(digest, identity, self._cut(order), file, share)
                    opened.pop_all()
                    return log
            if file is not None:
                self._files.remove(identity.file_name, file)
        return None

    def make(self, digest: int, order: Entries, arrivals: Entries, share: float) -> Log | None:
        """A new log of an order, laid out for entries that come in the order `arrivals`."""
        return self._new(digest, self._identity(digest), self._cut(order), arrivals, share)

    def make_of_older(
        self, digest: int, order: Entries, older: Sequence[Log], more_bytes: int
    ) -> Log | None:
        """A new log of those entries of an order that older logs have, and of the first others that
        fit `more_bytes`. It may be the file of an older log that has exactly these entries."""
        arrivals = np.concatenate([each.layout.entries[each.is_present] for each in older])
        is_wanted = np.zeros(len(self._set.is_logged), np.bool_)
        is_wanted[arrivals] = True
        others = order[self._set.is_logged[order] & ~is_wanted[order]]
        stored = self._set.snapshot.columns.size[others].astype(np.int64) + _EXTRA_BYTES
        is_wanted[others[np.cumsum(stored) <= more_bytes]] = True
        cut, identity = self._cut(order, is_wanted), self._identity(digest)
        if len(cut.entries) < np.count_nonzero(self._set.is_logged[order]):
            # The order of the log's own entries names it, as these depend on the older logs
            identity = LogIdentity.of(identity.identity, identity.version, cut.entries)
        for each in older:
            if each.identity == identity:
                return self._with_headers(digest, identity, cut, each.file, None)
        return self._new(digest, identity, cut, arrivals, None)

    def leftovers(self, wanted: Entries, known: Sequence[Log]) -> list[Log]:
        """The logs of other orders that earlier processes have left, if at least half of a log's
        entries are `wanted`; without the logs `known`."""
        is_wanted = np.zeros(len(self._set.is_logged), np.bool_)
        is_wanted[wanted] = True
        found = []
        with contextlib.ExitStack() as opened:  # after an error all are closed
            for name in self._files.names():
                if name in (each.identity.file_name for each in known):
                    continue
                try:
                    file = self._files.open(name, makes=False)
                except (FileNotFoundError, BusyError):
                    continue
                log = self._of_headers(name, file)  # closes it after an error
                if log is None or 2 * np.count_nonzero(is_wanted[log.layout.entries]) < len(
                    log.layout.entries
                ):
                    os.close(file)  # it is removed when its room is needed
                else:
                    found.append(log)
                    opened.callback(os.close, file)
            opened.pop_all()
        return found

    def _limit_bytes(self, share: float | None) -> int:
        return _NO_LIMIT if share is None else int(share * self.limit_bytes)

    def _identity(self, digest: int) -> LogIdentity:
        return LogIdentity(self._set.snapshot.identity, self._set.snapshot.version, digest)

    def _cut(self, order: Entries, is_wanted: Mask | None = None) -> LogCut:
        is_logged = self._set.is_logged if is_wanted is None else self._set.is_logged & is_wanted
        return LogCut(order, self._set.snapshot.columns.size, is_logged, self._segment_bytes)

    def _open(self, identity: LogIdentity, *, makes: bool) -> int | None:
        try:
            return self._files.open(identity.file_name, makes=makes)
        except BusyError as error:
            self._set.warn(
                f"busy {identity.order}", "this mount has no order log: %s", error.message
            )
            return None

    def _new(
        self,
        digest: int,
        identity: LogIdentity,
        cut: LogCut,
        arrivals: Entries,
        share: float | None,
    ) -> Log | None:
        file = self._open(identity, makes=True)
        if file is None:
            return None
        try:
            self._check_punching(file)
            layout = LogLayout(cut, cut.by_arrival(arrivals), self._limit_bytes(share))
        except BaseException:
            os.close(file)
            raise
        return Log(digest, identity, layout, file, is_recovered=False)

    def _with_headers(
        self, digest: int, identity: LogIdentity, cut: LogCut, file: int, share: float | None
    ) -> Log:
        """The log in a file, whose segments lie as in `cut`. Those with a right header count as
        present. After an error the file stays open: it may be that of a log in use."""
        self._check_punching(file)
        headers = self._read_headers(file, cut, identity)
        entries, right = cut.from_headers(headers)
        layout = LogLayout(cut, entries, self._limit_bytes(share))
        made = Log(digest, identity, layout, file, bool(headers))
        for segment in right:
            if segment < made.layout.segments:
                made.has_header[segment] = True
                made.is_present[made.places_in(segment)] = True
        self._set.counts["log_recovered"] += bool(headers)
        return made

    def _check_punching(self, file: int) -> None:
        try:
            end = -(-os.fstat(file).st_size // BLOCK_BYTES) * BLOCK_BYTES
            punch_hole(file, end, BLOCK_BYTES)  # beyond its end, where there is nothing
        except OSError as error:
            if error.errno in _TAKES_NOTHING:
                raise
            self.can_punch = False
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
            size = header_bytes(int(layout.first[segment + 1] - layout.first[segment]))
            content = _read(file, int(layout.start[segment]), size)
            with contextlib.suppress(FormatError):
                found[segment] = parse_header(content, segment, cut, identity)
        return found

    def _of_headers(self, name: str, file: int) -> Log | None:
        """The log in a file of this name, whose order is unknown, up to the first segment without a
        sound header; None if there is no segment, or if the log is of another version."""
        try:
            sizes, headers, starts = self._set.snapshot.columns.size, list[SegmentHeader](), [0]
            with contextlib.suppress(FormatError, OSError):  # ENXIO: the end of the file
                while True:
                    # A segment that was released is a hole
                    start = os.lseek(file, starts[-1], os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES
                    header = self._header_at(file, start)
                    if header.log.file_name != name or not self._fits(header, headers):
                        break
                    headers.append(header)
                    starts[-1:] = [start, start + header.stored_bytes(sizes)]
            if not headers:
                return None
            cut = LogCut.of_segments(
                [each.entries for each in headers], sizes, headers[0].unit, headers[0].segment_bytes
            )
            layout = LogLayout(cut, cut.entries, _NO_LIMIT, starts[:-1])
        except BaseException:
            os.close(file)
            raise
        made = Log(headers[0].log.order, headers[0].log, layout, file, is_recovered=True)
        made.is_present[:] = made.has_header[:] = True
        self._set.counts["log_recovered"] += 1
        return made

    @staticmethod
    def _header_at(file: int, start: int) -> SegmentHeader:
        size = header_bytes(parse_entry_count(_read(file, start, HEAD_BYTES)))
        return parse_any_header(_read(file, start, size))

    def _fits(self, header: SegmentHeader, before: Sequence[SegmentHeader]) -> bool:
        """Whether a header is one of the current version, and continues its log."""
        entries, is_logged = header.entries, self._set.is_logged
        return (
            header.log == self._identity(header.log.order)
            and len(entries) > 0
            and int(entries.max()) < len(is_logged)
            and bool(is_logged[entries].all())
            and all(
                (each.unit, each.segment_bytes) == (header.unit, header.segment_bytes)
                for each in before[-1:]
            )
        )


def _read(file: int, start: int, size: int) -> memoryview:
    content = memoryview(bytearray(size))
    return content[: read_into(file, start, content)]
