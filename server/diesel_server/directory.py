"""Which dataset a request means, and whether its user may do that with it.

Owned here: roles, in this one place and before anything else of a request is looked at; names and
identities of datasets, remembered. To who may not read a dataset there is none: the same error in
the same words as where there is none. Not owned: accounts (`authentication.py`), what datasets
hold.

What is remembered of an identity is looked at again after some seconds: it may have been deleted.
Then it is dying as long as objects of it are left: there for who was reading it, and not by name.
Thread-safe.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from diesel_fs.errors import (
    CorruptError,
    NoSuchDataset,
    ObjectStoreError,
)
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account, Role

log = logging.getLogger("diesel.server")

REMEMBERED_S = 5.0
"""How long a dataset that another server deletes may go on being read here."""

_REMEMBERED_MAX = 65_536


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """A dataset that is there."""

    name: str
    identity: UUID
    created_ns: int
    is_being_deleted: bool = False

    def info(self) -> DatasetInfo:
        """The dataset where nobody knows its marker."""
        return DatasetInfo(self.name, self.identity, self.created_ns, None)


class Directory:
    """The datasets of a repository, by identity."""

    def __init__(self, repository: LocalRepository) -> None:
        self._repository = repository
        self._known: dict[UUID, tuple[DatasetRef, float]] = {}

    def peek(self, identity: UUID) -> DatasetRef | None:
        """A dataset that was there a moment ago; None: ask `find`."""
        found = self._known.get(identity)
        return found[0] if found and time.monotonic() < found[1] + REMEMBERED_S else None

    def has_known(self, identity: UUID) -> bool:
        """Whether there has been such a dataset."""
        return identity in self._known

    def find(self, identity: UUID) -> DatasetRef:
        """The dataset of an identity, also one that is dying. May block. Raises NoSuchDataset."""
        found = self.peek(identity)
        if found is not None:
            return found
        before = self._known.pop(identity, None)
        try:
            info = self._look(identity)
            dying = None if info else self._repository.catalogue.deleted_dataset(identity)
        except ObjectStoreError:
            if before is None:
                raise
            self._known[identity] = before[0], time.monotonic()  # it does not change its name
            return before[0]
        if dying is not None:
            return self.remember(dying, is_dying=True)
        if info is None:
            raise no_such_dataset(str(identity))
        return self.remember(info)

    def _look(self, identity: UUID) -> DatasetInfo | None:
        catalogue = self._repository.catalogue
        try:
            return catalogue.describe(identity, None)
        except CorruptError:  # then the metadata store's word is as good
            markers = self._repository.meta.heads()
            for marker in markers:
                if marker.identity == identity:
                    return DatasetInfo(marker.name, identity, 0, marker)
            raise

    def named(self, name: str) -> DatasetRef | None:
        """The dataset of this name, as far as it is remembered."""
        for known, _ in list(self._known.values()):
            if known.name == name and not known.is_being_deleted:
                return self.peek(known.identity)
        return None

    def remember(self, info: DatasetInfo, *, is_dying: bool = False) -> DatasetRef:
        """A dataset that has just been found."""
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        known = DatasetRef(info.name, info.identity, info.created_ns, is_dying)
        self._known[info.identity] = known, time.monotonic()
        return known

    def forget(self, name: str) -> None:
        """A dataset is being deleted."""
        for identity, (known, _) in list(self._known.items()):
            if known.name == name:
                self._known.pop(identity, None)


def check_role(account: Account, name: str, wanted: Role, shown: str) -> None:
    """Raise NoSuchDataset for who may not read a dataset, PermissionDenied for who may do less.

    `shown` is the word by which the dataset was asked for.
    """
    try:
        account.require(name, wanted)
    except NoSuchDataset:
        raise no_such_dataset(shown) from None


@contextmanager
def hide_store_address(name: str) -> Iterator[None]:
    """The repository's own words for a dataset that is not there name its address: not here."""
    try:
        yield
    except NoSuchDataset:
        raise no_such_dataset(name) from None


def no_such_dataset(shown: str) -> NoSuchDataset:
    """The error for a dataset that is not there, or not for this user."""
    return NoSuchDataset(f"no dataset {shown!r}")
