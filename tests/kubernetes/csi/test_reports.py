"""The shares that a node reports: of mounts, of cache folders, of a task; and when it reports.

Mounts are real, and the node's logic runs in this process. If reports are written, the API server
is a stand-in that obeys the Role in the manifests (`cluster.py`).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Pod

from diesel_fs.client.dataset import connect
from diesel_kubernetes.csi.holdings import NodeHoldings, held_by_mount
from diesel_kubernetes.csi.mounter import ProcessMounter
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.reporter import NodeReporter
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.targets import MountTable
from diesel_kubernetes.csi.volumes import VolumeLimits
from diesel_kubernetes.names import POD_NAMESPACE
from diesel_kubernetes.reports import (
    REFRESH_S,
    HeldDataset,
    NodeReport,
    parse_config_map,
    report_name,
)
from tests.kubernetes.fields import Json, at
from tests.waiting import wait_until

from .cluster import ApiStandIn
from .conftest import MOUNTS_AS_ROOT, node_volumes, publish

CHUNKS, FILE_BYTES = 8, 1_000_000
"""Chunks of the dataset: all have the same size, and each has one file."""

fuse, as_root = MOUNTS_AS_ROOT


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    folder: Path
    state: StateFolder
    volumes: NodeVolumes
    holdings: NodeHoldings
    identity: UUID
    version: int

    @property
    def cache_root(self) -> Path:
        return self.folder / "fast"

    def wait_until_unmounted(self) -> None:
        """A task's master may outlive its mount, and its folder."""
        wait_until(lambda: not MountTable.read(self.state).roots)

    def publish(self, name: str = "mount", *, namespace: str = "team", **attributes: str) -> Path:
        target = self.folder / name
        publish(self.volumes, target, {POD_NAMESPACE: namespace, **attributes})
        return target

    def held(
        self, wanted: Callable[[list[HeldDataset]], object] = lambda _: True
    ) -> list[HeldDataset]:
        """Wait until the node's list of its shares is complete and meets a condition."""
        last: list[HeldDataset] = []

        def holds() -> object:
            last[:], is_all = self.holdings.measure()
            return is_all and wanted(last)

        wait_until(holds, otherwise=lambda: f"it held {last}")
        return last


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MeasuredNode]:
    """The test unpublishes its targets."""
    url, cache_root = (tmp_path / "store").as_uri(), tmp_path / "fast"
    with connect("pets", url, create=True) as dataset:
        for number in range(CHUNKS):
            dataset.put(os.urandom(FILE_BYTES), f"file-{number}")
            dataset.flush()
    with connect("pets", url) as dataset:
        identity, version = dataset.snapshot.identity, dataset.version
    cache_root.mkdir()
    state, limits = (
        StateFolder(tmp_path / "state"),
        VolumeLimits(url=url, cache_root=str(cache_root)),
    )
    with node_volumes(state, ProcessMounter(state), limits) as volumes:
        holdings = NodeHoldings(state, str(cache_root))
        made = MeasuredNode(tmp_path, state, volumes, holdings, identity, version)
        try:
            yield made
        finally:
            made.wait_until_unmounted()


def read(target: Path, count: int) -> None:
    for number in range(count):
        assert len((target / f"file-{number}").read_bytes()) == FILE_BYTES


@pytest.mark.deep
@fuse
@as_root
def test_a_cache_folder_is_measured_in_use_afterwards_and_when_emptied(node: MeasuredNode) -> None:
    def entry(share: int, disk: int, *, used: bool = False, of: int = node.version) -> HeldDataset:
        return HeldDataset("team", node.identity, of, share, disk, used)

    assert node.held() == []
    target = node.publish(cacheDir="pets")
    assert node.held() == [entry(0, 0, used=True)]
    read(target, 1)
    (part,) = node.held(lambda found: found and found[0].share)
    assert part.disk == 0
    assert part.is_used
    read(target, CHUNKS)
    node.held(lambda found: found and found[0].share == 100)
    node.volumes.unpublish(str(target))
    node.wait_until_unmounted()
    node.held(lambda found: found == [entry(100, 100)])
    chunks = sorted(node.cache_root.glob(f"team/pets/*/{node.identity.hex}/{'[0-9a-f]' * 32}"))
    assert len(chunks) == CHUNKS
    for path in chunks[:3]:
        path.unlink()
    assert node.held() == [entry(62, 62)]
    log = chunks[0].with_name("order-0123456789abcdef")
    log.touch()  # the share of a log is not known
    assert node.held() == [entry(0, 0, of=0)]
    log.unlink()
    for path in (node.state.cache / "diesel/snapshots").iterdir():
        path.write_bytes(b"damaged")
    fresh = NodeHoldings(node.state, str(node.cache_root))  # by a plugin that starts now
    assert fresh.measure() == ([entry(0, 0, of=0)], True)
    shutil.rmtree(node.cache_root / "team")
    assert node.held() == []
    shutil.rmtree(node.cache_root)
    assert node.holdings.measure() == ([], False)


@fuse
@as_root
def test_memory_counts_while_the_mount_lives_and_only_for_its_namespace(node: MeasuredNode) -> None:
    one = node.publish("one", policy="oneshot")
    other = node.publish("other", namespace="others")
    found = node.held(lambda found: max(each.share for each in found) == 100)
    assert {each.namespace: each.disk for each in found} == {"team": 0, "others": 0}
    (idle,) = [each for each in found if each.namespace == "others"]
    assert idle == HeldDataset("others", node.identity, node.version, 0, 0, is_used=True)
    node.state.folder(node.state.names()[0]).joinpath("namespace").unlink()
    assert not node.holdings.measure()[1]
    for target in (one, other):
        node.volumes.unpublish(str(target))
    node.wait_until_unmounted()
    assert node.held() == []


def test_a_mount_of_another_version_reports_only_the_page_cache() -> None:
    identity = uuid4()
    pages: Json = {"resident_bytes": 30, "dataset_bytes": 120}
    cache: Json = {"held_bytes": 99, "dataset_bytes": 100}
    figures: Json = {"identity": str(identity), "version": 3, "residency": pages}
    held = held_by_mount("team", figures, is_used=False)
    assert held == HeldDataset("team", identity, 3, 25)
    task: Json = {"version": 3, "node_cache": cache}
    held = held_by_mount("team", {**figures, "task": task}, is_used=True)
    assert held == HeldDataset("team", identity, 3, 99, 0, is_used=True)
    held = held_by_mount("team", {**figures, "task": {**task, "version": 2}}, is_used=False)
    assert held == HeldDataset("team", identity, 3, 25)
    assert held_by_mount("team", {"residency": pages}, is_used=False) is None


# Writing


@pytest.fixture
def client(cluster: ApiStandIn) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


def report_in(cluster: ApiStandIn, node: str = "node-1") -> NodeReport:
    return parse_config_map(cluster.objects["configmaps", report_name(node)])


def test_a_report_is_written_after_a_noticeable_change(cluster: ApiStandIn, client: Client) -> None:
    now_s, is_complete = 1_800_000_000.0, True
    one = HeldDataset("team", uuid4(), 7, 40, 20)
    datasets = [one]
    reporter = NodeReporter(
        client, "node-1", "diesel-system", lambda: (datasets, is_complete), clock=lambda: now_s
    )
    assert reporter.report()
    assert report_in(cluster).datasets == (one,)
    assert not reporter.report()
    for share, is_written in ((60, True), (64, False), (65, True), (100, True), (0, True)):
        datasets = [replace(one, share=share, disk=0)]
        assert reporter.report() == is_written, share
    assert report_in(cluster).datasets[0].share == 0
    is_complete = False
    assert reporter.report()
    datasets = []
    assert reporter.report()
    now_s += REFRESH_S - 1
    assert not reporter.report()
    now_s += 1
    assert reporter.report()
    assert report_in(cluster) == NodeReport("node-1", int(now_s), is_complete=False)
    del cluster.objects["configmaps", report_name("node-1")]
    is_complete = True
    assert reporter.report()
    assert report_in(cluster).is_complete


def test_a_report_has_its_nodes_name_and_ends_with_the_pod(
    cluster: ApiStandIn, client: Client
) -> None:
    pod = cluster.put("pods", {"metadata": {"name": "diesel-csi-x"}})
    for node in ("node-1", "node-" + "x" * 200):
        NodeReporter(client, node, "diesel-system", lambda: ([], True), pod="diesel-csi-x").report()
        assert report_in(cluster, node).node == node
    names = [name for kind, name in cluster.objects if kind == "configmaps"]
    assert names[0] == "diesel-node-node-1"
    assert len(names[1]) < 80
    one = cluster.objects["configmaps", names[0]]
    assert at(one, "metadata", "ownerReferences", 0, "uid") == at(pod, "metadata", "uid")
    client.delete(Pod, "diesel-csi-x")
    assert not cluster.objects


def test_a_thread_reports_and_goes_on_after_errors(cluster: ApiStandIn, client: Client) -> None:
    held, is_failing = HeldDataset("team", uuid4(), 7, 40, 20), True

    def measure() -> tuple[list[HeldDataset], bool]:
        if is_failing:
            raise OSError("a disk has gone")
        return [held], True

    reporter = NodeReporter(client, "node-1", "diesel-system", measure, interval_s=0.01)
    reporter.start()
    is_failing = False
    wait_until(lambda: ("configmaps", report_name("node-1")) in cluster.objects)
    reporter.close()
    assert report_in(cluster).datasets == (held,)
