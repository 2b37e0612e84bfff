"""What nodes report, with the rights of the manifests on a real API server: the plugin's ConfigMap
reaches the status of the Dataset, and goes with the plugin's pod."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Pod
from lightkube.types import PatchType

from diesel_kubernetes.csi.reporter import NodeReporter
from diesel_kubernetes.names import LABEL_NODE
from diesel_kubernetes.operator.fields import Json, fields, items
from diesel_kubernetes.reports import HeldDataset
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.kubernetes.cluster.operators import (
    DRIVER_ACCOUNT,
    SYSTEM,
    DatasetResource,
    Operator,
    Resources,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def plugin(control_plane: ControlPlane) -> Iterator[Client]:
    """A client with the rights of the plugin."""
    config = KubeConfig.from_file(control_plane.kubeconfig_of(SYSTEM, DRIVER_ACCOUNT))
    with Client(config, namespace=SYSTEM) as client:
        yield client


def test_a_report_reaches_the_status_and_goes_with_the_plugins_pod(
    client: Client,
    control_plane: ControlPlane,
    resources: Resources,
    plugin: Client,
    tmp_path: Path,
) -> None:
    identity, namespace = uuid4(), resources.namespace
    resources.make_dataset("pets", {"url": "diesel+tls://host:1", "source": {"existing": {}}})
    ready: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 10**6, "version": 7,
                   "identity": str(identity)}  # fmt: skip
    client.patch(
        DatasetResource.Status,
        "pets",
        {"status": ready},
        namespace=namespace,
        patch_type=PatchType.MERGE,
    )
    pod, node = f"diesel-csi-{namespace}", f"node-{namespace}"
    spec = PodSpec(containers=[Container(name="plugin", image="none")], nodeName="no-such-node")
    client.create(Pod(metadata=ObjectMeta(name=pod, namespace=SYSTEM), spec=spec))
    share = 40

    def measure() -> tuple[list[HeldDataset], bool]:
        return [HeldDataset(namespace, identity, 7, share, 30, is_used=True)], True

    def shown() -> list[Json]:
        return [fields(each) for each in items(resources.dataset("pets"), "status", "nodes")]

    wrong = ConfigMap(
        metadata=ObjectMeta(name=f"wrong-{namespace}", namespace=SYSTEM, labels={LABEL_NODE: "x"}),
        data={"report": "no report"},
    )
    client.create(wrong)
    with Operator(control_plane, tmp_path, f"--namespace={namespace}") as operator:
        reporter = NodeReporter(plugin, node, SYSTEM, measure, pod=pod)
        assert reporter.report()
        wanted: Json = {"name": node, "state": "Active", "share": 40, "keeps": True,
                        "diskShare": 30, "measured": True}  # fmt: skip
        wait_until(lambda: shown() == [wanted], otherwise=operator.last_lines)
        share = 90
        assert reporter.report()
        wanted["share"] = 90
        wait_until(lambda: shown() == [wanted], otherwise=operator.last_lines)
        assert f"wrong-{namespace}" in operator.last_lines()
        with pytest.raises(ApiError, match="forbidden"):
            plugin.get(ConfigMap, f"diesel-node-{node}")
        client.delete(Pod, pod, namespace=SYSTEM, grace_period=0)
        kept: Json = {"name": node, "state": "Cached", "share": 30, "keeps": True,
                      "measured": False}  # fmt: skip
        wait_until(lambda: shown() == [kept], 120.0, otherwise=operator.last_lines)
    client.delete(ConfigMap, f"wrong-{namespace}", namespace=SYSTEM)
