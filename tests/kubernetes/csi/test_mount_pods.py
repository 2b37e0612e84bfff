"""Mounts that are pods: what the plugin asks of the cluster, and what is left of it.

The API server and the kubelet are stand-ins (`cluster.py`); the mounts are real.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from lightkube import Client, KubeConfig

from diesel_fs.errors import DieselError, NotFoundError
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.pods import PodMounter, PodOptions
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.volumes import Limits
from diesel_kubernetes.names import LABEL_NODE
from tests.waiting import wait_until

from .cluster import Cluster, Json, inner, running_cluster
from .conftest import FILES
from .test_manifests import of_kind
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


@contextmanager
def node_volumes(
    cluster: Cluster, folder: Path, store: str, idle_s: float = 0
) -> Iterator[NodeVolumes]:
    """The logic of a plugin whose mounts are pods, in this process."""
    state = StateFolder(folder)
    config = {
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    client = Client(KubeConfig.from_dict(config), namespace="diesel-system")
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
    verbs = {"POST": {"create"}, "PATCH": {"patch"}, "DELETE": {"delete"}}
    rules = cast("list[Json]", of_kind("Role")["rules"])
    allowed = {inner(each, "resources", 0): inner(each, "verbs") for each in rules}
    for call in cluster.calls:
        verb, plural = call.split()
        assert verbs.get(verb, {"get", "list"}) & {*cast("list[str]", allowed[plural])}, call


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
