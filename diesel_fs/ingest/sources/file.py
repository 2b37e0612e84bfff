"""Putting one file under a name of its own, in this process.

(A folder is worth several processes: `put.py`.) One thread, and the packer's own.
"""

import os
import stat
from functools import partial
from pathlib import Path

from ...errors import ConflictError, NotFoundError, PermissionDenied, UsageError
from ...format.entries import MODE_MASK, Kind, Stat, check_path, split
from ...format.snapshot.reader import Snapshot, same_content
from ...repository.interface import Repository
from ...repository.writing import WriteSession
from ...system.atomic_file import close_folder
from ..compare import RESERVED_NAME
from ..concurrent_writers import finish_put
from ..conflicts import EntryComparer, begin_put
from ..options import PutOptions, PutProgress, PutReport, no_progress
from ..packer import FileSkipped, Packer, Stored, failure_reason
from .folder import open_file


def put_file(
    repository: Repository,
    dataset: str,
    source: Path,
    target: bytes,
    options: PutOptions | None = None,
    progress: PutProgress = no_progress,
) -> PutReport:
    """Put the file `source` (a link to one is followed) at the path `target` of a dataset.

    As `put_tree` for one file. Raises ConflictError where a folder with entries stands there or a
    file stands above; UsageError for a source that is no file.
    """
    options = options or PutOptions()
    check_target(target)
    if options.delete:
        raise UsageError("one file says nothing about others: --delete cannot go with it")
    folder, name, found = _open_source(source)
    try:
        report = PutReport(entries_found=1, walked=True)
        session, view, readable = begin_put(repository, dataset, options)
        standing = EntryComparer(view, b"", options, readable)
        index = standing.find(target)
        if reason := standing.conflict_reason(target, index, Kind.FILE):
            raise ConflictError(f"cannot put {source}: {reason}")
        entry = Stat(Kind.FILE, found.st_mode & MODE_MASK, found.st_size, found.st_mtime_ns)
        if standing.unchanged(index, entry) and (
            not options.checksum or _same_content(folder, name, view, index)
        ):
            report.entries_found, report.unchanged = 0, 1
        if session is None:
            return report
        if report.unchanged:  # an earlier put may have ended before it was acknowledged
            report.version = session.finish()
            return report
        packer = new_packer(session, options, report)
        try:
            packer.add_file(folder, name, split(target))
            packer.finish()
            report.stripped, report.hard_links = packer.stripped, packer.hard_links
        except FileSkipped as reason:
            report.fail(name, str(reason))
        except OSError as error:
            report.fail(name, failure_reason(error))
        finally:
            packer.close()
        finish_put(repository, session, report)
        progress(report)
        return report
    finally:
        close_folder(folder)


def check_target(target: bytes) -> None:
    """Raise UsageError where no file can be put at a path."""
    check_path(target)
    if not target:
        raise UsageError("a file needs a name in the dataset")
    if target.split(b"/", 1)[0] == RESERVED_NAME:
        raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")


def new_packer(session: WriteSession, options: PutOptions, report: PutReport) -> Packer:
    """A packer in this process; its chunks are committed and counted when they are stored."""

    def stored(preamble: bytes, header: bytes, entries: int) -> None:
        done = session.commit(preamble, header)
        report.chunks += 1
        report.files += done.files
        report.content_bytes += done.content_bytes
        report.entries += entries

    committed: Stored = stored
    return Packer(
        session.identity,
        options.chunk_bytes,
        options.compress,
        session.objects,
        session.new_id,
        committed,
    )


def _open_source(source: Path) -> tuple[int, bytes, os.stat_result]:
    """The folder that holds the file, its name there, and its attributes."""
    try:
        real = Path(os.path.realpath(source, strict=True))
        folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {source}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot open {source}: {error.strerror}") from error
    found = os.stat(real.name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        close_folder(folder)
        raise UsageError(f"{source} is neither a file nor a folder")
    return folder, os.fsencode(real.name), found


def _same_content(folder: int, name: bytes, view: Snapshot, index: int) -> bool:
    file = open_file(folder, name)
    try:
        return same_content(view.extents(index), partial(os.pread, file))
    finally:
        os.close(file)
