"""The controller is killed after each of its writes, and another one goes on.

Whatever was killed, the end is the same.
"""

from collections.abc import Awaitable, Callable

from diesel_kubernetes.operator.controller import DATASETS, TRAINING_JOBS
from diesel_kubernetes.operator.fields import Json, at
from diesel_kubernetes.operator.queue import Key
from tests.rows import each_row

from .made import GOOD, dataset, training_job
from .memory_cluster import MemoryCluster, settle

PETS = Key(DATASETS, "default", "pets")
TRAIN = Key(TRAINING_JOBS, "default", "train")
ACCOUNT: Json = {"kind": "Secret", "metadata": {"name": "account"}, "data": {"key": "eA=="}}


async def deletion(cluster: MemoryCluster) -> list[object]:
    """The deletion of the Dataset `pets` with its data. The only Job left is that which does it."""
    cluster.mark_deleted("Dataset", "pets")
    await settle(cluster, PETS)
    reclaims = cluster.of_kind("Job")
    assert [name.split("-")[1] for name in reclaims] == ["reclaim"]
    cluster.end_jobs({"done": True})
    await settle(cluster, PETS)
    # One that was killed between the end of the reclaim Job and the end of the object runs it again
    cluster.end_jobs({"error": "NoSuchDataset", "message": "gone"})
    await settle(cluster, PETS)
    assert {kind for kind, _ in cluster.objects} <= {"Event", "Pod"}
    return [reclaims]


async def life_of_a_dataset(cluster: MemoryCluster) -> list[object]:
    """A Dataset from its making to its deletion; what was seen on the way."""
    cluster.put(dataset({"reclaimPolicy": "Delete"}).raw)
    await settle(cluster, PETS)
    seen: list[object] = [cluster.of_kind("Job")]
    cluster.end_jobs(GOOD)
    await settle(cluster, PETS)
    seen += [cluster.status("Dataset", "pets"), cluster.of_kind("Event")]
    return seen + await deletion(cluster)


async def short_life_of_a_dataset(cluster: MemoryCluster) -> list[object]:
    """A Dataset that is deleted in the middle of its preparation."""
    cluster.put(dataset({"reclaimPolicy": "Delete"}).raw)
    await settle(cluster, PETS)
    return await deletion(cluster)


async def life_of_a_job(cluster: MemoryCluster) -> list[object]:
    """A TrainingJob from its making, over a restart, to its end."""
    ready: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 9, "version": 7}
    cluster.put(dataset({"url": "diesel://host:1", "secretName": "account"}, ready).raw)
    cluster.put(ACCOUNT)
    cluster.put(training_job({"restarts": 1}).raw)
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
