"""The tree of a native mount: an EROFS file system that the kernel serves from an image.

EROFS is a read-only file system of the Linux kernel. `mount_tree` makes one from an image
(`format/image.py`). Its contents lie on a second device, the *content file* of the mount's FUSE
file system. The blocks of its root folder lie on a third one, a file in memory.

`.diesel` is found by name and listed nowhere. Its entry is in the root folder at first. The FUSE
file system is mounted on it, so the kernel keeps the name; then the root folder is replaced by one
without the entry (`Tree.hide`).

All of this is for a thread that may wait: mounting opens the content file, which the mount's server
must answer.
"""

import os
from contextlib import ExitStack

from ...format.image import Image
from ...system import syscalls

_ATTRIBUTES = (
    syscalls.MOUNT_READ_ONLY | syscalls.MOUNT_NOSUID | syscalls.MOUNT_NODEV | syscalls.MOUNT_NOATIME
)


class Tree:
    """The tree of one version, attached at no path yet. `mount` is the descriptor of its mount."""

    def __init__(self, mount: int, image: Image, root: int) -> None:
        self.mount = mount
        self._image = image
        self._root = root

    def hide(self) -> None:
        """Takes `.diesel` out of listings: something is mounted on it now. Raises OSError."""
        os.pwrite(self._root, self._image.root_folder(hidden=True), 0)
        folder = self._open_root()
        try:
            os.posix_fadvise(folder, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(folder)

    def set_read_ahead(self, kib: int) -> None:
        """Sets how far the kernel reads ahead in a file of the tree, where it lets us."""
        folder = self._open_root()
        try:
            syscalls.set_read_ahead(folder, kib)
        finally:
            os.close(folder)

    def _open_root(self) -> int:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.mount)

    def close(self) -> None:
        """Closes the descriptors, which would keep the mount busy. A tree that was not attached
        ends."""
        os.close(self.mount)
        os.close(self._root)


def mount_tree(image: Image, file: str, source: str, content: str) -> Tree:
    """Mounts an image; `file` and `content` are the paths of its file and of the content file.

    `source` is what the mount table shows. Raises OSError. It changes the working folder of the
    calling thread, and of the process unless the thread has one of its own.
    """
    with ExitStack() as stack:
        root = os.memfd_create("diesel-root", os.MFD_CLOEXEC)
        stack.callback(os.close, root)
        os.pwrite(root, image.root_folder(hidden=False), 0)
        # The kernel shows as the source what it opens, so that is a relative link of this name. It
        # lies in a file system of its own, of which nothing stays behind.
        links = syscalls.new_mount("tmpfs", (), _ATTRIBUTES & ~syscalls.MOUNT_READ_ONLY)
        stack.callback(os.close, links)
        os.symlink(file, source, dir_fd=links)
        os.fchdir(links)
        stack.callback(os.chdir, "/")
        options = (
            ("source", source),
            ("device", content),
            ("device", f"/proc/self/fd/{root}"),
            ("ro", ""),
        )
        tree = Tree(syscalls.new_mount("erofs", options, _ATTRIBUTES), image, root)
        os.chdir("/")
        os.close(links)
        stack.pop_all()
        return tree
