"""Decides which versions and chunks of a dataset must be kept.

FORMAT.md, section 6, has the rules ("Kept versions", "When a chunk may go"). This module removes
expired versions and the objects of a deleted dataset; `purge.py` removes chunks. Blocking; one
thread.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, DieselError, FormatError, ObjectMissing
from ..format.chunk import ChunkHeader
from ..format.chunk_id import chunk_id_text, id_seconds, stamp_fields
from ..format.entries import ChunkId, Kind, Stamp
from ..format.object_names import (
    chunk_of_object,
    chunk_prefix,
    dataset_object,
    dataset_prefix,
    lease_object,
    lease_prefix,
    snapshot_prefix,
    version_of_object,
)
from ..format.snapshot import layout as layout
from ..format.snapshot.layout import RowsDigest
from ..format.snapshot.reader import Snapshot
from ..storage.objects.store import ObjectStore
from .chains import PublishedForms
from .leases import EVERY_VERSION, LEASE_S, POLICY, is_abandoned, leased_versions
from .validation import CLOCK_ALLOWANCE_S, PUT_WINDOW_S
from .versions import VersionStore

log = logging.getLogger("diesel.retention")

# Which versions are kept

GRACE_S = 86_400
"""A version that is no longer current is kept for this time, for readers without a lease."""

_RECENT = 8
_PERIODS = 8
"""Within a grace period, the newest `_RECENT` versions are kept, and the last in each of `_PERIODS`
equal parts of the period: a dataset may get a version every second."""

KEEP_MAX = 1 << 20
GRACE_S_MAX = 1 << 31
"""More seconds do not fit into the times of clocks and files."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A purge must leave the last `keep` versions, and every version for `grace_s` seconds after it
    was current. `grace_s` counts only if it is longer than GRACE_S."""

    keep: int = 0
    grace_s: int = 0


def read_retention_policy(objects: ObjectStore, identity: UUID) -> RetentionPolicy:
    """A dataset's policy, or the default if it has none. Raises CorruptError."""
    try:
        values = json.loads(bytes(objects.get(lease_object(identity, POLICY))))
        policy = RetentionPolicy(values["keep"], values["grace_s"])
        if type(policy.keep) is not int or type(policy.grace_s) is not int:
            raise TypeError("a number is no integer")
        if not (0 <= policy.keep <= KEEP_MAX and 0 <= policy.grace_s <= GRACE_S_MAX):
            raise ValueError("a number is out of its range")
    except ObjectMissing:
        return RetentionPolicy()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(
            f"the dataset's policy is damaged: {error}", advice="`dlcmd purge --keep N` writes it"
        ) from error
    return policy


def write_retention_policy(objects: ObjectStore, identity: UUID, policy: RetentionPolicy) -> None:
    """Durable on return."""
    text = json.dumps(asdict(policy)).encode() + b"\n"
    objects.replace(lease_object(identity, POLICY), [text])


NONE_PLANNED: Mapping[int, int] = MappingProxyType({})


def retained_versions(
    versions: VersionStore,
    identity: UUID,
    published: Mapping[int, int],
    policy: RetentionPolicy,
    grace_s: float,
    planned: Mapping[int, int] = NONE_PLANNED,
) -> set[int]:
    """The published versions that the policy and the grace period keep; the caller adds those with
    leases. `published` has the versions, ascending, and the time of each publication (us since
    1970). `planned` has the versions of a dry run in the same form: they count as published, with
    the content of the newest published one."""
    last = _last_distinct(versions, identity, [*published], policy.keep)
    if planned:
        last.difference_update([*published][-1:])  # the last planned version takes its place
    return last | _current_within({**published, **planned}, time.time(), grace_s)


def _last_distinct(
    versions: VersionStore, identity: UUID, published: Sequence[int], count: int
) -> set[int]:
    """The last `count` of the ascending versions. Of neighbours with equal content only the newest
    counts."""
    last = set[int]()
    later: RowsDigest | None = None
    forms = versions.forms(identity) if count else PublishedForms(())
    for version in reversed(published):
        if len(last) == count:
            break
        if not forms.forms(version):
            continue
        digest = None  # damaged, or of an old format: it may have any content
        with suppress(FormatError, ObjectMissing):
            digest = versions.header(identity, forms.forms(version)[0]).rows_digest
        if digest is None or later is None or digest.seen != later.seen:
            last.add(version)
        later = digest
    return last


def _current_within(published: Mapping[int, int], now_s: float, grace_s: float) -> set[int]:
    """The versions that were current within the grace period, thinned by `_PERIODS`, and the
    newest."""
    versions = [*published]
    horizon_us = (now_s - grace_s) * 1e6
    period_us = max(int(grace_s * 1e6) // _PERIODS, 1)
    young = [version for version in versions if published[version] > horizon_us]
    last_of_period = {published[version] // period_us: version for version in young}
    old = [version for version in versions if published[version] <= horizon_us]
    return {*young[-_RECENT:], *last_of_period.values(), *old[-1:], *versions[-1:]}


def remove_expired_versions(objects: ObjectStore, versions: VersionStore, identity: UUID) -> None:
    """Remove versions that need not be kept, but not the one before the newest. Errors are only
    logged: the next publication tries again."""
    try:
        forms = versions.forms(identity, with_damaged=True)
        published = forms.published
        if len(published) <= 2:
            return
        policy = read_retention_policy(objects, identity)
        grace_s = max(GRACE_S, policy.grace_s)
        retained = retained_versions(versions, identity, published, policy, grace_s)
        if retained.issuperset([*published][:-2]):
            return
        leased = leased_versions(objects, identity, time.time())
        kept = forms.needed({*retained, *leased, *[*published][-2:]})
        for old in sorted(published.keys() - kept, reverse=True):
            if EVERY_VERSION not in leased:
                versions.remove(identity, old)
    except DieselError as error:
        log.info("versions are not removed: %s", error.message)


# Which chunks versions and leases keep


class ChunkUse(NamedTuple):
    """The number of a version's extents in a chunk, and the bytes of their bodies."""

    entries: int
    stored_bytes: int


def extent_counts(view: Snapshot) -> npt.NDArray[np.int64]:
    """By chunk number: how many extents of files are in each chunk. Files that a folder of the same
    path hides count, too."""
    columns, shadowed = view.columns, view.columns.shadowed
    numbers = [columns.extents["chunk"]]
    for flags, chunk in (columns.flags, columns.chunk), (shadowed["flags"], shadowed["chunk"]):
        is_plain = (layout.kinds(flags) == Kind.FILE) & ((flags & layout.MANY_EXTENTS) == 0)
        numbers.append(chunk[is_plain])
    return np.bincount(np.concatenate(numbers), minlength=view.chunk_count)


def used_chunks(view: Snapshot) -> frozenset[ChunkId]:
    return frozenset(view.chunk_ids[i] for i in np.flatnonzero(extent_counts(view)).tolist())


def chunk_usage(view: Snapshot) -> dict[ChunkId, ChunkUse]:
    stored_bytes = map(int, view.used_bytes().tolist())  # exact up to 2^53
    rows = map(ChunkUse, extent_counts(view).tolist(), stored_bytes)
    return dict(zip(view.chunk_ids, rows, strict=True))


class DeletableChunks:
    """Decides which of the `candidates` can be deleted: chunks that are empty in the current state,
    and in `planned_version`, the version that a dry run assumes (0: none)."""

    def __init__(
        self,
        versions: VersionStore,
        identity: UUID,
        candidates: Iterable[ChunkId],
        planned_version: int = 0,
    ) -> None:
        self._versions = versions
        self._identity = identity
        self._candidates = frozenset(candidates)
        self._known = {planned_version: (self._candidates, frozenset[ChunkId]())}

    def unreferenced(
        self, versions: Mapping[int, int], leased: Collection[int], before_us: int
    ) -> frozenset[ChunkId]:
        """The candidates that may be deleted.

        `versions` is as `published` of `retained_versions`; `leased` has the versions with leases.
        A reader without a lease may still use the version that was current at `before_us` (us since
        1970). If a version cannot be read, the chunks that it needs are unknown: raises
        FormatError, or ObjectMissing if it was removed meanwhile.
        """
        oldest_in_use = {max((v for v, at_us in versions.items() if at_us <= before_us), default=0)}
        for version in leased:
            if version not in versions:  # the last published version before it counts
                oldest_in_use.add(max((v for v in versions if v <= version), default=0))
        if 0 in oldest_in_use or EVERY_VERSION in leased:
            return frozenset()
        left = self._candidates
        for version in versions:
            table, used = self._candidates_of(version)
            left -= used
            # Only chunks in its table are known to have been empty then, and not made later
            if version in oldest_in_use:
                left &= table
        return left

    def _candidates_of(self, version: int) -> tuple[frozenset[ChunkId], frozenset[ChunkId]]:
        if version not in self._known:
            view = self._versions.load_without_copy(self._identity, version)
            table = self._candidates.intersection(view.chunk_ids)
            self._known[version] = table, table & used_chunks(view)
        return self._known[version]


# Which tombstones can go

TOMBSTONE_AGE_S = PUT_WINDOW_S + CLOCK_ALLOWANCE_S + LEASE_S
"""A tombstone of this age can be dropped: a chunk that was sealed before the tombstone is refused
if its commit comes this late, so no older entry can still arrive."""

ReadHeader = Callable[[ChunkId], ChunkHeader]
"""Reads and checks a chunk's header. Raises FormatError, ObjectStoreError."""


class ActiveTombstone(NamedTuple):
    """A tombstone that no newer entry of its path has replaced."""

    stamp: Stamp
    chunk: ChunkId
    place: int  # of the entry in the chunk


def active_tombstones(
    header: ChunkHeader, holes: Collection[int]
) -> Iterator[tuple[bytes, ActiveTombstone]]:
    """The tombstones whose places are not in `holes`, with their paths."""
    for place in np.flatnonzero(header.records["kind"] == Kind.TOMBSTONE).tolist():
        if place not in holes:
            tombstone = ActiveTombstone(header.stamp(place), header.preamble.id, place)
            yield header.path(place), tombstone


def old_enough(
    tombstones: Mapping[bytes, ActiveTombstone], began_s: float
) -> dict[bytes, ActiveTombstone]:
    """The tombstones that were older than TOMBSTONE_AGE_S at `began_s` (seconds since 1970), before
    the purge listed the chunks."""
    limit_s = began_s - TOMBSTONE_AGE_S
    return {
        path: each
        for path, each in tombstones.items()
        if id_seconds(stamp_fields(each.stamp)[0]) < limit_s
    }


def droppable_tombstones(
    tombstones: Mapping[bytes, ActiveTombstone],
    suspects: Iterable[ChunkId],
    read_header: ReadHeader,
) -> dict[ChunkId, set[int]]:
    """Those of the `tombstones` (results of `old_enough`) that hide no older entry any more, as
    places for each chunk. `suspects` are all chunks that may hold an older entry of their paths:
    those with holes, and those that the metadata store lacks. If a suspect cannot be read, the
    result is empty."""
    left = dict(tombstones)
    for chunk in suspects if left else ():
        try:
            header = read_header(chunk)
        except ObjectMissing:
            continue
        except DieselError as error:
            log.info("no tombstone is dropped: %s: %s", chunk_id_text(chunk), error.message)
            return {}
        for place in range(len(header)):
            path = header.path(place)
            hiding = left.get(path)
            if hiding is not None and hiding.chunk != chunk and header.stamp(place) < hiding.stamp:
                del left[path]
    by_chunk: dict[ChunkId, set[int]] = {}
    for each in left.values():
        by_chunk.setdefault(each.chunk, set()).add(each.place)
    return by_chunk


# The end of a dataset


@dataclass(frozen=True, slots=True)
class Deletion:
    """`left`: the objects that are still read or written."""

    removed: int
    left: int

    def log_left(self, name: str) -> None:
        if self.left:
            log.warning(
                "%s: %d objects are left, since somebody is still reading it; "
                "`dlcmd delete-dataset` or `dlcmd purge` removes them later",
                *(name, self.left),
            )


def remove_dataset(
    objects: ObjectStore, versions: VersionStore, identity: UUID, *, but_name: bool = False
) -> Deletion:
    """Remove the objects of a deleted dataset, except those that leases pin or that are being
    written.

    Repeatable: the object with the dataset's name is removed last, since the others are found
    through it. With `but_name` it stays.
    """
    leased = leased_versions(objects, identity, time.time())
    needed = versions.forms(identity, with_damaged=True).needed(leased)
    pinned, all_pinned = _pinned_chunks(versions, identity, leased)
    removed = left = 0
    # Backwards, so that a delta goes before the versions that it needs
    for name in reversed([*objects.housekeeping.names(dataset_prefix(identity))]):
        if name == dataset_object(identity):
            continue
        chunk = chunk_of_object(name) if name.startswith(chunk_prefix(identity)) else None
        is_pinned = chunk is not None and (all_pinned or chunk in pinned)
        if name.startswith(snapshot_prefix(identity)):
            form = version_of_object(name)
            is_pinned = all_pinned or (form is not None and form.version in needed)
        if leased and name.startswith(lease_prefix(identity)):
            continue
        if is_pinned:
            left += 1
        else:
            objects.delete(name)
            removed += 1
    for leftover in objects.housekeeping.leftovers(dataset_prefix(identity)):
        if is_abandoned(leftover, time.time(), 0):
            objects.housekeeping.discard(leftover)
        else:
            left += 1
    if not (left or leased or but_name):
        objects.delete(dataset_object(identity))
    return Deletion(removed, left)


def _pinned_chunks(
    versions: VersionStore, identity: UUID, leased: Collection[int]
) -> tuple[frozenset[ChunkId], bool]:
    """The chunks that leased versions need; and True if these versions may need any chunk, since
    one of them is unknown or cannot be read."""
    pinned = frozenset[ChunkId]()
    if EVERY_VERSION in leased:
        return pinned, True
    for version in leased:
        try:
            view = versions.load_without_copy(identity, version)
        except (FormatError, ObjectMissing):
            return pinned, True
        pinned |= used_chunks(view)
    return pinned, False
