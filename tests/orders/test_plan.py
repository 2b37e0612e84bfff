"""Plans: what is accepted, what is refused, and that a refusal changes nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from diesel_fs.errors import UsageError
from diesel_fs.orders import plan as plans
from diesel_fs.orders.plan import Epoch, Plan, Stream

FILES = np.array([False, True, True, True, False, True])


def epoch(number: int, *entries: int, exact: bool = True) -> Epoch:
    return Epoch(number, np.array(entries, np.int64), exact)


def plan(*epochs: Epoch) -> Plan:
    made = Plan(FILES)
    made.announce(Stream("a", epochs))
    return made


def orders(made: Plan, name: str = "a") -> list[list[int]]:
    return [each.entries.tolist() for each in made.stream(name).epochs]


def test_orders_may_omit_and_repeat_entries() -> None:
    assert orders(plan(epoch(0, 5, 1, 1), epoch(1))) == [[5, 1, 1], []]


def test_an_epoch_is_its_own_copy() -> None:
    given = np.array([1, 2, 3], np.uint32)
    made = Epoch(0, given)
    given[0] = 5
    assert made.entries.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        made.entries[0] = 5


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b", "a b", "ä", "a\n"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="stream name"):
        Stream(name, ())


@pytest.mark.parametrize("name", ["a", "rank:3.of_8-x", "x" * 64])
def test_good_names_are_taken(name: str) -> None:
    assert Stream(name, ()).name == name


@pytest.mark.parametrize("entries", [[6], [0], [1, 4], [-1], [1 << 32], [1.5], [[1]]], ids=str)
def test_entries_that_are_not_files_are_refused(entries: list[int]) -> None:
    made = plan(epoch(0, 1))
    with pytest.raises(UsageError):
        made.announce(Stream("b", (Epoch(0, np.array(entries)),)))
    with pytest.raises(UsageError):
        made.extend("a", [Epoch(1, np.array(entries))])
    with pytest.raises(UsageError):
        made.replace("a", Epoch(0, np.array(entries)))
    assert (list(made.streams), orders(made)) == (["a"], [[1]])


def test_epoch_numbers_must_rise() -> None:
    with pytest.raises(UsageError, match="rise"):
        Stream("a", (epoch(1), epoch(1)))
    with pytest.raises(UsageError, match="number"):
        epoch(-1)


def test_extending_appends_to_the_last_epoch_and_adds_more() -> None:
    made = plan(epoch(3, 1, 2))
    made.extend("a", [epoch(3, 5), epoch(4, 1, exact=False)])
    assert orders(made) == [[1, 2, 5], [1]]
    assert [each.exact for each in made.stream("a").epochs] == [True, False]
    with pytest.raises(UsageError):
        made.extend("a", [epoch(3, 5)])


def test_replacing_takes_the_rest_or_the_whole() -> None:
    made = plan(epoch(3, 1, 2, 3), epoch(4, 1, exact=False))
    made.replace("a", epoch(3, 5, 5), 1)
    made.replace("a", epoch(4, 2))
    assert orders(made) == [[1, 5, 5], [2]]
    assert made.stream("a").epoch(4).exact
    wrongs: list[Callable[[], object]] = [
        lambda: made.replace("a", epoch(5)),
        lambda: made.replace("a", epoch(3), 4),
    ]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            wrong()
    assert orders(made) == [[1, 5, 5], [2]]


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


@pytest.mark.parametrize("bounds", [[0], [2, 2], [3, 2], [4], [1, 2, 3, 4], [[1]], [0.5]])
def test_bad_bounds_are_refused(bounds: list[int]) -> None:
    with pytest.raises(UsageError, match="batch"):
        Epoch(0, np.array([1, 2, 3]), True, np.array(bounds))


def test_finished_epochs_and_withdrawn_streams_are_removed() -> None:
    made = plan(epoch(0, 1), epoch(1, 2))
    made.finish("a", 1)
    assert orders(made) == [[2]]
    made.withdraw("a")
    assert len(made) == 0
    wrongs: list[Callable[[], object]] = [
        lambda: made.withdraw("a"),
        lambda: made.extend("a", []),
    ]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="no stream"):
            wrong()


def test_streams_epochs_and_entries_keep_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Plan(FILES)
    for number in range(plans.STREAMS_MAX):
        made.announce(Stream(f"s{number}", ()))
    with pytest.raises(UsageError, match="at most 64"):
        made.announce(Stream("more", ()))
    made.announce(Stream("s3", (epoch(0, 1),)))  # again is no more
    with pytest.raises(UsageError, match="at most 8"):
        Stream("a", tuple(epoch(number) for number in range(9)))
    monkeypatch.setattr(plans, "EPOCH_ENTRIES_MAX", 2)
    with pytest.raises(UsageError, match="at most 2"):
        epoch(0, 1, 1, 1)
    monkeypatch.setattr(plans, "PLAN_ENTRIES_MAX", 2)
    with pytest.raises(UsageError, match="positions"):
        made.announce(Stream("s4", (epoch(0, 1, 1),)))
    assert made.stream("s4").epochs == ()
