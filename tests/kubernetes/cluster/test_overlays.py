"""The overlays on a real API server: its schemas, defaults and admission take every object.

`kubectl apply -k` itself is used, also a second time, as after a change. No kubelet is there, so no
pod runs.
"""

import subprocess
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.apps_v1 import DaemonSet, Deployment, StatefulSet
from lightkube.resources.core_v1 import ConfigMap, Namespace, Pod

from diesel_kubernetes.operator.fields import Json
from tests.deploy.manifests import KUBERNETES, OVERLAYS, key, render
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.waiting import wait_until

NOT_IN_THIS_RELEASE = {"PodDisruptionBudget": ("policy/v1", "policy/v1beta1")}
"""Kinds that Kubernetes 1.20 has in an older version alone."""


def kubectl(control_plane: ControlPlane, *words: str, text: str = "") -> str:
    """What kubectl prints."""
    done = subprocess.run(
        ["kubectl", f"--kubeconfig={control_plane.kubeconfig}", *words],
        check=False, capture_output=True, text=True, timeout=120, input=text,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_for_this_release(folder: Path) -> Path:
    """A copy of the manifests, with kinds in the versions that this release has."""
    copy = folder / "kubernetes"
    for path in KUBERNETES.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        for newer, older in NOT_IN_THIS_RELEASE.values():
            text = text.replace(f"apiVersion: {newer}\n", f"apiVersion: {older}\n")
        place = copy / path.relative_to(KUBERNETES)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return copy


@pytest.mark.parametrize("name", [path.name for path in OVERLAYS])
def test_kubectl_applies_an_overlay(
    control_plane: ControlPlane, client: Client, name: str, tmp_path: Path
) -> None:
    copy = copy_for_this_release(tmp_path)
    kubectl(control_plane, "apply", "-k", str(copy / "base/definitions"))
    folder = str(copy / "overlays" / name)
    kubectl(control_plane, "apply", "-k", folder)
    again = kubectl(control_plane, "apply", "-k", folder).splitlines()
    assert len(again) == len(render(KUBERNETES / "overlays" / name))
    assert [line for line in again if not line.endswith(("unchanged", "configured"))] == []
    server = client.get(Deployment, "diesel-server", namespace="diesel")
    assert server.spec is not None
    assert server.spec.replicas == 2
    assert server.spec.template.spec is not None
    (settings,) = [
        source.configMapRef.name
        for source in server.spec.template.spec.containers[0].envFrom or []
        if source.configMapRef
    ]
    data = client.get(ConfigMap, settings or "", namespace="diesel").data
    assert data is not None
    assert data["DIESEL_SERVER_STORE"] == "s3://diesel-example/main"
    driver = client.get(DaemonSet, "diesel-csi", namespace="diesel-system")
    assert driver.spec is not None
    # The controllers make pods of it, which admission takes, too
    wait_until(lambda: any(pods_of(client, "diesel-server")))
    objects: list[Json] = render(KUBERNETES / "overlays" / name)
    if ("StatefulSet", "diesel", "diesel-redis") in map(key, objects):
        assert client.get(StatefulSet, "diesel-redis", namespace="diesel").spec is not None
    kubectl(control_plane, "delete", "--wait=false", "-k", folder)
    gone = {"diesel", "diesel-system"}
    wait_until(lambda: not gone & {each.metadata.name for each in client.list(Namespace)
                                   if each.metadata and each.metadata.name}, 120.0)  # fmt: skip


def pods_of(client: Client, name: str) -> list[Pod]:
    """The pods of the server."""
    return list(client.list(Pod, namespace="diesel", labels={"app.kubernetes.io/name": name}))
