"""Which ranges of a chunk are merged into one read, by both functions that merge."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.fetching.coalesce import (
    MERGED_BYTES_MAX,
    MergedRange,
    ReadLimits,
    by_chunk,
    is_sparse,
    merge_ranges,
    merge_spans,
)
from diesel_fs.format.entries import ChunkId

from .chunk_ranges import records

PARTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 300)), max_size=40)


@given(PARTS, st.integers(0, 400))
def test_merged_ranges_have_each_part_and_no_wide_gap(
    spans: list[tuple[int, int]], gap: int
) -> None:
    chunk = bytes(range(16))
    wanted = by_chunk(records([(chunk, *span) for span in spans])).get(ChunkId(chunk), [])
    runs = merge_ranges(wanted, gap)
    places = [place for run in runs for _, _, place in run.parts]
    assert sorted(places) == list(range(len(spans)))
    for run in runs:
        assert all(run.start <= start and start + size <= run.end for start, size, _ in run.parts)
        asked = {at for start, size, _ in run.parts for at in range(start, start + size)}
        idle = 0
        for at in range(run.start, run.end):
            idle = 0 if at in asked else idle + 1
            assert idle <= gap
        assert {run.start, run.end - 1} <= asked
    for one, next_one in pairwise(runs):
        assert next_one.start > one.end + gap, "they belong together"


def test_little_memory_is_read_ahead_less() -> None:
    found = [ReadLimits.within(size).ahead_bytes for size in (0, 1 << 20, 40 << 20, 1 << 40)]
    assert found == [256 << 10, 256 << 10, 10 << 20, 32 << 20]


def test_merged_ranges_keep_their_limit() -> None:
    half = MERGED_BYTES_MAX // 2
    wanted = [(0, half, 0), (half, half, 1), (2 * half, 10, 2)]
    assert [(run.start, run.end) for run in merge_ranges(wanted, 1 << 20)] == [
        (0, 2 * half), (2 * half, 2 * half + 10),
    ]  # fmt: skip
    whole = [(0, 3 * half, 0), (5, 5, 1), (half, 2 * half, 2)]
    assert merge_ranges(whole, 0) == [MergedRange(0, 3 * half, whole)]


Extents = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 300)))
"""Extents one behind the other, as chunks have them, as (chunk, gap before it, size)."""

Row = tuple[int, int, int]
"""The chunk of an extent, its start and its end."""


def rows_of(extents: list[tuple[int, int, int]]) -> list[Row]:
    rows: list[Row] = []
    at = 0
    for chunk, before, size in sorted(extents, key=lambda each: each[0]):
        rows.append((chunk, at + before, at + before + size))
        at += before + size
    return rows


@given(extents=Extents, gap=st.integers(0, 400), span=st.integers(1, 2000))
def test_merged_spans_keep_to_a_chunk_a_gap_and_a_size(
    extents: list[tuple[int, int, int]], gap: int, span: int
) -> None:
    rows = rows_of(extents)
    chunks, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
    cuts = merge_spans(chunks, starts, ends, gap_bytes=gap, span_bytes=span)
    check_spans(rows, cuts, [gap] * len(rows), span)


@given(extents=Extents, gaps=st.data(), span=st.integers(1, 2000))
def test_each_extent_may_have_its_own_limit_for_the_gap_before_it(
    extents: list[tuple[int, int, int]], gaps: st.DataObject, span: int
) -> None:
    rows = rows_of(extents)
    most = gaps.draw(st.lists(st.integers(0, 400), min_size=len(rows), max_size=len(rows)))
    chunks, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
    limits = np.array(most, np.int64)
    check_spans(
        rows, merge_spans(chunks, starts, ends, gap_bytes=limits, span_bytes=span), most, span
    )


def check_spans(rows: list[Row], cuts: list[int], gaps: list[int], span: int) -> None:
    """`gaps` has the limit of the gap before each extent."""
    assert (cuts[0], cuts[-1]) == (0, len(rows))
    assert cuts == sorted(set(cuts))
    pieces = [rows[begin:end] for begin, end in pairwise(cuts)]
    for begin, piece in zip(cuts, pieces, strict=False):
        assert len({chunk for chunk, _, _ in piece}) == 1
        for number, (one, other) in enumerate(pairwise(piece), begin + 1):
            assert other[1] - one[2] <= gaps[number]
        assert len(piece) == 1 or piece[-1][2] - piece[0][1] <= span
    for begin, (before, after) in zip(cuts[1:], pairwise(pieces), strict=False):
        joined = after[0][2] - before[0][1] <= span
        near = before[0][0] == after[0][0] and after[0][1] - before[-1][2] <= gaps[begin]
        assert not (near and joined), "they belong together"


@given(Extents.filter(bool), st.integers(0, 400))
def test_a_chunk_is_sparse_if_little_of_it_is_wanted_and_its_gaps_are_wide(
    extents: list[tuple[int, int, int]], gap: int
) -> None:
    """Less than half of the bytes from its first to its last extent, with gaps of more than half
    of the limit on average."""
    rows = rows_of(extents)
    expected = []
    for chunk, _, _ in rows:
        own = [(start, end) for other, start, end in rows if other == chunk]
        wanted = sum(end - start for start, end in own)
        gaps = own[-1][1] - own[0][0] - wanted
        expected.append(gaps > wanted and gaps > (len(own) - 1) * gap / 2)
    chunks, starts, ends = np.array(rows, np.int64).T
    assert is_sparse(chunks, starts, ends, gap).tolist() == expected
