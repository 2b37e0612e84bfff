"""What a TrainingJob says when the cluster does not let the operator make what it needs."""

import asyncio
from contextlib import suppress
from typing import cast

import httpx2
from lightkube import ApiError
from lightkube.generic_resource import GenericNamespacedResource

from diesel_kubernetes.operator.controller import Controller
from diesel_kubernetes.operator.fields import Json, fields, text
from diesel_kubernetes.operator.resources import condition_of
from tests.rows import each_row

from .made import DEFAULTS, dataset, training_job
from .test_crashes import TRAIN, ManualClock, MemoryCluster, settle

READY: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 9, "version": 7}


def forbidden(what: str) -> ApiError:
    """What the API server says of what a role, a quota or a policy does not allow."""
    answer = httpx2.Response(
        403, json={"code": 403, "message": what}, request=httpx2.Request("POST", "http://x")
    )
    return ApiError(request=answer.request, response=answer)


class ForbiddingCluster(MemoryCluster):
    """It forbids to read, or to make, objects of some kinds."""

    unreadable = ""
    unmakeable = ""

    async def get(
        self, kind: type[GenericNamespacedResource], namespace: str, name: str
    ) -> Json | None:
        if kind.__name__ == self.unreadable:
            raise forbidden(f"cannot get {name}")
        return await super().get(kind, namespace, name)

    async def create(self, made: Json) -> bool:
        if made["kind"] == self.unmakeable:
            raise forbidden("exceeded quota: pods")
        return await super().create(made)


def cluster_with_a_job(url: str) -> ForbiddingCluster:
    """A TrainingJob whose dataset is ready."""
    cluster = ForbiddingCluster()
    cluster.put(dataset({"url": url, "secretName": "account"}, READY).raw)
    secret = {"kind": "Secret", "metadata": {"name": "account"}, "data": {"key": "eA=="}}
    cluster.put(cast("Json", secret))
    cluster.put(training_job({}).raw)
    return cluster


def tried(cluster: MemoryCluster) -> Json:
    """The status of the TrainingJob after the operator has tried twice."""

    async def run() -> None:
        controller = Controller(cluster, DEFAULTS, clock=ManualClock())
        for _ in range(2):
            with suppress(Exception):  # the queue logs it, and tries again
                await controller.handle(TRAIN)
        await controller.close()

    asyncio.run(run())
    return fields(cluster.objects["TrainingJob", "train"], "status")


def made(status: Json) -> tuple[str, str]:
    """The condition `ObjectsMade`."""
    found = condition_of(status, "ObjectsMade")
    return text(found, "status"), text(found, "reason")


def hinder(cluster: ForbiddingCluster, reason: str) -> None:
    """Make what gives a reason, or take it away."""
    cluster.unreadable = "Secrets" if reason == "SecretDenied" else ""
    cluster.unmakeable = "Pod" if reason == "Forbidden" else ""
    if reason == "NameTaken":
        cluster.put({"kind": "Pod", "metadata": {"name": "train-0", "uid": "somebody's"}})
    else:
        cluster.objects.pop(("Pod", "train-0"), None)


@each_row("reason", ["SecretDenied", "Forbidden", "NameTaken"])
def test_a_job_says_what_hinders_it_and_starts_when_that_has_gone(reason: str) -> None:
    cluster = cluster_with_a_job("diesel://host:1")  # it needs a Secret of its own
    hinder(cluster, reason)
    status = tried(cluster)
    assert made(status) == ("False", reason)
    wanted = {"SecretDenied": "account", "Forbidden": "quota", "NameTaken": "train-0"}[reason]
    assert wanted in text(condition_of(status, "ObjectsMade"), "message")
    assert text(condition_of(status, "Admitted"), "reason") == "Fits"
    hinder(cluster, "")
    settle(cluster, TRAIN, ManualClock())
    assert made(tried(cluster)) == ("True", "AllMade")
    assert cluster.of_kind("Pod") == ["train-0", "train-1"]


def test_a_pod_that_is_forbidden_after_a_restart_is_said_and_made_later() -> None:
    cluster = cluster_with_a_job("diesel://host:1")
    cluster.put(training_job({"restarts": 1}).raw)
    settle(cluster, TRAIN, ManualClock())
    assert made(tried(cluster)) == ("", "")
    cluster.unmakeable = "Pod"
    cluster.set_pods("Failed")
    for _ in range(3):
        status = tried(cluster)
    assert made(status) == ("False", "Forbidden")
    cluster.unmakeable = ""
    settle(cluster, TRAIN, ManualClock())
    assert made(tried(cluster)) == ("True", "AllMade")
    assert cluster.of_kind("Pod") == ["train-0", "train-1"]
