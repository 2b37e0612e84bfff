"""Mount points: which are ours, whether one may be used, whether one is dead, and taking it away.

What is mounted is told by `mountinfo.py`. Nothing here calls stat on a mount (a dead one looks
alive, its attributes are cached; a hung one would never answer): what must touch one is asked of a
child process with a deadline. Any thread.
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
"""The type shown by `mount` is `fuse.diesel`; by it our mounts are told from others'."""

ANSWER_DEADLINE_S = 10.0
"""How long a mount may take to answer statfs or to give its statistics."""


def is_ours(found: MountEntry) -> bool:
    """Whether a dataset is mounted there."""
    return found.kind == f"fuse.{SUBTYPE}"


def mounted_at(path: str) -> MountEntry | None:
    """What is on top at this very path, or None."""
    return next((each for each in reversed(list(mounts())) if each.path == path), None)


def real_path(directory: str | os.PathLike[str]) -> str:
    """The path as mountinfo has it, without touching what is mounted there."""
    folder, name = os.path.split(os.path.abspath(directory))
    path = os.path.join(os.path.realpath(folder), name)
    return path if mounted_at(path) or not os.path.islink(path) else os.path.realpath(path)


def our_mount(directory: str | os.PathLike[str]) -> MountEntry:
    """The mount of ours at `directory`. Raises UsageError where there is none."""
    path = real_path(directory)
    found = mounted_at(path)
    if found is None or not is_ours(found):
        what = "nothing is mounted there" if found is None else f"that is a mount of {found.kind}"
        raise UsageError(f"{path} is no mount of a dataset: {what}")
    return found


def prepare_mountpoint(mountpoint: str, forbidden_folders: Sequence[Path] = ()) -> Sequence[str]:
    """Checks that something can be mounted here, takes away a dead mount of ours, and makes the
    folder where it is missing. Returns the folders that it has made, the outermost first: whoever
    takes the mount away gives them to `remove_created_folders`.

    `forbidden_folders`: folders that the mount must neither hide nor lie in (the store, the cache).
    Raises UsageError, BusyError or PermissionDenied.
    """
    found = mounted_at(mountpoint)
    if found is not None and is_ours(found):
        if is_alive(mountpoint):
            raise BusyError(
                f"{found.source} is mounted on {mountpoint}", advice="umount it, or take another"
            )
        unmount(mountpoint, lazy=True)
    for folder in forbidden_folders:
        inner, outer = Path(mountpoint), Path(os.path.realpath(folder))
        if inner.is_relative_to(outer) or outer.is_relative_to(inner):
            raise UsageError(
                f"{mountpoint} and {outer} lie in one another", advice="take another folder"
            )
    made = _make(mountpoint)
    try:
        names = os.listdir(mountpoint)
    except NotADirectoryError:
        raise UsageError(f"{mountpoint} is not a folder") from None
    except OSError as error:
        raise PermissionDenied(f"cannot look into {mountpoint}: {error.strerror}") from error
    if names:
        raise UsageError(f"{mountpoint} is not empty", advice="mount on an empty folder")
    return made


def _make(folder: str) -> Sequence[str]:
    """Makes a folder and those above it where they are missing. Raises UsageError, DieselError."""
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    made: list[str] = []
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:  # another process has just made it
            continue
        except OSError as error:
            remove_created_folders(made)
            text = f"cannot make the folder {each}: {error.strerror}"
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise UsageError(text) from error
            advice = "mount on a folder of your own, or let root make this one and give it to you"
            raise PermissionDenied(text, advice=advice) from error
        made.append(each)
    return made


def remove_created_folders(folders: Sequence[str]) -> None:
    """Removes the folders that `prepare_mountpoint` has made. One that is in use again stays."""
    with suppress(OSError):
        for folder in reversed(folders):
            os.rmdir(folder)


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Takes away the mount on top. Raises BusyError, PermissionDenied or DieselError."""
    try:
        syscalls.umount2(mountpoint, syscalls.MNT_DETACH if lazy else 0)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BusyError(f"{mountpoint} is in use") from None
        if error.errno != errno.EPERM:
            raise DieselError(f"cannot unmount {mountpoint}: {error.strerror}") from error
        _unmount_as_user(mountpoint, lazy)


def _unmount_as_user(mountpoint: str, lazy: bool) -> None:
    """Waits as long as fusermount3 does: the kernel may have millions of files to let go of."""
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
            f"only root may unmount {mountpoint} here", advice="install fuse3 (fusermount3)"
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
    """The number of the user that mounted it."""
    said = [each.removeprefix("user_id=") for each in found.options if each.startswith("user_id=")]
    return int(said[0]) if said and said[0].isdigit() else None


def is_alive(mountpoint: str) -> bool:
    """Whether somebody serves the mount. Raises DeadlineError where it neither answers nor is dead.

    Another user's mount answers EACCES, and lives.
    """
    number, _ = _run_in_child("os.statvfs(sys.argv[1])", mountpoint)
    return number not in (errno.ENOTCONN, errno.ECONNABORTED)


def read_through(path: str) -> bytes:
    """The content of a small file in a mount. Raises DieselError: PermissionDenied where another
    user's mount lets nobody else in, DeadlineError where it hangs.
    """
    number, content = _run_in_child("sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", path)
    if number in (errno.EACCES, errno.EPERM):
        raise PermissionDenied(
            f"cannot read {path}: another user has mounted it, for nobody else",
            advice="ask as that user; --allow-other lets others into a mount",
        )
    if number:
        raise DieselError(f"cannot read {path}: {os.strerror(number)}")
    return content


def _run_in_child(question: str, path: str) -> tuple[int, bytes]:
    """The errno and output of one line of Python in a child: what a mount hangs must not be us."""
    program = f"import os, sys\ntry: {question}\nexcept OSError as error: sys.exit(error.errno)"
    command = [sys.executable, "-I", "-S", "-c", program, path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/", env=minimal_environment())
    try:
        answer, _ = child.communicate(timeout=ANSWER_DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # where it waits uninterruptibly, it ends when the mount does
        child.returncode = -9
        raise DeadlineError(
            f"the mount that holds {path} does not answer", advice="umount --force ends it"
        ) from None
    return child.returncode, answer
