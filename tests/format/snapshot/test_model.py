"""Snapshots against a plain dict: visible entries and their order; merges against full builds."""

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import NoSuchPath
from diesel_fs.format.entries import Kind, Stat
from diesel_fs.format.snapshot.reader import Snapshot
from tests.examples import examples

from . import oracle
from .oracle import OwnEntry, Part, build, depth, shadowed, shown, shown_by

CHUNKS = range(12)
HOME_PART = Part(oracle.HOME, 0, 0, 0, 0, 0)
names = st.sampled_from(
    [b"a", b"b", b"c", b"\xff\xfe", b"line\n", b"same-8-bytes", b"same-8-bytes."]
)
paths = st.lists(names, max_size=4).map(b"/".join)


def part(chunk: int, offset: int, stored: int, checksum: int, size: int, is_last: bool) -> Part:
    """An extent that a chunk can hold: raw (`size` is `stored`), or compressed."""
    if not is_last:
        size = (size // 65536 or 1) * 65536  # the next extent must be aligned
    return Part(chunk, offset, stored, int(size != stored), checksum, size)


def parts(is_last: bool) -> st.SearchStrategy[Part]:
    sizes = st.integers(1, 2**22)
    places = st.sampled_from(CHUNKS), st.integers(96, 900_000), st.integers(1, 999)
    return st.builds(part, *places, st.integers(0, 2**64 - 1), sizes, st.just(is_last))


contents = st.one_of(
    st.just(()),
    st.tuples(parts(True)),
    st.tuples(parts(False), parts(True)),
    st.tuples(parts(False), parts(False), parts(True)),
    st.tuples(parts(True).map(lambda one: replace(one, size=one.stored, codec=0))),
)
times = st.integers(-(2**63), 2**63 - 1)
modes = st.integers(0, 0o777)
targets = st.binary(min_size=1, max_size=9).map(lambda target: target.replace(b"\0", b"0"))
owns = st.one_of(
    st.builds(OwnEntry, st.just(Kind.FILE), modes, times, contents),
    st.builds(OwnEntry, st.just(Kind.LINK), modes, times, target=targets),
    st.builds(OwnEntry, st.just(Kind.FOLDER), modes, times),
)
batches = st.dictionaries(paths, st.one_of(st.none(), owns, owns), max_size=8)


def apply(state: dict[bytes, OwnEntry], changes: Mapping[bytes, OwnEntry | None]) -> None:
    for path, own in changes.items():
        if own is None:
            state.pop(path, None)
        else:
            state[path] = own


def chunks_of(state: Mapping[bytes, OwnEntry], extra: int) -> list[int]:
    table = sorted(
        oracle.chunks_in(state.values())
        | {oracle.HOME}
        | {number for number in CHUNKS if number & 3 == extra & 3}
    )
    random.Random(extra).shuffle(table)
    return table


def check(snapshot: Snapshot, state: Mapping[bytes, OwnEntry]) -> None:
    expected = shown(state)
    everything = list(expected)
    assert shown_by(snapshot) == expected
    assert [snapshot.path(i) for i in range(len(snapshot))] == everything
    assert snapshot.paths(range(len(snapshot))) == everything
    missing = [path + tail for path in everything for tail in (b"/", b"/no", b"no", b"/a/b/c")]
    missing += [b"/" + path for path in everything]
    missing = [path for path in missing if path not in expected]
    wanted = [*missing, *everything, *missing]
    answers = [everything.index(path) if path in expected else -1 for path in wanted]
    assert [snapshot.lookup(path) for path in wanted] == answers
    assert snapshot.lookup_many(wanted).tolist() == answers
    stats = snapshot.stat_many(everything)
    files = [i for i, each in enumerate(expected.values()) if each.kind == Kind.FILE]
    assert list(stats) == [snapshot.stat(i) for i in range(len(snapshot))]
    assert snapshot.files().tolist() == files
    chunks = [p.chunk for p in ([*expected[everything[i]].parts, HOME_PART][0] for i in files)]
    numbers = snapshot.chunk_of(files).tolist()
    assert [snapshot.chunk_ids[k] for k in numbers] == [oracle.chunk_id(k) for k in chunks]
    used = dict.fromkeys(snapshot.chunk_ids, 0)
    for part in (part for own in state.values() for part in own.parts):  # of shadowed files, too
        used[oracle.chunk_id(part.chunk)] += part.stored
    assert snapshot.used_bytes().tolist() == list(used.values())
    assert (snapshot.file_count, snapshot.entry_count) == (len(files), len(expected))
    assert snapshot.byte_count == sum(expected[everything[i]].size for i in files)
    assert [everything[i] for i in snapshot.shadowing_folders().tolist()] == shadowed(state)
    for i, path in enumerate(everything):
        check_family(snapshot, everything, i, path)


def check_family(snapshot: Snapshot, everything: list[bytes], i: int, path: bytes) -> None:
    inside = path + b"/" if path else b""
    below = [p for p in everything if p != path and p.startswith(inside)]
    children = [p for p in below if depth(p) == depth(path) + 1]
    assert [everything[k] for k in snapshot.children(i)] == children
    assert snapshot.names(snapshot.children(i)) == [p[len(inside) :] for p in children]
    assert [everything[k] for k in snapshot.walk(i).tolist()] == [path, *below]
    for child in children:
        k = snapshot.child(i, child[len(inside) :])
        assert everything[k] == child
        assert snapshot.parent(k) == i
    assert snapshot.child(i, b"") == snapshot.child(i, b"nobody") == -1


@examples(150)
@given(st.lists(st.tuples(batches, st.integers(0, 99)), min_size=1, max_size=5))
def test_a_merge_equals_the_dict_and_has_the_bytes_of_a_full_build(
    steps: list[tuple[dict[bytes, OwnEntry | None], int]],
) -> None:
    state: dict[bytes, OwnEntry] = {}
    previous: Snapshot | None = None
    for version, (changes, extra) in enumerate(steps):
        apply(state, changes)
        table = chunks_of(state, extra)
        merged = build(previous, changes, table, version=version, seed=extra)
        assert merged == build(None, state, sorted(table), version=version)
        previous = Snapshot(merged)
        check(previous, state)


def test_a_large_merge_has_the_bytes_of_a_full_build() -> None:
    """With runs of unchanged entries, folders of hundreds of entries, and names of all lengths."""
    rng = random.Random(5)
    pool = [
        b"/".join(rng.randbytes(rng.choice([1, 2, 9, 40])).hex().encode() for _ in range(size))
        for size in rng.choices([1, 2, 2, 2, 3], k=60)
    ]
    every = [
        rng.choice(pool) + b"/" + rng.randbytes(rng.randint(1, 12)).hex().encode()
        for _ in range(3000)
    ]
    state: dict[bytes, OwnEntry] = {}
    previous: Snapshot | None = None
    for version, size in enumerate([2000, 3, 500, 1, 900]):
        changes: dict[bytes, OwnEntry | None] = {}
        for path in rng.sample(every, size):
            kind = rng.choice([Kind.FILE, Kind.FILE, Kind.LINK, Kind.FOLDER])
            file = (Part(rng.randint(0, 11), 105, 6, 1, 7, 65536),) * rng.randint(0, 2)
            own = OwnEntry(kind, parts=file if kind == Kind.FILE else (), target=path[-3:])
            own = OwnEntry(kind, parts=own.parts, target=path[-3:] if kind == Kind.LINK else b"")
            changes[path] = None if rng.random() < 0.3 else own
        apply(state, changes)
        merged = build(previous, changes, list(CHUNKS), version=version, seed=version)
        assert merged == build(None, state, list(CHUNKS), version=version)
        previous = Snapshot(merged)
        assert shown_by(previous) == shown(state)
        wanted = [*every, *pool]
        rng.shuffle(wanted)
        expected = {path: i for i, path in enumerate(shown(state))}
        assert previous.lookup_many(wanted).tolist() == [expected.get(path, -1) for path in wanted]


def test_a_chunk_number_follows_its_chunk_when_the_table_changes() -> None:
    file = OwnEntry(Kind.FILE, parts=(Part(5, 102, 3, 0, 4, 3),))
    before = Snapshot(build(None, {b"f": file}, [2, 5]))
    after = Snapshot(build(before, {}, [9, 5, 1, 3, 4], version=2**63))
    assert (before.chunk_of([0, 1]).tolist(), after.chunk_of([0, 1]).tolist()) == ([-1, 1], [-1, 3])
    assert list(after.chunk_ids) == [oracle.chunk_id(number) for number in (1, 3, 4, 5, 9)]
    assert after.chunk_ids[-1] == after.chunk_ids[4] == after.chunk_ids[3:][1]
    assert after.chunk_sizes.tolist() == [1_000_000 + number for number in (1, 3, 4, 5, 9)]
    assert after.version == 2**63


def test_an_entry_takes_sixty_bytes_beside_its_name() -> None:
    state = {b"f%04d" % i: OwnEntry(Kind.FILE) for i in range(2000)}
    snapshot = Snapshot(build(None, state, [oracle.HOME]))
    columns = snapshot.columns
    beside = (columns.names, columns.targets, columns.chunk_id, columns.chunk_bytes)
    total = sum(each.nbytes for each in columns) - sum(each.nbytes for each in beside)
    assert 59 < total / snapshot.entry_count < 61


def test_missing_paths_and_bad_indices_are_named() -> None:
    snapshot = Snapshot(build(None, oracle.SMALL, [3, 9]))
    with pytest.raises(NoSuchPath, match="no such path: no\\\\n1"):
        snapshot.stat_many([b"a", b"no\n1", b"no2"])
    stats = snapshot.stat_many([b"a", b"no", b""], missing_ok=True)
    assert [stat.kind for stat in stats] == [Kind.FILE, Kind.TOMBSTONE, Kind.FOLDER]
    assert stats[1] == Stat(Kind.TOMBSTONE, 0, 0, 0)
    assert len(snapshot.stat_many([])) == len(snapshot.lookup_many([])) == 0
    for bad in (-1, len(snapshot)):
        for ask in (snapshot.name, snapshot.path, snapshot.stat, snapshot.children, snapshot.walk):
            with pytest.raises(IndexError):
                ask(bad)
        for wrong in ([0, bad], np.array([bad]), range(bad, bad + 1)):
            with pytest.raises(IndexError):
                snapshot.stat_many(wrong)
            with pytest.raises(IndexError):
                snapshot.chunk_of(wrong)
    with pytest.raises(ValueError, match="no link"):
        snapshot.link(0)


def test_stats_of_a_range_are_those_of_its_indices() -> None:
    snapshot = Snapshot(build(None, oracle.SMALL, [3, 9]))
    for span in (range(2, 7), range(6, 1, -2), range(3, 3)):
        expected = [snapshot.stat(i) for i in span]
        assert list(snapshot.stat_many(span)) == expected
        assert list(snapshot.stat_many(list(span))) == expected
        assert snapshot.names(span) == [snapshot.name(i) for i in span]
