"""`StagingArea`: which pages of the content file are pushed, and not settled."""

import numpy as np

from diesel_fs.format.image import BLOCK_BYTES
from diesel_fs.mounts.prefetch.pages.advice_process import PART, Parts
from diesel_fs.mounts.prefetch.pages.staging_area import (
    CONTENT,
    Staged,
    StagingArea,
    content_ranges,
    joined,
)

SIZE = 10_000  # three blocks
FIRST_BLOCK = np.array([3, 0, 9, 12, 6], np.uint32)  # by entry; there is a gap nowhere


def empty() -> StagingArea:
    return StagingArea(FIRST_BLOCK, np.full(len(FIRST_BLOCK), SIZE, np.uint64))


def staged(area: StagingArea, *entries: int) -> Staged:
    """Whole files that were pushed, the newest in the staging area."""
    some = np.array(entries, np.uint32)
    parts = np.zeros(len(some), PART)
    parts["entry"], parts["size"] = some, SIZE
    made = Staged(parts, area.ranges_of(some))
    area.add(made)
    return made


def blocks(ranges: Parts) -> list[tuple[int, int]]:
    """The first block of each range, and the block behind it."""
    assert (ranges["entry"] == CONTENT).all()
    starts = (ranges["start"] // BLOCK_BYTES).tolist()
    sizes = (ranges["size"] // BLOCK_BYTES).tolist()
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def test_neighbours_are_one_range() -> None:
    area = empty()
    assert blocks(area.ranges_of(np.array([2, 0, 1], np.uint32))) == [(0, 6), (9, 12)]
    assert blocks(area.ranges_of(np.array([], np.uint32))) == []
    begins, ends = np.array([0, 4, 8, 20]), np.array([4, 8, 12, 24])
    joined_begins, joined_ends, firsts = joined(begins, ends)
    assert joined_begins.tolist() == [0, 20]
    assert joined_ends.tolist() == [12, 24]
    assert firsts.tolist() == [0, 3]
    assert content_ranges(joined_begins, joined_ends)["size"].tolist() == [12, 4]


def test_pages_are_counted_in_each_part_of_a_file() -> None:
    area = empty()
    staged(area, 0, 1)
    part = np.array([(2, 0, BLOCK_BYTES), (2, BLOCK_BYTES, 1)], PART)
    area.add(Staged(part, area.ranges_of(np.array([2], np.uint32))))
    assert area.pages.tolist() == [3, 3, 2, 0, 0]
    assert area.bytes == 8 * BLOCK_BYTES
    area.remove(part[1:])
    assert (area.pages[2], area.bytes) == (1, 7 * BLOCK_BYTES)
    area.remove(part)  # one of the two has left before
    assert (area.pages[2], area.bytes) == (0, 6 * BLOCK_BYTES)


def test_dropped_files_leave_the_staging_area() -> None:
    area = empty()
    first, second = staged(area, 0, 1), staged(area, 2)
    dropped = area.drop(area.staged(np.array([0, 1, 3], np.uint32)))
    assert dropped.parts["entry"].tolist() == [0, 1]
    assert blocks(dropped.ranges) == blocks(first.ranges) == [(0, 6)]
    assert area.bytes == 3 * BLOCK_BYTES
    area.skip_dropped()
    assert list(area.queue) == [second]


def test_files_are_settled_when_the_process_has_done_its_work() -> None:
    area = empty()
    first, second = staged(area, 0, 1), staged(area, 1, 4)
    for piece, each in ((2, first), (5, second)):
        area.remove(each.parts)
        area.settle(each, piece)
    area.note_settled(1)
    assert area.is_settling.tolist() == [True, True, False, False, True]
    assert [blocks(each) for each in area.ranges()] == [[], [(0, 6)], [(0, 3), (6, 9)]]
    area.note_settled(2)
    assert area.is_settling.tolist() == [False, True, False, False, True], "another part of 1"
    area.note_settled(5)
    assert not area.is_settling.any()
