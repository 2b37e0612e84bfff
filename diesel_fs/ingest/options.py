"""The options and filters of a put, and its report and progress."""

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import UsageError
from ..format.chunk import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from ..repository.validation import ValidatedChunk

JOBS_MAX = 64
COMPRESSIONS = ("auto", "none", "lz4")


@dataclass(frozen=True, slots=True)
class PutOptions:
    """Raises UsageError for bad values.

    `delete` deletes entries of the dataset that the source lacks; for an empty source, that needs
    `allow_empty`. `checksum` compares contents, not only size, mode and mtime. `include` and
    `exclude` are globs: with a slash, for the path below the source, otherwise for the last
    component; with a slash at the end, only for folders. A file is put if no `exclude` matches it
    or a folder above it and, if there are `include` globs, one matches it.
    """

    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    compress: str = "auto"
    jobs: int = 0  # 0: as many as keep the cores busy
    delete: bool = False
    dry_run: bool = False
    checksum: bool = False
    allow_empty: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise UsageError(f"bad chunk size {self.chunk_bytes}: it is 64K to 1G")
        if self.compress not in COMPRESSIONS:
            raise UsageError(f"bad compression {self.compress!r}: one of {COMPRESSIONS}")
        if not 0 <= self.jobs <= JOBS_MAX:
            raise UsageError(f"bad number of jobs {self.jobs}: it is 1 to {JOBS_MAX}")

    @property
    def processes(self) -> int:
        """The default is one more than cores, since each process waits for the disk at times."""
        return self.jobs or min(len(os.sched_getaffinity(0)) + 1, JOBS_MAX)


@dataclass(slots=True)
class PutReport:
    """The state of a put; `failed` has each path that was left out, with the reason.

    `files`, `content_bytes`, `chunks` and `entries` count committed data, `entries_found` the
    entries to put so far; `walked`: the whole source has been read. `to_delete` has the paths that
    a dry run would delete, deepest first. `stripped` counts entries that lost set-user-ID,
    set-group-ID or sticky bits, `hard_links` files that are stored once for each name.
    `archives_skipped` of the `archives` had been put before; their entries count as unchanged.
    `backslashes` counts names in zips whose backslashes were taken for slashes, `samples` those of
    a stored manifest. `all_left_out`: the filters took no file.
    """

    files: int = 0
    content_bytes: int = 0
    chunks: int = 0
    entries: int = 0
    unchanged: int = 0
    deleted: int = 0
    to_delete: Sequence[bytes] = ()
    stripped: int = 0
    hard_links: int = 0
    entries_found: int = 0
    walked: bool = False
    version: int = 0
    archives: int = 0
    archives_skipped: int = 0
    backslashes: int = 0
    samples: int = 0
    all_left_out: bool = False
    failed: list[tuple[bytes, str]] = field(default_factory=list)

    def add_chunk(self, chunk: ValidatedChunk, entries: int) -> None:
        """`entries` of a committed chunk end in it: a large file ends with its last extent."""
        self.chunks += 1
        self.files += chunk.files
        self.content_bytes += chunk.content_bytes
        self.entries += entries

    def fail(self, path: bytes, reason: str) -> None:
        """`path` is relative to the source."""
        self.failed.append((path, reason))


PutProgress = Callable[[PutReport], None]
"""The thread that puts calls it after each change."""


def no_progress(_: PutReport) -> None:
    """Progress is not shown."""


class Filter:
    """Applies the globs of `PutOptions`. Paths are relative to the source."""

    def __init__(self, options: PutOptions) -> None:
        self._include = [_Glob.of(pattern) for pattern in options.include]
        self._exclude = [_Glob.of(pattern) for pattern in options.exclude]
        self.includes_all = not (self._include or self._exclude)
        self.has_taken = self.includes_all  # whether any file passed
        if any(glob.folders_only for glob in self._include):
            raise UsageError("an include chooses files, and one that ends in a slash matches none")

    def includes_folder(self, path: bytes) -> bool:
        """Assumes that the folders above it are put."""
        return not any(glob.matches(path, is_folder=True) for glob in self._exclude)

    def includes_file(self, path: bytes) -> bool:
        """Assumes that the folders above it are put."""
        if any(glob.matches(path, is_folder=False) for glob in self._exclude):
            return False
        is_taken = not self._include or any(
            glob.matches(path, is_folder=False) for glob in self._include
        )
        self.has_taken |= is_taken
        return is_taken

    def excludes(self, path: bytes, *, is_folder: bool) -> bool:
        """Also looks at the folders above an entry."""
        if self.includes_all or not path:
            self.has_taken |= not is_folder
            return False
        end = path.find(b"/")
        while end >= 0:
            if not self.includes_folder(path[:end]):
                return True
            end = path.find(b"/", end + 1)
        return not (self.includes_folder(path) if is_folder else self.includes_file(path))


@dataclass(frozen=True, slots=True)
class _Glob:
    with_path: bool  # matched against the path, not its last component
    folders_only: bool
    expression: re.Pattern[bytes]

    @classmethod
    def of(cls, pattern: str) -> "_Glob":
        glob = pattern.rstrip("/")
        if not glob:
            raise UsageError(f"the pattern {pattern!r} matches nothing")
        translated = fnmatch.translate(glob.lstrip("/"))  # linear time: no nested repetition
        return cls("/" in glob, glob != pattern, re.compile(os.fsencode(translated)))

    def matches(self, path: bytes, *, is_folder: bool) -> bool:
        if self.folders_only and not is_folder:
            return False
        subject = path if self.with_path else path.rpartition(b"/")[2]
        return self.expression.match(subject) is not None
