"""Plans: which are accepted, which are refused, and that a refusal changes nothing."""

import numpy as np
import pytest

from diesel_fs.errors import UsageError
from diesel_fs.orders import plan as plans
from diesel_fs.orders.plan import Epoch, Stream, check_plan
from tests.rows import each_row

FILES = np.array([False, True, True, True, False, True])


def epoch(number: int, *entries: int, exact: bool = True) -> Epoch:
    return Epoch(number, np.array(entries, np.int64), exact)


def orders(stream: Stream) -> list[list[int]]:
    return [each.entries.tolist() for each in stream.epochs]


def test_an_epoch_is_its_own_copy() -> None:
    given = np.array([1, 2, 3], np.uint32)
    made = Epoch(0, given)
    given[0] = 5
    assert made.entries.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        made.entries[0] = 5


def test_names_of_streams() -> None:
    for name in ("a", "rank:3.of_8-x", "x" * 64):
        assert Stream(name, ()).name == name
    for name in ("", "x" * 65, "a/b", "a b", "ä", "a\n"):
        with pytest.raises(UsageError, match="stream name"):
            Stream(name, ())


def test_orders_may_omit_and_repeat_entries_but_have_nothing_but_files() -> None:
    stream = Stream("a", (epoch(0, 5, 1, 1), epoch(1)))
    check_plan([stream], stream.epochs, FILES)
    assert orders(stream) == [[5, 1, 1], []]
    for entries in ([6], [0], [1, 4], [-1], [1 << 32], [1.5], [[1]]):
        with pytest.raises(UsageError):
            check_plan([], [epoch(0, 1), Epoch(1, np.array(entries))], FILES)


def test_epoch_numbers_must_rise() -> None:
    with pytest.raises(UsageError, match="rise"):
        Stream("a", (epoch(1), epoch(1)))
    with pytest.raises(UsageError, match="number"):
        epoch(-1)


def test_extending_appends_to_the_last_epoch_and_adds_more() -> None:
    made = Stream("a", (epoch(3, 1, 2),)).extended([epoch(3, 5), epoch(4, 1, exact=False)])
    assert orders(made) == [[1, 2, 5], [1]]
    assert [each.exact for each in made.epochs] == [True, False]
    with pytest.raises(UsageError):
        made.extended([epoch(3, 5)])


def test_replacing_takes_the_remaining_or_all_entries() -> None:
    old = Stream("a", (epoch(3, 1, 2, 3), epoch(4, 1, exact=False)))
    made = old.replaced(epoch(3, 5, 5), 1).replaced(epoch(4, 2))
    assert orders(made) == [[1, 5, 5], [2]]
    assert made.epoch(4).exact
    for wrong, position in ((epoch(5), 0), (epoch(3), 4)):
        with pytest.raises(UsageError):
            made.replaced(wrong, position)


def test_bounds_follow_appended_and_replaced_entries() -> None:
    first = Epoch(0, np.array([1, 2, 3]), True, np.array([2, 3]))
    assert first.batch_entries_max == 2
    rest = Epoch(0, np.array([5, 5, 5]), True, np.array([3]))
    changed = first.replaced(2, rest)
    assert changed.bounds is not None
    assert changed.bounds.tolist() == [2, 5]
    longer = first.appended(rest)
    assert longer.bounds is not None
    assert longer.bounds.tolist() == [2, 3, 6]


@each_row("bounds", [[0], [2, 2], [3, 2], [4], [1, 2, 3, 4], [[1]], [0.5]])
def test_bad_bounds_are_refused(bounds: list[int]) -> None:
    with pytest.raises(UsageError, match="batch"):
        Epoch(0, np.array([1, 2, 3]), True, np.array(bounds))


def test_streams_epochs_and_entries_keep_their_limits() -> None:
    streams = [Stream(f"s{number}", ()) for number in range(plans.STREAMS_MAX)]
    check_plan(streams, [], FILES)
    with pytest.raises(UsageError, match="at most 64"):
        check_plan([*streams, Stream("more", ())], [], FILES)
    with pytest.raises(UsageError, match="at most 8"):
        Stream("a", tuple(epoch(number) for number in range(9)))
    with pytest.raises(UsageError, match=f"at most {plans.EPOCH_ENTRIES_MAX}"):
        Epoch(0, np.broadcast_to(np.uint32(1), plans.EPOCH_ENTRIES_MAX + 1))
    stream = Stream("a", (epoch(0, 1, 1), epoch(1, 1)))
    check_plan([stream], stream.epochs, FILES, entries_max=3)
    with pytest.raises(UsageError, match="3 positions"):
        check_plan([stream], stream.epochs, FILES, entries_max=2)
