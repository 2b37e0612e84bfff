"""System calls that Python lacks: mounts, settings of FUSE connections, inotify, page cache.

A **connection** is the kernel's side of a FUSE mount, through which it sends requests to the
mount's daemon. `device` identifies it: the number of the mount's file system (`0:43`), as in
`/proc/*/mountinfo`. So nothing here opens a file of the mount, which could wait for a daemon that
hangs. A failed call raises OSError, unless its docstring says otherwise. Any thread.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import stat
import struct
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import DeadlineError, PermissionDenied
from .daemons import minimal_environment

MNT_FORCE = 1
MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

# The same numbers on every architecture: they came after the tables had been unified
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_SYS_PIDFD_GETFD = 438
_AT_FDCWD, _AT_EMPTY_PATH, _OPEN_TREE_CLONE_CLOEXEC = -100, 0x1000, 1 | os.O_CLOEXEC
_AT_RECURSIVE = 0x8000
_AT_STATX_DONT_SYNC, _STATX_DEVICE_AT = 0x4000, 34  # in units of 4 bytes
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_FROM_ITSELF, _MOVE_MOUNT_TO_ITSELF, _MOVE_MOUNT_BENEATH = 4, 0x40, 0x200
MOUNT_READ_ONLY, MOUNT_NOSUID, MOUNT_NODEV, MOUNT_NOEXEC, MOUNT_NOATIME = 1, 2, 4, 8, 0x10
"""Attributes of a mount (mount_setattr(2))."""

READS_AHEAD_MAX = 256
"""READ requests of the kernel's read-ahead that may wait for the daemon at once. With the kernel's
default of 12, a read from memory takes 7.8 s instead of 2 ms while 12 files of a few hundred KiB
wait for the store."""

READ_AHEAD_KIB = 1024
"""The largest READ request (256 pages). With the kernel's 128 KiB, reading a large file takes eight
times as many requests."""

_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *converted)))


def _checked(result: int, path: str | None = None) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return result


def punch_hole(file: int, start: int, size: int) -> None:
    """Free these bytes of a file on the disk; they then read as zeros (fallocate(2)). EOPNOTSUPP if
    the file system cannot do that."""
    offset, length = ctypes.c_int64(start), ctypes.c_int64(size)
    _checked(_libc.fallocate64(file, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, length))


def umount2(mountpoint: str, flags: int = 0) -> None:
    """Does not follow a link at `mountpoint` (umount2(2))."""
    _checked(_libc.umount2(os.fsencode(mountpoint), flags | _UMOUNT_NOFOLLOW), mountpoint)


def _control_folder(connection: str) -> int:
    """A descriptor of the connection's folder in fusectl, the file system that controls all FUSE
    connections. `connection` is the minor device number.

    If fusectl is not mounted, root mounts it at no path, so nothing has to be cleaned up.
    """
    with suppress(OSError):
        return os.open(f"/sys/fs/fuse/connections/{connection}", os.O_PATH | os.O_DIRECTORY)
    root = new_mount("fusectl", (), MOUNT_NOSUID | MOUNT_NODEV | MOUNT_NOEXEC)
    try:
        return os.open(connection, os.O_PATH | os.O_DIRECTORY, dir_fd=root)
    finally:
        os.close(root)


def _open_control(device: str, name: str) -> int:
    folder = _control_folder(device.partition(":")[2])
    try:
        return os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)


def open_abort(device: str) -> int:
    """A descriptor to which "1" is written to abort this connection, and no later one of the same
    number; -1 if this user may not have it."""
    try:
        return _open_control(device, "abort")
    except OSError:
        return -1


def tune(device: str, read_ahead_kib: int = READ_AHEAD_KIB) -> None:
    """Make READ requests large and let many wait at once, as far as this user may. The read-ahead
    applies to files that are opened later."""
    for name in ("max_background", "congestion_threshold"):
        with suppress(OSError), open(_open_control(device, name), "wb", buffering=0) as file:
            file.write(str(READS_AHEAD_MAX).encode())
    with suppress(OSError), open(f"/sys/class/bdi/{device}/read_ahead_kb", "w") as file:
        file.write(str(read_ahead_kib))


def device_of(file: int) -> str:
    """The device number of an open file or mount, without a request to a daemon (unlike
    stat(2))."""
    answer = (ctypes.c_uint32 * 64)()  # struct statx has 256 bytes
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    _checked(_libc.statx(file, b"", flags, 0, ctypes.byref(answer)))
    major, minor = answer[_STATX_DEVICE_AT : _STATX_DEVICE_AT + 2]
    return f"{major}:{minor}"


def set_read_ahead(file: int, kib: int) -> None:
    """As far as this user may. If the file system has no block device, sysfs lists it by a name,
    which Linux 6.10 gives."""
    device = os.fstat(file).st_dev
    names = [f"{os.major(device)}:{os.minor(device)}"]
    answer = bytearray(_SYSFS_PATH_BYTES)
    with suppress(OSError):
        fcntl.ioctl(file, _FS_IOC_GETFSSYSFSPATH, answer)
        names.append(answer[1 : 1 + answer[0]].decode().rpartition("/")[2])
    for name in names:
        with suppress(OSError):
            Path(f"/sys/class/bdi/{name}/read_ahead_kb").write_text(str(kib), encoding="ascii")


# mounting ---------------------------------------------------------------------------------------

_ATTRIBUTE_OF = {
    "ro": MOUNT_READ_ONLY,
    "nosuid": MOUNT_NOSUID,
    "nodev": MOUNT_NODEV,
    "noatime": MOUNT_NOATIME,
}
_MS_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noatime": 1024}
_FUSE_DEV_IOC_CLONE = 0x8004E500


def mount_fuse(mountpoint: str, options: Sequence[str]) -> int:
    """Root mounts with mount(2), other users with fusermount3. Returns the descriptor of the
    connection. Raises PermissionDenied with advice, and DeadlineError if fusermount3 hangs."""
    mount = _mount_as_user if os.geteuid() else _mount_as_root
    return mount(mountpoint, options)


_IN_A_CONTAINER = "a container needs --device /dev/fuse --cap-add SYS_ADMIN"
_LOAD_FUSE = f"`modprobe fuse` as root loads FUSE; {_IN_A_CONTAINER}"
_ADVICE = {
    errno.EACCES: _IN_A_CONTAINER,
    errno.EPERM: _IN_A_CONTAINER,
    errno.ENODEV: _LOAD_FUSE,
    errno.ENXIO: _LOAD_FUSE,
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise fs.file-max",
    errno.ENOSPC: "unmount something, or raise fs.mount-max",
}
"""What the user can do about errors of opening /dev/fuse and of mounting."""

_HELPER_DEADLINE_S = 30.0
"""fusermount3 needs milliseconds."""


def _open_fuse() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PermissionDenied(
            f"cannot open /dev/fuse: {error.strerror}", advice=_ADVICE.get(error.errno or 0, "")
        ) from error


def new_fuse(options: Sequence[str]) -> tuple[int, int]:
    """Make a FUSE mount that is attached at no path; for root. Returns the descriptors of its
    connection and of the mount. Also raises PermissionDenied."""
    device = _open_fuse()
    try:
        fields = [("rootmode", "40000"), ("user_id", "0"), ("group_id", "0"), ("fd", str(device))]
        attributes = 0
        for name, _, value in (part.partition("=") for part in options):
            attributes |= _ATTRIBUTE_OF.get(name, 0)
            if name == "ro" or name not in _ATTRIBUTE_OF:
                fields.append(("source" if name == "fsname" else name, value))
        return device, new_mount("fuse", fields, attributes)
    except BaseException:
        os.close(device)
        raise


def _mount_as_root(mountpoint: str, options: Sequence[str]) -> int:
    named = dict(part.partition("=")[::2] for part in options)
    flags = sum(_MS_FLAGS[name] for name in named if name in _MS_FLAGS)
    try:
        root_mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    except OSError as error:
        raise mount_error(mountpoint, error.strerror or str(error)) from error
    device = _open_fuse()
    data = [
        f"fd={device}",
        f"rootmode={root_mode:o}",
        f"user_id={os.getuid()}",
        f"group_id={os.getgid()}",
    ]
    data += [name for name in ("default_permissions", "allow_other") if name in named]
    result = _libc.mount(
        named["fsname"].encode(),
        os.fsencode(mountpoint),
        f"fuse.{named['subtype']}".encode(),
        ctypes.c_ulong(flags),
        ",".join(data).encode(),
    )
    if result < 0:
        number = ctypes.get_errno()
        os.close(device)
        raise mount_error(mountpoint, os.strerror(number))
    return device


def mount_error(mountpoint: str, reason: str) -> PermissionDenied:
    """Has advice if `reason` contains the text of a known errno."""
    advice = next((text for number, text in _ADVICE.items() if os.strerror(number) in reason), "")
    return PermissionDenied(f"cannot mount on {mountpoint}: {reason}", advice=advice)


def _mount_as_user(mountpoint: str, options: Sequence[str]) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            done = subprocess.run(
                ["fusermount3", "-o", ",".join(options), "--", mountpoint],
                env={**minimal_environment(), "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                timeout=_HELPER_DEADLINE_S,
                check=False,
            )
        except OSError as error:
            raise PermissionDenied(
                f"cannot start fusermount3: {error.strerror}", advice="install the package fuse3"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"cannot mount on {mountpoint}: fusermount3 has not ended within"
                f" {_HELPER_DEADLINE_S:g} s",
                advice="check what is mounted there, and above it (`findmnt`)",
            ) from error
        reason = done.stderr.decode(errors="replace").strip()
        if done.returncode:
            raise mount_error(mountpoint, reason)
        theirs.close()  # otherwise recv_fds would wait for ever if nothing was sent
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        detail = f": {reason}" if reason else ""
        raise mount_error(mountpoint, f"fusermount3 gave no descriptor{detail}")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def clone_mount(mountpoint: str, *, recursive: bool = False) -> int:
    """A descriptor of a second mount of the same file system, at no path (open_tree(2), Linux 5.2,
    root only); `recursive`: with the mounts inside it. Files opened through it do not make the
    first mount busy. The file system lives until the descriptor is closed."""
    flags = _OPEN_TREE_CLONE_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return _syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(mountpoint), flags)


def copy_mount(mount: int) -> int:
    """As `clone_mount`, of the attached mount with the descriptor `mount`."""
    return _syscall(_SYS_OPEN_TREE, mount, b"", _OPEN_TREE_CLONE_CLOEXEC | _AT_EMPTY_PATH)


def new_mount(kind: str, options: Sequence[tuple[str, str]], attributes: int) -> int:
    """A descriptor of a new mount of a file system, attached at no path (fsopen(2), fsconfig(2),
    fsmount(2); Linux 5.2, root only). The mount ends when the descriptor is closed, unless it was
    attached before. An option with an empty value is a flag. The OSError has the kernel's reason.
    """
    context = _syscall(_SYS_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC)
    try:
        for name, value in options:
            command = _FSCONFIG_SET_STRING if value else _FSCONFIG_SET_FLAG
            text = os.fsencode(value) if value else None
            _syscall(_SYS_FSCONFIG, context, command, name.encode(), text, 0)
        _syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    except OSError as error:
        reason = _mount_log(context)
        raise OSError(error.errno, f"{error.strerror}{reason and f' ({reason})'}") from error
    finally:
        os.close(context)


def _mount_log(context: int) -> str:
    with suppress(OSError):
        return os.read(context, 4096).decode(errors="replace").strip()
    return ""


def attach_mount(mount: int, path: str, *, folder: int = _AT_FDCWD, beneath: bool = False) -> None:
    """Attach a detached mount at a path relative to `folder` (move_mount(2), Linux 5.2); an empty
    path is `folder` itself. With `beneath`, it is attached below the topmost mount there, which
    hides it (Linux 6.5).
    """
    flags = _MOVE_MOUNT_FROM_ITSELF | (_MOVE_MOUNT_BENEATH if beneath else 0)
    flags |= 0 if path else _MOVE_MOUNT_TO_ITSELF
    _syscall(_SYS_MOVE_MOUNT, mount, b"", folder, os.fsencode(path), flags)


def can_mount_beneath() -> bool:
    """Whether the kernel can attach a mount beneath another one (Linux 6.5)."""
    try:
        attach_mount(-1, "/", beneath=True)
    except OSError as error:
        return error.errno == errno.EBADF  # EINVAL: the kernel does not know the flag
    return True


def mount_id(file: int) -> int:
    """The number of an open file's mount in mountinfo."""
    lines = Path(f"/proc/thread-self/fdinfo/{file}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def detach_quietly(mountpoint: str) -> None:
    """Unmount lazily: the mount disappears now, and ends when nothing uses it. Ignores errors."""
    with suppress(OSError):
        umount2(mountpoint, MNT_DETACH)
        return
    with suppress(OSError, subprocess.SubprocessError):
        command = ["fusermount3", "-u", "-z", "--", mountpoint]
        subprocess.run(
            command, capture_output=True, env=minimal_environment(), timeout=10, check=False
        )


def clone(descriptor: int) -> int:
    """Another descriptor of a connection. Both take requests from one queue; a request is answered
    through the descriptor that took it."""
    cloned = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(cloned, _FUSE_DEV_IOC_CLONE, struct.pack("I", descriptor))
    except OSError:
        os.close(cloned)
        raise
    return cloned


def clone_of_process(pid: int) -> int:
    """As `clone`, of the connection that another process has open, even if that process waits in
    the kernel (pidfd_getfd(2), Linux 5.6). ENOENT if it has none open, EPERM if this user may not
    debug it."""
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}") == "/dev/fuse":
                taken = _syscall(_SYS_PIDFD_GETFD, process, int(name), 0)
                try:
                    return clone(taken)
                finally:
                    os.close(taken)
    finally:
        os.close(process)
    raise FileNotFoundError(errno.ENOENT, f"process {pid} has no FUSE connection open")


# watches, the page cache, processes --------------------------------------------------------------

_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000
_SYS_CACHESTAT = 451  # Linux 6.5; the same on every architecture
_PR_SET_PDEATHSIG = 1
_CLONE_FILES = 0x400
_CLONE_FS = 0x200
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX = -1, -3, 32 << 20
_CAP_SYS_ADMIN = 21
_FS_IOC_GETFSSYSFSPATH, _SYSFS_PATH_BYTES = 0x80811501, 129


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


def inotify_init() -> int:
    """Reads of the descriptor do not block."""
    return _checked(_libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK))


def inotify_add(descriptor: int, path: bytes, events: int) -> int:
    """`events` are those of inotify(7). Returns the watch's number."""
    return _checked(_libc.inotify_add_watch(descriptor, path, events))


def inotify_remove(descriptor: int, watch: int) -> None:
    _checked(_libc.inotify_rm_watch(descriptor, watch))


def cached_bytes(file: int, start: int, size: int) -> int:
    """How many of the `size` bytes from `start` (a multiple of the page size) on are in the page
    cache, counted in whole pages.

    It uses cachestat(2) if the kernel has it, else mincore(2) of a mapping. cachestat counts pages
    of failed reads, too; `readable_cached_bytes` does not.
    """
    if not size:
        return 0
    part, counts = _CachestatRange(start, size), _Cachestat()
    try:
        _syscall(_SYS_CACHESTAT, file, ctypes.byref(part), ctypes.byref(counts), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return readable_cached_bytes(file, start, size)
    return int(counts.cache) * mmap.PAGESIZE


def readable_cached_bytes(file: int, start: int, size: int) -> int:
    """As `cached_bytes`, but a page counts only if its read has succeeded. This takes some 15 us
    longer (mincore(2) of a mapping)."""
    if not size:
        return 0
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # ctypes gives the address of writable ones only
    with mmap.mmap(file, size, mmap.MAP_PRIVATE, writable, offset=start) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        _checked(_libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages))
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def map_large_allocations(least_bytes: int) -> None:
    """The allocator then maps each piece of at least this size by itself: it uses only pages that
    are written to, and returns to the kernel when freed. Needs glibc."""
    with suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, least_bytes)


def keep_large_allocations(most_bytes: int) -> None:
    """Undo `map_large_allocations`: the allocator reuses freed memory, up to 32 MiB in one piece,
    and keeps up to `most_bytes` of it. To get 8 MiB of new memory from the kernel takes as long as
    to read 8 MiB from an SSD. Needs glibc."""
    with suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
        _libc.mallopt(_M_TRIM_THRESHOLD, most_bytes)


def own_working_folder() -> None:
    """The calling thread alone gets it."""
    _checked(_libc.unshare(_CLONE_FS))


def own_descriptors() -> None:
    """Give the calling thread its own copy of the process's descriptors. The thread cannot share
    descriptors again: use it for one task, never one of a pool."""
    _checked(_libc.unshare(_CLONE_FILES))


def may_administrate() -> bool:
    """Whether this process has CAP_SYS_ADMIN, perhaps only in its user namespace."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "")
    return bool(int(effective.partition(":")[2] or "0", 16) >> _CAP_SYS_ADMIN & 1)


def die_with_parent(number: int) -> None:
    """The kernel then sends this process the signal `number` when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def wait_readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
