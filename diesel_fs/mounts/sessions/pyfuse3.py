"""The portable session: it uses pyfuse3, and so libfuse. It is the fallback, and the reference in
tests.

pyfuse3 does not pass the inode number to `read`, so files are opened by OPEN: to open, read and
close a file costs three requests.

For each request pyfuse3 takes a trio lock and waits for the kernel by trio, which costs more than
most replies. So `installed` replaces pyfuse3's module attribute `trio` by a `TrioStandIn`: a task
may take the lock again at once, and waits for the kernel by `RequestWait`.

Concurrency: everything runs in trio's thread. Only `read` and the requests for `.diesel` wait, and
nothing waits between filling a reply and returning it. So the reply objects are reused: pyfuse3
copies them before another task runs. A process has one session, because pyfuse3 keeps its state in
globals.
"""

import errno
import functools
import itertools
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import TracebackType
from typing import ClassVar, Concatenate, ParamSpec, TypeVar

import pyfuse3
import trio

from ...cache.waiting import WaitCause, observer_set
from ...format.entries import NAME_BYTES_MAX, Bytes
from ...system import syscalls
from ...system.daemons import minimal_environment_set
from ..tree.attributes import FOREVER_S, HIDDEN_ROOT, Attributes, FuseErrno, Listing
from ..tree.vfs import BLOCK_BYTES, ChildColumns, Vfs
from .session import RequestWait
from .worker_side import WorkerSide

TASKS_MAX = 10_000
"""Requests under way at once. A READ that waits holds a task, and must not delay others."""

PART_ENTRIES = 1024
"""Children of a folder that are prepared together; one READDIR reply holds 24 to some 6,000."""

PARTS_KEPT = 64

NUDGE_S = 0.25
"""The interval of signals while READs wait. After poll(2) has reported a request, the request can
vanish, since its process was killed. Then pyfuse3's read(2) would block the loop until the next
request; the signal ends it with EINTR, which pyfuse3 expects."""

_UNSEEN = 0
"""The thread ID of all requests, since pyfuse3 does not pass it."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Handler = Callable[Concatenate["_Operations", int, _P], _T]
_Answer = Callable[Concatenate["_Operations", int, _P], Coroutine[object, None, _T]]


def _answered(request: str) -> Callable[[_Handler[_P, _T]], _Answer[_P, _T]]:
    """Turns a handler that does not wait into the coroutine that pyfuse3 needs, and counts and
    times its calls."""

    def wrap(handler: _Handler[_P, _T]) -> _Answer[_P, _T]:
        @functools.wraps(handler)
        async def answer(self: "_Operations", node: int, /, *args: _P.args, **kw: _P.kwargs) -> _T:
            self.vfs.requests[request] += 1
            begun_s = time.monotonic()
            try:
                return handler(self, node, *args, **kw)
            except BaseException as fault:
                raise self.fuse_error(fault, request, node) from None
            finally:
                self.vfs.waits.answered(_UNSEEN, WaitCause.METADATA, begun_s)

        return answer

    return wrap


class _Operations(pyfuse3.Operations):
    """pyfuse3 refuses requests without a handler here with ENOSYS."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, vfs: Vfs) -> None:
        super().__init__()
        self.vfs = vfs
        self._entry = self._blank()
        self._listed = self._blank()
        self._opened = pyfuse3.FileInfo(keep_cache=True)
        self._parts: OrderedDict[tuple[int, int, int], Listing] = OrderedDict()
        self._reads = itertools.count(1)
        self.worker = WorkerSide(vfs)
        self.started: Callable[[], object] = int

    def init(self) -> None:
        """pyfuse3 calls it during the kernel's first request."""
        self.started()

    def fuse_error(self, fault: BaseException, request: str, node: int) -> pyfuse3.FUSEError:
        """For any exception of a request: one that is no FUSEError would end the mount."""
        return pyfuse3.FUSEError(self.vfs.errno_of(fault, request, node))

    def _blank(self) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_uid, entry.st_gid = self.vfs.owner.uid, self.vfs.owner.gid
        entry.st_blksize = BLOCK_BYTES
        entry.attr_timeout = FOREVER_S
        return entry

    def _entry_attributes(self, found: Attributes) -> pyfuse3.EntryAttributes:
        entry = self._entry
        entry.st_ino, entry.st_mode, entry.st_size = found.node, found.mode, found.size
        entry.st_blocks = -(-found.size // 512)
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = found.mtime_ns
        entry.entry_timeout = found.name_valid_s
        return entry

    async def lookup(
        self, node: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if node < HIDDEN_ROOT:
            return await self._lookup(node, name)
        found = await self._waited("lookup", node, self.vfs.lookup_hidden(node, name))
        self.vfs.count_lookup(found.node)
        return self._entry_attributes(found)

    @_answered("lookup")
    def _lookup(self, node: int, name: bytes) -> pyfuse3.EntryAttributes:
        found = self.vfs.lookup(node, name)
        if found.node >= self.vfs.first_counted_node:
            self.vfs.count_lookup(found.node)
        return self._entry_attributes(found)

    async def _waited(self, request: str, node: int, result: Awaitable[_T]) -> _T:
        self.vfs.requests[request] += 1
        try:
            with _nudged(self.vfs), self._waiting(WaitCause.METADATA, time.monotonic()):
                return await result
        except GeneratorExit:
            raise
        except BaseException as fault:  # a real Cancelled comes again at the session's next wait
            raise self.fuse_error(fault, request, node) from None

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self.worker.on_forget(self.vfs.forget_all(inode_list))

    @_answered("getattr")
    def getattr(self, node: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._entry_attributes(self.vfs.attributes(node))

    @_answered("readlink")
    def readlink(self, node: int, ctx: pyfuse3.RequestContext) -> bytes:
        return self.vfs.link_target(node)

    @_answered("open")
    def open(self, node: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        self._opened.fh = node
        return self._opened

    async def read(self, node: int, off: int, size: int) -> bytes:
        vfs, worker = self.vfs, self.worker
        vfs.requests["read"] += 1
        begun_s = time.monotonic()
        # pyfuse3 does not pass the kernel's number of the request; any unique number will do.
        held = worker.try_hold(next(self._reads), node, off, size)
        worker.report_miss(node)
        found: Bytes | Sequence[Bytes] | None = None
        try:
            if held is None and (found := vfs.read_nowait(node, off, size)) is not None:
                vfs.waits.answered(_UNSEEN, WaitCause.MOUNT, begun_s)
            else:
                with _nudged(vfs), self._waiting(WaitCause.MOUNT, begun_s):
                    if held is None:
                        found = await vfs.read(node, off, size)
                    else:
                        found = await worker.held_or_read(held, lambda: vfs.read(node, off, size))
        except GeneratorExit:
            raise
        except BaseException as fault:  # a real Cancelled comes again at the session's next wait
            worker.note_failed_read()
            raise self.fuse_error(fault, "read", node) from None
        return found  # type: ignore[return-value]  # writev(2) takes anything with a buffer

    @contextmanager
    def _waiting(self, cause: WaitCause, begun_s: float) -> Iterator[None]:
        wait = self.vfs.waits.begin(_UNSEEN, cause, begun_s)
        try:
            with observer_set(wait):
                yield
        finally:
            self.vfs.waits.end(wait)

    @_answered("release")
    def release(self, node: int) -> None:
        pass

    @_answered("opendir")
    def opendir(self, node: int, ctx: pyfuse3.RequestContext) -> int:
        return node

    async def readdir(self, node: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Offset 0 is `.`, 1 is `..`, and child k has offset k + 2."""
        hidden = None
        if node >= HIDDEN_ROOT:
            hidden = await self._waited("readdir", node, self.vfs.hidden_listing(node))
        await self._readdir(node, start_id, token, hidden)

    @_answered("readdir")
    def _readdir(
        self, node: int, start_id: int, token: pyfuse3.ReaddirToken, hidden: Listing | None
    ) -> None:
        base, start_id = self.vfs.resume_listing(node, start_id)
        if start_id == 0 and not self._dot(token, b".", node, base + 1):
            return
        if start_id <= 1 and not self._dot(token, b"..", self.vfs.folder_parent(node), base + 2):
            return
        position = max(start_id - 2, 0)
        if hidden is not None:
            self._children(token, hidden, position, base)
            return
        first = position
        while (part := self._part(node, position)) is not None:
            position = self._children(token, part, position, base)
            if position < part.position + len(part.names):
                break  # the reply is full
        self.vfs.count_listed(node, first, position - first)

    @_answered("releasedir")
    def releasedir(self, node: int) -> None:
        pass

    def _dot(self, token: pyfuse3.ReaddirToken, name: bytes, node: int, after: int) -> bool:
        return pyfuse3.readdir_reply(
            token, name, self._entry_attributes(self.vfs.attributes(node)), after
        )

    def _children(
        self, token: pyfuse3.ReaddirToken, found: Listing, position: int, base: int
    ) -> int:
        """Returns the position after the children that fit."""
        skip = position - found.position
        entry, reply, mtime_before = self._listed, pyfuse3.readdir_reply, None
        behind = base + 3
        entry.entry_timeout = found.name_valid_s
        columns = (found.names, found.nodes, found.modes, found.sizes, found.mtimes_ns)
        rest = zip(*(column[skip:] for column in columns), strict=True)
        for name, node, mode, size, mtime_ns in rest:
            entry.st_ino = node
            entry.st_mode = mode
            entry.st_size = size
            entry.st_blocks = (size + 511) >> 9
            if mtime_ns != mtime_before:
                entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = mtime_before = mtime_ns
            if not reply(token, name, entry, position + behind):
                break
            if node >= HIDDEN_ROOT:  # the others are counted together, by `count_listed`
                self.vfs.count_lookup(node)
            position += 1
        return position

    def _part(self, folder: int, position: int) -> Listing | None:
        """None if there is no child `position`."""
        start = position - position % PART_ENTRIES
        key = folder, start, self.vfs.snapshot.version  # which may change attributes
        part = self._parts.get(key)
        if part is None:
            found = self.vfs.child_columns(folder, start, PART_ENTRIES)
            if found is None:
                return None
            part = self._parts[key] = _listing(start, found)
            if len(self._parts) > PARTS_KEPT:
                self._parts.popitem(last=False)
        else:
            self._parts.move_to_end(key)
        return part if position < start + len(part.names) else None

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        return await self._statfs(0)

    @_answered("statfs")
    def _statfs(self, node: int) -> pyfuse3.StatvfsData:
        space, reply = self.vfs.space(), pyfuse3.StatvfsData()
        reply.f_bsize = reply.f_frsize = BLOCK_BYTES
        reply.f_blocks, reply.f_files = space.blocks, space.entries
        reply.f_namemax = NAME_BYTES_MAX
        return reply

    @_answered("flush")
    def flush(self, node: int) -> None:
        raise FuseErrno(errno.ENOSYS)

    @_answered("getxattr")
    def getxattr(self, node: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        raise FuseErrno(errno.ENOSYS)

    @_answered("listxattr")
    def listxattr(self, node: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        raise FuseErrno(errno.ENOSYS)


def _listing(position: int, found: ChildColumns) -> Listing:
    bounds = (found.name_start - found.name_start[0]).tolist()
    letters = found.names[found.name_start[0] : found.name_start[-1]].tobytes()
    return Listing(
        position,
        [letters[start:end] for start, end in pairwise(bounds)],
        found.nodes.tolist(),
        found.mode.tolist(),
        found.size.tolist(),
        found.mtime_ns.tolist(),
        FOREVER_S,
    )


@contextmanager
def _stderr_kept(lines: list[str]) -> Iterator[None]:
    """Adds the lines on stderr to `lines`: libfuse explains its failures there."""
    before = os.dup(2)
    with os.fdopen(os.memfd_create("stderr", os.MFD_CLOEXEC), "r+b") as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            lines += kept.read().decode(errors="replace").splitlines()


@contextmanager
def _nudged(vfs: Vfs) -> Iterator[None]:
    """Interrupts the loop's read(2) every `NUDGE_S` while any READ waits."""
    signal.setitimer(signal.ITIMER_REAL, NUDGE_S, NUDGE_S)
    try:
        yield
    finally:
        if not vfs.waiting:
            signal.setitimer(signal.ITIMER_REAL, 0)


class _Lock:
    """A lock of one event loop, without a fair queue: the last owner may take it again at once."""

    def __init__(self) -> None:
        self._held = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._waiting.park()
        self._held = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held = False
        self._waiting.unpark()


class TrioStandIn:
    Lock = _Lock
    ClosedResourceError = trio.ClosedResourceError
    open_nursery = staticmethod(trio.open_nursery)
    current_task = staticmethod(trio.lowlevel.current_task)
    current_trio_token = staticmethod(trio.lowlevel.current_trio_token)
    notify_closing = staticmethod(trio.lowlevel.notify_closing)

    def __init__(self, wait: RequestWait) -> None:
        self.lowlevel = self
        self.wait_readable = wait.readable


@contextmanager
def installed(loop: TrioStandIn) -> Iterator[None]:
    """pyfuse3 keeps a lock of `loop` for ever, so use this once in a process."""
    pyfuse3.trio = loop  # type: ignore[attr-defined]  # its stub leaves that out
    try:
        yield
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]  # as above


class Pyfuse3Session:
    name: ClassVar[str] = "pyfuse3"

    def __init__(self, vfs: Vfs, mountpoint: str, options: Sequence[str]) -> None:
        self.negotiated = f"pyfuse3 {pyfuse3.__version__}"
        self._operations = _Operations(vfs)
        self.worker = self._operations.worker
        self._mountpoint = mountpoint
        self._options = options

    def mount(self) -> None:
        """Raises PermissionDenied, with libfuse's message."""
        reason: list[str] = []
        try:
            # libfuse starts fusermount3 with this environment
            with minimal_environment_set(), _stderr_kept(reason):
                pyfuse3.init(self._operations, self._mountpoint, set(self._options))
        except RuntimeError as error:
            raise syscalls.mount_error(self._mountpoint, "; ".join(reason) or str(error)) from error

    async def serve(self, started: Callable[[], None]) -> None:
        self._operations.started = started
        vfs = self._operations.vfs
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        try:
            with (
                observer_set(vfs.waits.inline),
                installed(TrioStandIn(RequestWait(lambda: not vfs.waiting))),
            ):
                await pyfuse3.main(min_tasks=1, max_tasks=TASKS_MAX)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def clone(self) -> int:
        for name in os.listdir("/proc/self/fd"):  # libfuse does not name its descriptor
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                    return syscalls.clone(int(name))
        raise OSError(errno.EBADF, "no descriptor of /dev/fuse is open")

    def close(self) -> None:
        pyfuse3.close(unmount=False)
