"""Starts and ends mounts: the interface, and its implementation by processes.

`ProcessMounter` is for nodes on which the plugin is a service of the system, `PodMounter`
(`pods.py`) for clusters. A *mount* has a name, `KEY-N`, and a folder in the state folder
(`state.py`), in which its mount point `root` lies.
"""

from contextlib import suppress
from typing import Protocol

from diesel_fs.errors import DieselError, UsageError
from diesel_fs.system import syscalls
from diesel_fs.system.mountinfo import mounts, topmost_at

from .program import mount_environment, run_dlcmd
from .state import StateFolder
from .targets import lives
from .volumes import Volume

START_DEADLINE_S = 90.0
"""`dlcmd mount` itself gives up after 60 s."""

END_DEADLINE_S = 660.0
"""`dlcmd umount` waits at most 600 s for the daemon's work."""

QUERY_DEADLINE_S = 20.0


class Mounter(Protocol):
    """Any thread may call, but no two calls for one name may run at once."""

    def start(self, volume: Volume, name: str, lock: int) -> None:
        """Mounts a volume in the existing folder of `name`, and returns when reads work.

        A program that starts the mount inherits `lock`, the descriptor of the lock of the mount's
        key, so the key stays locked if this process is killed. The mount outlives this process.
        Raises DieselError if nothing is mounted.
        """

    def end(self, name: str) -> None:
        """Ends a mount, dead or alive, if there is one, and removes all that belongs to it except
        its folder. Raises BusyError if a process uses the mount, and DieselError."""

    def tidy(self) -> None:
        """Removes what a killed plugin has left outside the state folder. Raises DieselError."""


class ProcessMounter:
    def __init__(self, state: StateFolder) -> None:
        self._state = state

    def start(self, volume: Volume, name: str, lock: int) -> None:
        folder = self._state.folder(name)
        run_dlcmd(
            ["mount", *mount_arguments(volume), f"--log-file={folder / 'log'}", "--",
             volume.named, self._state.root(name)],
            {**mount_environment(volume, folder, self._state.cache), **volume.secrets},
            deadline_s=START_DEADLINE_S,
            pass_fds=[lock],
        )  # fmt: skip

    def end(self, name: str) -> None:
        root = self._state.root(name)
        if topmost_at(root, mounts()) is not None and lives(root):
            with suppress(UsageError):
                folder = self._state.folder(name)
                environment = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder / "run")}
                run_dlcmd(["umount", "--", root], environment, deadline_s=END_DEADLINE_S)
        detach_dead(root)

    def tidy(self) -> None:
        """Does nothing: processes leave nothing outside the state folder."""


def mount_arguments(volume: Volume) -> list[str]:
    """Containers run as other users, so these are allowed, too."""
    return ["--allow-other", *volume.options]


def detach_dead(root: str) -> None:
    """Detaches everything mounted at `root`, whose daemon has ended. Raises DieselError."""
    try:
        while topmost_at(root, mounts()) is not None:
            syscalls.umount2(root, syscalls.MNT_DETACH)
    except OSError as error:
        raise DieselError(f"cannot unmount {root}: {error.strerror}") from error


def current_version(volume: Volume, state: StateFolder) -> int:
    """Raises DieselError."""
    environment = {**volume.environment, **volume.secrets, "HOME": str(state.path)}
    environment["XDG_CACHE_HOME"] = str(state.cache)
    found = run_dlcmd(["stat", "--", volume.dataset], environment, deadline_s=QUERY_DEADLINE_S)
    version = found.get("version")
    if not isinstance(version, int):
        raise DieselError(f"`dlcmd stat {volume.dataset}` names no version")
    return version
