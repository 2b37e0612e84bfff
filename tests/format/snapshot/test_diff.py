"""`diff_snapshots` against plain dicts, and its time for a million entries."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.diff import diff_snapshots
from diesel_fs.format.snapshot.reader import ROOT_HASH, MergedFrom, Snapshot
from tests.format.snapshot.oracle import OwnEntry, Part, ShownEntry, build, rows_of, shown
from tests.format.snapshot.test_model import apply, batches, chunks_of

ENTRIES = 300_000
SECONDS_MAX = 10.0
"""With room for a busy machine; on an idle one it takes less than one second."""


def snapshot(state: dict[bytes, OwnEntry], version: int = 1) -> Snapshot:
    return Snapshot(build(None, state, chunks_of(state, 0), version=version))


def is_same(one: ShownEntry, other: ShownEntry) -> bool:
    if one.kind != other.kind or one.kind == Kind.FOLDER:
        return one.kind == other.kind
    content = [[(part.size, part.checksum) for part in each.parts] for each in (one, other)]
    return content[0] == content[1] and all(
        getattr(one, name) == getattr(other, name)
        for name in ("mode", "size", "mtime_ns", "target")
    )


def check(before: dict[bytes, OwnEntry], after: dict[bytes, OwnEntry]) -> None:
    old, new = snapshot(before), snapshot(after, 2)
    then, now = shown(before), shown(after)
    place = {path: i for i, path in enumerate(then)}
    found = diff_snapshots(old, new)
    changed_rows = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    for more in (set[bytes](), set(list(after)[:3])):  # rows may say what has not changed, too
        rows = rows_of({path: after.get(path) for path in changed_rows | more}, seed=len(more))
        new.merged_from = MergedFrom(1, rows)
        by_rows = diff_snapshots(old, new)
        assert by_rows.same_path.tolist() == found.same_path.tolist()
        assert by_rows.unchanged.tolist() == found.unchanged.tolist()
    if old.rows_digest != new.rows_digest:
        new.merged_from = MergedFrom(1, rows_of({}))  # from another state than `old`
        again = diff_snapshots(old, new)
        assert again.unchanged.tolist() == found.unchanged.tolist()
    same_path = [place[path] if path in then and then[path].kind == each.kind else -1
           for path, each in now.items()]  # fmt: skip
    # An entry whose kind has changed has no partner; then it has no entries below it, either.
    assert found.same_path.tolist() == same_path
    unchanged = [at if at >= 0 and is_same(then[path], now[path]) else -1
           for at, path in zip(same_path, now, strict=True)]  # fmt: skip
    assert found.unchanged.tolist() == unchanged
    kept = {path for path, at in zip(now, unchanged, strict=True) if at >= 0}
    assert [
        path for path, gone in zip(then, found.removed_or_changed, strict=True) if not gone
    ] == [path for path in then if path in kept]
    folders = {path for path, each in now.items() if each.kind == Kind.FOLDER and path in kept}
    changed = {path.rpartition(b"/")[0] for path in {*then, *now} - kept} & folders
    paths = list(now)
    assert {paths[i] for i in found.changed_folders} == changed
    touched = {path for path in folders if then[path] != now[path]}
    assert {paths[i] for i in found.folders_with_new_attributes} == touched


@given(first=batches, second=batches)
def test_a_diff_equals_that_of_plain_dicts(
    first: dict[bytes, OwnEntry | None], second: dict[bytes, OwnEntry | None]
) -> None:
    state: dict[bytes, OwnEntry] = {}
    apply(state, first)
    before = dict(state)
    apply(state, second)
    check(before, state)
    check(state, before)


CHANGES = st.sampled_from(["mode", "mtime_ns", "parts", "target", "chunk"])


@given(first=batches, changes=st.lists(st.tuples(st.integers(0, 99), CHANGES), max_size=6))
def test_each_attribute_alone_makes_an_entry_changed(
    first: dict[bytes, OwnEntry | None], changes: list[tuple[int, str]]
) -> None:
    """The place of its bytes does not count as an attribute: a purge changes it."""
    before: dict[bytes, OwnEntry] = {}
    apply(before, first)
    after = dict(before)
    for number, what in changes:
        if not after:
            break
        path = sorted(after)[number % len(after)]
        own = after[path]
        match what:
            case "mode":
                own = replace(own, mode=own.mode ^ 1)
            case "mtime_ns":
                own = replace(own, mtime_ns=own.mtime_ns ^ 1)
            case "target" if own.kind == Kind.LINK:
                own = replace(own, target=b"<" + own.target[1:])
            case "parts" if own.parts:
                last = replace(own.parts[-1], checksum=own.parts[-1].checksum ^ 1)
                own = replace(own, parts=(*own.parts[:-1], last))
            case "chunk" if own.parts:
                moved = [replace(each, chunk=5, offset=each.offset + 64) for each in own.parts]
                own = replace(own, parts=tuple(moved))
        after[path] = own
    check(before, after)


def test_paths_with_equal_fingerprints_are_distinguished() -> None:
    """Fingerprints have 32 bits, so some of these names share one."""
    names: dict[int, bytes] = {}
    pairs = []
    for number in range(400_000):
        name = b"%d" % number
        key = xxh3_64_intdigest(name, ROOT_HASH) >> 32
        if key in names:
            pairs += [names[key], name]
        names[key] = name
    assert len(pairs) >= 8
    content = [Part(3, 100, 1, 0, number, 1) for number in range(len(pairs))]
    before = {
        name: OwnEntry(Kind.FILE, parts=(content[at],))
        for at, name in enumerate(pairs)
    }  # fmt: skip
    after = {**before, pairs[0]: OwnEntry(Kind.FILE, mode=0), pairs[5]: OwnEntry(Kind.FOLDER)}
    del after[pairs[2]]
    check(before, after)
    check(after, before)
    check({name: before[name] for name in pairs[::2]}, {name: before[name] for name in pairs[1::2]})


@pytest.mark.deep
def test_a_million_entries_take_a_few_seconds() -> None:
    before = {
        b"%03d/%06d" % (number % 500, number): OwnEntry(
            Kind.FILE, parts=(Part(3, 100 + number, 1, 0, number, 1),)
        )
        for number in range(ENTRIES)
    }
    after = dict(before)
    for number in range(0, ENTRIES, 1000):
        del after[b"%03d/%06d" % (number % 500, number)]
        after[b"%03d/%06d-" % (number % 500, number)] = OwnEntry(Kind.FILE)
    old, new = snapshot(before), snapshot(after, 2)
    start_s = time.process_time()  # of this process alone
    found = diff_snapshots(old, new)
    assert time.process_time() - start_s < SECONDS_MAX
    assert int(np.count_nonzero(found.unchanged >= 0)) == ENTRIES - ENTRIES // 1000 + 501
    assert len(found.changed_folders) == 1
