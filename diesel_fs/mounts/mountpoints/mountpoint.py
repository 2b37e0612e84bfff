"""Finds mounts of datasets, prepares mount points, and unmounts.

A mount of a dataset is a FUSE mount, or it is *native*: a mount of EROFS, whose tree the kernel
serves alone, and in it a FUSE mount on the folder `.diesel`, which delivers the contents.

A `stat` of a dead mount succeeds, so it does not show whether a mount is alive. Any thread may call
the functions.
"""

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import (
    BusyError,
    DeadlineError,
    DieselError,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from ...names import check_dataset_name
from ...system import syscalls
from ...system.daemons import minimal_environment
from ...system.mountinfo import MountEntry, mounts, topmost_at

log = logging.getLogger("diesel.mount")

SUBTYPE = "diesel"
"""FUSE mounts of datasets have the type `fuse.diesel`."""

HIDDEN_FOLDER = ".diesel"

_FUSE, _EROFS = f"fuse.{SUBTYPE}", "erofs"

ANSWER_DEADLINE_S = 10.0
"""How long a mount may take to answer statfs or to deliver its statistics."""

ANSWER_NOTICE_S = 2.0
"""After this time a warning tells the user that the mount has not answered yet."""


@dataclass(frozen=True, slots=True)
class DatasetMount:
    tree: MountEntry
    fuse: MountEntry | None
    """The FUSE mount: `tree` itself, or in a native mount the mount on `.diesel`, which may be at
    another path where the same tree is mounted. None if it was unmounted."""

    @property
    def path(self) -> str:
        return self.tree.path

    @property
    def source(self) -> str:
        """`DATASET@VERSION`, or `DATASET` if the mount follows the dataset."""
        return self.tree.source

    @property
    def device(self) -> str:
        """The device number of the FUSE mount, or "". It identifies the connection with the kernel
        and the daemon, and stays the same when a native mount switches to another tree."""
        return self.fuse.device if self.fuse else ""

    @property
    def is_native(self) -> bool:
        return self.tree.kind == _EROFS

    @property
    def owner(self) -> int | None:
        """The user who has mounted; None if unknown."""
        options = self.fuse.options if self.fuse else ()
        ids = [each.removeprefix("user_id=") for each in options if each.startswith("user_id=")]
        return int(ids[0]) if ids and ids[0].isdigit() else None

    @property
    def hidden_mount(self) -> MountEntry | None:
        """The FUSE mount on `.diesel` in this very tree."""
        here = self.fuse is not None and self.fuse.parent_id == self.tree.mount_id
        return self.fuse if here and self.is_native else None

    @property
    def hidden_folder(self) -> str:
        if self.is_native and self.fuse is not None:
            return self.fuse.path
        return os.path.join(self.path, HIDDEN_FOLDER)


def dataset_mounts(entries: Iterable[MountEntry]) -> list[DatasetMount]:
    entries = list(entries)
    trees = {each.mount_id: each for each in entries if _is_native_tree(each)}
    hidden_of_mount: dict[int, MountEntry] = {}
    hidden_of_device: dict[str, MountEntry] = {}
    for each in entries:
        tree = trees.get(each.parent_id)
        if tree and each.kind == _FUSE and each.path == os.path.join(tree.path, HIDDEN_FOLDER):
            hidden_of_mount[tree.mount_id] = hidden_of_device[tree.device] = each
    hidden = {each.mount_id for each in hidden_of_mount.values()}
    found = []
    for each in entries:
        if each.mount_id in trees:
            fuse = hidden_of_mount.get(each.mount_id) or hidden_of_device.get(each.device)
            found.append(DatasetMount(each, fuse))
        elif each.kind == _FUSE and each.mount_id not in hidden:
            found.append(DatasetMount(each, each))
    return found


def _is_native_tree(entry: MountEntry) -> bool:
    """Such a tree is EROFS, and its source is a dataset, not a path."""
    name, at, version = entry.source.partition("@")
    if entry.kind != _EROFS or (at and not version.isdecimal()):
        return False
    try:
        check_dataset_name(name)
    except UsageError:
        return False
    return True


def mounted_at(path: str) -> DatasetMount | None:
    """The topmost mount at exactly this path, if it shows a dataset."""
    entries = list(mounts())
    tree = topmost_at(path, entries)
    return next((each for each in dataset_mounts(entries) if each.tree is tree), None)


def is_mounted(path: str, device: str) -> bool:
    """Whether the topmost mount at a path is a mount of a dataset whose FUSE mount has this device
    number, or a native mount that has lost its FUSE mount, and so its number."""
    found = mounted_at(path)
    return found is not None and found.device in (device, "")


def place_of(mount_id: int, device: str, mountpoint: str) -> str | None:
    """The path of a mount: its mount point, or the path that `mount --move` gave it; None if it is
    gone or covered. `device` is the number of its FUSE mount."""
    if is_mounted(mountpoint, device):  # during a switch this is another tree
        return mountpoint
    moved = (each.path for each in mounts() if each.mount_id == mount_id)
    return next((path for path in moved if is_mounted(path, device)), None)


class MountPresence:
    """Finds out whether a mount is still there, at any path that this process sees. For one thread.

    A native mount counts as present while its tree is there: `.diesel` may have been unmounted
    alone, and is missing for a moment while `umount` tries whether the tree is in use.
    """

    def __init__(self, device: str) -> None:
        """`device` is the number of the FUSE mount."""
        self._device = device
        self._trees: set[str] = set()  # devices of the mount's trees, when last seen

    def is_mounted(self) -> bool:
        found = dataset_mounts(mounts())
        own = {each.tree.device for each in found if each.device == self._device}
        self._trees = own or self._trees
        return bool(own) or any(
            not each.device and each.tree.device in self._trees for each in found
        )


def real_path(directory: str | os.PathLike[str]) -> str:
    """The path without symbolic links, as the kernel lists mounts. Does not touch a mount there."""
    folder, name = os.path.split(os.path.abspath(directory))
    path = os.path.join(os.path.realpath(folder), name)
    is_mount = topmost_at(path, mounts()) is not None
    return path if is_mount or not os.path.islink(path) else os.path.realpath(path)


def our_mount(directory: str | os.PathLike[str]) -> DatasetMount:
    """Raises UsageError if no dataset is mounted there."""
    path = real_path(directory)
    if found := mounted_at(path):
        return found
    entries = list(mounts())
    other = topmost_at(path, entries)
    inside = [each.path for each in dataset_mounts(entries) if path.startswith(f"{each.path}/")]
    if other is None and inside:
        reason = f"it lies in the mount on {max(inside, key=len)}"
    elif other is None:
        reason = "nothing is mounted there"
    elif other.kind == _FUSE:
        reason = f"it belongs to the mount on {os.path.dirname(path)}"
    else:
        reason = f"that is a mount of {other.kind}"
    name = os.fspath(directory)
    of_dataset = [
        each.path for each in dataset_mounts(entries) if each.source.partition("@")[0] == name
    ]
    raise UsageError(
        f"{path} is no mount of a dataset: {reason}",
        advice=f"the dataset {name} is mounted on {', '.join(of_dataset)}" if of_dataset else "",
    )


def locate(path: str | os.PathLike[str]) -> tuple[DatasetMount, bytes]:
    """The mount that contains a file or folder, and the path inside it. Follows links.

    Raises UsageError if no mount contains it, NotFoundError, PermissionDenied, DeadlineError if the
    mount hangs, and DieselError if it is dead.
    """
    named = os.fspath(path)
    number, found = _run_in_child(
        "sys.stdout.buffer.write(os.fsencode(os.path.realpath(sys.argv[1], strict=True)))",
        os.path.join(os.getcwd(), named) if named else "/no name",
    )
    if number in (errno.ENOENT, errno.ENOTDIR):
        raise NotFoundError(f"there is no file or folder {named or repr(named)}")
    if number in (errno.EACCES, errno.EPERM):
        raise PermissionDenied(
            f"cannot look at {named}: {os.strerror(number)}",
            advice="a mount of another user needs --allow-other",
        )
    if number in (errno.ENOTCONN, errno.ECONNABORTED):
        raise DieselError(f"the mount of {named} is dead", advice="unmount it, and mount again")
    if number:
        raise DieselError(f"cannot look at {named}: {os.strerror(number)}")
    real, entries = os.fsdecode(found), list(mounts())
    above = [each.path for each in entries if real.startswith(each.path.rstrip("/") + "/")]
    place = real if topmost_at(real, entries) else max(above, key=len)
    holder = topmost_at(place, entries)
    for each in dataset_mounts(entries):
        if holder in (each.tree, each.hidden_mount):
            inside = os.path.relpath(real, each.path)
            if inside.partition("/")[0] == HIDDEN_FOLDER:
                raise UsageError(f"{named} belongs to the mount on {each.path}, not to its dataset")
            return each, b"" if inside == "." else os.fsencode(inside)
    where = named if real == os.path.abspath(named) else f"{named} (which leads to {real})"
    raise UsageError(
        f"{where} is in no mount of a dataset", advice="`dlcmd mount DATASET DIR` makes one"
    )


def prepare_mountpoint(mountpoint: str, forbidden_folders: Sequence[Path] = ()) -> Sequence[str]:
    """Creates missing folders and unmounts a dead mount. Returns the created folders, for
    `remove_created_folders` after the mount's end.

    The mount must neither hide the `forbidden_folders` nor lie in one of them. Raises UsageError,
    BusyError, PermissionDenied or DieselError.
    """
    unmount_dead(mountpoint)
    if found := mounted_at(mountpoint):
        raise BusyError(
            f"{found.source} is mounted on {mountpoint}",
            advice="unmount it, or mount on another folder",
        )
    for folder in forbidden_folders:
        inner, outer = Path(mountpoint), Path(os.path.realpath(folder))
        if inner.is_relative_to(outer) or outer.is_relative_to(inner):
            raise UsageError(
                f"{mountpoint} and {outer} lie in one another", advice="mount on another folder"
            )
    made = _create_folders(mountpoint)
    try:
        names = os.listdir(mountpoint)
    except NotADirectoryError:
        raise UsageError(f"{mountpoint} is not a folder") from None
    except OSError as error:
        raise PermissionDenied(f"cannot list {mountpoint}: {error.strerror}") from error
    if names:
        raise UsageError(f"{mountpoint} is not empty", advice="mount on an empty folder")
    return made


def unmount_dead(mountpoint: str) -> None:
    """Unmounts dead mounts of datasets. Raises DieselError; DeadlineError if a mount hangs."""
    while mounted_at(mountpoint) is not None and not is_alive(mountpoint):
        unmount(mountpoint, lazy=True)


def _create_folders(folder: str) -> Sequence[str]:
    """Returns the created folders, the outermost first. Raises UsageError, PermissionDenied."""
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    made: list[str] = []
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:  # another process has just created it
            continue
        except OSError as error:
            remove_created_folders(made)
            text = f"cannot make the folder {each}: {error.strerror}"
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise UsageError(text) from error
            advice = "mount on a folder of your own, or let root create this one and give it to you"
            raise PermissionDenied(text, advice=advice) from error
        made.append(each)
    return made


def remove_created_folders(folders: Sequence[str]) -> None:
    """A folder that is not empty stays."""
    with suppress(OSError):
        for folder in reversed(folders):
            os.rmdir(folder)


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmounts the topmost mount. With `lazy`, also if it is in use: it then lives on without a
    path until its last user ends. Raises BusyError, PermissionDenied or DieselError."""
    found = mounted_at(mountpoint)
    try:
        if found is not None and found.hidden_mount is not None and not lazy:
            _unmount_both(found, found.hidden_mount)
        else:
            syscalls.umount2(mountpoint, syscalls.MNT_DETACH if lazy else 0)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BusyError(f"{mountpoint} is in use") from None
        if error.errno == errno.EINVAL and mounted_at(mountpoint) is None:
            return  # another process has just unmounted it
        if error.errno != errno.EPERM:
            raise DieselError(f"cannot unmount {mountpoint}: {error.strerror}") from error
        if found is not None and found.is_native:
            raise _not_allowed(found) from None
        _unmount_as_user(mountpoint, lazy)


def _unmount_both(found: DatasetMount, hidden: MountEntry) -> None:
    """Unmounts a native mount, or leaves it as it is. Raises OSError.

    The kernel refuses to unmount a mount that has another mount in it. So the mount on `.diesel` is
    unmounted first, and attached again if the tree turns out to be in use. Readers of `.diesel` may
    see it missing for some 0.1 ms.
    """
    inside = {each.mount_id for each in mounts() if each.parent_id == found.tree.mount_id}
    if inside - {hidden.mount_id}:  # a user has mounted something in it
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    with ExitStack() as stack:
        stack.callback(os.close, tree := syscalls.clone_mount(found.path))
        # An open descriptor makes the kernel keep the name `.diesel`: the tree does not list it, so
        # it could not be looked up again. The descriptor is of a copy of the mount, so that it does
        # not keep the mount itself busy.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        stack.callback(os.close, os.open(HIDDEN_FOLDER, flags, dir_fd=tree))
        stack.callback(os.close, fuse := syscalls.clone_mount(hidden.path))
        try:
            syscalls.umount2(hidden.path)
            syscalls.umount2(found.path)
        except BaseException:
            now = mounted_at(found.path)
            is_same = now is not None and now.tree.mount_id == found.tree.mount_id
            if now is not None and is_same and now.hidden_mount is None:
                syscalls.attach_mount(fuse, hidden.path)
            raise


def end_connection(abort_file: int, mountpoint: str, device: str) -> bool:
    """Aborts a mount's connection with the kernel, so that calls that wait for the mount fail.
    Returns False if this user may not do that.

    `abort_file` comes from `syscalls.open_abort`. If it is -1, root unmounts by force; for another
    user, the connection ends with the processes that hold it (`processes.free_killed`).
    """
    with suppress(OSError):
        if abort_file >= 0:
            os.write(abort_file, b"1")
            return True
        if (found := mounted_at(mountpoint)) and found.fuse and found.device == device:
            syscalls.umount2(found.fuse.path, syscalls.MNT_FORCE)
            return True
    return False


def _unmount_as_user(mountpoint: str, lazy: bool) -> None:
    """fusermount3 gets no deadline: the kernel may have millions of files to forget."""
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
    found = mounted_at(mountpoint)
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=minimal_environment(),
            check=False,
        )
    except FileNotFoundError:
        raise PermissionDenied(
            f"only root may unmount {mountpoint} here",
            advice="install the package fuse3, which has fusermount3",
        ) from None
    reason = done.stderr.decode(errors="replace").strip()
    if done.returncode and "busy" in reason:
        raise BusyError(f"{mountpoint} is in use")
    if done.returncode and found is not None and found.owner not in (None, os.getuid()):
        raise _not_allowed(found)
    if done.returncode:
        raise PermissionDenied(f"cannot unmount {mountpoint}: {reason}")


def _not_allowed(found: DatasetMount) -> PermissionDenied:
    owner = 0 if found.is_native else found.owner  # only root has native mounts
    return PermissionDenied(
        f"{found.path} was mounted by user {owner}",
        advice="only that user and root may unmount it",
    )


def is_alive(mountpoint: str, *, deadline_s: float | None = None) -> bool:
    """Whether a daemon serves the mount. Raises DeadlineError if there is no answer within
    `deadline_s` (by default `ANSWER_DEADLINE_S`).

    Another user's mount answers EACCES, which counts as alive. The tree of a native mount always
    answers, so its `.diesel` is tried instead; a tree without `.diesel` is dead.
    """
    found = mounted_at(mountpoint)
    if found is not None and found.is_native:
        if found.fuse is None:
            return False
        mountpoint = found.fuse.path
    number, _ = _run_in_child("os.statvfs(sys.argv[1])", mountpoint, deadline_s)
    return number not in (errno.ENOTCONN, errno.ECONNABORTED)


def read_through(path: str, *, deadline_s: float | None = None) -> bytes:
    """The content of a small file in a mount. The deadline is that of `is_alive`. Raises
    PermissionDenied for another user's mount, DeadlineError if the mount hangs, DieselError."""
    number, content = _run_in_child(
        "sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", path, deadline_s
    )
    if number in (errno.EACCES, errno.EPERM):
        raise PermissionDenied(
            f"cannot read {path}: another user has mounted it, and allows no others",
            advice="run the command as that user, or mount with --allow-other",
        )
    if number:
        raise DieselError(f"cannot read {path}: {os.strerror(number)}")
    return content


def _run_in_child(statement: str, path: str, deadline_s: float | None = None) -> tuple[int, bytes]:
    """Runs one line of Python. Returns the errno (0: success) and the output. Raises
    DeadlineError."""
    program = f"import os, sys\ntry: {statement}\nexcept OSError as error: sys.exit(error.errno)"
    command = [sys.executable, "-I", "-S", "-c", program, path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/", env=minimal_environment())
    limit_s = ANSWER_DEADLINE_S if deadline_s is None else deadline_s
    try:
        try:
            answer, _ = child.communicate(timeout=min(ANSWER_NOTICE_S, limit_s))
        except subprocess.TimeoutExpired:
            left_s = max(0.0, limit_s - ANSWER_NOTICE_S)
            if left_s and deadline_s is None:  # a caller that names a deadline expects to wait
                log.warning(
                    "the mount of %s has not answered yet: waiting for up to %.0f s more",
                    path,
                    left_s,
                )
            answer, _ = child.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        child.kill()
        # A child that waits uninterruptibly ends when the mount does; a thread reaps it then
        threading.Thread(target=child.wait, name="reap", daemon=True).start()
        assert child.stdout is not None
        child.stdout.close()
        raise DeadlineError(
            f"the mount of {path} does not answer", advice="end it with `dlcmd umount --force`"
        ) from None
    return child.returncode, answer
