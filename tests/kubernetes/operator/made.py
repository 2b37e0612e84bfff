"""Makes objects as the API would give them, for tests of the decisions."""

from collections.abc import Sequence
from dataclasses import replace

from diesel_kubernetes.operator.datasets import (
    Decision,
    JobView,
    Situation,
    decide,
    view_of_job,
)
from diesel_kubernetes.operator.fields import Json
from diesel_kubernetes.operator.holdings import NodeHoldings
from diesel_kubernetes.operator.objects import LABEL_TRAINING, volume_name
from diesel_kubernetes.operator.resources import Defaults, Object, parse_object
from diesel_kubernetes.reports import NodeReport

NOW_S = 1_800_000_000.0
DEFAULTS = Defaults(file_roots=("/data",))
URL = "diesel+tls://diesel.example:9300"
GOOD: Json = {"dataset": {"entries": 3, "files": 2, "bytes": 5, "version": 7}}


def dataset(
    spec: Json | None = None,
    status: Json | None = None,
    *,
    generation: int = 1,
    finalizers: Sequence[str] = (),
    deleted: bool = False,
    name: str = "pets",
) -> Object:
    """A Dataset, made from a bucket unless its spec says something else."""
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
    return parse_object(
        {"kind": "Dataset", "metadata": metadata, "spec": given, "status": status or {}}
    )


def training_job(spec: Json | None = None, status: Json | None = None) -> Object:
    """A TrainingJob of two pods that read `pets`."""
    container: Json = {"name": "train", "image": "image", "command": ["train"]}
    given: Json = {
        "replicas": 2,
        "datasets": [{"name": "pets", "mountPath": "/data"}],
        "template": {"spec": {"containers": [container]}},
        **(spec or {}),
    }
    metadata: Json = {"name": "train", "namespace": "default", "uid": "0123456789", "generation": 1}
    return parse_object(
        {"kind": "TrainingJob", "metadata": metadata, "spec": given, "status": status or {}}
    )


def ended(job: Json, report: Json, *, failed: bool = False) -> JobView:
    """A Job that the operator has made, as it is seen after its end."""
    return replace(
        view_of_job(job, ()),
        succeeded=not failed,
        failed=failed,
        reason="BackoffLimitExceeded" if failed else "",
        finished_s=NOW_S,
        report=report,
    )


def decided(
    seen: Object,
    jobs: Sequence[JobView] = (),
    pods: Sequence[Json] = (),
    *,
    progress: Json | None = None,
    now_s: float = NOW_S,
    reports: Sequence[NodeReport] = (),
) -> Decision:
    """The decision on a Dataset, of which the cluster has these Jobs and readers."""
    situation = Situation(
        seen, tuple(jobs), tuple(pods), progress or {}, now_s, 10.0, NodeHoldings(reports, now_s)
    )
    return decide(situation, DEFAULTS)


def reader_pod(node: str, *, phase: str = "Running", job: str = "train", **attributes: str) -> Json:
    """A pod of a TrainingJob that reads `pets`."""
    volume = {"name": volume_name("pets"), "csi": {"volumeAttributes": attributes}}
    return {
        "metadata": {"name": f"{job}-on-{node}", "labels": {LABEL_TRAINING: job}},
        "spec": {"nodeName": node, "volumes": [volume]},
        "status": {"phase": phase},
    }


def node_object(name: str, *, storage: str = "1Ti", ready: str = "True", **spec: object) -> Json:
    """A node of four processors."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "4", "ephemeral-storage": storage},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
