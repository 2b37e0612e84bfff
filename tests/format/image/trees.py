"""Datasets for tests of images, and the paths that a mount of them must show.

The content of a file follows from its chunk, its offset there and its size, so a test can fill a
content file, or answer reads of one, without a store.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from diesel_fs.format.entries import ChunkInfo, Kind
from diesel_fs.format.image import Image, Shown, build_image
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.reader import Snapshot
from tests.format.snapshot.oracle import (
    HOME,
    IDENTITY,
    OwnEntry,
    Part,
    ShownEntry,
    State,
    build,
    chunk_id,
    chunks_in,
    rows_of,
)

CHAIN = UUID("c4a1ca1a-0000-4000-8000-000000000001")
BLOCK = 4096
EXTENT_BYTES = 4 << 20


@dataclass(frozen=True)
class Seen:
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    target: bytes = b""


def snapshot_of(state: State, *, version: int = 1, also: Iterable[int] = ()) -> Snapshot:
    """`also` are more chunks in its table."""
    chunks = sorted(chunks_in(state.values()) | {HOME, *also})
    return Snapshot(build(None, state, chunks, version=version))


def snapshot_of_large_file(size: int) -> Snapshot:
    whole = 32 << 30
    lengths = [whole] * (size // whole) + [size % whole] * (size % whole > 0)
    parts = [Part(10 + n, 96, 2 << 30, 1, 7, length) for n, length in enumerate(lengths)]
    own = OwnEntry(Kind.FILE, parts=tuple(parts))
    chunks = sorted({HOME, *chunks_in([own])})
    built = build_snapshot(
        None,
        rows_of({b"large": own}),
        [ChunkInfo(chunk_id(number), 4 << 30) for number in chunks],
        identity=IDENTITY,
        dataset="flowers",
        version=1,
        digest=0,
    )
    return Snapshot(b"".join(built))


def image_of(snapshot: Snapshot, how: Shown, earlier: Image | UUID = CHAIN) -> Image:
    return Image(b"".join(build_image(snapshot, how, earlier)), verify=True)


def file(chunk: int, offset: int, size: int, mode: int = 0o644, mtime_ns: int = 1) -> OwnEntry:
    parts: list[Part] = []
    for start in range(0, size, EXTENT_BYTES):
        length = min(EXTENT_BYTES, size - start)
        parts.append(Part(chunk, offset + len(parts), 1, 1, 7, length))
    return OwnEntry(Kind.FILE, mode, mtime_ns, tuple(parts))


def link(target: bytes, mtime_ns: int = 1) -> OwnEntry:
    return OwnEntry(Kind.LINK, 0o777, mtime_ns, target=target)


def page_of(entry: ShownEntry, page: int) -> bytes:
    first = entry.parts[0]
    made = random.Random(f"{first.chunk} {first.offset} {entry.size} {page}").randbytes(64)
    return (made * (BLOCK // 64))[: min(BLOCK, entry.size - page * BLOCK)].ljust(BLOCK, b"\0")


def seen_of(entries: Mapping[bytes, ShownEntry], how: Shown, *, hidden: bool) -> dict[bytes, Seen]:
    result = {}
    for path, entry in entries.items():
        mode = entry.mode & ~how.umask
        uid = how.uid
        if not path and how.private_to >= 0:
            mode, uid = mode & 0o700, how.private_to
        if entry.kind == Kind.LINK:
            mode = 0o777
        mode |= {Kind.FILE: 0o100000, Kind.LINK: 0o120000, Kind.FOLDER: 0o040000}[entry.kind]
        size = -1 if entry.kind == Kind.FOLDER else entry.size
        result[path] = Seen(mode, uid, how.gid, entry.mtime_ns, size, entry.target)
    if not hidden:
        result[b".diesel"] = Seen(0o040555, how.uid, how.gid, result[b""].mtime_ns, -1)
    return result


class ImageContentFile:
    """The content file of an image: each entry's pages at the addresses in the image."""

    def __init__(self, image: Image, entries: Iterable[ShownEntry]) -> None:
        """`entries` are those of the snapshot, in its order."""
        self.pages: dict[int, tuple[ShownEntry, int]] = {}
        for first, entry in zip(image.first_block.tolist(), entries, strict=True):
            has_content = entry.kind == Kind.FILE and entry.size > 0
            assert (first > 0) == has_content
            for page in range(-(-entry.size // BLOCK) if has_content else 0):
                assert first + page not in self.pages
                self.pages[first + page] = entry, page

    def read(self, offset: int, length: int) -> bytes:
        assert (offset % BLOCK, length) == (0, BLOCK)
        found = self.pages.get(offset // BLOCK)
        return page_of(*found) if found else bytes(BLOCK)


NAMES = (
    *(b"!", b"!!", b"-", b"--", b"...", b".-", b"..-", b".!", b"..!", b".a", b"..a", b".\x01"),
    *(b"\x01", b",", b"+", b"a", b".diesel", b".diesek", b".diesem", b".diesel0", b".diese"),
    *(b"\xff", b"\xff\xfe", b"\n", b"\\"),
)
"""Names that sort near the special ones, and some odd ones."""


def everything() -> dict[bytes, OwnEntry]:
    state: dict[bytes, OwnEntry] = {}
    offset = 96

    def new(size: int, chunk: int = 5) -> OwnEntry:
        nonlocal offset
        offset += 7
        return file(chunk, offset, size, mode=offset & 0o777, mtime_ns=offset * 10**9 + offset)

    for size in (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, EXTENT_BYTES, EXTENT_BYTES + 1):
        state[b"sizes/%d" % size] = new(size)
    for name in NAMES:
        state[b"dots/" + name] = new(3)
        state[b"inner/%b/%b" % (name, name)] = new(4, chunk=9)
        if name != b".diesel":
            state[name] = new(5)
    for byte in {*range(1, 256)} - {ord("/"), ord(".")}:
        state[b"bytes/" + bytes([byte])] = new(2)
    for length in range(200, 256):
        state[b"long/" + b"n" * length] = new(length)
    state[b"\xfe" * 255 + b"/" + b"\xff" * 255] = new(1)
    state[b"/".join([b"deep"] * 300)] = new(6)
    for length in (1, 31, 32, 33, 59, 60, 4031, 4032, 4033, 4094, 4095):
        state[b"links/%d" % length] = link(b"t" * length, mtime_ns=-length)
    state[b"links/up"] = link(b"../sizes/1")
    for number, mtime_ns in enumerate(
        (0, 1, -1, 10**9 - 1, -(10**9), -(10**9) - 1, 2**63 - 1, -(2**63))
    ):
        state[b"times/%d" % number] = OwnEntry(Kind.FILE, mtime_ns=mtime_ns)
    for mode in (0, 0o111, 0o222, 0o444, 0o777):
        state[b"modes/%o" % mode] = OwnEntry(Kind.FILE, mode)
        state[b"modes/folder-%o" % mode] = OwnEntry(Kind.FOLDER, mode, mode)
    for count in (*range(218, 232), 500, 3000):  # listings that fill a block, or nearly
        for number in range(count):
            state[b"many/%d/%06d" % (count, number)] = OwnEntry(Kind.FILE)
    state[b"c/x"] = new(8)
    state[b"c/x/shadows"] = new(9)
    return state


def in_root(names: Iterable[bytes]) -> State:
    return {name: OwnEntry(Kind.FILE) for name in names}


def differences(found: Mapping[bytes, Seen], wanted: Mapping[bytes, Seen]) -> list[str]:
    """Return texts: printing two dicts of thousands would take minutes."""
    keys = sorted({*found, *wanted})
    return [
        f"{key!r}: {found.get(key)} instead of {wanted.get(key)}"
        for key in keys
        if found.get(key) != wanted.get(key)
    ][:5]
