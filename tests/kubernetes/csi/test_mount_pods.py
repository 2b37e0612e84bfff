"""Mounts that are pods: the plugin's calls of the cluster, and the objects that stay.

The API server and the kubelet are stand-ins (`cluster.py`); the mounts are real.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lightkube.resources.core_v1 import Secret

from diesel_fs.errors import ConfigError, DieselError, NotFoundError, PermissionDenied
from diesel_kubernetes.api import api_errors, image_in_pod
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.pods import PodMounter, PodOptions
from diesel_kubernetes.csi.reporter import NodeReporter
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.volumes import VolumeLimits
from diesel_kubernetes.names import LABEL_NODE
from diesel_kubernetes.reports import parse_config_map
from tests.kubernetes.fields import Json, at, fields
from tests.waiting import wait_until

from .cluster import ApiStandIn, rights
from .conftest import FILES, MOUNTS_AS_ROOT, node_volumes, publish, shown
from .plugin import running_plugin

pytestmark = MOUNTS_AS_ROOT

OPTIONS = PodOptions("node-1", "diesel-system", "registry.example/diesel-fs:1")
SECRETS = {"redisPassword": "canary"}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder from which mounts propagate, as from a hostPath of a mount pod."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    for options in (["--bind", str(folder)], ["--make-shared"]):
        subprocess.run(["mount", *options, folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)  # fails if a mount is left in it


@contextmanager
def plugin_in(folder: Path, cluster: ApiStandIn, url: str) -> Iterator[NodeVolumes]:
    state = StateFolder(folder)
    with cluster.client() as client:
        mounter = PodMounter(state, client, OPTIONS)
        mounter.tidy()
        with node_volumes(state, mounter, VolumeLimits(url=url)) as volumes:
            yield volumes


@pytest.fixture
def volumes(state: Path, cluster: ApiStandIn, pets: dict[str, str]) -> Iterator[NodeVolumes]:
    with plugin_in(state, cluster, pets["url"]) as volumes:
        yield volumes


def test_a_mount_is_a_pod_of_the_node(
    cluster: ApiStandIn, state: Path, volumes: NodeVolumes, tmp_path: Path
) -> None:
    target, second = tmp_path / "mount", tmp_path / "second"
    publish(volumes, target, secrets=SECRETS)
    assert shown(target) == FILES
    secret, pod = cluster.made
    assert secret["stringData"] == {"DIESEL_REDIS_PASSWORD": "canary"}
    assert "canary" not in json.dumps(pod)
    (running,) = cluster.objects.values()  # the Secret went when the mount worked
    assert at(pod, "spec", "nodeName") == "node-1"
    assert at(pod, "spec", "restartPolicy") == "Never"
    assert at(pod, "metadata", "labels", LABEL_NODE) == "node-1"
    container = fields(pod, "spec", "containers", 0)
    assert container["image"] == OPTIONS.image
    assert at(container, "envFrom", 0, "secretRef", "name") == at(running, "metadata", "name")
    assert at(container, "volumeMounts", 0, "mountPropagation") == "Bidirectional"
    (folder,) = (state / "mounts").iterdir()
    assert at(pod, "spec", "volumes", 0, "hostPath", "path") == str(folder)
    assert ("secrets", "patch") in cluster.used  # the pod owned it meanwhile
    publish(volumes, second, secrets=SECRETS)
    assert len(cluster.made) == 2
    for each in (target, second):
        volumes.unpublish(str(each))
    wait_until(lambda: not cluster.objects)
    wait_until(lambda: not os.listdir(state / "mounts"))
    with cluster.client() as client:
        NodeReporter(client, "node-1", "diesel-system", lambda: ([], True)).report()
    assert cluster.used == rights(), "a right that the Role has and the plugin does not need"


def test_a_pod_that_fails_reports_the_reason_and_is_deleted(
    cluster: ApiStandIn, volumes: NodeVolumes, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="no-such"):
        publish(volumes, tmp_path / "mount", {"dataset": "no-such"}, secrets=SECRETS)
    assert not cluster.objects
    assert not (tmp_path / "mount").exists()


def test_the_next_plugin_deletes_pods_that_did_not_come_up(
    cluster: ApiStandIn, pets: dict[str, str], state: Path
) -> None:
    lost: Json = {"name": "diesel-mount-lost-1", "labels": {LABEL_NODE: "node-1"}}
    for plural in ("pods", "secrets"):
        cluster.put(plural, {"metadata": lost})
    other: Json = {"name": "of-another-node", "labels": {LABEL_NODE: "node-2"}}
    cluster.put("secrets", {"metadata": other})
    with plugin_in(state, cluster, pets["url"]):
        assert [name for _, name in cluster.objects] == ["of-another-node"]


def test_a_mount_pod_outlives_the_plugin_and_gets_a_successor_if_it_is_killed(
    cluster: ApiStandIn, pets: dict[str, str], state: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    with plugin_in(state, cluster, pets["url"]) as volumes:
        publish(volumes, target, secrets=SECRETS)
    assert shown(target) == FILES
    with plugin_in(state, cluster, pets["url"]) as volumes:
        publish(volumes, target, secrets=SECRETS)
        ((_, name),) = cluster.objects
        cluster.kill_pod(name)
        wait_until(lambda: volumes.condition(str(target)).trouble)
        publish(volumes, target, secrets=SECRETS)
        assert shown(target) == FILES
        wait_until(lambda: ("pods", name) not in cluster.objects)
        volumes.unpublish(str(target))
        wait_until(lambda: not cluster.objects)


def test_a_missing_api_is_an_error(
    cluster: ApiStandIn, volumes: NodeVolumes, tmp_path: Path
) -> None:
    cluster.close()
    with pytest.raises(DieselError, match="cannot be reached"):
        publish(volumes, tmp_path / "mount", secrets=SECRETS)


def add_own_pod(cluster: ApiStandIn) -> None:
    """The plugin's own pod, `diesel-csi-x`, as the DaemonSet makes it."""
    images = {"sidecar": "sidecar:1", "plugin": OPTIONS.image}
    containers = [{"name": name, "image": image} for name, image in images.items()]
    metadata = {"name": "diesel-csi-x", "labels": {"app.kubernetes.io/name": "diesel-csi"}}
    cluster.put("pods", {"metadata": metadata, "spec": {"containers": containers}})


def test_a_mount_pod_has_the_image_of_the_plugins_own_pod(
    cluster: ApiStandIn,
    pets: dict[str, str],
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The DaemonSet gives the plugin only its pod's name."""
    add_own_pod(cluster)
    (tmp_path / "config").write_text(json.dumps(cluster.kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("DIESEL_CSI_POD", "diesel-csi-x")
    target = tmp_path / "mount"
    options = ("--mounter=pod", f"--url={pets['url']}", "--idle=0")
    with running_plugin(state.parent, *options) as plugin:
        plugin.kubelet.publish(target, {"dataset": "pets"})
        assert shown(target) == FILES
        (made,) = [each for each in cluster.made if at(each, "spec", "nodeName")]
        assert at(made, "spec", "containers", 0, "image") == OPTIONS.image
        plugin.kubelet.unpublish(target)
        own = {("pods", "diesel-csi-x"), ("configmaps", "diesel-node-node-1")}
        wait_until(lambda: cluster.objects.keys() == own)
        report = cluster.objects["configmaps", "diesel-node-node-1"]
        assert at(report, "metadata", "ownerReferences", 0, "name") == "diesel-csi-x"
        assert parse_config_map(report).is_complete


def test_an_image_that_cannot_be_found_out_is_an_error(cluster: ApiStandIn) -> None:
    add_own_pod(cluster)
    with cluster.client() as client:
        with pytest.raises(ConfigError, match="has no container 'other'"):
            image_in_pod(client, "diesel-csi-x", "other")
        with pytest.raises(NotFoundError, match="diesel-csi-y"):
            image_in_pod(client, "diesel-csi-y", "plugin")
        with pytest.raises(PermissionDenied, match="may not get secrets"), api_errors():
            client.get(Secret, "any")
