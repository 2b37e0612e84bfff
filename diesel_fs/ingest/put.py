"""A put: the entries of a source go into a dataset, as far as they are not there already.

`put` is the same for every source: it opens the source, compares it with the dataset, has what is
new packed and committed, deletes what the source has not (with `--delete`), and publishes; a
manifest comes last (`manifest.py`). What
differs between sources is a `Source`, of which `sources/` has five. One thread; a source may start
others.
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
    """What a source needs during one put."""

    repository: Repository
    target: bytes  # where the source goes in the dataset
    options: PutOptions
    path_filter: Filter
    view: Snapshot  # the dataset before the put
    readable: ReadabilityCheck
    report: PutReport
    progress: PutProgress


class Source(ABC):
    """Entries to put. Its methods are called in this order, for one put: `open`, `start`, then
    `count`, or `pack` and `published`; and `close` in any case."""

    shadowed_reason = ""
    """Why a file is left out that is a folder of the source, too; empty for a source that cannot
    have both."""

    _work: PutWork
    _comparer: Comparer

    @abstractmethod
    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        """Open the source, before anything is made of the dataset. Raises NotFoundError,
        PermissionDenied, UsageError."""

    def start(self, work: PutWork) -> Comparer:
        """Begin; returns the comparer that will know what the source has. Raises ConflictError."""
        self._work = work
        self._comparer = Comparer(
            work.view, work.target, work.options, work.path_filter, work.readable
        )
        return self._comparer

    @abstractmethod
    def count(self) -> bool:
        """A dry run: count in the report what would be put. Returns as `pack`."""

    @abstractmethod
    def pack(self, session: WriteSession) -> bool:
        """Pack and commit what is new. Returns whether the source was read to its end: else what
        it seems to lack must not be deleted. Raises DieselError; what was committed stays."""

    def published(self, session: WriteSession) -> None:  # noqa: B027  # most have nothing to add
        """The put is durable, and the snapshot of its version is published."""

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
    """Put the entries of a source below the path `target` of a dataset, which is made if missing.

    What is there already unchanged is skipped, so a put can be repeated, and one that was
    interrupted goes on. When this returns, all of it is durable, and the snapshot of the new
    version lies in the repository. The report names what could not be put. A manifest is stored as
    a file of the dataset, in a version of its own behind that of the files it names. Raises
    DieselError; what was committed by then stays.
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
                session, manifest, target, options, repository.view(session.name), report,
                is_readable=before < 0 or readable(before),
            )  # fmt: skip
        progress(report)
        return report
    finally:
        source.close()


def _begin(
    repository: Repository, dataset: str, options: PutOptions
) -> tuple[WriteSession | None, Snapshot, ReadabilityCheck]:
    """The session of a put, the dataset as it is, and the check which of its entries can be read.

    A dry run has no session; a dataset that does not exist is empty to it, and is not made. Raises
    DieselError.
    """
    session = None if options.dry_run else repository.begin(dataset)
    try:
        view = session.view if session else repository.view(dataset)
    except NoSuchDataset:
        view = empty_snapshot(uuid4(), dataset)
    return session, view, ReadabilityCheck(repository, dataset, view, options)


def _delete_shadowed_files(
    repository: Repository, session: WriteSession, before: Snapshot, report: PutReport, reason: str
) -> None:
    """Delete the files that this put has put at paths where it has put folders, too. `before` is
    the dataset before the put; the report gets the reason.

    Where others wrote meanwhile, the files may be theirs, and stay: `verify` names them.
    """
    shadowed = sorted(_shadowed_files(repository.view(session.name)) - _shadowed_files(before))
    if shadowed and not session.others_committed():
        session.delete(shadowed)
        for path in shadowed:
            report.fail(path, f"left out: {reason}")
        report.version = session.finish()


def _shadowed_files(view: Snapshot) -> set[bytes]:
    """The paths that are both a file (which readers do not see) and a folder."""
    return {view.path(index) for index in view.shadowing_folders().tolist()}
