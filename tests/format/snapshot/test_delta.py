"""Deltas against full builds and the oracle; FAULTS E1 and E2: any bytes are a delta that gives the
right version, or one FormatError."""

import struct
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from diesel_fs.errors import (
    CorruptError,
    ForeignError,
    FormatError,
    NewerVersionError,
    TruncatedError,
    UsageError,
)
from diesel_fs.format.entries import EXTENT, RECORD, ChunkId, ChunkInfo, Kind, Rows
from diesel_fs.format.snapshot import delta as delta_module
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.delta import (
    Delta,
    apply_deltas,
    chunks_after,
    delta_bytes,
    digest_at,
    merged_rows,
    parse_delta,
    parse_delta_header,
    write_delta,
)
from diesel_fs.format.snapshot.layered import LayeredSnapshot
from diesel_fs.format.snapshot.layout import RowsDigest, parse_front
from diesel_fs.format.snapshot.reader import Snapshot
from tests.examples import examples
from tests.rows import each_row

from . import oracle
from .oracle import OwnEntry, Part, State, chunk_id, rows_of, shown, shown_by, tail_of
from .test_layered import check_same, delta, full, layers, table
from .test_model import apply, batches, paths

GOLDEN = Path(__file__).parent / "golden/version-1.delta"
Changes = dict[bytes, OwnEntry | None]


def bytes_of(one: Delta) -> bytes:
    return b"".join(write_delta(one))


def applied(base: Snapshot, deltas: Sequence[Delta]) -> bytes:
    return b"".join(apply_deltas(base, deltas))


def state_after(steps: Sequence[Changes]) -> State:
    state: dict[bytes, OwnEntry] = {}
    for changes in steps:
        apply(state, changes)
    return state


Row = tuple[bytes, bytes, bytes]
"""A record, the ID of its chunk, and its tail."""


def rows_by_path(rows: Rows) -> dict[bytes, Row]:
    found = {
        rows.path(i): (
            rows.records[i].tobytes(),
            bytes(rows.chunks[rows.chunk[i]]),
            rows.tails.get(i, b""),
        )
        for i in range(len(rows))
    }
    assert len(found) == len(rows)
    return found


def exact(one: Delta) -> Delta:
    """The same without folders and chunks that no row names, which the oracle adds."""
    rows = one.rows
    folders, folder = named_ones(rows.folders, rows.folder)
    chunks, chunk = named_ones(rows.chunks, rows.chunk)
    ids = [ChunkId(each) for each in chunks]
    return replace(one, rows=replace(rows, folders=folders, folder=folder, chunk=chunk, chunks=ids))


def named_ones(
    items: Sequence[bytes], numbers: npt.NDArray[np.uint32]
) -> tuple[list[bytes], npt.NDArray[np.uint32]]:
    used = sorted(set(numbers.tolist()))
    again = np.array([used.index(number) for number in numbers.tolist()], np.uint32)
    return [items[number] for number in used], again


def joined(deltas: Sequence[Delta]) -> Delta:
    """One delta that has the changes of all."""
    rows = merged_rows([each.rows for each in deltas])
    header = replace(deltas[-1].header, base=deltas[0].header.base, rows=len(rows))
    return Delta(header, rows, [chunk for each in deltas for chunk in each.added])


# Chains


@examples(300)
@given(st.lists(batches, min_size=2, max_size=8), st.sampled_from([1, 5, 1 << 16]))
def test_a_chain_gives_the_bytes_of_a_full_build(
    steps: list[Changes], merged_rows_max: int
) -> None:
    """Whether the rows of all deltas are merged at once, or applied delta by delta."""
    base, deltas, whole = layers(steps)
    with mock.patch.object(delta_module, "_MERGED_ROWS_MAX", merged_rows_max):
        found = applied(base, deltas)
    assert found == bytes(whole.buffer)
    assert Snapshot(found).rows_digest == oracle.rows_digest(state_after(steps))


@examples(300)
@given(st.lists(batches, min_size=3, max_size=8), st.data())
def test_a_delta_of_several_steps_gives_the_bytes_of_a_full_build(
    steps: list[Changes], data: st.DataObject
) -> None:
    """Each is written and parsed again, as a merged one is published."""
    base, deltas, whole = layers(steps)
    count = len(deltas)
    cuts = data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    merged = []
    for start, end in pairwise([0, *sorted(cuts), count]):
        one = joined(deltas[start:end])
        expected: dict[bytes, Row] = {}
        for each in deltas[start:end]:
            expected |= rows_by_path(each.rows)
        read = parse_delta(bytes_of(one)).rows
        assert rows_by_path(one.rows) == rows_by_path(read) == expected
        for items, numbers in ((read.folders, read.folder), (read.chunks, read.chunk)):
            assert len(items) == len({*items}) == len({*numbers.tolist()})
        merged.append(parse_delta(bytes_of(one)))
    assert applied(base, merged) == bytes(whole.buffer)


@examples(300)
@given(st.lists(batches, min_size=2, max_size=5))
def test_a_delta_is_read_as_it_was_written(steps: list[Changes]) -> None:
    for one in map(exact, layers(steps)[1]):
        data = bytes_of(one)
        parsed = parse_delta(data)
        assert (parsed.header, [*parsed.added]) == (one.header, [*one.added])
        assert rows_by_path(parsed.rows) == rows_by_path(one.rows)
        assert bytes_of(parsed) == data
        assert parse_delta_header(data[: delta_module.HEADER_BYTES]) == one.header
        assert len(data) % 64 == 0
        tables = 16 * len(one.rows.chunks) + 24 * len(one.added) + 12 * len(one.rows.tails)
        assert -64 < len(data) - delta_bytes(one.rows) - tables < 10 * 64


@examples(300)
@given(st.lists(batches, min_size=2, max_size=5), st.integers(1, 3))
def test_a_base_may_be_later_than_the_first_delta_needs(steps: list[Changes], later: int) -> None:
    """A reader begins with its private copy of a version between the base and the delta's."""
    base, deltas, whole = layers(steps)
    first = min(later, len(deltas)) - 1
    between = Snapshot(applied(base, deltas[: first + 1]))
    rest = joined(deltas)  # it leads from `base`, and so over `between`
    if between.version < rest.header.version:
        assert applied(between, [rest]) == bytes(whole.buffer)
    for wrong in ([rest, *deltas], deltas[::-1], [deltas[0], deltas[0]]):
        if len(wrong) > 1:
            with pytest.raises(CorruptError):
                applied(base, wrong)
    other = replace(deltas[0], header=replace(deltas[0].header, base=base.version + 1, version=99))
    with pytest.raises(CorruptError):
        applied(base, [other])


@examples(300)
@given(st.lists(batches, min_size=1, max_size=6), st.lists(paths, max_size=9))
def test_a_digest_at_paths_is_that_of_the_entries_there(
    steps: list[Changes], others: list[bytes]
) -> None:
    base, deltas, whole = layers(steps)
    state = state_after(steps)
    for asked in ({*others}, {*state}, {*others, *state}):
        there = {path: own for path, own in state.items() if path in asked}
        rows = rows_of(dict.fromkeys(asked))
        assert digest_at(base, deltas, rows) == oracle.rows_digest(there)
        assert digest_at(whole, [], rows) == oracle.rows_digest(there)


# Hostile bytes

CHANGES: Changes = {
    b"": OwnEntry(Kind.FOLDER, 0o711, 3),
    b"a": OwnEntry(Kind.FILE, 0o640, -7, (Part(9, 110, 5, 0, 2**63 + 1, 5),)),
    b"b": None,
    b"c/\xff\n": OwnEntry(
        Kind.FILE, parts=(Part(3, 200, 9, 1, 5, 131072), Part(11, 96, 4, 0, 8, 4))
    ),
    b"c/l": OwnEntry(Kind.FILE, 0o600, 9, (Part(3, 300, 7, 1, 3, 70),)),
    b"c/new": OwnEntry(Kind.LINK, 0o777, 2**40, target=b"../a/target"),
    b"c/x": OwnEntry(Kind.FOLDER, 0o750, 1),
    b"c/x/shadows": None,
    b"d/e/deep": OwnEntry(Kind.FILE),
    b"n" * 255: OwnEntry(Kind.LINK, target=b"."),
}  # fmt: skip


def next_state() -> State:
    state = dict(oracle.SMALL)
    apply(state, CHANGES)
    return state


CHUNKS = [ChunkInfo(chunk_id(number), 1_000_000 + number) for number in (3, 9, 11)]
BASE = full(oracle.SMALL, CHUNKS[:2], 12)
AFTER = full(next_state(), CHUNKS, 15)
EXACT = exact(delta(BASE, CHANGES, AFTER))
SMALL = bytes_of(EXACT)
ROW = {EXACT.rows.path(i): i for i in range(len(EXACT.rows))}
TAIL = {path: sorted(EXACT.rows.tails).index(i) for path, i in ROW.items() if i in EXACT.rows.tails}

HEADER_BYTES, TABLE_AT = 512, 176
FIELDS = {
    "format version": ("<H", 8),
    "header bytes": ("<H", 10),
    "flags": ("<I", 12),
    "identity": ("<Q", 16),
    "version": ("<Q", 32),
    "base": ("<Q", 40),
    "files": ("<Q", 48),
    "file bytes": ("<Q", 56),
    "chunks": ("<Q", 64),
    "digest": ("<Q", 72),
    "upper digest": ("<Q", 80),
    "seen": ("<Q", 88),
    "placed": ("<Q", 96),
    "rows": ("<Q", 104),
    "name's length": ("<B", 112),
    "name": ("<Q", 113),
    "name's end": ("<B", 175),
    "spare": ("<Q", 416),
    "spare's end": ("<Q", 496),
}
SECTIONS = (
    *("folders", "folder", "names", "records", "chunk"),
    *("row_chunk", "tailed", "tail_bytes", "tails", "added"),
)
_DTYPES = tuple(
    np.dtype(spec)
    for spec in ("u1", "<u4", "u1", RECORD, "<u4", "V16", "<u4", "<u8", "u1", "V16, <u8")
)
DTYPES = dict(zip(SECTIONS, _DTYPES, strict=True))


class Forgery:
    """A delta whose fields can be changed, and which has right checksums again. It shares no code
    with the product."""

    def __init__(self, data: bytes = SMALL) -> None:
        self.head = bytearray(data[:HEADER_BYTES])
        self.sections: dict[str, bytes] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        """Offsets and lengths that replace the right ones."""
        for number, name in enumerate(DTYPES):
            at, length = struct.unpack_from("<QQ", data, TABLE_AT + 24 * number)
            self.sections[name] = data[at : at + length]

    def field(self, name: str) -> int:
        spec, at = FIELDS[name]
        return int(struct.unpack_from(spec, self.head, at)[0])

    def set_field(self, name: str, value: int) -> None:
        spec, at = FIELDS[name]
        struct.pack_into(spec, self.head, at, value)

    def set_item(self, section: str, at: int, value: object, part: str = "") -> None:
        items = np.frombuffer(self.sections[section], DTYPES[section]).copy()
        (items[part] if part else items)[at] = value
        self.sections[section] = items.tobytes()

    def data(self) -> bytes:
        body, table = b"", b""
        for name, section in self.sections.items():
            span = (HEADER_BYTES + len(body), len(section))
            table += struct.pack("<QQQ", *self.spans.get(name, span), xxh3_64_intdigest(section))
            body += section + bytes(-len(section) % 64)
        self.head[TABLE_AT : TABLE_AT + len(table)] = table
        self.head[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(self.head[:-8])))
        return bytes(self.head) + body


def test_the_small_delta_is_exact() -> None:
    assert Forgery().data() == SMALL
    assert applied(BASE, [parse_delta(SMALL)]) == bytes(AFTER.buffer)
    assert shown_by(AFTER) == shown(next_state())
    check_same(LayeredSnapshot(BASE, [parse_delta(SMALL)]), AFTER)


def test_E1_truncated_at_any_length_or_any_bit_flipped() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(TruncatedError):
            parse_delta(SMALL[:length])
    data = bytearray(SMALL)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse_delta(data)
        data[bit // 8] ^= 1 << bit % 8


Forge = Callable[[Forgery], None]


def field(name: str, value: int) -> Forge:
    return lambda forgery: forgery.set_field(name, value)


def item(section: str, at: int, value: object, part: str = "") -> Forge:
    return lambda forgery: forgery.set_item(section, at, value, part)


def record(path: bytes, part: str, value: int) -> Forge:
    return item("records", ROW[path], value, part)


def section(name: str, change: Callable[[bytes], bytes]) -> Forge:
    def forge(forgery: Forgery) -> None:
        forgery.sections[name] = change(forgery.sections[name])

    return forge


def span(name: str, at: int, length: int) -> Forge:
    return lambda forgery: forgery.spans.update({name: (at, length)})


def both(*forges: Forge) -> Forge:
    def forge(forgery: Forgery) -> None:
        for each in forges:
            each(forgery)

    return forge


def forged(*forges: Forge) -> bytes:
    forgery = Forgery()
    both(*forges)(forgery)
    return forgery.data()


@each_row(
    ("data", "error"),
    [
        (b"", TruncatedError),
        (SMALL[:3], TruncatedError),
        (b"\x7fELF" + bytes(2000), ForeignError),
        (bytes(5000), ForeignError),
        (bytes(AFTER.buffer), ForeignError),
        (SMALL + b"\0", CorruptError),
        (SMALL + bytes(64), CorruptError),
        (SMALL[:8] + b"\2" + SMALL[9:], NewerVersionError),
        (forged(field("format version", 2)), NewerVersionError),
        (forged(field("flags", 1)), NewerVersionError),
        (forged(field("flags", 1 << 31)), NewerVersionError),
        (forged(field("format version", 0)), CorruptError),
        (SMALL[:12] + b"\1" + SMALL[13:], CorruptError),
    ],
)
def test_E1_other_bytes_have_the_right_error(data: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        parse_delta(data)
    if len(data) > HEADER_BYTES and not data.startswith(SMALL):
        with pytest.raises(error):
            parse_delta_header(data[:HEADER_BYTES])


def test_E1_a_delta_is_no_snapshot() -> None:
    with pytest.raises(ForeignError):
        Snapshot(SMALL)


def tailed_in(order: Sequence[int]) -> Forge:
    """Other rows have the tails."""
    tailed = sorted(EXACT.rows.tails)
    return section("tailed", lambda _: np.array([tailed[i] for i in order], "<u4").tobytes())


def named(path: bytes, name: bytes, *, folder: bytes | None = None) -> Forge:
    """Another name, and perhaps another folder, of the row at a path."""

    def forge(forgery: Forgery) -> None:
        names, row = forgery.sections["names"].split(b"\0"), ROW[path]
        names[row] = name
        forgery.sections["names"] = b"\0".join(names)
        if folder is not None:
            folders = [*EXACT.rows.folders, folder]
            forgery.sections["folders"] = b"\0".join(folders)
            forgery.set_item("folder", row, len(folders) - 1)

    return forge


def target(path: bytes, content: bytes) -> Forge:
    """Another tail of the row at a path."""

    def forge(forgery: Forgery) -> None:
        tails = [EXACT.rows.tails[i] for i in sorted(EXACT.rows.tails)]
        tails[TAIL[path]] = content
        forgery.set_item("tail_bytes", TAIL[path], len(content))
        forgery.sections["tails"] = b"".join(tails)

    return forge


def extent(number: int, part: str, value: object) -> Forge:
    """Another value in an extent of the file that has several."""
    row = ROW[b"c/\xff\n"]
    extents = np.frombuffer(EXACT.rows.tails[row], EXTENT).copy()
    extents[part][number] = value
    return target(b"c/\xff\n", extents.tobytes())


ID_11 = xxh3_128_intdigest(chunk_id(11))
BIG = b"c/\xff\n"
LINK = b"c/new"
LONG_FOLDER = b"/".join([b"d" * 200] * 1304)

FORGERIES: dict[str, Forge] = {
    "a wrong length of the header": field("header bytes", 640),
    "a version that is its base": field("version", 12),
    "a version before its base": field("version", 11),
    "no base": field("base", 0),
    "a base that is its version": field("base", 15),
    "a base after its version": field("base", 2**64 - 1),
    "a base that the reader does not have": field("base", 13),
    "another dataset": field("identity", 1),
    "an empty name of a dataset": field("name's length", 0),
    "a name of 255 bytes": field("name's length", 255),
    "a name cut off": field("name's length", 3),
    "an impossible name of a dataset": field("name", ord("/")),
    "a name that is not ASCII": field("name", 0xFF),
    "bytes behind the name": field("name's end", 1),
    "bytes behind the table": field("spare", 1),
    "bytes before the checksum": field("spare's end", 1 << 56),
    "a row too few": field("rows", len(ROW) - 1),
    "a row too many": field("rows", len(ROW) + 1),
    "no rows": field("rows", 0),
    "2^64 rows": field("rows", 2**64 - 1),
    "a chunk too few": field("chunks", 2),
    "2^64 chunks": field("chunks", 2**64 - 1),
    "a wrong digest of chunks": field("digest", 5),
    "a wrong upper half of it": field("upper digest", 5),
    "a wrong digest of what is seen": field("seen", 5),
    "a wrong digest of places": field("placed", 5),
    "a folder index outside": item("folder", 0, 99),
    "a folder index of 2^32": item("folder", 0, 2**32 - 1),
    "a chunk index outside": item("chunk", 0, 99),
    "a chunk index of 2^32": item("chunk", 0, 2**32 - 1),
    "a folder more": section("folders", lambda joined: joined + b"\0more"),
    "a folder less": section("folders", lambda joined: joined.rpartition(b"\0")[0]),
    "no folders": section("folders", lambda _: b""),
    "a name more": section("names", lambda joined: joined + b"\0more"),
    "a name less": section("names", lambda joined: joined.rpartition(b"\0")[0]),
    "no names": section("names", lambda _: b""),
    "a record less": section("records", lambda items: items[48:]),
    "half a record": section("records", lambda items: items[:-24]),
    "a record more": section("records", lambda items: items + items[:48]),
    "a row without a folder": section("folder", lambda items: items[4:]),
    "a row without a chunk": section("chunk", lambda items: items[4:]),
    "half a chunk ID": section("row_chunk", lambda items: items[:-8]),
    "no chunks of rows": section("row_chunk", lambda _: b""),
    "half an added chunk": section("added", lambda items: items[:-8]),
    "a tail without its row": section("tailed", lambda items: items[4:]),
    "a tail without its length": section("tail_bytes", lambda items: items[8:]),
    "tails out of order": tailed_in([1, 0, 2]),
    "a row with two tails": tailed_in([0, 0, 2]),
    "a tail of no row": item("tailed", 2, len(ROW)),
    "a tail of row 2^32": item("tailed", 2, 2**32 - 1),
    "tails that are longer than their bytes": section("tails", lambda tails: tails[:-1]),
    "tails that are shorter than their bytes": section("tails", lambda tails: tails + b"x"),
    "a tail of 2^64 bytes": item("tail_bytes", 0, 2**64 - 1),
    "tails whose lengths overflow": both(
        item("tail_bytes", 0, 2**63), item("tail_bytes", 1, 2**63 - 3)
    ),
    "a tail with the bytes of another": both(
        item("tail_bytes", 0, 1), item("tail_bytes", 1, 139), item("tail_bytes", 2, 0)
    ),
    "a link without its target": both(
        section("tailed", lambda items: items[:4]),
        section("tail_bytes", lambda items: items[:8]),
        section("tails", lambda tails: tails[: len(EXACT.rows.tails[min(EXACT.rows.tails)])]),
    ),
    "the tail of a file that is none of extents": target(BIG, b"x" * 127),
    "an extent less": target(BIG, EXACT.rows.tails[ROW[BIG]][:64]),
    "2^32 extents": record(BIG, "extents", 2**32 - 1),
    "three extents": record(BIG, "extents", 3),
    "an extent that starts elsewhere": extent(1, "start", 65536),
    "an extent that starts inside a page": extent(1, "start", 131073),
    "an empty extent": extent(1, "size", 0),
    "an extent of unknown codec": extent(0, "codec", 2),
    "an extent behind the end of its chunk": extent(0, "offset", 999_999),
    "an extent in an unknown chunk": extent(0, "chunk", np.void(chunk_id(5))),
    "an unknown kind": record(b"a", "kind", 4),
    "kind 255": record(b"a", "kind", 255),
    "an unknown codec": record(b"a", "codec", 2),
    "a file of 8 EiB": record(b"a", "size", 2**63),
    "a raw file that is larger than its stored bytes": record(b"a", "size", 6),
    "a file of which nothing is stored": record(b"a", "stored", 0),
    "a file in the preamble of its chunk": record(b"a", "offset", 95),
    "a file behind the end of its chunk": record(b"a", "offset", 1_000_005),
    "a file larger than its extents": record(BIG, "size", 2**40),
    "a file that became a tombstone": record(b"a", "kind", Kind.TOMBSTONE),
    "a file that became a folder": record(b"a", "kind", Kind.FOLDER),
    "a file that became a link": record(b"a", "kind", Kind.LINK),
    "a link that became a file": record(LINK, "kind", Kind.FILE),
    "a tombstone that became a folder": record(b"b", "kind", Kind.FOLDER),
    "another time": record(b"a", "mtime_ns", 1),
    "another mode": record(b"a", "mode", 0o600),
    "another checksum": record(b"a", "checksum", 1),
    "another place": record(b"a", "offset", 111),
    "a row in another chunk": item("chunk", ROW[b"a"], EXACT.rows.chunks.index(chunk_id(3))),
    "a row in a chunk that is not in the table": item("row_chunk", 1, np.void(chunk_id(5))),
    "another added chunk": item("added", 0, np.void(chunk_id(5)), "f0"),
    "an added chunk too few": section("added", lambda _: b""),
    "an added chunk too many": section(
        "added", lambda items: items + chunk_id(5) + struct.pack("<Q", 1000)
    ),
    "a chunk added twice": section("added", lambda items: items * 2),
    "a chunk added twice, and counted twice": both(
        section("added", lambda items: items * 2), field("chunks", 4)
    ),
    "a chunk added twice, with twice its digest": both(
        section("added", lambda items: items * 2),
        field("digest", (AFTER.digest + ID_11) % 2**64),
        field("upper digest", (AFTER.digest + ID_11) % 2**128 >> 64),
    ),
    "a row twice": both(named(b"b", b"a")),
    "a row of a folder twice": named(b"b", b"c"),
    "a row of the root twice": named(b"b", b""),
    "a row without a name": named(b"c/x", b""),
    "a name that is a dot": named(b"a", b"."),
    "a name that is two dots": named(LINK, b".."),
    "a name with a slash": named(LINK, b"x/y"),
    "a name that is too long": named(b"a", b"n" * 256),
    "a name with NUL": named(b"a", b"x\0y"),
    "another name": named(LINK, b"net"),
    "a folder with an empty component": named(LINK, b"new", folder=b"c//d"),
    "a folder that starts with a slash": named(LINK, b"new", folder=b"/c"),
    "a folder that ends with a slash": named(LINK, b"new", folder=b"c/"),
    "a folder with a dot": named(LINK, b"new", folder=b"c/./d"),
    "a folder with two dots": named(LINK, b"new", folder=b".."),
    "a folder with a component that is too long": named(LINK, b"new", folder=b"d" * 256),
    "a folder that is too long": named(LINK, b"new", folder=b"d/" * 131072 + b"e"),
    "a path that is too long": named(LINK, b"n" * 255, folder=LONG_FOLDER),
    "a section before its place": span("names", HEADER_BYTES, 3),
    "a section at 2^64": span("names", 2**64 - 64, 64),
    "a gap between sections": span("folder", HEADER_BYTES + 128, 4 * len(ROW)),
}  # fmt: skip

TRUNCATIONS: dict[str, Forge] = {
    f"{name} of {length} bytes": span(name, at, length)
    for name, at, size in (("folders", 512, 1), ("folder", 576, 4))
    for length in (2**20, 2**32, 2**63, 2**64 - size)
}
"""The lengths of sections that would end behind the file."""


@each_row("case", TRUNCATIONS)
def test_E2_a_section_that_ends_behind_the_file_is_refused(case: str) -> None:
    assert struct.unpack_from("<QQ", SMALL, TABLE_AT + 24)[0] == 576
    with pytest.raises((TruncatedError, CorruptError)):
        parse_delta(forged(TRUNCATIONS[case]))


def peak_bytes(action: Callable[[], object]) -> int:
    """The memory that an action takes at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@each_row("case", FORGERIES)
def test_E2_a_delta_that_contradicts_itself_or_its_base_is_refused(case: str) -> None:
    """No length or count in it makes the reader take memory for it."""
    data = forged(FORGERIES[case])

    def read() -> None:
        with pytest.raises(CorruptError):
            applied(BASE, [parse_delta(data)])

    assert peak_bytes(read) < (1 << 20) + 400 * len(data)


LIMITS: dict[str, Forge] = {
    "an empty target": target(LINK, b""),
    "a target with NUL": target(LINK, b"../a\0target"),
    "an added chunk shorter than its preamble": item("added", 0, 95, "f1"),
    "an added chunk of 64 GiB": item("added", 0, 1 << 36, "f1"),
    "a chunk of the base with another length": section(
        "added", lambda items: items + chunk_id(9) + struct.pack("<Q", 2_000_000)
    ),
    "files with more bytes than their chunk": both(
        record(b"c/l", "stored", 999_600), extent(0, "stored", 400)
    ),
    "files with more bytes than their chunk, with those of the base": both(
        record(b"a", "offset", 96),
        record(b"a", "stored", 999_910),
        record(b"a", "size", 999_910),
        named(b"c/x/shadows", b"other"),  # so that a file of 7 bytes stays in the chunk
    ),
}


def signed(data: bytes) -> bytes:
    """With the digest that the rows have, as somebody makes it who chooses rows."""
    try:
        found = parse_delta(data)
        parts = build_snapshot(
            BASE,
            found.rows,
            chunks_after(BASE, [found]),
            identity=found.header.identity,
            dataset=found.header.dataset,
            version=found.header.version,
            digest=found.header.digest,
        )
    except (FormatError, UsageError):
        return data
    forgery, digest = Forgery(data), parse_front(parts[0]).rows_digest
    assert digest is not None
    forgery.set_field("seen", digest.seen)
    forgery.set_field("placed", digest.placed)
    return forgery.data()


@each_row("case", LIMITS)
def test_E2_rows_beyond_the_limits_of_a_snapshot_are_refused(case: str) -> None:
    """Their digest is right. `apply_deltas` itself must find this: a reader trusts its result."""
    with pytest.raises(CorruptError):
        applied(BASE, [parse_delta(signed(forged(LIMITS[case])))])


EXTREMES = (
    *(0, 1, 2, 3, 63, 64, 95, 96, 255, 1009, 65535, 65536, 10**6, 2**20, 2**31, 2**32 - 1),
    *(2**32, 2**36, 2**40, 2**63 - 1, 2**63, 2**64 - 1),
)
COUNTED = ("version", "base", "chunks", "digest", "upper digest", "seen", "placed", "rows")


def drawn_forgery(data: st.DataObject) -> Forgery:
    forgery = Forgery()
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([*COUNTED, *DTYPES]))
        if name in FIELDS:
            was = forgery.field(name)
            value = data.draw(st.sampled_from([*EXTREMES, was - 1, was + 1]))
            forgery.set_field(name, value % 2**64)
            continue
        dtype = DTYPES[name]
        items = np.frombuffer(forgery.sections[name], dtype).copy()
        at = data.draw(st.integers(0, len(items) - 1))
        if name == "tails":  # of files; a reader does not compare a target with its checksum
            first = sum(map(len, tails_before(BIG)))
            at = first + data.draw(st.integers(0, 127))
        part = data.draw(st.sampled_from(dtype.names)) if dtype.names else ""
        if part == "f1":  # the digest of the chunks does not have it
            part = "f0"
        column = items[part] if part else items
        if column.dtype.kind == "V":
            column[at] = np.void(chunk_id(data.draw(st.integers(1, 12))))
        else:
            bits, was = 8 * column.dtype.itemsize, int(column[at])
            value = data.draw(st.sampled_from([*EXTREMES, was - 1, was + 1, was ^ 1 << 16]))
            column[at] = np.array(value % 2**bits, f"u{bits // 8}").astype(column.dtype)
        forgery.sections[name] = items.tobytes()
    return forgery


def tails_before(path: bytes) -> list[bytes]:
    tails = EXACT.rows.tails
    return [tails[i] for i in sorted(tails) if i < ROW[path]]


@examples(1000)
@given(st.data())
def test_E2_a_forged_delta_gives_the_right_version_or_none(data: st.DataObject) -> None:
    """What a delta says besides the digests of its rows and chunks changes nothing."""
    forgery = drawn_forgery(data)
    try:
        found = applied(BASE, [parse_delta(forgery.data())])
    except FormatError:
        return
    version = forgery.field("version")
    assert found == bytes(full(next_state(), CHUNKS, version).buffer)


@examples(1000)
@given(st.data())
def test_E2_an_accepted_delta_gives_a_snapshot_within_the_limits(data: st.DataObject) -> None:
    """Somebody who chooses rows can make their digest right, but makes no impossible snapshot."""
    try:
        found = applied(BASE, [parse_delta(signed(drawn_forgery(data).data()))])
    except FormatError:
        return
    Snapshot(found, verify=True)


Answer = object


def answers(found: Snapshot) -> list[Answer]:
    """What a snapshot answers to all questions, or the errors that are right."""
    asks: list[Callable[[int], object]] = [
        *(found.path, found.stat, found.size, found.name, found.parent, found.children),
        *(found.extents, found.link, lambda i: found.child(i, b"x")),
        lambda i: found.extents(i, 65_536, 65_537),
    ]
    asked = [*shown(next_state()), *shown(oracle.SMALL), b"none", b"c/none", b"a/b"]
    results: list[Answer] = [len(found), *map(found.lookup, asked)]
    for i in (*range(len(found)), -1, len(found)):
        for ask in asks:
            try:
                results.append(ask(i))
            except (CorruptError, IndexError, ValueError) as error:
                results.append(type(error))
    return [*results, *map(found.hash, range(len(found))), found.shadowing_folders().tolist()]


def check_layers(data: bytes) -> None:
    """Layers answer as the merge does. Until they merge, they may answer although the merge would
    be refused, but with no other error than CorruptError, and with no other chunk."""
    try:
        one = parse_delta(data)
        layered = LayeredSnapshot(BASE, [one])
        found = answers(layered)
        for path, (record, chunk, _) in rows_by_path(one.rows).items():
            at, extents = layered.lookup(path), np.frombuffer(record, RECORD)["extents"][0]
            if at >= 0 and extents == 1 and layered.stat(at).kind == Kind.FILE:
                assert {layered.chunk_ids[each.chunk] for each in layered.extents(at)} <= {chunk}
    except (CorruptError, TruncatedError):
        with pytest.raises(FormatError):
            applied(BASE, [parse_delta(data)])
        return
    try:
        merged = Snapshot(applied(BASE, [one]), verify=False)
    except CorruptError:
        with pytest.raises(CorruptError):
            layered.buffer  # noqa: B018  # it merges
    else:
        pairs = zip(found, answers(merged), strict=True)
        assert [pair for pair in pairs if pair[0] != pair[1]] == []
        assert bytes(layered.buffer) == bytes(merged.buffer)


@each_row("case", FORGERIES)
def test_E2_layers_refuse_what_the_merge_refuses(case: str) -> None:
    """The rows alone show it: they have impossible values, or not their digest."""
    with pytest.raises(CorruptError):
        LayeredSnapshot(BASE, [parse_delta(forged(FORGERIES[case]))])


@each_row(
    ("folder", "name"),
    [(b"c", b"."), (b"c", b".."), (b"c", b"n" * 256), (b"c/./d", b"new"), (b"..", b"new")],
)
def test_E2_layers_refuse_impossible_names_with_the_right_digest(
    folder: bytes, name: bytes
) -> None:
    """A program that lists or extracts such a name would leave its folder."""
    state = next_state()
    digest = RowsDigest(
        *oracle.rows_digest(
            {(folder + b"/" + name if path == LINK else path): own for path, own in state.items()}
        )
    )
    data = forged(
        named(LINK, name, folder=folder), field("seen", digest.seen), field("placed", digest.placed)
    )
    with pytest.raises(CorruptError):
        LayeredSnapshot(BASE, [parse_delta(data)])


@examples(1000)
@given(st.data(), st.booleans())
def test_E2_layers_of_a_forged_delta_answer_as_the_merge(
    data: st.DataObject, is_signed: bool
) -> None:
    made = drawn_forgery(data).data()
    check_layers(signed(made) if is_signed else made)


# Memory

FOLDER = LONG_FOLDER[:260_000].rstrip(b"/")
NAMES = 600


def one_deep_folder() -> tuple[Snapshot, list[Delta]]:
    """Two deltas with many names in one folder whose path is long."""
    first: Changes = {b"%b/%d" % (FOLDER, i): OwnEntry(Kind.FOLDER) for i in range(NAMES)}
    second: Changes = {b"%b/x%d" % (FOLDER, i): OwnEntry(Kind.FOLDER) for i in range(NAMES)}
    state: State = {path: own for path, own in (first | second).items() if own is not None}
    chunks = table({})
    base = full({}, chunks, 1)
    between = full({path: state[path] for path in first}, chunks, 2)
    after = full(state, chunks, 3)
    return base, [delta(base, first, between), delta(between, second, after)]


def test_E2_names_in_a_long_folder_take_memory_by_their_own_bytes() -> None:
    """Otherwise a delta of some megabytes would fill all memory."""
    base, deltas = one_deep_folder()
    files = [bytes_of(each) for each in deltas]
    limit = 64 * sum(map(len, files))

    def read() -> list[Delta]:
        return [parse_delta(file) for file in files]

    assert peak_bytes(read) < limit
    assert peak_bytes(lambda: applied(base, read())) < limit
    assert peak_bytes(lambda: LayeredSnapshot(base, read())) < limit
    assert peak_bytes(lambda: digest_at(base, read(), deltas[0].rows)) < limit


# The format


def golden_rows() -> Mapping[bytes, Row]:
    """Made from `CHANGES` alone."""
    expected = {}
    home = bytes(chunk_id(oracle.HOME))
    for path, own in CHANGES.items():
        record = np.zeros(1, RECORD)[0]
        record["place"], record["extents"] = ROW[path], 1
        kind = own.kind if own else Kind.TOMBSTONE
        record["kind"], record["mode"] = kind, own.mode if own else 0o644
        record["mtime_ns"] = own.mtime_ns if own else 1
        chunk, tail = home, b""
        if own is not None and own.kind == Kind.LINK:
            tail = own.target
            record["size"] = record["stored"] = len(tail)
        elif own is not None and own.parts:
            chunk = bytes(chunk_id(own.parts[0].chunk))
            record["size"] = sum(part.size for part in own.parts)
            if len(own.parts) > 1:
                record["extents"], tail = len(own.parts), tail_of(own.parts)
            else:
                for name in ("offset", "stored", "codec", "checksum"):
                    record[name] = getattr(own.parts[0], name)
        expected[path] = record.tobytes(), chunk, tail
    return expected


def test_the_golden_delta_still_reads_the_same() -> None:
    """It was written as `SMALL` here."""
    parsed = parse_delta(GOLDEN.read_bytes())
    header = parsed.header
    assert (header.identity, header.dataset) == (oracle.IDENTITY, "flowers")
    assert (header.version, header.base, header.rows) == (15, 12, len(CHANGES))
    assert (header.files, header.file_bytes) == (3, 5 + 131072 + 4)
    assert (header.chunks, header.digest) == (3, AFTER.digest)
    assert header.rows_digest == RowsDigest(*oracle.rows_digest(next_state()))
    assert rows_by_path(parsed.rows) == golden_rows()
    assert [*parsed.added] == [ChunkInfo(chunk_id(11), 1_000_011)]
    assert shown_by(Snapshot(applied(BASE, [parsed]))) == shown(next_state())


def test_the_delta_format_has_not_changed() -> None:
    """If this fails, the format has changed: raise its version and add another golden file."""
    golden = GOLDEN.read_bytes()
    assert bytes_of(EXACT) == golden
    assert bytes_of(parse_delta(golden)) == golden
