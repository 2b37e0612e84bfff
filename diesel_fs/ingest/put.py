"""A put: adds the entries of a source to a dataset, unless they are there already.

A `Source` has everything that differs between the sources in `sources/`. A put is one thread; a
source may start others.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from uuid import uuid4

from ..errors import NoSuchDataset
from ..format.snapshot.reader import Snapshot
from ..repository.interface import Repository
from ..repository.versions import empty_snapshot
from ..repository.writing import WriteSession
from .compare import Comparer, ReadabilityCheck
from .concurrent_writers import finish_put
from .manifest import FetchedManifest, put_manifest
from .options import Filter, PutOptions, PutProgress, PutReport, no_progress
from .paths import check_not_reserved


@dataclass(frozen=True, slots=True)
class PutWork:
    repository: Repository
    target: bytes  # the path of the source in the dataset
    options: PutOptions
    path_filter: Filter
    view: Snapshot  # the dataset before the put
    readable: ReadabilityCheck
    report: PutReport
    progress: PutProgress


class Source(ABC):
    """Entries to put. One put calls `open`, `start`, then `count`, or `pack` and `published`; and
    `close` in any case."""

    shadowed_reason = ""
    """Why a file is left out if its path is also a folder of the source; empty if a source cannot
    have both."""

    _work: PutWork
    _comparer: Comparer

    @abstractmethod
    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        """Open the source, before the dataset is read or made. Raises NotFoundError,
        PermissionDenied, UsageError."""

    def start(self, work: PutWork) -> Comparer:
        """Begin the comparison with the dataset; the comparer will record the source's entries.
        Raises ConflictError."""
        self._work = work
        self._comparer = Comparer(
            work.view, work.target, work.options, work.path_filter, work.readable
        )
        return self._comparer

    @abstractmethod
    def count(self) -> bool:
        """Dry run: count the entries that would be put. Returns the same as `pack`."""

    @abstractmethod
    def pack(self, session: WriteSession) -> bool:
        """Commit the new entries. Returns whether the source was read to its end; otherwise,
        entries that it seems to lack must not be deleted. Raises DieselError; earlier commits
        stay."""

    def published(self, session: WriteSession) -> None:  # noqa: B027  # most have nothing to add
        """The put is durable now, and the snapshot of its version is published."""

    def close(self) -> None:  # noqa: B027  # a source that opens nothing has nothing to close
        """Close what `open` and later calls have opened."""


def put(
    repository: Repository,
    dataset: str,
    source: Source,
    target: bytes = b"",
    options: PutOptions | None = None,
    progress: PutProgress = no_progress,
    *,
    manifest: FetchedManifest | None = None,
) -> PutReport:
    """Put a source's entries below the path `target` of a dataset, which is created if missing.

    Unchanged entries are skipped, so an interrupted put can be repeated to continue. When this
    returns, all entries are durable, and the snapshot of the new version is in the repository. The
    report names the entries that could not be put. A manifest becomes a file of the dataset, in a
    version of its own after that of its files. Raises DieselError; earlier commits stay.
    """
    options = options or PutOptions()
    check_not_reserved(target)
    report = PutReport()
    try:
        source.open(repository, target, options)
        path_filter = Filter(options)
        session, view, readable = _begin(repository, dataset, options)
        comparer = source.start(
            PutWork(repository, target, options, path_filter, view, readable, report, progress)
        )
        if manifest is not None:
            comparer.keep(manifest.path(target))
        if session is None:
            if source.count():
                report.to_delete = comparer.removed_paths()
                report.deleted = len(report.to_delete)
            report.all_left_out = not path_filter.has_taken
            return report
        if source.pack(session) and (removed := comparer.removed_paths()):
            report.deleted = session.delete(removed)
        report.all_left_out = not (path_filter.has_taken or report.archives_skipped)
        finish_put(repository, session, report, target)
        if source.shadowed_reason:
            _delete_shadowed_files(repository, session, view, report, source.shadowed_reason)
        source.published(session)
        if manifest is not None:
            before = view.lookup(manifest.path(target))
            put_manifest(
                session, manifest, target, options, repository.view(dataset, lazy=True), report,
                is_readable=before < 0 or readable(before),
            )  # fmt: skip
        progress(report)
        return report
    finally:
        source.close()


def _begin(
    repository: Repository, dataset: str, options: PutOptions
) -> tuple[WriteSession | None, Snapshot, ReadabilityCheck]:
    """A dry run takes a missing dataset for an empty one and does not create it. Raises
    DieselError."""
    session = None if options.dry_run else repository.begin(dataset)
    try:
        view = session.view if session else repository.view(dataset)
    except NoSuchDataset:
        view = empty_snapshot(uuid4(), dataset)
    return session, view, ReadabilityCheck(repository, dataset, view, options)


def _delete_shadowed_files(
    repository: Repository, session: WriteSession, before: Snapshot, report: PutReport, reason: str
) -> None:
    """Delete files of this put at paths where it has also put folders. If others wrote meanwhile,
    the files may be theirs and stay: `verify` names them."""
    shadowed = sorted(
        _shadowed_files(repository.view(session.name, lazy=True)) - _shadowed_files(before)
    )
    if shadowed and not session.others_committed():
        session.delete(shadowed)
        for path in shadowed:
            report.fail(path, f"left out: {reason}")
        report.version = session.finish()


def _shadowed_files(view: Snapshot) -> set[bytes]:
    """Readers do not see these files."""
    return {view.path(index) for index in view.shadowing_folders().tolist()}
