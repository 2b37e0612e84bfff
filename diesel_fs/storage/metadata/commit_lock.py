"""Holding commits back for as long as something takes, once it turns out to be needed.

Owned here: when a hold begins, is renewed and ends. Not owned: what a hold is (`metadata.py`). Of
one thread.
"""

import logging
import time
from typing import Self
from uuid import UUID

from diesel_fs.errors import DieselError
from diesel_fs.storage.metadata.store import COMMIT_LOCK_S_MAX, CommitLock, MetadataStore

log = logging.getLogger("diesel.metadata")


class RenewingCommitLock:
    """A hold that is begun when it is needed, renewed while it is, and released at the end."""

    def __init__(self, store: MetadataStore, identity: UUID) -> None:
        self._store = store
        self._identity = identity
        self._hold: CommitLock | None = None
        self._since_s = 0.0

    def lock(self) -> None:
        """Hold commits back from now on."""
        before, self._hold = self._hold, self._store.lock_commits(self._identity, COMMIT_LOCK_S_MAX)
        self._since_s = time.monotonic()
        if before is not None:
            before.release()

    def renew(self) -> None:
        """Called again and again while something long goes on."""
        if self._hold is not None and time.monotonic() > self._since_s + COMMIT_LOCK_S_MAX / 3:
            self.lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            try:
                self._hold.release()
            except DieselError as error:  # it ends by itself; what it was for is done
                log.info("commits stay held back for now: %s", error.message)
