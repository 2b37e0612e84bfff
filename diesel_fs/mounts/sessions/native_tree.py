"""The tree of a native mount: an EROFS file system that the kernel serves from an image.

The tree has three devices: the image (`format/image/`); the *content file* of the mount's FUSE file
system; and a file in memory with the blocks of the root folder. The kernel reads them from the
files themselves (from Linux 6.12 on, if it was built so), or through loop devices.

`.diesel` is found by name and listed nowhere. At first the root folder has an entry for it. When
the FUSE file system is mounted on it, the kernel keeps the name, and the entry is removed
(`Tree.hide`).

Concurrency: call `mount_tree` in a thread. It opens the content file, and the server must answer.
"""

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from ...format.entries import NAME_BYTES_MAX
from ...format.image import Image
from ...system import syscalls
from ...system.loop_devices import open_loop_device
from .session import SessionUnsupported

_OPTIONS = (("ro", ""), ("noacl", ""))
"""Without `noacl`, `ls -l` would request access control lists, and there are none."""

_ATTRIBUTES = (
    syscalls.MOUNT_READ_ONLY | syscalls.MOUNT_NOSUID | syscalls.MOUNT_NODEV | syscalls.MOUNT_NOATIME
)


class Tree:
    """The tree of one version, attached at no path yet. `mount` is a descriptor; `note` says why it
    is not mounted in the best way, or ""."""

    def __init__(self, mount: int, image: Image, root: int) -> None:
        """`root` is the file with the blocks of the root folder."""
        self.mount = mount
        self.note = ""
        self._image = image
        self._root = root

    def hide(self) -> None:
        """Removes `.diesel` from listings, after something is mounted on it. Raises OSError."""
        os.pwrite(self._root, self._image.root_folder(hidden=True), 0)
        folder = self._open_root()
        try:
            os.posix_fadvise(folder, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(folder)

    def set_read_ahead(self, kib: int) -> None:
        folder = self._open_root()
        try:
            syscalls.set_read_ahead(folder, kib)
        finally:
            os.close(folder)

    def fails_reads_cut_short(self) -> bool:
        """Whether a read of the tree fails, as it must, if the kernel gets only a part of the
        bytes. Also writes the blocks of the root folder, whose file is empty before.

        A faulty kernel fills up with zeros and keeps them: a reader that is killed while it waits
        would leave zeros to all others. To find out, this method first writes the file without its
        last bytes, and looks up a name that the kernel searches in the last block.
        """
        content = self._image.root_folder(hidden=False)
        os.pwrite(self._root, content[: os.fstat(self.mount).st_size - 1], 0)
        try:
            os.stat(b"\xff" * NAME_BYTES_MAX, dir_fd=self.mount, follow_symlinks=False)
            fails = False
        except OSError as error:
            fails = error.errno == errno.EIO
        os.pwrite(self._root, content, 0)
        return fails

    def _open_root(self) -> int:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.mount)

    def close(self) -> None:
        """Closes the descriptors: they keep the mount busy, or a tree alive that is attached
        nowhere."""
        os.close(self.mount)
        os.close(self._root)


def mount_tree(image: Image, files: Sequence[str], source: str, content: str) -> Tree:
    """Mounts the first of `files`, paths of the image's file, that this kernel can mount. `content`
    is the path of the content file, `source` the text for the mount table.

    Raises OSError, and SessionUnsupported if this kernel cannot have the tree. Changes the working
    folder of the calling thread, or of the process unless the thread has one of its own.
    """
    try:
        for file in files:
            with suppress(_NotMountableError):
                return _mount_from_files(image, file, source, content)
        reason = "this kernel cannot mount EROFS from a file (CONFIG_EROFS_FS_BACKED_BY_FILE)"
    except _UnsafeFilesError:
        reason = (
            "EROFS of this kernel shows zeros where a read of a file was cut short (a fault of"
            " Linux 6.12.0 to 6.12.79 and 6.13 to 6.17)"
        )
    try:
        tree = _mount_from_loops(image, files[0], source, content)
    except OSError as error:
        raise SessionUnsupported(f"{reason}, and loop devices cannot be had: {error}") from error
    tree.note = f"loop devices are used: {reason}"
    return tree


class _NotMountableError(Exception):
    """This kernel cannot mount any file, or not this one."""


class _UnsafeFilesError(Exception):
    """This kernel shows zeros after a read that was cut short."""


def _mount_from_files(image: Image, file: str, source: str, content: str) -> Tree:
    """Raises OSError, _NotMountableError, _UnsafeFilesError."""
    root = os.memfd_create("diesel-root", os.MFD_CLOEXEC)
    try:
        tree = _mount((file, content, _path_of(root)), source, image, root)
    except OSError as error:
        if error.errno == errno.ENOTBLK:
            raise _NotMountableError from error
        raise
    finally:
        os.close(root)
    try:
        if not tree.fails_reads_cut_short():
            raise _UnsafeFilesError
    except BaseException:
        tree.close()
        raise
    return tree


def _mount_from_loops(image: Image, file: str, source: str, content: str) -> Tree:
    """The loop devices end with the tree. Raises OSError."""
    with ExitStack() as stack:
        root = os.memfd_create("diesel-root", os.MFD_CLOEXEC)
        stack.callback(os.close, root)
        os.pwrite(root, image.root_folder(hidden=False), 0)
        devices = []
        # The image, too, gets a loop device for this tree alone: if its device was mounted already,
        # the kernel would return the existing tree
        for path in (file, content, _path_of(root)):
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                device = open_loop_device(opened)
            finally:
                os.close(opened)
            stack.callback(os.close, device)
            devices.append(_path_of(device))
        return _mount(devices, source, image, root)


def _path_of(descriptor: int) -> str:
    return f"/proc/thread-self/fd/{descriptor}"  # a thread may have descriptors of its own


def _mount(devices: Sequence[str], source: str, image: Image, root: int) -> Tree:
    """`devices` are paths: of the image, the content file and the root folder. The caller closes
    `root`, the root folder's file. Raises OSError."""
    first, content, root_folder = devices
    with ExitStack() as stack:
        # The kernel shows the path that it opened as the source of the mount. So the path is a
        # relative link with the name `source`, in a file system that vanishes afterwards
        links = syscalls.new_mount("tmpfs", (), _ATTRIBUTES & ~syscalls.MOUNT_READ_ONLY)
        stack.callback(os.close, links)
        os.symlink(first, source, dir_fd=links)
        os.fchdir(links)
        stack.callback(os.chdir, "/")
        options = (("source", source), ("device", content), ("device", root_folder), *_OPTIONS)
        return Tree(syscalls.new_mount("erofs", options, _ATTRIBUTES), image, os.dup(root))
