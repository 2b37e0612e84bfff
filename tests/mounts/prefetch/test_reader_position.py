"""`ReaderPosition`: `low` and `high` of a reader, by its signs and its reports."""

import pytest

from diesel_fs.mounts.prefetch.streams.reader_position import (
    LAG_ENTRIES,
    LAG_ENTRIES_MAX,
    LAST_READS_S,
    SILENT_S,
    ReaderPosition,
)
from tests.rows import each_row

from .one_stream import FILES, order_of


def reader_of(*orders: list[int], lag: int = 0, tentative: bool = False) -> ReaderPosition:
    """A reader of these epochs, announced at 0 s, with memory for all."""
    order = order_of(*(orders or (list(range(FILES)),)), lag=lag, tentative=tentative)
    order.capacity = FILES
    return ReaderPosition(order, 0.0)


@each_row(
    ("lag", "assumed"), [(0, LAG_ENTRIES), (64, 512), (1_000, 1_000), (1 << 20, LAG_ENTRIES_MAX)]
)
def test_workers_read_as_far_apart_as_the_stream_says(lag: int, assumed: int) -> None:
    assert reader_of(lag=lag).lag == assumed


def test_a_sign_near_the_reader_is_believed_and_a_far_one_needs_others() -> None:
    reader = reader_of()
    assert reader.note_read(100, 1.0)
    assert (reader.high, reader.last_sign_s) == (101, 1.0)
    assert not reader.note_read(10_000, 2.0)
    assert not reader.note_read(10_010, 2.0)
    assert (reader.high, reader.last_sign_s) == (101, 1.0)
    assert reader.note_read(10_005, 3.0)
    assert (reader.high, reader.last_sign_s) == (10_011, 3.0)


def test_signs_spread_over_the_order_are_not_believed() -> None:
    reader = reader_of()
    for position in range(5_000, FILES, 5_000):
        assert not reader.note_read(position, 1.0), position
    assert reader.high == 0


def test_a_tentative_stream_is_followed_after_three_reads() -> None:
    reader = reader_of(tentative=True)
    assert not reader.note_read(0, 1.0)
    assert not reader.note_read(1, 1.0)
    assert reader.tentative
    assert reader.note_read(2, 1.0)
    assert not reader.tentative


def test_low_passes_a_marker_when_it_is_opened_or_far_behind() -> None:
    reader = reader_of(lag=512)
    reader.note_open(256, 1.0)
    assert (reader.low, reader.high) == (0, 257), "the first marker may still be read"
    reader.note_open(0, 1.0)
    assert reader.low == 257
    reader.note_read(700, 1.1)
    assert (reader.low, reader.high) == (257, 701), "the marker at 512 may still be read"
    reader.note_read(512 + 511, 1.2)
    assert reader.low == 513


def test_an_epoch_begins_when_the_one_before_has_been_read() -> None:
    reader = reader_of([1, 2, 3], [4, 5, 6], lag=512)
    reader.note_read(3, 1.0)
    assert (reader.low, reader.high) == (4, 4)


def test_a_second_open_of_a_marker_is_no_sign() -> None:
    """It may be another program's."""
    reader = reader_of()
    reader.note_open(256, 1.0)
    reader.note_open(256, 5.0)
    assert reader.last_sign_s == 1.0


def test_the_rate_follows_the_signs() -> None:
    reader = reader_of()
    assert reader.rate == 0
    reader.note_read(99, 1.0)
    reader.note_read(199, 1.05)  # too soon
    reader.note_read(299, 1.2)
    assert reader.rate == pytest.approx(200 / 0.2)
    reader.move_to(50, 1.3)
    reader.move_to(150, 2.3)
    assert reader.rate == pytest.approx(0.7 * 1_000 + 0.3 * 100)


def test_a_reported_position_counts_in_both_directions() -> None:
    reader = reader_of()
    reader.move_to(5_000, 1.0)
    assert (reader.low, reader.high) == (5_000, 5_000)
    reader.move_to(300, 2.0)
    assert (reader.low, reader.high, reader.last_sign_s) == (300, 300, 2.0)


def test_the_loop_of_a_program_is_behind_its_workers() -> None:
    """A report may be a little old, so it may be farther behind than the workers are apart."""
    reader = reader_of(lag=512)
    for position in range(4, 2_000, 8):
        reader.note_read(position, 1.0)
    assert reader.has_workers_ahead(1_700, floor=0)
    assert reader.has_workers_ahead(1_200, floor=1_400)
    assert not reader.has_workers_ahead(800, floor=0), "no worker reads so far ahead"
    reader.note_loop(1_700, 1.1)
    assert (reader.low, reader.high) == (1_700, 1_997)
    unknown = reader_of(lag=0)
    unknown.note_read(300, 1.0)
    assert not unknown.has_workers_ahead(200, floor=201)


def test_three_late_reads_near_each_other_show_a_worker() -> None:
    reader = reader_of()
    assert reader.late_reads_near(5_000) == []
    assert reader.late_reads_near(900) == []
    assert reader.late_reads_near(1_000) == []
    assert reader.late_reads_near(1_100) == [900, 1_000, 1_100]


def test_a_changed_order_is_unread_behind_the_change() -> None:
    reader = reader_of()
    reader.move_to(5_000, 1.0)
    reader.note_replaced(6_000, floor=4_000)
    assert (reader.low, reader.high) == (5_000, 5_000)
    reader.note_replaced(4_500, floor=4_000)
    assert (reader.low, reader.high) == (4_500, 4_500)
    reader.note_replaced(100, floor=4_000)
    assert (reader.low, reader.high) == (100, 100)


def test_a_silent_reader_is_not_running() -> None:
    reader = reader_of([1, 2, 3, 4])
    reader.note_read(0, 1.0)
    assert reader.is_running(SILENT_S)
    assert not reader.is_running(1.0 + SILENT_S)
    reader = reader_of(list(range(600)), lag=512)
    reader.note_read(300, 1.0)
    reader.note_read(599, 1.0)  # its last file; others may read the rest
    assert reader.is_running(LAST_READS_S)
    assert not reader.is_running(1.0 + LAST_READS_S)
    assert not reader_of(tentative=True).is_running(0.0)
