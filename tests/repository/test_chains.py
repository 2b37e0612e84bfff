"""Which form a version is published in, and what it builds on, against a simulation; no I/O."""

import math
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import CorruptError
from diesel_fs.format.object_names import VersionForm
from diesel_fs.repository import chains
from diesel_fs.repository.chains import Published, PublishedForms, choose_base
from tests.examples import examples

LARGE = 1 << 50
DELTAS_MAX = 7
SHARE = 4
"""FORMAT.md, section 8: the deltas of a chain are at most this part of its snapshot."""


def form(version: int, base: int = 0, size: int = 100, at_us: int = 0) -> Published:
    return Published(VersionForm(version, base), f"{version:016x}-{base:016x}", size, at_us)


class Publications:
    """Publishes one version after the other, and counts what that writes. A merged delta has all
    bytes of its parts, as if no change replaced another."""

    def __init__(self, snapshot_bytes: int) -> None:
        self.snapshot_bytes = snapshot_bytes
        self.objects = [form(1, size=snapshot_bytes)]
        self.delta_bytes = 0
        self.snapshots = 0

    @property
    def newest(self) -> int:
        return self.objects[-1].form.version

    @property
    def chain(self) -> Sequence[Published]:
        return PublishedForms(self.objects).chain(self.newest)

    def publish(self, size: int) -> None:
        chain, version = self.chain, self.newest + 1
        at = choose_base(chain, size)
        if at is None:
            self.objects.append(form(version, size=self.snapshot_bytes))
            self.snapshots += 1
            return
        merged = size + sum(each.bytes for each in chain[:at])
        self.objects.append(form(version, chain[at].form.version, merged))
        self.delta_bytes += merged

    def check(self) -> None:
        *deltas, snapshot = self.chain
        assert not snapshot.form.base
        assert len(deltas) <= DELTAS_MAX
        assert all(delta.form.base for delta in deltas)
        assert sum(delta.bytes for delta in deltas) * SHARE <= snapshot.bytes


sizes = st.one_of(st.integers(1, 40_000), st.sampled_from([1, 512, 513, 1024, 16_384, 16_385]))


@examples(300)
@given(st.lists(sizes, max_size=120), st.integers(1 << 16, 1 << 18))
def test_no_chain_is_longer_or_larger_than_the_format_allows(
    changes: list[int], snapshot_bytes: int
) -> None:
    made = Publications(snapshot_bytes)
    for size in changes:
        made.publish(size)
        made.check()
    assert made.snapshots <= SHARE * sum(changes) / snapshot_bytes


@examples(100)
@given(st.lists(sizes, min_size=1, max_size=300))
def test_a_change_is_written_again_a_logarithmic_number_of_times(changes: list[int]) -> None:
    made = Publications(LARGE)
    for size in changes:
        made.publish(size)
        made.check()
    assert made.snapshots == 0
    times = 1 + math.log2(sum(changes) / min(changes))
    assert made.delta_bytes <= sum(changes) * times


@pytest.mark.parametrize("count", [1, 10, 127, 128, 1000])
def test_equal_changes_cost_their_number_times_its_logarithm(count: int) -> None:
    size = 1000
    made = Publications(LARGE)
    for _ in range(count):
        made.publish(size)
    assert made.snapshots == 0
    assert made.delta_bytes <= size * count * (1 + math.log2(count))
    assert sum(each.bytes for each in made.chain[:-1]) == size * count


def test_deltas_of_equal_changes_are_a_binary_counter() -> None:
    """As in git's geometric repack: there is a delta of 2^i changes for each bit i."""
    made = Publications(LARGE)
    for count in range(1, 128):
        made.publish(10)
        bits = [1 << i for i in range(7) if count >> i & 1]
        assert [each.bytes for each in made.chain[:-1]] == [10 * bit for bit in bits]


def test_a_small_or_outgrown_snapshot_is_written_again() -> None:
    least = chains._SNAPSHOT_BYTES_MIN
    assert choose_base([form(1, size=least - 1)], 1) is None
    assert choose_base([form(1, size=least)], least // SHARE) == 0
    assert choose_base([form(1, size=least)], least // SHARE + 1) is None
    half = form(2, 1, least // 8)
    assert choose_base([half, form(1, size=least)], least // 8) == 1
    assert choose_base([half, form(1, size=least)], least // 8 + 1) is None
    assert choose_base([half, form(1, size=least)], least // 16) == 0


# The forms of versions


def graphs() -> st.SearchStrategy[dict[int, set[int]]]:
    """The bases of each version's forms; 0 for its snapshot. A base may be missing."""
    bases = st.sets(st.integers(0, 11), min_size=1, max_size=3)
    whole = st.dictionaries(st.integers(1, 12), bases, max_size=12)
    return whole.map(
        lambda graph: {
            version: {base for base in bases if base < version} or {0}
            for version, bases in graph.items()
        }
    )


def forms_of(graph: dict[int, set[int]]) -> PublishedForms:
    objects = [form(version, base) for version, bases in graph.items() for base in bases]
    return PublishedForms(reversed(objects))


def builds_on(graph: dict[int, set[int]], version: int) -> list[int]:
    """All versions from this one down to a snapshot, or down to the first that is missing."""
    if version not in graph or 0 in graph[version]:
        return [version]
    return [version, *builds_on(graph, max(graph[version]))]


def all_below(graph: dict[int, set[int]], version: int) -> set[int]:
    """This version, and all that any of its deltas needs; nothing else if it has a snapshot."""
    bases = graph.get(version, {0})
    below = set() if 0 in bases else bases
    return {version}.union(*(all_below(graph, base) for base in below))


@examples(1000)
@given(graphs(), st.sets(st.integers(1, 14)))
def test_needed_versions_are_those_of_the_chains_and_no_others(
    graph: dict[int, set[int]], versions: set[int]
) -> None:
    expected = {each for version in versions for each in all_below(graph, version)} & graph.keys()
    forms = forms_of(graph)
    assert forms.needed(versions) == expected
    assert forms.needed(expected) == expected
    assert forms.needed(()) == frozenset()


@examples(1000)
@given(graphs())
def test_a_chain_leads_to_a_snapshot_or_names_the_missing_link(graph: dict[int, set[int]]) -> None:
    forms = forms_of(graph)
    assert [*forms.versions] == sorted(graph)
    for version in range(1, 14):
        expected = builds_on(graph, version)
        if expected[-1] not in graph:
            with pytest.raises(CorruptError, match=f"version {expected[-1]}, .*missing") as caught:
                forms.chain(version)
            assert f"version {version} " in caught.value.message
            continue
        chain = forms.chain(version)
        assert [each.form.version for each in chain] == expected
        assert [each.form.base for each in chain] == [*expected[1:], 0]


def test_a_snapshot_goes_before_deltas_of_its_version() -> None:
    objects = [form(3, 2), form(2, 1), form(3, 1), form(3), form(1), form(5, 3)]
    forms = PublishedForms(objects)
    assert [each.form for each in forms.forms(3)] == [(3, 0), (3, 1), (3, 2)]
    assert forms.chain(3) == [form(3)]
    assert forms.chain(5) == [form(5, 3), form(3)]
    assert forms.needed([5]) == {5, 3}
    assert forms.forms(4) == ()


def published_us(objects: Iterable[Published], version: int) -> int:
    return PublishedForms(objects).published_us(version)


def test_a_version_was_published_with_its_first_form() -> None:
    """A purge writes the snapshot later, beside the delta."""
    first, later = form(10, 5, at_us=70), form(10, at_us=90)
    assert published_us([first, later], 10) == published_us([later, first], 10) == 70
    assert published_us([form(10, at_us=3)], 10) == 10  # the clock of the store is behind
