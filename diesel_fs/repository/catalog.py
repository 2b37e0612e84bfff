"""The datasets of an object store: names, identities, and deletions.

An object `DATASET` has a dataset's name and identity; an object in `deleted/` marks it as deleted
(FORMAT.md, section 2). Thread-safe; nothing is cached between calls.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from ..errors import CorruptError, NoSpaceError, ObjectExists, ObjectMissing, UsageError
from ..format.object_names import DATASETS, dataset_object, deleted_object, identity_of_object
from ..names import check_dataset_name
from ..storage.metadata.store import DatasetHead
from ..storage.objects.store import ObjectStore

_IDENTITY_CHARS = 32


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """`head` is None if the metadata store does not know the dataset. `created_ns` counts from
    1970; 0 if unknown."""

    name: str
    identity: UUID
    created_ns: int
    head: DatasetHead | None


class Catalogue:
    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def all(
        self, heads: Mapping[UUID, DatasetHead]
    ) -> tuple[list[DatasetInfo], list[CorruptError]]:
        """The datasets that are not deleted, by name; and an error for each dataset whose name is
        unknown, since its object is damaged and `heads` lacks it."""
        infos: list[DatasetInfo] = []
        damaged: list[CorruptError] = []
        for identity in self._identities():
            head = heads.get(identity)
            try:
                info = self.describe(identity, head)
            except CorruptError as error:
                info = None if head is None else DatasetInfo(head.name, identity, 0, head)
                if info is None:
                    damaged.append(error)
            if info is not None:
                infos.append(info)
        return sorted(infos, key=lambda info: (info.name, info.created_ns)), damaged

    def describe(self, identity: UUID, head: DatasetHead | None) -> DatasetInfo | None:
        """None if the dataset is deleted, or its creation was interrupted. Raises CorruptError."""
        if self.is_deleted(identity):
            return None
        described = self._described(identity)
        return described and DatasetInfo(*described, head)

    def deleted_dataset(self, identity: UUID) -> DatasetInfo | None:
        """A deleted dataset that still has objects (its readers may need them), or None. Raises
        CorruptError."""
        described = self._described(identity) if self.is_deleted(identity) else None
        return described and DatasetInfo(*described, None)

    def is_deleted(self, identity: UUID) -> bool:
        try:
            self._objects.stat(deleted_object(identity))
        except ObjectMissing:
            return False
        return True

    def deleted_named(self, name: str) -> Iterator[UUID]:
        """The identities of deleted datasets of this name that still have objects. A writer that
        has not noticed a deletion may even add objects."""
        for identity in self._identities():
            with suppress(ObjectMissing, CorruptError):
                marked = bytes(self._objects.get(deleted_object(identity)))
                # A mark without a name is of a full disk (see `mark_deleted`)
                described = None if marked else self._described(identity)
                if (described[0].encode() if described else marked) == name.encode():
                    yield identity

    def add(self, name: str, identity: UUID, created_ns: int) -> None:
        """Idempotent; durable on return."""
        described = {"name": name, "identity": identity.hex, "created_ns": created_ns}
        with suppress(ObjectExists):
            self._objects.put(dataset_object(identity), [json.dumps(described).encode() + b"\n"])

    def mark_deleted(self, name: str, identity: UUID) -> None:
        """Idempotent; durable on return."""
        with suppress(ObjectExists):
            try:
                self._objects.put(deleted_object(identity), [name.encode()])
            except NoSpaceError:
                # A full disk still takes an empty file. The object `DATASET`, which is removed
                # last, has the name
                self._objects.put(deleted_object(identity), [])

    def _described(self, identity: UUID) -> tuple[str, UUID, int] | None:
        try:
            described = json.loads(bytes(self._objects.get(dataset_object(identity))))
            name, created_ns = described["name"], described["created_ns"]
            if not isinstance(name, str) or not isinstance(created_ns, int):
                raise TypeError("a field of another type")
            return check_dataset_name(name), identity, created_ns
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
            raise CorruptError(f"{dataset_object(identity)} is damaged: {error}") from error

    def _identities(self) -> Iterator[UUID]:
        """A listing of one name finds each identity, without listing the chunks."""
        after = DATASETS
        while (
            name := next(iter(self._objects.housekeeping.names(DATASETS, after)), None)
        ) is not None:
            identity = identity_of_object(name)
            if identity is not None:
                yield identity
            after = (
                name[: len(DATASETS) + _IDENTITY_CHARS] + "0"
            )  # "0" comes next after "/", so this skips all "<identity>/..."
