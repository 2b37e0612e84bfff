"""Published versions of datasets: objects beside the chunks, and how they are written and read.

A version is the time of its commit in microseconds since 1970. It is published as a snapshot, all
metadata at that version, or as a delta, what changed since an earlier one (`chains.py` decides). A
damaged object counts as missing, and the version is made again from the metadata store. If
possible, a reader gets a private copy in a mapped file (`private_copies.py`). Thread-safe.
"""

import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple, Protocol
from uuid import UUID

import numpy as np

from ..errors import CorruptError, DieselError, FormatError, ObjectExists, ObjectMissing
from ..format.entries import RECORD, Bytes, ChunkId, Rows
from ..format.object_names import (
    VersionForm,
    snapshot_prefix,
    version_object,
    version_of_object,
)
from ..format.snapshot import delta as deltas
from ..format.snapshot.build import build_snapshot
from ..format.snapshot.delta import Delta, DeltaHeader
from ..format.snapshot.entry_digest import EntryDigest
from ..format.snapshot.layered import LayeredSnapshot
from ..format.snapshot.layout import (
    FRONT_BYTES,
    SnapshotHeader,
    content_mark,
    parse_front,
)
from ..format.snapshot.reader import MergedFrom, Snapshot
from ..storage.metadata.store import DatasetHead, MetadataChanges, MetadataStore, chunks_digest
from ..storage.objects.store import ObjectStore
from .chains import Published, PublishedForms, choose_base, is_worth_deltas
from .leases import purge_is_under_way
from .private_copies import open_private_copy, private_versions, write_private_copy

log = logging.getLogger("diesel.repository")

_NO_DIGESTS: Mapping[ChunkId, EntryDigest] = MappingProxyType({})

_NO_ROWS = Rows([], np.zeros(0, np.uint32), [], np.zeros(0, RECORD), np.zeros(0, np.uint32), [])

_UNMERGED_ROWS_MAX = 1 << 16
"""A writer looks paths up in a snapshot and at most this number of rows of deltas above it. More
rows are merged first."""


class KeptVersion(NamedTuple):
    version: int
    published_ns: int
    files: int
    bytes: int


class _OtherContent(CorruptError):
    """A version is published with another content."""


class _Since(NamedTuple):
    """What changed since a version."""

    version: int
    changes: MetadataChanges


def empty_snapshot(identity: UUID, name: str) -> Snapshot:
    parts = build_snapshot(None, _NO_ROWS, [], identity=identity, dataset=name, version=0, digest=0)
    return Snapshot(memoryview(b"".join(parts)), verify=True)


class PublishedVersions(Protocol):
    def newest(self, identity: UUID) -> int:
        """0 for none."""

    def versions(self, identity: UUID) -> list[int]:
        """Ascending."""

    def kept(self, identity: UUID) -> list[KeptVersion]:
        """The versions that can be read, ascending, without damaged ones."""

    def load(self, identity: UUID, version: int) -> Snapshot:
        """Raises FormatError, ObjectMissing."""


class VersionStore(PublishedVersions):
    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._damaged: set[str] = set()  # names of damaged objects, which count as missing
        self._looked_up: Snapshot | None = None  # the last base: opening it compares checksums

    # Listing

    def newest(self, identity: UUID) -> int:
        return max(self.versions(identity), default=0)

    def versions(self, identity: UUID) -> list[int]:
        names = self._objects.housekeeping.names(snapshot_prefix(identity))
        forms = [version_of_object(name) for name in names if name not in self._damaged]
        return sorted({form.version for form in forms if form is not None})

    def forms(self, identity: UUID, *, with_damaged: bool = False) -> PublishedForms:
        """With `with_damaged`, also the forms that this process could not read: another process may
        read them and build on them, so they count before a version is removed."""
        return PublishedForms(
            Published(form, info.name, info.bytes, info.modified_ns // 1000)
            for info in self._objects.list(snapshot_prefix(identity))
            if (with_damaged or info.name not in self._damaged)
            and (form := version_of_object(info.name)) is not None
        )

    def has_snapshot(self, identity: UUID, version: int) -> bool:
        return any(not each.form.base for each in self.forms(identity).forms(version))

    def kept(self, identity: UUID) -> list[KeptVersion]:
        kept = []
        forms = self.forms(identity)
        read = cache(partial(self.header, identity))
        for version in forms.versions:
            try:
                header, *_ = map(read, forms.chain(version))
            except (FormatError, ObjectMissing) as error:
                log.warning("version %d is not listed: %s", version, error.message)
                continue
            # A version is its time in microseconds
            kept.append(KeptVersion(version, version * 1000, header.files, header.file_bytes))
        return kept

    def header(self, identity: UUID, published: Published) -> SnapshotHeader | DeltaHeader:
        """Raises FormatError, ObjectMissing."""
        header: SnapshotHeader | DeltaHeader
        with self._named(published):
            if published.form.base:
                front = self._objects.get(published.name, 0, deltas.HEADER_BYTES)
                header = deltas.parse_delta_header(front)
            else:
                header = parse_front(self._objects.get(published.name, 0, FRONT_BYTES))
            _check_form(header, identity, published)
        return header

    @contextmanager
    def _named(self, published: Published) -> Iterator[None]:
        """Names the object in errors about its bytes."""
        try:
            yield
        except FormatError as error:
            error.message = f"{published.name}: {error.message}"
            raise

    # Reading

    def load(self, identity: UUID, version: int, *, lazy: bool = False) -> Snapshot:
        """`lazy` is as of `Repository.view`."""
        copy = open_private_copy(identity, version)
        if copy is not None:
            return copy
        if lazy:
            with suppress(CorruptError):  # perhaps a private copy is wrong: without it, then
                base, above = self._lookups(identity, self.forms(identity), version)
                return LayeredSnapshot(base, above) if above else base
        parts, merged_from = self._read(identity, version)
        snapshot = write_private_copy(identity, version, parts) or _in_memory(parts)
        snapshot.merged_from = merged_from
        return snapshot

    def load_without_copy(self, identity: UUID, version: int) -> Snapshot:
        copy = open_private_copy(identity, version)
        return copy or _in_memory(self._read(identity, version)[0])

    def fetch_verified(self, identity: UUID, version: int) -> Snapshot:
        """Read a version from the object store alone, and check it whole. Raises FormatError,
        ObjectMissing."""
        base, above = self._chain(identity, version, use_copies=False)
        parts = deltas.apply_deltas(base, above) if above else [base.buffer]
        return Snapshot(memoryview(b"".join(parts)), verify=True)

    def _read(self, identity: UUID, version: int) -> tuple[Sequence[Bytes], MergedFrom | None]:
        try:
            base, above = self._chain(identity, version, use_copies=True)
            if not above:
                return [base.buffer], None
            return deltas.apply_deltas(base, above), deltas.merged_from(base, above)
        except CorruptError as error:  # perhaps of a private copy
            log.warning("a version is read from the store alone: %s", error.message)
            return [self.fetch_verified(identity, version).buffer], None

    def _chain(
        self, identity: UUID, version: int, *, use_copies: bool
    ) -> tuple[Snapshot, list[Delta]]:
        """A snapshot, and the deltas above it that lead to the version. If a part of the chain is
        removed meanwhile, the versions are listed again. Raises FormatError for a damaged part,
        ObjectMissing if the version is gone."""
        while True:
            forms = self.forms(identity)
            if not forms.forms(version):
                raise ObjectMissing(f"version {version} is not published")
            chain = forms.chain(version)
            try:
                copies = self._copies(identity) if use_copies else []
                return self._read_chain(identity, chain, copies)
            except ObjectMissing:
                if self.forms(identity).forms(version) == forms.forms(version):
                    raise

    def _read_chain(
        self, identity: UUID, chain: Sequence[Published], copies: Sequence[int]
    ) -> tuple[Snapshot, list[Delta]]:
        """`copies` are the versions of which private copies may be used, ascending."""
        above: list[Delta] = []
        left = [*copies]
        before = chain[0].form.version + 1  # a delta leads to it from each version since its base
        for published in chain:
            while left and left[-1] >= published.form.version:
                version = left.pop()
                copy = self._copy(identity, version) if version < before else None
                if copy is not None:
                    return copy, above[::-1]
            before = published.form.version
            if not published.form.base:
                with self._named(published):
                    content = memoryview(self._objects.get(published.name))
                    snapshot = Snapshot(content, verify=True)
                    _check_form(snapshot.header, identity, published)
                return snapshot, above[::-1]
            above.append(self._delta(identity, published))
        raise AssertionError("a chain ends with a snapshot")

    def _copies(self, identity: UUID) -> list[int]:
        """The versions that `_copy` may have, ascending."""
        last = self._looked_up
        own = {last.version} if last is not None and last.identity == identity else set[int]()
        return sorted({*private_versions(identity), *own})

    def _copy(self, identity: UUID, version: int) -> Snapshot | None:
        last = self._looked_up
        if last is not None and (last.identity, last.version) == (identity, version):
            return last
        return open_private_copy(identity, version)

    def _delta(self, identity: UUID, published: Published) -> Delta:
        with self._named(published):
            delta = deltas.parse_delta(self._objects.get(published.name))
            _check_form(delta.header, identity, published)
        return delta

    def deltas_between(
        self, identity: UUID, have: int, version: int
    ) -> Sequence[bytes | bytearray] | None:
        """The objects of the deltas that lead from the version `have` to a later one, the earliest
        first; None if no deltas do."""
        found: list[bytes | bytearray] = []
        try:
            for published in self.forms(identity).chain(version):
                if not have < published.form.version or not published.form.base:
                    return None
                found.append(self._objects.get(published.name))
                if published.form.base <= have:
                    return found[::-1]
        except (FormatError, ObjectMissing):  # the snapshot is sent
            return None
        return None

    def load_current(
        self, meta: MetadataStore, head: DatasetHead, *, full: bool = False, lazy: bool = False
    ) -> Snapshot:
        """The snapshot of the metadata store's current version. If it is not published, it is made
        from the previous one and the changes since; with `full`, from the metadata store alone."""
        if head.version == 0:
            return empty_snapshot(head.identity, head.name)
        if not full:
            copy = open_private_copy(head.identity, head.version)
            if copy is not None:
                return copy
            if head.version in self.versions(head.identity):
                try:
                    return self.load(head.identity, head.version, lazy=lazy)
                except FormatError as error:  # it can be made again
                    self._forget_damaged(head.identity, head.version)
                    log.warning("a version is damaged, and is made again: %s", error.message)
        version, parts = self._export(meta, head, [], full=full)
        copy = write_private_copy(head.identity, version, parts)
        return copy or Snapshot(memoryview(b"".join(parts)), verify=False)

    def _forget_damaged(self, identity: UUID, version: int) -> None:
        """The version counts as missing from now on."""
        names = (each.name for each in self.forms(identity).forms(version))
        self._damaged.update(names)

    # Writing

    def publish(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        *,
        full: bool = False,
        as_snapshot: bool = False,
        entry_digests: Mapping[ChunkId, EntryDigest] = _NO_DIGESTS,
    ) -> int:
        """Write the current version to the object store; returns the version. `as_snapshot` never
        writes a delta; `full` makes a snapshot from the metadata store alone.

        `entry_digests` has digests of the entries of chunks that this process committed. Raises
        CorruptError, and publishes nothing, if the metadata store has other entries of such a
        chunk, or if the version is published with another content.
        """
        known: list[_Since] = []
        delta: Delta | None = None
        if not (full or as_snapshot):
            try:
                delta = self._delta_since(meta, head, entry_digests, known)
            except (FormatError, ObjectMissing) as error:
                log.warning("a snapshot is published, not a delta: %s", error.message)
            if delta is not None and self._write_delta(head, delta):
                return delta.header.version
        version, parts = self._export(meta, head, known, full=full, entry_digests=entry_digests)
        self._write(head, VersionForm(version, 0), parts, parse_front(parts[0]))
        if delta is not None:  # a purge has removed the base, or might
            form = VersionForm(delta.header.version, delta.header.base)
            self._objects.delete(version_object(head.identity, form))
        if is_worth_deltas(sum(map(len, parts))):  # this user's next put looks paths up in it
            write_private_copy(head.identity, version, parts)
        return version

    def _write(
        self,
        head: DatasetHead,
        form: VersionForm,
        parts: Sequence[Bytes],
        header: SnapshotHeader | DeltaHeader,
    ) -> None:
        """Create the object of a form of a version, unless it is there already; of a delta, unless
        the version is there in any form. A damaged object is replaced. Raises CorruptError if the
        version is published with another content, before or meanwhile."""
        identity, name = head.identity, version_object(head.identity, form)
        is_there = is_ours = False
        while not (is_there or is_ours):
            is_damaged = name in self._damaged
            for published in self.forms(identity).forms(form.version):
                try:
                    self._check_same(head, published, parts, header)
                except ObjectMissing:
                    continue
                except _OtherContent:
                    raise
                except FormatError:
                    is_damaged |= published.name == name
                else:
                    is_there |= published.name == name or isinstance(header, DeltaHeader)
            if is_damaged:
                self._objects.delete(name)
                self._damaged.discard(name)
            if not is_there:
                with suppress(ObjectExists):  # another process was faster: compare
                    self._objects.put(name, parts)
                    is_ours = True
        for published in self.forms(identity).forms(form.version) if is_ours else ():
            if published.name != name:  # it may have come meanwhile
                try:
                    self._check_same(head, published, parts, header)
                except _OtherContent:
                    raise
                except (FormatError, ObjectMissing):
                    continue

    def _check_same(
        self,
        head: DatasetHead,
        published: Published,
        parts: Sequence[Bytes],
        header: SnapshotHeader | DeltaHeader,
    ) -> None:
        """Raise _OtherContent unless a published form of a version has its content; other
        FormatErrors, ObjectMissing if it cannot be read."""
        if isinstance(header, SnapshotHeader) and not published.form.base:
            with self._named(published):
                content = self._objects.get(published.name)
                Snapshot(memoryview(content), verify=True)
            same = content_mark(content) == content_mark(parts[0])
        else:
            theirs = self.header(head.identity, published)
            rows = theirs.rows_digest or header.rows_digest
            same = (theirs.digest, rows) == (header.digest, header.rows_digest)
        if not same:
            raise _OtherContent(
                f"version {header.version} of {head.name!r} is published with another content than"
                " the metadata have",
                advice=f"run `dlcmd recover {head.name}`, which makes another version",
            )

    def _write_delta(self, head: DatasetHead, delta: Delta) -> bool:
        """Returns whether its version can be read from now on: not if a purge has removed the base,
        or might. Raises CorruptError if the version is published with another content."""
        header = delta.header
        form, parts = VersionForm(header.version, header.base), deltas.write_delta(delta)
        self._write(head, form, parts, header)
        try:
            # A purge that begins later lists the versions later, and finds this one
            if not purge_is_under_way(self._objects, head.identity):
                self.forms(head.identity).chain(header.version)
                return True
            log.info("a snapshot is published, not a delta: a purge is under way")
        except CorruptError as error:
            log.warning("a snapshot is published, not a delta: %s", error.message)
        return False

    def _delta_since(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        entry_digests: Mapping[ChunkId, EntryDigest],
        known: "list[_Since]",
    ) -> Delta | None:
        """What changed since an earlier version; None if the current one needs a snapshot, and then
        the changes may be in `known`. Raises FormatError, ObjectMissing if the base cannot be read,
        or if the changes contradict themselves or `entry_digests`."""
        identity = head.identity
        forms = self.forms(identity)
        newest = max((v for v in forms.versions if v < head.version), default=0)
        prefix = snapshot_prefix(identity)
        damaged = (name for name in tuple(self._damaged) if name.startswith(prefix))
        is_damaged = any(
            form is not None and form.version == head.version
            for form in map(version_of_object, damaged)
        )
        if not newest or is_damaged:
            return None
        chain = forms.chain(newest)
        before = self.header(identity, chain[0])
        if not is_worth_deltas(chain[-1].bytes) or before.rows_digest is None:
            return None
        changes = meta.changes(identity, newest)
        at = choose_base(chain, deltas.delta_bytes(changes.rows))
        if at is None:
            known.append(_Since(newest, changes))
            return None
        base, above = self._lookups(identity, forms, newest)
        table = set(base.chunk_ids)
        table.update(chunk.id for delta in above for chunk in delta.added)
        current = {chunk.id for chunk in changes.chunks}
        if not current.issuperset(table):
            return None
        if chunks_digest(table) != before.digest:
            raise CorruptError("what this machine has of the base has other chunks")
        merged = [self._delta(identity, published) for published in chain[:at]]
        table.difference_update(chunk.id for delta in merged for chunk in delta.added)
        rows_digest = before.rows_digest.minus(deltas.digest_at(base, above, changes.rows))
        new = deltas.check_rows(changes.rows, changes.chunks, entry_digests)
        rows_digest = rows_digest.plus(new)
        rows = deltas.merged_rows([*(each.rows for each in reversed(merged)), changes.rows])
        header = DeltaHeader(
            identity=identity,
            dataset=head.name,
            version=changes.head.version,
            base=chain[at].form.version,
            files=changes.head.files,
            file_bytes=changes.head.bytes,
            chunks=changes.head.chunks,
            digest=changes.head.digest,
            rows_digest=rows_digest,
            rows=len(rows),
        )
        added = [chunk for chunk in changes.chunks if chunk.id not in table]
        return Delta(header, rows, added)

    def _lookups(
        self, identity: UUID, forms: PublishedForms, version: int
    ) -> tuple[Snapshot, list[Delta]]:
        """A snapshot and few rows of deltas above it, in which a writer looks paths up. A private
        copy of a version that is not published may be of a state that the metadata store has lost:
        a reader would notice that, but a writer would publish it."""
        copies = [each for each in self._copies(identity) if forms.forms(each)]
        base, above = self._read_chain(identity, forms.chain(version), copies)
        rows = 0
        for at, delta in reversed([*enumerate(above)]):
            rows += len(delta.rows)
            if rows > _UNMERGED_ROWS_MAX:
                base = self._looked_up = self.load(identity, delta.header.version)
                return base, above[at + 1 :]
        if not isinstance(base.buffer.obj, mmap.mmap):  # it comes from the store
            base = write_private_copy(identity, base.version, [base.buffer]) or base
        self._looked_up = base
        return base, above

    def remove(self, identity: UUID, version: int) -> None:
        """The caller removes later versions first, and a version's deltas go before its snapshot:
        so each delta that is left after a crash can be read."""
        for published in reversed(self.forms(identity, with_damaged=True).forms(version)):
            self._objects.delete(published.name)

    def _export(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        known: "list[_Since]",
        *,
        full: bool,
        entry_digests: Mapping[ChunkId, EntryDigest] = _NO_DIGESTS,
    ) -> tuple[int, Sequence[Bytes]]:
        """The current version and its snapshot in parts; made as by `load_current`. Takes the
        changes that are known already."""
        previous = None if full else self._previous(head)
        since = previous.version if previous else 0
        given = known.pop().changes if known and known[-1].version == since else None
        changes = given or meta.changes(head.identity, since)
        del given
        if previous and not {c.id for c in changes.chunks}.issuperset(previous.chunk_ids):
            # A purge has made the metadata store forget chunks of `previous`: start from nothing
            previous = None
            changes = meta.changes(head.identity, 0)
        now, chunks, rows = changes.head, changes.chunks, [changes.rows]
        del changes  # lets the merge free the rows, which are large for millions of entries
        try:
            parts = build_snapshot(
                previous,
                rows.pop(),
                chunks,
                identity=now.identity,
                dataset=now.name,
                version=now.version,
                digest=now.digest,
                entry_digests=entry_digests,
            )
        except CorruptError as error:
            if previous is None:
                raise
            log.warning("the snapshot is made from the metadata store alone: %s", error.message)
            return self._export(meta, head, [], full=True, entry_digests=entry_digests)
        return now.version, parts

    def _previous(self, head: DatasetHead) -> Snapshot | None:
        """The newest readable snapshot that is not newer than `head`, or None."""
        for version in reversed(self.versions(head.identity)):
            if version <= head.version:
                try:
                    return self.load(head.identity, version)
                except DieselError:
                    continue
        return None


def _check_form(header: SnapshotHeader | DeltaHeader, identity: UUID, published: Published) -> None:
    base = header.base if isinstance(header, DeltaHeader) else 0
    if (header.identity, header.version, base) != (identity, *published.form):
        raise CorruptError("it holds another version")


def _in_memory(parts: Sequence[Bytes]) -> Snapshot:
    content = parts[0] if len(parts) == 1 else b"".join(parts)
    return Snapshot(memoryview(content), verify=False)
