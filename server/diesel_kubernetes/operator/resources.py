"""The resources of the operator, Dataset and TrainingJob, with their statuses and conditions. Pure.

Every class mirrors a part of the schemas (`deploy/kubernetes/base/definitions`); `OPERATOR.md` says
what each field means. A `Given...` is a specification as its user wrote it: the API server has
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
    """The phases of a Dataset; `OPERATOR.md` has the transitions."""

    PREPARING = "Preparing"
    READY = "Ready"
    FAILED = "Failed"
    DELETING = "Deleting"


class TrainingPhase(StrEnum):
    """The phases of a TrainingJob."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REJECTED = "Rejected"


@dataclass(frozen=True, slots=True)
class Status:
    """The fields of every status that the operator writes. Values are replaced, never changed."""

    phase: str = ""
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()

    def condition(self, kind: str) -> Condition:
        """One of its conditions; an empty one if it is not there."""
        return next((each for each in self.conditions if each.type == kind), Condition())


@dataclass(frozen=True, slots=True)
class NodeShare:
    """A node that has blocks of a dataset (`OPERATOR.md`)."""

    name: str = ""
    state: str = ""
    share: int = 0
    """In percent of the dataset."""
    keeps: bool = False
    """Whether something stays on its disk when no pod reads the dataset."""
    disk_share: int | None = None
    """In percent of the dataset; None if it was not measured."""
    measured: bool = False

    @property
    def share_on_disk(self) -> int:
        """Its measured share on the disk, or else its whole share."""
        return self.share if self.disk_share is None else self.disk_share


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is."""

    entries: int | None = None
    bytes: int | None = None
    percent: int | None = None


@dataclass(frozen=True, slots=True)
class DatasetStatus(Status):
    """The status of a Dataset."""

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
    """A node, and its place in the order by score."""

    name: str = ""
    hostname: str = ""
    score: str = ""


@dataclass(frozen=True, slots=True)
class PlannedVolume:
    """A volume that the pods of a TrainingJob mount; pinned in its status at admission."""

    name: str = ""
    """That of the Dataset."""
    mount_path: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    secret_name: str = ""
    """The Secret that the volume names; empty: none."""
    key_from: str = ""
    """The Secret that `secret_name` copies, with a task key added; empty: it is no copy."""


@dataclass(frozen=True, slots=True)
class TrainingStatus(Status):
    """The status of a TrainingJob."""

    nodes: tuple[ChosenNode, ...] | None = None
    node_selector: Mapping[str, str] | None = None
    volumes: tuple[PlannedVolume, ...] = ()
    running: int | None = None
    succeeded: int | None = None
    replicas: int | None = None
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class Object:
    """An object of ours: the fields that both kinds have."""

    kind: str
    metadata: Metadata
    raw: Json = field(repr=False)
    """The object as it was read: the API wants all of it back when a status is written."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        """The ID that no other object ever has."""
        return self.metadata.uid

    @property
    def generation(self) -> int:
        """The number of its specification."""
        return self.metadata.generation

    @property
    def is_deleted(self) -> bool:
        """Whether somebody has deleted it; finalizers may still hold it."""
        return self.metadata.is_leaving

    @property
    def owner(self) -> Json:
        """A reference to it, as the owner of another object."""
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
    """A Dataset."""

    given: "GivenDataset"
    status: DatasetStatus


@dataclass(frozen=True, slots=True)
class TrainingObject(Object):
    """A TrainingJob."""

    given: "GivenTraining"
    status: TrainingStatus


def decode_dataset(raw: Json) -> DatasetObject:
    """A Dataset of the API."""
    return DatasetObject(
        kind=DATASET,
        metadata=decode(Metadata, raw.get("metadata")),
        raw=raw,
        given=decode(GivenDataset, raw.get("spec")),
        status=decode(DatasetStatus, raw.get("status")),
    )


def decode_training(raw: Json) -> TrainingObject:
    """A TrainingJob of the API."""
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
    """`source.bucket`."""

    url: str = ""
    delete: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenArchives:
    """`source.archives`."""

    urls: tuple[str, ...] = ()
    manifest: str = ""


@dataclass(frozen=True, slots=True)
class GivenExisting:
    """`source.existing`."""

    version: int = 0


@dataclass(frozen=True, slots=True)
class GivenSource:
    """`source`: exactly one of the three is there."""

    bucket: GivenBucket | None = None
    archives: GivenArchives | None = None
    existing: GivenExisting | None = None


@dataclass(frozen=True, slots=True)
class GivenPlacement:
    """`placement`."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenPreparation:
    """`preparation`."""

    jobs: int = 2
    retries: int = 4
    deadline_seconds: int = 0
    resources: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GivenDataset:
    """The `spec` of a Dataset as its user wrote it; `specs.py` checks it."""

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
    """A Dataset that a TrainingJob reads."""

    name: str = ""
    mount_path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GivenTraining:
    """The `spec` of a TrainingJob as its user wrote it; `specs.py` checks it."""

    replicas: int = 1
    datasets: tuple[DatasetUse, ...] = ()
    template: Json = field(default_factory=dict)
    one_per_node: bool = True
    admission: str = ""
    restarts: int = 0


# Conditions


@dataclass(frozen=True, slots=True)
class ConditionContent:
    """The content of a condition: whether it holds, and why."""

    kind: str
    reason: str
    message: str = ""
    holds: bool = False


S = TypeVar("S", bound=Status)


def with_condition(status: S, found: ConditionContent, seen: Object, now_s: float) -> S:
    """A status with a condition set. The condition's time changes only with its truth value."""
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
