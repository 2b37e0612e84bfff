"""The control plane and the stand-in nodes are what tests of operators and drivers take them for.

What is asked of Kubernetes here is what those tests rely on. `kubectl`, a client that is not ours,
sees the same cluster.
"""

import json
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from lightkube import ApiError, Client
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.models.apiextensions_v1 import (
    CustomResourceDefinitionNames,
    CustomResourceDefinitionSpec,
    CustomResourceDefinitionVersion,
    CustomResourceSubresources,
    CustomResourceValidation,
    JSONSchemaProps,
)
from lightkube.models.batch_v1 import JobSpec
from lightkube.models.core_v1 import (
    Affinity,
    Container,
    CSIVolumeSource,
    EnvVar,
    EnvVarSource,
    HostPathVolumeSource,
    LocalObjectReference,
    NodeAffinity,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    ObjectFieldSelector,
    PodSpec,
    PodTemplateSpec,
    ResourceRequirements,
    SecretKeySelector,
    SecretVolumeSource,
    Volume,
    VolumeMount,
)
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.models.rbac_v1 import PolicyRule, RoleRef, Subject
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import ConfigMap, Pod, Secret, ServiceAccount
from lightkube.resources.rbac_authorization_v1 import (
    ClusterRole,
    ClusterRoleBinding,
    Role,
    RoleBinding,
)
from lightkube.types import PatchType

from tests.cli.conftest import program_environment
from tests.kubernetes.cluster.conftest import IMAGE
from tests.kubernetes.cluster.containers import Image
from tests.kubernetes.cluster.control_plane import API_SERVER, ControlPlane
from tests.kubernetes.cluster.nodes import Node
from tests.kubernetes.cluster.volumes import CsiVolume, VolumeError
from tests.waiting import wait_until

GROUP = "tests.diesel-fs.dev"
Widget = create_namespaced_resource(GROUP, "v1", "Widget", "widgets")


@pytest.fixture(scope="session")
def widgets(client: Client) -> type[GenericNamespacedResource]:
    """A kind of custom resources, with a schema and a status of its own."""
    size = JSONSchemaProps(type="integer", minimum=1)
    text = JSONSchemaProps(type="string")
    properties = {
        "spec": JSONSchemaProps(type="object", properties={"size": size}, required=["size"]),
        "status": JSONSchemaProps(type="object", properties={"seen": text}),
    }
    schema = JSONSchemaProps(type="object", properties=properties, required=["spec"])
    version = CustomResourceDefinitionVersion(
        name="v1",
        served=True,
        storage=True,
        schema=CustomResourceValidation(openAPIV3Schema=schema),
        subresources=CustomResourceSubresources(status={}),
    )
    spec = CustomResourceDefinitionSpec(
        group=GROUP,
        names=CustomResourceDefinitionNames(kind="Widget", plural="widgets"),
        scope="Namespaced",
        versions=[version],
    )
    name = f"widgets.{GROUP}"
    client.create(CustomResourceDefinition(metadata=ObjectMeta(name=name), spec=spec))
    client.wait(CustomResourceDefinition, name, for_conditions=["Established"])
    return Widget


def widget(name: str, size: object) -> GenericNamespacedResource:
    """A custom resource, good or bad."""
    return Widget(metadata=ObjectMeta(name=name), spec={"size": size})


@contextmanager
def refused(code: int) -> Iterator[None]:
    """The API server refuses what is done in the `with`, with this status."""
    with pytest.raises(ApiError) as caught:
        yield
    assert caught.value.status.code == code, caught.value.status.message


def test_kubectl_sees_the_release_that_was_built(control_plane: ControlPlane) -> None:
    done = subprocess.run(
        ["kubectl", f"--kubeconfig={control_plane.kubeconfig}", "version", "--output=json"],
        check=True,
        capture_output=True,
    )
    assert json.loads(done.stdout)["serverVersion"]["gitVersion"] == "v1.20.2"


def test_custom_resources_obey_their_schema_and_have_a_status(
    client: Client, namespace: str, widgets: type[GenericNamespacedResource]
) -> None:
    client.create(widget("good", 3), namespace=namespace)
    for bad in (0, "three"):
        with refused(422):
            client.create(widget("bad", bad), namespace=namespace)
    seen = {"status": {"seen": "yes"}}
    client.patch(widgets, "good", seen, namespace=namespace, patch_type=PatchType.MERGE)
    assert "status" not in client.get(widgets, "good", namespace=namespace)
    client.patch(widgets.Status, "good", seen, namespace=namespace, patch_type=PatchType.MERGE)
    assert client.get(widgets, "good", namespace=namespace)["status"] == {"seen": "yes"}


def test_server_side_apply_tells_owners_of_a_field_apart(client: Client, namespace: str) -> None:
    def config(text: str) -> ConfigMap:
        metadata = ObjectMeta(name="shared", namespace=namespace)
        return ConfigMap(metadata=metadata, data={"key": text})

    client.apply(config("ours"), field_manager="us")
    with refused(409):
        client.apply(config("theirs"), field_manager="them")
    client.apply(config("theirs"), field_manager="them", force=True)
    assert client.get(ConfigMap, "shared", namespace=namespace).data == {"key": "theirs"}


def on_nodes_labelled(key: str, text: str) -> Affinity:
    """Require nodes with a label."""
    term = NodeSelectorTerm(
        matchExpressions=[NodeSelectorRequirement(key=key, operator="In", values=[text])]
    )
    selector = NodeSelector(nodeSelectorTerms=[term])
    required = NodeAffinity(requiredDuringSchedulingIgnoredDuringExecution=selector)
    return Affinity(nodeAffinity=required)


def phase_of(client: Client, name: str, namespace: str) -> str:
    """The phase of a pod."""
    status = client.get(Pod, name, namespace=namespace).status
    return (status.phase if status else None) or ""


def exists(client: Client, kind: type[Pod] | type[ConfigMap], name: str, namespace: str) -> bool:
    """Whether an object is there."""
    found = client.list(kind, namespace=namespace, fields={"metadata.name": name})
    return any(found)


def test_a_job_runs_for_real_on_the_node_that_its_affinity_names(
    control_plane: ControlPlane,
    client: Client,
    namespace: str,
    images: dict[str, Image],
    tmp_path: Path,
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    client.create(
        Secret(metadata=ObjectMeta(name="key", namespace=namespace), stringData={"key": "s3cret"})
    )
    secret = SecretKeySelector(name="key", key="key")
    script = 'echo "$KEY $NODE $(cat /keys/key) $(dlcmd --version)" > "$WHERE"/seen'
    container = Container(
        name="prepare",
        image=IMAGE,
        command=["sh", "-c", script.replace("dlcmd", f"{sys.executable} -m dlcmd")],
        env=[
            EnvVar(name="KEY", valueFrom=EnvVarSource(secretKeyRef=secret)),
            EnvVar(
                name="NODE",
                valueFrom=EnvVarSource(fieldRef=ObjectFieldSelector(fieldPath="spec.nodeName")),
            ),
            EnvVar(name="FOLDER", value="/results"),
            EnvVar(name="WHERE", value="$(FOLDER)"),
        ],
        resources=ResourceRequirements(limits={"nvidia.com/gpu": "1"}),
        volumeMounts=[
            VolumeMount(name="results", mountPath="/results"),
            VolumeMount(name="keys", mountPath="/keys"),
        ],
    )
    pod = PodSpec(
        containers=[container],
        restartPolicy="Never",
        affinity=on_nodes_labelled("zone", "far"),
        volumes=[
            Volume(name="results", hostPath=HostPathVolumeSource(path=str(results))),
            Volume(name="keys", secret=SecretVolumeSource(secretName="key")),
        ],
    )
    job = Job(
        metadata=ObjectMeta(name="prepare", namespace=namespace),
        spec=JobSpec(template=PodTemplateSpec(spec=pod)),
    )
    gpu = {"nvidia.com/gpu": "8"}
    with (
        Node(control_plane, "near-1", tmp_path / "near", images=images, capacity=gpu),
        Node(
            control_plane, "far-1", tmp_path / "far",
            images=images, capacity=gpu, labels={"zone": "far"},
        ),
    ):  # fmt: skip
        client.create(job)
        client.wait(Job, "prepare", for_conditions=["Complete"], namespace=namespace)
        (pod_made,) = client.list(Pod, namespace=namespace)
        assert pod_made.spec is not None
        assert pod_made.spec.nodeName == "far-1"
        seen = (results / "seen").read_text()
        assert seen.startswith("s3cret far-1 s3cret dlcmd, version ")
        assert list((tmp_path / "near").glob("*")) == []


def pod(name: str, *command: str, policy: str = "Never", **spec: object) -> Pod:
    """A pod of one container."""
    container = Container(name="main", image=IMAGE, command=list(command))
    made = PodSpec(containers=[container], restartPolicy=policy)
    for key, text in spec.items():
        setattr(made, key, text)
    return Pod(metadata=ObjectMeta(name=name), spec=made)


def test_a_node_reports_the_phases_that_a_test_wants(
    control_plane: ControlPlane, client: Client, namespace: str, tmp_path: Path
) -> None:
    """And the scheduler leaves a pod pending for which no node has the disk."""
    large = pod("large", "true")
    assert large.spec is not None
    large.spec.containers[0].resources = ResourceRequirements(
        requests={"ephemeral-storage": "200Gi"}
    )
    capacity = {"ephemeral-storage": "100Gi"}
    with Node(control_plane, "small", tmp_path / "small", capacity=capacity) as node:
        client.create(large, namespace=namespace)
        client.create(pod("fails", "true"), namespace=namespace)
        wait_until(lambda: [each.metadata.name for each in node.pods() if each.metadata])
        (bound,) = node.pods()
        assert phase_of(client, "fails", namespace) == "Pending"
        node.report_running(bound)
        assert phase_of(client, "fails", namespace) == "Running"
        node.report_ended(bound, exit_code=3)
        status = client.get(Pod, "fails", namespace=namespace).status
        assert status is not None
        assert status.phase == "Failed"
        assert status.containerStatuses is not None
        state = status.containerStatuses[0].state
        assert state is not None
        assert state.terminated is not None
        assert state.terminated.exitCode == 3

        def unschedulable() -> bool:
            status = client.get(Pod, "large", namespace=namespace).status
            conditions = (status.conditions if status else None) or []
            return any(each.reason == "Unschedulable" for each in conditions)

        wait_until(unschedulable)
        client.delete(Pod, "fails", namespace=namespace)
        wait_until(lambda: not exists(client, Pod, "fails", namespace))


def test_a_container_that_fails_is_started_again_and_a_deleted_pod_gets_a_sigterm(
    control_plane: ControlPlane,
    client: Client,
    namespace: str,
    images: dict[str, Image],
    tmp_path: Path,
) -> None:
    script = f"""
        trap 'echo ended >> {tmp_path}/told; exit 0' TERM
        echo started >> {tmp_path}/told
        [ "$(wc -l < {tmp_path}/told)" -gt 1 ] || exit 1
        sleep 1000 & wait
    """
    told = tmp_path / "told"
    with Node(control_plane, "one", tmp_path / "one", images=images) as node:
        client.create(pod("server", "sh", "-c", script, policy="Always"), namespace=namespace)
        wait_until(lambda: told.exists() and told.read_text() == "started\nstarted\n")

        def restarts() -> int:
            status = client.get(Pod, "server", namespace=namespace).status
            states = (status.containerStatuses if status else None) or []
            return sum(each.restartCount for each in states if each.ready)

        wait_until(lambda: restarts() == 1)
        client.delete(Pod, "server", namespace=namespace)
        wait_until(lambda: not exists(client, Pod, "server", namespace))
        assert told.read_text() == "started\nstarted\nended\n"
        wait_until(lambda: node.pods() == [])
    running = subprocess.run(["pgrep", "-f", str(told)], check=False, capture_output=True)
    assert running.stdout == b""


class FolderDriver:
    """A driver that fails at first, and then makes folders."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.published: list[CsiVolume] = []

    def publish(self, volume: CsiVolume) -> None:
        self.calls.append("publish")
        if len(self.calls) == 1:
            raise VolumeError("the driver is not there yet")
        volume.target.mkdir()
        (volume.target / "file").write_text("contents", encoding="utf-8")
        self.published.append(volume)

    def unpublish(self, volume_id: str, target: Path) -> None:
        assert volume_id == self.published[-1].volume_id
        self.calls.append("unpublish")
        (target / "file").unlink()
        target.rmdir()


def test_a_csi_driver_is_asked_as_kubelet_asks_it(
    control_plane: ControlPlane,
    client: Client,
    namespace: str,
    images: dict[str, Image],
    tmp_path: Path,
) -> None:
    driver = FolderDriver()
    client.create(
        Secret(metadata=ObjectMeta(name="key", namespace=namespace), stringData={"key": "s3cret"})
    )
    source = CSIVolumeSource(
        driver="folders.tests",
        readOnly=True,
        volumeAttributes={"dataset": "images"},
        nodePublishSecretRef=LocalObjectReference(name="key"),
    )
    reader = pod("reader", "sh", "-c", "cat /data/file; exit 4")
    assert reader.spec is not None
    reader.spec.volumes = [Volume(name="data", csi=source)]
    reader.spec.containers[0].volumeMounts = [VolumeMount(name="data", mountPath="/data")]
    drivers = {"folders.tests": driver}
    with Node(control_plane, "one", tmp_path / "one", images=images, drivers=drivers) as node:
        client.create(reader, namespace=namespace)
        wait_until(lambda: phase_of(client, "reader", namespace) == "Failed")
        assert node.log(client.get(Pod, "reader", namespace=namespace), "main") == "contents"
        wait_until(lambda: driver.calls == ["publish", "publish", "unpublish"])
    (volume,) = driver.published
    assert volume.secrets == {"key": "s3cret"}
    assert volume.read_only
    assert volume.attributes["dataset"] == "images"
    assert volume.attributes["csi.storage.k8s.io/pod.namespace"] == namespace
    assert volume.attributes["csi.storage.k8s.io/ephemeral"] == "true"


def test_the_controllers_notice_a_node_that_is_lost(
    control_plane: ControlPlane, client: Client, namespace: str, tmp_path: Path
) -> None:
    with Node(control_plane, "lost", tmp_path / "lost") as node:
        assert node.is_ready()
        node.lose()
        wait_until(lambda: not node.is_ready())


def test_a_service_account_may_do_what_a_role_says_and_nothing_else(
    control_plane: ControlPlane, client: Client, namespace: str
) -> None:
    metadata = ObjectMeta(name="reader", namespace=namespace)
    client.create(ServiceAccount(metadata=metadata))
    with control_plane.client(control_plane.kubeconfig_of(namespace, "reader")) as reader:
        with refused(403):
            list(reader.list(Pod))
        rule = PolicyRule(apiGroups=[""], resources=["pods"], verbs=["list"])
        client.create(Role(metadata=metadata, rules=[rule]))
        client.create(
            RoleBinding(
                metadata=metadata,
                roleRef=RoleRef(apiGroup="rbac.authorization.k8s.io", kind="Role", name="reader"),
                subjects=[Subject(kind="ServiceAccount", name="reader", namespace=namespace)],
            )
        )

        def may_list() -> bool:
            try:
                list(reader.list(Pod))
            except ApiError:
                return False
            return True

        wait_until(may_list)
        with refused(403):
            list(reader.list(Secret))


def test_what_an_object_owns_is_deleted_with_it(client: Client, namespace: str) -> None:
    owner = client.create(ConfigMap(metadata=ObjectMeta(name="owner", namespace=namespace)))
    assert owner.metadata is not None
    assert owner.metadata.uid
    reference = OwnerReference(
        apiVersion="v1", kind="ConfigMap", name="owner", uid=owner.metadata.uid
    )
    for name, owners in (("owned", [reference]), ("free", [])):
        metadata = ObjectMeta(name=name, namespace=namespace, ownerReferences=owners)
        client.create(ConfigMap(metadata=metadata))
    client.delete(ConfigMap, "owner", namespace=namespace)
    wait_until(lambda: not exists(client, ConfigMap, "owned", namespace))
    assert exists(client, ConfigMap, "free", namespace)


def test_an_api_server_that_is_killed_has_its_objects_when_it_is_back(
    control_plane: ControlPlane, client: Client, namespace: str, tmp_path: Path
) -> None:
    """And scheduler, controllers and nodes go on with it."""
    with Node(control_plane, "one", tmp_path / "one") as node:
        client.create(ConfigMap(metadata=ObjectMeta(name="kept", namespace=namespace)))
        control_plane.kill(API_SERVER)
        where = urlsplit(control_plane.url)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((where.hostname or "", where.port or 0)).close()
        control_plane.start(API_SERVER)
        assert exists(client, ConfigMap, "kept", namespace)
        client.create(pod("later", "true"), namespace=namespace)
        wait_until(node.pods)


OPERATOR = f"""
    import kopf

    @kopf.on.startup()
    def quiet(settings, **_):
        settings.posting.enabled = False

    @kopf.on.create("{GROUP}", "v1", "widgets")
    def see(spec, patch, **_):
        patch.status["seen"] = "size " + str(spec["size"])
"""


def test_an_operator_written_with_kopf_works(
    control_plane: ControlPlane,
    client: Client,
    namespace: str,
    widgets: type[GenericNamespacedResource],
    tmp_path: Path,
) -> None:
    """It runs as a ServiceAccount, with the rights that kopf's documents ask for."""
    account = ObjectMeta(name="operator", namespace=namespace)
    client.create(ServiceAccount(metadata=account))
    watch = ["list", "watch"]
    rules = [
        PolicyRule(apiGroups=[""], resources=["namespaces"], verbs=watch),
        PolicyRule(
            apiGroups=["apiextensions.k8s.io"],
            resources=["customresourcedefinitions"],
            verbs=watch,
        ),
        PolicyRule(
            apiGroups=[GROUP], resources=["widgets", "widgets/status"], verbs=[*watch, "patch"]
        ),
    ]
    client.create(ClusterRole(metadata=ObjectMeta(name=f"operator-{namespace}"), rules=rules))
    role = RoleRef(
        apiGroup="rbac.authorization.k8s.io", kind="ClusterRole", name=f"operator-{namespace}"
    )
    subject = Subject(kind="ServiceAccount", name="operator", namespace=namespace)
    client.create(
        ClusterRoleBinding(
            metadata=ObjectMeta(name=f"operator-{namespace}"), roleRef=role, subjects=[subject]
        )
    )
    source = tmp_path / "operator.py"
    source.write_text(textwrap.dedent(OPERATOR), encoding="utf-8")
    kubeconfig = control_plane.kubeconfig_of(namespace, "operator")
    command = [sys.executable, "-m", "kopf", "run", "--standalone", f"--namespace={namespace}"]
    said = tmp_path / "log"
    with (
        said.open("wb") as log,
        subprocess.Popen(
            [*command, str(source)],
            env={**program_environment(), "KUBECONFIG": str(kubeconfig)},
            stdout=log,
            stderr=log,
        ) as operator,
    ):
        try:
            client.create(widget("one", 7), namespace=namespace)

            def status() -> object:
                return client.get(widgets, "one", namespace=namespace).status

            wait_until(lambda: status() == {"seen": "size 7"}, otherwise=said.read_text)
        finally:
            operator.terminate()
    assert operator.returncode == 0, said.read_text()
