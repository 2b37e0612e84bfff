"""Runs the operator as a program with the rights of its manifests, for tests against a real API.

The CSI driver's program gets the rights of its own manifests here, too.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self, cast

import yaml
from lightkube import ApiError, Client
from lightkube.generic_resource import Generic, create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Namespace, Pod, ServiceAccount
from lightkube.resources.rbac_authorization_v1 import (
    ClusterRole,
    ClusterRoleBinding,
    Role,
    RoleBinding,
)
from lightkube.types import PatchType

from diesel_kubernetes.names import GROUP
from diesel_kubernetes.operator.fields import Json
from tests.cli.conftest import program_environment
from tests.kubernetes.cluster.control_plane import ControlPlane, wait_for_service_account

MANIFESTS = Path(__file__).resolve().parents[3] / "deploy/kubernetes/base/operator"
SYSTEM = "diesel-system"
ACCOUNT, DRIVER_ACCOUNT = "diesel-operator", "diesel-csi"

DatasetResource = create_namespaced_resource(GROUP, "v1alpha1", "Dataset", "datasets")
TrainingJobResource = create_namespaced_resource(GROUP, "v1alpha1", "TrainingJob", "trainingjobs")

_KINDS = {
    each.__name__: each
    for each in (
        CustomResourceDefinition, ServiceAccount, ClusterRole, ClusterRoleBinding, Role, RoleBinding
    )
}  # fmt: skip


def manifests(*names: str) -> list[Json]:
    """The objects of some bases of the manifests."""
    folders = [MANIFESTS.parent / name for name in names]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    files = [path for path in files if path.stem != "kustomization"]
    return [cast("Json", each) for path in files for each in yaml.safe_load_all(path.read_text())]


def install(client: Client) -> None:
    """Make the definitions, the accounts of operator and driver and their rights; not what runs
    them."""
    try:
        client.create(Namespace(metadata=ObjectMeta(name=SYSTEM)))
    except ApiError as error:
        if error.status.code != 409:
            raise
    for each in manifests("definitions", "operator", "operator-secrets", "csi"):
        kind = _KINDS.get(str(each["kind"]))
        if kind is not None:
            made = cast("CustomResourceDefinition", kind.from_dict(each))  # or another of them
            client.apply(made, field_manager="tests", force=True)
    for plural in ("datasets", "trainingjobs"):
        client.wait(CustomResourceDefinition, f"{plural}.{GROUP}", for_conditions=["Established"])
    for account in (ACCOUNT, DRIVER_ACCOUNT):
        wait_for_service_account(client, SYSTEM, account)


class Operator:
    """The program `diesel-operator` for some namespaces, from `with` to the end of `with`."""

    def __init__(
        self, control_plane: ControlPlane, folder: Path, *options: str, interval_s: float = 0.2
    ) -> None:
        self._kubeconfig = control_plane.kubeconfig_of(SYSTEM, ACCOUNT)
        self.log = folder / "operator.log"
        self._options = [*options, f"--interval={interval_s}"]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it; the log goes on."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m",
                 "diesel_kubernetes.operator", *self._options],
                env={**program_environment(), "KUBECONFIG": str(self._kubeconfig)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        """End it as a crash does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it by SIGTERM."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def memory_bytes(self) -> int:
        """Its resident memory."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = [each for each in lines if each.startswith("VmRSS:")]
        return int(line.split()[1]) << 10

    def last_lines(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""


def explained(resources: "Resources", operator: Operator) -> str:
    """What is in the namespace, for messages of failures."""
    lines = [operator.last_lines()]
    for kind in (DatasetResource, TrainingJobResource, Job, Pod, Event):
        for each in resources.client.list(kind, namespace=resources.namespace):
            shown = json.dumps(dict(each)) if isinstance(each, Generic) else str(each)
            lines.append(f"{kind.__name__} {shown}")
    return "\n".join(lines)


def python_environment() -> dict[str, str]:
    """The environment of an image in which `python` is the one of the tests."""
    made = program_environment()
    return {**made, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{made['PATH']}"}


class Resources:
    """Datasets and TrainingJobs of one namespace, for a test."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def make_dataset(self, name: str, spec: Mapping[str, object]) -> None:
        """Make a Dataset."""
        made = DatasetResource(metadata=ObjectMeta(name=name), spec=dict(spec))
        self.client.create(made, namespace=self.namespace)

    def make_job(self, name: str, spec: Mapping[str, object]) -> None:
        """Make a TrainingJob."""
        made = TrainingJobResource(metadata=ObjectMeta(name=name), spec=dict(spec))
        self.client.create(made, namespace=self.namespace)

    def change_dataset(self, name: str, spec: Mapping[str, object]) -> None:
        """Change fields of the spec of a Dataset."""
        self.client.patch(
            DatasetResource,
            name,
            {"spec": dict(spec)},
            namespace=self.namespace,
            patch_type=PatchType.MERGE,
        )

    def delete_dataset(self, name: str) -> None:
        """Delete a Dataset, and return at once."""
        self.client.delete(DatasetResource, name, namespace=self.namespace)

    def dataset(self, name: str) -> Json:
        """A Dataset; {} if it is gone."""
        return self._found(lambda: self.client.get(DatasetResource, name, namespace=self.namespace))

    def job(self, name: str) -> Json:
        """A TrainingJob; {} if it is gone."""
        return self._found(
            lambda: self.client.get(TrainingJobResource, name, namespace=self.namespace)
        )

    def _found(self, get: "object") -> Json:
        assert callable(get)
        try:
            return cast("Json", dict(get()))
        except ApiError as error:
            if error.status.code == 404:
                return {}
            raise


def now_s() -> float:
    """A clock for durations that a test prints."""
    return time.monotonic()
