"""Builds and opens images: a snapshot's tree as an EROFS file system, which the kernel mounts.

EROFS is a read-only file system of the Linux kernel. An image holds an inode for each entry of a
snapshot, and the listings of its folders, so the kernel answers look-ups, attributes and listings
by itself. Contents are not in the image. They lie on another device of the file system, the
**content file**, at addresses that this module gives, in blocks of 4 KiB.

Images of one dataset that are built one after another form a **chain**: a content that two of them
hold has one address in both, and no address is given to two contents. So pages that the kernel
keeps of the content file stay right while a mount goes from one version to the next.

FORMAT.md, section 8, has the bytes. Pure functions over columns; safe from any thread. They work in
batches: beside the columns of the snapshot, which are mapped, they hold some 40 bytes an entry.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_digest

from ..errors import (
    CorruptError,
    ForeignError,
    FormatError,
    NewerVersionError,
    NoSpaceError,
    TruncatedError,
    UsageError,
)
from .entries import MODE_MASK, Bytes, Kind
from .snapshot import layout
from .snapshot.reader import ROOT_INDEX, Snapshot, Span

Ints: TypeAlias = npt.NDArray[np.int64]

BLOCK_BYTES = 4096
CONTROL_FOLDER = b".diesel"
"""The empty folder in the root folder on which a mount puts its control files."""

# EROFS
_BLOCKS_MAX = (1 << 32) - 1  # addresses of blocks have 32 bits, and the last of them means a hole
_SUPERBLOCK_AT = 1024
_MAGIC = 0xE0F5E1E2
_COMPAT_MTIME = 2
_INCOMPAT_DEVICE_TABLE = 8
_SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
_DEVICE_SLOT_BYTES = 128
_DEVICE_TABLE_AT = 9 * _DEVICE_SLOT_BYTES  # behind the superblock
_DEVICE = struct.Struct("<64sII56x")
_INODES_AT = 1  # a block
_SLOT_BYTES = 32  # an inode's number says where it lies, in these units
_SLOTS = BLOCK_BYTES // _SLOT_BYTES  # in a block
_INODE_BYTES = 64
_INODE_SLOTS = _INODE_BYTES // _SLOT_BYTES
_ROOT_NUMBER = 2  # not 0: programs take an entry with this number for a deleted one
_INLINE_BYTES_MAX = BLOCK_BYTES - _INODE_BYTES
_EXTENDED = 1  # the inode has 64 bytes
_PLAIN, _INLINE = 0 << 1, 2 << 1  # where content lies: in blocks, or its end behind the inode
_INODE = np.dtype(
    [
        ("format", "<u2"),
        ("attributes", "<u2"),
        ("mode", "<u2"),
        ("spare", "<u2"),
        ("size", "<u8"),
        ("block", "<u4"),
        ("number", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("mtime_s", "<i8"),
        ("mtime_ns", "<u4"),
        ("links", "<u4"),
        ("spare2", "V16"),
    ]
)
_ITEM = np.dtype([("number", "<u8"), ("name_at", "<u2"), ("type", "u1"), ("spare", "u1")])
_ITEM_BYTES = _ITEM.itemsize
_ITEM_TYPES = np.array([1, 7, 2], np.uint8)  # by Kind
_MODES = np.array([0o100000, 0o120000, 0o040000], np.uint16)  # by Kind
_LINK_MODE, _CONTROL_MODE = 0o120777, 0o040555
_TARGET_BYTES_MAX = 4095  # PATH_MAX: the kernel would cut a longer target off

_ALIGNED_BLOCKS = 16
"""A file of several extents begins at a multiple of this, as its extents do."""

# What follows the file system in an image
_TRAILER_MAGIC = b"\x93DIESIM\n"
_FORMAT_VERSION = 1
_TRAILER_BYTES = 512
_ALIGNMENT = 64
_TRAILER = struct.Struct("<8sHHI16sQ16sQQQQQIIIIq")
_SECTION = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")
_CHUNK_ID = np.dtype("S16")

_BATCH_BLOCKS = 2048
_BATCH = 1 << 18  # entries, or items of folders


class ImageTooLarge(NoSpaceError):
    """The dataset needs more addresses than an image has."""

    retry = False

    def __init__(self) -> None:
        super().__init__(
            "the dataset needs more than the 16 TiB of addresses that a tree in the kernel has",
            advice="the mount answers look-ups itself instead (FUSE)",
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """What the tree shows that no snapshot holds: whose the entries are, and who may see them."""

    uid: int
    gid: int
    umask: int = 0
    """Permission bits that are taken away from files and folders."""
    private_to: int = -1
    """From 0 on: the root folder belongs to this user, and only its owner may enter it."""


class _Columns(NamedTuple):
    """What an image says of the content file, of n entries, of which m have content, in k chunks.
    The m are in the order of their addresses."""

    first_block: layout.U4
    """n; where the content of each entry begins; 0 for an entry without content."""
    order: layout.U4
    """m; the entries."""
    start_block: layout.U4
    """m; where they begin."""
    chunk: layout.U4
    """m; the chunk with the (first extent of the) content, a number in `chunk_id`."""
    offset: layout.U4
    """m; where the content begins in the chunk object, in bytes."""
    size: layout.U8
    """m; of the content, in bytes."""
    chunk_id: npt.NDArray[np.bytes_]
    """k; ascending."""


_DTYPES = tuple(np.dtype(spec) for spec in ("<u4", "<u4", "<u4", "<u4", "<u4", "<u8", _CHUNK_ID))
_PARTS = ("tree", "root", "hidden", *_Columns._fields)
"""The sections of an image, in their order."""


class Image:
    """A finished image, in memory or mapped. Immutable; safe from any thread."""

    def __init__(self, buffer: Bytes, *, verify: bool) -> None:
        """Raises a leaf of FormatError. The trailer and the lengths are always checked; `verify`
        also compares the checksums of all sections, at some 20 GB/s."""
        view = memoryview(buffer).cast("B")
        fields, sections = _parse_trailer(view)
        if verify:
            for name, (at, behind, checksum) in zip(_PARTS, sections, strict=True):
                padding = view[behind : behind + -behind % _ALIGNMENT]
                if xxh3_64_intdigest(view[at:behind]) != checksum or any(padding):
                    _corrupt(f"its section {name} does not match its checksum", at)
        self.buffer = view
        self.identity = fields.identity
        self.version = fields.version
        self.chain = fields.chain
        """Addresses can be compared between images of one chain only."""
        self.sequence = fields.sequence
        """The place of the image in its chain, from 1."""
        self.end_block = fields.end_block
        """How many blocks of the content file this chain has given up to this image."""
        self.entry_count = fields.entries
        self.shown = fields.shown
        self.tree_bytes = sections[0][1]
        """The length of the file system, which lies at the start of the image."""
        self.columns = _columns_of(view, sections)
        self.first_block = self.columns.first_block
        self.order = self.columns.order
        self.start_blocks = self.columns.start_block
        self._root, self._hidden = (view[at:behind] for at, behind, _ in sections[1:3])
        self._hidden_block = fields.hidden_block

    def root_folder(self, *, hidden: bool) -> bytes:
        """The content of the device with the root folder: its listing, with `.diesel` or, if
        `hidden`, without it. Both have the same length."""
        if not hidden:
            return bytes(self._root)
        at = self._hidden_block * BLOCK_BYTES
        return b"".join((self._root[:at], self._hidden, self._root[at + BLOCK_BYTES :]))


def build_image(snapshot: Snapshot, shown: Shown, earlier: Image | UUID) -> Iterator[Bytes]:
    """The image of a snapshot, as pieces to be written one after the other.

    `earlier` is the last image of the chain that this one continues (of the same dataset, any
    version, any `Shown`), or the name of a new chain, which no other chain has ever had. A chain
    must never continue in two ways from one image.

    Raises ImageTooLarge, and FormatError for a snapshot that contradicts itself, or that no tree
    can show.
    """
    _check(snapshot)
    if isinstance(earlier, Image) and earlier.identity != snapshot.identity:
        raise UsageError(f"the earlier image is of {earlier.identity}, not {snapshot.identity}")
    contents = _place_contents(snapshot, earlier if isinstance(earlier, Image) else None)
    tree = _Tree(snapshot, shown, contents)
    return _pieces(tree, contents, earlier)


def _check(snapshot: Snapshot) -> None:
    """Raise CorruptError for columns that contradict each other, and FormatError for what a tree in
    the kernel cannot show."""
    columns = snapshot.columns
    layout.check(snapshot.header, columns)
    is_link = layout.kinds(columns.flags) == Kind.LINK
    if int(columns.size[is_link].max(initial=0)) > _TARGET_BYTES_MAX:
        raise FormatError(f"a link's target has more than {_TARGET_BYTES_MAX} bytes")
    in_root, at = _beside_control(snapshot)
    if at < len(in_root) and snapshot.name(in_root[at]) == CONTROL_FOLDER:
        raise FormatError("the dataset holds `.diesel`, which belongs to the mount")


def _beside_control(snapshot: Snapshot) -> tuple[range, int]:
    """The entries of the root folder, and how many are before `.diesel`: by their names, since a
    snapshot's lookup index may be wrong."""
    in_root = snapshot.children(ROOT_INDEX)
    return in_root, bisect_left(in_root, CONTROL_FOLDER, key=snapshot.name)


# Where contents lie in the content file


@dataclass(frozen=True, slots=True)
class _Contents:
    """The addresses of a snapshot's contents."""

    columns: _Columns
    end: int
    """How many blocks the chain has given."""
    used: int
    """How many blocks of the content file the snapshot needs, from the first on."""


def _place_contents(snapshot: Snapshot, earlier: Image | None) -> _Contents:
    """Give an address to each content: the one that it has in `earlier`, or fresh blocks."""
    columns = snapshot.columns
    entry = np.flatnonzero((layout.kinds(columns.flags) == Kind.FILE) & (columns.size > 0))
    chunk, offset = columns.chunk[entry], columns.offset[entry]
    many = (columns.flags[entry] & np.uint32(layout.MANY_EXTENTS)) != 0
    extents = columns.extents[chunk[many]]
    chunk[many], offset[many] = extents["chunk"], extents["offset"]
    place = chunk.astype(np.uint64) << np.uint64(32) | offset
    by_place = np.argsort(place, kind="stable")
    entry, place, many = entry[by_place], place[by_place], many[by_place]
    size = columns.size[entry]
    chunk_id = columns.chunk_id.view(_CHUNK_ID)
    if earlier is None:
        first, end = np.zeros(len(entry), np.int64), 1  # block 0 belongs to no content
    else:
        first, end = _kept_addresses(earlier, chunk_id, place, size), earlier.end_block
    blocks = _blocks_of(size)
    if int(blocks.max(initial=0)) > _BLOCKS_MAX:
        raise ImageTooLarge
    fresh = first == 0
    for is_many, alignment in ((False, 1), (True, _ALIGNED_BLOCKS)):
        end = -(-end // alignment) * alignment if (fresh & (many == is_many)).any() else end
        some = np.flatnonzero(fresh & (many == is_many))
        given = -(-blocks[some] // alignment) * alignment
        ends = end + np.cumsum(given)
        first[some] = ends - given
        end = int(ends[-1]) if len(ends) else end
    used = int((first + blocks).max(initial=1))
    if used > _BLOCKS_MAX:
        raise ImageTooLarge
    first_block = np.zeros(len(snapshot), np.uint32)
    first_block[entry] = first
    by_address = np.argsort(first)
    order, place = entry[by_address].astype(np.uint32), place[by_address]
    return _Contents(
        _Columns(
            first_block=first_block,
            order=order,
            start_block=first_block[order],
            chunk=(place >> np.uint64(32)).astype(np.uint32),
            offset=place.astype(np.uint32),
            size=columns.size[order],
            chunk_id=chunk_id,
        ),
        end,
        used,
    )


def _blocks_of(size: layout.U8) -> Ints:
    """How many blocks contents of these sizes need."""
    blocks = size >> np.uint64(12)
    blocks += (size & np.uint64(BLOCK_BYTES - 1)) != 0
    return blocks.astype(np.int64)


def _kept_addresses(
    earlier: Image, chunk_id: npt.NDArray[np.bytes_], place: layout.U8, size: layout.U8
) -> Ints:
    """The address that each content has in `earlier`; 0 for one that is not there. `place` ascends
    and has (chunk number, offset in the chunk)."""
    old = earlier.columns
    number = np.searchsorted(chunk_id, old.chunk_id)
    number[number == len(chunk_id)] = 0
    exists = chunk_id[number] == old.chunk_id if len(chunk_id) else np.zeros(len(number), np.bool_)
    among = np.flatnonzero(exists[old.chunk])
    old_place = number[old.chunk[among]].astype(np.uint64) << np.uint64(32) | old.offset[among]
    by_place = np.argsort(old_place, kind="stable")
    old_place, among = old_place[by_place], among[by_place]
    first = np.zeros(len(place), np.int64)
    if not len(among):
        return first
    nth = np.arange(len(place)) - np.searchsorted(place, place)  # of the contents at one place
    at = np.minimum(np.searchsorted(old_place, place) + nth, len(among) - 1)
    same = (old_place[at] == place) & (old.size[among[at]] == size)
    first[same] = old.start_block[among[at[same]]]
    return first


# The file system


def _packed(
    costs: Callable[[int, int], Ints], count: int, starts: Ints, limit: int
) -> tuple[Ints, Ints]:
    """Cut `count` items into runs whose costs add up to `limit` at most, as few as possible; a new
    run begins at each of `starts`, the first of which is 0.

    `costs(first, end)` has the costs of a range of items; none is above `limit`. Returns of each
    run its first item and its cost.
    """
    firsts, sums = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    done = 0
    while done < count:
        end = min(done + _BATCH, count)
        total = np.zeros(end - done + 1, np.int64)
        np.cumsum(costs(done, end), out=total[1:])
        inside = starts[slice(*np.searchsorted(starts, [done + 1, end]))]
        at = np.concatenate([[done], inside]) - done
        stop = np.concatenate([inside, [end]]) - done
        found = []
        while len(at):  # the first run of each range of items, then the second, ...
            found.append(at)
            after = np.searchsorted(total, total[at] + limit, "right") - 1
            more = after < stop
            at, stop = after[more], stop[more]
        first = np.sort(np.concatenate(found))
        cost = np.diff(total[first], append=total[-1])
        if end < count:  # the last run may go on in the next batch
            end = done + int(first[-1])
            first, cost = first[:-1], cost[:-1]
        firsts.append(first + done)
        sums.append(cost)
        done = end
    return np.concatenate(firsts), np.concatenate(sums)


def _ragged(starts: Ints, lengths: Ints) -> Ints:
    """The positions in ranges that begin at `starts`, one range after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


class _Items:
    """What the folders list. An **item** is one name in one folder; items have numbers, in the
    order of folders and, in a folder, of names (as bytes).

    Each folder lists its entries, `.` and `..`; the root folder lists `.diesel`, too, which has the
    number of entries for its index. Entries stand in this order already, so that an item's entry is
    its number less the number of the other, **special** items before it.
    """

    _SPECIAL_NAMES = np.frombuffer(b".." + CONTROL_FOLDER, np.uint8)
    _SPECIAL_NAME_AT = np.array([0, 0, 2])
    _SPECIAL_NAME_BYTES = np.array([1, 2, len(CONTROL_FOLDER)])

    def __init__(self, snapshot: Snapshot, folders: Ints) -> None:
        """`folders` has the indices of all folders, ascending; the last is `.diesel`."""
        self._columns = columns = snapshot.columns
        control = len(snapshot)
        counts = np.append(columns.offset[folders[:-1]].astype(np.int64), 0) + 2
        counts[ROOT_INDEX] += 1
        ends = np.cumsum(counts)
        self.first: Ints = ends - counts
        """By position in `folders`: its first item."""
        self.count = int(ends[-1])
        before_dot, before_dots = _smaller_than_dots(columns, folders)
        self.control = 2 + _beside_control(snapshot)[1]
        """The item `.diesel` of the root folder."""
        dot, dots = self.first + before_dot, self.first + before_dots + 1
        above = np.append(columns.parent[folders[:-1]].astype(np.int64), ROOT_INDEX)
        number = np.concatenate([dot, dots, [self.control]])
        order = np.argsort(number)
        self._special: Ints = number[order]
        self._special_entry = np.concatenate([folders, above, [control]])[order]
        self._special_name = np.repeat([0, 1, 2], [len(folders), len(folders), 1])[order]

    def of(self, items: Ints) -> "_Listed":
        """What to list for items, in their order."""
        before = np.searchsorted(self._special, items)
        entry = items - before + 1
        special = np.flatnonzero(self._special[np.minimum(before, len(self._special) - 1)] == items)
        special_name = self._special_name[before[special]]
        entry[special] = 0
        start = self._columns.name_start[entry].astype(np.int64)
        length = self._columns.name_start[entry + 1].astype(np.int64) - start
        entry[special] = self._special_entry[before[special]]
        length[special] = self._SPECIAL_NAME_BYTES[special_name]
        return _Listed(entry, start, length, special, self._SPECIAL_NAME_AT[special_name])

    def costs(self, first: int, end: int) -> Ints:
        """The bytes that a range of items takes in a listing. `.diesel` counts with the item before
        it, which is thereby always in the same block."""
        costs = self.of(np.arange(first, end)).length + _ITEM_BYTES
        at = self.control - first
        if 0 < at < len(costs):
            costs[at - 1] += costs[at]
            costs[at] = 0
        return costs

    def copy_names(self, listed: "_Listed", at: Ints, out: layout.Bytes) -> None:
        """Copy the names of items to the positions `at` in `out`."""
        plain = np.ones(len(at), np.bool_)
        plain[listed.special] = False
        columns, length = self._columns, listed.length
        out[_ragged(at[plain], length[plain])] = columns.names[
            _ragged(listed.name_start[plain], length[plain])
        ]
        lengths = length[listed.special]
        out[_ragged(at[listed.special], lengths)] = self._SPECIAL_NAMES[
            _ragged(listed.special_name_at, lengths)
        ]


class _Listed(NamedTuple):
    """Items as columns. The names of special ones lie elsewhere."""

    entry: Ints
    name_start: Ints
    length: Ints
    special: Ints
    """Which of the items are special."""
    special_name_at: Ints


def _smaller_than_dots(columns: layout.Columns, folders: Ints) -> tuple[Ints, Ints]:
    """By position in `folders`: how many entries come before `.`, and how many before `..`."""
    before_dot, before_dots = np.zeros(len(folders), np.int64), np.zeros(len(folders), np.int64)
    dot = ord(".")
    for start in range(1, len(columns.parent), _BATCH):
        name_at = columns.name_start[start : min(start + _BATCH, len(columns.parent))]
        first, second = columns.names[name_at], columns.names[name_at + np.uint64(1)]
        # A name that begins with a dot has two bytes at least.
        for counts, smaller in (
            (before_dot, first < dot),
            (before_dots, (first < dot) | ((first == dot) & (second < dot))),
        ):
            parent = columns.parent[start + np.flatnonzero(smaller)]
            np.add.at(counts, np.searchsorted(folders, parent), 1)
    return before_dot, before_dots


class _Tree:
    """The file system of an image: where its inodes and blocks lie, and what is in them."""

    def __init__(self, snapshot: Snapshot, shown: Shown, contents: _Contents) -> None:
        self.snapshot, self.shown, self.contents = snapshot, shown, contents
        control = len(snapshot)
        self._kind = np.append(layout.kinds(snapshot.columns.flags), Kind.FOLDER).astype(np.uint8)
        """By index of an entry; `.diesel` counts as the last one, here and in the others."""
        self._folders = np.flatnonzero(self._kind == Kind.FOLDER)
        self._links = np.flatnonzero(self._kind == Kind.LINK)
        self._items = items = _Items(snapshot, self._folders)
        self._run_first, self._run_bytes = _packed(
            items.costs, items.count, items.first, BLOCK_BYTES
        )
        self._run_end = np.append(self._run_first[1:], items.count)
        self._run_folder = np.searchsorted(items.first, self._run_first, "right") - 1
        """Runs are items in one block or, of a folder's last run, perhaps behind its inode. This
        has the folder's position in `_folders`."""
        is_last = np.append(np.diff(self._run_folder) > 0, True)
        self.root_blocks = int(np.searchsorted(self._run_folder, 1))
        self._is_inline = is_last & (self._run_bytes <= _INLINE_BYTES_MAX)
        self._is_inline[: self.root_blocks] = False  # they have a device of their own
        runs = np.bincount(self._run_folder, minlength=len(self._folders))
        last_bytes = self._run_bytes[is_last]
        self._folder_bytes = (runs - 1) * BLOCK_BYTES + last_bytes
        self._has_tail = self._is_inline[is_last]
        self._link_bytes = snapshot.columns.size[self._links].astype(np.int64)
        self._number_inodes(control, np.where(self._has_tail, last_bytes, 0))
        self._place_blocks()

    def _number_inodes(self, control: int, tails: Ints) -> None:
        """Give each inode its number. Folders and links come first, each with what lies behind it
        in its block; then all files."""
        is_short = self._link_bytes <= _INLINE_BYTES_MAX
        behind = np.concatenate([tails, np.where(is_short, self._link_bytes, 0)])
        slots = _INODE_SLOTS - (-behind // _SLOT_BYTES)
        slots[0] += _ROOT_NUMBER  # unused, before the root
        first, _ = _packed(
            lambda start, end: slots[start:end], len(slots), np.zeros(1, np.int64), _SLOTS
        )
        self._mixed_blocks = len(first)
        in_block = np.diff(first, append=len(slots))
        before = np.cumsum(slots) - slots
        number = np.repeat(np.arange(len(first)) * _SLOTS - before[first], in_block) + before
        number[0] = _ROOT_NUMBER
        is_file = self._kind == Kind.FILE
        self._number = np.zeros(control + 1, np.uint32)
        self._number[self._folders] = number[: len(self._folders)]
        self._number[self._links] = number[len(self._folders) :]
        files = int(np.count_nonzero(is_file))
        self._number[is_file] = self._mixed_blocks * _SLOTS + _INODE_SLOTS * np.arange(files)
        self._file_blocks = -(-files * _INODE_BYTES // BLOCK_BYTES)

    def _place_blocks(self) -> None:
        """Give addresses to the blocks behind the inodes: those of folders, then those of links.
        The blocks of the root folder follow them, on another device; then the content file."""
        at = _INODES_AT + self._mixed_blocks + self._file_blocks
        in_block = ~self._is_inline
        in_block[: self.root_blocks] = False
        self._block_runs = np.flatnonzero(in_block)
        self._long_links = np.flatnonzero(self._link_bytes > _INLINE_BYTES_MAX)
        self.blocks = at + len(self._block_runs) + len(self._long_links)
        self.content_at = self.blocks + self.root_blocks
        if self.content_at + self.contents.used > _BLOCKS_MAX:
            raise ImageTooLarge
        run_block = np.zeros(len(in_block), np.int64)
        run_block[self._block_runs] = at + np.arange(len(self._block_runs))
        run_block[: self.root_blocks] = self.blocks + np.arange(self.root_blocks)
        self._folder_block = run_block[np.searchsorted(self._run_first, self._items.first)]
        self._link_block = np.zeros(len(self._links), np.int64)
        self._link_block[self._long_links] = (
            at + len(self._block_runs) + np.arange(len(self._long_links))
        )

    def pieces(self) -> Iterator[Bytes]:
        """The bytes of the file system."""
        yield self._head()
        yield from self._mixed_inodes()
        yield from self._file_inodes()
        yield from self._blocks_of_runs(self._block_runs)
        for entry in self._links[self._long_links].tolist():
            yield self.snapshot.link(entry).ljust(BLOCK_BYTES, b"\0")

    def root(self) -> Iterator[Bytes]:
        """The blocks of the root folder."""
        return self._blocks_of_runs(np.arange(self.root_blocks))

    def hidden_block(self) -> tuple[int, Bytes]:
        """The number of the block of the root folder that lists `.diesel`, and this block without
        it. Other names are in it, since the first one of a block is never `.diesel`."""
        run = int(np.searchsorted(self._run_first, self._items.control, "right")) - 1
        items = np.arange(self._run_first[run], self._run_end[run])
        out = np.zeros(BLOCK_BYTES, np.uint8)
        shown = items[items != self._items.control]
        self._list(shown, np.array([len(shown)]), np.zeros(1, np.int64), out)
        return run, out.data

    def _head(self) -> Bytes:
        """The first block: superblock and device table."""
        snapshot = self.snapshot
        head = bytearray(BLOCK_BYTES)
        # File handles (NFS) name the file system by this, so it is another one for each version.
        uuid = xxh3_128_digest(snapshot.identity.bytes + snapshot.version.to_bytes(8, "little"))
        _SUPERBLOCK.pack_into(
            *(head, _SUPERBLOCK_AT, _MAGIC, 0, _COMPAT_MTIME, BLOCK_BYTES.bit_length() - 1, 0),
            *(_ROOT_NUMBER, len(snapshot) + 1, 0, 0, self.blocks, _INODES_AT, 0, uuid),
            *(b"diesel-fs", _INCOMPAT_DEVICE_TABLE, 0, 2, _DEVICE_TABLE_AT // _DEVICE_SLOT_BYTES),
            *(0, 0, 0, 0),
        )
        devices = (
            (b"content", self.contents.used, self.content_at),
            (b"root folder", self.root_blocks, self.blocks),
        )
        for number, device in enumerate(devices):
            _DEVICE.pack_into(head, _DEVICE_TABLE_AT + number * _DEVICE_SLOT_BYTES, *device)
        return head

    def _inodes(
        self, entries: Ints, layouts: Ints, size: Ints, block: Ints
    ) -> npt.NDArray[np.void]:
        """The inodes of entries, whose content lies as `layouts` says."""
        columns, shown = self.snapshot.columns, self.shown
        is_control = entries == len(self.snapshot)
        source = np.where(is_control, ROOT_INDEX, entries)  # `.diesel` is as old as the root folder
        kind = self._kind[entries]
        rows = np.zeros(len(entries), _INODE)
        mode = columns.flags[source] & np.uint32(MODE_MASK & ~shown.umask)
        rows["format"] = _EXTENDED | layouts
        rows["mode"] = mode | _MODES[kind]
        rows["mode"][kind == Kind.LINK] = _LINK_MODE
        rows["mode"][is_control] = _CONTROL_MODE
        rows["size"], rows["block"], rows["number"] = size, block, self._number[entries]
        rows["uid"], rows["gid"], rows["links"] = shown.uid, shown.gid, 1
        if shown.private_to >= 0:
            is_root = entries == ROOT_INDEX
            rows["uid"][is_root] = shown.private_to
            rows["mode"][is_root] &= 0o177700
        rows["mtime_s"], rows["mtime_ns"] = np.divmod(columns.mtime_ns[source], 1_000_000_000)
        return rows

    def _mixed_inodes(self) -> Iterator[Bytes]:
        """The blocks with the inodes of folders and links, and what lies behind them."""
        number = self._number[self._folders], self._number[self._links]
        tails = np.flatnonzero(self._is_inline)
        tail_at = number[0][self._run_folder[tails]].astype(np.int64) * _SLOT_BYTES + _INODE_BYTES
        for first in range(0, self._mixed_blocks, _BATCH_BLOCKS):
            end = min(first + _BATCH_BLOCKS, self._mixed_blocks)
            out = np.zeros((end - first) * BLOCK_BYTES, np.uint8)
            base = first * BLOCK_BYTES
            folders, links = (
                slice(*np.searchsorted(each, [first * _SLOTS, end * _SLOTS])) for each in number
            )
            self._put_inodes(
                self._inodes(
                    self._folders[folders],
                    np.where(self._has_tail[folders], _INLINE, _PLAIN),
                    self._folder_bytes[folders],
                    self._folder_block[folders],
                ),
                base,
                out,
            )
            runs = slice(*np.searchsorted(tail_at, [base, base + len(out)]))
            self._list_runs(tails[runs], tail_at[runs] - base, out)
            self._put_links(links, base, out)
            yield out.data

    def _put_links(self, links: Span, base: int, out: layout.Bytes) -> None:
        """Write the inodes of links, and the targets of short ones."""
        columns, size = self.snapshot.columns, self._link_bytes[links]
        is_short = size <= _INLINE_BYTES_MAX
        entries = self._links[links]
        layouts = np.where(is_short, _INLINE, _PLAIN)
        rows = self._inodes(entries, layouts, size, self._link_block[links])
        self._put_inodes(rows, base, out)
        at = self._number[entries].astype(np.int64) * _SLOT_BYTES + _INODE_BYTES - base
        target = columns.target_start[columns.chunk[entries]].astype(np.int64)
        out[_ragged(at[is_short], size[is_short])] = columns.targets[
            _ragged(target[is_short], size[is_short])
        ]

    @staticmethod
    def _put_inodes(rows: npt.NDArray[np.void], base: int, out: layout.Bytes) -> None:
        """Write inodes to their places in `out`, which begins at byte `base` of all inodes."""
        at = rows["number"].astype(np.int64) * _SLOT_BYTES - base
        words = out.view(np.uint64)
        words[(at >> 3)[:, None] + np.arange(8)] = rows.view(np.uint64).reshape(-1, 8)

    def _file_inodes(self) -> Iterator[Bytes]:
        """The blocks with the inodes of files."""
        written, contents = 0, self.contents.columns
        for first in range(0, len(self.snapshot), _BATCH):
            some = slice(first, min(first + _BATCH, len(self.snapshot)))
            files = first + np.flatnonzero(self._kind[some] == Kind.FILE)
            block = contents.first_block[files].astype(np.int64)
            block[block > 0] += self.content_at
            layouts = np.full(len(files), _PLAIN)
            size = self.snapshot.columns.size[files].astype(np.int64)
            rows = self._inodes(files, layouts, size, block)
            written += len(rows)
            yield rows.view(np.uint8).data
        yield bytes(self._file_blocks * BLOCK_BYTES - written * _INODE_BYTES)

    def _blocks_of_runs(self, runs: Ints) -> Iterator[Bytes]:
        """A block for each of these runs."""
        for start in range(0, len(runs), _BATCH_BLOCKS):
            some = runs[start : start + _BATCH_BLOCKS]
            out = np.zeros(len(some) * BLOCK_BYTES, np.uint8)
            self._list_runs(some, np.arange(len(some)) * BLOCK_BYTES, out)
            yield out.data

    def _list_runs(self, runs: Ints, at: Ints, out: layout.Bytes) -> None:
        """Write the items of runs, each from byte `at` of `out` on."""
        count = self._run_end[runs] - self._run_first[runs]
        self._list(_ragged(self._run_first[runs], count), count, at, out)

    def _list(self, items: Ints, count: Ints, at: Ints, out: layout.Bytes) -> None:
        """Write items, of which `count` each belong to one run that is written from byte `at` of
        `out` on: first a record for each, then the names."""
        listed = self._items.of(items)
        run = np.repeat(np.arange(len(count)), count)
        first = np.cumsum(count) - count
        names_before = np.cumsum(listed.length) - listed.length
        name_at = _ITEM_BYTES * count[run] + names_before - names_before[first][run]
        rows = np.zeros(len(items), _ITEM)
        rows["number"] = self._number[listed.entry]
        rows["name_at"] = name_at
        rows["type"] = _ITEM_TYPES[self._kind[listed.entry]]
        words = out.view(np.uint32)
        record_at = at[run] + _ITEM_BYTES * (np.arange(len(items)) - first[run])
        words[(record_at >> 2)[:, None] + np.arange(3)] = rows.view(np.uint32).reshape(-1, 3)
        self._items.copy_names(listed, at[run] + name_at, out)


# The file


class _Trailer(NamedTuple):
    """The fields of the trailer."""

    identity: UUID
    version: int
    chain: UUID
    sequence: int
    end_block: int
    entries: int
    contents: int
    chunks: int
    hidden_block: int
    shown: Shown


def _pieces(tree: _Tree, contents: _Contents, earlier: Image | UUID) -> Iterator[Bytes]:
    """The bytes of an image."""
    hidden_number, hidden = tree.hidden_block()
    sections: list[Iterable[Bytes]] = [tree.pieces(), tree.root(), [hidden]]
    sections += [[np.ascontiguousarray(column).view(np.uint8).data] for column in contents.columns]
    at, table = 0, b""
    for pieces in sections:
        start, digest = at, xxh3_64()
        for piece in pieces:
            digest.update(piece)
            at += len(piece)
            yield piece
        table += _SECTION.pack(start, at - start, digest.intdigest())
        padding = bytes(-at % _ALIGNMENT)
        at += len(padding)
        yield padding
    snapshot, shown, columns = tree.snapshot, tree.shown, contents.columns
    chain, sequence = (
        (earlier.chain, earlier.sequence + 1) if isinstance(earlier, Image) else (earlier, 1)
    )
    fixed = _TRAILER.pack(
        *(_TRAILER_MAGIC, _FORMAT_VERSION, _TRAILER_BYTES, 0, snapshot.identity.bytes),
        *(snapshot.version, chain.bytes, sequence, contents.end),
        *(len(snapshot), len(columns.order), len(columns.chunk_id), hidden_number),
        *(shown.uid, shown.gid, shown.umask, shown.private_to),
    )
    trailer = (fixed + table).ljust(_TRAILER_BYTES - _CHECKSUM.size, b"\0")
    yield trailer + _CHECKSUM.pack(xxh3_64_intdigest(trailer))


def _corrupt(what: str, offset: int = -1) -> NoReturn:
    raise CorruptError(f"damaged image: {what}", offset=offset)


def _parse_trailer(view: memoryview) -> tuple[_Trailer, list[tuple[int, int, int]]]:
    """The trailer; and of each section its start, its end, and its checksum."""
    magic_at = _SUPERBLOCK_AT
    if len(view) < BLOCK_BYTES + _TRAILER_BYTES:
        raise TruncatedError(f"truncated image: {len(view)} bytes", offset=len(view))
    if view[magic_at : magic_at + 4] != _MAGIC.to_bytes(4, "little"):
        raise ForeignError("not an image (another magic number)", offset=magic_at)
    start = len(view) - _TRAILER_BYTES
    trailer = view[start:]
    magic, format_version, length, flags, *fields = _TRAILER.unpack_from(trailer)
    if magic != _TRAILER_MAGIC:
        raise TruncatedError("truncated image: it has no trailer", offset=start)
    if format_version > _FORMAT_VERSION:
        raise NewerVersionError(f"an image with format version {format_version}")
    checksum_at = _TRAILER_BYTES - _CHECKSUM.size
    if _CHECKSUM.unpack_from(trailer, checksum_at)[0] != xxh3_64_intdigest(trailer[:checksum_at]):
        _corrupt("its trailer does not match its checksum", start)
    if flags:
        raise NewerVersionError(f"an image with feature flags {flags:#x}")
    identity, version, chain, sequence, end, *counts, hidden, uid, gid, umask, private = fields
    entries, contents, chunks = counts
    found = _Trailer(
        identity=UUID(bytes=identity),
        version=version,
        chain=UUID(bytes=chain),
        sequence=sequence,
        end_block=end,
        entries=entries,
        contents=contents,
        chunks=chunks,
        hidden_block=hidden,
        shown=Shown(uid, gid, umask, private),
    )
    sections = [
        _SECTION.unpack_from(trailer, _TRAILER.size + number * _SECTION.size)
        for number in range(len(_PARTS))
    ]
    _check_sections(found, sections, start)
    spare = trailer[_TRAILER.size + len(_PARTS) * _SECTION.size : checksum_at]
    if (format_version, length) != (_FORMAT_VERSION, _TRAILER_BYTES) or any(spare):
        _corrupt("its trailer contradicts itself", start)
    return found, [(at, at + length, checksum) for at, length, checksum in sections]


def _check_sections(found: _Trailer, sections: list[tuple[int, int, int]], trailer_at: int) -> None:
    """Raise CorruptError unless sections follow one another up to the trailer, and have the lengths
    that the trailer's counts demand."""
    at = 0
    for start, length, _ in sections:
        if start != at:
            _corrupt("a section is out of place", at)
        at = -(-(start + length) // _ALIGNMENT) * _ALIGNMENT
    (tree, root, hidden), rest = (length for _, length, _ in sections[:3]), sections[3:]
    n, m, k = found.entries, found.contents, found.chunks
    counts = (n, m, m, m, m, m, k)
    wanted = [count * dtype.itemsize for count, dtype in zip(counts, _DTYPES, strict=True)]
    if (
        at != trailer_at
        or [length for _, length, _ in rest] != wanted
        or tree % BLOCK_BYTES
        or root % BLOCK_BYTES
        or hidden != BLOCK_BYTES
        or not found.hidden_block * BLOCK_BYTES < root
    ):
        _corrupt("its sections do not have the lengths that its trailer says", trailer_at)


def _columns_of(view: memoryview, sections: list[tuple[int, int, int]]) -> _Columns:
    """The columns, as views of the image."""
    arrays = []
    for (at, end, _), dtype in zip(sections[3:], _DTYPES, strict=True):
        arrays.append(np.ndarray(((end - at) // dtype.itemsize,), dtype, view, at))
    return _Columns(*arrays)
