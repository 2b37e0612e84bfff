"""`ImportanceHeap` against a sorted list: which entries go first, while importances change and a
new table is built in the shadow."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diesel_fs.cache.policies import importance
from diesel_fs.cache.policies.importance import (
    JOBS_MAX,
    SILENT_TELLS,
    ImportanceHeap,
    JobImportances,
)
from diesel_fs.errors import UsageError
from tests.examples import examples
from tests.rows import each_row

COUNT = 40
ENTRIES = st.lists(st.integers(0, COUNT - 1), unique=True, max_size=COUNT)
NUMBERS = st.sampled_from([0.0, 1e-30, 0.25, 0.5, 0.52, 1.0, 3e38]) | st.floats(0, 2, width=32)


def row(entries: list[int]) -> importance.Entries:
    return np.array(entries, np.uint32)


def near(one: float, other: float) -> bool:
    """Whether two importances are so near each other that they may have one level."""
    return abs(one - other) <= max(one, other) / 128 + 1e-38


class Heap(RuleBasedStateMachine):
    """The model has the importances in effect, those that are coming, and the entries that are
    in."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = ImportanceHeap(COUNT)
        self.counts = [0.0] * COUNT
        self.coming: list[float] | None = None
        self.is_told = True
        self.members: set[int] = set()

    @rule(entries=ENTRIES)
    def insert(self, entries: list[int]) -> None:
        self.heap.insert(row(entries))
        self.members.update(entries)

    @rule(entries=ENTRIES)
    def remove(self, entries: list[int]) -> None:
        self.heap.remove(row(entries))
        self.members.difference_update(entries)

    @rule(entries=ENTRIES, data=st.data(), more=st.booleans())
    def tell(self, entries: list[int], data: st.DataObject, more: bool) -> None:
        values = data.draw(st.lists(NUMBERS, min_size=len(entries), max_size=len(entries)))
        self.heap.set_importances(row(entries), np.array(values, np.float32), more=more)
        coming = self.coming or [*self.counts]
        for entry, value in zip(entries, values, strict=True):
            coming[entry] = value
        self.coming, self.is_told = coming, not more

    @rule()
    def build_one(self) -> None:
        if not self.heap.build_some() and self.is_told and self.coming is not None:
            self.counts, self.coming = self.coming, None

    @rule()
    def build_all(self) -> None:
        while self.heap.build_some():
            pass
        self.build_one()

    @rule(count=st.integers(1, COUNT))
    def least(self, count: int) -> None:
        found = self.heap.least(count).tolist()
        assert len(found) == len({*found}) == min(count, len(self.members))
        assert {*found} <= self.members
        # Those that stay are not less important than those that go.
        by_value = sorted(self.counts[entry] for entry in self.members)
        for entry, value in zip(found, by_value, strict=False):
            assert near(self.counts[entry], value)

    @invariant()
    def figures_agree(self) -> None:
        assert self.heap.zero_count <= len(self.members)
        found = self.heap.importance(row([*range(COUNT)])).tolist()
        assert all(near(one, other) for one, other in zip(found, self.counts, strict=True))


def test_against_a_sorted_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "BLOCK_ENTRIES", 16)
    Heap.TestCase.settings = examples(150, steps=30)
    Heap.TestCase().runTest()


def told_whole(entries: list[int], values: list[float], heap: ImportanceHeap) -> ImportanceHeap:
    """The heap, after it has got these importances and has built its table."""
    heap.set_importances(row(entries), np.array(values, np.float32))
    while heap.build_some():
        pass
    return heap


def test_a_fifth_is_of_high_importance() -> None:
    heap = ImportanceHeap(10, 2 ** np.arange(10, dtype=np.uint32))
    everything = row([*range(10)])
    heap.insert(everything[:6])
    told_whole([*range(10)], [0.1, 0.4, 1.0, 0.2, 0.9, 0.3, 0.1, 0.2, 0.3, 0.4], heap)
    assert np.flatnonzero(heap.is_high(everything)).tolist() == [2, 4]
    assert heap.low_size == 1 + 2 + 8 + 32
    assert heap.least(1, high=True).tolist() == [4]
    heap.remove(row([4, 5]))
    assert heap.low_size == 1 + 2 + 8
    assert heap.least(9, high=True).tolist() == [2]


@each_row("bad", [np.nan, np.inf, -np.inf, -1e-9])
def test_bad_importances_are_refused_whole(bad: float) -> None:
    heap = ImportanceHeap(COUNT)
    heap.insert(row([1, 2]))
    with pytest.raises(UsageError, match="bad importance"):
        heap.set_importances(row([1, 2]), np.array([5, bad], np.float32))
    assert not heap.build_some()
    assert heap.zero_count == 2
    assert told_whole([1, 2], [-0.0, 1.0], heap).zero_count == 1, "a negative zero is a zero"


def merged(*jobs: tuple[str, list[float], float]) -> list[float]:
    """Return what jobs with these lists and benefits find important together."""
    lists = JobImportances(len(jobs[0][1]))
    for name, values, benefit in jobs:
        lists.tell(name, row([*range(len(values))]), np.array(values, np.float32), benefit)
    found: list[float] = lists.merged().tolist()
    return found


def test_jobs_are_merged_by_percentile_and_weighted_by_benefit() -> None:
    # iCache, section III-D: the sum of benefit times percentile. The second job is further on.
    found = merged(("a", [4, 3, 2, 1], 2.0), ("b", [0.01, 0.02, 0.04, 0.03], 3.0))
    percentile = (0.125, 0.375, 0.625, 0.875)
    expected = [
        2 * percentile[3] + 3 * percentile[0],
        2 * percentile[2] + 3 * percentile[1],
        2 * percentile[1] + 3 * percentile[3],
        2 * percentile[0] + 3 * percentile[2],
    ]
    assert found == pytest.approx(expected)
    # Equal importances have one percentile
    assert merged(("a", [1, 1, 1, 5], 2.0)) == pytest.approx([0.75, 0.75, 0.75, 1.75])


def test_a_job_that_gains_little_has_no_say_beside_others() -> None:
    alone = merged(("a", [4, 3, 2, 1], 2.0))
    assert merged(("a", [4, 3, 2, 1], 2.0), ("b", [1, 2, 3, 4], 1.4)) == alone
    both = merged(("a", [4, 3, 2, 1], 1.0), ("b", [1, 2, 3, 4], 1.4))
    assert both == pytest.approx([1.0] * 4)  # none gains: all count alike


def test_jobs_that_have_ended_are_forgotten() -> None:
    lists = JobImportances(2)
    everything = row([0, 1])
    values, others = np.array([1, 2], np.float32), np.array([2, 1], np.float32)
    lists.tell("ended", everything, values, 9.0)
    for _ in range(SILENT_TELLS):
        lists.tell("goes on", everything, others, 2.0)
    lists.tell("goes on", everything, others, 2.0, more=True)  # a part counts for none
    assert len(lists) == 2
    lists.tell("goes on", everything, others, 2.0)
    assert len(lists) == 1
    assert lists.merged().tolist() == pytest.approx([1.5, 0.5])
    for number in range(2 * JOBS_MAX):
        lists.tell(str(number), everything, values, 2.0)
    assert len(lists) == JOBS_MAX
    before = lists.merged().tolist()
    with pytest.raises(UsageError, match="bad importance"):
        lists.tell("0", everything, np.array([9, np.nan], np.float32), 5.0)
    assert lists.merged().tolist() == before, "a bad list changes nothing"
