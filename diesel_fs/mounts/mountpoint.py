"""Mount points: which mounts show datasets, which folders can be used, and how a mount ends.

`system/mountinfo.py` says what is mounted. This process never touches a mount itself: `stat` takes
a dead mount for a living one, since the kernel keeps its attributes, and would wait for ever on one
that hangs. Where a mount must be asked, a child process does it, with a deadline. Any thread.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import BusyError, DeadlineError, DieselError, PermissionDenied, UsageError
from ..system import syscalls
from ..system.daemons import minimal_environment
from ..system.mountinfo import MountEntry, mounts

SUBTYPE = "diesel"
"""Mounts of datasets have the type `fuse.diesel`, by which they are recognised."""

ANSWER_DEADLINE_S = 10.0
"""How long a mount may take to answer statfs, or to deliver its statistics."""


def is_ours(found: MountEntry) -> bool:
    """Whether this is the mount of a dataset."""
    return found.kind == f"fuse.{SUBTYPE}"


def mounted_at(path: str) -> MountEntry | None:
    """The topmost mount at exactly this path, or None."""
    return next((each for each in reversed(list(mounts())) if each.path == path), None)


def is_mounted(path: str, device: str) -> bool:
    """Whether the mount with this device number is the topmost one at a path."""
    found = mounted_at(path)
    return found is not None and found.device == device


def real_path(directory: str | os.PathLike[str]) -> str:
    """The path without symbolic links, as mountinfo has it; a mount there is not touched."""
    folder, name = os.path.split(os.path.abspath(directory))
    path = os.path.join(os.path.realpath(folder), name)
    return path if mounted_at(path) or not os.path.islink(path) else os.path.realpath(path)


def our_mount(directory: str | os.PathLike[str]) -> MountEntry:
    """The mount of a dataset at `directory`. Raises UsageError where there is none."""
    path = real_path(directory)
    found = mounted_at(path)
    if found is None or not is_ours(found):
        reason = "nothing is mounted there" if found is None else f"that is a mount of {found.kind}"
        raise UsageError(f"{path} is no mount of a dataset: {reason}")
    return found


def prepare_mountpoint(mountpoint: str, forbidden_folders: Sequence[Path] = ()) -> Sequence[str]:
    """Prepares a folder as a mount point: creates it where it is missing, and unmounts a dead
    mount.

    Returns the folders that it created, the outermost first; `remove_created_folders` takes them
    when the mount has ended. The mount must neither hide the `forbidden_folders` (the store, the
    cache) nor lie in one. Raises UsageError, BusyError, PermissionDenied or DieselError.
    """
    found = mounted_at(mountpoint)
    if found is not None and is_ours(found):
        if is_alive(mountpoint):
            raise BusyError(
                f"{found.source} is mounted on {mountpoint}",
                advice="unmount it, or mount on another folder",
            )
        unmount(mountpoint, lazy=True)
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


def _create_folders(folder: str) -> Sequence[str]:
    """Creates a folder and those above it, where missing. Raises UsageError, PermissionDenied."""
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
    """Removes the folders that `prepare_mountpoint` created. One that is not empty stays."""
    with suppress(OSError):
        for folder in reversed(folders):
            os.rmdir(folder)


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmounts the topmost mount at a path; `lazy` also one that is in use, which lives on without
    a path. Raises BusyError, PermissionDenied or DieselError.
    """
    try:
        syscalls.umount2(mountpoint, syscalls.MNT_DETACH if lazy else 0)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BusyError(f"{mountpoint} is in use") from None
        if error.errno != errno.EPERM:
            raise DieselError(f"cannot unmount {mountpoint}: {error.strerror}") from error
        _unmount_as_user(mountpoint, lazy)


def end_connection(abort_file: int, mountpoint: str, device: str) -> None:
    """Ends the connection of a mount with the kernel: calls that wait for the mount fail.

    `abort_file` is what `syscalls.open_abort` gave: it belongs to this connection, even where the
    device number has been given to another one since. Where it is -1, root unmounts by force, and
    another user can do nothing here.
    """
    with suppress(OSError):
        if abort_file >= 0:
            os.write(abort_file, b"1")
        elif is_mounted(mountpoint, device):
            syscalls.umount2(mountpoint, syscalls.MNT_FORCE)


def _unmount_as_user(mountpoint: str, lazy: bool) -> None:
    """By fusermount3, without a deadline: the kernel may have millions of files to forget."""
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
    if done.returncode and found is not None and _owner(found) not in (None, os.getuid()):
        raise PermissionDenied(
            f"{mountpoint} was mounted by user {_owner(found)}",
            advice="only that user and root may unmount it",
        )
    if done.returncode:
        raise PermissionDenied(f"cannot unmount {mountpoint}: {reason}")


def _owner(found: MountEntry) -> int | None:
    """The ID of the user who mounted it, if known."""
    ids = [each.removeprefix("user_id=") for each in found.options if each.startswith("user_id=")]
    return int(ids[0]) if ids and ids[0].isdigit() else None


def is_alive(mountpoint: str) -> bool:
    """Whether a daemon serves the mount. Raises DeadlineError where it does not answer in time.

    Another user's mount answers EACCES, which counts as alive.
    """
    number, _ = _run_in_child("os.statvfs(sys.argv[1])", mountpoint)
    return number not in (errno.ENOTCONN, errno.ECONNABORTED)


def read_through(path: str) -> bytes:
    """The content of a small file in a mount.

    Raises PermissionDenied for another user's mount, DeadlineError where the mount hangs, and
    DieselError for other errors.
    """
    number, content = _run_in_child("sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", path)
    if number in (errno.EACCES, errno.EPERM):
        raise PermissionDenied(
            f"cannot read {path}: another user has mounted it, and allows no others",
            advice="run the command as that user, or mount with --allow-other",
        )
    if number:
        raise DieselError(f"cannot read {path}: {os.strerror(number)}")
    return content


def _run_in_child(statement: str, path: str) -> tuple[int, bytes]:
    """The errno and output of one line of Python in a child, which alone hangs with a mount."""
    program = f"import os, sys\ntry: {statement}\nexcept OSError as error: sys.exit(error.errno)"
    command = [sys.executable, "-I", "-S", "-c", program, path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/", env=minimal_environment())
    try:
        answer, _ = child.communicate(timeout=ANSWER_DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # where it waits uninterruptibly, it ends when the mount does
        child.returncode = -9
        raise DeadlineError(
            f"the mount of {path} does not answer", advice="end it by `dlcmd umount --force`"
        ) from None
    return child.returncode, answer
