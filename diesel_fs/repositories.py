"""Which repository an address opens: one of this process's own, or one behind a server."""

from .credentials import Credentials, no_user_named
from .remote import RemoteRepository
from .repository import Repository
from .settings import Settings
from .urls import SERVER_SCHEMES, RepositoryUrl, parse_url


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
        return Repository.open(where, create=create)
    if credentials is None:
        raise no_user_named(where)
    return RemoteRepository.at(where, credentials)


def open_configured(settings: Settings, *, create: bool = False) -> Repository:
    """The repository that settings name, as whom they name. Raises as `open_repository`."""
    return open_repository(settings.repository_url, settings.credentials, create=create)
