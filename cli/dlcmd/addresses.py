"""Addresses of datasets and their entries, and the repository that they are in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from diesel_fs.cache.reader import EntryReader
from diesel_fs.errors import ObjectMissing
from diesel_fs.format.entries import check_path
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.names import parse_versioned_name, shown
from diesel_fs.remote.open import open_configured
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.cloud import direct as clouds
from diesel_fs.urls import parse_url

from .options import ALL_VERSIONS, check_dataset_argument, dataset, global_flags
from .output import remark

MEMORY_BYTES = 256 << 20
"""Chunks that a verb keeps while it reads contents."""

_OLD_VIEW = f"{__name__}.old_view"  # whether a command has said so


@dataclass(frozen=True, slots=True)
class Address:
    """`DATASET[@VERSION][/path]`; `must_be_folder` where it ends in a slash, so can only mean a
    folder."""

    dataset: str
    path: bytes = b""
    must_be_folder: bool = False
    version: int = 0  # 0: the current one

    def __str__(self) -> str:
        name = f"{self.dataset}@{self.version}" if self.version else self.dataset
        return f"{name}/{shown(self.path)}" if self.path else name

    def view(self, repository: LocalRepository) -> Snapshot:
        """The version that is meant. Raises NotFoundError."""
        if self.version:
            return repository.view_at(self.dataset, self.version)
        view = repository.view(self.dataset)
        said = click.get_current_context().meta  # of this command
        if (warning := repository.staleness_warning(view)) and not said.get(_OLD_VIEW):
            said[_OLD_VIEW] = True
            remark(warning)
        return view


def address(text: str) -> Address:
    """Read an address of what can be changed: without a version.

    Raises UsageError before anything is made of the name.
    """
    return _address(text, dataset(check_dataset_argument(text).partition("/")[0]), 0)


def versioned_address(text: str) -> Address:
    """Read an address of what is only read. Raises UsageError as `address`."""
    return _address(text, *parse_versioned_name(check_dataset_argument(text).partition("/")[0]))


def listed_address(text: str) -> Address:
    """As `versioned_address`, or `DATASET@` for ALL_VERSIONS."""
    if text.endswith("@") and "/" not in text:
        return Address(dataset(text[:-1]), version=ALL_VERSIONS)
    return versioned_address(text)


def _address(text: str, name: str, version: int) -> Address:
    _, slash, rest = text.partition("/")
    path = check_path(os.fsencode(rest.removesuffix("/")))
    return Address(name, path, bool(slash) and rest[-1:] in "/", version)


@contextmanager
def open_repository_from_flags(
    *, create: bool = False, rebuild: bool = False
) -> Iterator[LocalRepository]:
    """The repository that the options name. Raises DieselError.

    With `create` a new one is made where there is none, with `rebuild` a new metadata store.
    """
    clouds.open_buckets_directly()
    settings = global_flags().settings()
    try:
        if rebuild:
            open_configured(settings).close()  # never make a store of what is only not mounted
        repository = open_configured(settings, create=create or rebuild)
    except ObjectMissing as error:
        where = parse_url(settings.repository_url)
        if where.scheme == "file" and (not settings.url or not where.path.exists()):
            error.message = f"there is no repository at {where}"
            error.advice = "`dlcmd put` makes one, --url or DIESEL_URL names another"
        raise
    with repository:
        yield repository


@contextmanager
def entry_reader(repository: LocalRepository, view: Snapshot) -> Iterator[EntryReader]:
    """A reader of a dataset's contents."""
    reader = EntryReader(view, repository.objects, MEMORY_BYTES)
    try:
        yield reader
    finally:
        reader.close()
