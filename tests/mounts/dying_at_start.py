"""The program of a mount, of which processes are killed while it starts.

The environment variable `DIES_AT` names the moment, and `DIES` the processes, with commas between.
"""

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from diesel_fs.mounts import server
from diesel_fs.mounts.images import open_image
from diesel_fs.mounts.sessions import native
from diesel_fs.mounts.sessions.native_tree import mount_tree
from diesel_fs.mounts.supervisor import main
from diesel_fs.system import syscalls
from tests.mounts.folder_daemon import FolderMountSource

DIES_AT, DIES = "TEST_DIES_AT", "TEST_DIES"

_P = ParamSpec("_P")
_T = TypeVar("_T")

real_attach = syscalls.attach_mount
attached: list[str] = []


first_process = os.getpid()


def kill() -> None:
    """Kills the processes that `DIES` names, the one that runs this last, in the server. Calls by
    the supervisor, which also uses what is replaced, do nothing."""
    supervisor = os.getppid()
    if supervisor != first_process:
        return
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    worker = next(int(child) for child in children if int(child) != os.getpid())
    pids = {"supervisor": supervisor, "worker": worker, "server": os.getpid()}
    for name in sorted(os.environ[DIES].split(","), key=list(pids).index):
        with suppress(ProcessLookupError):  # the end of the supervisor has ended it
            os.kill(pids[name], signal.SIGKILL)


def then_killed(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, after which the processes are killed."""

    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        result = function(*arguments, **named)
        kill()
        return result

    return called


def attach_tree_alone(mount: int, path: str, *, folder: int = -1, beneath: bool = False) -> None:
    """The system call of a kernel that mounts nothing in a tree that is attached nowhere (before
    Linux 6.15). The processes are killed once the tree is attached."""
    if folder < 0:
        attached.append(path)
        real_attach(mount, path)
        kill()
    elif attached:
        real_attach(mount, path, folder=folder)
    else:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


MOMENTS: dict[str, tuple[object, str, Callable[[], object]]] = {
    "the image is built": (server, "open_image", lambda: then_killed(open_image)),
    "FUSE is mounted": (syscalls, "new_fuse", lambda: then_killed(syscalls.new_fuse)),
    "the tree is mounted": (native, "mount_tree", lambda: then_killed(mount_tree)),
    "the tree is attached alone": (syscalls, "attach_mount", lambda: attach_tree_alone),
    "all is attached": (syscalls, "open_abort", lambda: then_killed(syscalls.open_abort)),
}
"""When the processes are killed: module and name of a function, and what replaces it."""


if __name__ == "__main__":
    module, name, replacement = MOMENTS[os.environ[DIES_AT]]
    setattr(module, name, replacement())
    code = main(sys.argv[1:], FolderMountSource())
    logging.shutdown()
    os._exit(code)
