"""The manifests of the CSI driver and the examples: their schemas, and the driver itself."""

from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest

from diesel_kubernetes.csi.main import program
from diesel_kubernetes.csi.volumes import Volume, VolumeLimits, check_mount_flags, parse_volume
from diesel_kubernetes.names import DRIVER, POD_NAME, POD_NAMESPACE, SECRETS
from tests.deploy.manifests import KUBERNETES
from tests.kubernetes.fields import Json, at, fields, items, text, texts
from tests.kubernetes.manifests import check_schemas, objects

BASE, EXAMPLES = KUBERNETES / "base/csi", KUBERNETES / "examples"


def of_kind(kind: str, folder: Path = BASE) -> Json:
    (found,) = [each for each in objects(folder) if each["kind"] == kind]
    return found


def pods_in(manifest: Json) -> Iterator[Json]:
    for key, value in manifest.items():
        if key == "spec" and isinstance(value, dict) and "containers" in value:
            yield value
        elif isinstance(value, dict):
            yield from pods_in(value)


def test_manifests_have_the_published_schemas() -> None:
    found = objects(BASE, EXAMPLES)
    assert len(found) > 10
    without_schema = [each for each in found if each["kind"] == "PyTorchJob"]
    inside = [spec for each in without_schema for spec in pods_in(each)]
    assert len(inside) == 2 * len(without_schema) > 0
    check_schemas(each for each in found if each not in without_schema)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    check_schemas({**pod, "spec": spec} for spec in inside)
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schemas([{**of_kind("CSIDriver"), "spec": {"attachRequired": "no"}}])


def volumes_of_examples() -> Iterator[tuple[Volume, str]]:
    """All volumes of the driver in the examples, read as the driver reads them, and the kinds of
    the examples."""
    for each in objects(EXAMPLES):
        declared = [fields(each, "spec", "csi")] if each["kind"] == "PersistentVolume" else []
        for spec in pods_in(each):
            declared += [fields(one, "csi") for one in items(spec, "volumes")]
        for csi in filter(None, declared):
            assert csi["driver"] == DRIVER
            pod = {POD_NAMESPACE: "default", POD_NAME: "train-worker-0"}
            volume = parse_volume({**texts(csi, "volumeAttributes"), **pod}, {}, VolumeLimits())
            yield volume, text(each, "kind")


def test_the_driver_accepts_the_volumes_of_the_examples() -> None:
    volumes, kinds = zip(*volumes_of_examples(), strict=True)
    assert sorted(kinds) == ["Job", "PersistentVolume", "Pod", "PyTorchJob", "PyTorchJob"]
    ranks = [one for volume in volumes for one in volume.options if one.startswith("--rank")]
    assert sorted(ranks) == ["--rank=0", "--rank=0", "--rank=1"]
    flags = items(of_kind("PersistentVolume", EXAMPLES), "spec", "mountOptions")
    check_mount_flags([str(flag) for flag in flags])
    assert fields(of_kind("Secret", EXAMPLES), "stringData").keys() <= SECRETS.keys()


def test_the_driver_object_declares_the_drivers_needs() -> None:
    assert at(of_kind("CSIDriver"), "metadata", "name") == DRIVER
    assert of_kind("CSIDriver")["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "requiresRepublish": True,
        "fsGroupPolicy": "None",
        "volumeLifecycleModes": ["Persistent", "Ephemeral"],
    }
    assert of_kind("StorageClass", EXAMPLES)["provisioner"] == DRIVER


def test_the_pods_containers_and_kubelet_find_the_plugin_and_its_mounts() -> None:
    (spec,) = pods_in(of_kind("DaemonSet"))
    plugin, registrar, liveness = items(spec, "containers")
    given = [str(each) for each in items(plugin, "args")]
    with program.make_context("diesel-csi", given) as context:
        endpoint, state = str(context.params["endpoint"]), str(context.params["state"])
    assert endpoint == "unix:///csi/csi.sock"
    for container in (registrar, liveness):
        assert "--csi-address=/csi/csi.sock" in items(container, "args")
    mounted = {text(each, "mountPath"): each for each in items(plugin, "volumeMounts")}
    for path in (state, "/var/lib/kubelet/pods"):
        assert at(mounted[path], "mountPropagation") == "Bidirectional"
    places = {text(each, "name"): text(each, "hostPath", "path") for each in items(spec, "volumes")}
    assert places["state"] == state  # a mount pod has it at the same path
    kubelet = f"/var/lib/kubelet/plugins/{DRIVER}"
    assert places["socket"] == kubelet
    path = f"--kubelet-registration-path={kubelet}/csi.sock"
    assert path in items(registrar, "args")
