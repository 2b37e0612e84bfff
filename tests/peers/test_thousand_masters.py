"""A simulated task of a thousand nodes: shares, what moves when a node comes or leaves, and how
long that takes.

Nodes have links of 10 Gbit/s, and the store gives 40 GB/s to all of them together.
"""

import numpy as np
import numpy.typing as npt
import pytest

from diesel_fs.net.breaker import TIMEOUT_MAX_S
from diesel_fs.peers.master import RENEW_S
from diesel_fs.peers.membership import TTL_S
from diesel_fs.peers.ownership import Ownership

from .simulated import Task
from .test_ownership import chunks, shares

pytestmark = pytest.mark.deep

NODES = 1_000
CHUNKS = 350_000  # 1.4 TB
LINK_BYTES_S = 1.25e9
STORE_BYTES_S = 40e9
TAKEN_OVER_S = 10.0  # DIESEL's own cache took that long to be whole again, with ten nodes

Dataset = tuple[Ownership, npt.NDArray[np.uint64]]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    ids, sizes = chunks(CHUNKS)
    return Ownership(ids, sizes, NODES), sizes


@pytest.fixture
def task(dataset: Dataset) -> Task:
    ownership, sizes = dataset
    return Task(ownership, sizes, NODES, link_bytes_s=LINK_BYTES_S, store_bytes_s=STORE_BYTES_S)


def until_whole(task: Task, most_s: float) -> float:
    """The simulated seconds until every chunk is with its owner, and all masters agree about the
    owners."""
    start_s = task.now_s
    while task.missing():
        assert task.now_s - start_s < most_s, f"{task.missing()} chunks are not where they belong"
        task.run(task.now_s + 0.1)
    return task.now_s - start_s


def test_shares_differ_by_less_than_a_tenth_before_and_after_a_node_leaves(
    dataset: Dataset,
) -> None:
    ownership, sizes = dataset
    living = np.ones(NODES, np.bool_)
    before = ownership.owners(living)
    for lost in (0, 500, NODES - 1):
        living[:] = True
        living[lost] = False
        after = ownership.owners(living)
        every = shares(after, sizes, NODES)
        assert len(every) == NODES - 1
        assert 0.9 <= min(every) <= max(every) <= 1.1
        moved = float(np.mean(before != after)) * NODES
        assert 0.9 <= moved <= 1.6, f"{moved} shares moved"
        takers = np.bincount(after[before != after])
        assert takers.max() < 20, "its chunks go to many, not to one"


def test_a_warm_task_reads_nothing_from_the_store(task: Task) -> None:
    task.read_often(0.1, 10.0)
    task.run(10.0)
    assert set(task.count) <= {"own", "given"}
    assert task.count["given"] > 90_000
    most = max(len(master.asked) for master in task.masters)
    assert 60 < most <= NODES - 1  # one connection to each other, however much is read


def test_a_share_is_taken_over_within_seconds_and_reads_go_on(task: Task) -> None:
    task.read_often(0.2, 30.0)
    task.run(5.0)
    assert not task.loads
    task.kill(7)
    took_s = until_whole(task, 30.0)
    assert TTL_S - RENEW_S <= took_s <= TTL_S + RENEW_S + 1.0 <= TAKEN_OVER_S
    # The share was loaded once, by its new owners, and not by each node that missed a chunk of it.
    assert max(task.loads.values()) <= 2
    assert 0.9 * CHUNKS / NODES <= sum(task.loads.values()) <= 1.6 * CHUNKS / NODES
    # A read waits once for a silent node; later reads do not ask it.
    assert task.worst_read_s == TIMEOUT_MAX_S
    silent = task.count["store, after a time-out"]
    assert 0 < silent < 0.01 * sum(task.count.values())
    task.count.clear()
    task.run(task.now_s + 5.0)
    assert set(task.count) <= {"own", "given"}


def test_a_node_that_returns_gets_its_share_from_other_nodes(task: Task) -> None:
    task.read_often(0.2, 40.0)
    task.run(1.0)
    task.kill(7)
    until_whole(task, 30.0)
    task.count.clear()
    task.loads.clear()
    task.start(7)
    took_s = until_whole(task, 30.0)
    # All of its share comes over its own link.
    alone_s = CHUNKS / NODES * (4 << 20) / LINK_BYTES_S
    assert RENEW_S * 0.5 <= took_s <= RENEW_S + 2 * alone_s + 0.5
    assert task.count["moved from a peer"] >= 0.9 * CHUNKS / NODES
    assert sum(task.loads.values()) <= 0.05 * CHUNKS / NODES
    task.count.clear()
    task.run(task.now_s + 3.0)
    assert set(task.count) <= {"own", "given"}


def test_many_nodes_that_die_at_once_are_taken_over_as_fast(task: Task) -> None:
    task.read_often(1.0, 30.0)
    task.run(3.0)
    for rank in range(0, NODES, 100):
        task.kill(rank)
    took_s = until_whole(task, 30.0)
    assert took_s <= TAKEN_OVER_S
    assert max(task.loads.values()) <= 3
