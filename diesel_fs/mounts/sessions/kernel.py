"""The kernel session: it speaks the FUSE protocol on /dev/fuse itself.

The session refuses OPEN and OPENDIR once with ENOSYS. From then on the kernel opens files without a
request. A file with pages in the kernel's cache costs no request, any other file one READ.

Concurrency: trio. One task reads the device and answers at once every request that need not wait; a
request that waits (some READs, and those for `.diesel`) gets a task of its own. The session never
touches its own mount, and never makes a call that can wait for a page lock: another process pushes
and drops pages (`daemon/prefetch_worker.py`).
"""

import errno
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, NoReturn

import trio

from ...cache.waiting import WaitCause, observer_set
from ...format.entries import NAME_BYTES_MAX, Bytes
from ...system import syscalls
from ..mountpoints.processes import was_killed
from ..statistics.waits import Wait
from ..tree.attributes import FOREVER_S, HIDDEN_ROOT, Attributes, FuseErrno
from ..tree.vfs import BLOCK_BYTES, Vfs
from . import protocol
from .protocol import Malformed, Op, ReadRequest, RequestHeader
from .readdir_replies import ReaddirReplies
from .session import RequestWait, SessionUnsupported
from .worker_side import WorkerSide

log = logging.getLogger("diesel.mount")

INIT_DEADLINE_S = 5.0

KILLED_LOOK_S = 0.05
"""How often a task checks whether the interrupted thread of a request was killed."""

FOREVER_WHOLE_S = int(FOREVER_S)

Content = Bytes | Sequence[Bytes]
Answer = Content | None
"""The content of the reply; None if there is no reply, or a task will send it later."""
Handler = Callable[[RequestHeader, memoryview], Answer]
"""Handles one request, given its header and the whole message. Raises FuseErrno."""

_REFUSED_ONCE = (Op.OPEN, Op.OPENDIR, Op.FLUSH, Op.GETXATTR, Op.LISTXATTR)
"""These get ENOSYS, after which the kernel never sends them again."""

_NEVER_ANSWERED = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)

_PASSING_ERRNOS = (errno.EAGAIN, errno.ENOENT, errno.EINTR, errno.ENOMEM, errno.EIO)
"""The session goes on after these errors of a read from the device: usually the kernel has
withdrawn a request, because its process was killed."""


def _refuse(number: int) -> Handler:
    def refuse(_: RequestHeader, __: memoryview) -> NoReturn:
        raise FuseErrno(number)

    return refuse


def _pieces(content: Content) -> Sequence[Bytes]:
    return (content,) if isinstance(content, Bytes) else content


_OTHER = "other", _refuse(errno.ENOSYS)


class _Waiting(NamedTuple):
    """A request that a task will answer."""

    thread: int
    scope: trio.CancelScope
    wait: Wait


class KernelSession:
    name: ClassVar[str] = "kernel"

    def __init__(
        self, vfs: Vfs, mountpoint: str, options: Sequence[str], *, device: int = -1
    ) -> None:
        """`device` is an open connection, for tests without `mount`."""
        self._vfs = vfs
        self._waits = vfs.waits
        self._begun_s = 0.0  # when the current request was read
        self._mountpoint = mountpoint
        self._options = options
        self._device = device
        self._common = protocol.CommonAttributes(vfs.owner.uid, vfs.owner.gid, BLOCK_BYTES)
        self._readdir_replies = ReaddirReplies(vfs)
        self._nursery: trio.Nursery | None = None  # of `serve`
        self._early: list[tuple[_Waiting, int, int, str, Awaitable[Content]]] = []
        self._waiting: dict[int, _Waiting] = {}  # by the request's number
        self._handlers = self._make_handlers()
        self.worker = WorkerSide(vfs)
        self.negotiated = ""

    def _make_handlers(self) -> Mapping[int, tuple[str, Handler]]:
        return {
            op.value: (op.name.lower(), handler)
            for op, handler in {
                Op.LOOKUP: self._lookup,
                Op.FORGET: self._forget,
                Op.BATCH_FORGET: self._forget,
                Op.GETATTR: self._getattr,
                Op.READLINK: self._readlink,
                Op.STATFS: self._statfs,
                Op.READDIRPLUS: self._readdirplus,
                Op.READDIR: _refuse(errno.ENOSYS),  # the session has negotiated READDIRPLUS
                Op.IOCTL: _refuse(errno.ENOTTY),  # Python's `open` checks for a terminal
                **dict.fromkeys((Op.RELEASE, Op.RELEASEDIR, Op.DESTROY), lambda *_: b""),
                Op.INTERRUPT: self._interrupt,
                **dict.fromkeys(_REFUSED_ONCE, _refuse(errno.ENOSYS)),
            }.items()
        }

    # life -------------------------------------------------------------------------------------

    def mount(self) -> None:
        """Raises PermissionDenied, DeadlineError; SessionUnsupported, with nothing mounted, if the
        kernel lacks something."""
        self._device = syscalls.mount_fuse(self._mountpoint, self._options)
        try:
            self._negotiate()
        except BaseException:
            syscalls.detach_quietly(self._mountpoint)
            self.close()
            raise

    def _negotiate(self) -> None:
        """Answers the first request, INIT. Raises SessionUnsupported."""
        os.set_blocking(self._device, False)
        if not syscalls.wait_readable(self._device, INIT_DEADLINE_S):
            raise SessionUnsupported(f"the kernel sent no INIT within {INIT_DEADLINE_S:g} s")
        message = memoryview(os.read(self._device, protocol.REQUEST_BYTES))
        request = protocol.parse_header(message)
        if request.op != Op.INIT:
            raise SessionUnsupported(f"the kernel's first request is {request.op}, not INIT")
        offer = protocol.parse_init(message)
        missing = protocol.NEEDED & ~offer.flags
        if offer.major != protocol.KERNEL_MAJOR or offer.minor < protocol.KERNEL_MINOR_MIN:
            self._send(request.unique, (), errno.EPROTO)
            raise SessionUnsupported(
                f"the kernel's FUSE {offer.major}.{offer.minor} is too old (Linux 5.4 is needed)"
            )
        if missing:
            self._send(request.unique, (), errno.EPROTO)
            raise SessionUnsupported(f"the kernel lacks {missing.name}")
        flags = protocol.WANTED & offer.flags
        minor = min(protocol.KERNEL_MINOR, offer.minor)
        answer = protocol.init_answer(
            minor, syscalls.READ_AHEAD_KIB << 10, flags, syscalls.READS_AHEAD_MAX
        )
        self._send(request.unique, (answer,))
        self.negotiated = f"FUSE {offer.major}.{minor}: {flags.name}"

    async def serve(self, started: Callable[[], None]) -> None:
        started()
        buffer = memoryview(bytearray(protocol.REQUEST_BYTES))
        wait, device = RequestWait(lambda: not self._waiting), self._device
        with observer_set(self._waits.inline):
            await self._serve_all(wait, device, buffer)

    async def _serve_all(self, wait: RequestWait, device: int, buffer: memoryview) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for each in self._early:
                nursery.start_soon(self._answer_later, *each)
            self._early.clear()
            while True:
                await wait.readable(device)
                if not self._answer_one(buffer):
                    nursery.cancel_scope.cancel()
                    return

    def _answer_one(self, buffer: memoryview) -> bool:
        """Reads and answers one request. Returns False if the mount has ended."""
        try:
            length = os.readv(self._device, (buffer,))
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):  # unmounted
                return False
            if error.errno not in _PASSING_ERRNOS:
                raise
            return True
        self._answer(buffer[:length])
        return True

    def close(self) -> None:
        if self._device >= 0:
            os.close(self._device)
            self._device = -1

    def clone(self) -> int:
        return syscalls.clone(self._device)

    # requests ---------------------------------------------------------------------------------

    def _answer(self, message: memoryview) -> None:
        self._begun_s = time.monotonic()
        try:
            read = protocol.parse_if_read(message)
            if read is not None:
                self._read(read)
                return
            request = protocol.parse_header(message)
        except Malformed as error:
            log.error("a message from the kernel is no valid request, and was dropped: %s", error)
            return
        name, handler = self._handlers.get(request.op, _OTHER)
        self._vfs.requests[name] += 1
        try:
            answer = handler(request, message)
        except BaseException as fault:
            number = self._vfs.errno_of(fault, name, request.node)
            if request.op not in _NEVER_ANSWERED:
                self._send(request.unique, (), number)
                self._waits.answered(request.thread, WaitCause.METADATA, self._begun_s)
        else:
            if answer is not None:
                self._send(request.unique, _pieces(answer))
                self._waits.answered(request.thread, WaitCause.METADATA, self._begun_s)

    def _send(self, unique: int, pieces: Sequence[Bytes], number: int = 0) -> None:
        """Sends content, or the errno `number`. A request that was withdrawn meanwhile is no
        error."""
        header = protocol.reply_header(unique, sum(map(len, pieces)), number)
        try:
            os.writev(self._device, (header, *pieces))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
                log.error("the kernel rejected a reply: %s", error)
                if not number:
                    self._send(unique, (), errno.EIO)

    def _read(self, read: ReadRequest) -> None:
        unique, node, offset, size, thread = read
        vfs, worker = self._vfs, self.worker
        vfs.requests["read"] += 1
        held = worker.try_hold(unique, node, offset, size)
        if held is not None:
            here = worker.held_or_read(held, lambda: vfs.read(node, offset, size))
            self._later(read, "read", here)
        else:
            try:
                found = vfs.read_nowait(node, offset, size)
            except BaseException as fault:
                self._fail_read(read, fault)
                return
            if found is not None:
                self._send(unique, (found,))
                self._waits.answered(thread, WaitCause.MOUNT, self._begun_s)
            else:
                self._later(read, "read", vfs.read(node, offset, size))
        worker.report_miss(node)

    def _fail_read(self, read: ReadRequest, fault: BaseException) -> None:
        self.worker.note_failed_read()
        self._send(read.unique, (), self._vfs.errno_of(fault, "read", read.node))
        self._waits.answered(read.thread, WaitCause.MOUNT, self._begun_s)

    def _later(
        self, request: RequestHeader | ReadRequest, name: str, content: Awaitable[Content]
    ) -> None:
        """Starts a task that answers with `content`, or has `serve` start it. INTERRUPT can end the
        request from now on, even before the task runs."""
        unique, node = request.unique, request.node
        cause = WaitCause.MOUNT if name == "read" else WaitCause.METADATA
        wait = self._waits.begin(request.thread, cause, self._begun_s)
        waiting = self._waiting[unique] = _Waiting(request.thread, trio.CancelScope(), wait)
        if self._nursery is None:
            self._early.append((waiting, unique, node, name, content))
        else:
            self._nursery.start_soon(self._answer_later, waiting, unique, node, name, content)

    async def _answer_later(
        self,
        waiting: _Waiting,
        unique: int,
        node: int,
        request: str,
        content: Awaitable[Content],
    ) -> None:
        """Replies to a cancelled request, too."""
        answer: Sequence[Bytes] = ()
        number = 0
        with observer_set(waiting.wait), waiting.scope:
            try:
                answer = _pieces(await content)
            except BaseException as fault:  # a real Cancelled comes again at the next wait
                if waiting.scope.cancel_called:
                    number = errno.EINTR
                elif trio.current_effective_deadline() == -math.inf:
                    number = errno.EIO  # the mount is ending
                else:
                    number = self._vfs.errno_of(fault, request, node)
        self._waiting.pop(unique, None)
        if number and request == "read":
            self.worker.note_failed_read()
        self._send(unique, answer, number)
        self._waits.end(waiting.wait)

    def _interrupt(self, request: RequestHeader, message: memoryview) -> Answer:
        """Ends a request with EINTR if its thread was killed. INTERRUPT itself gets no reply.

        The kernel sends INTERRUPT after any signal. If the thread lives on, so does the request,
        since EINTR would fail the read of an intact file (with EIO in a native mount). The kernel
        reports only the first signal, so a task checks whether the thread is killed later.
        """
        unique = protocol.parse_interrupt(message)
        if unique in self._waiting and self._nursery is not None:
            self._nursery.start_soon(self._end_if_killed, unique)
        return None

    async def _end_if_killed(self, unique: int) -> None:
        while (waiting := self._waiting.get(unique)) is not None:
            if was_killed(waiting.thread):
                waiting.scope.cancel()
                return
            await trio.sleep(KILLED_LOOK_S)

    def _lookup(self, request: RequestHeader, message: memoryview) -> Answer:
        name = protocol.parse_name(message)
        if request.node < HIDDEN_ROOT:
            return self._found(self._vfs.lookup(request.node, name))
        reply = self._lookup_hidden(request.node, name)
        self._later(request, "lookup", reply)
        return None

    async def _lookup_hidden(self, folder: int, name: bytes) -> bytes:
        return self._found(await self._vfs.lookup_hidden(folder, name))

    def _found(self, found: Attributes) -> bytes:
        self._vfs.count_lookup(found.node)
        return protocol.entry_answer(
            found.node, found.mode, found.size, found.mtime_ns, int(found.name_valid_s),
            FOREVER_WHOLE_S, self._common,
        )  # fmt: skip

    def _forget(self, request: RequestHeader, message: memoryview) -> Answer:
        forgets = protocol.parse_forgets(request, message)
        self.worker.on_forget(self._vfs.forget_all(forgets))
        return None

    def _getattr(self, request: RequestHeader, message: memoryview) -> Answer:
        found = self._vfs.attributes(request.node)
        return protocol.attributes_answer(
            found.node, found.mode, found.size, found.mtime_ns, FOREVER_WHOLE_S, self._common
        )

    def _readlink(self, request: RequestHeader, message: memoryview) -> Answer:
        return self._vfs.link_target(request.node)

    def _statfs(self, request: RequestHeader, message: memoryview) -> Answer:
        space = self._vfs.space()
        return protocol.statfs_answer(space.blocks, space.entries, BLOCK_BYTES, NAME_BYTES_MAX)

    def _readdirplus(self, request: RequestHeader, message: memoryview) -> Answer:
        offset, size = protocol.parse_read(message)
        if request.node < HIDDEN_ROOT:
            return self._readdir_replies.reply(request.node, offset, size)
        reply = self._list_hidden(request.node, offset, size)
        self._later(request, "readdirplus", reply)
        return None

    async def _list_hidden(self, folder: int, offset: int, size: int) -> bytes:
        listing = await self._vfs.hidden_listing(folder)
        return self._readdir_replies.hidden_reply(listing, folder, offset, size)
