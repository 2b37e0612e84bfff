"""Which repository an address opens: one of this process's own, or one behind a server."""

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
    """The repository at an address; `create` makes one where there is none and that can be made.

    `credentials` are for a server. Raises ConfigError for an address that this process cannot open,
    ObjectStoreError where there is no repository. A server is not asked before something is wanted
    of it.
    """
    where = parse_url(url) if isinstance(url, str) else url
    if where.scheme not in SERVER_SCHEMES:
        return LocalRepository.open(where, create=create)
    if credentials is None:
        raise no_user_named(where)
    return RemoteRepository.at(where, credentials)


def open_configured(settings: Settings, *, create: bool = False) -> Repository:
    """The repository that settings name, as whom they name. Raises as `open_repository`."""
    return open_repository(settings.repository_url, settings.credentials, create=create)


def same_view(repository: Repository, dataset: str, identity: str, version: int) -> Snapshot:
    """A version that another process of this user shows; most often it has just been fetched.

    Raises NotFoundError where it is kept no longer, and ConflictError where the name is another
    dataset's now.
    """
    found = open_private_copy(UUID(hex=identity), version)
    if found is None:
        found = repository.view(dataset)
    if found.version != version:
        found = repository.view_at(dataset, version)
    if found.identity.hex != identity:
        raise ConflictError(
            f"{dataset!r} is another dataset now ({found.identity})", advice="mount it anew"
        )
    return found
