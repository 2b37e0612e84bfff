"""Binds mounts at the paths where pods see them, and reads from the kernel which mount is where.

`/proc/self/mountinfo` is the only record: a bind has the device number of the mount that it shows.
Nothing here touches a file of a mount, which could wait for a daemon that hangs; where a mount is
asked whether it lives, a child process does it (`mounts/mountpoint.py`). Any thread.
"""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from diesel_fs.errors import BusyError, ConflictError, DieselError, UsageError
from diesel_fs.mounts.mountpoint import DatasetMount, dataset_mounts, is_alive
from diesel_fs.system import syscalls
from diesel_fs.system.mountinfo import MountEntry, mounts, topmost_at

from .state import StateFolder

TARGET_MODE = 0o750

_NOT_COUNTED = 1 << 62


class Place(Enum):
    """What is mounted at a target."""

    FREE = "nothing"
    OURS = "a bind of one of this plugin's mounts"
    STALE = "a bind of a mount of a dataset that has been replaced, or has ended"
    FOREIGN = "another file system"


@dataclass(frozen=True, slots=True)
class MountTable:
    """The mounts of this node at one moment, as far as they concern volumes."""

    roots: Mapping[str, DatasetMount]
    """The mounts of the state folder, by name."""
    binds: Mapping[str, tuple[str, ...]]
    """Where each of these is bound."""
    entries: tuple[MountEntry, ...]

    @classmethod
    def read(cls, state: StateFolder) -> "MountTable":
        """The table of now."""
        entries = tuple(mounts())
        found = dataset_mounts(entries)
        roots: dict[str, DatasetMount] = {}
        for name in state.names():
            top = topmost_at(state.root(name), entries)
            roots.update((name, each) for each in found if each.tree is top)
        devices = {each.tree.device: name for name, each in roots.items()}
        binds: dict[str, list[str]] = {name: [] for name in roots}
        for each in found:
            name = devices.get(each.tree.device, "")
            if name and each.path != state.root(name):
                binds[name].append(each.path)
        return cls(roots, {name: tuple(paths) for name, paths in binds.items()}, entries)

    def at(self, target: str) -> tuple[Place, str]:
        """What is at a target, and the name of the mount if it is one of ours."""
        top = topmost_at(target, self.entries)
        if top is None:
            return Place.FREE, ""
        for name, root in self.roots.items():
            if root.tree.device == top.device:
                return Place.OURS, name
        is_dataset = any(each.tree is top for each in dataset_mounts(self.entries))
        return (Place.STALE if is_dataset else Place.FOREIGN), ""


def checked_target(path: str) -> str:
    """A target path, which must be absolute and without `..`. Raises UsageError."""
    if not path.startswith("/") or os.path.normpath(path) != path or path == "/":
        raise UsageError(f"bad target path {path[:200]!r}", advice="it is an absolute path")
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def lives(root: str) -> bool:
    """Whether a daemon serves the mount at a path. One that does not answer in 10 s does not."""
    try:
        return is_alive(root)
    except DieselError:
        return False


def bind(root: str, target: str) -> None:
    """Show a mount at a target too, with `.diesel`; the folder is made. Raises ConflictError and
    DieselError."""
    try:
        with suppress(FileExistsError):
            os.mkdir(target, TARGET_MODE)
        if not stat.S_ISDIR(os.lstat(target).st_mode):
            raise ConflictError(f"{target} is not a folder")
        tree = syscalls.clone_mount(root, recursive=True)
        try:
            syscalls.attach_mount(tree, target)
        finally:
            os.close(tree)
    except OSError as error:
        raise DieselError(f"cannot mount at {target}: {error.strerror}") from error


def detach(target: str) -> None:
    """Take away the mounts of datasets at a target, dead ones too. Raises BusyError where another
    file system is mounted there."""
    while True:
        entries = list(mounts())
        top = topmost_at(target, entries)
        if top is None:
            return
        if not any(each.tree is top for each in dataset_mounts(entries)):
            raise BusyError(
                f"a file system of type {top.kind} is mounted at {target}",
                advice="this driver unmounts only datasets: unmount it by hand",
            )
        try:
            syscalls.umount2(target, syscalls.MNT_DETACH)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):  # somebody else has unmounted it
                raise DieselError(f"cannot unmount {target}: {error.strerror}") from error


def remove_target(target: str) -> None:
    """Remove the folder of a target, if it is there. Raises DieselError."""
    try:
        os.rmdir(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DieselError(f"cannot remove {target}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of a file system, in bytes, and its entries (0: it does not say)."""

    total_bytes: int
    entries: int


def usage_of(target: str) -> Usage:
    """The size of a living mount. Raises OSError."""
    found = os.statvfs(Path(target))
    is_counted = found.f_files < _NOT_COUNTED  # EROFS does not say
    return Usage(found.f_blocks * found.f_frsize, found.f_files if is_counted else 0)
