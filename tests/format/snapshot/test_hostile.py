"""FAULTS E1 and E2: any bytes are a snapshot that can be read completely, or one FormatError."""

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import (
    CorruptError,
    DieselError,
    ForeignError,
    FormatError,
    NewerVersionError,
    TruncatedError,
    UsageError,
)
from diesel_fs.format.entries import PATH_BYTES_MAX, Kind
from diesel_fs.format.snapshot import layout as layout
from diesel_fs.format.snapshot.layout import SnapshotColumns
from diesel_fs.format.snapshot.reader import Snapshot
from tests.examples import examples
from tests.rows import each_row

from . import oracle
from .oracle import OwnEntry, build, shown, shown_by

SMALL = build(None, oracle.SMALL, [3, 9])
TABLE_AT, SECTIONS, HEADER_BYTES = 160, 18, 640


def seal(data: bytearray) -> bytes:
    """Make all checksums right, as an attacker can."""
    for at in range(TABLE_AT, TABLE_AT + SECTIONS * 24, 24):
        offset, length = struct.unpack_from("<QQ", data, at)
        body = data[offset : offset + length]
        struct.pack_into("<Q", data, at + 16, xxhash.xxh3_64_intdigest(body))
    head = xxhash.xxh3_64_intdigest(data[: HEADER_BYTES - 8])
    struct.pack_into("<Q", data, HEADER_BYTES - 8, head)
    return bytes(data)


def test_the_small_snapshot_is_valid() -> None:
    assert seal(bytearray(SMALL)) == SMALL
    assert shown_by(Snapshot(SMALL)) == shown(oracle.SMALL)
    assert shown_by(Snapshot(SMALL, verify=False)) == shown(oracle.SMALL)


@each_row("verify", [True, False])
def test_E1_truncated_at_any_length_or_any_bit_flipped(verify: bool) -> None:
    for length in range(len(SMALL)):
        with pytest.raises(TruncatedError):
            Snapshot(SMALL[:length], verify=verify)
    data = bytearray(SMALL)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            Snapshot(data, verify=verify)
        data[bit // 8] ^= 1 << bit % 8


@each_row(
    ("data", "error"),
    [
        (b"", TruncatedError),
        (SMALL[:3], TruncatedError),
        (b"\x7fELF" + bytes(2000), ForeignError),
        (b'{"snapshot": 1}', ForeignError),
        (bytes(5000), ForeignError),
        (SMALL + b"\0", CorruptError),
        (SMALL[:8] + b"\3" + SMALL[9:], NewerVersionError),
        (seal(bytearray(SMALL[:12] + b"\1" + SMALL[13:])), NewerVersionError),
        (seal(bytearray(SMALL[:8] + b"\0" + SMALL[9:])), CorruptError),
    ],
)
def test_E1_other_bytes_have_the_right_error(data: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error) as caught:
        Snapshot(data)
    assert error is NewerVersionError or "save-meta" in caught.value.advice


Forge = Callable[[SnapshotColumns], SnapshotColumns]


def put(name: str, at: int, value: int, part: str = "") -> Forge:
    def forge(columns: SnapshotColumns) -> SnapshotColumns:
        array = columns._asdict()[name].copy()
        (array[part] if part else array)[at] = value
        return columns._replace(**{name: array})

    return forge


def entry(path: bytes) -> int:
    return list(shown(oracle.SMALL)).index(path)


A, B, C, N = entry(b"a"), entry(b"b"), entry(b"c"), entry(b"n" * 255)
BIG, LINK, X, UNDER = (entry(p) for p in (b"c/\xff\n", b"c/link", b"c/x", b"c/x/shadows"))
KIND = 1 << layout.KIND_SHIFT

FORGERIES: dict[str, Forge] = {
    "a parent behind its child": put("parent", A, C),
    "a folder inside itself": put("parent", C, C),
    "a root with a parent": put("parent", 0, 1),
    "a parent outside": put("parent", A, 99),
    "a name that starts behind the end": put("name_start", A + 1, 10**6),
    "a name that ends before it starts": put("name_start", B, 0),
    "a name too long": put("name_start", N + 1, 2**63),
    "a name with a slash": put("names", 0, ord("/")),
    "a name with NUL": put("names", 0, 0),
    "a name that is a dot": put("names", 0, ord(".")),
    "names out of order": put("names", 0, ord("z")),
    "the same name twice": put("names", 1, ord("a")),
    "bytes in the padding of names": put("names", -1, 1),
    "an unknown kind": put("flags", A, 3 * KIND),
    "an unknown flag": put("flags", A, 1 << 31),
    "an unknown codec": put("flags", A, 2 << layout.CODEC_SHIFT),
    "an implicit file": put("flags", A, layout.IMPLICIT),
    "an implicit folder without children": put("flags", B, layout.IMPLICIT_FOLDER),
    "a folder that became a file": put("flags", C, 0),
    "a file that became a folder": put("flags", A, Kind.FOLDER * KIND),
    "a link that became a file": put("flags", LINK, 0),
    "a file that became a link": put("flags", A, Kind.LINK * KIND),
    "a root that is a file": put("flags", 0, 0),
    "one extent as many": put("flags", A, layout.MANY_EXTENTS),
    "many extents as one": put("flags", BIG, 0),
    "a folder with a size": put("size", B, 1),
    "a file of 8 EiB": put("size", A, 2**63),
    "a link whose size is not its target's": put("size", LINK, 99),
    "a file larger than its extents": put("size", BIG, 10),
    "more children than entries": put("offset", C, 99),
    "no children where there are": put("offset", 0, 0),
    "children that start elsewhere": put("chunk", C, 1),
    "a chunk outside": put("chunk", A, 2),
    "a shadowed file in a chunk outside": put("shadowed", 1, 2, "chunk"),
    "a target outside": put("chunk", LINK, 7),
    "a link with a place": put("offset", LINK, 1),
    "extents outside": put("chunk", BIG, 1),
    "more extents than there are": put("offset", BIG, 3),
    "an extent in a chunk outside": put("extents", 0, 2, "chunk"),
    "an extent of unknown codec": put("extents", 0, 2, "codec"),
    "an extent that starts elsewhere": put("extents", 1, 4, "start"),
    "an empty extent": put("extents", 1, 0, "size"),
    "a fingerprint out of order": put("fingerprint", 0, 2**32 - 1),
    "an entry indexed twice": lambda c: put("slot", 0, int(c.slot[1]))(c),
    "an index entry outside": put("slot", 0, 99),
    "the root in the index": put("slot", 0, 0),
    "targets that overlap": put("target_start", 1, 99),
    "targets that do not start at 0": put("target_start", 0, 1),
    "chunks out of order": put("chunk_id", 0, 255),
    "a chunk of 64 GiB": put("chunk_bytes", 0, 2**36),
    "a chunk shorter than its preamble": put("chunk_bytes", 0, 95),
    "a raw file that is larger than its stored bytes": put("shadowed", 1, 5, "size"),
    "a raw file of which less is stored": put("stored", UNDER, 6),
    "a compressed file of more than it can be": put("size", A, 2**36),
    "a file with a size of which nothing is stored": put("stored", A, 0),
    "a file of which more is stored than its chunk has": put("stored", A, 2**32 - 1),
    "a file in the preamble of its chunk": put("offset", A, 95),
    "a file behind the end of its chunk": put("offset", A, 1_000_000),
    "an extent behind the end of its chunk": put("extents", 0, 2**32 - 1, "offset"),
    "an extent of more than it can be": put("extents", 1, 2**36, "size"),
    "an extent that starts inside a page": put("extents", 1, 65535, "start"),
    "a target with a NUL": put("targets", 0, 0),
    "a shadowed entry outside": put("shadowed", 1, 99, "entry"),
    "a shadowed entry without a folder at its path": put("shadowed", 0, A, "entry"),
    "shadowed entries out of order": put("shadowed", 0, X, "entry"),
    "a shadowed folder": put("shadowed", 0, Kind.FOLDER * KIND, "flags"),
    "a shadowed entry with a spare": put("shadowed", 0, 1, "spare"),
}


def forged_from(columns: SnapshotColumns) -> bytes:
    header = layout.header_of(columns, oracle.IDENTITY, "flowers", 1, 0, layout.NO_ROWS)
    return b"".join(layout.write(header, columns))


@each_row("case", FORGERIES)
def test_E2_contradicting_columns_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real batches of the check are larger than any test's dataset."""
    good = Snapshot(SMALL)
    forged = FORGERIES[case](good.columns)
    for file in (b"".join(layout.write(good.header, forged)), forged_from(forged)):
        with pytest.raises(CorruptError):
            Snapshot(file)
    for items in (1, 2, 5):
        monkeypatch.setattr(layout, "_BLOCK", items)
        layout.check(good.header, good.columns)
        with pytest.raises(CorruptError):
            layout.check(good.header, forged)


EXTREMES = (
    *(0, 1, 2, 95, 96, 97, 255, 1009, 65535, 65536, 10**6, 2**20, 2**22, 2**31, 2**32 - 1),
    *(2**32, 2**36, 2**40, 2**63 - 1, 2**63, 2**64 - 1),
)


def drawn_columns(data: st.DataObject) -> SnapshotColumns:
    columns = Snapshot(SMALL).columns
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(SnapshotColumns._fields))
        array = getattr(columns, name).copy()
        field = array[data.draw(st.sampled_from(array.dtype.names))] if array.dtype.names else array
        at = data.draw(st.integers(0, len(array) - 1))
        bits, was = 8 * field.dtype.itemsize, int(field[at])
        value = data.draw(st.sampled_from([*EXTREMES, was - 1, was + 1, was ^ 1 << 16]))
        field[at] = np.array(value % 2**bits, f"u{bits // 8}").astype(field.dtype)
        columns = columns._replace(**{name: array})
    return columns


@examples(1000)
@given(st.data())
def test_E2_an_accepted_snapshot_keeps_the_limits_of_the_format(data: st.DataObject) -> None:
    columns = drawn_columns(data)
    try:
        snapshot = Snapshot(forged_from(columns))
    except (FormatError, struct.error):  # the sum of sizes exceeds 64 bits
        return
    used = dict.fromkeys(range(snapshot.chunk_count), 96)
    for i in range(len(snapshot)):
        stat, end = snapshot.stat(i), 0
        for chunk, offset, stored, codec, _, start, size in snapshot.extents(i):
            assert 96 <= offset < offset + stored <= snapshot.chunk_sizes[chunk] <= 2**32
            assert size == stored if not codec else 0 < size <= 16 * stored + 2**22
            assert start == end
            assert start % 65536 == 0
            end += size
            used[chunk] += stored
        if stat.kind == Kind.LINK:
            assert snapshot.link(i)
            assert b"\0" not in snapshot.link(i)
            assert len(snapshot.link(i)) == stat.size
        else:
            assert stat.size == end
        assert stat.mode <= 0o777
    assert all(used[chunk] <= size for chunk, size in enumerate(snapshot.chunk_sizes.tolist()))


@each_row("name", SnapshotColumns._fields)
def test_E2_a_section_of_a_wrong_length_is_refused(name: str) -> None:
    good = Snapshot(SMALL)
    column = good.columns._asdict()[name]
    for wrong in (column[1:], np.append(column, column[:1]), column[:0]):
        for verify in (True, False) if name not in _OWN_LENGTHS else (True,):
            forged = b"".join(layout.write(good.header, good.columns._replace(**{name: wrong})))
            with pytest.raises(CorruptError):
                Snapshot(forged, verify=verify)


_OWN_LENGTHS = ("names", "target_start", "targets", "extents", "shadowed")


def test_E2_wrong_counts_are_refused() -> None:
    good = Snapshot(SMALL)
    for count in ("entries", "files", "folders", "file_bytes", "chunks"):
        header = replace(good.header, **{count: getattr(good.header, count) + 1})
        with pytest.raises(CorruptError):
            Snapshot(b"".join(layout.write(header, good.columns)))


CHAIN = b"/".join([b"d" * 200] * 1304)
ROOM = PATH_BYTES_MAX - len(CHAIN)


def test_E2_a_path_that_is_too_long_is_refused() -> None:
    """Both `build_snapshot` and the reader of another program's file refuse it."""
    longest = CHAIN + b"d" * ROOM
    deep = Snapshot(build(None, {longest: OwnEntry(Kind.FILE)}, [3]))
    last = len(deep) - 1
    assert deep.path(last) == longest
    assert deep.lookup(longest) == deep.lookup_many([longest])[0] == last
    with pytest.raises(UsageError, match="262144 bytes"):
        build(None, {longest + b"d": OwnEntry(Kind.FILE)}, [3])
    columns = put("name_start", last + 1, int(deep.columns.name_start[-1]) + 1)(deep.columns)
    columns = columns._replace(names=np.append(put("names", -8, 100)(columns).names, np.uint8(0)))
    with pytest.raises(CorruptError, match="path is too long"):
        Snapshot(b"".join(layout.write(deep.header, columns)))


@examples(400)
@given(st.data())
def test_E2_any_sealed_bytes_can_be_read_in_full_or_are_refused(data: st.DataObject) -> None:
    """An attacker can compute checksums."""
    forged = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(TABLE_AT, len(forged) - 1))
        forged[at] = data.draw(st.sampled_from([0, 1, 2, 255, forged[at] ^ 1, forged[at] ^ 128]))
    try:
        sealed = seal(forged)
    except struct.error:  # the section table points outside the file
        return
    try:
        snapshot = Snapshot(sealed)
    except FormatError:
        pass
    else:
        everything = list(shown_by(snapshot))
        assert len(set(everything)) == len(snapshot) == len(snapshot.walk(0))
        assert snapshot.paths(snapshot.walk(0)) == everything
        with suppress(CorruptError):  # the bytes name chunks that the dataset lacks
            assert build(snapshot, {b"new": OwnEntry(Kind.FILE)}, [3, 9])
    read_unverified(sealed)


def read_unverified(data: bytes) -> None:
    """Read as a private copy is read: errors are allowed, but neither a crash nor an endless
    loop."""
    try:
        snapshot = Snapshot(data, verify=False)
        snapshot.lookup_many([b"a", b"c/x/shadows", b"none"])
    except (DieselError, IndexError):
        return
    asks: list[Callable[[int], object]] = [
        *(snapshot.path, snapshot.stat, snapshot.extents, snapshot.children, snapshot.hash),
        *(snapshot.link, snapshot.walk, lambda i: snapshot.child(i, b"x")),
    ]
    for i in range(len(snapshot)):
        for ask in asks:
            try:
                ask(i)
            except (DieselError, IndexError, ValueError):
                continue


class Counting(Snapshot):
    compared = 0

    def name(self, i: int) -> bytes:
        self.compared += 1
        return super().name(i)


def test_E2_forced_collisions_leave_lookups_logarithmic() -> None:
    """All fingerprints are equal, as if the names had been chosen to collide."""
    count = 100_000
    state = {b"d/%05d" % i: OwnEntry(Kind.FILE) for i in range(count)}
    good = Snapshot(build(None, state, [3]))
    columns = good.columns._replace(
        fingerprint=np.full(count + 1, 7, np.uint32), slot=np.arange(1, count + 2, dtype=np.uint32)
    )
    forged = Counting(b"".join(layout.write(good.header, columns)))
    seven = 7 << 32 | 1
    for i in (0, 1, 5000, count - 1):
        assert forged._find(1, seven, b"%05d" % i) == i + 2
    assert forged._find(1, seven, b"%05d" % count) == -1
    hashes = np.full(3, seven, np.uint64)
    found = forged.find_many(np.ones(3, np.int64), hashes, [b"00000", b"nobody", b"99999"])
    assert found.tolist() == [2, -1, count + 1]
    assert forged.compared < 7 * (16 + 20)
