"""Four real nodes with memory for half of a dataset, and readers that announce their orders:
how much the store gives, and that a master that was killed learns the plan again."""

import os
import signal
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans.control import Control, explicit
from tests.waiting import until

from .nodes import Nodes
from .planned_nodes import FULL, PlannedEgress
from .planned_reads import NODES
from .running import WAIT_MAX_S, RunningTask

pytestmark = pytest.mark.deep

FILES = 4_000
PACE_S = 0.25
"""An epoch takes 16 s, so the masters' positions of each other are a tenth of it old."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTask]:
    folder = tmp_path_factory.mktemp("planned")
    with Nodes(folder, NODES) as nodes, RunningTask(nodes, files=FILES) as task:
        yield task


@pytest.fixture
def task(ground: RunningTask) -> Iterator[RunningTask]:
    yield ground
    ground.end()


def plan(task: RunningTask, rank: int) -> dict[str, int]:
    return cast("dict[str, int]", task.stats(rank)["plan"])


@pytest.mark.parametrize(("group", "announced"), [(4, "explicit"), (FULL, "computed")])
def test_the_store_gives_little_too_much(task: RunningTask, group: int, announced: str) -> None:
    """Real ranks do not keep in step, so the bound is halfway between an optimum that knows when
    each rank reads and the bytes without plans. Simulated nodes (`test_planned_cache.py`) and the
    bench (`task-plan`) show how near the optimum is."""
    egress = PlannedEgress(task, group=group, pace_s=PACE_S, announced=announced)
    for epoch in range(2):
        outcomes = egress.read(epoch)
        assert not any(each.wrong or each.errors for each in outcomes)
        assert sum(each.right for each in outcomes) == FILES
    assert egress.ratios[0] < 1.1, egress.ratios
    assert egress.got[1] < (egress.least[1] + egress.by_lru[1]) / 2, egress.ratios
    for rank in range(NODES):
        found = plan(task, rank)
        assert (found["streams"], found["nodes"], found["refused"]) == (NODES, NODES, 0)


def test_a_master_that_was_killed_gets_the_plan_again(task: RunningTask) -> None:
    egress = PlannedEgress(task, group=10, pace_s=PACE_S, announced="explicit")
    for rank, reader in enumerate(egress.readers):
        reader.begin_planned(
            0, rank, NODES, group=10, batch=16, pace_s=PACE_S, announced="explicit"
        )

    def knows_all(rank: int) -> bool:
        return plan(task, rank)["planned_streams"] == NODES

    for rank in range(NODES):
        until(lambda rank=rank: knows_all(rank), f"the plan at node {rank}", WAIT_MAX_S)  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
    [killed] = task.masters(1)
    os.kill(killed, signal.SIGKILL)
    until(lambda: task.masters(1) not in ([], [killed]), "another master", WAIT_MAX_S)
    until(lambda: knows_all(1), "its plan", WAIT_MAX_S)
    until(lambda: knows_all(0), "that of the others", WAIT_MAX_S)
    outcomes = [reader.outcome() for reader in egress.readers]
    assert not any(each.wrong or each.errors for each in outcomes)
    assert sum(each.right for each in outcomes) == FILES


def test_importance_reaches_all_masters(task: RunningTask) -> None:
    task.world, task.part = 2, 0
    folders = [task.mount(rank, "--memory", "64M", "--evict", "importance") for rank in range(2)]
    task.gathered([0, 1])
    snapshot = Snapshot((folders[0] / ".diesel/snapshot").read_bytes())
    files = snapshot.files().astype(np.uint32)
    with Control.connect(folders[0]) as control:
        control.announce("train", [explicit(epoch=0, entries=files)])
        control.values(files, np.linspace(0, 1, len(files), dtype=np.float32))
        for rank in range(2):
            until(lambda rank=rank: plan(task, rank)["valued_by"] == 1, "values", WAIT_MAX_S)  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
    task.umount(0)
    until(lambda: plan(task, 1)["valued_by"] == 0, "the end of the job", WAIT_MAX_S)
    task.umount(1)


READ = 600
LEFT = 2 * FILES - 2 * READ
"""The reads of two epochs that are left when two ranks have read some of their parts."""


def test_mounts_send_the_plans_of_their_readers(task: RunningTask) -> None:
    """A program reads the mount's list, and then the files in its order."""
    task.world, task.part = 2, 0
    folders = [task.mount(rank, "--memory", "64M") for rank in range(2)]
    task.gathered([0, 1])
    for rank, folder in enumerate(folders):
        name = f"seed=3,epoch=0,group=10,rank={rank},world=2"
        listed = (folder / ".diesel/shuffle" / name).read_text().splitlines()
        assert len(listed) == FILES / 2
        for each in listed[:READ]:
            (folder / each).read_bytes()
    for rank in range(2):
        until(lambda rank=rank: plan(task, rank)["planned_streams"] == 2, "both", WAIT_MAX_S)  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        # For this epoch, reads of files that are not yet in the page cache are predicted; masters
        # get them later
        until(lambda rank=rank: plan(task, rank)["uses_left"] <= LEFT, "reads", WAIT_MAX_S)  # type: ignore[misc]  # as above
        found = plan(task, rank)
        assert (found["nodes"], found["refused"]) == (2, 0)
        assert found["uses_left"] >= FILES  # all of the next epoch
    task.umount(0)
    until(lambda: plan(task, 1)["streams"] == 1, "the end of the stream", WAIT_MAX_S)
    task.umount(1)
