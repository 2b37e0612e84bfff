"""The processes of a mount: those that hold it busy, and the daemon that serves it.

They are found by reading /proc alone: open files by the mount ID in their fdinfo, mapped files by
their device. No file of the mount is touched, so a dead or hung mount does no harm. Only root sees
the processes of other users. Any thread.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ..system import syscalls
from ..system.mountinfo import MountEntry, mounts

_MARK = "diesel-mount-"


def mark_as_daemon(device: str) -> int:
    """Marks this process as the daemon of a mount, for as long as the returned descriptor is open.

    The mark is an empty memfd, whose name other processes of the user, and root's, see in /proc.
    Unlike a file with a process ID it can neither be left behind nor be wrong.
    """
    return os.memfd_create(_MARK + device, os.MFD_CLOEXEC)


def daemon_of(device: str) -> int | None:
    """The supervisor of a mount; None where it has ended, or this user may not see it."""
    mark = f"/memfd:{_MARK}{device} (deleted)"
    for pid in _processes():
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") == mark:
                        return pid
    return None


def children_of(pid: int) -> list[int]:
    """The children of a process; none where it has ended."""
    found = []
    for each in _processes():
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{each}/stat").read_bytes()
            if int(stat.rpartition(b")")[2].split()[1]) == pid:
                found.append(each)
    return found


def other_mounts_of(mount: MountEntry) -> dict[MountEntry, int]:
    """The other mounts of the same file system: at another path, or in another mount namespace, as
    a container has one. Each comes with a process that sees it. Only those are found that this user
    may see.
    """
    found = _mounts_of(_processes(), mount.device)
    return {each: pid for pid, each in found if each.mount_id != mount.mount_id}


def holders_of(device: str) -> list[int]:
    """The processes with a file or folder of the mount open or mapped, or as working folder."""
    processes = _processes()
    mount_ids = {each.mount_id for _, each in _mounts_of(processes, device)}
    mapped = "{:02x}:{:02x}".format(*map(int, device.split(":")))
    return [pid for pid in processes if _holds(pid, mount_ids, mapped)]


def ends_within(pid: int, within_s: float) -> bool:
    """Whether any process, child or not, has ended or ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return syscalls.wait_readable(descriptor, within_s)
    finally:
        os.close(descriptor)


def processor_ticks(pids: Sequence[int]) -> int:
    """The processor time of these processes so far, in clock ticks. It rises as long as one of them
    works, in the kernel too.
    """
    found = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            found += int(fields[11]) + int(fields[12])
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _mounts_of(processes: list[int], device: str) -> Iterator[tuple[int, MountEntry]]:
    """The mounts of a device in all namespaces, each with a process of its namespace."""
    seen: set[str] = set()
    for pid in processes:
        with suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in seen:
                seen.add(namespace)
                yield from ((pid, each) for each in mounts(str(pid)) if each.device == device)


def _holds(pid: int, mount_ids: set[int], mapped: str) -> bool:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fdinfo"):
            with suppress(OSError):
                if _mount_id(f"/proc/{pid}/fdinfo/{descriptor}") in mount_ids:
                    return True
    for folder in ("cwd", "root"):
        with suppress(OSError), ExitStack() as stack:
            # O_PATH names a folder without opening it, so the file system is not asked.
            stack.callback(os.close, named := os.open(f"/proc/{pid}/{folder}", os.O_PATH))
            if _mount_id(f"/proc/self/fdinfo/{named}") in mount_ids:
                return True
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            if line.split(maxsplit=4)[3].decode() == mapped:
                return True
    return False


def _mount_id(fdinfo: str) -> int:
    for line in Path(fdinfo).read_bytes().splitlines():
        if line.startswith(b"mnt_id:"):
            return int(line[7:])
    return -1
