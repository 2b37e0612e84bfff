"""Rebuilding the state of a dataset while its writers go on.

Owned here: the order of the passes, by which nothing is lost that is committed meanwhile, and
commits are held back for the last of them alone. Not owned: how a store keeps a state aside, and
puts it in the place of the one that stands (`storage/metadata/sqlite/shadow_state.py`,
`storage/metadata/redis/shadow_state.py`); which chunks there are, and what they bring (the caller's
`batches` and `late`).

    1  what stands is looked at: the chunks that are committed
    2  `batches` are folded aside, however long that takes: they were listed after 1
    3  what has been committed since 1 and is not among them comes `late`; again, until it is little
    4  commits are held back, the rest comes `late`, and all of it replaces what stands

One thread for each rebuild. Of several at once each keeps what the others have, since that is
committed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from diesel_fs.errors import BusyError, CorruptError, NoSuchDataset
from diesel_fs.format.entries import ChunkId
from diesel_fs.storage.metadata.commit_lock import RenewingCommitLock
from diesel_fs.storage.metadata.store import Batch, MetadataStore, ReadCommitted

LOCKED_CHUNKS_MAX = 32
"""So many may come while commits are held back: some round trips to the object store each."""

_PASSES_MAX = 8  # each shorter than the one before, unless chunks come faster than they are read
_TRIES_MAX = 20
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class LiveState:
    """What stands where a rebuild goes, as far as it can be read. `revision` tells one state from
    all others, and is empty where there is no such dataset."""

    revision: tuple[bytes, ...]
    chunks: frozenset[ChunkId]


NO_LIVE_STATE = LiveState((), frozenset())


class ShadowState(ABC):
    """A state that is being built beside the one that stands, where nobody sees it."""

    @abstractmethod
    def begin(self) -> None:
        """Make room for it. Raises ConflictError as `MetadataStore.create`."""

    @abstractmethod
    def live_state(self) -> LiveState:
        """What stands now. Raises ConflictError as `begin`."""

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Fold a chunk in that is not in it yet; at the latest with `flush`."""

    @abstractmethod
    def flush(self) -> None:
        """Have all that was added in it."""

    @abstractmethod
    def become_live(self, expected: LiveState) -> int | None:
        """Put it in the place of what stands, at once; the new version. None, and nothing done,
        where that is not `expected` any more."""

    @abstractmethod
    def discard(self) -> None:
        """Remove it, as far as that is possible now. Raises nothing of ours."""


def rebuild(
    store: MetadataStore,
    identity: UUID,
    aside: ShadowState,
    batches: Iterable[Batch],
    late: ReadCommitted | None,
) -> int:
    """As `MetadataStore.rebuild`, of a store that keeps states `aside`."""
    try:
        aside.begin()
        return _Rebuild(store, identity, aside, late).run(batches)
    except BaseException:
        aside.discard()
        raise


class _Rebuild:
    def __init__(
        self, store: MetadataStore, identity: UUID, aside: ShadowState, late: ReadCommitted | None
    ) -> None:
        self._store = store
        self._identity = identity
        self._aside = aside
        self._late = late
        self._before = aside.live_state()
        self._folded: set[ChunkId] = set()
        self._asked: set[ChunkId] = set()  # for some of which there may be no batch

    def run(self, batches: Iterable[Batch]) -> int:
        """The new version."""
        self._add(batches, None)
        for _ in range(_PASSES_MAX):
            rest = self._rest(self._aside.live_state())
            if len(rest) <= LOCKED_CHUNKS_MAX:
                break
            self._add_late(rest, None)
        for _ in range(_TRIES_MAX):
            version = self._last_pass()
            if version is not None:
                return version
            time.sleep(_PAUSE_S)
        raise self._changed()

    def _last_pass(self) -> int | None:
        """The new version; None where the state changed although commits were held back."""
        with RenewingCommitLock(self._store, self._identity) as holding:
            # Where nothing stands, or nothing that can be read, there are no commits
            with suppress(NoSuchDataset, CorruptError):
                holding.lock()
            standing = self._aside.live_state()
            if self._before.revision and not standing.revision:
                raise NoSuchDataset(f"dataset {self._identity} was deleted while it was rebuilt")
            self._add_late(self._rest(standing), holding)
            return self._aside.become_live(standing)

    def _rest(self, standing: LiveState) -> Collection[ChunkId]:
        """What has been committed since this began, and is not folded in."""
        return standing.chunks - self._before.chunks - self._folded - self._asked

    def _add_late(self, chunks: Collection[ChunkId], holding: RenewingCommitLock | None) -> None:
        if not chunks:
            return
        if self._late is None:
            raise self._changed()
        self._asked.update(chunks)
        self._add(self._late(sorted(chunks)), holding)

    def _add(self, batches: Iterable[Batch], lock: RenewingCommitLock | None) -> None:
        for batch in batches:
            if batch.check().chunk.id not in self._folded:
                self._folded.add(batch.chunk.id)
                self._aside.add(batch)
            if lock is not None:
                lock.renew()
        self._aside.flush()

    def _changed(self) -> BusyError:
        return BusyError(f"dataset {self._identity} was changed while it was rebuilt")
