"""The tree of an image: an EROFS file system without contents (FORMAT.md, section 9). Any thread.

Files' inodes name blocks of the content file (`addresses.py`). All work is done by columns, in
batches.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from ...errors import FormatError
from ..entries import MODE_MASK, Bytes, Kind
from ..snapshot import layout
from ..snapshot.reader import ROOT_INDEX, Snapshot, Span
from .addresses import BLOCK_BYTES, BLOCKS_MAX, Addresses, ImageTooLarge, Ints

CONTROL_FOLDER = b".diesel"
"""An empty folder in the root, for a mount's control files."""

SUPERBLOCK_AT = 1024
MAGIC = 0xE0F5E1E2
_COMPAT_MTIME = 2
_INCOMPAT_FEATURES = 4 | 8  # inline content; devices
# magic, checksum (unused), compatible features, bits of a block's length, extra slots, number of
# the root; inodes, seconds and nanoseconds of building (unused), blocks; block of the inodes, of
# attributes (unused); UUID, name, incompatible features, compression (unused), devices, place of
# their table; the rest is unused
_SUPERBLOCK = struct.Struct("<I4xIBBHQ8x4xII4x16s16sI2xHH38x")
_DEVICE_SLOT_BYTES = 128
_DEVICE_TABLE_AT = 9 * _DEVICE_SLOT_BYTES  # behind the superblock
_DEVICE = struct.Struct("<64sII56x")  # name, blocks, the address of the first
_INODES_AT = 1
_SLOT_BYTES = 32  # units of an inode's place, which is its number
_SLOTS = BLOCK_BYTES // _SLOT_BYTES
_INODE_BYTES = 64
_INODE_SLOTS = _INODE_BYTES // _SLOT_BYTES
_ROOT_NUMBER = 2  # not 0, which means a deleted entry
_INLINE_BYTES_MAX = BLOCK_BYTES - _INODE_BYTES
_EXTENDED = 1  # the inode has 64 bytes
# The place of content: in blocks; in blocks, but its end behind the inode; in blocks of a device
# that is named behind the inode
_PLAIN, _INLINE, _INDEXED = 0 << 1, 2 << 1, 4 << 1
_LARGE_SLOTS = 3  # an inode, and behind it the content's place
_LARGE_IN_BLOCK = _SLOTS // _LARGE_SLOTS
_PLACES_ARE_LONG, _PLACE_BITS_MAX = 0x20, 31
_PLACE = np.dtype([("block_high", "<u2"), ("device", "<u2"), ("block", "<u4")])
_PLACE_BYTES_MAX = BLOCK_BYTES << _PLACE_BITS_MAX
_CONTENT_DEVICE = 1
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
_TARGET_BYTES_MAX = 4095  # PATH_MAX: the kernel would cut off a longer one

_BATCH_BLOCKS = 2048
_BATCH = 1 << 18  # entries, or items of folders


@dataclass(frozen=True, slots=True)
class Shown:
    """Attributes that no snapshot holds: owner, permission bits, and access."""

    uid: int
    gid: int
    umask: int = 0
    """The permission bits that files and folders lose."""
    private_to: int = -1
    """If not negative, the root folder's owner, who alone may enter it."""


def check(snapshot: Snapshot) -> None:
    """Raise CorruptError for columns that contradict each other, and FormatError for entries that a
    tree cannot show. Anybody may have written the snapshot, a private copy was not checked since,
    and the kernel trusts a file system."""
    columns = snapshot.columns
    layout.check(snapshot.header, columns)
    is_link = layout.kinds(columns.flags) == Kind.LINK
    if int(columns.size[is_link].max(initial=0)) > _TARGET_BYTES_MAX:
        raise FormatError(f"a link's target has more than {_TARGET_BYTES_MAX} bytes")
    in_root, at = _beside_control(snapshot)
    if at < len(in_root) and snapshot.name(in_root[at]) == CONTROL_FOLDER:
        raise FormatError("the dataset holds `.diesel`, which belongs to the mount")


def _beside_control(snapshot: Snapshot) -> tuple[range, int]:
    """The root folder's entries, and how many come before `.diesel`. Compares names, since a
    snapshot's lookup index may be wrong."""
    in_root = snapshot.children(ROOT_INDEX)
    return in_root, bisect_left(in_root, CONTROL_FOLDER, key=snapshot.name)


def _packed(
    costs: Callable[[int, int], Ints], count: int, starts: Ints, limit: int
) -> tuple[Ints, Ints]:
    """Cut items into as few runs as possible, each of at most `limit` in cost; a new run begins at
    each of `starts`, the first of which is 0. `costs(first, end)` gives the costs of items; none is
    above `limit`. Returns the first item and the cost of each run."""
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
        while len(at):  # the first run of each range, then the second, ...
            found.append(at)
            after = np.searchsorted(total, total[at] + limit, "right") - 1
            more = after < stop
            at, stop = after[more], stop[more]
        first = np.sort(np.concatenate(found))
        cost = np.diff(total[first], append=total[-1])
        if end < count:  # the last run may go on
            end = done + int(first[-1])
            first, cost = first[:-1], cost[:-1]
        firsts.append(first + done)
        sums.append(cost)
        done = end
    return np.concatenate(firsts), np.concatenate(sums)


def _ragged(starts: Ints, lengths: Ints) -> Ints:
    """The numbers in all ranges (start, length), one range after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


class _Items:
    """An **item** is one name in one folder; items are numbered by folder and, within it, by name
    (as bytes). Each folder lists its entries, `.` and `..`; the root also lists `.diesel`, with the
    number of entries as its index. Entries already stand in this order, so an item's entry is the
    item's number minus the number of **special** items (`.`, `..` and `.diesel`) before it."""

    _SPECIAL_NAMES = np.frombuffer(b".." + CONTROL_FOLDER, np.uint8)
    _SPECIAL_NAME_AT = np.array([0, 0, 2])
    _SPECIAL_NAME_BYTES = np.array([1, 2, len(CONTROL_FOLDER)])

    def __init__(self, snapshot: Snapshot, folders: Ints) -> None:
        """`folders` are indices, ascending; the last is `.diesel`."""
        self._columns = columns = snapshot.columns
        control = len(snapshot)
        counts = np.append(columns.offset[folders[:-1]].astype(np.int64), 0) + 2
        counts[ROOT_INDEX] += 1
        ends = np.cumsum(counts)
        self.first: Ints = ends - counts
        self.count = int(ends[-1])
        before_dot, before_dots = _smaller_than_dots(columns, folders)
        self.control = 2 + _beside_control(snapshot)[1]
        dot, dots = self.first + before_dot, self.first + before_dots + 1
        above = np.append(columns.parent[folders[:-1]].astype(np.int64), ROOT_INDEX)
        number = np.concatenate([dot, dots, [self.control]])
        order = np.argsort(number)
        self._special: Ints = number[order]
        self._special_entry = np.concatenate([folders, above, [control]])[order]
        self._special_name = np.repeat([0, 1, 2], [len(folders), len(folders), 1])[order]

    def of(self, items: Ints) -> "_Listed":
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
        """The bytes that items take in a listing. `.diesel` counts with the item before it, so both
        are always in one block."""
        costs = self.of(np.arange(first, end)).length + _ITEM_BYTES
        at = self.control - first
        if 0 < at < len(costs):
            costs[at - 1] += costs[at]
            costs[at] = 0
        return costs

    def copy_names(self, listed: "_Listed", at: Ints, out: layout.Bytes) -> None:
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
    """Items with their entries, and the places of their names in the snapshot's column. The names
    of the items at the positions `special` lie in `_SPECIAL_NAMES` instead."""

    entry: Ints
    name_start: Ints
    length: Ints
    special: Ints
    special_name_at: Ints


def _smaller_than_dots(columns: layout.SnapshotColumns, folders: Ints) -> tuple[Ints, Ints]:
    before_dot, before_dots = np.zeros(len(folders), np.int64), np.zeros(len(folders), np.int64)
    dot = ord(".")
    for start in range(1, len(columns.parent), _BATCH):
        name_at = columns.name_start[start : min(start + _BATCH, len(columns.parent))]
        first, second = columns.names[name_at], columns.names[name_at + np.uint64(1)]
        # A name that begins with a dot has at least two bytes
        for counts, smaller in (
            (before_dot, first < dot),
            (before_dots, (first < dot) | ((first == dot) & (second < dot))),
        ):
            parent = columns.parent[start + np.flatnonzero(smaller)]
            np.add.at(counts, np.searchsorted(folders, parent), 1)
    return before_dot, before_dots


class ImageTree:
    """Places and bytes of an image's inodes and blocks. Raises ImageTooLarge."""

    def __init__(self, snapshot: Snapshot, shown: Shown, addresses: Addresses) -> None:
        self.snapshot, self.shown, self.addresses = snapshot, shown, addresses
        control = len(snapshot)
        self._kind = np.append(layout.kinds(snapshot.columns.flags), Kind.FOLDER).astype(np.uint8)
        """The kinds of entries; `.diesel` is the last, here and in the other columns."""
        self._folders = np.flatnonzero(self._kind == Kind.FOLDER)
        self._links = np.flatnonzero(self._kind == Kind.LINK)
        self._items = items = _Items(snapshot, self._folders)
        self._run_first, self._run_bytes = _packed(
            items.costs, items.count, items.first, BLOCK_BYTES
        )
        """A run is the items in one block of a folder. The last one may stand behind the folder's
        inode."""
        self._run_end = np.append(self._run_first[1:], items.count)
        self._run_folder = np.searchsorted(items.first, self._run_first, "right") - 1
        """Positions in `_folders`."""
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
        """Number the inodes in the order of FORMAT.md. `tails`: the bytes behind each folder's
        inode."""
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
        self._number = np.zeros(control + 1, np.uint32)
        self._number[self._folders] = number[: len(self._folders)]
        self._number[self._links] = number[len(self._folders) :]
        is_file = self._kind[:control] == Kind.FILE
        is_large = is_file & (self.snapshot.columns.size > BLOCK_BYTES)
        is_small = is_file & ~is_large
        small, large = int(np.count_nonzero(is_small)), int(np.count_nonzero(is_large))
        at = self._mixed_blocks * _SLOTS
        self._number[:control][is_small] = at + _INODE_SLOTS * np.arange(small)
        self._small_blocks = -(-small * _INODE_BYTES // BLOCK_BYTES)
        at += self._small_blocks * _SLOTS
        block, place = np.divmod(np.arange(large), _LARGE_IN_BLOCK)
        self._number[:control][is_large] = at + _SLOTS * block + _LARGE_SLOTS * place
        self._large_blocks = -(-large // _LARGE_IN_BLOCK)

    def _place_blocks(self) -> None:
        """The order is that of FORMAT.md, section 9."""
        at = _INODES_AT + self._mixed_blocks + self._small_blocks + self._large_blocks
        in_block = ~self._is_inline
        in_block[: self.root_blocks] = False
        self._block_runs = np.flatnonzero(in_block)
        self._long_links = np.flatnonzero(self._link_bytes > _INLINE_BYTES_MAX)
        self.blocks = at + len(self._block_runs) + len(self._long_links)
        self.content_at = self.blocks + self.root_blocks
        if self.content_at + self.addresses.used > BLOCKS_MAX:
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
        """The file system, without the root folder's device."""
        yield self._head()
        yield from self._mixed_inodes()
        yield from self._small_inodes()
        yield from self._large_inodes()
        yield from self._blocks_of_runs(self._block_runs)
        for entry in self._links[self._long_links].tolist():
            yield self.snapshot.link(entry).ljust(BLOCK_BYTES, b"\0")

    def root(self) -> Iterator[Bytes]:
        return self._blocks_of_runs(np.arange(self.root_blocks))

    def hidden_block(self) -> tuple[int, Bytes]:
        """The number of the root folder's block that lists `.diesel`, and this block without that
        name."""
        run = int(np.searchsorted(self._run_first, self._items.control, "right")) - 1
        items = np.arange(self._run_first[run], self._run_end[run])
        out = np.zeros(BLOCK_BYTES, np.uint8)
        shown = items[items != self._items.control]
        self._list(shown, np.array([len(shown)]), np.zeros(1, np.int64), out)
        return run, out.data

    def _head(self) -> Bytes:
        snapshot = self.snapshot
        head = bytearray(BLOCK_BYTES)
        # File handles (NFS) name the file system by this UUID, so each version has its own
        uuid = xxh3_128_digest(snapshot.identity.bytes + snapshot.version.to_bytes(8, "little"))
        _SUPERBLOCK.pack_into(
            *(head, SUPERBLOCK_AT, MAGIC, _COMPAT_MTIME, BLOCK_BYTES.bit_length() - 1, 0),
            *(_ROOT_NUMBER, len(snapshot) + 1, self.blocks, _INODES_AT, uuid, b"diesel-fs"),
            *(_INCOMPAT_FEATURES, 2, _DEVICE_TABLE_AT // _DEVICE_SLOT_BYTES),
        )
        devices = (
            (b"content", self.addresses.used, self.content_at),
            (b"root folder", self.root_blocks, self.blocks),
        )
        for number, device in enumerate(devices):
            _DEVICE.pack_into(head, _DEVICE_TABLE_AT + number * _DEVICE_SLOT_BYTES, *device)
        return head

    def _inodes(
        self, entries: Ints, layouts: Ints, size: Ints, block: Ints
    ) -> npt.NDArray[np.void]:
        """`layouts` says where each one's content lies (`_PLAIN`, ...)."""
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
        """Copy inodes to `out`, which begins at byte `base` of all inodes."""
        at = rows["number"].astype(np.int64) * _SLOT_BYTES - base
        words = out.view(np.uint64)
        words[(at >> 3)[:, None] + np.arange(8)] = rows.view(np.uint64).reshape(-1, 8)

    def _files(self, *, large: bool) -> Iterator[Ints]:
        """Batches of the files of more than one block (`large`), or of all others."""
        for first in range(0, len(self.snapshot), _BATCH):
            some = slice(first, min(first + _BATCH, len(self.snapshot)))
            is_large = self.snapshot.columns.size[some] > BLOCK_BYTES
            yield first + np.flatnonzero((self._kind[some] == Kind.FILE) & (is_large == large))

    def _small_inodes(self) -> Iterator[Bytes]:
        written = 0
        for files in self._files(large=False):
            block = self.addresses.first_block[files].astype(np.int64)
            block[block > 0] += self.content_at
            size = self.snapshot.columns.size[files].astype(np.int64)
            rows = self._inodes(files, np.full(len(files), _PLAIN), size, block)
            written += len(rows)
            yield rows.view(np.uint8).data
        yield bytes(self._small_blocks * BLOCK_BYTES - written * _INODE_BYTES)

    def _large_inodes(self) -> Iterator[Bytes]:
        before = np.zeros(0, np.int64)
        for files in self._files(large=True):
            files = np.concatenate([before, files])
            whole = len(files) // _LARGE_IN_BLOCK * _LARGE_IN_BLOCK
            yield self._large_blocks_of(files[:whole])
            before = files[whole:]
        yield self._large_blocks_of(before)

    def _large_blocks_of(self, files: Ints) -> Bytes:
        size = self.snapshot.columns.size[files].astype(np.int64)
        kind = np.full(len(files), _PLACES_ARE_LONG | _PLACE_BITS_MAX)
        inodes = self._inodes(files, np.full(len(files), _INDEXED), size, kind)
        places = np.zeros((len(files), 2), _PLACE)
        for number, used in enumerate((size > 0, size > _PLACE_BYTES_MAX)):
            places["device"][used, number] = _CONTENT_DEVICE
            places["block"][used, number] = self.addresses.first_block[files[used]]
            places["block"][used, number] += number * (_PLACE_BYTES_MAX // BLOCK_BYTES)
        blocks, width = -(-len(files) // _LARGE_IN_BLOCK), _LARGE_SLOTS * _SLOT_BYTES
        slots = np.zeros((blocks * _LARGE_IN_BLOCK, width), np.uint8)
        slots[: len(files), :_INODE_BYTES] = inodes.view(np.uint8).reshape(-1, _INODE_BYTES)
        slots[: len(files), _INODE_BYTES:][:, : 2 * _PLACE.itemsize] = places.view(np.uint8)
        out = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        out[:, : _LARGE_IN_BLOCK * width] = slots.reshape(blocks, _LARGE_IN_BLOCK * width)
        return out.reshape(-1).data

    def _blocks_of_runs(self, runs: Ints) -> Iterator[Bytes]:
        for start in range(0, len(runs), _BATCH_BLOCKS):
            some = runs[start : start + _BATCH_BLOCKS]
            out = np.zeros(len(some) * BLOCK_BYTES, np.uint8)
            self._list_runs(some, np.arange(len(some)) * BLOCK_BYTES, out)
            yield out.data

    def _list_runs(self, runs: Ints, at: Ints, out: layout.Bytes) -> None:
        """`at` has each run's first byte in `out`."""
        count = self._run_end[runs] - self._run_first[runs]
        self._list(_ragged(self._run_first[runs], count), count, at, out)

    def _list(self, items: Ints, count: Ints, at: Ints, out: layout.Bytes) -> None:
        """List `count` items for each run, from byte `at` of `out` on: first the items' records,
        then the names."""
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
