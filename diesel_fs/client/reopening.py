"""Pickles an open dataset as a reference, from which another process opens the same version.

A pickle may be stored anywhere, so it holds neither a key nor an address with a password. The other
process takes these secrets from its own environment, as `dlcmd` does. Safe from any thread.
"""

import os
from dataclasses import dataclass, replace
from typing import Self

from ..credentials import Credentials
from ..errors import ConfigError, UsageError
from ..format.snapshot.reader import Snapshot
from ..peers.members.options import TaskOptions
from ..remote.open import open_repository, same_view
from ..repository.interface import Repository
from ..settings import load_settings
from ..urls import RepositoryUrl, parse_url


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """A version of a dataset, the account that opened it, and its task; without secrets."""

    url: str  # without the password if it has one
    has_password: bool
    user: str
    dataset: str
    identity: str  # hexadecimal
    version: int
    task_options: TaskOptions  # without the task's key
    has_task_key: bool

    @classmethod
    def of(cls, repository: Repository, view: Snapshot, task: TaskOptions) -> Self:
        """Raises UsageError if another process with our environment would not find the same
        repository, account and task."""
        url, credentials = repository.url, repository.credentials
        has_password = "@" in url.meta  # if wrongly true, only DIESEL_URL must be set
        found = cls(
            url=str(url) if has_password else url.full_url,
            has_password=has_password,
            user=credentials.user if credentials is not None else "",
            dataset=view.dataset,
            identity=view.identity.hex,
            version=view.version,
            task_options=replace(task, task_key=""),
            has_task_key=bool(task.task_key),
        )
        try:
            is_same = found.address() == (url, credentials) and found.task_options_with_key == task
        except ConfigError:
            is_same = False
        if not is_same:
            raise UsageError(
                f"{view.dataset!r} cannot be pickled: a pickle holds no key and no password",
                advice="set DIESEL_URL, DIESEL_KEY and DIESEL_TASK_KEY, or call `connect` in the"
                " other process",
            )
        return found

    @property
    def task_options_with_key(self) -> TaskOptions:
        """The options with the key from this process's environment ("" if it has none)."""
        key = os.environ.get("DIESEL_TASK_KEY", "") if self.has_task_key else ""
        return replace(self.task_options, task_key=key)

    def repository(self) -> Repository:
        """Raises as `open_repository`; ConfigError for a missing secret."""
        return open_repository(*self.address())

    def snapshot(self, repository: Repository) -> Snapshot:
        """Raises as `same_view`."""
        return same_view(repository, self.dataset, self.identity, self.version)

    def address(self) -> tuple[RepositoryUrl, Credentials | None]:
        """The secrets come from the environment. Raises ConfigError if one is missing."""
        settings = load_settings(
            {"user": self.user or None, "url": None if self.has_password else self.url}
        )
        url = parse_url(settings.repository_url)
        if self.has_password and str(url) != self.url:
            raise ConfigError(
                f"this process does not know the password of {self.url}",
                advice="set DIESEL_URL to the address with its password",
            )
        return url, settings.credentials
