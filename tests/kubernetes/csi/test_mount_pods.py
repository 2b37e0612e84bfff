"""Mounts that are pods: what the plugin asks of the cluster, and what is left of it.

The API server and the kubelet are stand-ins (`cluster.py`); the mounts are real.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lightkube import Client, KubeConfig
from lightkube.resources.core_v1 import Secret

from diesel_fs.errors import ConfigError, DieselError, NotFoundError, PermissionDenied
from diesel_kubernetes.api import api_errors, image_in_pod
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.pods import PodMounter, PodOptions
from diesel_kubernetes.csi.reporter import NodeReporter
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.volumes import Limits
from diesel_kubernetes.names import LABEL_NODE
from diesel_kubernetes.reports import parse_config_map
from tests.waiting import wait_until

from .cluster import Cluster, Json, inner, rights, running_cluster
from .conftest import FILES
from .plugin import running_plugin
from .test_publishing import shown

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]

OPTIONS = PodOptions("node-1", "diesel-system", "registry.example/diesel-fs:1")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder from which mounts propagate, as from a hostPath of a mount pod."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    for options in (["--bind", str(folder)], ["--make-shared"]):
        subprocess.run(["mount", *options, folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)  # fails where a mount is left in it


def kubeconfig(cluster: Cluster) -> Json:
    """A kubeconfig of the plugin."""
    return {
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


@contextmanager
def node_volumes(
    cluster: Cluster, folder: Path, store: str, idle_s: float = 0
) -> Iterator[NodeVolumes]:
    """The logic of a plugin whose mounts are pods, in this process."""
    state = StateFolder(folder)
    client = Client(KubeConfig.from_dict(kubeconfig(cluster)), namespace="diesel-system")
    mounter = PodMounter(state, client, OPTIONS)
    mounter.tidy()
    volumes = NodeVolumes(state, mounter, Limits(url=store), idle_s=idle_s, starts_max=2)
    try:
        yield volumes
    finally:
        volumes.close()
        client.close()
        state.close()


def publish(volumes: NodeVolumes, target: Path, **more: str) -> None:
    """Publish `pets`, with a secret."""
    volumes.publish(
        str(target),
        {"dataset": "pets", **more},
        {"redisPassword": "canary"},
        [],
        timeout_s=60,
        is_wanted=lambda: True,
    )


def test_a_mount_is_a_pod_of_the_node(
    cluster: Cluster, store: str, state: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    with node_volumes(cluster, state, store) as volumes:
        publish(volumes, target)
        assert shown(target) == FILES
        secret, pod = cluster.made
        assert secret["stringData"] == {"DIESEL_REDIS_PASSWORD": "canary"}
        assert "canary" not in json.dumps(pod)
        (running,) = cluster.objects.values()  # the Secret went when the mount worked
        name = inner(running, "metadata", "name")
        assert inner(pod, "spec", "nodeName") == "node-1"
        assert inner(pod, "spec", "restartPolicy") == "Never"
        assert inner(pod, "metadata", "labels", LABEL_NODE) == "node-1"
        container = inner(pod, "spec", "containers", 0)
        assert inner(container, "image") == OPTIONS.image
        assert inner(container, "envFrom", 0, "secretRef", "name") == name
        assert inner(container, "volumeMounts", 0, "mountPropagation") == "Bidirectional"
        assert inner(pod, "spec", "volumes", 0, "hostPath", "path") == str(
            next((state / "mounts").iterdir())
        )
        assert "PATCH secrets" in cluster.calls  # the pod owned it meanwhile
        publish(volumes, tmp_path / "second")
        assert len(cluster.made) == 2
        for each in (target, tmp_path / "second"):
            volumes.unpublish(str(each))
        wait_until(lambda: not cluster.objects)
        wait_until(lambda: not os.listdir(state / "mounts"))
    config = KubeConfig.from_dict(kubeconfig(cluster))
    with Client(config, namespace="diesel-system") as client:
        NodeReporter(client, "node-1", "diesel-system", lambda: ([], True)).report()
    assert cluster.used == rights(), "a right that the Role has and the plugin does not need"


def test_a_pod_that_fails_says_why_and_is_deleted(
    cluster: Cluster, store: str, state: Path, tmp_path: Path
) -> None:
    with node_volumes(cluster, state, store) as volumes:
        with pytest.raises(NotFoundError, match="no-such"):
            publish(volumes, tmp_path / "mount", dataset="no-such")
        assert not cluster.objects
        assert not (tmp_path / "mount").exists()


def test_a_mount_pod_that_is_killed_gets_a_successor(
    cluster: Cluster, store: str, state: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    with node_volumes(cluster, state, store) as volumes:
        publish(volumes, target)
        (name,) = [name for kind, name in cluster.objects if kind == "pods"]
        cluster.kill_pod(name)
        wait_until(lambda: volumes.condition(str(target)).trouble)
        publish(volumes, target)
        assert shown(target) == FILES
        wait_until(lambda: ("pods", name) not in cluster.objects)
        volumes.unpublish(str(target))
        wait_until(lambda: not cluster.objects)


def test_the_next_plugin_deletes_what_did_not_come_up(
    cluster: Cluster, store: str, state: Path, tmp_path: Path
) -> None:
    """A Secret without an owner, a pod that never started, and a pod whose folder is gone."""
    labels = {LABEL_NODE: "node-1"}
    for plural, name in (("pods", "diesel-mount-lost-1"), ("secrets", "diesel-mount-lost-1")):
        cluster.hold_pods = True
        path = f"/api/v1/namespaces/diesel-system/{plural}"
        cluster.answer("POST", path, {"metadata": {"name": name, "labels": labels}})
        cluster.hold_pods = False
    other: Json = {"metadata": {"name": "of-another-node", "labels": {LABEL_NODE: "node-2"}}}
    cluster.answer("POST", "/api/v1/namespaces/diesel-system/secrets", other)
    with node_volumes(cluster, state, store):
        assert [name for _, name in cluster.objects] == ["of-another-node"]


def test_a_mount_pod_outlives_the_plugin(
    cluster: Cluster, store: str, state: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    with node_volumes(cluster, state, store) as volumes:
        publish(volumes, target)
    assert shown(target) == FILES
    with node_volumes(cluster, state, store) as volumes:
        publish(volumes, target)
        assert len(cluster.objects) == 1
        volumes.unpublish(str(target))
        wait_until(lambda: not cluster.objects)


def test_an_api_that_is_away_is_an_error(store: str, state: Path, tmp_path: Path) -> None:
    with running_cluster() as cluster, node_volumes(cluster, state, store) as volumes:
        cluster.url = ""
        cluster.close()
        with pytest.raises(DieselError, match="cannot be reached"):
            publish(volumes, tmp_path / "mount")


def add_own_pod(cluster: Cluster) -> None:
    """The plugin's own pod, `diesel-csi-x`, as the DaemonSet makes it."""
    images = {"sidecar": "sidecar:1", "plugin": OPTIONS.image}
    containers = [{"name": name, "image": image} for name, image in images.items()]
    cluster.hold_pods = True
    pods = "/api/v1/namespaces/diesel-system/pods"
    metadata = {"name": "diesel-csi-x", "labels": {"app.kubernetes.io/name": "diesel-csi"}}
    pod: Json = {"metadata": metadata, "spec": {"containers": containers}}
    assert cluster.answer("POST", pods, pod)[0] == 201
    cluster.hold_pods = False


def test_a_mount_pod_has_the_image_of_the_plugins_own_pod(
    cluster: Cluster, store: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin is told its pod's name alone, as by the DaemonSet; its report belongs to it."""
    add_own_pod(cluster)
    (tmp_path / "config").write_text(json.dumps(kubeconfig(cluster)))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("DIESEL_CSI_POD", "diesel-csi-x")
    target = tmp_path / "mount"
    options = ("--mounter=pod", f"--url={store}", "--idle=0")
    with running_plugin(state.parent, *options) as plugin:
        plugin.kubelet.publish(target, {"dataset": "pets"})
        assert shown(target) == FILES
        (made,) = [each for each in cluster.made if inner(each, "spec", "nodeName")]
        assert inner(made, "spec", "containers", 0, "image") == OPTIONS.image
        plugin.kubelet.unpublish(target)
        own = {("pods", "diesel-csi-x"), ("configmaps", "diesel-node-node-1")}
        wait_until(lambda: cluster.objects.keys() == own)
        report = cluster.objects["configmaps", "diesel-node-node-1"]
        assert inner(report, "metadata", "ownerReferences", 0, "name") == "diesel-csi-x"
        assert parse_config_map(report).is_complete


def test_an_image_that_cannot_be_found_out_is_an_error(cluster: Cluster) -> None:
    add_own_pod(cluster)
    config = KubeConfig.from_dict(kubeconfig(cluster))
    with Client(config, namespace="diesel-system") as client:
        with pytest.raises(ConfigError, match="has no container 'other'"):
            image_in_pod(client, "diesel-csi-x", "other")
        with pytest.raises(NotFoundError, match="diesel-csi-y"):
            image_in_pod(client, "diesel-csi-y", "plugin")
        with pytest.raises(PermissionDenied, match="may not get secrets"), api_errors():
            client.get(Secret, "any")
