"""The program of a mount that kills its own processes at a moment.

The environment variable `MOMENT` names the moment, and `DIES` the processes (worker, server,
supervisor), separated by commas; `nobody`: the mount pauses instead. Without `DIES`, none is
killed.

While a mount starts, the moment is one of `STARTS`; its dataset is a folder. During a switch:

- `notified`: the kernel has the first notification, in a FUSE mount;
- `made`: the new tree of a native mount is mounted nowhere yet;
- `beneath`: it lies beneath the old one;
- `detached`: the old one is gone.
"""

import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from diesel_fs.mounts.daemon import session_choice
from diesel_fs.mounts.daemon.supervisor import main
from diesel_fs.mounts.sessions import native, native_tree
from diesel_fs.mounts.sessions.native import NativeSession
from diesel_fs.mounts.sessions.native_tree import mount_tree
from diesel_fs.mounts.sessions.protocol import NOTIFY_INVALIDATE, OUT_HEADER
from diesel_fs.mounts.tree.images import open_image
from diesel_fs.system import loop_devices, syscalls
from tests.mounts.folder_daemon import FolderMountSource
from tests.mounts.other_kernels import AT_FDCWD, KERNEL, meet

DIES, MOMENT = "TEST_DIES", "TEST_MOMENT"

PAUSE_S = 1.5

_P = ParamSpec("_P")
_T = TypeVar("_T")

real_write = os.write
new_mount, attach_mount, umount2 = syscalls.new_mount, syscalls.attach_mount, syscalls.umount2

first_process = os.getpid()  # the supervisor
trees: list[int] = []
attached: list[str] = []
opened: list[int] = []


def die() -> None:
    """Kill the processes that `DIES` names, the caller last. Calls by the supervisor do nothing."""
    supervisor = os.getppid()
    if supervisor != first_process:
        return
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    pids = {"supervisor": supervisor, "server": int(children[0])}
    if len(children) > 1:
        pids["worker"] = int(children[1])
    names = [name for name in os.environ[DIES].split(",") if name in pids]
    for name in sorted(names, key=lambda name: pids[name] == os.getpid()):
        with suppress(ProcessLookupError):  # the supervisor's end has ended it
            os.kill(pids[name], signal.SIGKILL)


def reach(moment: str) -> None:
    if moment == os.environ[MOMENT]:
        if os.environ[DIES] == "nobody":
            time.sleep(PAUSE_S)
        else:
            die()


def then_dying(function: Callable[_P, _T], times: int = 1) -> Callable[_P, _T]:
    """Replace a function: after its call number `times`, the processes are killed."""

    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        result = function(*arguments, **named)
        opened.append(1)
        if len(opened) == times:
            die()
        return result

    return called


def dying_first(function: Callable[_P, _T]) -> Callable[_P, _T]:
    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        die()
        return function(*arguments, **named)

    return called


def attach_tree_alone(mount: int, path: str, *, folder: int = -1, beneath: bool = False) -> None:
    """The system call of a kernel that mounts nothing in a detached tree (before Linux 6.15). The
    processes are killed once the tree is attached."""
    if folder < 0:
        attached.append(path)
        attach_mount(mount, path)
        die()
    elif attached:
        attach_mount(mount, path, folder=folder)
    else:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


STARTS: dict[str, tuple[object, str, object]] = {
    "the image is built": (session_choice, "open_image", then_dying(open_image)),
    "FUSE is mounted": (syscalls, "new_fuse", then_dying(syscalls.new_fuse)),
    "the tree is mounted": (native, "mount_tree", then_dying(mount_tree)),
    "the tree is attached alone": (syscalls, "attach_mount", attach_tree_alone),
    "all is attached": (syscalls, "open_abort", then_dying(syscalls.open_abort)),
    # One of the server's own threads waits for the answer.
    "the content file is to be opened": (NativeSession, "_open", dying_first(NativeSession._open)),
    **{
        f"{number} of 3 loop devices are open": (
            native_tree, "open_loop_device", then_dying(loop_devices.open_loop_device, number),
        )
        for number in (1, 2, 3)
    },
}  # fmt: skip
"""Module and name of a function for each moment, and its replacement, which kills."""


# During a switch


def write(descriptor: int, content: bytes) -> int:
    if len(content) > OUT_HEADER.size and OUT_HEADER.unpack_from(content)[1] == NOTIFY_INVALIDATE:
        reach("notified")
    return real_write(descriptor, content)


def make_mount(kind: str, options: Sequence[tuple[str, str]], attributes: int) -> int:
    made = new_mount(kind, options, attributes)
    if kind == "erofs":
        trees.append(made)
        if len(trees) > 1:
            reach("made")
    return made


def attach(mount: int, path: str, *, folder: int = AT_FDCWD, beneath: bool = False) -> None:
    attach_mount(mount, path, folder=folder, beneath=beneath)
    if beneath:
        reach("beneath")


def unmount(mountpoint: str, flags: int = 0) -> None:
    umount2(mountpoint, flags)
    reach("detached")


if __name__ == "__main__":
    start = STARTS.get(os.environ.get(MOMENT, ""))
    if start is not None:
        setattr(*start)
    elif DIES in os.environ:
        setattr(os, "write", write)  # noqa: B010  # mypy forbids =
        setattr(syscalls, "new_mount", make_mount)  # noqa: B010
        setattr(syscalls, "attach_mount", attach)  # noqa: B010
        setattr(syscalls, "umount2", unmount)  # noqa: B010
    meet(os.environ.get(KERNEL, ""))
    code = main(sys.argv[1:], FolderMountSource() if start is not None else None)
    logging.shutdown()
    os._exit(code)
