"""The controller is killed after each of its writes, and another one goes on.

The cluster is a dictionary with the rules that matter here: names are unique, a status is replaced
only by who has read the last version, finalizers hold objects, and owners take what they own with
them. A Job or pod of it ends as the test says. Whatever was killed, the end is the same.
"""

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from typing import cast

import httpx2
import pytest
from lightkube import ApiError
from lightkube.generic_resource import GenericNamespacedResource

from diesel_kubernetes.operator.cluster import Cluster
from diesel_kubernetes.operator.controller import DATASETS, TRAINING_JOBS, Controller
from diesel_kubernetes.operator.fields import Json, at, fields, items, text, texts
from diesel_kubernetes.operator.queue import Key

from .made import DEFAULTS, GOOD, dataset, training_job

STEPS_MAX = 200


class Killed(BaseException):
    """The controller was killed."""


class ManualClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def conflict() -> ApiError:
    """What the API server says of a write that comes too late."""
    answer = httpx2.Response(
        409, json={"code": 409, "message": "changed"}, request=httpx2.Request("PUT", "http://x")
    )
    return ApiError(request=answer.request, response=answer)


class MemoryCluster(Cluster):
    """The API server, in memory. `kill_after` writes, the one who wrote is killed."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.versions = 0
        self.writes = 0
        self.kill_after = -1
        self.kinds_made: list[str] = []

    def put(self, raw: Json) -> None:
        """Make an object as a user does."""
        self.versions += 1
        metadata = {**fields(raw, "metadata"), "resourceVersion": str(self.versions)}
        name = str(metadata["name"])
        self.objects[str(raw["kind"]), name] = {**copy.deepcopy(raw), "metadata": metadata}

    def _written(self) -> None:
        self.writes += 1
        if self.writes == self.kill_after:
            raise Killed

    async def get(
        self, kind: type[GenericNamespacedResource], namespace: str, name: str
    ) -> Json | None:
        return copy.deepcopy(self.objects.get((_kind(kind), name)))

    async def find(
        self,
        kind: type[GenericNamespacedResource],
        namespace: str,
        labels: Mapping[str, str | None] | None = None,
    ) -> list[Json]:
        found = []
        for (kind_name, _), each in self.objects.items():
            own = texts(each, "metadata", "labels")
            fits = all(
                name in own and value in (None, own[name]) for name, value in (labels or {}).items()
            )
            if kind_name == _kind(kind) and fits:
                found.append(copy.deepcopy(each))
        return found

    async def nodes(self) -> list[Json]:
        return [
            {
                "metadata": {"name": name},
                "status": {
                    "allocatable": {"ephemeral-storage": "1Ti"},
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
            for name in ("a", "b")
        ]

    async def create(self, made: Json) -> bool:
        key = text(made, "kind"), text(made, "metadata", "name")
        if key in self.objects:
            return False
        self.put(made)
        self.kinds_made.append(key[0])
        self._written()
        return True

    async def delete(
        self, kind: type[GenericNamespacedResource], namespace: str, name: str
    ) -> None:
        if self.objects.pop((_kind(kind), name), None) is not None:
            self._written()

    async def write_status(
        self, kind: type[GenericNamespacedResource], seen: Json, status: Json
    ) -> None:
        self._change(seen, {"status": copy.deepcopy(status)})
        self._written()

    async def set_finalizers(
        self, kind: type[GenericNamespacedResource], seen: Json, finalizers: list[str]
    ) -> Json | None:
        metadata = {**fields(seen, "metadata"), "finalizers": finalizers}
        self._change(seen, {"metadata": metadata})
        key = text(seen, "kind"), text(seen, "metadata", "name")
        self.collect(*key)
        self._written()
        return copy.deepcopy(self.objects.get(key))

    def _change(self, seen: Json, change: Json) -> None:
        there = self.objects.get((text(seen, "kind"), text(seen, "metadata", "name")))
        version = at(seen, "metadata", "resourceVersion")
        if there is None or at(there, "metadata", "resourceVersion") != version:
            raise conflict()
        self.put({**there, **change})

    def mark_deleted(self, kind: str, name: str) -> None:
        """Delete an object as a user does."""
        there = self.objects[kind, name]
        metadata = {**fields(there, "metadata"), "deletionTimestamp": "2026-01-01T00:00:00Z"}
        self.put({**there, "metadata": metadata})
        self.collect(kind, name)

    def collect(self, kind: str, name: str) -> None:
        """Remove an object that is deleted and held by nothing, with what it owns."""
        there = self.objects[kind, name]
        if not text(there, "metadata", "deletionTimestamp") or items(
            there, "metadata", "finalizers"
        ):
            return
        del self.objects[kind, name]
        uid = at(there, "metadata", "uid")
        for key, each in list(self.objects.items()):
            if at(each, "metadata", "ownerReferences", 0, "uid") == uid:
                del self.objects[key]

    def end_jobs(self, report: Json) -> None:
        """All Jobs end well, and their pods report this."""
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        for (kind, name), each in list(self.objects.items()):
            if kind == "Job" and "status" not in each:
                self.put({**each, "status": done})
                labels = {**texts(each, "metadata", "labels"), "job-name": name}
                message = {"message": json.dumps(report)}
                state = {"containerStatuses": [{"state": {"terminated": message}}]}
                metadata = {
                    "name": f"{name}-pod",
                    "labels": labels,
                    "ownerReferences": fields(each, "metadata").get("ownerReferences"),
                }
                self.put({"kind": "Pod", "metadata": metadata, "status": state})

    def set_pods(self, phase: str) -> None:
        """All pods of TrainingJobs are in a phase."""
        for (kind, _), each in list(self.objects.items()):
            if kind == "Pod" and "operator.diesel-fs.dev/rank" in texts(each, "metadata", "labels"):
                self.put({**each, "status": {"phase": phase}})

    def of_kind(self, kind: str) -> list[str]:
        """The names of all objects of a kind."""
        return sorted(name for each, name in self.objects if each == kind)


def _kind(kind: type[GenericNamespacedResource]) -> str:
    return kind.__name__.removesuffix("s")


async def _settle(cluster: MemoryCluster, key: Key, clock: ManualClock) -> None:
    """Have an object handled until nothing is left to do now; a killed controller is replaced."""
    controller = Controller(cluster, DEFAULTS, clock=clock)
    try:
        for _ in range(STEPS_MAX):
            before = cluster.writes
            try:
                await controller.handle(key)
            except Killed:
                await controller.close()
                controller = Controller(cluster, DEFAULTS, clock=clock)
                continue
            if cluster.writes == before:
                return
        raise AssertionError("it never settles")
    finally:
        await controller.close()


def settle(cluster: MemoryCluster, key: Key, clock: ManualClock) -> None:
    asyncio.run(_settle(cluster, key, clock))


PETS = Key(DATASETS, "default", "pets")
TRAIN = Key(TRAINING_JOBS, "default", "train")


def life_of_a_dataset(cluster: MemoryCluster) -> list[object]:
    """A Dataset from its making to its deletion, with its data; what was seen on the way."""
    clock = ManualClock()
    cluster.put(dataset({"reclaimPolicy": "Delete"}).raw)
    settle(cluster, PETS, clock)
    seen: list[object] = [cluster.of_kind("Job")]
    cluster.end_jobs(GOOD)
    settle(cluster, PETS, clock)
    status = fields(cluster.objects["Dataset", "pets"], "status")
    seen += [status, cluster.of_kind("Event")]
    cluster.mark_deleted("Dataset", "pets")
    settle(cluster, PETS, clock)
    seen.append(cluster.of_kind("Job"))
    cluster.end_jobs({"done": True})
    settle(cluster, PETS, clock)
    # One that was killed between the end of the reclaim Job and the end of the object runs it again
    cluster.end_jobs({"error": "NoSuchDataset", "message": "gone"})
    settle(cluster, PETS, clock)
    left = [key for key in cluster.objects if key[0] not in ("Event", "Pod")]
    return [*seen, left]


def life_of_a_job(cluster: MemoryCluster) -> list[object]:
    """A TrainingJob from its making, over a restart, to its end."""
    clock = ManualClock()
    ready: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 9, "version": 7}
    made = dataset({"url": "diesel://host:1", "secretName": "account"}, ready)
    cluster.put(made.raw)
    secret = {"kind": "Secret", "metadata": {"name": "account"}, "data": {"key": "eA=="}}
    cluster.put(cast("Json", secret))
    cluster.put(training_job({"restarts": 1}).raw)
    settle(cluster, TRAIN, clock)
    key = at(cluster.objects["Secret", "train-task-0"], "stringData", "taskKey")
    assert isinstance(key, str)
    seen: list[object] = [cluster.of_kind("Pod"), cluster.of_kind("Service")]
    cluster.set_pods("Running")
    settle(cluster, TRAIN, clock)
    assert at(cluster.objects["Secret", "train-task-0"], "stringData", "taskKey") == key
    cluster.set_pods("Failed")
    settle(cluster, TRAIN, clock)
    seen.append(at(cluster.objects["TrainingJob", "train"], "status", "restarts"))
    cluster.set_pods("Succeeded")
    settle(cluster, TRAIN, clock)
    status = fields(cluster.objects["TrainingJob", "train"], "status")
    return [*seen, status, cluster.of_kind("Event"), sorted(cluster.objects)]


@pytest.mark.parametrize("life", [life_of_a_dataset, life_of_a_job])
def test_the_end_is_the_same_wherever_the_controller_is_killed(
    life: Callable[[MemoryCluster], list[object]],
) -> None:
    whole = MemoryCluster()
    wanted = life(whole)
    assert whole.writes > 8
    for step in range(1, whole.writes + 1):
        cluster = MemoryCluster()
        cluster.kill_after = step
        assert life(cluster) == wanted, step
        assert cluster.writes >= step


def test_nothing_is_left_of_a_dataset_and_its_data_are_deleted() -> None:
    cluster = MemoryCluster()
    *_, reclaims, left = life_of_a_dataset(cluster)
    assert len(cast("list[str]", reclaims)) == 1
    assert left == []


def test_a_job_leaves_its_pods_and_no_secret() -> None:
    cluster = MemoryCluster()
    *_, left = life_of_a_job(cluster)
    kinds = sorted(kind for kind, _ in cast("list[tuple[str, str]]", left) if kind != "Event")
    assert kinds == ["Dataset", "Pod", "Pod", "Secret", "TrainingJob"]
    assert cluster.of_kind("Secret") == ["account"]
