"""Several archives as a source: each is fetched once, decompressed and packed (`ingest/README.md`).

Threads take the archives in their order; each fetches, decompresses and packs one at a time.
(Decompressing, hashing and copying release the interpreter's lock.)

**Skipped archives.** An archive that was put completely is recorded (`ArchiveRecord`), so that a
later put skips it. If another dataset that the caller may read has an archive of the same SHA-256,
its entries are copied from there.

**Order.** If several archives have a file or link at one path, the archive that the user named last
wins. Archives are packed side by side, so at the end the winner is read again for such paths, even
if it was skipped. An archive's record lists the archives that won over it (`yields_to`). A later
put skips it only if they are named behind it again.
"""

import contextlib
import io
import logging
import os
import tarfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO, NamedTuple, Protocol, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from ...cache.readers.entry_file import EntryFile
from ...cache.readers.entry_reader import EntryReader
from ...errors import DieselError, NotFoundError, UsageError
from ...format.entries import ChunkId, Kind
from ...format.snapshot.reader import Indices, Snapshot
from ...repository.interface import Repository
from ...repository.provenance import OTHERS_BYTES_MAX, ArchiveRecord, LiveFiles, source_id
from ...repository.validation import ValidatedChunk
from ...repository.writing import WriteSession
from ..compare import Comparer
from ..options import Filter, PutOptions, PutReport
from ..packer import FileSkipped, Packer
from ..paths import source_path, target_path
from ..put import PutWork, Source
from .archive_file import ArchiveFile
from .compression import (
    BROKEN_STREAM,
    BufferedStream,
    Decompressor,
    TrailingBytes,
    decompressed,
)
from .members import READ_BYTES, MemberLog, MemberTaker
from .tar import START_BYTES, TarEntries, is_tar
from .zip import ZIP_MAGICS, ZipEntries

log = logging.getLogger("diesel.ingest")

_BROKEN: tuple[type[Exception], ...] = (FileSkipped, *BROKEN_STREAM)
_SIDE_BY_SIDE_MAX = 8  # archives: for each, some 100 MiB are in memory
_LOOKS = 16  # requests at once
_COUNTED_BYTES = 64 << 20  # a longer compressed file is decompressed twice
_COPY_MEMORY_BYTES = 256 << 20
_YIELDS_MAX = 4096  # of `yields_to`; with more, the record stays, and the archive is read again
_SUFFIXES = (b".gz", b".bz2", b".xz", b".zst", b".zstd")


class ArchiveState(NamedTuple):
    tag: str
    """Changes with the bytes at this address: an ETag or mtime; "" if not known."""
    size: int
    """0 if it is not known."""
    modified_ns: int
    """0 if it is not known."""


class Archive(Protocol):
    """A local file or an address on the web. One thread at a time."""

    @property
    def name(self) -> str:
        """The displayed address, without a query."""
        ...

    @property
    def address(self) -> str: ...

    @property
    def file_name(self) -> str:
        """The name without folders."""
        ...

    @property
    def sha256(self) -> bytes:
        """The SHA-256 that the archive must have; empty if none is given."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether reading it twice is cheap."""
        ...

    def look(self) -> ArchiveState:
        """Find the archive's state. Raises NotFoundError, PermissionDenied, ObjectStoreError."""
        ...

    def open(self, state: ArchiveState) -> ArchiveFile:
        """Open the archive in this state. Raises as `look`, and OSError; reading raises OSError."""
        ...

    def stop(self) -> None:
        """End waits that a server has requested (`Retry-After`). Any thread; repeatable."""
        ...


class _Log(MemberLog):
    """The members of one archive that were taken, and those that the dataset had already."""

    def __init__(self, target: bytes) -> None:
        self._target = target
        self.paths = array("Q")  # hashes of the paths of files and links
        self.others: list[bytes] = []  # paths of links and folders in the dataset
        self.unchanged: list[int] = []  # indices of entries in the dataset before the put
        self.entries = 0

    def add_files(self, prefix: bytes, names: Sequence[bytes]) -> None:
        self.paths.extend(xxh3_64_intdigest(prefix + name) for name in names)
        self.entries += len(names)

    def add_other(self, path: bytes, *, is_link: bool) -> None:
        self.others.append(target_path(self._target, path))
        if is_link:
            self.paths.append(xxh3_64_intdigest(path))
        self.entries += 1

    def add_unchanged(self, index: int) -> None:
        self.unchanged.append(index)


class _OnlyThese(Filter):
    """Takes the paths that `taken` takes, if their hashes are in `hashes`."""

    def __init__(self, taken: Filter, hashes: Set[int]) -> None:
        self._taken = taken
        self._hashes = hashes
        self.includes_all = False

    def excludes(self, path: bytes, *, is_folder: bool) -> bool:
        return xxh3_64_intdigest(path) not in self._hashes or self._taken.excludes(
            path, is_folder=is_folder
        )


class _Original(NamedTuple):
    """Another dataset's record of an archive of the same bytes."""

    view: Snapshot
    record: ArchiveRecord


@dataclass(slots=True)
class _Job:
    """One archive to put. `record` is of an earlier put or of this one; the members are copied
    from `original` if another dataset has them."""

    archive: Archive
    state: ArchiveState
    log: _Log
    record: ArchiveRecord | None = None
    is_skipped: bool = False
    original: _Original | None = None
    is_single: bool = False
    """Whether it is one compressed file, whose path comes from its address."""


@dataclass(slots=True)
class _ArchiveGroup:
    """Archives that are packed into common chunks: one, or several that together are smaller than a
    chunk."""

    jobs: list[_Job] = field(default_factory=list)
    bytes: int = 0
    chunks: dict[ChunkId, int] = field(default_factory=dict)
    """The number of files (extents) in each committed chunk."""


class ArchivesSource(Source):
    """Several archives. The report names one that cannot be read, and the put continues with the
    others."""

    shadowed_reason = "it is a folder of an archive, too"

    def __init__(self, archives: Sequence[Archive]) -> None:
        self._archives = archives
        self._jobs: list[_Job] = []
        self._missing: list[tuple[Archive, DieselError]] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        """Look at all archives. Raises the first error if no archive can be read."""

        def look(archive: Archive) -> ArchiveState | DieselError:
            try:
                return archive.look()
            except DieselError as error:
                return error

        with ThreadPoolExecutor(_LOOKS, "look") as threads:
            try:
                states = list(threads.map(look, self._archives))
            except BaseException:
                self._stop()
                raise
        for archive, state in zip(self._archives, states, strict=True):
            if isinstance(state, DieselError):
                self._missing.append((archive, state))
            else:
                self._jobs.append(_Job(archive, state, _Log(target)))
        if not self._jobs:
            if self._missing:
                raise self._missing[0][1]
            raise NotFoundError("there is no archive to put")

    def start(self, work: PutWork) -> Comparer:
        comparer = super().start(work)
        work.report.archives = len(self._archives)
        for archive, error in self._missing:
            work.report.fail(os.fsencode(archive.name), error.message)
        return comparer

    def count(self) -> bool:
        for job in self._jobs:
            self._take_one(job, self._work, None)
        self._work.report.walked = True
        return not self._work.report.failed

    def pack(self, session: WriteSession) -> bool:
        self._session = session
        self._skip_recorded()
        todo = [job for job in self._jobs if not job.is_skipped]
        batches = _batches(todo, self._work.options.chunk_bytes)
        if batches:
            self._run(batches)
        self._settle_order()
        self._work.report.walked = True
        return not self._work.report.failed

    def published(self, session: WriteSession) -> None:
        """Rewrite the records of archives that lost entries to this put. If a file was left out,
        its archive's record stays, although out of date: a later put reads the archive again."""
        target = self._work.target
        left_out = {
            xxh3_64_intdigest(source_path(target, path)) for path, _ in self._work.report.failed
        }
        recorded = [
            job
            for job in self._jobs
            if job.record is not None and left_out.isdisjoint(job.log.paths)
        ]
        if not recorded:
            return
        live = LiveFiles(self._work.repository.view(session.name))
        last_of = _contested(self._jobs)
        for job in recorded:
            assert job.record is not None
            files, others = tuple(live.counts(job.record.chunks)), live.others(job.record)
            beaten_by = last_of.yields.get(id(job), [])
            if job.is_skipped and files != job.record.files:  # its paths are not known
                behind = self._jobs[self._jobs.index(job) + 1 :]
                beaten_by = [each for each in behind if not each.is_skipped]
            later = {self._source_id(each) for each in beaten_by}
            yields_to = tuple(sorted(later.union(job.record.yields_to)))
            now = replace(job.record, files=files, others=others, yields_to=yields_to)
            if now != job.record and len(yields_to) <= _YIELDS_MAX:
                self._work.repository.record_archive(session.identity, replace(now, is_alone=False))

    # Finding the archives that need not be read

    def _skip_recorded(self) -> None:
        """Skip archives whose entries the dataset still has; find copies of others elsewhere."""
        options, repository = self._work.options, self._work.repository
        if options.checksum or options.delete:
            return
        records = repository.archive_records(self._session.identity)
        mine = [record for record in records if record.target == self._work.target]
        by_source = {record.source_id: record for record in mine}
        live = LiveFiles(self._work.view, self._work.readable.lost) if mine else None
        place_of = {self._source_id(job): place for place, job in enumerate(self._jobs)}
        for place, job in enumerate(self._jobs):
            record = by_source.get(self._source_id(job))
            if record is None or not _is_unchanged(job, record):
                record = self._of_same_content(job, mine)
            if record is None or live is None or not live.has_all(record):
                continue
            if all(place_of.get(later, -1) > place for later in record.yields_to):
                job.record, job.is_skipped = record, True
                self._work.report.unchanged += record.entries
                self._work.report.archives_skipped += 1
        self._find_originals([job for job in self._jobs if not job.is_skipped])

    def _source_id(self, job: _Job) -> bytes:
        options = self._work.options
        filters = "".join(f"\n+{each}" for each in options.include)
        filters += "".join(f"\n-{each}" for each in options.exclude)
        return source_id(job.archive.address + filters)

    def _of_same_content(self, job: _Job, records: Sequence[ArchiveRecord]) -> ArchiveRecord | None:
        """The record of an archive with the same SHA-256. A local archive is hashed for that;
        others need a given SHA-256."""
        if not self._work.path_filter.includes_all:
            return None
        same_size = [each for each in records if each.size == job.state.size and each.sha256]
        if not same_size:
            return None
        sha256 = job.archive.sha256
        if not sha256 and job.archive.is_local:
            try:
                with contextlib.closing(job.archive.open(job.state)) as file:
                    sha256 = file.sha256()
            except (NotFoundError, OSError):
                return None  # reading it will report the reason
        return next((each for each in same_size if each.sha256 == sha256), None)

    def _find_originals(self, jobs: Sequence[_Job]) -> None:
        """Find copies in other datasets; those that cannot be read are left out."""
        wanted = [job for job in jobs if job.archive.sha256 or job.archive.is_local]
        repository = self._work.repository
        for info in repository.datasets() if wanted else ():
            if info.identity == self._session.identity:
                continue
            try:
                records = [
                    each for each in repository.archive_records(info.identity) if each.is_alone
                ]
                found = [(job, self._of_same_content(job, records)) for job in wanted]
                if not any(record for _, record in found):
                    continue
                view = repository.view_of(info)
            except DieselError as error:
                log.info("dataset %s is not looked at for archives: %s", info.name, error.message)
                continue
            live = LiveFiles(view)
            for job, record in found:
                if record is not None and live.has_all(record):
                    job.original = _Original(view, record)

    # Reading, packing

    def _run(self, batches: Sequence[_ArchiveGroup]) -> None:
        """Raises the first error of a thread."""
        waiting = iter(batches)
        count = min(self._work.options.processes, len(batches), _SIDE_BY_SIDE_MAX)
        ended = threading.Semaphore(0)

        def run() -> None:
            try:
                while self._error is None:
                    with self._lock:
                        batch = next(waiting, None)
                    if batch is None:
                        return
                    self._put(batch)
            except BaseException as error:
                self._error = self._error or error
                self._stop()
            finally:
                ended.release()

        threads = [threading.Thread(target=run, name="unpack", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            left = count
            while left:
                left -= ended.acquire(timeout=0.2)
                self._report_progress()
        except BaseException as error:
            self._error = self._error or error
            self._stop()
            raise
        finally:
            for thread in threads:
                thread.join()
            self._report_progress()
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        for archive in self._archives:
            archive.stop()

    def _report_progress(self) -> None:
        with self._lock:
            self._work.progress(self._work.report)

    def _put(self, batch: _ArchiveGroup) -> None:
        """Runs in one of the threads. Records the archives that are complete."""
        work = self._work
        report = PutReport()

        def committed(chunk: ValidatedChunk, entries: int) -> None:
            kinds = chunk.batch.rows.records["kind"]
            batch.chunks[chunk.batch.chunk.id] = int(np.count_nonzero(kinds == Kind.FILE))
            work.report.add_chunk(chunk, entries)

        packer = self._packer(committed)
        own = replace(work, report=report, progress=lambda _: self._check_running())
        whole: list[tuple[_Job, float, bytes]] = []
        try:
            for job in batch.jobs:
                begun_s = time.monotonic()
                found, sha256 = self._take_one(job, own, packer)
                if found:
                    whole.append((job, time.monotonic() - begun_s, sha256))
            begun_s = time.monotonic()
            packer.finish()
            stored_s = (time.monotonic() - begun_s) / max(len(whole), 1)
        finally:
            packer.close()
            with self._lock:
                work.report.entries_found += report.entries_found
                work.report.unchanged += report.unchanged
                work.report.hard_links += report.hard_links
                work.report.backslashes += report.backslashes
                work.report.stripped += packer.stripped
                work.report.failed += report.failed
        for job, seconds, sha256 in whole:
            self._record(batch, job, seconds + stored_s, sha256)

    def _packer(self, committed: Callable[[ValidatedChunk, int], None]) -> Packer:
        """A packer that uses the session, and calls `committed`, only under the lock."""
        session, options = self._session, self._work.options

        def new_id(writer_of: ChunkId | None) -> ChunkId:
            self._check_running()  # otherwise Ctrl-C would wait for the end of a large member
            with self._lock:
                return session.new_id(writer_of)

        def commit(preamble: bytes, header: bytes, entries: int) -> None:
            with self._lock:
                committed(session.commit(preamble, header), entries)

        return Packer(
            session.identity, options.chunk_bytes, options.compress, session.objects, new_id, commit
        )

    def _check_running(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_one(self, job: _Job, work: PutWork, packer: Packer | None) -> tuple[bool, bytes]:
        """Returns whether the archive was complete, and its SHA-256. The report names its faults.
        Raises DieselError if the put cannot go on."""
        name = job.archive.name
        failed = len(work.report.failed)
        taker = MemberTaker(work, self._comparer, packer, job.log)
        try:
            if job.original is not None:
                reason, sha256 = _copy(job.original, taker), job.original.record.sha256
            else:
                reason, sha256 = self._fetch_members(job, taker)
        except (UsageError, OSError) as error:
            reason, sha256 = getattr(error, "message", "") or str(error), b""
        self._copy_hard_links(taker, packer)
        if reason:
            work.report.fail(os.fsencode(name), reason)
        else:
            self._name_failures(work, failed, name)
        return not reason and len(work.report.failed) == failed, sha256

    def _fetch_members(self, job: _Job, taker: MemberTaker) -> tuple[str, bytes]:
        """Returns why the archive broke off (or ""), and its SHA-256. A given SHA-256 is verified
        before any member is taken. Raises UsageError, OSError."""
        expected = job.archive.sha256
        if expected:
            with contextlib.closing(_opened(job)) as file:
                reason = _difference(expected, file.sha256(self._check_running))
                if reason:
                    return reason, b""
                if file.seekable():
                    file.rewind()
                    return self._take_hashed(job, file, taker)
        with contextlib.closing(_opened(job)) as file:
            return self._take_hashed(job, file, taker)

    def _take_hashed(self, job: _Job, file: ArchiveFile, taker: MemberTaker) -> tuple[str, bytes]:
        reason = self._take_members(job, file, taker)
        sha256 = file.sha256(self._check_running) if not reason else b""
        return reason or _difference(job.archive.sha256, sha256), sha256

    def _copy_hard_links(self, taker: MemberTaker, packer: Packer | None) -> None:
        if packer is None or not taker.has_hard_links:
            return
        packer.finish()
        with self._lock:
            self._session.finish()
        taker.copy_hard_links(self._work.repository.view(self._session.name))

    def _name_failures(self, work: PutWork, start: int, name: str) -> None:
        if len(self._archives) > 1:
            for at in range(start, len(work.report.failed)):
                path, reason = work.report.failed[at]
                work.report.failed[at] = path, f"{reason} (in {name})"

    def _take_members(self, job: _Job, file: ArchiveFile, taker: MemberTaker) -> str:
        """Returns why an archive of any kind broke off, or ""."""
        buffered = io.BufferedReader(file, READ_BYTES)
        try:
            if buffered.peek(4)[:4] in ZIP_MAGICS:
                if not file.seekable():
                    return "the server sends no parts of it, which a zip needs: download it"
                with contextlib.closing(ZipEntries(cast("BinaryIO", buffered))) as entries:
                    return entries.take_all(taker)
            with contextlib.closing(decompressed(cast("BinaryIO", buffered))) as content:
                if is_tar(content.peek(START_BYTES)[:START_BYTES]):
                    return TarEntries(content).take_all(taker)
                if isinstance(content, BufferedStream):
                    return "it is no archive: tar, zip, gzip, bzip2, xz and Zstandard are known"
                return self._take_single(job, content, taker)
        except BROKEN_STREAM as error:
            return f"it is damaged or cut off: {error}"
        finally:
            buffered.detach()

    def _take_single(self, job: _Job, content: Decompressor, taker: MemberTaker) -> str:
        """Take one compressed file. Its size must be known before packing, so a file longer than
        `_COUNTED_BYTES` is decompressed twice. Returns why it broke off, or ""."""
        member = tarfile.TarInfo()
        member.mode = 0o644
        job.is_single = True
        reason = ""
        start = content.read(_COUNTED_BYTES)
        member.size = len(start)
        try:
            while part := content.read(READ_BYTES):
                member.size += len(part)
                taker.work.progress(taker.work.report)
        except TrailingBytes as error:
            reason = str(error)
        path = os.fsencode(job.archive.file_name)
        suffix = next((each for each in _SUFFIXES if path.lower().endswith(each)), b"")
        path = path[: len(path) - len(suffix)]
        if member.size <= len(start):
            taker.take(path, member, job.state.modified_ns, partial(io.BytesIO, start))
            return reason
        with contextlib.closing(_opened(job)) as again:
            same = decompressed(cast("BinaryIO", again))
            try:
                taker.take(path, member, job.state.modified_ns, lambda: cast("BinaryIO", same))
            except _BROKEN as error:
                return f"it is damaged or has changed: {error}"
            finally:
                same.close()
        return reason

    def _record(self, batch: _ArchiveGroup, job: _Job, seconds: float, sha256: bytes) -> None:
        if sum(map(len, job.log.others)) > OTHERS_BYTES_MAX:
            return
        view, chunks = self._work.view, dict(batch.chunks)
        files = [index for index in job.log.unchanged if view.stat(index).kind == Kind.FILE]
        if files:
            numbers = sorted({*view.chunk_of(files).tolist()})
            before = [view.chunk_ids[number] for number in numbers]
            chunks.update(zip(before, LiveFiles(view).counts(before), strict=True))
        # Another put of the same bytes may take other members, or other names
        is_like_others = self._work.path_filter.includes_all and not job.is_single
        job.record = ArchiveRecord(
            source=os.fsencode(job.archive.name).decode("utf-8", "backslashreplace"),
            source_id=self._source_id(job),
            target=self._work.target,
            tag=job.state.tag,
            size=job.state.size,
            sha256=sha256 if is_like_others else b"",
            seconds=seconds,
            entries=job.log.entries,
            is_alone=len(batch.jobs) == 1 and not files,
            chunks=tuple(sorted(chunks)),
            files=tuple(chunks[chunk] for chunk in sorted(chunks)),
            others=tuple(job.log.others),
        )
        self._work.repository.record_archive(self._session.identity, job.record)

    # Members with one path in several archives

    def _settle_order(self) -> None:
        """If several archives have a member at one path, read the last of them again, since its
        member counts. Raises DieselError."""
        read = [job for job in self._jobs if not job.is_skipped]
        contested = _contested(read).last
        view = self._newest_view() if contested else None
        for job, hashes in contested:
            assert view is not None
            self._read_again(job, view, hashes)
        first = self._jobs.index(read[0]) if read else len(self._jobs)
        live: LiveFiles | None = None
        for place, job in enumerate(self._jobs[first:], first):
            if not job.is_skipped:
                continue
            if live is None:
                view = self._newest_view()
                live = LiveFiles(view)
            assert view is not None
            assert job.record is not None
            if not live.has_all(job.record):  # an earlier archive has replaced an entry of it
                hashes = _paths(self._jobs[:place]) - _paths(self._jobs[place + 1 :])
                self._read_again(job, view, hashes)
                live = None

    def _newest_view(self) -> Snapshot:
        self._session.finish()
        return self._work.repository.view(self._session.name)

    def _read_again(self, job: _Job, view: Snapshot, hashes: Set[int]) -> None:
        """Take the members with these hashes of paths again, unless `view`, the dataset now, has
        equal contents. Raises DieselError."""
        comparer = Comparer(
            view, self._work.target, self._work.options,
            _OnlyThese(self._work.path_filter, hashes), lambda _: True,
        )  # fmt: skip
        chunks: dict[ChunkId, int] = {}

        def committed(chunk: ValidatedChunk, entries: int) -> None:
            chunks[chunk.batch.chunk.id] = chunk.files
            self._work.report.add_chunk(chunk, entries)

        packer = self._packer(committed)
        work = replace(
            self._work, path_filter=comparer.path_filter, report=PutReport(),
            options=replace(self._work.options, checksum=True),
            progress=lambda _: self._check_running(),
        )  # fmt: skip
        taker = MemberTaker(work, comparer, packer, job.log if job.is_skipped else None)
        try:
            with contextlib.closing(_opened(job)) as file:
                reason = self._take_members(job, file, taker)
            self._copy_hard_links(taker, packer)
            packer.finish()
        except OSError as error:
            reason = str(error)
        finally:
            packer.close()
        if reason:
            self._work.report.fail(os.fsencode(job.archive.name), reason)
        elif job.record is not None and chunks:
            both = dict(zip(job.record.chunks, job.record.files, strict=True)) | chunks
            ordered = tuple(sorted(both))
            counts = tuple(both[chunk] for chunk in ordered)
            job.record = replace(job.record, chunks=ordered, files=counts, is_alone=False)


def _opened(job: _Job) -> ArchiveFile:
    try:
        return job.archive.open(job.state)
    except DieselError as error:
        raise OSError(error.message) from error


def _difference(expected: bytes, sha256: bytes) -> str:
    """Empty if the SHA-256 is the expected one, or none is expected."""
    if expected in (b"", sha256):
        return ""
    return f"its SHA-256 is {sha256.hex()}, not {expected.hex()}"


def _is_unchanged(job: _Job, record: ArchiveRecord) -> bool:
    if not job.state.tag or (job.state.tag, job.state.size) != (record.tag, record.size):
        return False
    return job.archive.sha256 in (b"", record.sha256)


def _batches(jobs: Sequence[_Job], chunk_bytes: int) -> list[_ArchiveGroup]:
    """Small archives are joined into groups of about a chunk. Their order stays."""
    batches: list[_ArchiveGroup] = []
    for job in jobs:
        if not batches or batches[-1].bytes + job.state.size > chunk_bytes:
            batches.append(_ArchiveGroup())
        batches[-1].jobs.append(job)
        batches[-1].bytes += job.state.size
    return batches


class _Contested(NamedTuple):
    last: list[tuple[_Job, Set[int]]]
    """The archives that are the last of several with some path, in their order, with the hashes of
    these paths."""
    yields: dict[int, list[_Job]]
    """By the `id` of a job: the archives that are the last with some path of it."""


def _contested(jobs: Sequence[_Job]) -> _Contested:
    lengths = [len(job.log.paths) for job in jobs]
    paths = np.concatenate(
        [np.zeros(0, np.uint64), *(np.frombuffer(job.log.paths, np.uint64) for job in jobs)]
    )
    owner = np.repeat(np.arange(len(jobs)), lengths)
    order = np.lexsort((owner, paths))
    paths, owner = paths[order], owner[order]
    is_contested = (paths[1:] == paths[:-1]) & (owner[1:] != owner[:-1])
    contested = np.isin(paths, paths[1:][is_contested])
    pairs = list(zip(paths[contested].tolist(), owner[contested].tolist(), strict=True))
    last = dict(pairs)  # owners ascend: the last one of a path stays
    again: dict[int, set[int]] = {}
    for path, number in last.items():
        again.setdefault(number, set()).add(path)
    yields: dict[int, dict[int, _Job]] = {}
    for path, number in pairs:
        if number != last[path]:
            yields.setdefault(id(jobs[number]), {})[last[path]] = jobs[last[path]]
    return _Contested(
        [(jobs[number], again[number]) for number in sorted(again)],
        {job: list(later.values()) for job, later in yields.items()},
    )


def _paths(jobs: Sequence[_Job]) -> set[int]:
    return {path for job in jobs if not job.is_skipped for path in job.log.paths}


def _copy(original: _Original, taker: MemberTaker) -> str:
    """Returns why the copy in another dataset broke off, or ""."""
    view, record = original
    reader = EntryReader(view, taker.work.repository.objects, _COPY_MEMORY_BYTES)
    try:
        for path in record.others:
            _copy_other(view, view.index_of(path), source_path(record.target, path), taker)
        files, ends = _files_of(view, record)
        reader.prefetch_order(files, ends, grow=True)
        for index in files.tolist():
            found = view.stat(index)
            member = tarfile.TarInfo()
            member.mode, member.size = found.mode, found.size
            content = partial(io.BufferedReader, EntryFile(reader, index), READ_BYTES)
            path = source_path(record.target, view.path(index))
            taker.take(path, member, found.mtime_ns, cast("Callable[[], BinaryIO]", content))
    except (DieselError, FileSkipped) as error:
        return f"its copy in dataset {view.dataset} cannot be read: {error}"
    finally:
        reader.close()
    return ""


def _copy_other(view: Snapshot, index: int, path: bytes, taker: MemberTaker) -> None:
    found = view.stat(index)
    member = tarfile.TarInfo()
    member.type, member.mode = tarfile.DIRTYPE, found.mode
    if found.kind == Kind.LINK:
        member.type = tarfile.SYMTYPE
        member.linkname = view.link(index).decode("utf-8", "surrogateescape")
    taker.take(path, member, found.mtime_ns, io.BytesIO)


def _files_of(view: Snapshot, record: ArchiveRecord) -> tuple[Indices, Indices]:
    """The files chunk by chunk, and the end of each chunk's files in that list."""
    files = view.files()
    chunks = view.chunk_of(files)
    ids = set(record.chunks)
    numbers = [number for number, chunk in enumerate(view.chunk_ids) if chunk in ids]
    is_wanted = np.isin(chunks, numbers)
    files, chunks = files[is_wanted], chunks[is_wanted]
    order = np.argsort(chunks, kind="stable")
    ends = np.flatnonzero(np.diff(chunks[order])) + 1
    return files[order], np.append(ends, len(files)) if len(files) else ends
