"""Benchmark of eviction by plan: what the store gives in an epoch to four nodes whose memory holds
half of the dataset, by what it must give at least.

The readers announce their orders, read in step, and are paced, as training is: an epoch takes half
a minute, and what masters know of each other is more than a second old. `planned_nodes.py` has the
optimum. The machine's speed does not matter, as long as it keeps the pace.
"""

from tests.peers.nodes import Nodes
from tests.peers.planned_nodes import FULL, PlannedEgress
from tests.peers.planned_reads import NODES
from tests.peers.running import RunningTask

from ..report import Row, no_more_than
from ..samples import Samples
from ..workbench import Workbench

FILES, GROUP, PACE_S, EPOCHS = 8_000, 10, 0.25, 4
RATIO_MAX = 1.02


def measure(bench: Workbench) -> list[Row]:
    """Chunk-wise order, with announced and computed orders, and full shuffle; then `lru`."""
    files = max(FILES // bench.divisor, 400)
    rows = []
    with (
        bench.scratch() as folder,
        Nodes(folder / "nodes", NODES) as nodes,
        RunningTask(nodes, files=files) as task,
    ):
        for what, group, announced, policy in (
            ("chunk-wise, computed orders", GROUP, "computed", "plan"),
            ("chunk-wise, announced orders", GROUP, "explicit", "plan"),
            ("full shuffle", FULL, "computed", "plan"),
            ("chunk-wise", GROUP, "computed", "lru"),
        ):
            task.options = {"evict": policy}
            egress = PlannedEgress(task, group=group, pace_s=PACE_S, announced=announced)
            for epoch in range(EPOCHS if policy == "plan" else 3):
                outcomes = egress.read(epoch)
                assert not any(each.wrong or each.errors for each in outcomes)
            task.end()
            name = f"task of {NODES} nodes, half of it fits, --evict {policy}, {what}, egress"
            later = Samples(tuple(egress.ratios[1:]))  # each epoch after the first is a sample
            if policy == "plan":
                rows.append(no_more_than(name, "x optimum", later, RATIO_MAX))
            else:
                rows.append(Row(name, "x optimum", later))
    return rows
