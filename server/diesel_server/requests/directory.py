"""Finds the dataset that a request means, and checks whether the user's role allows the request.

A dataset that a user may not read gives the error for one that does not exist, so the user cannot
find out which datasets there are.

`Directory` remembers the name behind each identity (the 16 bytes by which clients name datasets)
for some seconds; then the dataset may have been deleted. A deleted dataset with objects left is
still found by its identity, for clients that read it, but not by its name. Thread-safe.
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
"""If another server deletes a dataset, it may be read here for this time."""

_REMEMBERED_MAX = 65_536


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """A dataset that exists, or that is deleted and has objects left."""

    name: str
    identity: UUID
    created_ns: int
    is_being_deleted: bool = False

    def info(self) -> DatasetInfo:
        return DatasetInfo(self.name, self.identity, self.created_ns, None)


class Directory:
    def __init__(self, repository: LocalRepository) -> None:
        self._repository = repository
        self._known: dict[UUID, tuple[DatasetRef, float]] = {}

    def peek(self, identity: UUID) -> DatasetRef | None:
        """Returns a dataset that was found a moment ago; None: call `find`. Never blocks."""
        found = self._known.get(identity)
        return found[0] if found and time.monotonic() < found[1] + REMEMBERED_S else None

    def has_known(self, identity: UUID) -> bool:
        """Whether the dataset was ever found, so that `find` is likely to succeed."""
        return identity in self._known

    def find(self, identity: UUID) -> DatasetRef:
        """If the object store fails, this returns the dataset as it was found before. May block.
        Raises NoSuchDataset, and ObjectStoreError for a dataset that was never found."""
        found = self.peek(identity)
        if found is not None:
            return found
        before = self._known.pop(identity, None)
        try:
            info = self._look(identity)
            deleted = None if info else self._repository.catalogue.deleted_dataset(identity)
        except ObjectStoreError:
            if before is None:
                raise
            self._known[identity] = before[0], time.monotonic()  # datasets keep their names
            return before[0]
        if deleted is not None:
            return self.remember(deleted, is_being_deleted=True)
        if info is None:
            raise no_such_dataset(str(identity))
        return self.remember(info)

    def _look(self, identity: UUID) -> DatasetInfo | None:
        catalogue = self._repository.catalogue
        try:
            return catalogue.describe(identity, None)
        except CorruptError:  # the catalogue's record is damaged, but the metadata store has a name
            for head in self._repository.meta.heads():
                if head.identity == identity:
                    return DatasetInfo(head.name, identity, 0, head)
            raise

    def named(self, name: str) -> DatasetRef | None:
        """Returns the dataset if it was found a moment ago. None proves nothing."""
        for known, _ in list(self._known.values()):
            if known.name == name and not known.is_being_deleted:
                return self.peek(known.identity)
        return None

    def remember(self, info: DatasetInfo, *, is_being_deleted: bool = False) -> DatasetRef:
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        known = DatasetRef(info.name, info.identity, info.created_ns, is_being_deleted)
        self._known[info.identity] = known, time.monotonic()
        return known

    def forget(self, name: str) -> None:
        """Forgets the datasets of a name, which may have been deleted."""
        for identity, (known, _) in list(self._known.items()):
            if known.name == name:
                self._known.pop(identity, None)


def check_role(account: Account, name: str, wanted: Role, shown: str) -> None:
    """Raises NoSuchDataset if the user may not read the dataset, PermissionDenied if the role is
    less than `wanted`. Errors name `shown`, the name or identity in the request."""
    try:
        account.require(name, wanted)
    except NoSuchDataset:
        raise no_such_dataset(shown) from None


@contextmanager
def hide_store_address(name: str) -> Iterator[None]:
    """The repository's own NoSuchDataset has the address of the store, which clients must not
    see."""
    try:
        yield
    except NoSuchDataset:
        raise no_such_dataset(name) from None


def no_such_dataset(shown: str) -> NoSuchDataset:
    """The same error for a dataset that does not exist, and for one that the user may not read."""
    return NoSuchDataset(f"no dataset {shown!r}")
