"""Makes objects as the API would give them, for tests of the decisions."""

from collections.abc import Sequence
from dataclasses import replace

from diesel_kubernetes.operator.api_objects import Job, Pod
from diesel_kubernetes.operator.datasets import (
    DatasetDecision,
    DatasetSituation,
    JobReport,
    JobView,
    decide,
    view_of_job,
)
from diesel_kubernetes.operator.decoding import Json, decode, encode
from diesel_kubernetes.operator.holdings import ReportedHoldings
from diesel_kubernetes.operator.objects import LABEL_TRAINING, volume_name
from diesel_kubernetes.operator.resources import (
    DatasetObject,
    DatasetStatus,
    Progress,
    TrainingObject,
    TrainingStatus,
    decode_dataset,
    decode_training,
)
from diesel_kubernetes.operator.specs import Defaults
from diesel_kubernetes.reports import NodeReport

NOW_S = 1_800_000_000.0
DEFAULTS = Defaults(file_roots=("/data",))
URL = "diesel+tls://diesel.example:9300"
GOOD: Json = {"dataset": {"entries": 3, "files": 2, "bytes": 5, "version": 7}}


def dataset(
    spec: Json | None = None,
    status: Json | DatasetStatus | None = None,
    *,
    generation: int = 1,
    finalizers: Sequence[str] = (),
    deleted: bool = False,
    name: str = "pets",
) -> DatasetObject:
    """A Dataset, made from a bucket unless its spec has another source."""
    given: Json = {"url": URL, "source": {"bucket": {"url": "s3://bucket/pets"}}, **(spec or {})}
    metadata: Json = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-of-{name}",
        "generation": generation,
        "finalizers": list(finalizers),
        "resourceVersion": "1",
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    raw = encode(status) if isinstance(status, DatasetStatus) else status or {}
    return decode_dataset({"kind": "Dataset", "metadata": metadata, "spec": given, "status": raw})


def training_job(spec: Json | None = None, status: TrainingStatus | None = None) -> TrainingObject:
    container: Json = {"name": "train", "image": "image", "command": ["train"]}
    given: Json = {
        "replicas": 2,
        "datasets": [{"name": "pets", "mountPath": "/data"}],
        "template": {"spec": {"containers": [container]}},
        **(spec or {}),
    }
    metadata: Json = {"name": "train", "namespace": "default", "uid": "0123456789", "generation": 1}
    raw = encode(status) if status else {}
    return decode_training(
        {"kind": "TrainingJob", "metadata": metadata, "spec": given, "status": raw}
    )


def view(job: Json, pods: Sequence[Json] = ()) -> JobView:
    return view_of_job(decode(Job, job), [decode(Pod, each) for each in pods])


def ended(job: Json, report: Json, *, failed: bool = False) -> JobView:
    return replace(
        view(job),
        succeeded=not failed,
        failed=failed,
        reason="BackoffLimitExceeded" if failed else "",
        finished_s=NOW_S,
        report=decode(JobReport, report),
    )


def decided(
    seen: DatasetObject,
    jobs: Sequence[JobView] = (),
    pods: Sequence[Json] = (),
    *,
    progress: Progress | None = None,
    now_s: float = NOW_S,
    reports: Sequence[NodeReport] = (),
) -> DatasetDecision:
    readers = tuple(decode(Pod, each) for each in pods)
    holdings = ReportedHoldings(reports, now_s)
    situation = DatasetSituation(seen, tuple(jobs), readers, progress, now_s, 10.0, holdings)
    return decide(situation, DEFAULTS)


def reader_pod(node: str, *, phase: str = "Running", job: str = "train", **attributes: str) -> Json:
    volume = {"name": volume_name("pets"), "csi": {"volumeAttributes": attributes}}
    return {
        "metadata": {"name": f"{job}-on-{node}", "labels": {LABEL_TRAINING: job}},
        "spec": {"nodeName": node, "volumes": [volume]},
        "status": {"phase": phase},
    }


def node_object(name: str, *, storage: str = "1Ti", ready: str = "True", **spec: object) -> Json:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "4", "ephemeral-storage": storage},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
