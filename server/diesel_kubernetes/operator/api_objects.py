"""Pods, Jobs and nodes: the fields of the Kubernetes API that the operator reads, under the API's
names. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .decoding import Json

ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class OwnerReference:
    """The cluster deletes an object with its owner."""

    uid: str = ""


@dataclass(frozen=True, slots=True)
class Metadata:
    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    deletion_timestamp: str = ""
    finalizers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def is_leaving(self) -> bool:
        return bool(self.deletion_timestamp)

    def is_owned_by(self, uid: str) -> bool:
        return any(each.uid == uid for each in self.owner_references)


@dataclass(frozen=True, slots=True)
class Condition:
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int | None = None

    @property
    def holds(self) -> bool:
        return self.status == "True"


@dataclass(frozen=True, slots=True)
class AnyObject:
    kind: str = ""
    metadata: Metadata = field(default_factory=Metadata)


# Jobs


@dataclass(frozen=True, slots=True)
class JobStatus:
    conditions: tuple[Condition, ...] = ()
    start_time: str = ""
    completion_time: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    metadata: Metadata = field(default_factory=Metadata)
    status: JobStatus = field(default_factory=JobStatus)


# Pods


@dataclass(frozen=True, slots=True)
class ContainerResources:
    """Quantities, such as `500m` and `16Gi`, by the resource's name."""

    limits: Json = field(default_factory=dict)
    requests: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedField:
    name: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    env: tuple[NamedField, ...] = ()
    resources: ContainerResources = field(default_factory=ContainerResources)


@dataclass(frozen=True, slots=True)
class PodCsiVolume:
    volume_attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodVolume:
    name: str = ""
    csi: PodCsiVolume = field(default_factory=PodCsiVolume)


@dataclass(frozen=True, slots=True)
class PodSpec:
    node_name: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[PodVolume, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminated:
    exit_code: int = 0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One of the three is set."""

    running: Json | None = None
    waiting: Waiting = field(default_factory=Waiting)
    terminated: Terminated = field(default_factory=Terminated)


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    name: str = ""
    state: ContainerState = field(default_factory=ContainerState)


@dataclass(frozen=True, slots=True)
class PodStatus:
    phase: str = ""
    reason: str = ""
    pod_ip: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    metadata: Metadata = field(default_factory=Metadata)
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def has_ended(self) -> bool:
        return self.status.phase in ENDED_PHASES

    @property
    def first_state(self) -> ContainerState:
        """The state of the first container; empty before the pod has been started."""
        found = self.status.container_statuses
        return found[0].state if found else ContainerState()


# Nodes


@dataclass(frozen=True, slots=True)
class NodeSpec:
    unschedulable: bool = False


@dataclass(frozen=True, slots=True)
class NodeStatus:
    allocatable: Json = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterNode:
    metadata: Metadata = field(default_factory=Metadata)
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)

    @property
    def is_ready(self) -> bool:
        return any(each.type == "Ready" and each.holds for each in self.status.conditions)


# Secrets


@dataclass(frozen=True, slots=True)
class Secret:
    """The values are in base64."""

    data: Mapping[str, str] = field(default_factory=dict)
