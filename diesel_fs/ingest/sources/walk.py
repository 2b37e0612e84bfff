"""Walks a folder safely, and opens the files in it.

Nothing outside the source is ever opened: folders are opened component by component, and links are
never followed.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ...system.atomic_file import close_folder
from ..options import Filter

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_BATCH_ENTRIES = 1024  # of a folder, as Python objects at once

ReportFailure = Callable[[bytes, str], None]
"""Called with a path below the source, and the reason."""


@dataclass(slots=True)
class FolderListing:
    """`unread`: the folder could not be listed, so it may contain names that are missing here."""

    path: bytes
    mode: int = 0o755
    mtime_ns: int = 0
    files: list[bytes] = field(default_factory=list)
    links: list[bytes] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    unread: bool = False


def open_folder(root: int, path: bytes) -> int:
    """Opens component by component: a path may be longer than the kernel allows in one call, and
    nobody can replace a component by a link in between. Raises OSError."""
    current = os.dup(root)
    for component in path.split(b"/") if path else ():
        try:
            deeper = os.open(component, _FOLDER_FLAGS, dir_fd=current)
        finally:
            close_folder(current)
        current = deeper
    return current


def open_file(folder: int, name: bytes) -> int:
    """Never blocks on a pipe, never follows a link. Raises OSError."""
    return os.open(name, FILE_FLAGS, dir_fd=folder)


def walk(root: int, path_filter: Filter, failed: ReportFailure) -> Iterator[FolderListing]:
    """The folders below `root`, parents first, names in byte order; the root itself is `b""`.

    The walk skips folders that the caller takes out of a listing before the next one. It is depth
    first, so that folders in one chunk lie near each other.
    """
    waiting = [b""]
    while waiting:
        path = waiting.pop()
        listing = FolderListing(path)
        try:
            folder = open_folder(root, path)
        except OSError as error:
            failed(path, failure_reason(error))
            listing.unread = True
        else:
            try:
                _list(folder, listing, path_filter, failed)
            finally:
                close_folder(folder)
        yield listing
        prefix = path + b"/" if path else b""
        waiting.extend(prefix + name for name in reversed(listing.folders))


def _list(folder: int, listing: FolderListing, path_filter: Filter, failed: ReportFailure) -> None:
    found = os.fstat(folder)
    listing.mode, listing.mtime_ns = stat.S_IMODE(found.st_mode), found.st_mtime_ns
    prefix = listing.path + b"/" if listing.path else b""
    takes_all = path_filter.includes_all
    try:
        # Through /proc names come as bytes; by descriptor they would be decoded first
        with os.scandir(b"/proc/self/fd/%d" % folder) as entries:
            while batch := [*islice(entries, _BATCH_ENTRIES)]:
                files = [each.name for each in batch if each.is_file(follow_symlinks=False)]
                listing.files += (
                    files
                    if takes_all
                    else [name for name in files if path_filter.includes_file(prefix + name)]
                )
                for entry in batch if len(files) < len(batch) else ():
                    name = entry.name
                    if entry.is_file(follow_symlinks=False):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if takes_all or path_filter.includes_folder(prefix + name):
                            listing.folders.append(name)
                    elif not takes_all and not path_filter.includes_file(prefix + name):
                        continue
                    elif entry.is_symlink():
                        listing.links.append(name)
                    else:
                        failed(prefix + name, "skipped: a pipe, socket or device")
    except OSError as error:
        failed(listing.path, failure_reason(error))
        listing.unread = True
    for names in (listing.files, listing.links, listing.folders):
        names.sort()


def walk_paths(
    root: int, paths: Sequence[bytes], path_filter: Filter, failed: ReportFailure
) -> Iterator[FolderListing]:
    """As `walk`, but only for `paths` below the source (a folder without its content)."""
    by_folder: dict[bytes, FolderListing] = {}
    for path in dict.fromkeys(paths):
        folder_path, _, name = path.rpartition(b"/")
        try:
            folder = open_folder(root, folder_path)
            try:
                found = os.stat(name or b".", dir_fd=folder, follow_symlinks=False)
                own = os.fstat(folder)
            finally:
                close_folder(folder)
        except OSError as error:
            failed(path, failure_reason(error))
            continue
        if path_filter.excludes(path, is_folder=stat.S_ISDIR(found.st_mode)):
            continue
        listing = by_folder.setdefault(
            folder_path, FolderListing(folder_path, stat.S_IMODE(own.st_mode), own.st_mtime_ns)
        )
        mode = found.st_mode
        if stat.S_ISREG(mode):
            listing.files.append(name)
        elif stat.S_ISLNK(mode):
            listing.links.append(name)
        elif stat.S_ISDIR(mode):
            by_folder.setdefault(path, FolderListing(path, stat.S_IMODE(mode), found.st_mtime_ns))
        else:
            failed(path, "skipped: a pipe, socket or device")
    for folder_path in sorted(by_folder):
        yield by_folder[folder_path]


def failure_reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it became a link while it was being read"
    if error.errno == errno.ENXIO:
        return "skipped: a socket or device"
    return error.strerror or str(error)
