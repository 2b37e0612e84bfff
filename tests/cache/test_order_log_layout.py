"""Where entries lie in an order log: against a layout that is made entry by entry."""

from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.order_logs.layout import (
    LogCut,
    LogIdentity,
    LogLayout,
    header_bytes,
    parse_header,
)
from diesel_fs.errors import FormatError

IDENTITY = LogIdentity(UUID(int=5), 7, 11)
SEGMENT = 64


Case = tuple[list[int], list[bool], list[int], list[int], int]
"""Sizes, which entries are logged, an order and arrivals with repetitions, and a limit."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 12))
    entry = st.integers(0, count - 1)
    return (
        draw(st.lists(st.integers(0, 100), min_size=count, max_size=count)),
        draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        draw(st.lists(entry, max_size=20)),
        draw(st.lists(entry, max_size=20)),
        draw(st.sampled_from([0, 5_000, 1 << 40])),
    )


def oracle(
    sizes: list[int], is_logged: list[bool], order: list[int], arrivals: list[int], limit: int
) -> list[tuple[int, list[int], list[int]]]:
    """For each segment: its start, its entries as they lie, and their starts."""
    segments: list[list[int]] = []
    behind = 0
    for entry in dict.fromkeys(each for each in order if is_logged[each]):
        while len(segments) <= behind // SEGMENT:
            segments.append([])
        segments[behind // SEGMENT].append(entry)
        behind += -(-sizes[entry] // 8) * 8
    first_arrival = {entry: at for at, entry in reversed([*enumerate(arrivals)])}
    found, start = [], 0
    for entries in segments:
        by_arrival = sorted(entries, key=lambda each: first_arrival.get(each, len(arrivals)))
        offsets, at = [], start + -(-(64 + 4 * len(entries) + 8) // 4096) * 4096
        for entry in by_arrival:
            offsets.append(at)
            at += -(-sizes[entry] // 8) * 8
        end = -(-at // 4096) * 4096 if entries else start
        if end > limit:
            break
        found.append((start, by_arrival, offsets))
        start = end
    return found


def laid_out(case: Case) -> tuple[LogCut, LogLayout]:
    sizes, is_logged, order, arrivals, limit = case
    cut = LogCut(
        np.array(order, np.uint32), np.array(sizes, np.uint64), np.array(is_logged), SEGMENT
    )
    return cut, LogLayout(cut, cut.by_arrival(np.array(arrivals, np.uint32)), limit)


@given(case=cases())
def test_entries_lie_as_the_format_says(case: Case) -> None:
    _, layout = laid_out(case)
    expected = oracle(*case)
    assert layout.segments == len(expected)
    assert layout.start.tolist() == [start for start, _, _ in expected]
    assert layout.entries.tolist() == [entry for _, entries, _ in expected for entry in entries]
    places = np.arange(len(layout.entries))
    assert layout.offset(places).tolist() == [at for _, _, offsets in expected for at in offsets]
    segment = [number for number, (_, entries, _) in enumerate(expected) for _ in entries]
    assert layout.segment_of(places).tolist() == segment
    place_of = {entry: place for place, entry in enumerate(layout.entries.tolist())}
    everything = np.arange(len(case[0]), dtype=np.uint32)
    assert layout.find(everything).tolist() == [
        place_of.get(entry, -1) for entry in everything.tolist()
    ]
    order = case[2]
    for number, (_, entries, _) in enumerate(expected):
        behind = int(layout.position_behind[number])
        assert all(order.index(entry) < behind for entry in entries)
        assert not entries or max(map(order.index, entries)) == behind - 1


@given(case=cases(), bit=st.integers(0, 8 * 64))
def test_a_header_lists_the_entries_of_its_segment(case: Case, bit: int) -> None:
    """And one of another log, of another segment, cut off or with a changed bit is none."""
    cut, layout = laid_out(case)
    found = {}
    for segment in range(layout.segments):
        header = layout.header(segment, IDENTITY)
        count = int(np.diff(layout.first)[segment])
        assert len(header) <= header_bytes(count)
        found[segment] = parse_header(header, segment, cut, IDENTITY)
        changed = bytearray(header)
        changed[bit % (8 * len(header)) // 8] ^= 1 << bit % 8
        for bad, number, log in (
            (bytes(changed), segment, IDENTITY),
            (header[: bit % len(header)], segment, IDENTITY),
            (header, segment + 1, IDENTITY),
            (header, segment, LogIdentity(UUID(int=6), 7, 11)),
            (header, segment, LogIdentity(UUID(int=5), 8, 11)),
            (header, segment, LogIdentity(UUID(int=5), 7, 12)),
        ):
            with pytest.raises(FormatError):
                parse_header(bad, number, cut, log)
    entries, right = cut.from_headers(found)
    assert LogLayout(cut, entries, case[4]).entries.tolist() == layout.entries.tolist()
    assert right == [each for each in found if len(found[each])]


def test_headers_with_other_entries_are_not_believed() -> None:
    cut = LogCut(np.arange(4, dtype=np.uint32), np.full(4, 32, np.uint64), np.ones(4, np.bool_),
                 SEGMENT)  # fmt: skip
    listed = {0: np.array([1, 0], np.uint32), 1: np.array([1, 2], np.uint32),
              70_000: np.array([3], np.uint32)}  # fmt: skip
    entries, right = cut.from_headers(listed)
    assert (entries.tolist(), right) == ([1, 0, 2, 3], [0])


def test_a_large_log_has_larger_units_and_segments() -> None:
    sizes = np.full(3_000, 1 << 30, np.uint64)
    cut = LogCut(np.arange(3_000, dtype=np.uint32), sizes, np.ones(3_000, np.bool_))
    assert (cut.unit, cut.segment_bytes) == (2048, 64 << 20)
    layout = LogLayout(cut, cut.entries, 1 << 62)
    assert layout.total_bytes > 3_000 << 30
    assert layout.offset(np.array([2_999]))[0] == layout.end[-1] - (1 << 30)
