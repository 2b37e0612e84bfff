"""Opens the stores at a repository's URL. Only this module knows all kinds of stores."""

import time
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError, MetadataError
from ..urls import CLOUD_SCHEMES, RepositoryUrl
from .accounts.store import FILE, AccountFile, AccountTable
from .metadata.sqlite.store import SqliteMetadata
from .metadata.store import MetadataStore
from .objects.cloud.opening import open_bucket
from .objects.folder import FolderStore
from .objects.store import ObjectStore

METADATA_FILE = "meta.sqlite"
"""The SQLite file of a repository in a folder, beside the objects."""

ObjectsOpener = Callable[[RepositoryUrl, bool], ObjectStore]
"""If the second argument is True, it makes a missing store."""


def _folder(url: RepositoryUrl, create: bool) -> ObjectStore:
    return FolderStore.create(url.path) if create else FolderStore.open(url.path)


def _bucket(url: RepositoryUrl, create: bool) -> ObjectStore:
    return open_bucket(url.objects_url, create=create)


_OPENERS: dict[str, ObjectsOpener] = {"file": _folder, **dict.fromkeys(CLOUD_SCHEMES, _bucket)}


def open_objects(url: RepositoryUrl, *, create: bool) -> ObjectStore:
    """Raises ConfigError, ObjectStoreError, ObjectMissing."""
    opener = _OPENERS.get(url.scheme)
    if opener is not None:
        return opener(url, create)
    raise ConfigError(
        f"this version has no {url.scheme}:// repository", advice="use file:///folder or s3://"
    )


def open_metadata(url: RepositoryUrl, objects: ObjectStore, *, create: bool) -> MetadataStore:
    """Raises ConfigError for a bad URL. After another DieselError the repository can still be read,
    by its last snapshot."""
    if url.meta:
        from .metadata.redis.store import RedisMetadata  # noqa: PLC0415  # imports for 0.1 s

        return RedisMetadata.open(url.meta, store=objects.store_id)
    if url.scheme != "file":
        raise MetadataError(
            f"{url} names no metadata store, so nothing can be written",
            advice="add ?meta=redis://host:port",
        )
    return SqliteMetadata.open(_sqlite_path(url), create=create)


def open_accounts(
    url: RepositoryUrl, objects: ObjectStore, *, deadline_s: float | None = None
) -> AccountTable:
    """The table is empty if there is none. `deadline_s` bounds each call to Redis (None:
    `DEADLINE_S`). Raises ConfigError, MetadataError."""
    check_accounts_place(url)
    if url.meta:
        from .accounts.redis import RedisAccounts  # noqa: PLC0415  # imports Redis, too
        from .metadata.redis.link import DEADLINE_S  # noqa: PLC0415

        return RedisAccounts.open(
            url.meta, store=objects.store_id, deadline_s=deadline_s or DEADLINE_S
        )
    return AccountFile(url.path.resolve() / FILE)


def check_accounts_place(url: RepositoryUrl) -> None:
    """Raise MetadataError for a bucket without a Redis: accounts have no place there."""
    if not url.meta and url.scheme != "file":
        raise MetadataError(
            f"{url} names no metadata store, where accounts are kept",
            advice="add ?meta=redis://host:port",
        )


def rename_unusable_metadata(url: RepositoryUrl) -> None:
    """Rename the files of an unusable SQLite store, so that a new one can be made. Leaves a Redis
    alone."""
    if url.meta or url.scheme != "file":
        return
    path = _sqlite_path(url)
    for file in path.parent.glob(f"{METADATA_FILE}*"):
        if ".unusable-" not in file.name:
            file.rename(file.with_name(f"{file.name}.unusable-{time.time_ns()}"))


def _sqlite_path(url: RepositoryUrl) -> Path:
    return url.path.resolve() / METADATA_FILE
