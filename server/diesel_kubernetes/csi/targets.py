"""Binds mounts at the paths where pods see them, and reads from the kernel which mount is where.

A *bind* is a second place at which the kernel shows a mount; a *target* is the path of a bind. The
only record of them is `/proc/self/mountinfo`: a bind has the device number of its mount. A mount's
daemon may hang, so no thread that must go on touches a file of a mount: a child process tries
whether a mount answers (`mounts/mountpoints/mountpoint.py`), and `show_control` opens a path in it
in a thread that may be left behind. Any thread.
"""

import errno
import logging
import os
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from diesel_fs.errors import BusyError, DieselError, UsageError
from diesel_fs.mounts.mountpoints.mountpoint import (
    HIDDEN_FOLDER,
    DatasetMount,
    dataset_mounts,
    is_alive,
)
from diesel_fs.mounts.plans.socket_folder import control_sockets
from diesel_fs.system import syscalls
from diesel_fs.system.mountinfo import MountEntry, mounts, topmost_at

from .state import StateFolder

log = logging.getLogger("diesel.csi")

TARGET_MODE = 0o750

NAME_BYTES_MAX, PATH_BYTES_MAX = 255, 4095

CONTROL_DEADLINE_S = 5.0

_NOT_COUNTED = 1 << 62


class TargetState(Enum):
    FREE = "nothing"
    OURS = "a bind of one of this plugin's mounts"
    STALE = "a bind of a mount of a dataset that has been replaced, or has ended"
    FOREIGN = "another file system"


@dataclass(frozen=True, slots=True)
class MountTable:
    roots: Mapping[str, DatasetMount]
    binds: Mapping[str, tuple[str, ...]]
    entries: tuple[MountEntry, ...]

    @classmethod
    def read(cls, state: StateFolder) -> "MountTable":
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

    def at(self, target: str) -> tuple[TargetState, str]:
        """Returns the state of a target, and the mount's name if it is OURS."""
        top = topmost_at(target, self.entries)
        if top is None:
            return TargetState.FREE, ""
        for name, root in self.roots.items():
            if root.tree.device == top.device:
                return TargetState.OURS, name
        is_dataset = any(each.tree is top for each in dataset_mounts(self.entries))
        return (TargetState.STALE if is_dataset else TargetState.FOREIGN), ""


def checked_target(path: str, state: StateFolder) -> str:
    """Resolves links in the folders above the target. Raises UsageError if the path is not
    absolute, has `..`, is too long for the kernel, or would hide the plugin's own folder."""
    encoded = os.fsencode(path)
    names = encoded.split(b"/")
    if names[0] or not encoded.strip(b"/") or b"\0" in encoded or {b"", b".", b".."} & {*names[1:]}:
        raise UsageError(
            f"bad target path {path[:200]!r}", advice="it is an absolute path without `..`"
        )
    if len(encoded) > PATH_BYTES_MAX or max(map(len, names)) > NAME_BYTES_MAX:
        raise UsageError(
            f"bad target path {path[:200]!r}: it is too long",
            advice=f"the kernel takes {PATH_BYTES_MAX} bytes, and {NAME_BYTES_MAX} for each name",
        )
    folder, name = os.path.split(path)
    target = Path(os.path.realpath(folder), name)
    if target.is_relative_to(state.path) or state.path.is_relative_to(target):
        raise UsageError(f"bad target path {path[:200]!r}: it is the plugin's own folder (--state)")
    return str(target)


def lives(root: str) -> bool:
    """Whether a daemon serves the mount at `root`, and answers within 10 s."""
    try:
        return is_alive(root)
    except DieselError:
        return False


def check_place(target: str) -> None:
    """Raises BusyError if the target is no empty folder, or the folder above it is missing."""
    if not os.path.isdir(os.path.dirname(target)):
        raise BusyError(
            f"the folder above {target} is missing",
            advice="kubelet makes it: make it, or ask it to",
        )
    try:
        is_folder = stat.S_ISDIR(os.lstat(target).st_mode)
        if is_folder and not os.listdir(target):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise BusyError(f"cannot mount at {target}: {error.strerror}") from error
    what = "is a folder that is not empty" if is_folder else "is not a folder"
    raise BusyError(
        f"{target} {what}", advice="a mount would hide what lies there: move it by hand"
    )


def bind(root: str, target: str) -> None:
    """Shows the mount at `root` at the target, too, with `.diesel`. Raises BusyError if something
    else is there, and DieselError."""
    check_place(target)
    try:
        with suppress(FileExistsError):
            os.mkdir(target, TARGET_MODE)
    except OSError as error:
        raise BusyError(f"cannot make the folder {target}: {error.strerror}") from error
    try:
        tree = syscalls.clone_mount(root, recursive=True)
        try:
            syscalls.attach_mount(tree, target)
        finally:
            os.close(tree)
    except OSError as error:
        raise DieselError(f"cannot mount at {target}: {error.strerror}") from error


def show_control(run: Path, target: str) -> None:
    """Shows a mount's control socket, which lies below its folder `run`, at a target.

    A container does not have the node's path to which the link `.diesel/control` leads, so the
    socket itself is bound over the link. A failure is only logged: programs in the pod then
    announce no plans, and all else works.
    """
    link = os.path.join(target, HIDDEN_FOLDER, "control")
    given_up = threading.Event()

    def bind_socket() -> None:
        try:
            [socket] = control_sockets(run / "diesel")
            # The mount must answer this, so it may hang
            place = os.open(link, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not given_up.is_set():
                    tree = syscalls.clone_mount(socket)
                    try:
                        syscalls.attach_mount(tree, "", folder=place)
                    finally:
                        os.close(tree)
            finally:
                os.close(place)
        except (OSError, ValueError) as error:
            log.warning("no plans can be announced at %s: %s", target, error)

    binding = threading.Thread(target=bind_socket, name="diesel-csi-control", daemon=True)
    binding.start()
    binding.join(CONTROL_DEADLINE_S)
    if binding.is_alive():
        given_up.set()
        log.warning("no plans can be announced at %s: the mount does not answer", target)


def detach(target: str) -> None:
    """Raises BusyError for another file system than a dataset's."""
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
    """Raises BusyError for anything but an empty folder, since the plugin has not made it."""
    try:
        if os.path.lexists(target):
            os.rmdir(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BusyError(
            f"cannot remove {target}: {error.strerror}",
            advice="this driver removes only empty folders: move what lies there by hand",
        ) from error


@dataclass(frozen=True, slots=True)
class FileSystemUsage:
    """`entries` is 0 if the file system does not report their number."""

    total_bytes: int
    entries: int


def usage_of(target: str) -> FileSystemUsage:
    """Hangs if the mount is not alive. Raises OSError."""
    found = os.statvfs(Path(target))
    is_counted = found.f_files < _NOT_COUNTED  # EROFS does not report the number
    return FileSystemUsage(found.f_blocks * found.f_frsize, found.f_files if is_counted else 0)
