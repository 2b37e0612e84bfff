"""The controller is killed after each of its writes, and another one goes on; and the conditions of
a TrainingJob when the cluster does not let the operator make its objects.

After any kill, the end is the same.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

from diesel_kubernetes.operator.controller import DATASETS, TRAINING_JOBS, Reconciler
from diesel_kubernetes.operator.queue import Key
from tests.clocks import ManualClock
from tests.kubernetes.fields import Json, at, condition_of, text
from tests.rows import each_row

from .made import DEFAULTS, GOOD, NOW_S, dataset, training_job
from .memory_cluster import MemoryCluster, settle

PETS = Key(DATASETS, "default", "pets")
TRAIN = Key(TRAINING_JOBS, "default", "train")


async def deletion(cluster: MemoryCluster) -> list[object]:
    """The deletion of the Dataset `pets` with its data. The only Job left is the one that
    deletes."""
    cluster.mark_deleted("Dataset", "pets")
    await settle(cluster, PETS)
    reclaims = cluster.of_kind("Job")
    assert [name.split("-")[1] for name in reclaims] == ["reclaim"]
    cluster.end_jobs({"done": True})
    await settle(cluster, PETS)
    # A controller that was killed between the end of the reclaim Job and the end of the object runs
    # it again
    cluster.end_jobs({"error": "NoSuchDataset", "message": "gone"})
    await settle(cluster, PETS)
    assert {kind for kind, _ in cluster.objects} <= {"Event", "Pod"}
    return [reclaims]


async def life_of_a_dataset(cluster: MemoryCluster) -> list[object]:
    """Return the states that were seen on the way."""
    cluster.put(dataset({"reclaimPolicy": "Delete"}).raw)
    await settle(cluster, PETS)
    seen: list[object] = [cluster.of_kind("Job")]
    cluster.end_jobs(GOOD)
    await settle(cluster, PETS)
    seen += [cluster.status("Dataset", "pets"), cluster.of_kind("Event")]
    return seen + await deletion(cluster)


async def short_life_of_a_dataset(cluster: MemoryCluster) -> list[object]:
    cluster.put(dataset({"reclaimPolicy": "Delete"}).raw)
    await settle(cluster, PETS)
    return await deletion(cluster)


def put_job(cluster: MemoryCluster, restarts: int = 0) -> None:
    """Make a TrainingJob with a ready dataset. It needs a Secret of its own."""
    ready: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 9, "version": 7}
    cluster.put(dataset({"url": "diesel://host:1", "secretName": "account"}, ready).raw)
    cluster.put({"kind": "Secret", "metadata": {"name": "account"}, "data": {"key": "eA=="}})
    cluster.put(training_job({"restarts": restarts}).raw)


async def life_of_a_job(cluster: MemoryCluster) -> list[object]:
    put_job(cluster, restarts=1)
    await settle(cluster, TRAIN)
    key = at(cluster.objects["Secret", "train-task-0"], "stringData", "taskKey")
    assert isinstance(key, str)
    seen: list[object] = [cluster.of_kind("Pod"), cluster.of_kind("Service")]
    cluster.set_pods("Running")
    await settle(cluster, TRAIN)
    assert at(cluster.objects["Secret", "train-task-0"], "stringData", "taskKey") == key
    cluster.set_pods("Failed")
    await settle(cluster, TRAIN)
    seen.append(cluster.status("TrainingJob", "train")["restarts"])
    cluster.set_pods("Succeeded")
    await settle(cluster, TRAIN)
    left = sorted(cluster.objects)
    kinds = [kind for kind, _ in left if kind != "Event"]
    assert kinds == ["Dataset", "Pod", "Pod", "Secret", "TrainingJob"]
    assert cluster.of_kind("Secret") == ["account"]
    return [*seen, cluster.status("TrainingJob", "train"), left]


@each_row("life", [life_of_a_dataset, short_life_of_a_dataset, life_of_a_job])
async def test_the_end_is_the_same_wherever_the_controller_is_killed(
    life: Callable[[MemoryCluster], Awaitable[list[object]]],
) -> None:
    whole = MemoryCluster()
    wanted = await life(whole)
    assert whole.writes > 5
    for step in range(1, whole.writes + 1):
        cluster = MemoryCluster()
        cluster.kill_after = step
        assert await life(cluster) == wanted, step
        assert cluster.writes >= step


# Hindrances


async def tried(cluster: MemoryCluster) -> Json:
    controller = Reconciler(cluster, DEFAULTS, clock=ManualClock(NOW_S))
    for _ in range(2):
        with suppress(Exception):  # the queue logs it, and tries again
            await controller.handle(TRAIN)
    return cluster.status("TrainingJob", "train")


def made(status: Json) -> tuple[str, str]:
    found = condition_of(status, "ObjectsMade")
    return text(found, "status"), text(found, "reason")


async def check_goes_on(cluster: MemoryCluster) -> None:
    cluster.forbidden.clear()
    await settle(cluster, TRAIN)
    assert made(await tried(cluster)) == ("True", "AllMade")
    assert cluster.of_kind("Pod") == ["train-0", "train-1"]


@each_row(
    ("reason", "forbidden", "message"),
    [
        ("SecretDenied", {"get Secret"}, "get Secret"),
        ("Forbidden", {"create Pod"}, "create Pod"),
        ("NameTaken", set(), "train-0"),
    ],
)
async def test_a_job_reports_a_hindrance_and_starts_after_its_end(
    reason: str, forbidden: set[str], message: str
) -> None:
    cluster = MemoryCluster()
    put_job(cluster)
    cluster.forbidden |= forbidden
    if reason == "NameTaken":
        cluster.put({"kind": "Pod", "metadata": {"name": "train-0", "uid": "somebody's"}})
    status = await tried(cluster)
    assert made(status) == ("False", reason)
    assert message in text(condition_of(status, "ObjectsMade"), "message")
    assert text(condition_of(status, "Admitted"), "reason") == "Fits"
    cluster.objects.pop(("Pod", "train-0"), None)
    await check_goes_on(cluster)


async def test_a_pod_that_is_forbidden_after_a_restart_is_reported_and_made_later() -> None:
    cluster = MemoryCluster()
    put_job(cluster, restarts=1)
    await settle(cluster, TRAIN)
    assert made(await tried(cluster)) == ("", "")
    cluster.forbidden.add("create Pod")
    cluster.set_pods("Failed")
    for _ in range(3):
        status = await tried(cluster)
    assert made(status) == ("False", "Forbidden")
    await check_goes_on(cluster)
