"""Reads a snapshot: looks up paths, lists folders, and finds the places of a file's bytes
(FORMAT.md, section 7). Any thread.

An entry's **index** is its position in directory order. A lookup searches the column `fingerprint`
for the upper half of the path's hash; the column `slot` has the index. The buffer (a mapped file)
stays in use until the snapshot, and every array that it returned, are gone.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from ...errors import CorruptError, NoSuchPath, NotAFolder
from ...names import cut, shown
from ..entries import ROOT, AnySlice, ChunkId, Kind, Rows, Stat, check_path
from . import layout as layout
from .rows_digest import digest_of_columns

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Indices = npt.NDArray[np.int64]
Span: TypeAlias = "slice[int, int, None]"

ROOT_INDEX = 0
ROOT_HASH = 0
"""hash(entry) = xxh3_64(name, seed=hash(folder)) for other entries."""

_EQUAL_TRIED_MAX = 16  # equal fingerprints that a lookup tries before it bisects the folder's names
_MEMO_FOLDERS_MAX = 65_536  # a memo is emptied at this size, about 15 MB
_MEMO_PATH_BYTES_MAX = 512  # folders with longer paths are not memoized
_BATCH = 8_192  # paths per step of `lookup_many`: its temporaries stay in the CPU's cache
_PATHS_BATCH = 4_096  # paths in memory at a time in `iter_paths`
_BLOCK_ENTRIES = 1 << 20  # entries per step of a scan of all
_FEW_SHARE = 1 << 12  # fewer names than this part of the entries are found one by one: no buckets
_BUCKET_BITS_MAX = 22  # 16 MB; `lookup_many` of more than 8 million entries gets slower instead
_BUCKET_STEPS_MAX = 16  # then the whole column is bisected
_KINDS = tuple(Kind)


class Extent(NamedTuple):
    """`chunk` is an index in `Snapshot.chunk_ids`; sizes and offsets are in bytes."""

    chunk: int
    offset: int  # from the start of the chunk object
    stored: int
    codec: int
    checksum: int
    start: int  # in the file
    size: int


PlainExtent = tuple[int, int, int, int]
"""A file's one uncompressed extent: chunk, offset, bytes, checksum, as in `Extent`."""

_EXTENT_BITS, _PLAIN_FILE = layout.EXTENT_BITS, layout.PLAIN_FILE
_HASHED_BYTES = 1 << 20


def same_content(extents: Iterable[Extent], read: Callable[[int, int], bytes]) -> bool:
    """Whether a file has the content of these extents, by their checksums. `read(size, start)`
    reads from the file."""
    for extent in extents:
        digest, position, end = xxh3_64(), extent.start, extent.start + extent.size
        while position < end:
            piece = read(min(end - position, _HASHED_BYTES), position)
            if not piece:
                return False
            digest.update(piece)
            position += len(piece)
        if digest.intdigest() != extent.checksum:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Stats:
    """The attributes of n entries as columns. A missing path has the kind TOMBSTONE and zeros."""

    kind: npt.NDArray[np.uint8]
    mode: npt.NDArray[np.uint16]
    size: npt.NDArray[np.uint64]
    mtime_ns: npt.NDArray[np.int64]

    @classmethod
    def missing(cls, count: int) -> "Stats":
        return cls(
            np.full(count, Kind.TOMBSTONE, np.uint8),
            np.zeros(count, np.uint16),
            np.zeros(count, np.uint64),
            np.zeros(count, np.int64),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, i: int) -> Stat:
        return Stat(
            _KINDS[self.kind[i]], int(self.mode[i]), int(self.size[i]), int(self.mtime_ns[i])
        )

    def __iter__(self) -> Iterator[Stat]:
        kinds = map(_KINDS.__getitem__, self.kind.tolist())
        return map(Stat, kinds, self.mode.tolist(), self.size.tolist(), self.mtime_ns.tolist())


class ChunkIds(Sequence[ChunkId]):
    """Chunk IDs by number; they ascend."""

    __slots__ = ("_ids",)

    def __init__(self, ids: layout.Bytes) -> None:
        self._ids = ids.data

    def __len__(self) -> int:
        return len(self._ids) // 16

    @overload
    def __getitem__(self, number: int) -> ChunkId: ...
    @overload
    def __getitem__(self, number: AnySlice) -> list[ChunkId]: ...
    def __getitem__(self, number: "int | AnySlice") -> ChunkId | list[ChunkId]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        at = number % len(self) * 16
        return ChunkId(self._ids[at : at + 16].tobytes())


class MergedFrom(NamedTuple):
    """The version from which a snapshot was merged, and the rows that were merged in."""

    version: int
    rows: Rows


class Snapshot:
    """All metadata of one dataset at one version."""

    merged_from: MergedFrom | None = None
    """Known only if this process merged it, from few rows."""

    def __init__(self, buffer: "ReadableBuffer", *, verify: bool = True) -> None:
        """`buffer` has the whole file. Raises a leaf of FormatError. `verify=False` is for a
        private copy, verified when it was written: then only checksums are compared, at 30 GB/s."""
        header, columns = layout.parse(buffer, verify=verify)
        self.buffer = memoryview(buffer)
        self.columns = columns
        self.header = header
        self.identity = header.identity
        self.dataset = header.dataset
        self.version = header.version
        self.digest = header.digest
        self.entry_count = header.entries
        self.file_count = header.files
        self.byte_count = header.file_bytes
        self.chunk_count = header.chunks
        self.chunk_ids = ChunkIds(columns.chunk_id)
        self.chunk_sizes = columns.chunk_bytes
        # Memory views return single items several times as fast as numpy arrays
        self._parent = columns.parent.data
        self._name_start = columns.name_start.data
        self._names = columns.names.data
        self._flags = columns.flags.data
        self._size = columns.size.data
        self._mtime_ns = columns.mtime_ns.data
        self._chunk = columns.chunk.data
        self._offset = columns.offset.data
        self._stored = columns.stored.data
        self._checksum = columns.checksum.data
        self._fingerprint = columns.fingerprint.data
        self._slot = columns.slot.data
        self._target_start = columns.target_start.data
        self._words = layout.words(columns.names)
        self._folder_of_path: dict[bytes, tuple[int, int]] = {ROOT: (ROOT_INDEX, ROOT_HASH)}
        self._hash_of_folder: dict[int, int] = {ROOT_INDEX: ROOT_HASH}

    def __len__(self) -> int:
        return self.entry_count

    @cached_property
    def rows_digest(self) -> layout.RowsDigest:
        """Computed from the columns if the header has none."""
        return self.header.rows_digest or digest_of_columns(self.columns)

    # One entry

    def lookup(self, path: bytes) -> int:
        """The entry's index, or -1."""
        cut = path.rfind(b"/") + 1
        folder, name = path[:cut], path[cut:]
        if not name:
            return ROOT_INDEX if path == ROOT else -1
        found = self._folder_of_path.get(folder) or self._folder(folder)
        return self._find(found[0], xxh3_64_intdigest(name, found[1]), name)

    def index_of(self, path: bytes) -> int:
        """The entry's index. Raises NoSuchPath, NotAFolder for a path below a file or link, and
        UsageError for a path that no dataset can have."""
        index = self.lookup(check_path(path))
        if index < 0:
            raise self._missing(path)
        return index

    def _missing(self, path: bytes) -> NoSuchPath:
        text = cut(path.decode("utf-8", "surrogateescape"))
        at = 0
        for name in path.split(b"/"):
            if self._kind(at) != Kind.FOLDER:
                what = "file" if self._kind(at) == Kind.FILE else "link, which is not followed here"
                above = cut(self.path(at).decode("utf-8", "surrogateescape"))
                return NotAFolder(f"no {text!r} in dataset {self.dataset!r}: {above!r} is a {what}")
            at = self.child(at, name)
            if at < 0:
                break
        return NoSuchPath(f"no {text!r} in dataset {self.dataset!r}")

    def child(self, folder: int, name: bytes) -> int:
        """The entry's index, or -1."""
        self._check(folder)
        return self._find(folder, xxh3_64_intdigest(name, self.hash(folder)), name) if name else -1

    def children(self, i: int) -> range:
        """The indices of the entries in a folder, sorted by name; empty if `i` is no folder."""
        if self._kind(i) != Kind.FOLDER:
            return range(0)
        start, end = self._chunk[i], self._chunk[i] + self._offset[i]
        if not i < start <= end <= self.entry_count:
            self._damaged(i)
        return range(start, end)

    def name(self, i: int) -> bytes:
        """Empty for the root."""
        self._check(i)
        return self._names[self._name_start[i] : self._name_start[i + 1]].tobytes()

    def parent(self, i: int) -> int:
        """The root is its own folder."""
        self._check(i)
        return self._parent[i]

    def path(self, i: int) -> bytes:
        self._check(i)
        components = []
        while i:
            components.append(self.name(i))
            i = self._up(i)
        components.reverse()
        return b"/".join(components)

    def stat(self, i: int) -> Stat:
        kind = self._kind(i)
        return Stat(_KINDS[kind], self._flags[i] & 0xFFF, self._size[i], self._mtime_ns[i])

    def size(self, i: int) -> int:
        self._check(i)
        return self._size[i]

    def link(self, i: int) -> bytes:
        """A link's target. Raises ValueError for other entries."""
        if self._kind(i) != Kind.LINK:
            raise ValueError(f"entry {i} is no link")
        number = self._chunk[i]
        if number >= len(self._target_start) - 1:
            self._damaged(i)
        start, end = self._target_start[number], self._target_start[number + 1]
        return self.columns.targets[start:end].tobytes()

    def extents(self, i: int, start: int = 0, end: int | None = None) -> tuple[Extent, ...]:
        """The places of a file's content, in order; empty for empty files and other kinds. With
        `start` and `end` (None: the file's end), only extents with bytes in this range."""
        size = self._size[i] if self._kind(i) == Kind.FILE else 0
        if start >= size:
            return ()
        flags, first = self._flags[i], self._chunk[i]
        if not flags & layout.MANY_EXTENTS:
            codec = flags >> layout.CODEC_SHIFT & 0xFF
            place = (first, self._offset[i], self._stored[i], codec, self._checksum[i], 0, size)
            return (Extent(*place),)
        rows = self.columns.extents[first : first + self._offset[i]]
        if start or end is not None:
            low, high = np.array([start + 1, size if end is None else end], rows["start"].dtype)
            rows = rows[rows["start"].searchsorted(low) - 1 : rows["start"].searchsorted(high)]
        order = ("chunk", "offset", "stored", "codec", "checksum", "start", "size")
        return tuple(map(Extent, *(rows[name].tolist() for name in order)))

    def plain_extent(self, i: int) -> PlainExtent | None:
        """The place of a file that is one uncompressed extent and not empty; None for other
        entries."""
        if not 0 <= i < self.entry_count or self._flags[i] & _EXTENT_BITS != _PLAIN_FILE:
            return None
        size = self._stored[i]
        return (self._chunk[i], self._offset[i], size, self._checksum[i]) if size else None

    def hash(self, i: int) -> int:
        """The hash of an entry's path. A folder's is the seed for the hashes of its names."""
        memo, climbed = self._hash_of_folder, []
        while (found := memo.get(i)) is None:
            climbed.append(i)
            i = self._up(i)
        for entry in reversed(climbed):
            found = xxh3_64_intdigest(self.name(entry), found)
        if climbed:
            if len(memo) >= _MEMO_FOLDERS_MAX:
                self._hash_of_folder = memo = {ROOT_INDEX: ROOT_HASH}
            memo[climbed[0]] = found
        return found

    # Many entries

    def lookup_many(self, paths: Sequence[bytes]) -> Indices:
        """Indices; -1 for a path without an entry."""
        if len(paths) > _BATCH:
            batches = range(0, len(paths), _BATCH)
            return np.concatenate([self.lookup_many(paths[at : at + _BATCH]) for at in batches])
        folder_paths, names = [], []
        for path in paths:
            cut = path.rfind(b"/") + 1
            folder_paths.append(path[:cut])
            names.append(path[cut:])
        memoized = map(self._folder_of_path.get, folder_paths)
        pairs = [
            pair or self._folder(path) for pair, path in zip(memoized, folder_paths, strict=True)
        ]
        seeds = [seed for _, seed in pairs]
        hashes = np.fromiter(map(xxh3_64_intdigest, names, seeds), np.uint64, len(paths))
        folders = np.array([folder for folder, _ in pairs], np.int64)
        indices = self.find_many(folders, hashes, names)
        if b"" in names:
            for i, path in enumerate(paths):
                if path == ROOT:
                    indices[i] = ROOT_INDEX
        return indices

    def find_many(self, folders: Indices, hashes: layout.U8, names: Sequence[bytes]) -> Indices:
        """`folders` are indices, or -1. Returns -1 for a missing name. `hashes` are those of the
        names, with the hash of their folder as seed. Folder and name of each candidate are compared
        exactly."""
        if not len(self._slot) or not len(names):
            return np.full(len(hashes), -1, np.int64)
        if len(names) * _FEW_SHARE < len(self._slot):
            each = zip(folders.tolist(), hashes.tolist(), names, strict=True)
            found = (self._find(*one) if one[0] >= 0 else -1 for one in each)
            return np.fromiter(found, np.int64, len(names))
        column = self.columns
        fingerprints = (hashes >> np.uint64(32)).astype(np.uint32)
        at = self._first_at_least(fingerprints)
        candidates = column.slot[at].astype(np.int64)
        is_match = column.parent[candidates] == folders
        is_match &= self._same_names(candidates, names)
        # Another entry may have the same fingerprint. Such an entry is looked up by itself.
        is_open = ~is_match & (column.fingerprint[at] == fingerprints) & (folders >= 0)
        candidates[~is_match] = -1
        for i in np.flatnonzero(is_open).tolist():
            candidates[i] = self._find(int(folders[i]), int(hashes[i]), names[i])
        return candidates

    def _first_at_least(self, fingerprints: layout.U4) -> Indices:
        """The position of the first fingerprint that is not smaller; the last position if all are.
        `np.searchsorted` alone would take ten times as long: 20 cache misses for each."""
        column, shift, last = self.columns.fingerprint, self._bucket_shift, len(self._slot) - 1
        at: Indices = self._bucket_start[fingerprints >> shift].astype(np.int64)
        unfinished = np.flatnonzero(column[at] < fingerprints)
        for _ in range(_BUCKET_STEPS_MAX):
            if not len(unfinished):
                return at
            at[unfinished] = np.minimum(at[unfinished] + 1, last)
            is_smaller = column[at[unfinished]] < fingerprints[unfinished]
            unfinished = unfinished[is_smaller & (at[unfinished] < last)]
        at[unfinished] = np.minimum(np.searchsorted(column, fingerprints[unfinished]), last)
        return at

    @property
    def _bucket_shift(self) -> np.uint32:
        return np.uint32(32 - min(max(len(self._slot).bit_length() - 1, 1), _BUCKET_BITS_MAX))

    @cached_property
    def _bucket_start(self) -> layout.U4:
        """The position of the first fingerprint of each bucket. A bucket has the fingerprints with
        the same upper bits, about one on average."""
        lowest = np.arange(0, 1 << 32, 1 << int(self._bucket_shift)).astype(np.uint32)
        start = np.searchsorted(self.columns.fingerprint, lowest)
        return np.minimum(start, len(self._slot) - 1).astype(np.uint32)

    def _same_names(self, candidates: Indices, names: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        lengths = np.fromiter(map(len, names), np.int64, len(names))
        wanted = layout.words(np.frombuffer(b"".join(names) + layout.NAME_PADDING, np.uint8))
        start = self.columns.name_start
        own_starts = start[candidates].astype(np.int64)
        own_lengths = start[candidates + 1].astype(np.int64) - own_starts
        return layout.equal_names(
            (self._words, own_starts, own_lengths), (wanted, np.cumsum(lengths) - lengths, lengths)
        )

    def stat_many(
        self,
        entries: Sequence[bytes] | Sequence[int] | Indices,
        *,
        missing_ok: bool = False,
    ) -> Stats:
        """Takes paths or indices (a `range` of step 1 costs no copy). Raises NoSuchPath for the
        first missing path unless `missing_ok`, and IndexError for an index that no entry has."""
        if isinstance(entries, range | np.ndarray) or not isinstance(next(iter(entries), 0), bytes):
            return self._stats(self._checked(entries))  # type: ignore[arg-type]  # no paths
        paths: Sequence[bytes] = entries  # type: ignore[assignment]  # nor indices
        indices = self.lookup_many(paths)
        missing = indices < 0
        if not missing.any():
            return self._stats(indices)
        if not missing_ok:
            raise NoSuchPath(f"no such path: {shown(paths[int(missing.argmax())])}")
        stats = self._stats(np.where(missing, ROOT_INDEX, indices))
        stats.kind[missing] = Kind.TOMBSTONE
        for column in (stats.mode, stats.size, stats.mtime_ns):
            column[missing] = 0
        return stats

    def _stats(self, indices: "Indices | Span") -> Stats:
        flags = self.columns.flags[indices]
        return Stats(
            kind=layout.kinds(flags).astype(np.uint8),
            mode=(flags & 0xFFF).astype(np.uint16),
            size=self.columns.size[indices],
            mtime_ns=self.columns.mtime_ns[indices],
        )

    def names(self, entries: Sequence[int] | Indices) -> list[bytes]:
        """Fastest for a range of step 1."""
        checked = self._checked(entries)
        if isinstance(checked, slice):
            starts = self.columns.name_start[checked.start : checked.stop + 1].astype(np.int64)
            blob = self.columns.names[starts[0] : starts[-1]].tobytes()
            bounds = (starts - starts[0]).tolist()
            return [blob[start:end] for start, end in pairwise(bounds)]
        column = self.columns.name_start
        each = zip(column[checked].tolist(), column[checked + 1].tolist(), strict=True)
        return [bytes(self._names[start:end]) for start, end in each]

    def paths(self, entries: Sequence[int] | Indices) -> list[bytes]:
        """Makes the path of each folder once."""
        wanted = np.arange(self.entry_count)[self._checked(entries)]
        folders: dict[int, bytes] = {ROOT_INDEX: b""}
        paths = []
        for i, parent in zip(wanted.tolist(), self.columns.parent[wanted].tolist(), strict=True):
            prefix = folders.get(parent)
            if prefix is None:
                prefix = self.path(parent) + b"/"
                if len(prefix) <= _MEMO_PATH_BYTES_MAX:
                    folders[parent] = prefix
            paths.append(prefix + self.name(i))
        return paths

    def iter_paths(self, entries: Indices) -> Iterator[bytes]:
        """As `paths`, holding one batch of paths at a time."""
        for start in range(0, len(entries), _PATHS_BATCH):
            yield from self.paths(entries[start : start + _PATHS_BATCH])

    def chunk_of(self, entries: Sequence[int] | Indices) -> Indices:
        """Each file's first chunk, as a number; -1 for links and folders."""
        wanted = self._checked(entries)
        flags, chunk = self.columns.flags[wanted], self.columns.chunk[wanted].astype(np.int64)
        many = (flags & layout.MANY_EXTENTS) != 0
        chunk[many] = self.columns.extents["chunk"][chunk[many]]
        chunk[layout.kinds(flags) != Kind.FILE] = -1
        return chunk

    def used_bytes(self) -> npt.NDArray[np.float64]:
        """How many stored bytes of each chunk are contents of files, shadowed ones too. Works in
        steps: a fraction of a second for 10 million entries, with little memory."""
        columns, shadowed = self.columns, self.columns.shadowed
        used = np.zeros(self.chunk_count)
        plain = (columns.flags, columns.chunk, columns.stored)
        hidden = (shadowed["flags"], shadowed["chunk"], shadowed["stored"])
        for all_flags, chunk, stored in (plain, hidden):
            for start in range(0, len(all_flags), _BLOCK_ENTRIES):
                some = slice(start, start + _BLOCK_ENTRIES)
                flags = all_flags[some]
                is_plain = (layout.kinds(flags) == Kind.FILE) & ((flags & layout.MANY_EXTENTS) == 0)
                self._add_used(used, chunk[some][is_plain], stored[some][is_plain])
        self._add_used(used, columns.extents["chunk"], columns.extents["stored"])
        return used

    def _add_used(self, used: npt.NDArray[np.float64], chunk: layout.U4, stored: layout.U4) -> None:
        is_there = chunk < self.chunk_count  # damaged files are noticed when they are read
        used += np.bincount(chunk[is_there], stored[is_there], self.chunk_count)

    def files(self) -> Indices:
        return np.flatnonzero(layout.kinds(self.columns.flags) == Kind.FILE)

    def walk(self, i: int) -> Indices:
        """The indices of an entry and of all below it, ascending (breadth first)."""
        self._check(i)
        ranges = []
        start, end = i, i + 1
        while start < end:  # children of a contiguous range are contiguous
            ranges.append(np.arange(start, end))
            inner = np.flatnonzero(layout.kinds(self.columns.flags[start:end]) == Kind.FOLDER)
            if not len(inner):
                break
            first, last = (
                self.children(start + int(inner[0])),
                self.children(start + int(inner[-1])),
            )
            start, end = first.start, last.stop
        return np.concatenate(ranges)

    def shadowing_folders(self) -> Indices:
        """Folders that hide a file or link of the same path."""
        return self.columns.shadowed["entry"].astype(np.int64)

    def _kind(self, i: int) -> int:
        self._check(i)
        return self._flags[i] >> layout.KIND_SHIFT & 3

    def _check(self, i: int) -> None:
        if not 0 <= operator.index(i) < self.entry_count:  # TypeError for no integer
            raise IndexError(f"no entry {i} among {self.entry_count}")

    def _checked(self, entries: Sequence[int] | Indices) -> "Indices | Span":
        """The indices as an array, or as a slice for a range of step 1. Raises IndexError."""
        if isinstance(entries, range) and entries.step == 1 and len(entries):
            self._check(entries.start)
            self._check(entries.stop - 1)
            return slice(entries.start, entries.stop)
        indices = np.asarray(entries, np.int64)
        if len(indices):
            self._check(int(indices.min()))
            self._check(int(indices.max()))
        return indices

    def _up(self, i: int) -> int:
        parent = self._parent[i]
        if parent >= i:  # a loop in a damaged file
            self._damaged(i)
        return parent

    def _damaged(self, i: int) -> NoReturn:
        raise CorruptError(f"damaged snapshot of {self.dataset}: entry {i} contradicts another")

    def _folder(self, path: bytes) -> tuple[int, int]:
        """Index and hash of a folder, from the memo or step by step; -1 if there is none. Paths end
        with a slash, except the root's, so that `/a` is not taken for `a`."""
        found = self._folder_of_path.get(path)
        if found:
            return found
        folder, seed = ROOT_INDEX, ROOT_HASH
        for name in path[:-1].split(b"/"):
            seed = xxh3_64_intdigest(name, seed)
            folder = self._find(folder, seed, name)
            if folder < 0:
                return -1, 0
        if len(path) <= _MEMO_PATH_BYTES_MAX:
            if len(self._folder_of_path) >= _MEMO_FOLDERS_MAX:
                self._folder_of_path = {ROOT: (ROOT_INDEX, ROOT_HASH)}
            self._folder_of_path[path] = folder, seed
        return folder, seed

    def _find(self, folder: int, hash_: int, name: bytes) -> int:
        """The index of the entry `name` in a folder, or -1; `hash_` is its hash."""
        fingerprint = hash_ >> 32
        fingerprints, slot = self._fingerprint, self._slot
        first = bisect_left(fingerprints, fingerprint)
        for at in range(first, min(first + _EQUAL_TRIED_MAX, len(slot))):
            if fingerprints[at] != fingerprint:
                return -1
            i = slot[at]
            if self._parent[i] == folder and self.name(i) == name:
                return i
        if folder < 0 or first + _EQUAL_TRIED_MAX >= len(slot):
            return -1
        inside = self.children(folder)  # somebody chose names with equal fingerprints
        at = bisect_left(inside, name, key=self.name)
        return inside[at] if at < len(inside) and self.name(inside[at]) == name else -1
