"""Connects the controller with the watches of kopf, and runs both.

kopf watches, lists again after a lost connection, and answers the liveness probe. Its handlers only
put keys into the queue. kopf keeps nothing in objects (no annotation, no finalizer), so the
operator's state is in the cluster alone.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import cast

import kopf

from ..names import GROUP
from .cluster import opened_cluster
from .controller import DATASETS, TRAINING_JOBS, Reconciler, keys_of
from .decoding import Json
from .objects import LABEL_MANAGED, MANAGED
from .queue import WorkQueue
from .resources import VERSION
from .specs import Defaults

log = logging.getLogger("diesel.operator")

KOPF_WORKERS_MAX = 50

KOPF_IDLE_S = 1.0
LIST_CHUNK = 500

HOLDINGS_INTERVALS = 3
"""Reports are read once in this number of intervals: a node writes at most every 30 s."""


def _settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True  # so it needs no right to list namespaces and definitions
    made.queueing.worker_limit = KOPF_WORKERS_MAX
    made.queueing.idle_timeout = KOPF_IDLE_S
    made.watching.chunk_size = LIST_CHUNK
    made.watching.connect_timeout = 10.0
    made.networking.request_timeout = 30.0
    for plural in ("jobs", "pods"):
        made.watching.label_selectors[plural] = f"{LABEL_MANAGED}={MANAGED}"
    return made


def _registry(queue: WorkQueue, controller: Reconciler) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    def watch(group: str, version: str, plural: str) -> None:
        async def seen(*, event: Mapping[str, object], **_: object) -> None:
            raw = cast("Json", event["object"])
            is_gone = event["type"] == "DELETED"
            if plural == "pods":
                controller.note_pod(raw, is_gone=is_gone)
            for key in keys_of(raw, plural):
                if is_gone and key.plural == plural:
                    queue.forget(key)
                else:
                    queue.add(key)

        kopf.on.event(group, version, plural, id=f"see-{plural}", registry=registry)(seen)

    watch(GROUP, VERSION, DATASETS)
    watch(GROUP, VERSION, TRAINING_JOBS)
    watch("batch", "v1", "jobs")
    watch("", "v1", "pods")

    @kopf.on.login(registry=registry)
    async def log_in(*, settings: kopf.OperatorSettings, **_: object) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(
            settings=settings
        )

    @kopf.on.probe(id="handled", registry=registry)
    async def handled(**_: object) -> int:
        return queue.handled

    return registry


async def _refresh_always(controller: Reconciler, interval_s: float) -> None:
    while True:
        await asyncio.sleep(HOLDINGS_INTERVALS * interval_s)
        await controller.refresh_holdings()


async def serve(
    defaults: Defaults,
    namespaces: Sequence[str],
    *,
    interval_s: float,
    workers: int,
    liveness: str,
    driver_namespace: str,
) -> None:
    """Serves namespaces (all if none is named) until a signal ends kopf."""
    async with opened_cluster() as cluster:
        controller = Reconciler(
            cluster, defaults, interval_s=interval_s, driver_namespace=driver_namespace
        )
        queue = WorkQueue(controller.handle, workers)
        await controller.refresh_holdings()  # otherwise the first turns would use estimates
        controller.wake = queue.add
        working = asyncio.create_task(queue.run(), name="the queue of the operator")
        refreshing = asyncio.create_task(
            _refresh_always(controller, interval_s), name="the reports of nodes"
        )
        watching = asyncio.create_task(
            kopf.operator(
                registry=_registry(queue, controller),
                settings=_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=list(namespaces),
                liveness_endpoint=liveness or None,
            ),
            name="the watches of the operator",
        )
        tasks = working, watching, refreshing
        try:
            # If one task ends, all must end: the operator could not both see and act any more
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await controller.close()
        for each in ended:
            if isinstance(each, Exception):
                raise each
