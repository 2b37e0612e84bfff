"""Opens the sources of a put: a folder, a file, a tar, a bucket or archives."""

import glob
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from diesel_fs.errors import NotFoundError, PermissionDenied, UsageError
from diesel_fs.format.entries import check_path
from diesel_fs.ingest import (
    Archive,
    ArchivesSource,
    BucketSource,
    FetchedManifest,
    FileSource,
    FolderSource,
    HttpArchive,
    LocalArchive,
    Source,
    TarSource,
    fetch_manifest,
)
from diesel_fs.urls import CLOUD_SCHEMES, parse_url

from ..packing import PROGRAM
from ..show.output import count_text


@dataclass(frozen=True, slots=True)
class SourceArgument:
    """`name` stands for the source in messages."""

    name: str
    source: Source
    file_name: bytes = b""  # of a single file or object, without its folder; else empty


@contextmanager
def archives_source(names: Sequence[str]) -> Iterator[SourceArgument]:
    """Joins all archives at these paths, globs and addresses into one source. Raises NotFoundError,
    UsageError, ObjectStoreError."""
    archives = [archive for name in names for archive in _archives(name, "archive")]
    counts = Counter(archive.address for archive in archives)
    for archive in archives:
        if counts[archive.address] > 1:
            raise UsageError(f"{archive.name} is named twice")
    if len(archives) == 1:
        shown_name = archives[0].name  # without a query, which may hold a secret
    else:
        shown_name = names[0] if len(names) == 1 else count_text(len(archives), "archive")
    yield SourceArgument(shown_name, ArchivesSource(archives))


def manifest_file(name: str) -> FetchedManifest:
    """A manifest is the list of a dataset's samples. Raises UsageError, NotFoundError,
    PermissionDenied, ObjectStoreError, CorruptError."""
    files = _archives(name, "manifest")
    if len(files) != 1:
        raise UsageError(f"--manifest takes one file, and {name} names {len(files)}")
    return fetch_manifest(files[0])


def _archives(name: str, noun: str) -> Sequence[Archive]:
    scheme = name.partition("://")[0] if "://" in name else ""
    if scheme in CLOUD_SCHEMES:
        from .buckets import bucket_archives  # noqa: PLC0415  # it takes 0.1 s to import

        return bucket_archives(name)
    if scheme in ("http", "https"):
        return [HttpArchive(name)]
    if scheme:
        known = ", ".join([*CLOUD_SCHEMES, "http", "https"])
        raise UsageError(f"no {noun} can lie at {scheme}://", advice=f"known are {known}")
    return [LocalArchive(path) for path in _archive_paths(name)]


def _archive_paths(name: str) -> list[str]:
    if os.path.isdir(name):
        return sorted(str(path) for path in Path(name).rglob("*") if path.is_file())
    if os.path.lexists(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        is_glob = glob.has_magic(name)
        raise NotFoundError(f"no file matches {name}" if is_glob else f"there is no file {name}")
    return found


@contextmanager
def named_source(name: str, is_tar: bool, files_from: str, nul: bool) -> Iterator[SourceArgument]:
    """`files_from` lists the paths to put from a folder, separated by NUL if `nul`, else by
    newlines. Raises NotFoundError, UsageError."""
    if is_tar:
        with _opened_file(name) as stream:
            yield SourceArgument(name, TarSource(stream))
        return
    if name.partition("://")[0] in CLOUD_SCHEMES and "://" in name:
        if files_from:
            raise UsageError("--files-from needs a folder as SRC, not a bucket")
        from .buckets import CloudBucket  # noqa: PLC0415  # it takes 0.1 s to import

        url = parse_url(name)
        bucket = CloudBucket(url)
        is_object = bucket.single_object is not None
        file_name = os.fsencode(url.prefix.rpartition("/")[2]) if is_object else b""
        yield SourceArgument(name, BucketSource(bucket), file_name)
        return
    path = Path(name)
    if not path.exists():
        raise NotFoundError(f"there is no file or folder {name}")
    if not (path.is_dir() or path.is_file()):
        raise UsageError(f"{name} is neither a file nor a folder, so it cannot be put")
    if files_from and not path.is_dir():
        raise UsageError(f"--files-from needs a folder as SRC, and {name} is a file")
    if path.is_file():
        yield SourceArgument(name, FileSource(path), os.fsencode(path.name))
        return
    paths = _read_paths(files_from, nul) if files_from else None
    yield SourceArgument(name, FolderSource(path, paths, PROGRAM))


@contextmanager
def _opened_file(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 (only its opening is guarded here)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {name}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot read {name}: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # closing a file that was only read loses nothing
            file.close()


def _read_paths(files_from: str, nul: bool) -> list[bytes]:
    """The line `.` becomes the empty path, SRC itself."""
    with _opened_file(files_from) as file:
        lines = file.read().split(b"\0" if nul else b"\n")
    paths: dict[bytes, None] = {}
    for line in filter(None, lines):
        path = line if line.startswith(b"/") else line.rstrip(b"/")
        while path.startswith(b"./"):  # as `find .` writes them
            path = path[2:]
        paths[b"" if path == b"." else check_path(path)] = None
    return list(paths)
