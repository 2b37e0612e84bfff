"""The kernel session: the FUSE protocol on /dev/fuse, so that the kernel can answer by itself.

Owned here: the loop that reads requests and writes answers, and what is refused. Not owned: the
bytes of the protocol (`protocol.py`), mounting (`kernel.py`), what the answers say (`vfs.py`,
`readdir_replies.py`).

OPEN and OPENDIR are refused with ENOSYS once: from then on the kernel opens files by itself and
keeps their pages, and what has been looked up is valid for ever. So a file whose pages are in the
kernel's cache is opened, read and closed without a request. Other files cost one READ.

Concurrency: trio, one task that reads the device and answers at once whatever needs no waiting, and
a task for each request that waits: READs, and what is asked of `.diesel`. It never touches its own
mount, and never does what can wait for a page lock: pushing and dropping are another process's
affair (`prefetch_worker.py`).
"""

import errno
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, TypeVarTuple

import trio

from ...errors import DieselError
from ...format.entries import NAME_BYTES_MAX, Bytes
from ...system import syscalls
from ..attributes import FOREVER_S, HIDDEN_ROOT, Attributes, FuseErrno
from ..vfs import BLOCK_BYTES, Vfs
from . import protocol
from .protocol import Malformed, Op, ReadRequest, RequestHeader
from .push_status import PushStatusMap
from .readdir_replies import ReaddirReplies
from .session import MountOptions, RequestWait, SessionUnsupported

log = logging.getLogger("diesel.mount")

INIT_DEADLINE_S = 5.0

FOREVER_WHOLE_S = int(FOREVER_S)

_Answer = Bytes | Sequence[Bytes] | None
_Handler = Callable[[RequestHeader, memoryview], _Answer]
_Ts = TypeVarTuple("_Ts")

_REFUSED_ONCE = (Op.OPEN, Op.OPENDIR, Op.FLUSH, Op.GETXATTR, Op.LISTXATTR)
"""ENOSYS, and the kernel never asks again."""


_NEVER_ANSWERED = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)

_PASSING = (errno.EAGAIN, errno.ENOENT, errno.EINTR, errno.ENOMEM, errno.EIO)
"""What reading the device may say without being the end: most often, whoever asked has gone."""


def _ignore(_: object) -> None: ...


class KernelSession:
    """The session over /dev/fuse; see the module."""

    name: ClassVar[str] = "kernel"

    def __init__(self, vfs: Vfs, mountpoint: str, options: MountOptions) -> None:
        self._vfs = vfs
        self._mountpoint = mountpoint
        self._options = options
        self._device = -1
        self._common = protocol.CommonAttributes(vfs.owner.uid, vfs.owner.gid, BLOCK_BYTES)
        self._readdir_replies = ReaddirReplies(vfs)
        self._nursery: trio.Nursery  # of `serve`
        self._waiting: dict[int, trio.CancelScope] = {}
        self._handlers: Mapping[int, tuple[str, _Handler]] = {
            op.value: (op.name.lower(), handler)
            for op, handler in {
                Op.LOOKUP: self._lookup,
                Op.FORGET: self._forget,
                Op.BATCH_FORGET: self._forget,
                Op.GETATTR: self._getattr,
                Op.READLINK: self._readlink,
                Op.STATFS: self._statfs,
                Op.READDIRPLUS: self._readdirplus,
                Op.READDIR: self._readdir,
                Op.IOCTL: self._ioctl,
                Op.RELEASE: self._nothing,
                Op.RELEASEDIR: self._nothing,
                Op.DESTROY: self._nothing,
                Op.INTERRUPT: self._interrupt,
                **dict.fromkeys(_REFUSED_ONCE, self._unknown),
            }.items()
        }
        self._on_miss: Callable[[int], None] = _ignore
        self._on_forget: Callable[[Sequence[int]], None] = _ignore
        self._push_status: PushStatusMap | None = None
        self.negotiated = ""

    # life -------------------------------------------------------------------------------------

    def mount(self) -> None:
        """Mounts, and agrees with the kernel on what both can do.

        Raises SessionUnsupported where the kernel lacks something; nothing is mounted then.
        """
        self._device = syscalls.mount_fuse(self._mountpoint, self._options.as_list())
        try:
            self._agree()
        except BaseException:
            syscalls.detach_quietly(self._mountpoint)
            self.close()
            raise

    def _agree(self) -> None:
        """Answers INIT. Raises SessionUnsupported, or DieselError where it does not come."""
        os.set_blocking(self._device, False)
        if not syscalls.wait_readable(self._device, INIT_DEADLINE_S):
            raise DieselError(f"the kernel did not greet the mount on {self._mountpoint}")
        message = memoryview(os.read(self._device, protocol.REQUEST_BYTES))
        request = protocol.parse_header(message)
        if request.op != Op.INIT:
            raise DieselError(f"the kernel began with request {request.op}, not INIT")
        offer = protocol.parse_init(message)
        missing = protocol.NEEDED & ~offer.flags
        if offer.major != protocol.KERNEL_MAJOR or offer.minor < protocol.KERNEL_MINOR_MIN:
            self._send(request.unique, (), errno.EPROTO)
            raise SessionUnsupported(f"FUSE {offer.major}.{offer.minor} is too old")
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
        """Answers requests until the kernel has closed the connection; cancelled, it answers EIO to
        those that still wait.
        """
        started()
        room = memoryview(bytearray(protocol.REQUEST_BYTES))
        wait, device = RequestWait(lambda: not self._waiting), self._device
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await wait.readable(device)
                try:
                    length = os.readv(device, (room,))
                except OSError as error:
                    if error.errno in (errno.ENODEV, errno.ECONNABORTED):  # unmounted
                        nursery.cancel_scope.cancel()
                        return
                    if error.errno not in _PASSING:
                        raise
                    continue  # whoever asked has gone
                self._answer(room[:length], nursery)

    def close(self) -> None:
        """Closes the connection; the kernel fails what is still waiting for an answer."""
        if self._device >= 0:
            os.close(self._device)
            self._device = -1

    def clone(self) -> int:
        """Another descriptor of the connection, to notify the kernel through. Raises OSError."""
        return syscalls.clone(self._device)

    def set_open_callback(self, opened: Callable[[int], None]) -> None:
        """Nothing: the kernel opens files by itself."""

    def attach_worker(
        self,
        on_miss: Callable[[int], None],
        on_forget: Callable[[Sequence[int]], None],
        push_status: PushStatusMap,
    ) -> None:
        """From now on, tell of each entry whose content the kernel did not have, and of those that
        it has forgotten; hold the answers for what the board says is pushed soon.
        """
        self._on_miss, self._on_forget, self._push_status = on_miss, on_forget, push_status

    def detach_worker(self) -> None:
        """Nobody is told any more, and nothing is held: the helper has gone."""
        self._on_miss, self._on_forget, self._push_status = _ignore, _ignore, None

    # requests ---------------------------------------------------------------------------------

    def _answer(self, message: memoryview, nursery: trio.Nursery) -> None:
        """Answers one request, or starts the task that will."""
        try:
            read = protocol.parse_if_read(message)
            if read is not None:
                self._read(read, nursery)
                return
            request = protocol.parse_header(message)
        except Malformed as error:
            log.error("dropped what is no request: %s", error)
            return
        name, handler = self._handlers.get(request.op, ("other", self._unknown))
        self._vfs.requests[name] += 1
        try:
            answer = handler(request, message)
        except BaseException as fault:
            number = self._vfs.errno_of(fault, name, request.node)
            if request.op not in _NEVER_ANSWERED:
                self._send(request.unique, (), number)
        else:
            if answer is not None:
                pieces = (answer,) if isinstance(answer, Bytes) else answer
                self._send(request.unique, pieces)

    def _send(self, unique: int, pieces: Sequence[Bytes], number: int = 0) -> None:
        """Writes an answer; it does not matter if whoever asked has gone."""
        if number:
            header = protocol.error_reply(unique, number)
        else:
            header = protocol.answer_header(unique, sum(map(len, pieces)))
        try:
            os.writev(self._device, (header, *pieces))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
                log.error("the kernel does not take an answer: %s", error)
                if not number:
                    self._send(unique, (), errno.EIO)

    def _read(self, read: ReadRequest, nursery: trio.Nursery) -> None:
        """A READ is answered at once from memory; else in a task, and delays no other."""
        unique, node, offset, size = read
        vfs, board = self._vfs, self._push_status
        vfs.requests["read"] += 1
        if board is not None and board.try_hold(node - 1):
            self._later(unique, node, "read", self._read_held, board, node, offset, size)
        else:
            try:
                found = vfs.read_nowait(node, offset, size)
            except BaseException as fault:
                self._send(unique, (), vfs.errno_of(fault, "read", node))
                return
            if found is not None:
                self._send(unique, (found,))
            else:
                self._later(unique, node, "read", vfs.read, node, offset, size)
        if board is not None and node < HIDDEN_ROOT and board.takes_miss():
            self._on_miss(node - 1)

    async def _read_held(self, board: PushStatusMap, node: int, offset: int, size: int) -> Bytes:
        """A READ of what is about to be pushed: the helper gets ahead of the reader first."""
        self._vfs.reads["held"] += 1
        try:
            await board.hold(node - 1)
            return await self._vfs.read(node, offset, size)
        finally:
            board.end_hold(node - 1)

    def _later(
        self,
        unique: int,
        node: int,
        what: str,
        work: Callable[[*_Ts], Awaitable[Bytes]],
        *given: *_Ts,
    ) -> None:
        """Starts the task that answers; from now on, before it runs, it can be interrupted."""
        scope = self._waiting[unique] = trio.CancelScope()
        self._nursery.start_soon(self._answer_later, scope, unique, node, what, work, *given)

    async def _answer_later(
        self,
        scope: trio.CancelScope,
        unique: int,
        node: int,
        what: str,
        work: Callable[[*_Ts], Awaitable[Bytes]],
        *given: *_Ts,
    ) -> None:
        """Waits for an answer; sends one in any case, to a cancelled request too."""
        answer: tuple[Bytes, ...] = ()
        number = 0
        with scope:
            try:
                answer = (await work(*given),)
            except BaseException as fault:  # a real Cancelled comes again at the next wait
                if scope.cancel_called:
                    number = errno.EINTR
                elif trio.current_effective_deadline() == -math.inf:
                    number = errno.EIO  # the mount is ending
                else:
                    number = self._vfs.errno_of(fault, what, node)
        self._waiting.pop(unique, None)
        self._send(unique, answer, number)

    def _interrupt(self, request: RequestHeader, message: memoryview) -> _Answer:
        """Whoever waited has been killed: it gets EINTR. The INTERRUPT itself is not answered."""
        scope = self._waiting.get(protocol.parse_interrupt(message))
        if scope is not None:
            scope.cancel()
        return None

    def _lookup(self, request: RequestHeader, message: memoryview) -> _Answer:
        name = protocol.parse_name(message)
        if request.node < HIDDEN_ROOT:
            return self._found(self._vfs.lookup(request.node, name))
        node = request.node
        self._later(request.unique, node, "lookup", self._lookup_hidden, node, name)
        return None

    async def _lookup_hidden(self, folder: int, name: bytes) -> bytes:
        return self._found(await self._vfs.lookup_hidden(folder, name))

    def _found(self, found: Attributes) -> bytes:
        self._vfs.count_lookup(found.node)
        return protocol.entry_answer(
            found.node, found.mode, found.size, found.mtime_ns, int(found.name_valid_s),
            FOREVER_WHOLE_S, self._common,
        )  # fmt: skip

    def _forget(self, request: RequestHeader, message: memoryview) -> _Answer:
        forgets = protocol.parse_forgets(request, message)
        self._on_forget(self._vfs.forget_all(forgets))
        return None

    def _getattr(self, request: RequestHeader, message: memoryview) -> _Answer:
        found = self._vfs.attributes(request.node)
        return protocol.attributes_answer(
            found.node, found.mode, found.size, found.mtime_ns, FOREVER_WHOLE_S, self._common
        )

    def _readlink(self, request: RequestHeader, message: memoryview) -> _Answer:
        return self._vfs.link_target(request.node)

    def _statfs(self, request: RequestHeader, message: memoryview) -> _Answer:
        space = self._vfs.space()
        return protocol.statfs_answer(space.blocks, space.entries, BLOCK_BYTES, NAME_BYTES_MAX)

    def _readdirplus(self, request: RequestHeader, message: memoryview) -> _Answer:
        offset, size = protocol.parse_read(message)
        if request.node < HIDDEN_ROOT:
            return self._readdir_replies.reply(request.node, offset, size)
        node = request.node
        self._later(request.unique, node, "readdirplus", self._list_hidden, node, offset, size)
        return None

    async def _list_hidden(self, folder: int, offset: int, size: int) -> bytes:
        listing = await self._vfs.hidden_listing(folder)
        return self._readdir_replies.hidden_reply(listing, folder, offset, size)

    def _readdir(self, request: RequestHeader, message: memoryview) -> _Answer:
        raise FuseErrno(errno.ENOSYS)  # the kernel was told to ask for READDIRPLUS

    def _ioctl(self, request: RequestHeader, message: memoryview) -> _Answer:
        """Python's `open` asks whether a file is a terminal, and the kernel asks us each time."""
        raise FuseErrno(errno.ENOTTY)

    def _nothing(self, request: RequestHeader, message: memoryview) -> _Answer:
        return b""

    def _unknown(self, request: RequestHeader, message: memoryview) -> _Answer:
        raise FuseErrno(errno.ENOSYS)
