"""The score of nodes and admission, against the formulas of DLCache, written out independently."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from diesel_kubernetes.operator.datasets import holding_of, holding_on_disks
from diesel_kubernetes.operator.decoding import decode
from diesel_kubernetes.operator.placement import (
    BLOCK_BYTES,
    STORAGE,
    Holding,
    NodeState,
    admission,
    in_order,
)
from diesel_kubernetes.operator.resources import DatasetStatus
from tests.kubernetes.fields import Json
from tests.rows import each_row

NAMES = [f"node-{number}" for number in range(6)]


def node(name: str, free: int, cpu: int = 8, preemptible: int = 0) -> NodeState:
    return NodeState(
        name=name,
        hostname=name,
        labels={},
        allocatable={STORAGE: Fraction(free + preemptible), "cpu": Fraction(cpu)},
        cached_bytes=preemptible,
        preemptible_bytes=preemptible,
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[NodeState], int, dict[str, int]]:
    """Nodes, D, and how many of the D blocks each node has."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    nodes = [node(name, draw(st.integers(0, 1000)), draw(st.integers(0, 8))) for name in names]
    blocks = draw(st.integers(1, 50))
    left, held = blocks, {}
    for name in names:  # each block on one node at most, as in the paper
        held[name] = draw(st.integers(0, left))
        left -= held[name]
    return nodes, blocks, held


@given(clusters(), st.integers(0, 8))
def test_nodes_stand_in_the_order_of_the_papers_score(
    cluster: tuple[list[NodeState], int, dict[str, int]], cpu: int
) -> None:
    nodes, d, held = cluster
    shares = {name: Fraction(k, d) for name, k in held.items()}
    found = in_order(nodes, [Holding(d * BLOCK_BYTES, shares)], {"cpu": Fraction(cpu)})

    free = {each.name: int(each.allocatable[STORAGE]) for each in nodes}
    all_free, all_held = sum(free.values()), sum(held.values())
    wanted = {}
    for each in nodes:
        i = 1 if each.allocatable["cpu"] >= cpu else 0
        alpha = Fraction(free[each.name], all_free) if all_free else Fraction(0)
        wanted[each.name] = i + (held[each.name] + alpha * (d - all_held)) / d
    assert {each.node.name: each.score for each in found} == wanted
    assert [each.node.name for each in found] == sorted(wanted, key=lambda n: (-wanted[n], n))


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=5),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 100)), max_size=3),
)
def test_a_job_is_admitted_if_its_datasets_fit(
    storage: list[tuple[int, int]], datasets: list[tuple[int, int]]
) -> None:
    """Algorithm 1, line 3. Blocks that a node has already need no room."""
    nodes = [node(NAMES[n], free, 8, kept) for n, (free, kept) in enumerate(storage)]
    holdings = [Holding(size, {"node-9": Fraction(share, 100)}) for size, share in datasets]
    needed = sum(size - -(-size * share // 100) for size, share in datasets)
    found = admission(nodes, holdings)
    assert found.needed_bytes == needed
    assert found.fits == (needed <= sum(free + kept for free, kept in storage))


@each_row(
    ("node", "share", "on_disk"),
    [
        ({"share": 90, "keeps": True, "diskShare": 30, "measured": True}, 90, 30),
        ({"share": 90, "keeps": False, "diskShare": 0, "measured": True}, 90, 0),
        ({"share": 50, "keeps": True, "measured": False}, 50, 50),
        ({"share": 50, "keeps": False, "measured": False}, 50, 0),
    ],
)
def test_scores_count_memory_and_admission_does_not(node: Json, share: int, on_disk: int) -> None:
    status = decode(DatasetStatus, {"bytes": 7, "nodes": [{"name": "a", **node}]})
    assert holding_of(status) == Holding(7, {"a": Fraction(share, 100)})
    kept = holding_on_disks(status)
    assert (kept.content_bytes, kept.shares.get("a", 0)) == (7, Fraction(on_disk, 100))
