"""The resources of the operator, Dataset and TrainingJob, with their statuses and conditions. Pure.

Every class mirrors a part of the schemas (`deploy/kubernetes/base/definitions`); `OPERATOR.md`
explains the fields. A `Given...` is a specification as its user wrote it: the API server has
checked its types and patterns, and `specs.py` checks the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from ..names import GROUP
from .api_objects import Condition, Metadata
from .decoding import Json, decode, time_of

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
DATASET, TRAINING_JOB = "Dataset", "TrainingJob"

RECLAIM_FINALIZER = "operator.diesel-fs.dev/reclaim"


class DatasetPhase(StrEnum):
    PREPARING = "Preparing"
    READY = "Ready"
    FAILED = "Failed"
    DELETING = "Deleting"


class TrainingPhase(StrEnum):
    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REJECTED = "Rejected"


@dataclass(frozen=True, slots=True)
class Status:
    """An instance is never changed, only replaced."""

    phase: str = ""
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()

    def condition(self, kind: str) -> Condition:
        return next((each for each in self.conditions if each.type == kind), Condition())


@dataclass(frozen=True, slots=True)
class NodeShare:
    """A node that has a part of a dataset in its cache. Shares are percentages."""

    name: str = ""
    state: str = ""
    """`Active` if pods on the node read the dataset, else `Cached`."""
    share: int = 0
    keeps: bool = False
    """Whether something stays on disk when no pod reads the dataset."""
    disk_share: int | None = None
    """None if it was not measured."""
    measured: bool = False
    """Whether the node has reported the shares; otherwise they are estimates."""

    @property
    def share_on_disk(self) -> int:
        """The whole share counts if the share on disk was not measured."""
        return self.share if self.disk_share is None else self.disk_share


@dataclass(frozen=True, slots=True)
class Progress:
    entries: int | None = None
    bytes: int | None = None
    percent: int | None = None


@dataclass(frozen=True, slots=True)
class DatasetStatus(Status):
    attempt: int | None = None
    """The number of the last preparation, from 1."""
    entries: int | None = None
    files: int | None = None
    bytes: int | None = None
    version: int | None = None
    identity: str = ""
    progress: Progress | None = None
    nodes: tuple[NodeShare, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChosenNode:
    name: str = ""
    hostname: str = ""
    score: str = ""


@dataclass(frozen=True, slots=True)
class PlannedVolume:
    """A volume of a TrainingJob's pods, as decided at admission: later pods get the same
    version."""

    name: str = ""
    mount_path: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    secret_name: str = ""
    """The Secret that the volume gets; empty: none."""
    key_from: str = ""
    """The Secret of which `secret_name` is a copy with a task key; empty if it is no copy."""


@dataclass(frozen=True, slots=True)
class TrainingStatus(Status):
    nodes: tuple[ChosenNode, ...] | None = None
    node_selector: Mapping[str, str] | None = None
    volumes: tuple[PlannedVolume, ...] = ()
    running: int | None = None
    succeeded: int | None = None
    replicas: int | None = None
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class Object:
    kind: str
    metadata: Metadata
    raw: Json = field(repr=False)
    """The object as the API returned it. All of it is sent back when a status is written."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def generation(self) -> int:
        return self.metadata.generation

    @property
    def is_deleted(self) -> bool:
        """Finalizers may still keep the object."""
        return self.metadata.is_leaving

    @property
    def owner(self) -> Json:
        """The owner reference for objects that are made for this one."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True, slots=True)
class DatasetObject(Object):
    given: "GivenDataset"
    status: DatasetStatus


@dataclass(frozen=True, slots=True)
class TrainingObject(Object):
    given: "GivenTraining"
    status: TrainingStatus


def decode_dataset(raw: Json) -> DatasetObject:
    return DatasetObject(
        kind=DATASET,
        metadata=decode(Metadata, raw.get("metadata")),
        raw=raw,
        given=decode(GivenDataset, raw.get("spec")),
        status=decode(DatasetStatus, raw.get("status")),
    )


def decode_training(raw: Json) -> TrainingObject:
    return TrainingObject(
        kind=TRAINING_JOB,
        metadata=decode(Metadata, raw.get("metadata")),
        raw=raw,
        given=decode(GivenTraining, raw.get("spec")),
        status=decode(TrainingStatus, raw.get("status")),
    )


# The specification of a Dataset


@dataclass(frozen=True, slots=True)
class GivenBucket:
    url: str = ""
    delete: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenArchives:
    urls: tuple[str, ...] = ()
    manifest: str = ""


@dataclass(frozen=True, slots=True)
class GivenExisting:
    version: int = 0


@dataclass(frozen=True, slots=True)
class GivenSource:
    """One of the three is set."""

    bucket: GivenBucket | None = None
    archives: GivenArchives | None = None
    existing: GivenExisting | None = None


@dataclass(frozen=True, slots=True)
class GivenPlacement:
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenPreparation:
    jobs: int = 2
    retries: int = 4
    deadline_seconds: int = 0
    resources: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GivenDataset:
    dataset: str = ""
    url: str = ""
    user: str = ""
    region: str = ""
    endpoint: str = ""
    secret_name: str = ""
    source: GivenSource = field(default_factory=GivenSource)
    keep: int = -1
    reclaim_policy: str = ""
    warm_up: bool = False
    placement: GivenPlacement = field(default_factory=GivenPlacement)
    preparation: GivenPreparation = field(default_factory=GivenPreparation)


# The specification of a TrainingJob


@dataclass(frozen=True, slots=True)
class DatasetUse:
    name: str = ""
    mount_path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GivenTraining:
    replicas: int = 1
    datasets: tuple[DatasetUse, ...] = ()
    template: Json = field(default_factory=dict)
    one_per_node: bool = True
    admission: str = ""
    restarts: int = 0


# Conditions


@dataclass(frozen=True, slots=True)
class ConditionContent:
    kind: str
    reason: str
    message: str = ""
    holds: bool = False


S = TypeVar("S", bound=Status)


def with_condition(status: S, found: ConditionContent, seen: Object, now_s: float) -> S:
    """Replaces an older condition of its kind. The condition's time changes only with its truth
    value."""
    value = "True" if found.holds else "False"
    old = status.condition(found.kind)
    since = old.last_transition_time if old.status == value else ""
    condition = Condition(
        type=found.kind,
        status=value,
        reason=found.reason,
        message=found.message[:1024] or found.reason,
        last_transition_time=since or time_of(now_s),
        observed_generation=seen.generation,
    )
    others = [each for each in status.conditions if each.type != found.kind]
    made = sorted([*others, condition], key=lambda each: each.type)
    return replace(status, conditions=tuple(made))
