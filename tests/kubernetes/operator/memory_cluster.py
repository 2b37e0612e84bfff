"""A cluster in memory: a dictionary with the rules that matter to the operator.

Names are unique, a status is replaced only by a client that has read the last version, finalizers
hold objects, and a deleted owner takes its objects with it. The test ends Jobs and pods.

Nothing in it waits, nor does a controller without progress reports of pods. So tests call both as
coroutines, although the operator's loop is asyncio's.
"""

import copy
import json
from collections import Counter
from collections.abc import Mapping

import httpx2
from lightkube import ApiError
from lightkube.generic_resource import GenericNamespacedResource

from diesel_kubernetes.operator.cluster import Cluster
from diesel_kubernetes.operator.controller import Reconciler
from diesel_kubernetes.operator.queue import Key
from tests.clocks import ManualClock
from tests.kubernetes.fields import Json, at, fields, items, text, texts

from .made import DEFAULTS, NOW_S, node_object

STEPS_MAX = 200


class Killed(BaseException):
    """The controller was killed."""


def refusal(code: int, message: str) -> ApiError:
    request = httpx2.Request("PUT", "http://x")
    content = {"code": code, "message": message}
    return ApiError(request=request, response=httpx2.Response(code, json=content, request=request))


class MemoryCluster(Cluster):
    """The API server, in memory. After `kill_after` writes, the writer is killed.

    It refuses calls in `forbidden`: `get Secret`, `find ConfigMap`, `create Pod`.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.versions = 0
        self.writes = 0
        self.kill_after = -1
        self.forbidden: set[str] = set()
        self.calls: Counter[str] = Counter()

    def put(self, raw: Json) -> None:
        self.versions += 1
        metadata = {**fields(raw, "metadata"), "resourceVersion": str(self.versions)}
        name = str(metadata["name"])
        self.objects[str(raw["kind"]), name] = {**copy.deepcopy(raw), "metadata": metadata}

    def _written(self) -> None:
        self.writes += 1
        if self.writes == self.kill_after:
            raise Killed

    def _check(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.forbidden:
            raise refusal(403, f"may not {call}")

    async def get(
        self, kind: type[GenericNamespacedResource], namespace: str, name: str
    ) -> Json | None:
        self._check(f"get {_kind(kind)}")
        return copy.deepcopy(self.objects.get((_kind(kind), name)))

    async def find(
        self,
        kind: type[GenericNamespacedResource],
        namespace: str,
        labels: Mapping[str, str | None] | None = None,
    ) -> list[Json]:
        self._check(f"find {_kind(kind)}")
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
        return [node_object(name) for name in ("a", "b")]

    async def create(self, made: Json) -> bool:
        key = text(made, "kind"), text(made, "metadata", "name")
        self._check(f"create {key[0]}")
        if key in self.objects:
            return False
        self.put(made)
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
            raise refusal(409, "changed")
        self.put({**there, **change})

    def mark_deleted(self, kind: str, name: str) -> None:
        there = self.objects[kind, name]
        metadata = {**fields(there, "metadata"), "deletionTimestamp": "2026-01-01T00:00:00Z"}
        self.put({**there, "metadata": metadata})
        self.collect(kind, name)

    def collect(self, kind: str, name: str) -> None:
        """Remove an object that is deleted and held by nothing, with the objects that it owns."""
        metadata = fields(self.objects[kind, name], "metadata")
        if not text(metadata, "deletionTimestamp") or items(metadata, "finalizers"):
            return
        del self.objects[kind, name]
        for key, each in list(self.objects.items()):
            if at(each, "metadata", "ownerReferences", 0, "uid") == metadata["uid"]:
                del self.objects[key]

    def end_jobs(self, report: Json) -> None:
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        for (kind, name), each in list(self.objects.items()):
            if kind == "Job" and "status" not in each:
                self.put({**each, "status": done})
                message = {"message": json.dumps(report)}
                state = {"containerStatuses": [{"state": {"terminated": message}}]}
                metadata = {
                    "name": f"{name}-pod",
                    "labels": {**texts(each, "metadata", "labels"), "job-name": name},
                    "ownerReferences": at(each, "metadata", "ownerReferences"),
                }
                self.put({"kind": "Pod", "metadata": metadata, "status": state})

    def set_pods(self, phase: str) -> None:
        for (kind, _), each in list(self.objects.items()):
            if kind == "Pod" and "operator.diesel-fs.dev/rank" in texts(each, "metadata", "labels"):
                self.put({**each, "status": {"phase": phase}})

    def of_kind(self, kind: str) -> list[str]:
        return sorted(name for each, name in self.objects if each == kind)

    def status(self, kind: str, name: str) -> Json:
        return fields(self.objects[kind, name], "status")


def _kind(kind: type[GenericNamespacedResource]) -> str:
    return kind.__name__.removesuffix("s")


async def settle(cluster: MemoryCluster, key: Key) -> None:
    """Have an object handled until nothing is left to do now; a killed controller is replaced."""
    clock = ManualClock(NOW_S)
    controller = Reconciler(cluster, DEFAULTS, clock=clock)
    for _ in range(STEPS_MAX):
        before = cluster.writes
        try:
            await controller.handle(key)
        except Killed:
            controller = Reconciler(cluster, DEFAULTS, clock=clock)
            continue
        if cluster.writes == before:
            return
    raise AssertionError("it never settles")
