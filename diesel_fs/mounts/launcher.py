"""Mounts, unmounts, and queries mounts, for `dlcmd` and the Python API.

`mount` starts the daemon of a mount (`daemon/supervisor.py`) and waits until the mount is served;
`umount` ends it. This module imports neither numpy, trio nor FUSE, because a user waits for it.
Functions may be called from any thread.
"""

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ..arguments import flag, local_path, whole_number
from ..errors import BusyError, DeadlineError, DieselError, PermissionDenied, UsageError
from ..settings import runtime_folder, state_folder
from ..system import daemons, syscalls
from ..system.daemons import add_log_tail, log_file
from ..system.mountinfo import MountEntry, file_system_of, mounts
from .mountpoints.mountpoint import (
    DatasetMount,
    dataset_mounts,
    end_connection,
    is_alive,
    is_mounted,
    mounted_at,
    our_mount,
    prepare_mountpoint,
    read_through,
    real_path,
    remove_created_folders,
    unmount,
    unmount_dead,
)
from .mountpoints.processes import (
    children_of,
    daemon_of,
    descendants_of,
    ends_within,
    free_killed,
    holders_of,
    holders_of_trees,
    killed_servants_of,
    openers_of,
    other_mounts_of,
    processor_ticks,
)
from .options import MountRequest
from .plans.socket_folder import remove_dead_sockets

logger = logging.getLogger("diesel.mount")

START_DEADLINE_S = 60.0
"""How long each step of a mount's start may take: one may build an image of millions of entries."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long `umount` waits for the daemon of a mount that it has unmounted."""

    idle_s: float = 5.0
    """How long the daemon may live without using processor time. It ends within milliseconds,
    unless the kernel first has to forget millions of files, 200,000 a second."""
    total_s: float = 600.0
    """How long the daemon may live at most."""
    log_interval_s: float = 5.0
    """The interval of warnings that the daemon still works."""
    before_signal_s: float = 1.0
    """After this time the daemon gets SIGTERM."""


PATIENCE = Patience()

OWN_PROCESSES_BUSY_S = 10.0
"""How long the mount's own prefetch worker may keep the mount busy. In the mount of an ordinary
user, the worker opens folders for milliseconds, or longer if the machine is overloaded."""

DAEMON = (sys.executable, "-m", "diesel_fs.mounts.daemon.supervisor")
FOREGROUND = "--foreground"

_PIDS_SHOWN = 20


def mount(
    request: MountRequest,
    *,
    program: Sequence[str] = DAEMON,
    deadline_s: float | None = None,
) -> None:
    """Mounts in the background and returns when reads work. Each step of the start must end within
    `deadline_s` (by default `START_DEADLINE_S`).

    A missing folder is created, and removed when the mount ends. Raises DieselError with the reason
    and the end of the daemon's log, if any. A call that fails or is interrupted leaves nothing
    mounted. The logger `diesel.mount` repeats the daemon's warnings.
    """
    original, request = request, _checked(request)
    deadline_s = START_DEADLINE_S if deadline_s is None else deadline_s
    try:
        try:
            _start(request, program, deadline_s)
        except DieselError:
            if request.made_folders or os.path.lexists(request.mountpoint):
                raise
            # Another mount, which had created the folder, has just ended and removed it
            request = _checked(original)
            _start(request, program, deadline_s)
    except BaseException as error:
        if isinstance(error, DeadlineError) or not isinstance(error, Exception):
            with suppress(DieselError):  # nothing may be mounted
                umount(request.mountpoint, force=True)
        else:
            with suppress(DieselError):  # the daemon may have been killed after it had mounted
                unmount_dead(request.mountpoint)
        remove_created_folders(request.made_folders)
        raise


def _start(request: MountRequest, program: Sequence[str], deadline_s: float) -> None:
    # autofs makes every process wait for the mount, except those of the process group that mounts:
    # the daemon, too, must belong to it
    by_autofs = file_system_of(Path(request.mountpoint)).kind == "autofs"
    with log_file(log_path(request)) as log:
        start = log.tell()
        try:
            daemons.start(
                [*program, request.mountpoint], request.to_json(), log, logger,
                daemon_name=f"the mount on {request.mountpoint}", deadline_s=deadline_s,
                new_session=not by_autofs,
            )  # fmt: skip
            if not is_alive(request.mountpoint):
                raise DieselError(f"the mount on {request.mountpoint} ended at once")
        except DieselError as error:
            add_log_tail(error, log, start)
            raise


def mount_in_foreground(request: MountRequest, *, program: Sequence[str] = DAEMON) -> NoReturn:
    """Turns this process into the daemon of a mount. It ends with the mount. Raises DieselError."""
    request = _checked(request)
    text = request.to_json()
    if request.log_file:
        with log_file(log_path(request)) as log:
            os.dup2(log.fileno(), 2)
    receiver, sender = os.pipe()
    os.write(sender, text)  # fits the pipe
    os.close(sender)
    os.dup2(receiver, 0)
    command = [*program, FOREGROUND, request.mountpoint]
    os.execve(command[0], command, daemons.environment())  # noqa: S606  # without a shell, on purpose


def umount(
    directory: str | os.PathLike[str],
    *,
    lazy: bool = False,
    force: bool = False,
    patience: Patience = PATIENCE,
) -> None:
    """Unmounts and waits for the daemon's end.

    A mount in use stays, and BusyError names the processes that use it. With `lazy`, the mount
    vanishes from its path at once, and ends with its last user. With `force`, it ends now, and its
    users get errors.

    If the file system is also mounted elsewhere, for example in another mount namespace, the daemon
    goes on serving it there. The call waits for a slow daemon as long as the daemon uses processor
    time. In both cases the logger `diesel.mount` warns.

    Raises DeadlineError if a daemon neither ends nor works, PermissionDenied for another user's
    mount.
    """
    lazy, force = flag("lazy", lazy), flag("force", force)
    found = our_mount(local_path("directory", directory))
    daemon = daemon_of(found.device)
    own = _own_processes(daemon)
    if force:
        _force(found, daemon, own, patience)
        _remove_dead_sockets()
        return
    retired = _retired_trees(found)
    others = other_mounts_of(found, retired)
    if lazy:  # users are found only before detaching
        has_users = bool(set(holders_of(found)) - set(own) or retired)
    else:
        has_users = False
        _check_retired_trees(found, own)
    _unmount(found, daemon, lazy)
    if daemon is None:
        _remove_dead_sockets()
    if daemon is None or has_users:
        return
    if not ends_within(daemon, patience.before_signal_s):
        now = other_mounts_of(found, retired)
        left = {each: now[each] for each in now if each in others}
        if left:  # without mounts made since: the device number may belong to a new mount now
            _warn_still_mounted(left, found.path, daemon)
            return
        if not lazy:
            with suppress(ProcessLookupError):  # a read ahead may keep the daemon alive
                os.kill(daemon, signal.SIGTERM)
    _wait(own, found.path, patience)


def stats(
    directory: str | os.PathLike[str], *, deadline_s: float | None = None
) -> dict[str, object]:
    """The content of `.diesel/stats`. `deadline_s` is as for `is_alive`. Raises DieselError."""
    found = our_mount(directory)
    try:
        text = read_through(f"{found.hidden_folder}/stats", deadline_s=deadline_s)
        values = json.loads(text)
    except ValueError as error:
        raise DieselError(f"the statistics of {found.path} are not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DieselError(f"the statistics of {found.path} are not a JSON object")
    return values


def filelist(directory: str | os.PathLike[str], epoch: int | None = None) -> list[str]:
    """The paths of a mount's files in the order of an epoch: of `epoch`, or of the current one
    (`.diesel/filelist`), with the mount's seed and group size.

    The call announces to the mount that the files will be read in this order. Raises DieselError;
    UsageError for a bad epoch.
    """
    found = our_mount(local_path("directory", directory))
    if epoch is not None:
        epoch = whole_number("epoch", epoch)
    name = "filelist0"
    if epoch is not None:
        lists = stats(found.path).get("lists")
        if not isinstance(lists, dict):
            raise UsageError(f"{found.path} has no list of epoch {epoch}")
        name = f"shuffle0/seed={lists['seed']},epoch={epoch},group={lists['group_size']}"
    text = read_through(f"{found.hidden_folder}/{name}")
    return [os.fsdecode(path) for path in text.split(b"\0")[:-1]]


def _checked(request: MountRequest) -> MountRequest:
    request.check()
    request = replace(request, mountpoint=real_path(request.mountpoint))
    if not os.path.exists("/dev/fuse"):
        raise PermissionDenied(
            "there is no /dev/fuse",
            advice="run `modprobe fuse`; start a container with --device /dev/fuse --cap-add"
            " SYS_ADMIN",
        )
    if os.geteuid():
        if shutil.which("fusermount3") is None:
            raise PermissionDenied("there is no fusermount3", advice="install the package fuse3")
        if request.allow_other and not _users_may_allow_other():
            raise PermissionDenied(
                "only root may use --allow-other on this machine",
                advice="write user_allow_other into /etc/fuse.conf",
            )
    made = prepare_mountpoint(request.mountpoint, request.forbidden_folders)
    return replace(request, made_folders=tuple(made))


def _users_may_allow_other() -> bool:
    with suppress(OSError):
        lines = Path("/etc/fuse.conf").read_text(errors="replace").splitlines()
        return any(line.strip() == "user_allow_other" for line in lines)
    return False


def log_path(request: MountRequest) -> Path:
    if request.log_file:
        return Path(request.log_file)
    flat = request.mountpoint.strip("/").replace("/", "-").encode(errors="replace").decode()
    return state_folder() / f"mount-{request.dataset}-{flat[-100:]}.log"


def _busy(path: str, pids: Sequence[int]) -> BusyError:
    shown = ", ".join(map(str, pids[:_PIDS_SHOWN])) + (", ..." if len(pids) > _PIDS_SHOWN else "")
    holders = (
        f"processes {shown}" if pids else "a process that this user cannot see, or another mount"
    )
    return BusyError(
        f"{path} is held by {holders}", advice="end them, or use --lazy (in Python lazy=True)"
    )


def _own_processes(daemon: int | None) -> list[int]:
    return [] if daemon is None else [daemon, *descendants_of(daemon)]


def _unmount(found: DatasetMount, daemon: int | None, lazy: bool) -> None:
    """While only the mount's own processes keep it busy, waits for them, at most
    `OWN_PROCESSES_BUSY_S`. Raises BusyError."""
    deadline_s = time.monotonic() + OWN_PROCESSES_BUSY_S
    while True:
        # A busy tree would be noticed only after `.diesel` had been unmounted
        pids = openers_of(found) if found.is_native and not lazy else []
        if not pids:
            try:
                unmount(found.path, lazy=lazy)
            except BusyError:
                pids = holders_of(found)
            else:
                now = mounted_at(found.path)
                if not found.is_native or now is None or now.device != found.device:
                    return
                found = now  # the tree below this one: the mount was switching to another tree
                continue
        own = _own_processes(daemon)  # the mount may have started one since the last look
        others = [pid for pid in pids if pid not in own]
        if others or not own or time.monotonic() > deadline_s:
            raise _busy(found.path, others)
        time.sleep(0.01)
        found = mounted_at(found.path) or found  # `unmount` may have mounted `.diesel` anew


def _retired_trees(found: DatasetMount) -> dict[int, str]:
    """The devices of earlier versions' trees that are still in use, after a native mount has
    switched, by the IDs of their mounts. Empty if the daemon is dead or does not answer."""
    trees: dict[int, str] = {}
    if found.is_native and "@" not in found.source:  # the mount follows its dataset
        with suppress(DieselError):
            match stats(found.path).get("follow"):
                case {"retired_trees": list(some)}:
                    trees = {int(each["mount"]): str(each["device"]) for each in some}
    return trees


def _check_retired_trees(found: DatasetMount, own: Sequence[int]) -> None:
    """Raises BusyError if a file of an earlier version is still in use after
    `OWN_PROCESSES_BUSY_S`: the daemon's figures may be a second old. Does nothing if a tree of an
    earlier version is mounted elsewhere."""
    deadline_s = time.monotonic() + OWN_PROCESSES_BUSY_S
    while trees := _retired_trees(found):
        if any(each.tree.device in trees.values() for each in dataset_mounts(mounts())):
            return
        holders = holders_of_trees(trees)
        if holders and not {*holders} - {*own}:  # only the worker, which takes over its contents
            return
        if time.monotonic() > deadline_s:
            raise _busy(found.path, [pid for pid in holders if pid not in own])
        time.sleep(0.1)


def _force(found: DatasetMount, daemon: int | None, own: Sequence[int], patience: Patience) -> None:
    """The connection with the kernel ends first, so that no later step can wait for the daemon."""
    path, device = found.path, found.device
    abort_file = syscalls.open_abort(device)
    try:
        if is_mounted(path, device):  # otherwise the mount has ended by itself
            end_connection(abort_file, path, device)
    finally:
        if abort_file >= 0:
            os.close(abort_file)
    if daemon is not None:
        # The processes may be stopped (SIGSTOP). The daemon comes last, as it cleans up after its
        # children
        for pids in (children_of(daemon), [daemon]):
            if ends_within(daemon, 1.0):
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    try:
        while is_mounted(path, device):  # twice, if a switch to another tree was not finished
            unmount(path, lazy=True)
    except DieselError:
        if is_mounted(path, device):  # otherwise the daemon has unmounted it meanwhile
            raise
    stuck = killed_servants_of(path)
    for pid in stuck:
        free_killed(pid, patience.idle_s)
    try:
        _wait([*own, *stuck], path, patience)
    except DeadlineError as error:  # a process waits in the kernel, where no signal reaches it
        error.advice = f"root can end it: {_abort_command(device)}"
        raise


def _abort_command(device: str) -> str:
    place = "/sys/fs/fuse/connections"
    mount = "" if os.path.ismount(place) else f"mount -t fusectl none {place} && "
    return f"{mount}echo 1 > {place}/{device.partition(':')[2]}/abort"


def _remove_dead_sockets() -> None:
    with suppress(OSError, DieselError):
        remove_dead_sockets(runtime_folder())


def _warn_still_mounted(left: Mapping[MountEntry, int], path: str, daemon: int) -> None:
    places = [f"on {each.path}, as process {pid} sees it" for each, pid in left.items()]
    logger.warning(
        "%s is unmounted; its file system is still mounted elsewhere (%s), and the daemon "
        "(process %d) serves it until it is unmounted there, too",
        path,
        "; ".join(sorted(places)[:_PIDS_SHOWN]),
        daemon,
    )


def _wait(own: Sequence[int], path: str, patience: Patience) -> None:
    """Waits for the processes, the daemon first, as long as they use processor time: the kernel may
    have to forget millions of files. Raises DeadlineError."""
    now_s = begun_s = worked_s = logged_s = time.monotonic()
    ticks = processor_ticks(own)
    for pid in own:
        while not ends_within(pid, 0.1):
            now_s = time.monotonic()
            before, ticks = ticks, processor_ticks(own)
            worked_s = now_s if ticks > before else worked_s
            if now_s - worked_s > patience.idle_s or now_s - begun_s > patience.total_s:
                raise DeadlineError(
                    f"{path} is unmounted, but its daemon (process {pid}) has not ended",
                    advice=f"kill -9 {pid}",
                )
            if now_s - logged_s > patience.log_interval_s:
                logged_s = now_s
                logger.warning(
                    "%s is unmounted; for %.0f s its processes have been forgetting the files that "
                    "the kernel knew",
                    path,
                    now_s - begun_s,
                )
