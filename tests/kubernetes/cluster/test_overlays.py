"""The overlays on a real API server: its schemas, defaults and admission accept every object.

`kubectl apply -k` itself is used, also a second time, as after a change. No kubelet is there, so no
pod runs.
"""

import subprocess
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Namespace, Pod

from tests.deploy.manifests import KUBERNETES, OVERLAYS, render
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.waiting import wait_until


def kubectl(control_plane: ControlPlane, *words: str) -> str:
    done = subprocess.run(
        ["kubectl", f"--kubeconfig={control_plane.kubeconfig}", *words],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_for_this_release(folder: Path) -> Path:
    """A copy of the manifests, with kinds in the versions that Kubernetes 1.20 has."""
    copy = folder / "kubernetes"
    for path in KUBERNETES.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        text = text.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")
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
    # The controllers make pods of it, which admission accepts, too
    labels = {"app.kubernetes.io/name": "diesel-server"}
    wait_until(lambda: any(client.list(Pod, namespace="diesel", labels={**labels})))
    kubectl(control_plane, "delete", "--wait=false", "-k", folder)
    gone = {"diesel", "diesel-system"}
    wait_until(lambda: not gone & {each.metadata.name for each in client.list(Namespace)
                                   if each.metadata and each.metadata.name}, 120.0)  # fmt: skip
