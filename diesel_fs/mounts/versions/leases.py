"""Takes and gives back the leases of one mount.

A lease is an object in the store (`repository/leases.py`), which keeps a purge from removing the
chunks of a version. The mount has one for each version that it answers from; if it cannot write
leases, it works without them. All methods access the store and may wait. One thread at a time calls
them.
"""

import logging
from collections.abc import Iterable

from ...errors import DieselError
from ...format.snapshot.reader import Snapshot
from ...repository.leases import ReadLease
from ..options import MountRequest
from ..source import MountSource

log = logging.getLogger("diesel.mount")


class VersionLeases:
    def __init__(self, request: MountRequest, source: MountSource) -> None:
        self._request = request
        self._source = source
        self._leases: dict[int, ReadLease | None] = {}  # None: this store needs none
        self._logged: set[int] = set()  # versions whose failure was logged

    def set_versions(self, snapshots: Iterable[Snapshot]) -> None:
        """Takes leases on these versions, then gives back all others. A failed lease is tried again
        at the next call."""
        wanted = {each.version: each for each in snapshots}
        for version, snapshot in wanted.items():
            if version not in self._leases:
                try:
                    self._leases[version] = self._source.lease(self._request, snapshot)
                except DieselError as error:
                    if version not in self._logged:
                        log.info("no lease on version %d: %s", version, error.message)
                    self._logged.add(version)
        self._logged &= wanted.keys()
        for version in self._leases.keys() - wanted:
            lease = self._leases.pop(version)
            if lease is not None:
                lease.close()

    def close(self) -> None:
        self.set_versions(())
