"""Opening a dataset in another process as it is open in this one.

Owned here: what of an open dataset travels there, in a pickle that may lie anywhere: no key, and no
address with a password. Those the other process finds as `dlcmd` does, in its own environment. Not
owned: the dataset itself (`client.py`). Any thread.
"""

import os
from dataclasses import dataclass, replace
from typing import Self

from ..credentials import Credentials
from ..errors import ConfigError, UsageError
from ..format.snapshot.reader import Snapshot
from ..peers.options import TaskOptions
from ..remote.open import open_repository, same_view
from ..repository.interface import Repository
from ..settings import load_settings
from ..urls import RepositoryUrl, parse_url


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """Which version of which dataset is open, as whom, and through which task."""

    url: str  # as it is shown where it holds a password
    has_password: bool
    user: str
    dataset: str
    identity: str  # hexadecimal
    version: int
    task_options: TaskOptions  # without its key
    has_task_key: bool

    @classmethod
    def of(cls, repository: Repository, view: Snapshot, joins: TaskOptions) -> Self:
        """This view of a repository. Raises UsageError where another process that has our
        environment would not find the secrets that this takes."""
        url, credentials = repository.url, repository.credentials
        has_password = "@" in url.meta  # anywhere in it: too often is better than not
        found = cls(
            url=str(url) if has_password else url.full_url,
            has_password=has_password,
            user=credentials.user if credentials is not None else "",
            dataset=view.dataset,
            identity=view.identity.hex,
            version=view.version,
            task_options=replace(joins, task_key=""),
            has_task_key=bool(joins.task_key),
        )
        try:
            is_found = (found._address(), found.task_options_with_key) == (
                (url, credentials),
                joins,
            )
        except ConfigError:
            is_found = False
        if not is_found:
            raise UsageError(
                f"{view.dataset!r} cannot go to another process: that gets no key and no password",
                advice="have them in DIESEL_URL, DIESEL_KEY and DIESEL_TASK_KEY, or open it there",
            )
        return found

    @property
    def task_options_with_key(self) -> TaskOptions:
        """The task, with its key."""
        key = os.environ.get("DIESEL_TASK_KEY", "") if self.has_task_key else ""
        return replace(self.task_options, task_key=key)

    def repository(self) -> Repository:
        """The repository, open. Raises ConfigError where a secret is missing, and as
        `open_repository`."""
        return open_repository(*self._address())

    def snapshot(self, repository: Repository) -> Snapshot:
        """The same version. Raises as `open_same_version`."""
        return same_view(repository, self.dataset, self.identity, self.version)

    def _address(self) -> tuple[RepositoryUrl, Credentials | None]:
        said = {"user": self.user or None, "url": None if self.has_password else self.url}
        settings = load_settings(said)
        where = parse_url(settings.repository_url)
        if self.has_password and str(where) != self.url:
            raise ConfigError(
                f"the password of {self.url} is not known here", advice="set DIESEL_URL, too"
            )
        return where, settings.credentials
