"""Starts and ends mounts: the interface that the node's logic needs, and the one by processes.

`ProcessMounter` has `dlcmd mount` start a daemon of its own session beside the plugin, for nodes on
which the plugin runs as a service of the system. `pods.py` has the one for clusters.
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
"""How long a start may take: `dlcmd mount` itself gives up after 60 s."""

END_DEADLINE_S = 660.0
"""`dlcmd umount` waits for as long as the daemon works, 600 s at most."""

QUERY_DEADLINE_S = 20.0


class Mounter(Protocol):
    """Starts and ends mounts of the state folder. Each call for one name comes alone; calls for
    several names may come at once, from any thread."""

    def start(self, volume: Volume, name: str, lock: int) -> None:
        """Mount a volume at the root of the existing folder of `name`, and return when reads work.

        A program that starts the mount inherits the descriptor `lock`. The mount goes on when this
        process ends. Raises DieselError; nothing is mounted then.
        """

    def end(self, name: str) -> None:
        """End a mount, dead or alive, if there is one, and remove all that it needed except its
        folder. Raises BusyError if a process uses it, and DieselError."""

    def tidy(self) -> None:
        """When the plugin starts: remove everything that a killed one has left outside the state
        folder. Raises DieselError."""


class ProcessMounter:
    """Mounts that are processes of the node, beside the plugin."""

    def __init__(self, state: StateFolder) -> None:
        self._state = state

    def start(self, volume: Volume, name: str, lock: int) -> None:
        """See `Mounter`."""
        folder = self._state.folder(name)
        run_dlcmd(
            ["mount", *mount_arguments(volume), f"--log-file={folder / 'log'}", "--",
             volume.named, self._state.root(name)],
            {**mount_environment(volume, folder, self._state.cache), **volume.secrets},
            deadline_s=START_DEADLINE_S,
            pass_fds=[lock],
        )  # fmt: skip

    def end(self, name: str) -> None:
        """See `Mounter`."""
        root = self._state.root(name)
        if topmost_at(root, mounts()) is not None and lives(root):
            with suppress(UsageError):  # it has ended meanwhile
                folder = self._state.folder(name)
                environment = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder / "run")}
                run_dlcmd(["umount", "--", root], environment, deadline_s=END_DEADLINE_S)
        detach_dead(root)

    def tidy(self) -> None:
        """See `Mounter`. Processes leave nothing outside."""


def mount_arguments(volume: Volume) -> list[str]:
    """The options of `dlcmd mount` for a volume; containers run as other users than the mount."""
    return ["--allow-other", *volume.options]


def detach_dead(root: str) -> None:
    """Detach the mounts of dead daemons at the root of a mount. Raises DieselError."""
    try:
        while topmost_at(root, mounts()) is not None:
            syscalls.umount2(root, syscalls.MNT_DETACH)
    except OSError as error:
        raise DieselError(f"cannot unmount {root}: {error.strerror}") from error


def current_version(volume: Volume, state: StateFolder) -> int:
    """The version of the volume's dataset that is current now. Raises DieselError."""
    environment = {**volume.environment, **volume.secrets, "HOME": str(state.path)}
    environment["XDG_CACHE_HOME"] = str(state.cache)
    found = run_dlcmd(["stat", "--", volume.dataset], environment, deadline_s=QUERY_DEADLINE_S)
    version = found.get("version")
    if not isinstance(version, int):
        raise DieselError(f"`dlcmd stat {volume.dataset}` names no version")
    return version
