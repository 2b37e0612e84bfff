"""The repository of a process that opens the object store and the metadata store itself."""

from ..format.snapshot.reader import Snapshot
from . import purge, recover, verify
from .stored import StoredRepository


class LocalRepository(StoredRepository):
    """A `StoredRepository` with the long jobs, which are functions over its methods."""

    recover = recover.recover
    verify = verify.verify
    purge = purge.purge

    def reclaimable_bytes(self, name: str, view: Snapshot | None = None) -> int:
        return purge.reclaimable_bytes(self, name, view)
