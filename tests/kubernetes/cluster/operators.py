"""Runs the operator as a program with the rights of its manifests, for tests against a real API.

The CSI driver's program gets the rights of its own manifests here, too.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self, cast

from lightkube import ApiError, Client
from lightkube.generic_resource import (
    Generic,
    GenericNamespacedResource,
    create_namespaced_resource,
)
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

from diesel_kubernetes.names import GROUP
from tests.cli.conftest import program_environment
from tests.deploy.manifests import KUBERNETES, read
from tests.kubernetes.cluster.control_plane import ControlPlane, wait_for_service_account
from tests.kubernetes.fields import Json, fields, text
from tests.processes import resident_bytes
from tests.waiting import PATIENCE_S, wait_until

IMAGE = "diesel-fs"
OWN_IMAGE = "registry.example/diesel-fs:7"
"""The image of the operator's own pod."""
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


def install(client: Client) -> None:
    """Make the definitions, and the accounts of operator and driver with their rights, but no
    Deployment."""
    try:
        client.create(Namespace(metadata=ObjectMeta(name=SYSTEM)))
    except ApiError as error:
        if error.status.code != 409:
            raise
    for base in ("definitions", "operator", "operator-secrets", "csi"):
        for path in sorted((KUBERNETES / "base" / base).glob("*.yaml")):
            for each in read(path):
                kind = _KINDS.get(str(each["kind"]))
                if kind is not None:
                    made = cast("CustomResourceDefinition", kind.from_dict(each))  # or another one
                    client.apply(made, field_manager="tests", force=True)
    for plural in ("datasets", "trainingjobs"):
        client.wait(CustomResourceDefinition, f"{plural}.{GROUP}", for_conditions=["Established"])
    for account in ("default", ACCOUNT, DRIVER_ACCOUNT):
        wait_for_service_account(client, SYSTEM, account)


class Operator:
    def __init__(
        self, control_plane: ControlPlane, folder: Path, *options: str, interval_s: float = 0.2
    ) -> None:
        self._kubeconfig = control_plane.kubeconfig_of(SYSTEM, ACCOUNT)
        self._log = folder / "operator.log"
        self._options = [*options, f"--interval={interval_s}"]

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m",
                 "diesel_kubernetes.operator", *self._options],
                env={**program_environment(), "KUBECONFIG": str(self._kubeconfig)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def memory_bytes(self) -> int:
        return resident_bytes(self._process.pid, "VmRSS")

    def last_lines(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


class Resources:
    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def make_dataset(self, name: str, spec: Json) -> None:
        made = DatasetResource(metadata=ObjectMeta(name=name), spec=spec)
        self.client.create(made, namespace=self.namespace)

    def make_job(self, name: str, spec: Json) -> None:
        made = TrainingJobResource(metadata=ObjectMeta(name=name), spec=spec)
        self.client.create(made, namespace=self.namespace)

    def dataset(self, name: str) -> Json:
        return self._found(DatasetResource, name)

    def job(self, name: str) -> Json:
        return self._found(TrainingJobResource, name)

    def dataset_in(self, phase: str, name: str, operator: Operator) -> Json:
        self.wait(lambda: text(self.dataset(name), "status", "phase") == phase, operator)
        return fields(self.dataset(name), "status")

    def job_in(self, phase: str, name: str, operator: Operator) -> Json:
        self.wait(lambda: text(self.job(name), "status", "phase") == phase, operator)
        return fields(self.job(name), "status")

    def wait(
        self, condition: Callable[[], object], operator: Operator, within_s: float = PATIENCE_S
    ) -> None:
        """Wait for a condition. A failure shows the objects in the namespace, and the operator's
        log."""
        wait_until(condition, within_s, otherwise=lambda: self._explained(operator))

    def _found(self, kind: type[GenericNamespacedResource], name: str) -> Json:
        try:
            return dict(self.client.get(kind, name, namespace=self.namespace))
        except ApiError as error:
            if error.status.code == 404:
                return {}
            raise

    def _explained(self, operator: Operator) -> str:
        lines = [operator.last_lines()]
        for kind in (DatasetResource, TrainingJobResource, Job, Pod, Event):
            for each in self.client.list(kind, namespace=self.namespace):
                shown = json.dumps(dict(each)) if isinstance(each, Generic) else str(each)
                lines.append(f"{kind.__name__} {shown}")
        return "\n".join(lines)
