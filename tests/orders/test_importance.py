"""Importance sampling: each sample's chance, the frequency of its draws, and weights that correct
for it.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.orders.importance import DrawRule, at_home, home_nodes, is_low, substituted, weights
from tests.rows import each_row

Floats = npt.NDArray[np.float32]
SHARES = st.floats(0.01, 1.0)
TABLES = st.lists(
    st.sampled_from([np.nan, 0.0, 0.5, 1.0, 1.0, 7.25, 3e38]) | st.floats(0, 100, width=32),
    min_size=1,
    max_size=300,
)


def table(rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


@given(TABLES, SHARES, st.floats(0, 1), st.integers(0, 2**63 - 1), st.integers(0, 1000))
@example([np.nan] * 14, 0.22562141455268264, 0.9496314328683808, 0, 0)  # a very steep curve
def test_a_draw_has_its_length_and_no_sample_twice(
    rows: list[float], share: float, floor_part: float, seed: int, epoch: int
) -> None:
    rule, values = DrawRule(share, share * floor_part), table(rows)
    chances = rule.probabilities(values, seed, epoch)
    drawn = rule.draw(chances, seed, epoch)
    assert len(drawn) == len({*drawn.tolist()}) == rule.length(len(rows)) >= 1
    assert drawn.tolist() == sorted(drawn.tolist())
    assert 0 <= drawn[0] <= drawn[-1] < len(rows)
    assert abs(chances.sum(dtype=np.float64) - len(drawn)) < 0.01
    assert chances.max() <= 1
    known = np.flatnonzero(~np.isnan(values))
    by_value = known[np.argsort(values[known], kind="stable")]
    steps = np.diff(values[by_value]) > 0  # a greater value has no lower chance
    assert (np.diff(chances[by_value])[steps] >= 0).all()
    assert rule.draw(chances, seed, epoch).tolist() == drawn.tolist()


def test_chances_follow_the_rule_of_the_source() -> None:
    """A sample's chance is the share c of samples with lower values, to the power of beta."""
    values = np.random.default_rng(1).permutation(10_000).astype(np.float32)
    for beta in (1, 3, 0.25):
        chances = DrawRule(1 / (1 + beta)).probabilities(values, 0, 0)
        assert np.allclose(chances, ((values + 0.5) / 10_000) ** beta, atol=0.01)
    chances = DrawRule(0.5, 0.2).probabilities(values, 0, 0)
    assert chances.min() >= 0.2 - 1e-6
    assert chances.mean() == pytest.approx(0.5, abs=1e-4)
    assert (DrawRule(0.3, 0.3).probabilities(values, 0, 0) == np.float32(0.3)).all()


def test_equal_values_have_equal_chances_and_unknown_ones_the_greatest() -> None:
    values = table([1.0] * 50 + [2.0] * 50)
    chances = np.mean([DrawRule(0.5).probabilities(values, 1, epoch) for epoch in range(2000)], 0)
    assert np.abs(chances[:50] - 0.25).max() < 0.02
    assert np.abs(chances[50:] - 0.75).max() < 0.02
    chances = DrawRule(0.5).probabilities(table([*range(90), *[np.nan] * 10]), 3, 4)
    assert chances[90:].min() > chances[:90].max()


@each_row("rule", [DrawRule(0.5), DrawRule(0.3, 0.1), DrawRule(0.9), DrawRule(0.1)])
def test_samples_are_drawn_with_the_frequency_of_their_chances(rule: DrawRule) -> None:
    count, draws = 200, 4000
    chances = rule.probabilities(np.arange(count, dtype=np.float32), 0, 0)
    found = np.zeros(count)
    pairs = np.zeros(count - 1)
    for epoch in range(draws):
        is_drawn = np.zeros(count)
        is_drawn[rule.draw(chances, 7, epoch)] = 1
        found += is_drawn
        pairs += is_drawn[1:] * is_drawn[:-1]
    deviation = np.sqrt(draws * chances * (1 - chances) + 1)
    assert (np.abs(found - draws * chances) / deviation).max() < 4.5
    # Neighbours in the dataset are drawn nearly independently of each other.
    together = chances[1:] * chances[:-1]
    assert np.abs(pairs / draws - together).max() < 0.05


def test_weights_make_the_mean_unbiased() -> None:
    chance = np.random.default_rng(2)
    values = chance.exponential(1, 1000).astype(np.float32)
    # samples that are drawn more often have greater values
    terms = values + chance.normal(0, 0.1, 1000)
    rule = DrawRule(0.4, 0.05)
    chances = rule.probabilities(values, 0, 0)
    corrected, plain = [], []
    for epoch in range(500):
        drawn = rule.draw(chances, 3, epoch)
        corrected.append((weights(chances[drawn], 0.4) * terms[drawn]).mean())
        plain.append(terms[drawn].mean())
    error = np.std(corrected) / np.sqrt(500)
    assert abs(np.mean(corrected) - terms.mean()) < 4.5 * error
    assert np.mean(plain) > terms.mean() + 0.2


@given(st.integers(1, 200), st.integers(0, 2**32), st.data())
def test_substitutes_are_cached_or_in_packages(count: int, seed: int, data: st.DataObject) -> None:
    mask = st.lists(st.booleans(), min_size=count, max_size=count)
    low, cached, may, is_drawn = (np.array(data.draw(mask), np.bool_) for _ in range(4))
    may &= low
    chunks = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    drawn = np.flatnonzero(is_drawn)
    places, others = substituted(drawn, low, cached, may, chunks, seed, 1)
    assert len(places) == len({*places.tolist()}) == len(others) == len({*others.tolist()})
    assert all(low[at] and not cached[at] for at in drawn[places].tolist())
    assert all(may[at] and not is_drawn[at] for at in others.tolist())
    missed = np.count_nonzero(low & ~cached & is_drawn)
    free = np.count_nonzero(cached & may & ~is_drawn)
    assert np.count_nonzero(cached[others]) == min(missed, free)

    def share_of_low(chunk: int) -> float:
        return float(low[chunks == chunk].mean())

    read = chunks[others[~cached[others]]].tolist()
    assert all(share_of_low(chunk) >= 0.5 for chunk in read)
    given_up = places[np.count_nonzero(cached[others]) :]
    assert all(share_of_low(chunk) >= 0.5 for chunk in chunks[drawn[given_up]].tolist())
    assert not {*read} & {*chunks[drawn[given_up]].tolist()}  # packages are read whole
    assert all(may[chunks == chunk].any() for chunk in read)


def test_missed_samples_of_low_importance_are_read_in_few_chunks() -> None:
    """A fifth of the samples is important and in memory; a draw of a third of the others would read
    all chunks."""
    count, rng = 4000, np.random.default_rng(1)
    low = np.arange(count) % 5 != 0
    drawn = np.flatnonzero(~low | (rng.random(count) < 1 / 3))
    chunks = np.arange(count) // 40
    places, others = substituted(drawn, low, ~low, low, chunks, 1, 2)
    read = drawn.copy()
    read[places] = others
    assert len(read) == len({*read.tolist()})
    found = np.unique(chunks[read[low[read]]])
    missed = np.count_nonzero(low[drawn])
    assert len(found) == -(-missed // 32)  # each of them is read whole
    # The samples that were drawn most often stay
    own = np.bincount(chunks[drawn[low[drawn]]], minlength=100)
    assert own[found].min() >= np.delete(own, found).max()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(-3, 3), st.data())
def test_important_samples_are_dealt_to_their_homes(
    nodes: int, per_node: int, more: int, data: st.DataObject
) -> None:
    drawn_count = max(nodes * per_node + max(more, -per_node + 1), 1)
    count = 2 * drawn_count
    drawn = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(count)[:drawn_count]
    share = data.draw(st.sampled_from([0, 0.2, 0.6, 1]))
    is_high = np.random.default_rng(1).random(count) < share
    homes = home_nodes(count, nodes, 7)
    found = at_home(drawn, is_high, homes, per_node, nodes)
    assert sorted(found.tolist()) == sorted(drawn.tolist())
    node = np.minimum(np.arange(drawn_count) // per_node, nodes - 1)
    for each in range(nodes):
        mine = found[node == each]
        wanted = [sample for sample in drawn.tolist() if is_high[sample] and homes[sample] == each]
        here = [sample for sample in mine.tolist() if is_high[sample] and homes[sample] == each]
        assert len(here) == min(len(wanted), len(mine))
        if len(wanted) <= len(mine):
            assert sorted(here) == sorted(wanted)
    if not is_high.any():
        assert found.tolist() == drawn.tolist()


def test_nodes_are_home_to_equally_many_samples_in_all_epochs() -> None:
    homes = home_nodes(30_000, 3, 5)
    assert np.bincount(homes).min() > 9_700
    assert homes.tolist() == home_nodes(30_000, 3, 5).tolist()
    assert homes.tolist() != home_nodes(30_000, 3, 6).tolist()


def test_all_but_a_fifth_are_of_low_importance() -> None:
    chances = table([0.1, 0.5, 0.9, 0.9, 0.2, 0.3, 0.1, 0.2, 0.3, 0.4])
    assert np.flatnonzero(~is_low(chances)).tolist() == [2, 3]
    assert is_low(table([0.1, 0.5, 0.9])).tolist() == [True, True, False]
    assert not is_low(table([0.5, 0.5])).any()
    assert is_low(table([])).tolist() == []


def test_draws_are_the_same_on_every_machine() -> None:
    rule = DrawRule(0.3)
    values = (np.arange(40) * 7 % 11).astype(np.float32)
    drawn = rule.draw(rule.probabilities(values, 5, 6), 5, 6)
    assert drawn.tolist() == [3, 4, 6, 9, 14, 20, 25, 26, 28, 31, 36, 39]


@each_row(
    ("share", "floor"),
    [(0.0, 0.0), (1.1, 0.0), (-1, 0), (0.5, 0.6), (0.5, -0.1), (float("nan"), 0)],
)
def test_a_bad_share_floor_or_seed_is_refused(share: float, floor: float) -> None:
    with pytest.raises(UsageError, match=r"bad (share|floor)"):
        DrawRule(share, floor)
    with pytest.raises(UsageError, match="seed"):
        DrawRule().probabilities(table([1, 2]), -1, 0)
