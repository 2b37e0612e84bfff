"""Reads addresses (`DATASET@VERSION/path`) from the command line, and opens the repository."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import ObjectMissing
from diesel_fs.format.entries import check_path
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.names import parse_versioned_name, shown
from diesel_fs.remote.open import open_configured
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.interface import Repository
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.urls import parse_url

from ..show.output import print_note
from .options import ALL_VERSIONS, check_dataset_argument, dataset, global_flags

MEMORY_BYTES = 256 << 20  # for the chunks of an `entry_reader`

_STALENESS_NOTED = f"{__name__}.staleness_noted"  # in click's `meta`


@dataclass(frozen=True, slots=True)
class Address:
    dataset: str
    path: bytes = b""
    must_be_folder: bool = False  # the text ended in a slash
    version: int = 0  # 0: the current one; or `ALL_VERSIONS`

    def __str__(self) -> str:
        name = f"{self.dataset}@{self.version}" if self.version else self.dataset
        return f"{name}/{shown(self.path)}" if self.path else name

    def view(self, repository: Repository) -> Snapshot:
        """Raises NotFoundError."""
        if self.version:
            return repository.view_at(self.dataset, self.version)
        return current_view(repository, repository.dataset(self.dataset))


def current_view(repository: Repository, info: DatasetInfo, *, lazy: bool = False) -> Snapshot:
    """Opens the newest snapshot (`lazy`: as of `Repository.view`). Prints a note, once per command,
    if it may be out of date."""
    view = repository.view_of(info, lazy=lazy)
    meta = click.get_current_context().meta
    if (warning := repository.staleness_warning(view)) and not meta.get(_STALENESS_NOTED):
        meta[_STALENESS_NOTED] = True
        print_note(warning)
    return view


def address(text: str) -> Address:
    """Raises UsageError, also for an address with a version."""
    return _address(text, dataset(check_dataset_argument(text).partition("/")[0]), 0)


def versioned_address(text: str) -> Address:
    return _address(text, *parse_versioned_name(check_dataset_argument(text).partition("/")[0]))


def listed_address(text: str) -> Address:
    """For `ls`: `DATASET@` means all versions."""
    if text.endswith("@") and "/" not in text:
        return Address(dataset(text[:-1]), version=ALL_VERSIONS)
    return versioned_address(text)


def _address(text: str, name: str, version: int) -> Address:
    _, slash, rest = text.partition("/")
    path = check_path(os.fsencode(rest.removesuffix("/")))
    return Address(name, path, bool(slash) and (not rest or rest.endswith("/")), version)


@contextmanager
def open_repository_from_flags(
    *, create: bool = False, rebuild: bool = False
) -> Iterator[Repository]:
    """`create` makes a missing repository, `rebuild` the missing metadata of an existing one.
    Raises DieselError."""
    open_buckets_directly()
    settings = global_flags().settings()
    try:
        if rebuild:
            open_configured(settings).close()  # raises if there is no repository
        repository = open_configured(settings, create=create or rebuild)
    except ObjectMissing as error:
        url = parse_url(settings.repository_url)
        is_default = not settings.url
        if url.scheme == "file" and (is_default or not url.path.exists()):
            error.message = f"there is no repository at {url}"
            error.advice = "`dlcmd put` makes one; --url or DIESEL_URL names another"
        raise
    with repository:
        yield repository


@contextmanager
def entry_reader(repository: Repository, view: Snapshot) -> Iterator[EntryReader]:
    reader = EntryReader(view, repository.objects, MEMORY_BYTES)
    try:
        yield reader
    finally:
        reader.close()
