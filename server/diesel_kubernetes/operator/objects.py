"""Makes the objects that the operator creates: Jobs, pods, Services and events. Pure.

Names come from the owner's UID, so an object that is made twice is the same one. Nothing here
reaches a shell: users' values become single arguments of a program.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from diesel_fs.errors import UsageError

from ..names import DRIVER, SECRETS
from .api_objects import Container, Metadata
from .decoding import Json, decode, time_of
from .resources import API_VERSION, DatasetObject, Object, PlannedVolume, TrainingObject
from .specs import DatasetSpec, Defaults, RepositoryPlace, TrainingSpec

LABEL = "operator.diesel-fs.dev"
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGED = "diesel-operator"
LABEL_DATASET = f"{LABEL}/dataset"
LABEL_TRAINING = f"{LABEL}/training-job"
LABEL_PURPOSE = f"{LABEL}/purpose"
LABEL_GENERATION = f"{LABEL}/generation"
LABEL_ATTEMPT = f"{LABEL}/attempt"
LABEL_RANK = f"{LABEL}/rank"
USES = f"dataset.{LABEL}/"
"""The label `USES` + NAME is on each pod that reads the Dataset NAME."""

PREPARE, RECLAIM = "prepare", "reclaim"

PROGRESS_PORT = 9310
MASTER_PORT = 29500
SCRATCH = "/scratch"
RESULT_FILE = "/dev/termination-log"
PROGRAM = ("python", "-m", "diesel_kubernetes.operator.prepare")

PREFERRED_NODES_MAX = 50
"""The most nodes in a pod's affinity, which the scheduler reads for each pod."""

_HOSTNAME = "kubernetes.io/hostname"
_WEIGHT_MAX = 100
_HASH_CHARS = 8


def digest(*parts: object) -> str:
    joined = "\0".join(map(str, parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:_HASH_CHARS]


def job_name(seen: Object, purpose: str, attempt: int) -> str:
    return f"{seen.name}-{purpose}-{digest(seen.uid, purpose, seen.generation, attempt)}"


def preparation_job(
    seen: DatasetObject, spec: DatasetSpec, attempt: int, defaults: Defaults
) -> Json:
    words = [f"--describe={spec.named}"]
    if spec.keep >= 0:
        words.append(f"--keep={spec.keep}")
    if spec.put:
        words += ["--", *spec.put]
    limits: Json = {}
    if spec.preparation.deadline_seconds:
        limits["activeDeadlineSeconds"] = spec.preparation.deadline_seconds
    pod = _job_pod(spec, PREPARE, defaults, words)
    return _job(seen, PREPARE, attempt, pod, {"ownerReferences": [seen.owner]}, limits)


def reclaim_job(seen: DatasetObject, spec: DatasetSpec, attempt: int, defaults: Defaults) -> Json:
    """The Job has no owner: the Dataset is being deleted, and the garbage collector would delete
    the Job first."""
    words = ["--", "delete-dataset", spec.dataset, "--yes"]
    return _job(seen, RECLAIM, attempt, _job_pod(spec, RECLAIM, defaults, words), {}, {})


def _job(seen: Object, purpose: str, attempt: int, pod: Json, metadata: Json, limits: Json) -> Json:
    labels = {
        LABEL_MANAGED: MANAGED,
        LABEL_DATASET: seen.name,
        LABEL_PURPOSE: purpose,
        LABEL_GENERATION: str(seen.generation),
        LABEL_ATTEMPT: str(attempt),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(seen, purpose, attempt),
            "namespace": seen.namespace,
            "labels": labels,
            **metadata,
        },
        "spec": {
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
            **limits,
        },
    }


def _job_pod(spec: DatasetSpec, purpose: str, defaults: Defaults, words: Sequence[str]) -> Json:
    volumes: list[object] = [{"name": "scratch", "emptyDir": {}}]
    mounts: list[object] = [{"name": "scratch", "mountPath": SCRATCH}]
    if folder := spec.repository.file_folder:
        # `Directory`: an unmounted folder must not be made on the node's own disk
        volumes.append({"name": "repository", "hostPath": {"path": folder, "type": "Directory"}})
        mounts.append({"name": "repository", "mountPath": folder})
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container: Json = {
        "name": purpose,
        "image": defaults.image,
        "command": list(PROGRAM),
        "args": [
            f"--result={RESULT_FILE}",
            f"--listen=$(POD_IP):{PROGRESS_PORT}",
            # Unescaped, `$(DIESEL_KEY)` in a glob would become the key
            *(each.replace("$", "$$") for each in words),
        ],
        "env": [address, *_variables(spec.repository)],
        "terminationMessagePath": RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if spec.preparation.resources:
        container["resources"] = spec.preparation.resources
    pod: Json = {
        "restartPolicy": "Never",  # the operator counts the attempts
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }
    if spec.placement.node_selector:
        pod["nodeSelector"] = dict(spec.placement.node_selector)
    if spec.placement.tolerations:
        pod["tolerations"] = list(spec.placement.tolerations)
    return pod


def _variables(repository: RepositoryPlace) -> list[Json]:
    found: list[Json] = [
        {"name": name, "value": value.replace("$", "$$")}
        for name, value in repository.variables.items()
    ]
    found += [{"name": name, "value": SCRATCH} for name in ("HOME", "TMPDIR")]
    if repository.secret:
        for key, variable in SECRETS.items():
            if variable not in repository.variables:
                source = {"name": repository.secret, "key": key, "optional": True}
                found.append({"name": variable, "valueFrom": {"secretKeyRef": source}})
    return found


def task_name(seen: Object) -> str:
    return f"{seen.name}-{seen.uid[:8]}"


def service_name(seen: Object) -> str:
    return f"{seen.name}-ranks"


def key_secret_name(seen: Object, number: int) -> str:
    return f"{seen.name}-task-{number}"


def volume_name(dataset: str) -> str:
    return f"diesel-{digest(dataset)}"


def pod_name(seen: Object, rank: int) -> str:
    return f"{seen.name}-{rank}"


def key_secret(seen: Object, name: str, data: Mapping[str, str], key: str) -> Json:
    """The Secret has the known keys of a Dataset's Secret (`data`, in base64), and the task's
    key."""
    known = {each: value for each, value in data.items() if each in SECRETS}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _owned(seen, name, {LABEL_TRAINING: seen.name}),
        "data": known,
        "stringData": {"taskKey": key},
    }


def ranks_service(seen: Object) -> Json:
    """By this Service, which has no address, the pods of a TrainingJob find rank 0."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(seen, service_name(seen), {LABEL_TRAINING: seen.name}),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks look for rank 0 while it starts
            "selector": {LABEL_TRAINING: seen.name},
            "ports": [{"name": "master", "port": MASTER_PORT}],
        },
    }


def _owned(seen: Object, name: str, labels: Mapping[str, str]) -> Json:
    return {
        "name": name,
        "namespace": seen.namespace,
        "labels": {**labels, LABEL_MANAGED: MANAGED},
        "ownerReferences": [seen.owner],
    }


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The common parts of all pods of a TrainingJob."""

    seen: TrainingObject
    spec: TrainingSpec
    volumes: Sequence[PlannedVolume]
    order: Sequence[str]
    """The hostnames of suitable nodes, the best first."""
    selector: Mapping[str, str]
    attempt: int


def training_pod(plan: PodPlan, rank: int) -> Json:
    """Fields of the template that this release does not know stay as they are. Raises UsageError if
    the template contradicts the needs of the datasets."""
    seen, spec = plan.seen, plan.spec
    template = deepcopy(spec.template)
    given = _object(template.get("metadata"))
    labels = {
        **decode(Metadata, given).labels,
        LABEL_TRAINING: seen.name,
        LABEL_RANK: str(rank),
        LABEL_ATTEMPT: str(plan.attempt),
        **{f"{USES}{each.name}": "true" for each in plan.volumes},
    }
    metadata = _owned(seen, pod_name(seen, rank), labels)
    if annotations := _object(given.get("annotations")):
        metadata["annotations"] = annotations
    pod = _object(template.get("spec"))
    pod.setdefault("restartPolicy", "Never")
    if spec.replicas > 1:
        pod |= {"hostname": pod_name(seen, rank), "subdomain": service_name(seen)}
    pod["nodeSelector"] = merged_selectors(spec.pod.node_selector, plan.selector)
    pod["affinity"] = _affinity(_object(pod.get("affinity")), plan)
    taken = {each.name for each in spec.pod.volumes}
    added = [_volume(each, spec, rank, taken) for each in plan.volumes]
    pod["volumes"] = [*_list(pod.get("volumes")), *added]
    mounts: list[object] = [
        {
            "name": each["name"],
            "mountPath": volume.mount_path,
            "readOnly": True,
            "mountPropagation": "HostToContainer",  # a mount that died is replaced
        }
        for each, volume in zip(added, plan.volumes, strict=True)
    ]
    for group in ("initContainers", "containers"):
        if group in pod:
            pod[group] = [
                _container(_object(each), plan, mounts, rank) for each in _list(pod[group])
            ]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def merged_selectors(*selectors: Mapping[str, str]) -> dict[str, str]:
    """Raises UsageError if two selectors contradict each other."""
    found: dict[str, str] = {}
    for each in selectors:
        for name, value in each.items():
            if found.setdefault(name, value) != value:
                raise UsageError(f"nodeSelectors want both {found[name]!r} and {value!r} of {name}")
    return found


def _affinity(given: Json, plan: PodPlan) -> Json:
    chosen = plan.order[:PREFERRED_NODES_MAX]
    preferred: list[object] = [
        {
            "weight": max(1, _WEIGHT_MAX * (len(chosen) - place) // len(chosen)),
            "preference": {
                "matchExpressions": [{"key": _HOSTNAME, "operator": "In", "values": [hostname]}]
            },
        }
        for place, hostname in enumerate(chosen)
    ]
    given = _added(
        given, "nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution", preferred
    )
    if plan.spec.one_per_node and plan.spec.replicas > 1:
        apart: list[object] = [
            {
                "topologyKey": _HOSTNAME,
                "labelSelector": {"matchLabels": {LABEL_TRAINING: plan.seen.name}},
            }
        ]
        given = _added(
            given, "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution", apart
        )
    return given


def _added(given: Json, kind: str, terms: str, more: list[object]) -> Json:
    if not more:
        return given
    inner = _object(given.get(kind))
    return {**given, kind: {**inner, terms: [*_list(inner.get(terms)), *more]}}


def _object(value: object) -> Json:
    return {str(name): each for name, each in value.items()} if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _volume(volume: PlannedVolume, spec: TrainingSpec, rank: int, taken: set[str]) -> Json:
    attributes = dict(volume.attributes)
    if "task" in attributes:
        attributes |= {"rank": str(rank), "world": str(spec.replicas)}
    csi: Json = {"driver": DRIVER, "readOnly": True, "volumeAttributes": attributes}
    if volume.secret_name:
        csi["nodePublishSecretRef"] = {"name": volume.secret_name}
    name = volume_name(volume.name)
    if name in taken:
        raise UsageError(f"spec.template.spec.volumes: the name {name} is the operator's")
    return {"name": name, "csi": csi}


def _container(container: Json, plan: PodPlan, mounts: Sequence[object], rank: int) -> Json:
    given = {each.name for each in decode(Container, container).env}
    replicas = plan.spec.replicas
    hints = {"RANK": str(rank), "WORLD_SIZE": str(replicas)}
    if replicas > 1:
        master = f"{pod_name(plan.seen, 0)}.{service_name(plan.seen)}"
        hints |= {"MASTER_ADDR": master, "MASTER_PORT": str(MASTER_PORT)}
    env: list[object] = [
        {"name": name, "value": value} for name, value in hints.items() if name not in given
    ]
    return {
        **container,
        "env": [*env, *_list(container.get("env"))],
        "volumeMounts": [*_list(container.get("volumeMounts")), *mounts],
    }


@dataclass(frozen=True, slots=True)
class News:
    is_bad: bool
    reason: str
    message: str


def event(seen: Object, news: News, now_s: float) -> Json:
    """The name depends on the object's generation and on the news, so a second operator does not
    report the same news again."""
    kind = "Warning" if news.is_bad else "Normal"
    hashed = digest(seen.uid, seen.generation, kind, news.reason, news.message)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{seen.name}.{hashed}", "namespace": seen.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": seen.kind,
            "name": seen.name,
            "namespace": seen.namespace,
            "uid": seen.uid,
            "resourceVersion": seen.metadata.resource_version,
        },
        "type": kind,
        "reason": news.reason,
        "message": news.message[:1024],
        "source": {"component": MANAGED},
        "firstTimestamp": time_of(now_s),
        "lastTimestamp": time_of(now_s),
        "count": 1,
    }
