"""Facts about this machine and the user's folders. Nothing is written or made."""

import errno
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from diesel_fs.mounts.sessions.native import NativeSession
from diesel_fs.mounts.sessions.session import SessionUnsupported
from diesel_fs.repository.private_copies import boot_id
from diesel_fs.settings import user_folders
from diesel_fs.system import syscalls
from diesel_fs.system.available_memory import (
    available_memory_bytes,
    default_memory_bytes,
    memory_limit_bytes,
)
from diesel_fs.system.mountinfo import file_system_of

from .checks import (
    FolderFacts,
    FuseFacts,
    MemoryFacts,
    OldCopies,
    files_finding,
    folder_finding,
    fuse_findings,
    memory_finding,
    old_copies_finding,
)
from .findings import Finding
from .probes import Emit, Probe

COPIES = ("snapshots", "images")
"""A copy's name ends with the ID of the boot in which it was made."""


def fuse_facts() -> FuseFacts:
    error_name = error_text = ""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        error_name = errno.errorcode.get(error.errno or 0, "?")
        error_text = error.strerror or ""
    native = ""
    try:
        NativeSession.check_usable()
    except SessionUnsupported as reason:
        native = str(reason)
    except OSError as error:  # no /proc
        native = f"{error.filename}: {error.strerror}"
    helper = shutil.which("fusermount3") or ""
    may_administrate = True
    with suppress(OSError):  # no /proc: the mount that is tried shows whether it may
        may_administrate = syscalls.may_administrate()
    return FuseFacts(
        error_name,
        error_text,
        is_root=os.geteuid() == 0,
        may_administrate=may_administrate,
        helper=helper,
        helper_has_rights=bool(helper) and _runs_as_root(helper),
        native_error=native,
        linux=os.uname().release,
    )


def _runs_as_root(program: str) -> bool:
    found = os.stat(program)
    with suppress(OSError):
        if os.getxattr(program, "security.capability"):
            return True
    return found.st_uid == 0 and bool(found.st_mode & stat.S_ISUID)


def machine_findings(fuse: FuseFacts) -> Iterator[Finding]:
    yield from fuse_findings(fuse)
    memory = MemoryFacts(memory_limit_bytes(), available_memory_bytes(), default_memory_bytes())
    yield memory_finding(memory)
    yield files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def folder_probes() -> list[Probe]:
    """Raises ConfigError if there is no home folder."""
    folders = user_folders()
    return [
        _folder_probe("state", "logs and sockets", folders["state"], is_private=True),
        _folder_probe("cache", "copies of snapshots", folders["cache"], is_private=True),
        _folder_probe("tmp", "temporary files", _temporary_folder(), is_private=False),
        Probe(
            "cache.old", f"the folder {folders['cache']}", _old_copies_work(folders["cache"]),
            "check the disk of that folder",
        ),
    ]  # fmt: skip


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108  # nothing is written to it


def _folder_probe(what: str, use: str, path: Path, *, is_private: bool) -> Probe:
    def work(emit: Emit) -> None:
        emit(folder_finding(folder_facts(what, use, path, is_private=is_private)))

    cure = "check the disk or server on which it lies (`dmesg`)"
    return Probe(f"folder.{what}", f"the folder {path}", work, cure)


def folder_facts(what: str, use: str, path: Path, *, is_private: bool) -> FolderFacts:
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    exists = place == path
    owner_error = ownership_error(path) if exists and is_private else ""
    try:
        free = os.statvfs(place)
    except OSError as error:
        return FolderFacts(what, use, str(path), exists, write_error=error.strerror or str(error))
    kind = ""
    with suppress(OSError):  # no /proc
        kind = file_system_of(place).kind
    return FolderFacts(
        what,
        use,
        str(path),
        exists,
        owner_error,
        write_error(place),
        free.f_bavail * free.f_frsize,
        free.f_blocks * free.f_frsize,
        free.f_favail if free.f_files else None,
        kind,
    )


def ownership_error(path: Path) -> str:
    """Follows the rule of `settings.private_folder`. Returns "" if the folder is this user's
    alone."""
    try:
        found = path.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    return "others can write to it" if found.st_mode & 0o022 else ""


def write_error(folder: Path) -> str:
    """Returns "" if something can be written. Raises OSError."""
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    return os.strerror(errno.EACCES)


def _old_copies_work(cache: Path) -> Callable[[Emit], None]:
    def work(emit: Emit) -> None:
        files = used = 0
        for folder in (cache / each for each in COPIES):
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    name, dot, boot = entry.name.removesuffix(".chain").partition(".")
                    if not (name and dot and boot) or boot == boot_id():
                        continue
                    with suppress(FileNotFoundError):
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                        files += 1
        if finding := old_copies_finding(OldCopies(str(cache), boot_id(), files, used)):
            emit(finding)

    return work
