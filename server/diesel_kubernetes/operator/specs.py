"""Checks the specifications of Datasets and TrainingJobs by the rules that a schema cannot express.
Pure. Errors name the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from diesel_fs.errors import UsageError
from diesel_fs.names import DATASET_NAME
from diesel_fs.urls import parse_url

from ..names import ATTRIBUTES
from .api_objects import PodSpec
from .decoding import Json, decode
from .resources import (
    DatasetObject,
    DatasetUse,
    GivenBucket,
    GivenDataset,
    GivenPlacement,
    GivenPreparation,
    GivenSource,
    TrainingObject,
)

OWN_ATTRIBUTES = frozenset(
    "dataset version url user region endpoint task rank world follow".split()
)
"""The operator sets these volume attributes, so a TrainingJob may not."""

REPLICAS_MAX = 1000
NAME_CHARS_MAX = 50

_META_SCHEMES = ("redis", "rediss", "redis+sentinel", "redis+cluster")
_BUCKETS = ("s3://", "gs://", "az://")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The administrator's options: the image of Jobs, the repository of Datasets that name none,
    and the folders below which a Dataset may name a repository by `file://`."""

    image: str = "diesel-fs"
    url: str = ""
    file_roots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepositoryPlace:
    """A Dataset's repository, as `dlcmd` and volumes get it."""

    url: str
    variables: Mapping[str, str]
    """The environment of `dlcmd`, without secrets."""
    attributes: Mapping[str, str]
    secret: str
    """The name of the Secret with the credentials, or ""."""
    file_folder: str = ""

    @property
    def can_share_caches(self) -> bool:
        """Whether a server or a Redis lets the nodes of a task find each other."""
        parsed = parse_url(self.url)
        scheme = parsed.meta.partition("://")[0] if parsed.meta else ""
        return parsed.scheme in ("diesel", "diesel+tls") or scheme in _META_SCHEMES

    @property
    def needs_task_key(self) -> bool:
        """A server without TLS hands out no key for the nodes of a task (PEERS.md), so the operator
        must make one."""
        return parse_url(self.url).scheme == "diesel"


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    dataset: str
    repository: RepositoryPlace
    put: tuple[str, ...]
    """The arguments of `dlcmd` that make the dataset; empty if it exists already."""
    version: int
    """0: the current version."""
    keep: int
    """A purge keeps this number of versions; -1: no purge."""
    reclaims: bool
    """Whether deleting the object deletes the data."""
    warms_up: bool
    placement: GivenPlacement
    preparation: GivenPreparation

    @property
    def named(self) -> str:
        return f"{self.dataset}@{self.version}" if self.version else self.dataset


def parse_dataset(seen: DatasetObject, defaults: Defaults) -> DatasetSpec:
    """Raises UsageError, which names the field."""
    given = seen.given
    name = given.dataset or seen.name
    if not DATASET_NAME.fullmatch(name):
        raise UsageError(f"spec.dataset: {name!r} is no name of a dataset")
    if len(seen.name) > NAME_CHARS_MAX:
        raise UsageError(f"metadata.name has more than {NAME_CHARS_MAX} characters")
    source = given.source
    if sum(each is not None for each in (source.bucket, source.archives, source.existing)) != 1:
        raise UsageError("spec.source: name one of bucket, archives and existing")
    reclaims = given.reclaim_policy == "Delete"
    put: tuple[str, ...] = ()
    version = 0
    if source.existing is None:
        put = _put_arguments(source, given.preparation.jobs, name)
    elif reclaims or given.keep >= 0:
        wrong = "reclaimPolicy: Delete" if reclaims else "keep"
        raise UsageError(f"spec.{wrong}: an existing dataset is never changed")
    else:
        version = source.existing.version
    return DatasetSpec(
        dataset=name,
        repository=_repository(given, defaults),
        put=put,
        version=version,
        keep=given.keep,
        reclaims=reclaims,
        warms_up=given.warm_up,
        placement=given.placement,
        preparation=given.preparation,
    )


def _put_arguments(source: GivenSource, jobs: int, name: str) -> tuple[str, ...]:
    words = ["put", f"--jobs={jobs}"]
    if archives := source.archives:
        if not archives.urls:
            raise UsageError("spec.source.archives.urls: name at least one archive")
        for each in archives.urls:
            _check_address("urls", each)
        if archives.manifest:
            _check_address("manifest", archives.manifest)
            words.append(f"--manifest={archives.manifest}")
        return (*words, "--unpack", "--", *archives.urls, name)
    bucket = source.bucket or GivenBucket()
    if not bucket.url.startswith(_BUCKETS) or "@" in _host(bucket.url):
        raise UsageError(f"spec.source.bucket.url: bad address {_shown(bucket.url)}")
    if bucket.delete:
        words.append("--delete")
    words += [f"--include={each}" for each in bucket.include]
    words += [f"--exclude={each}" for each in bucket.exclude]
    return (*words, "--", bucket.url, name)


def _check_address(field: str, url: str) -> None:
    """Raises UsageError if `dlcmd put --unpack` cannot, or must not, fetch the URL."""
    if not url.startswith((*_BUCKETS, "https://", "http://")) or "@" in _host(url):
        raise UsageError(f"spec.source.archives.{field}: bad address {_shown(url)}")


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _shown(url: str) -> str:
    """Leaves out the parts that may be secret."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}/..."[:120]


def _repository(given: GivenDataset, defaults: Defaults) -> RepositoryPlace:
    url = given.url or defaults.url
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
    for name, variable, value in (
        ("user", "DIESEL_USER", given.user),
        ("region", "AWS_REGION", given.region),
        ("endpoint", "AWS_ENDPOINT_URL", given.endpoint),
    ):
        if value:
            variables[variable] = attributes[name] = value
    return RepositoryPlace(url, variables, attributes, given.secret_name, folder)


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    replicas: int
    uses: tuple[DatasetUse, ...]
    template: Json
    """The user's pod template; this release may not know all of its fields."""
    pod: PodSpec
    one_per_node: bool
    checks_storage: bool
    """Whether the job is rejected if its datasets do not fit."""
    restarts: int
    """The pods are made again at most this often after one has failed."""


def parse_training(seen: TrainingObject) -> TrainingSpec:
    """Raises UsageError, which names the field."""
    given = seen.given
    if len(seen.name) > NAME_CHARS_MAX:
        raise UsageError(f"metadata.name has more than {NAME_CHARS_MAX} characters")
    for number, use in enumerate(given.datasets):
        for name in sorted(use.options):
            if name not in ATTRIBUTES or name in OWN_ATTRIBUTES:
                raise UsageError(f"spec.datasets[{number}].options: {name} cannot be set")
        path = use.mount_path
        if not path.startswith("/") or ".." in PurePosixPath(path).parts or ":" in path:
            raise UsageError(f"spec.datasets[{number}].mountPath: {path!r} is no absolute path")
    for what, found in (
        ("name", [each.name for each in given.datasets]),
        ("mountPath", [each.mount_path for each in given.datasets]),
    ):
        if len(set(found)) < len(found):
            raise UsageError(f"spec.datasets: two have the same {what}")
    if not 1 <= given.replicas <= REPLICAS_MAX:
        raise UsageError(f"spec.replicas: {given.replicas} is not 1 to {REPLICAS_MAX}")
    pod = decode(PodSpec, given.template.get("spec"))
    if not pod.containers:
        raise UsageError("spec.template.spec.containers: there is none")
    if pod.restart_policy == "Always":
        raise UsageError("spec.template.spec.restartPolicy: a training job ends; use OnFailure")
    return TrainingSpec(
        replicas=given.replicas,
        uses=given.datasets,
        template=given.template,
        pod=pod,
        one_per_node=given.one_per_node,
        checks_storage=given.admission != "Always",
        restarts=given.restarts,
    )
