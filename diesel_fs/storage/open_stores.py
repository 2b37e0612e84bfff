"""Which store an address opens: the one place that knows all kinds of stores.

Owned here: the choice. Not owned: what an address means (`urls.py`), the stores (`storage/`). The
library that speaks to buckets hangs in a forked child, and users' training processes fork: so they
leave buckets to a helper (`storage/objects/cloud/proxy.py`). Programs of ours that do not fork
bring along functions that open them directly (`register_opener`).
"""

import time
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError, MetadataError
from ..urls import CLOUD_SCHEMES, RepositoryUrl
from .accounts.store import FILE, AccountFile, AccountTable
from .metadata.sqlite.store import SqliteMetadata
from .metadata.store import MetadataStore
from .objects.cloud.proxy import CloudProxy
from .objects.folder import FolderStore
from .objects.store import ObjectStore

METADATA_FILE = "meta.sqlite"
"""The embedded metadata store, beside the objects."""

ObjectsOpener = Callable[[RepositoryUrl, bool], ObjectStore]
"""Opens the objects at an address; with True makes a store where there is none."""


def _folder(url: RepositoryUrl, create: bool) -> ObjectStore:
    return FolderStore.create(url.path) if create else FolderStore.open(url.path)


_OPENERS: dict[str, ObjectsOpener] = {"file": _folder}


def register_opener(scheme: str, opener: ObjectsOpener) -> None:
    """This process may open addresses of a scheme."""
    _OPENERS[scheme] = opener


def open_objects(url: RepositoryUrl, *, create: bool) -> ObjectStore:
    """The object store of a repository. Raises ConfigError, ObjectStoreError, ObjectMissing."""
    opener = _OPENERS.get(url.scheme)
    if opener is not None:
        return opener(url, create)
    if url.scheme in CLOUD_SCHEMES:  # this process may fork
        return CloudProxy.open(url.objects_url, create=create)
    raise ConfigError(
        f"this version has no {url.scheme}:// repository", advice="use file:///folder or s3://"
    )


def open_metadata(url: RepositoryUrl, objects: ObjectStore, *, create: bool) -> MetadataStore:
    """The metadata store of a repository whose objects are open. Raises ConfigError; DieselError
    otherwise: reading goes on without.
    """
    if url.meta:
        from .metadata.redis.store import RedisMetadata  # noqa: PLC0415  # a tenth of a second

        return RedisMetadata.open(url.meta, store=objects.store_id)
    if url.scheme != "file":
        raise MetadataError(
            f"{url} names no metadata store: nothing can be written",
            advice="add ?meta=redis://host:port",
        )
    return SqliteMetadata.open(_embedded(url), create=create)


def open_accounts(
    url: RepositoryUrl, objects: ObjectStore, *, deadline_s: float | None = None
) -> AccountTable:
    """The table of accounts of a repository whose objects are open; one that was never written is
    empty. `deadline_s` is for each call. Raises ConfigError, MetadataError.
    """
    check_accounts_place(url)
    if url.meta:
        from .accounts.redis import RedisAccounts  # noqa: PLC0415  # as above
        from .metadata.redis.link import DEADLINE_S  # noqa: PLC0415

        return RedisAccounts.open(
            url.meta, store=objects.store_id, deadline_s=deadline_s or DEADLINE_S
        )
    return AccountFile(url.path.resolve() / FILE)


def check_accounts_place(url: RepositoryUrl) -> None:
    """Raises MetadataError for a repository that can have no accounts."""
    if not url.meta and url.scheme != "file":
        raise MetadataError(
            f"{url} names no metadata store: accounts are kept there",
            advice="add ?meta=redis://host:port",
        )


def rename_unusable_metadata(url: RepositoryUrl) -> None:
    """Moves an embedded metadata store that cannot be used out of the way; others stay."""
    if url.meta or url.scheme != "file":
        return
    path = _embedded(url)
    for file in path.parent.glob(f"{METADATA_FILE}*"):
        if ".unusable-" not in file.name:
            file.rename(file.with_name(f"{file.name}.unusable-{time.time_ns()}"))


def _embedded(url: RepositoryUrl) -> Path:
    return url.path.resolve() / METADATA_FILE
