"""The reports of nodes and their use: parsing, merging with the estimate, placement."""

import json
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import FormatError
from diesel_kubernetes.operator.controller import DATASETS, Reconciler
from diesel_kubernetes.operator.decoding import encode
from diesel_kubernetes.operator.queue import Key
from diesel_kubernetes.reports import (
    AGE_S_MAX,
    DATASETS_MAX,
    REPORT_CHARS_MAX,
    HeldDataset,
    NodeReport,
    config_map,
    differs_noticeably,
    make_report,
    parse_config_map,
    report_name,
)
from tests.clocks import ManualClock
from tests.kubernetes.fields import Json, at, fields, items
from tests.rows import each_row

from .made import DEFAULTS, GOOD, NOW_S, dataset, decided, ended, reader_pod
from .memory_cluster import MemoryCluster
from .test_controller import PETS

IDENTITY = UUID("01234567-89ab-cdef-0123-456789abcdef")
OTHER = UUID(int=5)
READY: Json = {
    "phase": "Ready", "observedGeneration": 1, "bytes": 10**9, "version": 7,
    "identity": str(IDENTITY),
}  # fmt: skip

held_datasets = st.builds(
    lambda namespace, identity, version, disk, more, is_used: HeldDataset(
        namespace, identity, version, min(100, disk + more), disk, is_used
    ),
    st.sampled_from(["-", "default", "team-2"]),
    st.uuids(),
    st.integers(0, 2**63 - 1),
    st.integers(0, 100),
    st.integers(0, 100),
    st.booleans(),
)


def held(share: int, disk: int = 0, *, version: int = 7, used: bool = False) -> HeldDataset:
    return HeldDataset("default", IDENTITY, version, share, disk, used)


def report(
    node: str, *datasets: HeldDataset, complete: bool = True, at_s: float = NOW_S
) -> NodeReport:
    return make_report(node, at_s, datasets, is_complete=complete)


def nodes_of(
    *reports: NodeReport, status: Json = READY, pods: Sequence[Json] = (), now_s: float = NOW_S
) -> list[Json]:
    decision = decided(dataset(status=status), pods=pods, now_s=now_s, reports=reports)
    return [encode(each) for each in decision.status.nodes or ()]


def measured(name: str, state: str, share: int, disk: int, *, keeps: bool) -> Json:
    return {
        "name": name, "state": state, "share": share, "keeps": keeps, "diskShare": disk,
        "measured": True,
    }  # fmt: skip


# Reports


@given(st.lists(held_datasets, max_size=5), st.booleans())
def test_a_report_is_read_as_it_was_written(datasets: list[HeldDataset], is_complete: bool) -> None:
    made = make_report("node-1.example", NOW_S, datasets, is_complete=is_complete)
    assert parse_config_map(config_map(made, "diesel-system", None)) == made


def test_a_report_of_too_many_datasets_names_the_largest_and_is_incomplete() -> None:
    many = [HeldDataset("a", UUID(int=n), 1, n % 101) for n in range(DATASETS_MAX + 100)]
    made = parse_config_map(config_map(report("a", *many), "diesel-system", None))
    assert len(made.datasets) == DATASETS_MAX
    assert not made.is_complete
    assert min(each.share for each in made.datasets) == 9
    assert differs_noticeably(made, report("a", *many[:5]))


def raw_report(**changes: object) -> Json:
    """A change to None leaves a field out."""
    entry = {"namespace": "default", "identity": str(IDENTITY), "version": 7, "share": 50,
             "disk": 20, "used": False}  # fmt: skip
    entry |= {name: value for name, value in changes.items() if name in entry}
    content = {"node": "a", "time": int(NOW_S), "complete": True, "datasets": [entry]}
    content |= {name: value for name, value in changes.items() if name in content}
    content = {name: value for name, value in content.items() if value is not None}
    data = changes.get("data", {"report": json.dumps(content)})
    metadata = {
        "name": changes.get("name", "diesel-node-a"),
        "labels": {"csi.diesel-fs.dev/node": "a"},
    }
    return {"kind": "ConfigMap", "metadata": metadata, "data": data}


MALFORMED: list[dict[str, object]] = [
    {"data": None}, {"data": {}}, {"data": {"report": 5}}, {"data": {"report": ""}},
    {"data": {"report": "[" * 100_000}}, {"data": {"report": " " * (REPORT_CHARS_MAX + 1)}},
    {"data": {"report": '"\\ud800"'}}, {"data": {"report": "9" * 5000}},
    {"name": "diesel-node-b"}, {"name": 5}, {"node": "b"}, {"node": "A/../b"}, {"node": "\ud800"},
    {"time": 0}, {"time": -5}, {"time": True}, {"time": 1.5}, {"time": 1 << 60}, {"time": None},
    {"complete": 1}, {"complete": None}, {"datasets": {}}, {"datasets": None}, {"datasets": [5]},
    {"datasets": [{}] * (DATASETS_MAX + 1)},
    {"namespace": "Other"}, {"namespace": "a/b"}, {"namespace": 5}, {"identity": "x"},
    {"identity": 5}, {"version": -1}, {"version": 1 << 70}, {"version": "7"}, {"version": True},
    {"share": 101}, {"share": -1}, {"share": 12.5}, {"share": True}, {"disk": 51}, {"disk": -1},
    {"used": "yes"},
]  # fmt: skip


@each_row("changes", MALFORMED)
def test_a_malformed_report_is_refused_whole(changes: dict[str, object]) -> None:
    assert parse_config_map(raw_report()).datasets == (held(50, 20),)
    with pytest.raises(FormatError):
        parse_config_map(raw_report(**changes))


# The status


def test_a_node_has_the_share_that_it_reports() -> None:
    pods = [reader_pod(name, task="t") for name in ("a", "b")]
    found = nodes_of(report("a", held(20, used=True)), pods=pods)
    assert found == [
        measured("a", "Active", 20, 0, keeps=False),
        {"name": "b", "state": "Active", "share": 50, "keeps": False, "measured": False},
    ]
    assert nodes_of(report("a"), report("b", held(0, used=True)), pods=pods) == [
        measured("a", "Active", 0, 0, keeps=False), measured("b", "Active", 0, 0, keeps=False)
    ]  # fmt: skip


def test_the_share_on_a_disk_is_measured_until_it_is_gone() -> None:
    active = nodes_of(report("a", held(90, 30, used=True)), pods=[reader_pod("a", cacheDir="c")])
    assert active == [measured("a", "Active", 90, 30, keeps=True)]
    status = {**READY, "nodes": active}
    cached = nodes_of(report("a", held(30, 30)), status=status)
    assert cached == [measured("a", "Cached", 30, 30, keeps=True)]
    assert nodes_of(report("a"), status=status) == []
    memory = [measured("a", "Active", 90, 0, keeps=False)]
    assert nodes_of(report("a", held(90)), status={**READY, "nodes": memory}) == [
        measured("a", "Cached", 90, 0, keeps=False)  # the mount is kept for the next pod
    ]


def test_a_plugin_that_has_ended_leaves_the_last_share_on_the_disk() -> None:
    status = {**READY, "nodes": [measured("a", "Active", 90, 30, keeps=True)]}
    last = {"name": "a", "state": "Cached", "share": 30, "keeps": True, "measured": False}
    assert nodes_of(status=status) == [last]
    assert nodes_of(report("a", complete=False), status=status) == [last]
    assert nodes_of(report("a", held(0, version=0)), status=status) == [last]
    assert nodes_of(report("a", held(100, version=6)), status=status) == [last]
    assert nodes_of(status={**READY, "nodes": [last]}) == [last]


@each_row("age_s", [-AGE_S_MAX - 2, -AGE_S_MAX, 0.0, AGE_S_MAX, AGE_S_MAX + 2])
def test_a_report_is_used_while_it_is_fresh(age_s: float) -> None:
    found = nodes_of(report("a", held(40)), now_s=NOW_S + age_s)
    assert bool(found) == (abs(age_s) <= AGE_S_MAX)


def test_nodes_whose_other_pods_read_a_dataset_count() -> None:
    found = nodes_of(report("a", held(40, 40, used=True)), report("b", held(10)))
    assert found == [
        measured("a", "Active", 40, 40, keeps=True), measured("b", "Cached", 10, 0, keeps=False)
    ]  # fmt: skip


def test_shares_for_others_are_not_reported() -> None:
    strange = replace(held(80), namespace="others"), replace(held(80), identity=OTHER)
    assert nodes_of(report("a", *strange)) == []
    without = {name: value for name, value in READY.items() if name != "identity"}
    assert nodes_of(report("a", held(80)), status=without) == []
    assert nodes_of(report("a", held(80)), status={**READY, "identity": "no UUID"}) == []


def test_the_identity_comes_from_the_preparation() -> None:
    seen = dataset()
    decision = decided(seen)
    (job,) = decision.create
    seen = dataset(status=decision.status)
    described = {**fields(GOOD, "dataset"), "identity": str(IDENTITY)}
    done = decided(seen, [ended(job, {"dataset": described})])
    assert done.status.identity == str(IDENTITY)
    described["identity"] = "../no identity"  # any pod may have written its report
    seen = dataset(status=replace(decision.status, identity=str(OTHER)))
    done = decided(seen, [ended(job, {"dataset": described})])
    assert done.status.phase == "Ready"
    assert "identity" not in encode(done.status)


# The controller

OTHERS = Key(DATASETS, "default", "other")


class Operated:
    """A controller of a cluster in memory, and the keys that it has woken."""

    def __init__(self, driver_namespace: str = "diesel-system") -> None:
        self.cluster = MemoryCluster()
        self.clock = ManualClock(NOW_S)
        self.woken: list[Key] = []
        self.controller = Reconciler(
            self.cluster,
            DEFAULTS,
            driver_namespace=driver_namespace,
            wake=self.woken.append,
            clock=self.clock,
        )

    def put_report(self, given: NodeReport) -> None:
        self.cluster.put(config_map(given, "diesel-system", None))

    async def shares(self) -> list[object]:
        for key in (PETS, OTHERS):
            await self.controller.handle(key)
            await self.controller.handle(key)
        nodes = items(self.cluster.status("Dataset", "pets"), "nodes")
        return [(at(each, "name"), at(each, "share")) for each in nodes]


async def test_reports_reach_their_datasets(caplog: pytest.LogCaptureFixture) -> None:
    made = Operated()
    cluster, refresh = made.cluster, made.controller.refresh_holdings
    cluster.put(dataset(status=READY).raw)
    cluster.put(dataset(status={**READY, "identity": str(OTHER)}, name="other").raw)
    made.put_report(report("a", held(40)))
    cluster.put(raw_report(name=report_name("b"), node="b", share=1000))
    assert await made.shares() == []
    await refresh()
    assert made.woken == [PETS]
    assert await made.shares() == [("a", 40)]
    assert cluster.calls["find ConfigMap"] == 1, "reports are not read for each Dataset"
    await refresh()
    assert made.woken == [PETS]
    cluster.forbidden.add("find ConfigMap")
    await refresh()
    await refresh()
    assert await made.shares() == [("a", 40)]
    made.clock.now_s += AGE_S_MAX + 1
    await refresh()
    assert made.woken == [PETS, PETS]
    assert await made.shares() == []
    cluster.forbidden.clear()
    made.put_report(report("a", held(70), at_s=made.clock.now_s))
    await refresh()
    assert await made.shares() == [("a", 70)]
    messages = [each.getMessage() for each in caplog.records]
    assert len([each for each in messages if "diesel-node-b" in each]) == 1
    assert len([each for each in messages if "may not find ConfigMap" in each]) == 1


async def test_a_node_that_begins_to_report_corrects_the_estimate() -> None:
    made = Operated()
    guess = {"name": "a", "state": "Cached", "share": 50, "keeps": True, "measured": False}
    made.cluster.put(dataset(status={**READY, "nodes": [guess]}).raw)
    made.cluster.put(dataset(status=READY, name="other").raw)
    assert await made.shares() == [("a", 50)]
    made.put_report(report("a"))
    await made.controller.refresh_holdings()
    assert made.woken == [PETS]
    assert await made.shares() == []


async def test_without_a_namespace_of_the_driver_nothing_is_read() -> None:
    made = Operated(driver_namespace="")
    await made.controller.refresh_holdings()
    assert made.cluster.calls["find ConfigMap"] == 0
