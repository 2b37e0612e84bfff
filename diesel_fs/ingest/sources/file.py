"""One file as the source of a put, packed in this process."""

import os
import stat
from pathlib import Path

from ...errors import ConflictError, NotFoundError, PermissionDenied, UsageError
from ...format.entries import MODE_MASK, Kind, Stat, split
from ...repository.interface import Repository
from ...repository.writing import WriteSession
from ...system.atomic_file import close_folder
from ..compare import Comparer, same_file_content
from ..options import PutOptions
from ..packer import FileSkipped, start_packer
from ..paths import check_file_target
from ..put import PutWork, Source
from .walk import failure_reason


class FileSource(Source):
    """The file at `path`, or behind a link there, goes to the target itself. `start` raises
    ConflictError if the dataset has a folder at the target, or a file above it; `open` raises
    UsageError for a path that is no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = -1

    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        check_file_target(target)
        if options.delete:
            raise UsageError(
                "one file does not show which others are gone: --delete cannot go with it"
            )
        try:
            real = Path(os.path.realpath(self._path, strict=True))
            self._folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {self._path}") from error
        except OSError as error:
            raise PermissionDenied(f"cannot open {self._path}: {error.strerror}") from error
        self._name = os.fsencode(real.name)
        self._found = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        if not stat.S_ISREG(self._found.st_mode):
            raise UsageError(f"{self._path} is neither a file nor a folder")

    def close(self) -> None:
        if self._folder >= 0:
            close_folder(self._folder)

    def start(self, work: PutWork) -> Comparer:
        comparer, found = super().start(work), self._found
        work.path_filter.has_taken = True  # filters select only files in folders
        index = comparer.find(work.target)
        if reason := comparer.conflict_reason(work.target, index, Kind.FILE):
            raise ConflictError(f"cannot put {self._path}: {reason}")
        entry = Stat(Kind.FILE, found.st_mode & MODE_MASK, found.st_size, found.st_mtime_ns)
        is_unchanged = comparer.unchanged(index, entry) and (
            not work.options.checksum
            or same_file_content(work.view, index, self._folder, self._name)
        )
        work.report.unchanged, work.report.entries_found = int(is_unchanged), int(not is_unchanged)
        work.report.walked = True
        return comparer

    def count(self) -> bool:
        return True

    def pack(self, session: WriteSession) -> bool:
        options, report = self._work.options, self._work.report
        if report.unchanged:
            return True
        packer = start_packer(session, options.chunk_bytes, options.compress, report.add_chunk)
        try:
            packer.add_file(self._folder, self._name, split(self._work.target))
            packer.finish()
            report.stripped, report.hard_links = packer.stripped, packer.hard_links
        except FileSkipped as reason:
            report.fail(self._name, str(reason))
        except OSError as error:
            report.fail(self._name, failure_reason(error))
        finally:
            packer.close()
        return True
