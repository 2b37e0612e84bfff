"""The FUSE protocol as bytes: requests of the kernel on /dev/fuse, replies, and notifications.

The numbers and layouts are from `include/uapi/linux/fuse.h` (version 7.31 of Linux 5.4, and later).
A notification is a message to the kernel that answers no request: it changes the kernel's caches.
Pure. For a message that contradicts its own header, parsers raise `Malformed`; the session drops
the message and goes on.
"""

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

KERNEL_MAJOR = 7
KERNEL_MINOR = 41
"""The newest version that is used; older kernels get their own."""

KERNEL_MINOR_MIN = 31
"""Linux 5.4, the first that stops sending OPENDIR once it was refused."""


class Op(IntEnum):
    """The kinds of requests. The session answers all others with ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    READLINK = 5
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    GETXATTR = 22
    LISTXATTR = 23
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    READDIRPLUS = 44


class Flag(IntFlag):
    """Abilities that INIT, the first request, negotiates."""

    ASYNC_READ = 1 << 0
    DO_READDIRPLUS = 1 << 13
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24


NEEDED = Flag.NO_OPEN_SUPPORT | Flag.NO_OPENDIR_SUPPORT | Flag.DO_READDIRPLUS
"""Without these the kernel sends a request at each open, and the kernel session is no better than
pyfuse3."""

WANTED = NEEDED | Flag.ASYNC_READ | Flag.PARALLEL_DIROPS | Flag.MAX_PAGES | Flag.CACHE_SYMLINKS

PAGES_MAX = 256
"""The largest READ, in pages (1 MiB): the kernel's own limit, unless root changes it."""

WRITE_BYTES_MAX = 4096
"""Nothing is written, but the kernel demands a size that is not 0."""

REQUEST_BYTES = 1 << 16
"""The buffer for a request. The longest is a BATCH_FORGET, which the kernel cuts to fit."""

NOTIFY_INVALIDATE = 2
NOTIFY_INVALIDATE_NAME = 3
NOTIFY_STORE = 4

IN_HEADER = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extension, -
OUT_HEADER = struct.Struct("<IiQ")  # length, error, unique
_INIT_IN = struct.Struct("<IIII")  # major, minor, readahead, flags
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_READ_IN = struct.Struct("<QQII16x")  # fh, offset, size, flags; lock owner, open flags
_READ_REQUEST = struct.Struct("<IIQQ8xI4x8xQI")  # header and body of a READ
_READ_REQUEST_BYTES = IN_HEADER.size + _READ_IN.size
_FORGET_IN = struct.Struct("<Q")
_BATCH_FORGET_IN = struct.Struct("<II")
_FORGET_ONE = struct.Struct("<QQ")
_INTERRUPT_IN = struct.Struct("<Q")
_OPEN_OUT = struct.Struct("<QII")  # handle, flags, -
_RELEASE_IN = struct.Struct("<QIIQ")  # handle, flags, release flags, lock owner
_FOPEN_KEEP_CACHE, _FOPEN_NOFLUSH = 1 << 1, 1 << 5
_ATTR = "QQQqqqIIIIIIIIII"
ENTRY_OUT = struct.Struct("<QQQQII" + _ATTR)
ATTR_OUT = struct.Struct("<QII" + _ATTR)
_STATFS_OUT = struct.Struct("<QQQQQIIII24x")
DIRENT = struct.Struct("<QQII")  # node, offset of the next entry, length of the name, type
STORE = struct.Struct("<IiQQQII")  # the header of a notification, then node, offset, size, -
INVALIDATE = struct.Struct("<IiQQqq")  # the same header, then node, offset, length (0: all)

_INVALIDATE_NAME = struct.Struct("<IiQQII")  # the same header, then folder, length of the name, -

HEADER_BYTES = IN_HEADER.size


class Malformed(Exception):
    """A message contradicts its header."""


class RequestHeader(NamedTuple):
    op: int
    unique: int  # the request's number, which its reply repeats
    node: int
    thread: int  # that made the request; 0 if it is invisible to us


class Offer(NamedTuple):
    """The kernel's side of the negotiation in INIT."""

    major: int
    minor: int
    flags: Flag


def parse_header(message: memoryview) -> RequestHeader:
    if len(message) < HEADER_BYTES:
        raise Malformed(f"{len(message)} bytes are too few for a request")
    length, op, unique, node, _, _, thread, *_ = IN_HEADER.unpack_from(message)
    if length != len(message):
        raise Malformed(f"a request of {len(message)} bytes has length {length} in its header")
    return RequestHeader(op, unique, node, thread)


class ReadRequest(NamedTuple):
    unique: int
    node: int
    offset: int
    size: int
    thread: int  # that reads; 0 if it is invisible to us


def parse_if_read(message: memoryview) -> ReadRequest | None:
    """None for other requests. READs, the most frequent, are parsed in one step."""
    if len(message) != _READ_REQUEST_BYTES:
        return None
    length, op, unique, node, thread, offset, size = _READ_REQUEST.unpack_from(message)
    if op != Op.READ:
        return None
    if length != _READ_REQUEST_BYTES:
        raise Malformed(f"a READ of {_READ_REQUEST_BYTES} bytes has length {length} in its header")
    return ReadRequest(unique, node, offset, size, thread)


def _body(layout: struct.Struct, message: memoryview, request: str) -> tuple[int, ...]:
    if len(message) < HEADER_BYTES + layout.size:
        raise Malformed(f"{request} of {len(message)} bytes is too short")
    return layout.unpack_from(message, HEADER_BYTES)


def parse_name(message: memoryview) -> bytes:
    """The name in a LOOKUP."""
    name = message[HEADER_BYTES:].tobytes()
    end = name.find(b"\0")
    if end <= 0 or b"/" in name[:end]:
        raise Malformed("a name that is empty, has no NUL at its end, or has a slash")
    return name[:end]


def parse_read(message: memoryview) -> tuple[int, int]:
    """Offset and size of a READ, READDIR or READDIRPLUS."""
    _, offset, size, _ = _body(_READ_IN, message, "a READ")
    return offset, size


def parse_forgets(request: RequestHeader, message: memoryview) -> list[tuple[int, int]]:
    """Nodes, each with the number of references that the kernel drops."""
    if request.op == Op.FORGET:
        return [(request.node, _body(_FORGET_IN, message, "a FORGET")[0])]
    count, _ = _body(_BATCH_FORGET_IN, message, "a BATCH_FORGET")
    start = HEADER_BYTES + _BATCH_FORGET_IN.size
    if len(message) < start + count * _FORGET_ONE.size:
        raise Malformed(f"a BATCH_FORGET of {len(message)} bytes claims {count} nodes")
    return list(_FORGET_ONE.iter_unpack(message[start : start + count * _FORGET_ONE.size]))


def parse_interrupt(message: memoryview) -> int:
    """The number of the request whose thread got a signal."""
    return _body(_INTERRUPT_IN, message, "an INTERRUPT")[0]


def open_answer(handle: int) -> bytes:
    """The kernel keeps its pages of the file.

    It also sends no FLUSH when a descriptor is closed. If the server itself has the file open and
    is killed, FLUSH would wait for ever, since the exiting process still holds the connection.
    """
    return _OPEN_OUT.pack(handle, _FOPEN_KEEP_CACHE | _FOPEN_NOFLUSH, 0)


def parse_release(message: memoryview) -> int:
    """The handle (of `open_answer`) that the kernel has closed."""
    return _body(_RELEASE_IN, message, "a RELEASE")[0]


def parse_init(message: memoryview) -> Offer:
    major, minor, _, flags = _body(_INIT_IN, message, "an INIT")
    return Offer(major, minor, Flag(flags))


def init_answer(minor: int, readahead_bytes: int, flags: Flag, background: int) -> bytes:
    """`background` is the number of READs ahead that may wait at once."""
    congested = background * 3 // 4
    return _INIT_OUT.pack(
        KERNEL_MAJOR, minor, readahead_bytes, flags, background, congested, WRITE_BYTES_MAX, 1,
        PAGES_MAX, 0, 0,
    )  # fmt: skip


class CommonAttributes(NamedTuple):
    uid: int
    gid: int
    block_bytes: int


_Attributes = tuple[int, ...]


def _attributes(
    node: int, mode: int, size: int, mtime_ns: int, common: CommonAttributes
) -> _Attributes:
    seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
    times = (seconds,) * 3 + (nanoseconds,) * 3
    rest = (mode, 1, common.uid, common.gid, 0, common.block_bytes, 0)
    return (node, size, (size + 511) >> 9, *times, *rest)


def entry_answer(
    node: int,
    mode: int,
    size: int,
    mtime_ns: int,
    name_valid_s: int,
    valid_s: int,
    common: CommonAttributes,
) -> bytes:
    """Node 0 means that the name does not exist. The kernel may keep the name for `name_valid_s`,
    the attributes for `valid_s`."""
    attributes = _attributes(node, mode, size, mtime_ns, common) if node else (0,) * 16
    return ENTRY_OUT.pack(node, 0, name_valid_s, valid_s, 0, 0, *attributes)


def attributes_answer(
    node: int, mode: int, size: int, mtime_ns: int, valid_s: int, common: CommonAttributes
) -> bytes:
    return ATTR_OUT.pack(valid_s, 0, 0, *_attributes(node, mode, size, mtime_ns, common))


def dirent(node: int, following: int, kind: int, name: bytes) -> bytes:
    """`following` is the offset of the next entry; `kind` has the type bits of the mode, shifted
    right by 12."""
    return DIRENT.pack(node, following, len(name), kind) + name + bytes(-len(name) % 8)


def statfs_answer(blocks: int, entries: int, block_bytes: int, name_bytes_max: int) -> bytes:
    return _STATFS_OUT.pack(blocks, 0, 0, entries, 0, block_bytes, name_bytes_max, block_bytes, 0)


def reply_header(unique: int, size: int, number: int = 0) -> bytes:
    """`number` is the errno of a reply without content."""
    return OUT_HEADER.pack(OUT_HEADER.size + size, -number, unique)


def invalidate_node(node: int) -> bytes:
    """Makes the kernel drop a node's pages and attributes, or a folder's listing but not the names
    in it."""
    return invalidate_pages(node, 0, 0)


def invalidate_pages(node: int, offset: int, size: int) -> bytes:
    """Makes the kernel drop pages and attributes. Size 0: all pages from `offset` on."""
    return INVALIDATE.pack(INVALIDATE.size, NOTIFY_INVALIDATE, 0, node, offset, size)


def invalidate_name(folder: int, name: bytes) -> bytes:
    """Makes the kernel drop a name, also one that it remembers as missing."""
    size = _INVALIDATE_NAME.size + len(name) + 1
    return (
        _INVALIDATE_NAME.pack(size, NOTIFY_INVALIDATE_NAME, 0, folder, len(name), 0) + name + b"\0"
    )
