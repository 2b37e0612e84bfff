"""Rebuilds a dataset's state in a metadata store while writers go on committing to it (FORMAT.md,
section 5, C18).

A rebuild folds chunks into a shadow state beside the live state, which it then replaces at once:

    1  Read which chunks the live state has.
    2  Fold `batches`, which were listed after step 1, into the shadow state.
    3  Read the chunks committed since step 1 (`read_committed`) and fold them, until few are left.
    4  Lock commits, fold the last of these chunks, and replace the live state. Repeat this step if
       the live state is not the one that the rebuild compared with.

Each rebuild has one thread. Several rebuilds of a dataset may run at once: each sees the result of
another as committed chunks.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from ...errors import BusyError, CorruptError, DieselError, NoSuchDataset
from ...format.entries import ChunkId
from .store import CommitBatch, MetadataStore, ReadCommitted, RenewingCommitLock, log

LOCKED_CHUNKS_MAX = 32
"""Step 4 reads at most this many chunks while commits are locked: each takes some round trips."""

# Each pass of step 3 is shorter than the one before, unless chunks come faster than they are read.
_PASSES_MAX = 8
_TRIES_MAX = 20  # of step 4
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state that readers see, as far as it can be read. `revision` differs between any two
    states, and is empty if there is no such dataset."""

    revision: tuple[bytes, ...]
    chunks: frozenset[ChunkId]


NO_LIVE_STATE = LiveState((), frozenset())


class ShadowState(ABC):
    @abstractmethod
    def begin(self) -> None:
        """Begin an empty state. Raises ConflictError as `MetadataStore.create`."""

    @abstractmethod
    def live_state(self) -> LiveState:
        """Raises ConflictError as `begin`."""

    @abstractmethod
    def add(self, batch: CommitBatch) -> None:
        """Fold in a chunk, now or with the next `flush`."""

    @abstractmethod
    def flush(self) -> None:
        """Fold in every added chunk."""

    @abstractmethod
    def become_live(self, expected: LiveState) -> int | None:
        """Replace the live state at once; returns the new version. If the live state is not
        `expected` any more, does nothing and returns None."""

    @abstractmethod
    def discard(self) -> None:
        """Remove this state, as far as possible now. Raises no DieselError."""


class RebuildingStore(MetadataStore):
    def rebuild(
        self,
        name: str,
        identity: UUID,
        batches: Iterable[CommitBatch],
        read_committed: ReadCommitted | None = None,
        newer_than: int = 0,
    ) -> int:
        shadow = self.shadow_state(name, identity, newer_than)
        try:
            shadow.begin()
            version = _Rebuild(self, identity, shadow, read_committed).run(batches)
        except BaseException:
            shadow.discard()
            raise
        self.clean()
        return version

    def clean(self) -> None:
        """Remove replaced and dropped states, as far as possible now."""
        try:
            self.remove_abandoned()
        except DieselError as error:
            log.info("replaced or deleted datasets could not be removed yet: %s", error.message)

    @abstractmethod
    def shadow_state(self, name: str, identity: UUID, newer_than: int) -> ShadowState:
        """Its version will be above `newer_than`."""

    @abstractmethod
    def remove_abandoned(self) -> None:
        """Remove states that no reader sees, and remains of dead rebuilds."""


class _Rebuild:
    def __init__(
        self,
        store: MetadataStore,
        identity: UUID,
        shadow: ShadowState,
        read_committed: ReadCommitted | None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._shadow = shadow
        self._read_committed = read_committed
        self._before = shadow.live_state()
        self._folded: set[ChunkId] = set()
        # from `read_committed`, which may have no batch for some of them
        self._requested: set[ChunkId] = set()

    def run(self, batches: Iterable[CommitBatch]) -> int:
        self._add(batches, None)
        for _ in range(_PASSES_MAX):
            committed = self._not_folded(self._shadow.live_state())
            if len(committed) <= LOCKED_CHUNKS_MAX:
                break
            self._add_committed(committed, None)
        for _ in range(_TRIES_MAX):
            version = self._last_pass()
            if version is not None:
                return version
            time.sleep(_PAUSE_S)
        raise self._changed_error()

    def _last_pass(self) -> int | None:
        """Step 4. Returns None if the live state changed although commits were locked."""
        with RenewingCommitLock(self._store, self._identity) as lock:
            # a new or unreadable dataset has no commits
            with suppress(NoSuchDataset, CorruptError):
                lock.lock()
            live = self._shadow.live_state()
            if self._before.revision and not live.revision:
                raise NoSuchDataset(f"dataset {self._identity} was deleted while it was rebuilt")
            self._add_committed(self._not_folded(live), lock)
            return self._shadow.become_live(live)

    def _not_folded(self, live: LiveState) -> Collection[ChunkId]:
        return live.chunks - self._before.chunks - self._folded - self._requested

    def _add_committed(self, chunks: Collection[ChunkId], lock: RenewingCommitLock | None) -> None:
        if not chunks:
            return
        if self._read_committed is None:
            raise self._changed_error()
        self._requested.update(chunks)
        self._add(self._read_committed(sorted(chunks)), lock)

    def _add(self, batches: Iterable[CommitBatch], lock: RenewingCommitLock | None) -> None:
        for batch in batches:
            if batch.check().chunk.id not in self._folded:
                self._folded.add(batch.chunk.id)
                self._shadow.add(batch)
            if lock is not None:
                lock.renew()
        self._shadow.flush()

    def _changed_error(self) -> BusyError:
        return BusyError(
            f"dataset {self._identity} was changed while it was rebuilt", advice="try again"
        )
