"""Gathering entries into one chunk, in memory that is used again for the next.

Owned here: when a chunk is full and which contents are tried with lz4. Not owned: the layout
(`chunk.py`). Pure; a `ChunkBuilder` belongs to one thread.
"""

from uuid import UUID

from xxhash import xxh3_64_intdigest

from .chunk import (
    ENTRIES_MAX,
    EXTENT_ALIGNMENT,
    Entries,
    Fixed,
    Header,
    Part,
    damaged,
    pack_body,
    parse_header,
    parse_preamble,
    write_front,
)
from .chunk_id import chunk_id_text, stamp_fields
from .entries import MODE_MASK, ChunkId, Codec, Kind, Stamp
from .errors import CorruptError

_SAMPLE_BYTES = 64 << 10  # of a larger content, "auto" tries so much of its middle
_GIVE_UP = 8  # after so many files in a row that did not pay ...
_RETRY = 16  # ... "auto" tries one in this many: JPEGs come by the thousand
_FILE, _RAW, _LZ4 = int(Kind.FILE), int(Codec.RAW), int(Codec.LZ4)


class ChunkBuilder:
    """Packs entries into one chunk. Contents are read or copied into `room()`, then added.

    `body_bytes_max` is when `full`; a single larger entry still fits, if added first. `compress` is
    "auto" (lz4 where a sample pays), "lz4" (try each), or "none". Reusable after `clear()`.
    """

    def __init__(self, identity: UUID, body_bytes_max: int, compress: str = "auto") -> None:
        self.identity = identity
        self.body_bytes_max = body_bytes_max
        self._tries_all = compress == "lz4"
        self._tries_some = compress == "auto"
        self._body = bytearray(body_bytes_max + EXTENT_ALIGNMENT)
        self._view = memoryview(self._body)
        self._futile = 0  # kept by clear(): the next chunk's files are mostly like this one's
        self.clear()

    def clear(self) -> None:
        """Forget all entries, keep the memory."""
        self.body_bytes = 0
        self.full = False  # whether the chunk should be sealed now
        self._path_bytes = 0
        self._here: bytes | None = None  # the last entry's folder ...
        self._number = 0  # ... and its number
        self._entries = Entries()

    def __len__(self) -> int:
        return len(self._entries.names)

    @property
    def continues(self) -> ChunkId | None:
        """The first chunk of the file of which this one holds a later extent."""
        return next((stamp_fields(value)[0] for value in self._entries.stamps.values()), None)

    def room(self, size: int) -> memoryview:
        """`size` writable bytes at the end of the body, to read a content into."""
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
        part: Part | None = None,
    ) -> None:
        """Add the file (folder, name) whose `size` bytes (or whose part's) stand in `room()`."""
        entries = self._entries
        length = size if part is None else part.size
        start = self.body_bytes
        content = self._view[start : start + length]
        checksum = xxh3_64_intdigest(content)
        stored, codec = length, _RAW
        if length and (
            self._tries_all
            or (self._tries_some and (self._futile < _GIVE_UP or not len(entries.names) % _RETRY))
        ):
            packed = self._packed(content)
            if packed is None:
                self._futile += 1
            else:
                self._futile = 0
                stored, codec = len(packed), _LZ4
                self._view[start : start + stored] = packed
        if part is not None:
            entries.parts[len(self)] = part
        self.body_bytes = start + stored
        offset = start if length else 0
        self._add(path, (_FILE, mode & MODE_MASK, size, mtime_ns, offset, stored, codec, checksum))

    def add_link(self, path: tuple[bytes, bytes], mtime_ns: int, target: bytes) -> None:
        """Add a symbolic link; `target` is kept verbatim."""
        self._entries.links.append(target)
        self._path_bytes += len(target)
        checksum = xxh3_64_intdigest(target)
        self._add(path, (Kind.LINK, 0o777, len(target), mtime_ns, 0, 0, _RAW, checksum))

    def add_folder(self, path: tuple[bytes, bytes], mode: int, mtime_ns: int) -> None:
        """Add a folder; the dataset's root is (b"", b"")."""
        self._add(path, (Kind.FOLDER, mode & MODE_MASK, 0, mtime_ns, 0, 0, _RAW, 0))

    def add_tombstone(self, path: tuple[bytes, bytes]) -> None:
        """Add "this path is deleted"."""
        self._add(path, (Kind.TOMBSTONE, 0, 0, 0, 0, 0, _RAW, 0))

    def add_copy(self, source: Header, place: int, stored: memoryview) -> None:
        """Add an entry of another chunk as it stands there, stamp included; `stored` is its body.

        Nothing is decoded: what it decodes to, and its checksum, are checked by `seal`.
        """
        entries, record, start = self._entries, source.records[place], self.body_bytes
        self.room(len(stored))[:] = stored
        self.body_bytes = start + len(stored)
        if place in source.parts:
            entries.parts[len(self)] = source.parts[place]
        if place in source.links:
            entries.links.append(source.links[place])
            self._path_bytes += len(source.links[place])
        folder = source.folders[source.folder[place]]
        kind, mode, size, mtime_ns, codec, checksum = (
            int(record[name]) for name in ("kind", "mode", "size", "mtime_ns", "codec", "checksum")
        )
        offset = start if len(stored) else 0
        fixed = (kind, mode, size, mtime_ns, offset, len(stored), codec, checksum)
        self._add((folder, source.names[place]), fixed)
        self.set_stamp(source.stamp(place))

    def set_stamp(self, value: Stamp) -> None:
        """Give the entry that was added last another stamp than its own place."""
        self._entries.stamps[len(self) - 1] = value

    def seal(self, chunk: ChunkId) -> tuple[list[bytes | memoryview], Header]:
        """The buffers of the finished chunk, in order, and its header, parsed back from them.

        The body's buffer is the builder's own: use it before `clear()`. Raises CorruptError where
        the bytes are no longer what was added (damaged memory).
        """
        front, stored = write_front(self.identity, chunk, self._entries, self.body_bytes)
        body = self._view[: self.body_bytes]
        preamble = parse_preamble(front, identity=self.identity, id=chunk)
        header = parse_header(preamble, stored)
        if len(header) != len(self) or header.faults:
            raise CorruptError(f"chunk {chunk_id_text(chunk)} was built from bad entries")
        if bad := damaged(header, body, preamble.body_start):
            raise CorruptError(f"chunk {chunk_id_text(chunk)}: damaged in memory, entry {bad[0]}")
        return [front, stored, body], header

    def _add(self, path: tuple[bytes, bytes], fixed: Fixed) -> None:
        """Every file of every put comes through here: no call that can be spared."""
        entries = self._entries
        folder, name = path
        if folder is not self._here:
            self._number = entries.folders.setdefault(folder, len(entries.folders))
            self._here = folder
            self._path_bytes += len(folder) + 1
        names = entries.names
        self._path_bytes += len(name) + 1
        entries.folder.append(self._number)
        names.append(name)
        entries.fixed.append(fixed)
        if self.body_bytes + self._path_bytes >= self.body_bytes_max or len(names) >= ENTRIES_MAX:
            self.full = True

    def _packed(self, content: memoryview) -> bytes | None:
        """The lz4 form where it pays; "auto" looks at the middle of a larger content first."""
        middle = (len(content) - _SAMPLE_BYTES) // 2
        sample = content[middle : middle + _SAMPLE_BYTES] if middle > 0 else content
        if self._tries_some and middle > 0 and pack_body(sample) is None:
            return None
        return pack_body(content)
