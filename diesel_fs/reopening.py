"""Opening a dataset in another process as it is open in this one.

Owned here: what of an open dataset travels there, in a pickle that may lie anywhere: no key, and no
address with a password. Those the other process finds as `dlcmd` does, in its own environment. Not
owned: the dataset itself (`client.py`). Any thread.
"""

import os
from dataclasses import dataclass, replace
from typing import Self
from uuid import UUID

from .credentials import Credentials
from .errors import ConfigError, ConflictError, UsageError
from .repositories import open_repository
from .repository import Repository
from .settings import load_settings
from .snapshot import Snapshot
from .snapshots import open_private
from .task.request import TaskOptions
from .urls import RepositoryUrl, parse_url


@dataclass(frozen=True, slots=True)
class Opened:
    """Which version of which dataset is open, as whom, and through which task."""

    url: str  # as it is shown where it holds a password
    has_password: bool
    user: str
    dataset: str
    identity: str  # hexadecimal
    version: int
    joins: TaskOptions  # without its key
    has_task_key: bool

    @classmethod
    def of(cls, repository: Repository, view: Snapshot, joins: TaskOptions) -> Self:
        """This view of a repository. Raises UsageError where another process that has our
        environment would not find the secrets that this takes."""
        where, who = repository.url, repository.credentials
        has_password = "@" in where.meta  # anywhere in it: too often is better than not
        found = cls(
            url=str(where) if has_password else where.whole,
            has_password=has_password,
            user=who.user if who is not None else "",
            dataset=view.dataset,
            identity=view.identity.hex,
            version=view.version,
            joins=replace(joins, task_key=""),
            has_task_key=bool(joins.task_key),
        )
        try:
            is_found = (found._place(), found.task) == ((where, who), joins)
        except ConfigError:
            is_found = False
        if not is_found:
            raise UsageError(
                f"{view.dataset!r} cannot go to another process: that gets no key and no password",
                advice="have them in DIESEL_URL, DIESEL_KEY and DIESEL_TASK_KEY, or open it there",
            )
        return found

    @property
    def task(self) -> TaskOptions:
        """The task, with its key."""
        key = os.environ.get("DIESEL_TASK_KEY", "") if self.has_task_key else ""
        return replace(self.joins, task_key=key)

    def repository(self) -> Repository:
        """The repository, open. Raises ConfigError where a secret is missing, and as
        `open_repository`."""
        return open_repository(*self._place())

    def view(self, repository: Repository) -> Snapshot:
        """The same version. Raises as `same_view`."""
        return same_view(repository, self.dataset, self.identity, self.version)

    def _place(self) -> tuple[RepositoryUrl, Credentials | None]:
        said = {"user": self.user or None, "url": None if self.has_password else self.url}
        settings = load_settings(said)
        where = parse_url(settings.repository_url)
        if self.has_password and str(where) != self.url:
            raise ConfigError(
                f"the password of {self.url} is not known here", advice="set DIESEL_URL, too"
            )
        return where, settings.credentials


def same_view(repository: Repository, dataset: str, identity: str, version: int) -> Snapshot:
    """A version that another process of this user shows; most often it has just been fetched.

    Raises NotFoundError where it is kept no longer, and ConflictError where the name is another
    dataset's now.
    """
    found = open_private(UUID(hex=identity), version)
    if found is None:
        found = repository.view(dataset)
    if found.version != version:
        found = repository.view_at(dataset, version)
    if found.identity.hex != identity:
        raise ConflictError(
            f"{dataset!r} is another dataset now ({found.identity})", advice="mount it anew"
        )
    return found
