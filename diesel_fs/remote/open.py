"""Opens the repository at an address: a local store, or one behind a server."""

from uuid import UUID

from ..credentials import Credentials, no_user_named
from ..errors import ConflictError
from ..format.snapshot.reader import Snapshot
from ..repository.interface import Repository
from ..repository.local import LocalRepository
from ..repository.private_copies import open_private_copy
from ..settings import Settings
from ..urls import SERVER_SCHEMES, RepositoryUrl, parse_url
from .repository import RemoteRepository


def open_repository(
    url: RepositoryUrl | str, credentials: Credentials | None = None, *, create: bool = False
) -> Repository:
    """The repository at an address. With `create`, a missing one is made.

    `credentials` are for a server, which is connected at the first request. Raises ConfigError for
    an address that this process cannot open, ObjectStoreError if there is no repository.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    if parsed.scheme not in SERVER_SCHEMES:
        return LocalRepository.open(parsed, create=create)
    if credentials is None:
        raise no_user_named(parsed)
    return RemoteRepository.at(parsed, credentials)


def open_configured(settings: Settings, *, create: bool = False) -> Repository:
    """Raises as `open_repository`."""
    return open_repository(settings.repository_url, settings.credentials, create=create)


def same_view(repository: Repository, dataset: str, identity: str, version: int) -> Snapshot:
    """The version of a dataset that another process of this user has open, from the private copy
    that it has just made, if that is still there.

    Raises NotFoundError if the version is no longer kept, ConflictError if the name belongs to
    another dataset now.
    """
    snapshot = open_private_copy(UUID(hex=identity), version) or repository.view(dataset)
    if snapshot.version != version:
        snapshot = repository.view_at(dataset, version)
    if snapshot.identity.hex != identity:
        raise ConflictError(
            f"{dataset!r} is another dataset now ({snapshot.identity})", advice="mount it anew"
        )
    return snapshot
