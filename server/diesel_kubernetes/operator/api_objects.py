"""Pods, Jobs and nodes as the operator reads them: the fields of the Kubernetes API that it uses.

The names are those of the API, so its reference explains them. Every class is decoded by
`decoding.py`. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .decoding import Json

ENDED_PHASES = ("Succeeded", "Failed")
"""Phases of a pod in which its containers have ended for good."""


@dataclass(frozen=True, slots=True)
class OwnerReference:
    """Another object, with which this one is deleted."""

    uid: str = ""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata that every object has."""

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
        """Whether the object was deleted, and is still there."""
        return bool(self.deletion_timestamp)

    def is_owned_by(self, uid: str) -> bool:
        """Whether the object is deleted together with another one."""
        return any(each.uid == uid for each in self.owner_references)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition in a status."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int | None = None

    @property
    def holds(self) -> bool:
        """Whether it is known to be true."""
        return self.status == "True"


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object of which only the kind and the metadata matter."""

    kind: str = ""
    metadata: Metadata = field(default_factory=Metadata)


# Jobs


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a Job."""

    conditions: tuple[Condition, ...] = ()
    start_time: str = ""
    completion_time: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A Job."""

    metadata: Metadata = field(default_factory=Metadata)
    status: JobStatus = field(default_factory=JobStatus)


# Pods


@dataclass(frozen=True, slots=True)
class ContainerResources:
    """The resources of a container, as quantities: `500m`, `16Gi`."""

    limits: Json = field(default_factory=dict)
    requests: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedField:
    """An element of a list, by its name: an environment variable, a volume."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """A container in the specification of a pod."""

    env: tuple[NamedField, ...] = ()
    resources: ContainerResources = field(default_factory=ContainerResources)


@dataclass(frozen=True, slots=True)
class PodCsiVolume:
    """A volume that a CSI driver mounts."""

    volume_attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodVolume:
    """A volume of a pod."""

    name: str = ""
    csi: PodCsiVolume = field(default_factory=PodCsiVolume)


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The specification of a pod."""

    node_name: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[PodVolume, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminated:
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container; the API sets one of the three."""

    running: Json | None = None
    waiting: Waiting = field(default_factory=Waiting)
    terminated: Terminated = field(default_factory=Terminated)


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """The status of a container."""

    name: str = ""
    state: ContainerState = field(default_factory=ContainerState)


@dataclass(frozen=True, slots=True)
class PodStatus:
    """The status of a pod."""

    phase: str = ""
    reason: str = ""
    pod_ip: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod."""

    metadata: Metadata = field(default_factory=Metadata)
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def has_ended(self) -> bool:
        """Whether its containers have ended for good."""
        return self.status.phase in ENDED_PHASES

    @property
    def first_state(self) -> ContainerState:
        """The state of its first container."""
        found = self.status.container_statuses
        return found[0].state if found else ContainerState()


# Nodes


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The specification of a node."""

    unschedulable: bool = False


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of a node."""

    allocatable: Json = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node."""

    metadata: Metadata = field(default_factory=Metadata)
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)

    @property
    def is_ready(self) -> bool:
        """Whether it runs pods."""
        return any(each.type == "Ready" and each.holds for each in self.status.conditions)


# Secrets


@dataclass(frozen=True, slots=True)
class Secret:
    """A Secret, with its values in base64."""

    data: Mapping[str, str] = field(default_factory=dict)
