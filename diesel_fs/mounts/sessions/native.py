"""The native session: the kernel answers everything except the first read of a content.

Users see a *tree* that the kernel's own EROFS serves from an image (`native_tree.py`). Contents
come from one virtual file, the *content file* (`mounts/tree/content_file.py`), on a FUSE mount that
this session serves. Users see the root of that FUSE mount as `.diesel`; the content file is not
listed there, and only root can open it.

The tree holds the content file open. When the kernel closes it (RELEASE), none of the tree's files
is open any more. After the last tree, the session ends.

If a mount follows its dataset, `switch_tree` mounts a new tree beneath the current one, and then
detaches the current one. So all look-ups meet the new tree from one moment on. Open files and
working folders keep the old tree alive.

Concurrency: as the kernel session. Mounting a tree opens the content file, so a thread does it
while the session goes on answering.
"""

import errno
import itertools
import logging
import os
import re
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import trio

from ...cache.waiting import WaitCause
from ...errors import DieselError
from ...format.image import Image
from ...system import syscalls
from ...system.mountinfo import mounts, topmost_at
from ..mountpoints.mountpoint import HIDDEN_FOLDER
from ..tree.attributes import FOREVER_S, HIDDEN_ROOT, ROOT, Attributes, FuseErrno
from ..tree.content_file import (
    CONTENT_BYTES,
    ContentFile,
    ContentVersion,
    added_ranges,
    private_name,
)
from ..tree.vfs import BLOCK_BYTES, Vfs
from . import protocol
from .kernel import FOREVER_WHOLE_S, Answer, Content, Handler, KernelSession
from .native_tree import Tree, mount_tree
from .protocol import Op, ReadRequest, RequestHeader
from .push_status import HeldBytes, HeldRead
from .session import SessionUnsupported, SwitchUnsupported

log = logging.getLogger("diesel.mount")

PRIVATE_NODE = HIDDEN_ROOT - 1
"""The node of the first content file. Later content files and images have lower nodes; no node is
used twice."""

TREE_READ_AHEAD_KIB = 1024
"""How far the kernel reads ahead in a file of the tree."""

CONTENT_READ_AHEAD_KIB = 1024
"""How far the kernel reads ahead in the content file. Next to pushed files it does so even for a
reader in random order; with this size that takes one READ, not several."""

_OF_ROOT = protocol.CommonAttributes(0, 0, BLOCK_BYTES)
"""Content files and images belong to root, whoever owns the dataset's entries."""

THREADS_MAX = 1024
"""The most threads in `_read_offsets`; beyond that all are forgotten."""

_T = TypeVar("_T")


def _ignore() -> None: ...


def _drop_fuse_descriptors() -> None:
    """Gives the calling thread descriptors of its own, without those of FUSE connections. Raises
    OSError.

    The thread waits for answers of this process. If the process is killed, the thread ends only
    when the connection does, and the connection only when no thread has its device open.
    """
    syscalls.own_descriptors()
    for name in os.listdir("/proc/thread-self/fd"):
        with suppress(OSError):  # of the listing itself
            if os.readlink(f"/proc/thread-self/fd/{name}") == "/dev/fuse":
                os.close(int(name))


@dataclass(frozen=True, slots=True, eq=False)
class TreeVersion:
    image: Image
    file: int
    """A descriptor of the image, open until `on_end`."""
    vfs: Vfs  # reads its contents
    on_end: Callable[[], None] = _ignore
    """Called when no file of the tree is open any more, or it could not be mounted."""


@dataclass(slots=True, eq=False)
class _Tree:
    version: TreeVersion
    content_node: int  # of the content file
    content: ContentVersion
    image_node: int = 0  # of the image's file; 0 if the session cannot serve it
    mount_id: int = 0  # in mountinfo
    device: str = ""  # the number of its file system
    is_being_mounted: bool = True
    opens: int = 0  # how often the tree has the content file open


class _OwnThread(Generic[_T]):
    """A thread for one piece of work that changes the thread's own working folder and
    descriptors."""

    def __init__(self, work: Callable[[], _T], on_end: Callable[[], object] = _ignore) -> None:
        self._work = work
        self._on_end = on_end
        self._outcome: list[_T] = []
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work())
        except BaseException as error:
            self._failure.append(error)
        finally:
            self._on_end()

    def result(self) -> _T:
        self._thread.join()
        if self._failure:
            raise self._failure[0]
        return self._outcome[0]


class NativeSession(KernelSession):
    name: ClassVar[str] = "native"

    def __init__(
        self,
        vfs: Vfs,
        mountpoint: str,
        options: Sequence[str],
        version: TreeVersion,
        *,
        on_connection: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_connection` gets the FUSE mount's device number before `mount` uses the
        connection."""
        super().__init__(vfs, mountpoint, options)
        self._on_connection = on_connection
        self._source = next(each[7:] for each in options if each.startswith("fsname="))
        self._private_nodes = itertools.count(PRIVATE_NODE, -1)
        self._contents: dict[int, ContentFile] = {}  # by node
        self._served_images: dict[int, Image] = {}  # by node; see `_mount_image`
        self._trees: list[_Tree] = []  # the oldest first
        self._handles = itertools.count(1)  # of opens of content files
        self._openers: dict[int, _Tree] = {}  # by handle
        self._read_offsets: dict[int, int] = {}  # by thread; see `_is_ahead`
        # The thread that mounts the newest tree, else 0. Its opens of the content file are the
        # tree's own
        self._mounter = 0
        # `_missed`: the tree whose misses the worker gets
        self._current = self._missed = self._add_tree(version)
        self.private_mount = -1
        """A FUSE mount at no path, in which the content file can be opened; or -1."""
        self.note = ""
        """Why the tree is not mounted in the best way, or ""."""

    @staticmethod
    def check_usable(*, must_switch: bool = False) -> None:
        """Raises SessionUnsupported if native mounts cannot be made here, or, with `must_switch`,
        cannot switch to another version."""
        if os.geteuid() or not syscalls.may_administrate():
            raise SessionUnsupported("it needs root with CAP_SYS_ADMIN")
        if must_switch and not syscalls.can_mount_beneath():
            raise SessionUnsupported("to follow a dataset it needs Linux 6.5")

    @property
    def content_node(self) -> int:
        return self._current.content_node

    @property
    def mount_id(self) -> int:
        """The ID of the current tree's mount, in mountinfo."""
        return self._current.mount_id

    @property
    def has_trees(self) -> bool:
        """Whether a tree is mounted, or a file of any tree is still open."""
        return bool(self._trees)

    def mount(self) -> None:
        try:
            self._device, self.private_mount = syscalls.new_fuse(self._options)
        except OSError as error:
            raise SessionUnsupported(f"a FUSE mount cannot be made at no path: {error}") from error
        try:
            self._on_connection(syscalls.device_of(self.private_mount))
            self._negotiate()
            self._answer_during(lambda: self._mount_tree(self._current))
            self._current.is_being_mounted = False
            self._end_if_unused(self._current)
        except OSError as error:
            self.close()
            raise SessionUnsupported(reason_of(error)) from error
        except BaseException:
            self.close()
            raise

    async def switch_tree(self, version: TreeVersion) -> None:
        """Replaces the current version.

        Raises DieselError if a mount of somebody else is in the way, SwitchUnsupported if the
        kernel cannot replace a tree, SessionUnsupported, OSError. Then nothing has changed.
        """
        tree = self._add_tree(version)
        try:
            await trio.to_thread.run_sync(self._replace_tree, tree, abandon_on_cancel=True)
        except Exception:
            tree.is_being_mounted = False
            self._end_if_unused(tree)
            raise
        tree.is_being_mounted = False
        self._current = tree
        self._end_if_unused(tree)

    def retired_trees(self) -> dict[int, str]:
        """The devices of earlier trees that are still in use, by their former mount IDs."""
        return {
            each.mount_id: each.device
            for each in self._trees
            if each is not self._current and not each.is_being_mounted
        }

    def check_place(self) -> None:
        """Raises DieselError if a mount of somebody else is in the way of a switch, or the tree is
        not at the mount point any more."""
        here, mount_id = self._mountpoint, self._current.mount_id
        entries = list(mounts())
        top = topmost_at(here, entries)
        if top is None:
            raise DieselError(f"the mount is not on {here} any more")
        if top.mount_id != mount_id:
            raise DieselError(f"another file system ({top.source}) is mounted on {here}")
        for each in entries:
            if each.parent_id == mount_id and each.path != f"{here}/{HIDDEN_FOLDER}":
                raise DieselError(f"{each.source} is mounted inside, on {each.path}")

    def _add_tree(self, version: TreeVersion) -> _Tree:
        """Makes the contents of a version readable, before its tree is mounted."""
        chain = version.image.chain
        node = next((node for node, each in self._contents.items() if each.chain == chain), 0)
        if not node:
            node = next(self._private_nodes)
            self._contents[node] = ContentFile(chain)
        content = self._contents[node].add(version.vfs, version.image)
        added = _Tree(version, node, content)
        if _can_serve_images():
            added.image_node = next(self._private_nodes)
            self._served_images[added.image_node] = version.image
        self._trees.append(added)
        return added

    def _end_if_unused(self, tree: _Tree) -> None:
        if tree.opens or tree.is_being_mounted:
            return
        self._trees.remove(tree)
        self._contents[tree.content_node].remove(tree.content)
        if not self._contents[tree.content_node].is_used:
            del self._contents[tree.content_node]
        self._served_images.pop(tree.image_node, None)
        tree.version.on_end()
        if not self._trees and self.private_mount >= 0:
            # The kernel ends the connection when nothing uses it any more
            threading.Thread(target=os.close, args=(self.private_mount,), daemon=True).start()
            self.private_mount = -1

    def _replace_tree(self, new: _Tree) -> None:
        """Called in a thread. Raises as `switch_tree`."""
        self.check_place()
        self._drop_zeros(new)
        _OwnThread(lambda: self._mount_tree(new, beneath=True)).result()
        ours = self._current.mount_id, new.mount_id
        top = topmost_at(self._mountpoint, mounts())
        # Detach the old tree; the new one if somebody has just unmounted the old one
        if top is not None and top.mount_id in ours:
            syscalls.umount2(self._mountpoint, syscalls.MNT_DETACH)

    def _drop_zeros(self, new: _Tree) -> None:
        """Makes the kernel drop its pages at the addresses of new contents: it has read ahead past
        the end of contents, and got zeros. Waits for READs of these pages. Raises OSError."""
        node = new.content_node
        *before, _ = [each for each in (*self._trees,) if each.content_node == node]
        if not before:
            return
        for offset, size in added_ranges(before[-1].version.image, new.version.image):
            with suppress(FileNotFoundError):  # the kernel has nothing of the file
                os.write(self._device, protocol.invalidate_pages(node, offset, size))

    def _mount_tree(self, new: _Tree, *, beneath: bool = False) -> None:
        """The calling thread gets a working folder and descriptors of its own, and must end
        afterwards. Raises OSError, SwitchUnsupported, SessionUnsupported."""
        syscalls.own_working_folder()
        _drop_fuse_descriptors()
        syscalls.tune(syscalls.device_of(self.private_mount), CONTENT_READ_AHEAD_KIB)
        self._mounter = threading.get_native_id()
        try:
            mounted = self._mount_image(new)
        finally:
            self._mounter = 0
        self.note = mounted.note
        try:
            mounted.set_read_ahead(TREE_READ_AHEAD_KIB)
            new.mount_id = syscalls.mount_id(mounted.mount)
            number = os.fstat(mounted.mount).st_dev
            new.device = f"{os.major(number)}:{os.minor(number)}"
            self._attach(mounted, beneath)
        finally:
            mounted.close()

    def _mount_image(self, tree: _Tree) -> Tree:
        """EROFS cannot use files of some file systems (tmpfs, overlayfs). Then the kernel reads the
        image through the FUSE mount, too."""
        private = f"/proc/thread-self/fd/{self.private_mount}"
        files = [f"/proc/thread-self/fd/{tree.version.file}"]
        if tree.image_node:
            files.append(f"{private}/{private_name(tree.image_node)}")
        content = f"{private}/{private_name(tree.content_node)}"
        return mount_tree(tree.version.image, files, self._source, content)

    def _attach(self, tree: Tree, beneath: bool) -> None:
        hidden = self._copy_private_mount(is_attached=beneath)
        try:
            try:
                syscalls.attach_mount(hidden, HIDDEN_FOLDER, folder=tree.mount)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Before Linux 6.15 nothing can be mounted in a tree that is attached nowhere
                self._attach_tree(tree, beneath)
                syscalls.attach_mount(hidden, HIDDEN_FOLDER, folder=tree.mount)
                tree.hide()
            else:
                tree.hide()
                self._attach_tree(tree, beneath)
        finally:
            os.close(hidden)

    def _attach_tree(self, tree: Tree, beneath: bool) -> None:
        try:
            syscalls.attach_mount(tree.mount, self._mountpoint, beneath=beneath)
        except OSError as error:
            if not beneath or error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            raise SwitchUnsupported(
                f"the kernel cannot put a mount beneath the one on {self._mountpoint}"
                " (Linux 6.5 can, except on the root of all mounts)"
            ) from error

    def _copy_private_mount(self, *, is_attached: bool) -> int:
        """A second mount of the FUSE file system, for `.diesel`: the tree holds a file of the first
        one open, which would keep it busy. `is_attached`: the current tree has such a mount."""
        try:
            return syscalls.copy_mount(self.private_mount)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Before Linux 6.15 only a mount that is attached can be copied
        if is_attached:
            return syscalls.clone_mount(f"{self._mountpoint}/{HIDDEN_FOLDER}")
        syscalls.attach_mount(self.private_mount, self._mountpoint)
        try:
            return syscalls.copy_mount(self.private_mount)
        finally:
            syscalls.umount2(self._mountpoint, syscalls.MNT_DETACH)

    def _answer_during(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in a thread, and answers requests meanwhile."""
        done = os.eventfd(0, os.EFD_CLOEXEC)
        working = _OwnThread(work, lambda: os.eventfd_write(done, 1))
        poll = select.poll()
        for descriptor in (done, self._device):
            poll.register(descriptor, select.POLLIN)
        buffer = memoryview(bytearray(protocol.REQUEST_BYTES))
        while not any(descriptor == done for descriptor, _ in poll.poll()):
            self._answer_one(buffer)
        try:
            return working.result()
        finally:
            os.close(done)

    def close(self) -> None:
        super().close()
        if self.private_mount >= 0:
            os.close(self.private_mount)
            self.private_mount = -1

    def report_current_tree(self) -> None:
        """From now on, READs of the current tree are reported as misses, and no others: the worker
        has switched to its version."""
        self._missed = self._current

    # requests ---------------------------------------------------------------------------------

    def _make_handlers(self) -> Mapping[int, tuple[str, Handler]]:
        """Adds OPEN and RELEASE, and makes `.diesel` the root."""
        handlers = dict(super()._make_handlers())
        handlers[Op.OPEN] = "open", self._open
        handlers[Op.RELEASE] = "release", self._release
        return {op: (name, _with_hidden_root(handler)) for op, (name, handler) in handlers.items()}

    def _lookup(self, request: RequestHeader, message: memoryview) -> Answer:
        if request.node == HIDDEN_ROOT:
            name = protocol.parse_name(message)
            for node in (*self._contents, *self._served_images):
                if name == private_name(node).encode():
                    found = self._private_attributes(node)
                    return protocol.entry_answer(
                        found.node, found.mode, found.size, found.mtime_ns, FOREVER_WHOLE_S,
                        FOREVER_WHOLE_S, _OF_ROOT,
                    )  # fmt: skip
        return super()._lookup(request, message)

    def _getattr(self, request: RequestHeader, message: memoryview) -> Answer:
        if not self._is_private(request.node):
            return super()._getattr(request, message)
        found = self._private_attributes(request.node)
        return protocol.attributes_answer(
            found.node, found.mode, found.size, found.mtime_ns, FOREVER_WHOLE_S, _OF_ROOT
        )

    def _is_private(self, node: int) -> bool:
        return node in self._contents or node in self._served_images

    def _private_attributes(self, node: int) -> Attributes:
        image = self._served_images.get(node)
        size = CONTENT_BYTES if image is None else len(image.buffer)
        return Attributes(node, 0o100400, size, 0, FOREVER_S)

    def _open(self, request: RequestHeader, message: memoryview) -> Answer:
        """Never refuses: the kernel would report no later open."""
        if request.node < HIDDEN_ROOT and not self._is_private(request.node):
            raise FuseErrno(errno.ESTALE)
        if request.node not in self._contents or request.thread != self._mounter:
            return protocol.open_answer(0)
        handle, tree = next(self._handles), self._trees[-1]
        self._openers[handle] = tree
        tree.opens += 1
        return protocol.open_answer(handle)

    def _release(self, request: RequestHeader, message: memoryview) -> Answer:
        tree = self._openers.pop(protocol.parse_release(message), None)
        if tree is not None:
            tree.opens -= 1
            self._end_if_unused(tree)
        return b""

    def _read(self, read: ReadRequest) -> None:
        unique, node, offset, size, thread = read
        image = self._served_images.get(node)
        if image is not None:
            self._send(unique, (image.buffer[offset : offset + size],))
            self._waits.answered(thread, WaitCause.METADATA, self._begun_s)
            return
        content = self._contents.get(node)
        if content is None:
            super()._read(read)
            return
        self._vfs.requests["read"] += 1
        push_status, tree = self.worker.push_status, self._missed
        if push_status is not None and node == tree.content_node:
            entry = tree.content.entry_at(offset)
            if not self._is_ahead(thread, offset):
                self.worker.report_miss(entry + 1)

            def wanted() -> HeldBytes | None:
                place = content.only_file(offset, size)
                return None if place is None else HeldBytes(unique, *place)

            held = push_status.try_hold(entry, wanted)
            if held is not None:
                self._later(read, "read", self._content_held(held, content, offset, size))
                return
        try:
            found = content.read_nowait(offset, size)
        except BaseException as fault:
            self._fail_read(read, fault)
            return
        if found is not None:
            self._send(unique, found)
            self._waits.answered(thread, WaitCause.MOUNT, self._begun_s)
        else:
            self._later(read, "read", content.read(offset, size))

    def _is_ahead(self, thread: int, offset: int) -> bool:
        """Whether the kernel has probably sent a READ ahead of a reader, so that it does not show
        where readers are: it lies a little after the thread's last READ that was not ahead."""
        if 0 < offset - self._read_offsets.get(thread, offset) <= CONTENT_READ_AHEAD_KIB << 10:
            return True
        if len(self._read_offsets) >= THREADS_MAX:
            self._read_offsets.clear()
        self._read_offsets[thread] = offset
        return False

    async def _content_held(
        self, held: HeldRead, content: ContentFile, offset: int, size: int
    ) -> Content:
        found = await self.worker.held_or_read(held, lambda: content.read(offset, size))
        if not isinstance(found, bytes):
            return found
        return found, bytes(size - len(found))  # zeros behind the file


def reason_of(error: OSError) -> str:
    if error.errno == errno.ENODEV:
        return "this kernel has no EROFS (`modprobe erofs` loads it, if it is installed)"
    if error.errno == errno.EPERM:
        return "only root of the machine may mount EROFS, not root of a user namespace"
    return f"the kernel cannot mount the tree: {error}"


def _can_serve_images() -> bool:
    """Whether the kernel can mount an image that it reads through FUSE. The first versions of Linux
    6.12 crash then."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 13)


def _with_hidden_root(handler: Handler) -> Handler:
    def handle(request: RequestHeader, message: memoryview) -> Answer:
        if request.node == ROOT:
            request = request._replace(node=HIDDEN_ROOT)
        return handler(request, message)

    return handle
