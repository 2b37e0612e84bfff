"""Makes the objects that the operator creates: Jobs, pods, Services and events. Pure.

Names are computed from the owner's UID, so an object that is made twice is the same one. Nothing
here reaches a shell: what users name becomes single arguments of a program.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from diesel_fs.errors import UsageError

from ..names import DRIVER, SECRETS
from .fields import Json, at, fields, items, text, texts, time_of
from .resources import API_VERSION, DatasetSpec, Defaults, Object, Repository, TrainingSpec

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
"""The prefix of a label on pods that read a Dataset; the Dataset's name follows."""

PREPARE, RECLAIM = "prepare", "reclaim"

PROGRESS_PORT = 9310
MASTER_PORT = 29500
SCRATCH = "/scratch"
RESULT_FILE = "/dev/termination-log"
PROGRAM = ("python", "-m", "diesel_kubernetes.operator.prepare")

PREFERRED_NODES_MAX = 50
"""How many nodes of the order an affinity names; the scheduler reads all for each pod."""

_HOSTNAME = "kubernetes.io/hostname"
_WEIGHT_MAX = 100
_HASH_CHARS = 8


def digest(*parts: object) -> str:
    """A few characters that stand for values, in names."""
    joined = "\0".join(map(str, parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:_HASH_CHARS]


def job_name(seen: Object, purpose: str, attempt: int) -> str:
    """The name of a Job of a Dataset."""
    return f"{seen.name}-{purpose}-{digest(seen.uid, purpose, seen.generation, attempt)}"


def preparation_job(seen: Object, spec: DatasetSpec, attempt: int, defaults: Defaults) -> Json:
    """The Job that makes a dataset, or looks at an existing one."""
    words = [f"--describe={spec.named}"]
    if spec.keep >= 0:
        words.append(f"--keep={spec.keep}")
    if spec.put:
        words += ["--", *spec.put]
    made = _job(seen, spec, PREPARE, attempt, defaults, words)
    if spec.deadline_s:
        fields_of_job = made["spec"]
        assert isinstance(fields_of_job, dict)
        fields_of_job["activeDeadlineSeconds"] = spec.deadline_s
    metadata = made["metadata"]
    assert isinstance(metadata, dict)
    metadata["ownerReferences"] = [seen.owner]
    return made


def reclaim_job(seen: Object, spec: DatasetSpec, attempt: int, defaults: Defaults) -> Json:
    """The Job that deletes a dataset. It has no owner: its owner is being deleted, and the garbage
    collector would delete the Job first."""
    words = ["--", "delete-dataset", spec.dataset, "--yes"]
    return _job(seen, spec, RECLAIM, attempt, defaults, words)


def _job(
    seen: Object,
    spec: DatasetSpec,
    purpose: str,
    attempt: int,
    defaults: Defaults,
    words: Sequence[str],
) -> Json:
    labels = {
        LABEL_MANAGED: MANAGED,
        LABEL_DATASET: seen.name,
        LABEL_PURPOSE: purpose,
        LABEL_GENERATION: str(seen.generation),
        LABEL_ATTEMPT: str(attempt),
    }
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container: Json = {
        "name": purpose,
        "image": defaults.image,
        "command": list(PROGRAM),
        "args": [
            f"--result={RESULT_FILE}",
            f"--listen=$(POD_IP):{PROGRESS_PORT}",
            # Else `$(DIESEL_KEY)` in a glob would be the key
            *(each.replace("$", "$$") for each in words),
        ],
        "env": [address, *_variables(spec.repository)],
        "terminationMessagePath": RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH}],
    }
    if spec.resources:
        container["resources"] = spec.resources
    volumes: list[object] = [{"name": "scratch", "emptyDir": {}}]
    pod: Json = {
        "restartPolicy": "Never",  # the operator counts the attempts
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }
    if folder := spec.repository.file_folder:
        # `Directory`: a folder that is not mounted must not be made on the node's own disk
        volumes.append({"name": "repository", "hostPath": {"path": folder, "type": "Directory"}})
        mounts = container["volumeMounts"]
        assert isinstance(mounts, list)
        mounts.append({"name": "repository", "mountPath": folder})
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerations:
        pod["tolerations"] = spec.tolerations
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(seen, purpose, attempt),
            "namespace": seen.namespace,
            "labels": labels,
        },
        "spec": {
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _variables(repository: Repository) -> list[Json]:
    """The environment of `dlcmd`: the repository, and what the Secret has."""
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


@dataclass(frozen=True, slots=True)
class PlannedVolume:
    """What the pods of a TrainingJob mount; pinned in its status at admission."""

    name: str
    """That of the Dataset."""
    mount_path: str
    attributes: Mapping[str, str]
    secret: str
    """The Secret that the volume names; empty: none."""
    key_from: str = ""
    """The Secret of which that one is a copy with a task key; empty: it is none."""

    def to_json(self) -> Json:
        """As it stands in the status."""
        made: Json = {
            "name": self.name,
            "mountPath": self.mount_path,
            "attributes": dict(self.attributes),
        }
        if self.secret:
            made["secretName"] = self.secret
        if self.key_from:
            made["keyFrom"] = self.key_from
        return made


def planned_volumes(status: Json) -> list[PlannedVolume]:
    """The volumes that a status has."""
    return [
        PlannedVolume(
            name=text(each, "name"),
            mount_path=text(each, "mountPath"),
            attributes=texts(each, "attributes"),
            secret=text(each, "secretName"),
            key_from=text(each, "keyFrom"),
        )
        for each in items(status, "volumes")
    ]


def task_name(seen: Object) -> str:
    """The name of the task that the pods of a TrainingJob form."""
    return f"{seen.name}-{seen.uid[:8]}"


def service_name(seen: Object) -> str:
    """The name of the Service by which rank 0 is found."""
    return f"{seen.name}-ranks"


def key_secret_name(seen: Object, number: int) -> str:
    """The name of the Secret with the task's key."""
    return f"{seen.name}-task-{number}"


def volume_name(dataset: str) -> str:
    """The name of the volume of a Dataset in a pod."""
    return f"diesel-{digest(dataset)}"


def pod_name(seen: Object, rank: int) -> str:
    """The name of a pod of a TrainingJob."""
    return f"{seen.name}-{rank}"


def key_secret(seen: Object, name: str, data: Mapping[str, str], key: str) -> Json:
    """A Secret for volumes: what the Dataset's Secret has (in base64), and the task's key."""
    known = {each: value for each, value in data.items() if each in SECRETS}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _owned(seen, name, {LABEL_TRAINING: seen.name}),
        "data": known,
        "stringData": {"taskKey": key},
    }


def ranks_service(seen: Object) -> Json:
    """The Service without an address, by which the pods find rank 0."""
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


def training_pod(
    seen: Object,
    spec: TrainingSpec,
    volumes: Sequence[PlannedVolume],
    order: Sequence[str],
    selector: Mapping[str, str],
    rank: int,
    attempt: int,
) -> Json:
    """The pod of a rank. `order` are hostnames, the best first. Raises UsageError where the
    template contradicts what the datasets need."""
    template = deepcopy(spec.template)
    labels = {
        **texts(template, "metadata", "labels"),
        LABEL_TRAINING: seen.name,
        LABEL_RANK: str(rank),
        LABEL_ATTEMPT: str(attempt),
        **{f"{USES}{each.name}": "true" for each in volumes},
    }
    metadata = _owned(seen, pod_name(seen, rank), labels)
    if annotations := texts(template, "metadata", "annotations"):
        metadata["annotations"] = annotations
    pod = fields(template, "spec")
    pod.setdefault("restartPolicy", "Never")
    if spec.replicas > 1:
        pod |= {"hostname": pod_name(seen, rank), "subdomain": service_name(seen)}
    pod["nodeSelector"] = merged_selectors(texts(pod, "nodeSelector"), selector)
    pod["affinity"] = _affinity(fields(pod, "affinity"), seen, spec, order)
    taken = {text(each, "name") for each in items(pod, "volumes")}
    added = [_volume(each, spec, rank, taken) for each in volumes]
    pod["volumes"] = [*items(pod, "volumes"), *added]
    mounts: list[object] = [
        {
            "name": each["name"],
            "mountPath": volume.mount_path,
            "readOnly": True,
            "mountPropagation": "HostToContainer",  # a mount that died is replaced
        }
        for each, volume in zip(added, volumes, strict=True)
    ]
    for group in ("initContainers", "containers"):
        if group in pod:
            pod[group] = [
                _container(fields(each), seen, spec, mounts, rank) for each in items(pod, group)
            ]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def merged_selectors(*selectors: Mapping[str, str]) -> dict[str, str]:
    """One selector for several. Raises UsageError where they contradict each other."""
    found: dict[str, str] = {}
    for each in selectors:
        for name, value in each.items():
            if found.setdefault(name, value) != value:
                raise UsageError(f"nodeSelectors want both {found[name]!r} and {value!r} of {name}")
    return found


def _affinity(given: Json, seen: Object, spec: TrainingSpec, order: Sequence[str]) -> Json:
    """The template's affinity, with the order of nodes as preferences, and one pod a node."""
    chosen = order[:PREFERRED_NODES_MAX]
    preferred: list[object] = [
        {
            # From 100 down, evenly
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
    if spec.one_per_node and spec.replicas > 1:
        apart: list[object] = [
            {
                "topologyKey": _HOSTNAME,
                "labelSelector": {"matchLabels": {LABEL_TRAINING: seen.name}},
            }
        ]
        given = _added(
            given, "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution", apart
        )
    return given


def _added(given: Json, kind: str, terms: str, more: list[object]) -> Json:
    if not more:
        return given
    inner = fields(given, kind)
    return {**given, kind: {**inner, terms: [*items(inner, terms), *more]}}


def _volume(volume: PlannedVolume, spec: TrainingSpec, rank: int, taken: set[str]) -> Json:
    attributes = dict(volume.attributes)
    if "task" in attributes:
        attributes |= {"rank": str(rank), "world": str(spec.replicas)}
    csi: Json = {"driver": DRIVER, "readOnly": True, "volumeAttributes": attributes}
    if volume.secret:
        csi["nodePublishSecretRef"] = {"name": volume.secret}
    name = volume_name(volume.name)
    if name in taken:
        raise UsageError(f"spec.template.spec.volumes: the name {name} is the operator's")
    return {"name": name, "csi": csi}


def _container(
    container: Json, seen: Object, spec: TrainingSpec, mounts: Sequence[object], rank: int
) -> Json:
    given = {text(each, "name") for each in items(container, "env")}
    hints = {"RANK": str(rank), "WORLD_SIZE": str(spec.replicas)}
    if spec.replicas > 1:
        master = f"{pod_name(seen, 0)}.{service_name(seen)}"
        hints |= {"MASTER_ADDR": master, "MASTER_PORT": str(MASTER_PORT)}
    env: list[object] = [
        {"name": name, "value": value} for name, value in hints.items() if name not in given
    ]
    return {
        **container,
        "env": [*env, *items(container, "env")],
        "volumeMounts": [*items(container, "volumeMounts"), *mounts],
    }


def event(seen: Object, kind: str, reason: str, message: str, now_s: float) -> Json:
    """An event of an object. What is said twice about one generation has one name, so a second
    operator does not repeat the first."""
    name = f"{seen.name}.{digest(seen.uid, seen.generation, kind, reason, message)}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": seen.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": seen.kind,
            "name": seen.name,
            "namespace": seen.namespace,
            "uid": seen.uid,
            "resourceVersion": text(seen.raw, "metadata", "resourceVersion"),
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": MANAGED},
        "firstTimestamp": time_of(now_s),
        "lastTimestamp": time_of(now_s),
        "count": 1,
    }


def is_ours(made: Json, seen: Object) -> bool:
    """Whether an object has this one as its owner."""
    owners = items(made, "metadata", "ownerReferences")
    return any(at(each, "uid") == seen.uid for each in owners)
