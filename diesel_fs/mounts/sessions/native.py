"""The native session: the kernel answers everything but the first read of a content.

Users see a *tree* that the kernel's own EROFS serves from an image of the snapshot
(`native_tree.py`), so names, attributes, listings, opens and ioctls never reach a process of ours.
Contents come from one virtual file, the *content file* (`mounts/content_file.py`). It lies on a
FUSE mount that this session serves as the kernel session does. The root of that FUSE mount is what
users see as `.diesel`; the content file is not listed there, and closed to all but root.

The tree holds the content file open. When the kernel closes it (RELEASE), the tree has been
unmounted and none of its files is open any more; after the last one the session ends.

Concurrency: as the kernel session. Mounting a tree opens the content file, so a thread does it
while the session goes on answering.
"""

import errno
import logging
import os
import re
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ...format.image import Image
from ...system import syscalls
from ..attributes import FOREVER_S, HIDDEN_ROOT, ROOT, Attributes, FuseErrno
from ..content_file import CONTENT_BYTES, CONTENT_NAME, ContentFile, ContentVersion
from ..mountpoint import HIDDEN_FOLDER
from ..vfs import Vfs
from . import protocol
from .kernel import FOREVER_WHOLE_S, Answer, Handler, KernelSession
from .native_tree import Tree, mount_tree
from .protocol import Op, ReadRequest, RequestHeader
from .session import SessionUnsupported

log = logging.getLogger("diesel.mount")

CONTENT_NODE = HIDDEN_ROOT - 1
"""The nodes below it are those of images (`_mount_image`)."""

TREE_READ_AHEAD_KIB = 1024
"""How far the kernel reads ahead in a file of the tree."""

CONTENT_READ_AHEAD_KIB = 4096
"""How far it then reads ahead in the content file: four READs at once."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image, and a descriptor of its file."""

    image: Image
    file: int


class NativeSession(KernelSession):
    """The session over an EROFS tree (see the module)."""

    name: ClassVar[str] = "native"

    def __init__(self, vfs: Vfs, mountpoint: str, options: Sequence[str], image: ImageFile) -> None:
        """`vfs` reads the contents of the version that `image` shows."""
        super().__init__(vfs, mountpoint, options)
        self._source = next(each[7:] for each in options if each.startswith("fsname="))
        self._image = image
        self._content = ContentFile()
        self._trees: dict[int, ContentVersion] = {}  # mounted ones, by the handle of their open
        self._served_images: dict[int, Image] = {}  # by node; see `_mount_image`
        self._next_handle = 1
        self._opening: Image | None = None  # of the tree that is being mounted
        self.private_mount = -1
        """A descriptor of the FUSE mount at no path, in which the content file can be opened."""
        self.note = ""
        """Why the tree is not mounted in the best way, if it is not."""

    @staticmethod
    def check_usable() -> None:
        """Raises SessionUnsupported where this process or this kernel cannot have native mounts."""
        if not syscalls.may_administrate():
            raise SessionUnsupported("it needs root, in a container with CAP_SYS_ADMIN")

    def mount(self) -> None:
        """See `Session`."""
        try:
            self._device, self.private_mount = syscalls.new_fuse(self._options)
        except OSError as error:
            raise SessionUnsupported(f"a FUSE mount cannot be made at no path: {error}") from error
        try:
            self._negotiate()
            self._answer_during(lambda: self._mount_tree(self._mountpoint))
        except OSError as error:
            self.close()
            raise SessionUnsupported(_reason_of(error)) from error
        except BaseException:
            self.close()
            raise

    def _mount_tree(self, mountpoint: str) -> None:
        """Mounts the tree with `.diesel` in it; it is attached when it is complete. For a thread of
        its own. Raises OSError, SessionUnsupported.
        """
        syscalls.own_working_folder()
        device = os.stat(f"/proc/self/fd/{self.private_mount}").st_dev
        syscalls.tune(f"{os.major(device)}:{os.minor(device)}", CONTENT_READ_AHEAD_KIB)
        self._opening = self._image.image
        try:
            tree = self._mount_image(self._image)
        finally:
            self._opening = None
        try:
            self.note = tree.note
            tree.set_read_ahead(TREE_READ_AHEAD_KIB)
            self._attach(tree, mountpoint)
        finally:
            tree.close()

    def _mount_image(self, opened: ImageFile) -> Tree:
        """Mounts an image by its file. EROFS cannot use files of some file systems (tmpfs,
        overlayfs); then the kernel reads the image through the FUSE mount, too.
        """
        private = f"/proc/self/fd/{self.private_mount}"
        files = [f"/proc/self/fd/{opened.file}"]
        if _can_serve_images():
            node = CONTENT_NODE - 1 - len(self._served_images)
            self._served_images[node] = opened.image
            files.append(f"{private}/image-{node}")
        content = f"{private}/{CONTENT_NAME}"
        return mount_tree(opened.image, files, self._source, content)

    def _attach(self, tree: Tree, mountpoint: str) -> None:
        """Puts `.diesel` into the tree, and the tree in its place."""
        hidden = self._copy_private_mount(mountpoint)
        try:
            try:
                syscalls.attach_mount(hidden, HIDDEN_FOLDER, folder=tree.mount)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Before Linux 6.15 nothing can be mounted in a tree that is attached nowhere.
                syscalls.attach_mount(tree.mount, mountpoint)
                syscalls.attach_mount(hidden, HIDDEN_FOLDER, folder=tree.mount)
                tree.hide()
            else:
                tree.hide()
                syscalls.attach_mount(tree.mount, mountpoint)
        finally:
            os.close(hidden)

    def _copy_private_mount(self, mountpoint: str) -> int:
        """A second mount of the FUSE file system: the tree holds a file of the first one open,
        which would keep the mount on `.diesel` busy.
        """
        try:
            return syscalls.copy_mount(self.private_mount)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Before Linux 6.15 only a mount that is attached can be copied.
        syscalls.attach_mount(self.private_mount, mountpoint)
        try:
            return syscalls.copy_mount(self.private_mount)
        finally:
            syscalls.umount2(mountpoint, syscalls.MNT_DETACH)

    def _answer_during(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in a thread, and answers requests until it has ended: before `serve`."""
        outcome: list[_T] = []
        failure: list[BaseException] = []
        done = os.eventfd(0, os.EFD_CLOEXEC)

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:
                failure.append(error)
            finally:
                os.eventfd_write(done, 1)

        thread = threading.Thread(target=run)
        thread.start()
        poll = select.poll()
        for descriptor in (done, self._device):
            poll.register(descriptor, select.POLLIN)
        buffer = memoryview(bytearray(protocol.REQUEST_BYTES))
        while not any(descriptor == done for descriptor, _ in poll.poll()):
            self._answer_one(buffer)
        thread.join()
        os.close(done)
        if failure:
            raise failure[0]
        return outcome[0]

    def close(self) -> None:
        """See `Session`."""
        super().close()
        if self.private_mount >= 0:
            os.close(self.private_mount)
            self.private_mount = -1

    # requests ---------------------------------------------------------------------------------

    def _make_handlers(self) -> Mapping[int, tuple[str, Handler]]:
        """The kernel session's, in which the root is `.diesel`."""
        handlers = dict(super()._make_handlers())
        handlers[Op.OPEN] = "open", self._open
        handlers[Op.RELEASE] = "release", self._release
        return {op: (name, _with_hidden_root(handler)) for op, (name, handler) in handlers.items()}

    def _lookup(self, request: RequestHeader, message: memoryview) -> Answer:
        if request.node == HIDDEN_ROOT:
            name = protocol.parse_name(message)
            for node in (CONTENT_NODE, *self._served_images):
                if name == self._name_of(node):
                    return self._found(self._private_attributes(node))
        return super()._lookup(request, message)

    def _getattr(self, request: RequestHeader, message: memoryview) -> Answer:
        if not self._is_private(request.node):
            return super()._getattr(request, message)
        found = self._private_attributes(request.node)
        return protocol.attributes_answer(
            found.node, found.mode, found.size, found.mtime_ns, FOREVER_WHOLE_S, self._common
        )

    def _is_private(self, node: int) -> bool:
        return node == CONTENT_NODE or node in self._served_images

    def _name_of(self, node: int) -> bytes:
        return CONTENT_NAME.encode() if node == CONTENT_NODE else b"image-%d" % node

    def _private_attributes(self, node: int) -> Attributes:
        image = self._served_images.get(node)
        size = CONTENT_BYTES if image is None else len(image.buffer)
        return Attributes(node, 0o100400, size, 0, FOREVER_S)

    def _open(self, request: RequestHeader, message: memoryview) -> Answer:
        """Every open gets an answer: a refusal would be the last open that the kernel tells of."""
        if request.node < HIDDEN_ROOT and not self._is_private(request.node):
            raise FuseErrno(errno.ESTALE)
        if request.node != CONTENT_NODE or self._opening is None:
            return protocol.open_answer(0)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._trees[handle] = self._content.add(self._vfs, self._opening)
        return protocol.open_answer(handle)

    def _release(self, request: RequestHeader, message: memoryview) -> Answer:
        version = self._trees.pop(protocol.parse_release(message), None)
        if version is not None:
            self._content.remove(version)
            if not self._trees and self._opening is None and self.private_mount >= 0:
                # The kernel ends the connection when nothing uses it any more.
                threading.Thread(target=os.close, args=(self.private_mount,), daemon=True).start()
                self.private_mount = -1
        return b""

    def _read(self, read: ReadRequest) -> None:
        """Answers a READ of the content file at once from memory, else in a task."""
        unique, node, offset, size = read
        image = self._served_images.get(node)
        if image is not None:
            self._send(unique, (image.buffer[offset : offset + size],))
            return
        if node != CONTENT_NODE:
            super()._read(read)
            return
        self._vfs.requests["read"] += 1
        try:
            found = self._content.read_nowait(offset, size)
        except BaseException as fault:
            self._send(unique, (), self._vfs.errno_of(fault, "read", node))
            return
        if found is not None:
            self._send(unique, found)
        else:
            self._later(unique, node, "read", self._content.read(offset, size))
        if self._push_status is not None and self._push_status.takes_miss():
            self._on_miss(self._content.first_entry(offset))


def _reason_of(error: OSError) -> str:
    """Why the kernel has not mounted the tree."""
    if error.errno == errno.ENODEV:
        return "this kernel has no EROFS (`modprobe erofs` loads it, if it is installed)"
    if error.errno == errno.EPERM:
        return "only root of the machine may mount EROFS, not root of a user namespace"
    return f"the kernel cannot mount the tree: {error}"


def _can_serve_images() -> bool:
    """Whether the kernel can mount an image that it reads from a FUSE file system. The first
    versions of Linux 6.12 crash at that.
    """
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 13)


def _with_hidden_root(handler: Handler) -> Handler:
    """The handler with the node of `.diesel` in the place of the root's."""

    def handle(request: RequestHeader, message: memoryview) -> Answer:
        if request.node == ROOT:
            request = request._replace(node=HIDDEN_ROOT)
        return handler(request, message)

    return handle
