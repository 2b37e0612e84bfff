"""What a TrainingJob says when the cluster does not let the operator make what it needs."""

from contextlib import suppress

from diesel_kubernetes.operator.controller import Controller
from diesel_kubernetes.operator.fields import Json, text
from diesel_kubernetes.operator.resources import condition_of
from tests.rows import each_row

from .made import DEFAULTS, dataset, training_job
from .memory_cluster import ManualClock, MemoryCluster, settle
from .test_crashes import ACCOUNT, TRAIN

READY: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 9, "version": 7}


def cluster_with_a_job(restarts: int = 0) -> MemoryCluster:
    """A TrainingJob whose dataset is ready. It needs a Secret of its own."""
    cluster = MemoryCluster()
    cluster.put(dataset({"url": "diesel://host:1", "secretName": "account"}, READY).raw)
    cluster.put(ACCOUNT)
    cluster.put(training_job({"restarts": restarts}).raw)
    return cluster


async def tried(cluster: MemoryCluster) -> Json:
    """The status of the TrainingJob after the operator has tried twice."""
    controller = Controller(cluster, DEFAULTS, clock=ManualClock())
    for _ in range(2):
        with suppress(Exception):  # the queue logs it, and tries again
            await controller.handle(TRAIN)
    return cluster.status("TrainingJob", "train")


def made(status: Json) -> tuple[str, str]:
    """The condition `ObjectsMade`."""
    found = condition_of(status, "ObjectsMade")
    return text(found, "status"), text(found, "reason")


async def check_goes_on(cluster: MemoryCluster) -> None:
    """Nothing hinders the job any more: all is made."""
    cluster.forbidden.clear()
    await settle(cluster, TRAIN)
    assert made(await tried(cluster)) == ("True", "AllMade")
    assert cluster.of_kind("Pod") == ["train-0", "train-1"]


@each_row(
    ("reason", "forbidden", "said"),
    [
        ("SecretDenied", {"get Secret"}, "get Secret"),
        ("Forbidden", {"create Pod"}, "create Pod"),
        ("NameTaken", set(), "train-0"),
    ],
)
async def test_a_job_says_what_hinders_it_and_starts_when_that_has_gone(
    reason: str, forbidden: set[str], said: str
) -> None:
    cluster = cluster_with_a_job()
    cluster.forbidden |= forbidden
    if reason == "NameTaken":
        cluster.put({"kind": "Pod", "metadata": {"name": "train-0", "uid": "somebody's"}})
    status = await tried(cluster)
    assert made(status) == ("False", reason)
    assert said in text(condition_of(status, "ObjectsMade"), "message")
    assert text(condition_of(status, "Admitted"), "reason") == "Fits"
    cluster.objects.pop(("Pod", "train-0"), None)
    await check_goes_on(cluster)


async def test_a_pod_that_is_forbidden_after_a_restart_is_said_and_made_later() -> None:
    cluster = cluster_with_a_job(restarts=1)
    await settle(cluster, TRAIN)
    assert made(await tried(cluster)) == ("", "")
    cluster.forbidden.add("create Pod")
    cluster.set_pods("Failed")
    for _ in range(3):
        status = await tried(cluster)
    assert made(status) == ("False", "Forbidden")
    await check_goes_on(cluster)
