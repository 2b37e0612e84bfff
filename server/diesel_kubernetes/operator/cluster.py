"""Reads and writes objects of the Kubernetes API, as plain dictionaries.

The controller decodes them (`decoding.py`): a pod template may have fields that no library knows
yet. Only this module and kopf's watches speak to the API server. Errors are those of lightkube
(`ApiError`, which has the status) and of httpx2.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

from lightkube import ApiError, AsyncClient
from lightkube.core.client import LabelSelector
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    create_api_info,
)
from lightkube.types import CascadeType, PatchType

from ..names import GROUP
from .api_objects import AnyObject, Metadata
from .decoding import Json, decode
from .resources import VERSION

CHUNK = 500  # objects in one response


class Pods(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Pod", "pods")


class ConfigMaps(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "ConfigMap", "configmaps")


class Secrets(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Secret", "secrets")


class Services(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Service", "services")


class Events(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Event", "events")


class Jobs(GenericNamespacedResource):
    _api_info = create_api_info("batch", "v1", "Job", "jobs")


class Datasets(GenericNamespacedResource):
    _api_info = create_api_info(GROUP, VERSION, "Dataset", "datasets")


class TrainingJobs(GenericNamespacedResource):
    _api_info = create_api_info(GROUP, VERSION, "TrainingJob", "trainingjobs")


class Nodes(GenericGlobalResource):
    _api_info = create_api_info("", "v1", "Node", "nodes")


def _status_of(kind: type[GenericNamespacedResource]) -> type[GenericNamespacedResource]:
    """The `status` subresource of a kind."""
    info = kind._api_info
    return type(
        f"{kind.__name__}Status",
        (GenericNamespacedResource,),
        {
            "_api_info": type(info)(
                resource=info.resource,
                parent=info.resource,
                plural=info.plural,
                verbs=["get", "patch", "put"],
                action="status",
            )
        },
    )


_STATUS = {kind: _status_of(kind) for kind in (Datasets, TrainingJobs)}
_KINDS: dict[str, type[GenericNamespacedResource]] = {
    "Pod": Pods, "Secret": Secrets, "Service": Services, "Event": Events, "Job": Jobs,
}  # fmt: skip
Owner = type[Datasets] | type[TrainingJobs]  # of Jobs and pods


class Cluster:
    """Any number of tasks may use it at once."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def get(
        self, kind: type[GenericNamespacedResource], namespace: str, name: str
    ) -> Json | None:
        """None if there is none."""
        try:
            return dict(await self._client.get(kind, name, namespace=namespace))
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def find(
        self,
        kind: type[GenericNamespacedResource],
        namespace: str,
        labels: Mapping[str, str | None] | None = None,
    ) -> list[Json]:
        """`*` means all namespaces. A label's value of None means any."""
        selector: LabelSelector | None = {**labels} if labels else None
        found = self._client.list(
            kind,
            namespace=namespace,
            chunk_size=CHUNK,
            labels=selector,
        )
        return [dict(each) async for each in found]

    async def nodes(self) -> list[Json]:
        return [dict(each) async for each in self._client.list(Nodes, chunk_size=CHUNK)]

    async def create(self, made: Json) -> bool:
        """Returns False if the name is taken."""
        one: GenericNamespacedResource = _KINDS[decode(AnyObject, made).kind].from_dict(made)
        try:
            await self._client.create(one)  # its metadata have the namespace
        except ApiError as error:
            if error.status.code == HTTPStatus.CONFLICT:
                return False
            raise
        return True

    async def delete(
        self, kind: type[GenericNamespacedResource], namespace: str, name: str
    ) -> None:
        """Deletes all objects that the object owns, too."""
        try:
            # A Job goes after its pods, so that a new Job does not run beside them
            cascade = CascadeType.FOREGROUND if kind is Jobs else CascadeType.BACKGROUND
            await self._client.delete(kind, name, namespace=namespace, cascade=cascade)
        except ApiError as error:
            if error.status.code != HTTPStatus.NOT_FOUND:
                raise

    async def write_status(self, kind: Owner, seen: Json, status: Json) -> None:
        """Raises ApiError with 409 if somebody has changed the object since it was read
        (`seen`)."""
        made = _STATUS[kind].from_dict({**seen, "status": status})
        metadata = decode(Metadata, seen.get("metadata"))
        await self._client.replace(made, metadata.name, namespace=metadata.namespace)

    async def set_finalizers(self, kind: Owner, seen: Json, finalizers: list[str]) -> Json | None:
        """Returns the changed object; None if it is gone. Raises as `write_status`."""
        metadata = decode(Metadata, seen.get("metadata"))
        patch: Json = {
            "metadata": {
                "finalizers": finalizers,
                "resourceVersion": metadata.resource_version,
            }
        }
        try:
            changed = await self._client.patch(
                kind,
                metadata.name,
                patch,
                namespace=metadata.namespace,
                patch_type=PatchType.MERGE,
            )
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                return None
            raise
        return dict(changed)


@asynccontextmanager
async def opened_cluster() -> AsyncIterator[Cluster]:
    async with AsyncClient(field_manager="diesel-operator") as client:
        yield Cluster(client)
