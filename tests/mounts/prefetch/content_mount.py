"""A native mount for tests of the page cache, without the mount's own processes.

An image is mounted with EROFS over a content file. Run as a program, this module serves that file
over FUSE, as the server of a mount does, and counts the READs.
"""

import fcntl
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt

from diesel_fs.cache.readers.coalescing_reader import ExtentBatch
from diesel_fs.format.entries import RECORD, ChunkId, ChunkInfo, Kind, Rows
from diesel_fs.format.image import BLOCK_BYTES, Image, Shown, build_image
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.prefetch.pages.content_page_cache import ContentTarget
from diesel_fs.system import syscalls

IDENTITY = UUID(int=5)
CHAIN = UUID(int=6)
CONTENT_NODE = 2
CONTENT_BYTES = 1 << 44
FOREVER_S = 1 << 31

_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4
_CLONE_DEVICE = 0x8004E500


Place = tuple[int, int]
"""The chunk of a content, and its begin there."""

CHUNK_FILES = 64


def made_snapshot(
    contents: dict[bytes, bytes], version: int, places: dict[tuple[bytes, bytes], Place]
) -> Snapshot:
    """A snapshot of files by name; a name may have one folder before a slash.

    A file that is not in `places`, by name and content, gets the next place.
    """
    for file in sorted(contents.items()):
        if file not in places:
            chunk, at = divmod(len(places), CHUNK_FILES)
            places[file] = chunk, 96 + (at << 24)
    folders = sorted({name.rpartition(b"/")[0] for name in contents} | {b""})
    names = [b"", *folders[1:]]
    within, chunks = [0] * len(names), [0] * len(names)
    records = [(0, 0, 0, 0, 0, 0o755, Kind.FOLDER, 0, at, 1, 0) for at in range(len(names))]
    for name, content in sorted(contents.items()):
        folder, _, last = name.rpartition(b"/")
        within.append(folders.index(folder))
        names.append(last)
        chunk, offset = places[name, content]
        chunks.append(chunk)
        stamp, size = len(names), len(content)
        records.append((size, 0, 0, offset, size, 0o644, Kind.FILE, 0, stamp, 1, 0))
    ids = [ChunkId(b"%016d" % number) for number in range(max(chunks) + 1)]
    rows = Rows(
        folders=folders,
        folder=np.array(within, np.uint32),
        names=names,
        records=np.array(records, RECORD),
        chunk=np.array(chunks, np.uint32),
        chunks=ids,
        tails={},
    )
    table = [ChunkInfo(each, 1 << 32) for each in ids]
    parts = build_snapshot(
        None, rows, table, identity=IDENTITY, dataset="images", version=version, digest=0
    )
    return Snapshot(memoryview(b"".join(parts)))


class ContentServer:
    """A content file that is served by another process."""

    def __init__(self, folder: Path) -> None:
        self._store = os.open(folder / "content", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        counts = os.memfd_create("counts")
        os.truncate(counts, 4096)
        self._counts: npt.NDArray[np.uint64] = np.frombuffer(mmap.mmap(counts, 4096), np.uint64)
        served = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = {
            "source": "images@1", "fd": str(served), "rootmode": "40000", "user_id": "0",
            "group_id": "0", "default_permissions": "", "ro": "",
        }  # fmt: skip
        self.mount = syscalls.new_mount("fuse", [*options.items()], _READ_ONLY_NOSUID_NODEV)
        files = (served, self._store, counts)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, files)], pass_fds=files
        )
        self.device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        """For notifications."""
        fcntl.ioctl(self.device, _CLONE_DEVICE, struct.pack("I", served))
        os.close(served)
        os.close(counts)
        content = os.open("content", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.mount)
        self.content = ContentTarget(content, CONTENT_NODE)

    @property
    def reads(self) -> int:
        count: int = self._counts[0].item()
        return count

    def fill(self, address: int, content: bytes) -> None:
        """The bytes that READs bring from an address on."""
        os.pwrite(self._store, content, address)

    def content_bytes(self) -> int:
        return syscalls.cached_bytes(self.content.descriptor, 0, CONTENT_BYTES)

    def close(self) -> None:
        """End it, after the trees over it were unmounted."""
        for each in (self.content.descriptor, self.mount, self.device, self._store):
            os.close(each)
        self._process.kill()
        self._process.wait()


class ContentMount:
    """One version of a dataset that is mounted, and the server of its content file."""

    def __init__(
        self, folder: Path, contents: dict[bytes, bytes], earlier: "ContentMount | None" = None
    ) -> None:
        """`earlier` is a mount of another version; its content file is used."""
        version = 1 if earlier is None else earlier.snapshot.version + 1
        self.contents = contents
        self._places: dict[tuple[bytes, bytes], Place] = dict(earlier._places if earlier else ())
        self.snapshot: Snapshot = made_snapshot(contents, version, self._places)
        chain = CHAIN if earlier is None else earlier.image
        image_path = folder / f"image{version}"
        image_path.write_bytes(b"".join(build_image(self.snapshot, Shown(0, 0), chain)))
        self.image: Image = Image(image_path.read_bytes(), verify=True)
        self.server: ContentServer = ContentServer(folder) if earlier is None else earlier.server
        for entry in self.entries().tolist():
            self.server.fill(self.address(entry), self.content_of(entry))
        self.at = folder / f"mount{version}"
        self.at.mkdir()
        root = os.memfd_create("root folder")
        os.write(root, self.image.root_folder(hidden=True))
        options = [
            ("source", str(image_path)), ("device", f"/proc/self/fd/{self.server.mount}/content"),
            ("device", f"/proc/self/fd/{root}"), ("ro", ""),
        ]  # fmt: skip
        tree = syscalls.new_mount("erofs", options, _READ_ONLY_NOSUID_NODEV)
        syscalls.attach_mount(tree, str(self.at))
        os.close(tree)
        os.close(root)

    def entries(self) -> npt.NDArray[np.uint32]:
        """The files with content, in the order of their addresses."""
        return self.image.order.copy()

    def entry(self, name: bytes) -> int:
        entries: list[int] = self.entries().tolist()
        return next(entry for entry in entries if self.snapshot.path(entry) == name)

    def content_of(self, entry: int) -> bytes:
        return self.contents[self.snapshot.path(entry)]

    def address(self, entry: int) -> int:
        """The begin of a file's content in the content file."""
        return self.image.first_block.item(entry) * BLOCK_BYTES

    def path(self, entry: int) -> Path:
        return self.at / os.fsdecode(self.snapshot.path(entry))

    def batch(self, entries: Sequence[int] | npt.NDArray[np.uint32]) -> ExtentBatch:
        contents = [memoryview(self.content_of(int(entry))) for entry in entries]
        return ExtentBatch(np.array(entries, np.int64), np.zeros(len(entries), np.int64), contents)

    def tree_bytes(self) -> int:
        """How many bytes of the files that users see are in the page cache."""
        found = 0
        for entry in self.entries().tolist():
            with self.path(entry).open("rb", buffering=0) as file:
                size = len(self.content_of(entry))
                found += syscalls.cached_bytes(file.fileno(), 0, size)
        return found

    def close(self) -> None:
        """Unmount the tree."""
        syscalls.umount2(str(self.at), syscalls.MNT_DETACH)


@contextmanager
def content_mount(folder: Path, contents: dict[bytes, bytes]) -> Iterator[ContentMount]:
    mounted = ContentMount(folder, contents)
    try:
        yield mounted
    finally:
        mounted.close()
        mounted.server.close()


def _attributes(node: int) -> bytes:
    mode, size = (0o100400, CONTENT_BYTES) if node == CONTENT_NODE else (0o40500, 0)
    return struct.pack("<6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def serve(device: int, store: int, counts_file: int) -> None:
    """Answer the kernel's requests for a folder with the content file."""
    counts = np.frombuffer(mmap.mmap(counts_file, 4096), np.uint64)
    buffer = bytearray(1 << 17)

    def reply(unique: int, error: int, *parts: bytes) -> None:
        header = struct.pack("<IiQ", 16 + sum(map(len, parts)), -error, unique)
        with suppress(FileNotFoundError):  # the request was given up
            os.writev(device, [header, *parts])

    while True:
        length = os.readv(device, [buffer])
        _, op, unique, node = struct.unpack_from("<IIQQ", buffer)
        match op:
            case 26:  # INIT
                flags = struct.unpack_from("<4I", buffer, 40)[3] & (1 | 1 << 22)
                limits = (64, 48, 4096, 1, 256, 0)
                reply(unique, 0, struct.pack("<4I2H2I2H32x", 7, 31, 1 << 20, flags, *limits))
            case 1:  # LOOKUP
                if bytes(buffer[40:length]) == b"content\0":
                    entry = struct.pack("<4Q2I", CONTENT_NODE, 0, FOREVER_S, FOREVER_S, 0, 0)
                    reply(unique, 0, entry + _attributes(CONTENT_NODE))
                else:
                    reply(unique, 2)
            case 3:  # GETATTR
                reply(unique, 0, struct.pack("<Q2I", FOREVER_S, 0, 0) + _attributes(node))
            case 14:  # OPEN, keeping cached pages, without FLUSH
                reply(unique, 0, struct.pack("<Q2I", 0, 2 | 1 << 5, 0))
            case 15:  # READ
                _, offset, size = struct.unpack_from("<2QI", buffer, 40)
                counts[0] += 1
                reply(unique, 0, os.pread(store, size, offset).ljust(size, b"\0"))
            case 18 | 29:  # RELEASE, RELEASEDIR
                reply(unique, 0)
            case 27:  # OPENDIR
                reply(unique, 0, struct.pack("<Q2I", 0, 0, 0))
            case 2 | 42:  # FORGET, BATCH_FORGET
                pass
            case _:
                reply(unique, 38)


if __name__ == "__main__":
    with suppress(OSError):  # the mount has ended
        serve(*map(int, sys.argv[1:]))
