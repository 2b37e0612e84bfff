"""Calls of the Kubernetes API that the CSI plugin and the operator share.

Importing it takes long, as lightkube does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import httpx2
from lightkube import ApiError, Client
from lightkube.resources.core_v1 import Pod

from diesel_fs.errors import (
    BusyError,
    ConfigError,
    MetadataError,
    NotFoundError,
    PermissionDenied,
)


@contextmanager
def api_errors() -> Iterator[None]:
    """Errors of the Kubernetes client become errors of DIESEL-FS. Their messages have no part of
    the request, which may hold a secret."""
    try:
        yield
    except ApiError as error:
        status = error.status
        text = f"the Kubernetes API reports: {status.message or status.reason or status.code}"
        match status.code:
            case HTTPStatus.NOT_FOUND:
                raise NotFoundError(text) from None
            case HTTPStatus.CONFLICT:
                raise BusyError(text) from None
            case HTTPStatus.FORBIDDEN | HTTPStatus.UNAUTHORIZED:
                raise PermissionDenied(text) from None
        raise MetadataError(text) from None
    except httpx2.HTTPError as error:
        raise MetadataError(
            f"the Kubernetes API cannot be reached: {type(error).__name__}"
        ) from None


def image_in_pod(client: Client, pod: str, container: str) -> str:
    """The image of a container, for pods that the program in it makes. Raises ConfigError if there
    is no such container, and the errors of `api_errors`."""
    with api_errors():
        found = client.get(Pod, pod)
    for each in found.spec.containers if found.spec else ():
        if each.name == container and each.image:
            return each.image
    raise ConfigError(
        f"the pod {pod} has no container {container!r}", advice="name the image by --image"
    )
