"""Finds the processes that serve a mount and those that keep it busy.

Open files are found by the mount ID in their fdinfo, mapped files by their device. Only root sees
the processes of other users. Any thread may call the functions.
"""

import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ...system import syscalls
from ...system.mountinfo import MountEntry, mounts
from .mountpoint import DatasetMount, dataset_mounts

_MARK = "diesel-mount-"

_KILLED_BIT = 1 << (signal.SIGKILL - 1)

_REQUEST_BYTES = 2 << 20
"""The kernel hands over a FUSE request only if the buffer could hold the longest possible one."""

_FAILED_ALONE = (errno.E2BIG, errno.EIO, errno.ENOENT, errno.EINTR)
"""These errors of a read concern one request; the next one can be read."""

_FREED_S = 0.05
"""The time between two attempts to free a killed process."""


def mark_as_daemon(device: str) -> int:
    """Marks this process as the daemon of the mount with this device number, for as long as the
    returned descriptor is open.

    The mark is an empty memfd; its name is in /proc. Unlike a file with a process ID, it can
    neither be left behind nor be wrong.
    """
    return os.memfd_create(_MARK + device, os.MFD_CLOEXEC)


def daemon_of(device: str) -> int | None:
    """The process ID of a mount's daemon (its supervisor); None if it has ended, or is
    invisible to this user.

    The newest mark counts: the kernel reuses a device number at once, and the old supervisor may
    need some time to end.
    """
    mark = f"/memfd:{_MARK}{device} (deleted)"
    found: dict[int, int] = {}  # by the time of the mark
    for pid in _processes():
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{descriptor}"
                with suppress(OSError):
                    if os.readlink(path) == mark:
                        found[os.stat(path).st_ctime_ns] = pid
    return found[max(found)] if found else None


def children_of(pid: int) -> list[int]:
    found = []
    for each in _processes():
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{each}/stat").read_bytes()
            if int(stat.rpartition(b")")[2].split()[1]) == pid:
                found.append(each)
    return found


def descendants_of(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # which grows meanwhile
        found += children_of(each)
    return found[1:]


def was_killed(thread: int) -> bool:
    """Whether a fatal signal is pending for a thread, so that it ends as soon as it stops waiting.
    False if the thread is invisible to this user."""
    return _status_of(thread)[1]


def is_killed_but_waits(pid: int) -> bool:
    """Whether a killed process cannot end because a thread of it waits uninterruptibly."""
    with suppress(OSError):
        threads = map(int, os.listdir(f"/proc/{pid}/task"))
        return any(_status_of(thread) == ("D", True) for thread in threads)
    return False


def killed_servants_of(mountpoint: str) -> list[int]:
    """The processes of a mount at this path that were killed but cannot end. The mount's supervisor
    may have ended before them, so they are recognised by their last argument, the mount point."""
    return [
        pid
        for pid in _processes()
        if _last_argument(pid) == os.fsencode(mountpoint) and is_killed_but_waits(pid)
    ]


def free_killed(pid: int, within_s: float) -> bool:
    """Ends a killed process that waits in the kernel for a request which no process will answer.
    Returns whether it ended in time.

    The prefetch worker gets into that state if it pushes a page that a READ holds, and the server
    was killed before it took the READ: the worker keeps the connection open, the connection keeps
    the READ, and the READ keeps the worker. The kernel fails requests that were taken through a
    descriptor that is then closed; so this function takes all waiting requests through a clone of
    the worker's descriptor, and closes the clone. It needs no root rights. It must not be called
    while another process serves the connection, since requests would be lost.
    """
    end_s = time.monotonic() + within_s
    while not ends_within(pid, _FREED_S):
        if time.monotonic() > end_s:
            return False
        with suppress(OSError), ExitStack() as stack:
            stack.callback(os.close, device := syscalls.clone_of_process(pid))
            os.set_blocking(device, False)
            while True:
                try:
                    os.read(device, _REQUEST_BYTES)
                except OSError as error:
                    if error.errno not in _FAILED_ALONE:
                        break
    return True


def other_mounts_of(mount: DatasetMount, retired: Mapping[int, str]) -> dict[MountEntry, int]:
    """The other mounts that the same daemon serves, at another path or in another mount namespace,
    each with a process that sees it. `retired` maps the mount IDs of trees of earlier versions to
    their devices. Mounts that this user may not see are left out."""
    return {
        each.tree: pid
        for pid, entries in _tables_of(_processes())
        for each in dataset_mounts(entries)
        if each.tree.mount_id != mount.tree.mount_id
        and (
            each.tree.device in (mount.tree.device, *retired.values())
            or each.device == mount.device != ""
        )
    }


def holders_of(mount: DatasetMount) -> list[int]:
    """The processes that have a file or folder of the mount open, mapped, or as working or root
    folder, at this path or through another mount of the same file system."""
    return holders_of_trees(
        {each.mount_id: each.device for each in (mount.tree, mount.fuse) if each}
    )


def holders_of_trees(trees: Mapping[int, str]) -> list[int]:
    """As `holders_of`, but also for file systems that are unmounted. `trees` maps the present or
    past ID of each mount to the device of its file system."""
    if not trees:
        return []
    devices = set(trees.values())
    processes = _processes()
    mount_ids = {*trees} | {
        each.mount_id
        for _, entries in _tables_of(processes)
        for each in entries
        if each.device in devices
    }
    mapped = {"{:02x}:{:02x}".format(*map(int, each.split(":"))) for each in devices}
    return [pid for pid in processes if _has_open(pid, mount_ids) or _has_mapped(pid, mapped)]


def openers_of(mount: DatasetMount) -> list[int]:
    """As `holders_of`, but without mapped files, and only through this very mount."""
    mount_ids = {each.mount_id for each in (mount.tree, mount.fuse) if each}
    return [pid for pid in _processes() if _has_open(pid, mount_ids)]


def ends_within(pid: int, within_s: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return syscalls.wait_readable(descriptor, within_s)
    finally:
        os.close(descriptor)


def processor_ticks(pids: Sequence[int]) -> int:
    """Their processor time so far, in clock ticks."""
    found = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            found += int(fields[11]) + int(fields[12])
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _tables_of(processes: Sequence[int]) -> Iterator[tuple[int, list[MountEntry]]]:
    """The mounts of each mount namespace, with one process in it."""
    seen: set[str] = set()
    for pid in processes:
        with suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in seen:
                seen.add(namespace)
                yield pid, list(mounts(str(pid)))


def _last_argument(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().removesuffix(b"\0").rpartition(b"\0")[2]
    return b""


def _has_open(pid: int, mount_ids: set[int]) -> bool:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fdinfo"):
            with suppress(OSError):
                if _mount_id(f"/proc/{pid}/fdinfo/{descriptor}") in mount_ids:
                    return True
    for folder in ("cwd", "root"):
        with suppress(OSError), ExitStack() as stack:
            # O_PATH names a folder without opening it, so the file system gets no request
            stack.callback(os.close, named := os.open(f"/proc/{pid}/{folder}", os.O_PATH))
            if _mount_id(f"/proc/self/fdinfo/{named}") in mount_ids:
                return True
    return False


def _has_mapped(pid: int, devices: set[str]) -> bool:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            if line.split(maxsplit=4)[3].decode() in devices:
                return True
    return False


def _mount_id(fdinfo: str) -> int:
    for line in Path(fdinfo).read_bytes().splitlines():
        if line.startswith(b"mnt_id:"):
            return int(line[7:])
    return -1


def _status_of(thread: int) -> tuple[str, bool]:
    """The state letter of a thread, and whether a fatal signal is pending; "" and False if it is
    invisible."""
    with suppress(OSError, ValueError, KeyError):
        text = Path(f"/proc/{thread}/status").read_text(encoding="ascii", errors="replace")
        status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        pending = int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)
        return status["State"].strip()[:1], bool(pending & _KILLED_BIT)
    return "", False
