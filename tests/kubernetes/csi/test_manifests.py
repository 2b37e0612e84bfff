"""The manifests of the CSI driver and the examples: their schemas, and the driver itself."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import kubernetes_validate
import pytest
import yaml

from diesel_kubernetes.csi.main import PREFIX, program
from diesel_kubernetes.csi.volumes import Limits, Volume, check_mount_flags, parse_volume
from diesel_kubernetes.names import DRIVER, POD_NAME, POD_NAMESPACE, SECRETS

from .cluster import Json, inner

DEPLOY = Path(__file__).resolve().parents[3] / "deploy/kubernetes"
BASE, EXAMPLES = DEPLOY / "base/csi", DEPLOY / "examples"
OLDEST = "1.27"


def documents(path: Path) -> list[Json]:
    """The objects in a file."""
    return [cast("Json", each) for each in yaml.safe_load_all(path.read_text()) if each]


def objects(folder: Path) -> list[Json]:
    """The objects in all files of a folder, but for what kustomize reads."""
    files = [path for path in sorted(folder.glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [each for path in files for each in documents(path)]


def of_kind(kind: str, folder: Path = BASE) -> Json:
    """The only object of a kind."""
    (found,) = [each for each in objects(folder) if each["kind"] == kind]
    return found


def pods_in(manifest: Json) -> Iterator[Json]:
    """The specifications of pods in an object, however deep they lie."""
    for key, value in manifest.items():
        if key == "spec" and isinstance(value, dict) and "containers" in value:
            yield value
        elif isinstance(value, dict):
            yield from pods_in(value)


def as_pod(spec: Json) -> Json:
    """A pod with a specification, which a kind without a published schema has inside."""
    metadata = {"name": "x"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_manifests_have_the_published_schemas(version: str) -> None:
    found = [*objects(BASE), *objects(EXAMPLES)]
    assert len(found) > 10
    for each in found:
        checked = [each]
        if each["kind"] == "PyTorchJob":
            checked = [as_pod(spec) for spec in pods_in(each)]
            assert len(checked) == 2
        for one in checked:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_mistake_is_found() -> None:
    driver = {**of_kind("CSIDriver"), "spec": {"attachRequired": "no"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(driver, OLDEST, strict=True)


def volumes_of_examples() -> Iterator[tuple[Volume, Json]]:
    """All volumes of the driver in the examples, read as the driver reads them."""
    for each in objects(EXAMPLES):
        declared = [inner(each, "spec", "csi")] if each["kind"] == "PersistentVolume" else []
        for spec in pods_in(each):
            declared += [inner(one, "csi") for one in cast("list[Json]", spec["volumes"])]
        for csi in filter(None, declared):
            assert inner(csi, "driver") == DRIVER
            attributes = cast("dict[str, str]", inner(csi, "volumeAttributes"))
            pod = {POD_NAMESPACE: "default", POD_NAME: "train-worker-0"}
            yield parse_volume({**attributes, **pod}, {}, Limits()), each


def test_the_driver_takes_the_volumes_of_the_examples() -> None:
    found = [(volume, example["kind"]) for volume, example in volumes_of_examples()]
    kinds = sorted(str(kind) for _, kind in found)
    assert kinds == ["Job", "PersistentVolume", "Pod", "PyTorchJob", "PyTorchJob"]
    ranks = [one for volume, _ in found for one in volume.options if one.startswith("--rank")]
    assert sorted(ranks) == ["--rank=0", "--rank=0", "--rank=1"]
    volume = of_kind("PersistentVolume", EXAMPLES)
    check_mount_flags(cast("list[str]", inner(volume, "spec", "mountOptions")))
    secret = cast("Json", of_kind("Secret", EXAMPLES)["stringData"])
    assert secret.keys() <= SECRETS.keys()


def test_the_driver_object_says_what_the_driver_needs() -> None:
    assert inner(of_kind("CSIDriver"), "metadata", "name") == DRIVER
    assert of_kind("CSIDriver")["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "requiresRepublish": True,
        "fsGroupPolicy": "None",
        "volumeLifecycleModes": ["Persistent", "Ephemeral"],
    }
    assert of_kind("StorageClass", EXAMPLES)["provisioner"] == DRIVER


def test_the_plugin_is_started_with_options_that_it_has() -> None:
    (spec,) = pods_in(of_kind("DaemonSet"))
    plugin, registrar, liveness = cast("list[Json]", spec["containers"])
    names = {each.name for each in program.params}
    for variable in cast("list[Json]", plugin["env"]):
        assert str(variable["name"]).removeprefix(f"{PREFIX}_").lower() in names
    given = cast("list[str]", plugin["args"])
    with program.make_context("diesel-csi", list(given)) as context:
        endpoint, state = str(context.params["endpoint"]), str(context.params["state"])
    mounted = {str(each["mountPath"]): each for each in cast("list[Json]", plugin["volumeMounts"])}
    assert endpoint == "unix:///csi/csi.sock"
    for container in (registrar, liveness):
        assert "--csi-address=/csi/csi.sock" in cast("list[str]", container["args"])
    for path in (state, "/var/lib/kubelet/pods"):
        assert mounted[path]["mountPropagation"] == "Bidirectional"
    places = {
        str(each["name"]): inner(each, "hostPath", "path")
        for each in cast("list[Json]", spec["volumes"])
    }
    assert places["state"] == state  # a mount pod has it at the same path
    kubelet = f"/var/lib/kubelet/plugins/{DRIVER}"
    assert places["socket"] == kubelet
    path = f"--kubelet-registration-path={kubelet}/csi.sock"
    assert path in cast("list[str]", registrar["args"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_base() -> None:
    command = ["kubectl", "kustomize", str(BASE)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rendered = [each for each in yaml.safe_load_all(text) if each]

    def keys(some: list[Json]) -> set[tuple[str, str]]:
        return {(str(each["kind"]), str(inner(each, "metadata", "name"))) for each in some}

    assert keys(rendered) == keys(objects(BASE))
