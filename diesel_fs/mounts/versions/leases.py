"""The leases of one mount: that it reads these versions, so that a purge spares their chunks.

Owned here: one lease for each version that the mount answers from. Not owned: what a lease is
(`leases.py`), which versions there are (`following.py`). Everything here asks the store, and may
wait: for a thread, one at a time. A mount that cannot write leases does without.
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
    """What is held, by version."""

    def __init__(self, request: MountRequest, opener: MountSource) -> None:
        self._request = request
        self._opener = opener
        self._leases: dict[int, ReadLease | None] = {}  # None: there are none here
        self._logged: set[int] = (
            set()
        )  # versions whose lease could not be had when it was asked for

    def set_versions(self, snapshots: Iterable[Snapshot]) -> None:
        """These, and no others. New ones are taken before others end; what could not be taken is
        tried again when this is called again.
        """
        wanted = {each.version: each for each in snapshots}
        for version, snapshot in wanted.items():
            if version not in self._leases:
                try:
                    self._leases[version] = self._opener.lease(self._request, snapshot)
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
        """None any more."""
        self.set_versions(())
