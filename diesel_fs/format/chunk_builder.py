"""Gathers entries into one chunk, and reuses its memory for the next one.

The builder decides when a chunk is full and which contents are compressed; `chunk.py` knows the
bytes. A `ChunkBuilder` belongs to one thread.
"""

from collections.abc import Sequence
from itertools import accumulate
from uuid import UUID

from xxhash import xxh3_64_intdigest

from ..errors import CorruptError
from .chunk import (
    ENTRIES_MAX,
    EXTENT_ALIGNMENT,
    ChunkHeader,
    Entries,
    ExtentInfo,
    damaged_places,
    pack_body,
    parse_header,
    parse_preamble,
    write_front,
)
from .chunk_id import chunk_id_text, stamp_fields
from .entries import MODE_MASK, ChunkId, Codec, Kind, Stamp

# "auto" spends little time on contents that lz4 does not make smaller
_SAMPLE_BYTES = 64 << 10  # it first tries this much of the middle of a larger content
_MISSES_MAX = 8  # after this many files in a row that did not get smaller ...
_RETRY_ONE_IN = 16  # ... it tries only one file in 16, since JPEGs come by the thousand
_FILE, _RAW, _LZ4 = int(Kind.FILE), int(Codec.RAW), int(Codec.LZ4)


class ChunkBuilder:
    """Packs entries into one chunk of the dataset `identity`. The caller reads a content into
    `room()` and then adds it. The chunk is `full` at `body_bytes_max`; a single larger entry still
    fits if it comes first. `compress` is "auto" (lz4 if it makes a sample smaller), "lz4" (try
    every file), or "none"."""

    def __init__(self, identity: UUID, body_bytes_max: int, compress: str = "auto") -> None:
        self.identity = identity
        self.body_bytes_max = body_bytes_max
        self._tries_all = compress == "lz4"
        self._tries_some = compress == "auto"
        self._body = bytearray(body_bytes_max + EXTENT_ALIGNMENT)
        self._view = memoryview(self._body)
        # Files in a row that lz4 did not make smaller. `clear` keeps it, since files of two chunks
        # are alike
        self._misses = 0
        self.clear()

    def clear(self) -> None:
        self.body_bytes = 0
        self.left_bytes = self.body_bytes_max  # until the chunk is full, with paths
        self.full = False
        self._path_bytes = 0
        self._last_folder: bytes | None = None
        self._last_folder_number = 0
        self._entries = Entries()

    def __len__(self) -> int:
        return len(self._entries.names)

    @property
    def first_chunk_id(self) -> ChunkId | None:
        """The first chunk of the file of which this chunk holds a later extent, if any. Only for a
        put, where no other entry has a stamp of its own."""
        return next((stamp_fields(value)[0] for value in self._entries.stamps.values()), None)

    @property
    def room_bytes(self) -> int:
        """How much `room` can give without allocating."""
        return len(self._body) - self.body_bytes

    def room(self, size: int) -> memoryview:
        """Return memory for a content at the end of the body."""
        end = self.body_bytes + size
        if end > len(self._body):
            grown = bytearray(end + EXTENT_ALIGNMENT)
            grown[: self.body_bytes] = self._view[: self.body_bytes]
            self._body, self._view = grown, memoryview(grown)
        return self._view[self.body_bytes : end]

    def add_file(
        self,
        path: tuple[bytes, bytes],
        mode: int,
        mtime_ns: int,
        size: int,
        part: ExtentInfo | None = None,
    ) -> None:
        """Add a file. `room()` holds the content, or that of the extent `part`; `size` is the whole
        file's."""
        length = size if part is None else part.size
        start = self.body_bytes
        content = self._view[start : start + length]
        checksum = xxh3_64_intdigest(content)
        stored, codec = length, _RAW
        packed = self._packed([content]).get(0)
        if packed is not None:
            stored, codec = len(packed), _LZ4
            self._view[start : start + stored] = packed
        if part is not None:
            self._entries.extents[len(self)] = part
        self._add(path, _FILE, mode & MODE_MASK, size, mtime_ns, stored, codec, checksum)

    def add_files(
        self,
        folder: bytes,
        names: Sequence[bytes],
        modes: Sequence[int],
        mtimes_ns: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Add files of one folder; `room()` has their contents, one after the other. Nearly every
        file of a put comes this way, so no Python statement runs once per file."""
        entries, count = self._entries, len(names)
        ends = [*accumulate(sizes, initial=self.body_bytes)]
        contents = [*map(self._view.__getitem__, map(slice, ends, ends[1:]))]
        entries.checksum.extend(map(xxh3_64_intdigest, contents))
        stored, codecs, end = [*sizes], bytes(count), ends[-1]
        if packed := self._packed(contents):
            codecs = bytes(_LZ4 if i in packed else _RAW for i in range(count))
            end = self.body_bytes
            for i, content in enumerate(contents):
                body = packed.get(i, content)
                stored[i] = len(body)
                self._view[end : end + len(body)] = body
                end += len(body)
        entries.kind += bytes(count)  # each a file
        entries.mode.extend([mode & MODE_MASK for mode in modes])
        entries.size.extend(sizes)
        entries.mtime_ns.extend(mtimes_ns)
        entries.stored.extend(stored)
        entries.codec += codecs
        entries.names += names
        number = self._number_of(folder)
        entries.folder.extend([number] * count)
        self._path_bytes += sum(map(len, names)) + count
        self._grow(end)

    def add_link(self, path: tuple[bytes, bytes], mtime_ns: int, target: bytes) -> None:
        self._entries.links.append(target)
        self._path_bytes += len(target)
        checksum = xxh3_64_intdigest(target)
        self._add(path, Kind.LINK, 0o777, len(target), mtime_ns, 0, _RAW, checksum)

    def add_folder(self, path: tuple[bytes, bytes], mode: int, mtime_ns: int) -> None:
        """Add a folder. The dataset's root is (b"", b"")."""
        self._add(path, Kind.FOLDER, mode & MODE_MASK, 0, mtime_ns, 0, _RAW, 0)

    def add_tombstone(self, path: tuple[bytes, bytes]) -> None:
        self._add(path, Kind.TOMBSTONE, 0, 0, 0, 0, _RAW, 0)

    def add_copy(self, source: ChunkHeader, place: int, stored: memoryview) -> None:
        """Add another chunk's entry unchanged, with its stamp. `stored` is its body there, which
        `seal` checks."""
        entries, record = self._entries, source.records[place]
        self.room(len(stored))[:] = stored
        if place in source.extents:
            entries.extents[len(self)] = source.extents[place]
        if place in source.links:
            entries.links.append(source.links[place])
            self._path_bytes += len(source.links[place])
        folder = source.folders[source.folder[place]]
        kind, mode, size, mtime_ns, codec, checksum = (
            int(record[name]) for name in ("kind", "mode", "size", "mtime_ns", "codec", "checksum")
        )
        path = (folder, source.names[place])
        self._add(path, kind, mode, size, mtime_ns, len(stored), codec, checksum)
        self.set_stamp(source.stamp(place))

    def set_stamp(self, value: Stamp) -> None:
        """Replace the last entry's stamp, which is this chunk's ID and the entry's place."""
        self._entries.stamps[len(self) - 1] = value

    def seal(self, chunk: ChunkId) -> tuple[list[bytes | memoryview], ChunkHeader]:
        """Return the chunk's buffers and its header, parsed back from them. The body's buffer is
        the builder's: use it before `clear()`. Raises CorruptError if memory was damaged."""
        front, stored_header = write_front(self.identity, chunk, self._entries, self.body_bytes)
        body = self._view[: self.body_bytes]
        preamble = parse_preamble(front, identity=self.identity, id=chunk)
        header = parse_header(preamble, stored_header)
        if len(header) != len(self) or header.faults:
            raise CorruptError(f"chunk {chunk_id_text(chunk)} was built from bad entries")
        if bad := damaged_places(header, body, preamble.body_start):
            raise CorruptError(f"chunk {chunk_id_text(chunk)}: damaged in memory, entry {bad[0]}")
        return [front, stored_header, body], header

    def _add(
        self,
        path: tuple[bytes, bytes],
        kind: int,
        mode: int,
        size: int,
        mtime_ns: int,
        stored: int,
        codec: int,
        checksum: int,
    ) -> None:
        entries = self._entries
        folder, name = path
        entries.folder.append(self._number_of(folder))
        entries.names.append(name)
        entries.kind.append(kind)
        entries.mode.append(mode)
        entries.size.append(size)
        entries.mtime_ns.append(mtime_ns)
        entries.stored.append(stored)
        entries.codec.append(codec)
        entries.checksum.append(checksum)
        self._path_bytes += len(name) + 1
        self._grow(self.body_bytes + stored)

    def _number_of(self, folder: bytes) -> int:
        if folder is not self._last_folder:
            folders = self._entries.folders
            self._last_folder_number = folders.setdefault(folder, len(folders))
            self._last_folder = folder
            self._path_bytes += len(folder) + 1
        return self._last_folder_number

    def _grow(self, end: int) -> None:
        self.body_bytes = end
        self.left_bytes = self.body_bytes_max - end - self._path_bytes
        self.full = self.left_bytes <= 0 or len(self) >= ENTRIES_MAX

    def _packed(self, contents: Sequence[memoryview]) -> dict[int, bytes]:
        """The contents that lz4 makes small enough, packed, by position."""
        packed: dict[int, bytes] = {}
        if not (self._tries_all or self._tries_some):
            return packed
        i, place_of_first = 0, len(self)
        while True:
            if self._tries_some and self._misses >= _MISSES_MAX:
                i += -(place_of_first + i) % _RETRY_ONE_IN  # to the next place that is a multiple
            if i >= len(contents):
                return packed
            if len(contents[i]):
                body = self._packed_one(contents[i])
                self._misses = 0 if body is not None else self._misses + 1
                if body is not None:
                    packed[i] = body
            i += 1

    def _packed_one(self, content: memoryview) -> bytes | None:
        """The content packed by lz4, or None. "auto" tries the middle of a large content first."""
        middle = (len(content) - _SAMPLE_BYTES) // 2
        sample = content[middle : middle + _SAMPLE_BYTES] if middle > 0 else content
        if self._tries_some and middle > 0 and pack_body(sample) is None:
            return None
        return pack_body(content)
