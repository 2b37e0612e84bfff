"""Reads the specifications of Datasets and TrainingJobs, and writes their conditions. Pure.

`OPERATOR.md` says what each field means. The API server has checked types and patterns by the
schemas; what a schema cannot say is checked here, with an error that names the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath

from diesel_fs.errors import UsageError
from diesel_fs.names import DATASET_NAME
from diesel_fs.urls import parse_url

from ..names import ATTRIBUTES, GROUP
from .fields import Json, at, fields, flag, items, text, texts, time_of, whole

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
DATASET, TRAINING_JOB = "Dataset", "TrainingJob"

RECLAIM_FINALIZER = "operator.diesel-fs.dev/reclaim"

OWN_ATTRIBUTES = frozenset(
    "dataset version url user region endpoint task rank world follow".split()
)
"""Attributes of volumes that the operator sets itself."""

REPLICAS_MAX = 1000
NAME_CHARS_MAX = 50

_META_SCHEMES = ("redis", "rediss", "redis+sentinel", "redis+cluster")
_BUCKETS = ("s3://", "gs://", "az://")
_RETRIES, _JOBS = 4, 2


class DatasetPhase(StrEnum):
    """Where a Dataset is; `OPERATOR.md` has the transitions."""

    PREPARING = "Preparing"
    READY = "Ready"
    FAILED = "Failed"
    DELETING = "Deleting"


class TrainingPhase(StrEnum):
    """Where a TrainingJob is."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REJECTED = "Rejected"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the administrator gives to all objects."""

    image: str = "diesel-fs"
    url: str = ""
    file_roots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Object:
    """What the API keeps of every object."""

    kind: str
    name: str
    namespace: str
    uid: str
    generation: int
    is_deleted: bool
    finalizers: tuple[str, ...]
    raw: Json = field(repr=False)

    @property
    def status(self) -> Json:
        """The status as it was read."""
        return fields(self.raw, "status")

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


def parse_object(raw: Json) -> Object:
    """An object of the API."""
    metadata = fields(raw, "metadata")
    return Object(
        kind=text(raw, "kind"),
        name=text(metadata, "name"),
        namespace=text(metadata, "namespace"),
        uid=text(metadata, "uid"),
        generation=whole(metadata, "generation", default=1),
        is_deleted=bool(text(metadata, "deletionTimestamp")),
        finalizers=tuple(str(each) for each in items(metadata, "finalizers")),
        raw=raw,
    )


@dataclass(frozen=True, slots=True)
class Repository:
    """Where a dataset lies, and how to get there."""

    url: str
    variables: Mapping[str, str]
    """What `dlcmd` gets in its environment, and is no secret."""
    attributes: Mapping[str, str]
    """What a volume names."""
    secret: str
    """The name of the Secret; empty: none."""
    file_folder: str = ""

    @property
    def can_share_caches(self) -> bool:
        """Whether the nodes of a task can find each other: through a server, or a Redis."""
        parsed = parse_url(self.url)
        scheme = parsed.meta.partition("://")[0] if parsed.meta else ""
        return parsed.scheme in ("diesel", "diesel+tls") or scheme in _META_SCHEMES

    @property
    def needs_task_key(self) -> bool:
        """Whether the task's secret must be given to its nodes: a server without TLS hands out
        none (PEERS.md)."""
        return parse_url(self.url).scheme == "diesel"


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """What a Dataset asks for."""

    dataset: str
    repository: Repository
    put: tuple[str, ...]
    """Arguments of `dlcmd` that make the dataset; none: it exists."""
    version: int
    """The version that an existing dataset is pinned to; 0: the current one."""
    keep: int
    """How many versions stay; -1: no purge."""
    reclaims: bool
    retries: int
    deadline_s: int
    resources: Json
    node_selector: Mapping[str, str]
    tolerations: list[object]

    @property
    def named(self) -> str:
        """The dataset, with the version that is wanted."""
        return f"{self.dataset}@{self.version}" if self.version else self.dataset


def parse_dataset(seen: Object, defaults: Defaults) -> DatasetSpec:
    """The specification of a Dataset. Raises UsageError, which names the field."""
    spec = fields(seen.raw, "spec")
    name = text(spec, "dataset") or seen.name
    if not DATASET_NAME.fullmatch(name):
        raise UsageError(f"spec.dataset: {name!r} is no name of a dataset")
    if len(seen.name) > NAME_CHARS_MAX:
        raise UsageError(f"metadata.name has more than {NAME_CHARS_MAX} characters")
    source = fields(spec, "source")
    if len(source) != 1 or not source.keys() <= {"bucket", "archives", "existing"}:
        raise UsageError("spec.source: name one of bucket, archives and existing")
    reclaims = text(spec, "reclaimPolicy") == "Delete"
    keep = whole(spec, "keep", default=-1)
    put: tuple[str, ...] = ()
    if "existing" not in source:
        put = _put_arguments(source, whole(spec, "preparation", "jobs", default=_JOBS), name)
    elif reclaims or keep >= 0:
        wrong = "reclaimPolicy: Delete" if reclaims else "keep"
        raise UsageError(f"spec.{wrong}: an existing dataset is only looked at")
    return DatasetSpec(
        dataset=name,
        repository=_repository(spec, defaults),
        put=put,
        version=whole(source, "existing", "version"),
        keep=keep,
        reclaims=reclaims,
        retries=whole(spec, "preparation", "retries", default=_RETRIES),
        deadline_s=whole(spec, "preparation", "deadlineSeconds"),
        resources=fields(spec, "preparation", "resources"),
        node_selector=texts(spec, "placement", "nodeSelector"),
        tolerations=items(spec, "placement", "tolerations"),
    )


def _put_arguments(source: Json, jobs: int, name: str) -> tuple[str, ...]:
    words = ["put", f"--jobs={jobs}"]
    if "archives" in source:
        urls = [str(each) for each in items(source, "archives", "urls")]
        if not urls:
            raise UsageError("spec.source.archives.urls: name at least one archive")
        for each in urls:
            _check_address("urls", each)
        if manifest := text(source, "archives", "manifest"):
            _check_address("manifest", manifest)
            words.append(f"--manifest={manifest}")
        return (*words, "--unpack", "--", *urls, name)
    bucket = fields(source, "bucket")
    url = text(bucket, "url")
    if not url.startswith(_BUCKETS) or "@" in _host(url):
        raise UsageError(f"spec.source.bucket.url: bad address {_shown(url)}")
    if flag(bucket, "delete"):
        words.append("--delete")
    for option in ("include", "exclude"):
        words += [f"--{option}={each}" for each in items(bucket, option)]
    return (*words, "--", url, name)


def _check_address(field: str, url: str) -> None:
    """Raise UsageError where `dlcmd put --unpack` could not fetch, or must not."""
    if not url.startswith((*_BUCKETS, "https://", "http://")) or "@" in _host(url):
        raise UsageError(f"spec.source.archives.{field}: bad address {_shown(url)}")


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _shown(url: str) -> str:
    """A URL without what may be a secret in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}/..."[:120]


def _repository(spec: Json, defaults: Defaults) -> Repository:
    url = text(spec, "url") or defaults.url
    if not url:
        raise UsageError("spec.url: no repository is named, and the operator has no default")
    if "@" in url:
        raise UsageError("spec.url: put users and passwords into the Secret")
    try:
        parsed = parse_url(url)
    except UsageError as error:
        raise UsageError(f"spec.url: {error.message}", advice=error.advice) from error
    folder = ""
    if url != defaults.url:
        scheme, _, rest = (parsed.meta or "").partition("://")
        if parsed.meta and (scheme not in _META_SCHEMES or "?" in rest):
            raise UsageError("spec.url: ?meta= must name a Redis, without parameters")
    if parsed.scheme == "file":
        folder = str(parsed.path)
        path = PurePosixPath(folder)
        if ".." in path.parts or not any(map(path.is_relative_to, defaults.file_roots)):
            raise UsageError(f"spec.url: no repository may lie in {folder}, see --file-root")
    variables, attributes = {"DIESEL_URL": url}, {"url": url}
    for name, variable in (
        ("user", "DIESEL_USER"),
        ("region", "AWS_REGION"),
        ("endpoint", "AWS_ENDPOINT_URL"),
    ):
        if value := text(spec, name):
            variables[variable] = attributes[name] = value
    return Repository(url, variables, attributes, text(spec, "secretName"), folder)


@dataclass(frozen=True, slots=True)
class DatasetUse:
    """A Dataset that a TrainingJob reads."""

    name: str
    mount_path: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """What a TrainingJob asks for."""

    replicas: int
    uses: tuple[DatasetUse, ...]
    template: Json
    one_per_node: bool
    checks_storage: bool
    restarts: int


def parse_training(seen: Object) -> TrainingSpec:
    """The specification of a TrainingJob. Raises UsageError, which names the field."""
    spec = fields(seen.raw, "spec")
    if len(seen.name) > NAME_CHARS_MAX:
        raise UsageError(f"metadata.name has more than {NAME_CHARS_MAX} characters")
    uses = []
    for number, each in enumerate(items(spec, "datasets")):
        options = texts(each, "options")
        for name in sorted(options):
            if name not in ATTRIBUTES or name in OWN_ATTRIBUTES:
                raise UsageError(f"spec.datasets[{number}].options: {name} cannot be set")
        path = text(each, "mountPath")
        if not path.startswith("/") or ".." in PurePosixPath(path).parts or ":" in path:
            raise UsageError(f"spec.datasets[{number}].mountPath: {path!r} is no absolute path")
        uses.append(DatasetUse(text(each, "name"), path, options))
    for what, found in (
        ("name", [each.name for each in uses]),
        ("mountPath", [each.mount_path for each in uses]),
    ):
        if len(set(found)) < len(found):
            raise UsageError(f"spec.datasets: two have the same {what}")
    replicas = whole(spec, "replicas", default=1)
    if not 1 <= replicas <= REPLICAS_MAX:
        raise UsageError(f"spec.replicas: {replicas} is not 1 to {REPLICAS_MAX}")
    template = fields(spec, "template")
    if not items(template, "spec", "containers"):
        raise UsageError("spec.template.spec.containers: there is none")
    if text(template, "spec", "restartPolicy") == "Always":
        raise UsageError("spec.template.spec.restartPolicy: a training job ends; use OnFailure")
    return TrainingSpec(
        replicas=replicas,
        uses=tuple(uses),
        template=template,
        one_per_node=flag(spec, "onePerNode", default=True),
        checks_storage=text(spec, "admission") != "Always",
        restarts=whole(spec, "restarts"),
    )


def with_condition(
    status: Json, kind: str, holds: bool, reason: str, message: str, seen: Object, now_s: float
) -> Json:
    """A status with a condition set. Its time changes only with its truth value."""
    before = [fields(each) for each in items(status, "conditions")]
    value = "True" if holds else "False"
    old = next((each for each in before if each.get("type") == kind), {})
    since = text(old, "lastTransitionTime") if old.get("status") == value else ""
    condition = {
        "type": kind,
        "status": value,
        "reason": reason,
        "message": message[:1024] or reason,
        "lastTransitionTime": since or time_of(now_s),
        "observedGeneration": seen.generation,
    }
    others = [each for each in before if each.get("type") != kind]
    made = sorted([*others, condition], key=lambda each: str(each["type"]))
    return {**status, "conditions": made}


def condition_of(status: Json, kind: str) -> Json:
    """A condition of a status; empty where it is not there."""
    found = [fields(each) for each in items(status, "conditions") if at(each, "type") == kind]
    return found[0] if found else {}
