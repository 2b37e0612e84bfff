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
    """A quarter of it, but enough for some files, and no more than 32 MiB."""
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


@given(
    extents=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 300))),
    gap=st.integers(0, 400),
    span=st.integers(1, 2000),
)
def test_merged_spans_keep_to_a_chunk_a_gap_and_a_size(
    extents: list[tuple[int, int, int]], gap: int, span: int
) -> None:
    """Extents one behind the other, as chunks have them, drawn as (chunk, gap before it, size)."""
    rows: list[tuple[int, int, int]] = []
    at = 0
    for chunk, before, size in sorted(extents, key=lambda each: each[0]):
        rows.append((chunk, at + before, at + before + size))
        at += before + size
    chunks, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
    cuts = merge_spans(chunks, starts, ends, gap_bytes=gap, span_bytes=span)
    assert (cuts[0], cuts[-1]) == (0, len(rows))
    assert cuts == sorted(set(cuts))
    pieces = [rows[begin:end] for begin, end in pairwise(cuts)]
    for piece in pieces:
        assert len({chunk for chunk, _, _ in piece}) == 1
        assert all(other[1] - one[2] <= gap for one, other in pairwise(piece))
        assert len(piece) == 1 or piece[-1][2] - piece[0][1] <= span
    for one, other in pairwise(pieces):
        joined = other[0][2] - one[0][1] <= span
        near = one[0][0] == other[0][0] and other[0][1] - one[-1][2] <= gap
        assert not (near and joined), "they belong together"
