"""Entries, chunks and tombstones of the dataset `ds`, which tests of purge compare."""

import time
from collections.abc import Iterator

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.leases import ReadLease, leased_versions
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import Housekeeping, ObjectInfo, ObjectStore, StoreWrapper
from tests.storage.objects.faulty_store import ListedHousekeeping

from ...forks import exit_code, fork
from ..test_interleavings import Writer

NOW = PurgeOptions(grace_s=0)
DROP = PurgeOptions(0, -1, 0)
"""Drops tombstones, too."""
NO_FILES = 4096
"""Bytes of chunks that hold folders and tombstones only: no reader needs their objects."""


def sound(repository: LocalRepository) -> None:
    """Assert that nothing is damaged, and that metadata from the chunks alone are the same."""
    before = repository.view("ds")
    assert repository.verify("ds").problems == []
    live, ids = entries(before), list(before.chunk_ids)
    repository.recover("ds")
    after = repository.view("ds")
    assert entries(after) == live
    assert set(ids) <= set(after.chunk_ids)  # rebuilt = live + orphans


def nothing_more_is_known(repository: LocalRepository) -> None:
    known = {record.id for record in repository.meta.chunks(repository.dataset("ds").identity)}
    assert known == set(chunks(repository))


def entries(view: Snapshot) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for i in range(len(view)):
        places = [each._replace(chunk=0) for each in view.extents(i)]
        held = [view.chunk_ids[each.chunk] for each in view.extents(i)]
        found.append((view.path(i), view.stat(i), places, held))
    return found


def chunks(repository: LocalRepository) -> list[ChunkId]:
    return list(repository.chunk_ids(repository.dataset("ds").identity))


def read_all(view: Snapshot, repository: LocalRepository) -> list[bytes]:
    reader = EntryReader(view, repository.objects, 1 << 20)
    return [bytes(reader.read(int(i))) for i in view.files()]


class Reader:
    def __init__(self, repository: LocalRepository) -> None:
        self._repository, self.view = repository, repository.view("ds")
        self._expected = read_all(self.view, repository)

    def take_lease(self) -> ReadLease:
        return ReadLease.take(self._repository.objects, self.view.identity, self.view.version)

    def reads_on(self) -> bool:
        return read_all(self.view, self._repository) == self._expected


def leased(repository: LocalRepository) -> frozenset[int]:
    identity = repository.dataset("ds").identity
    return leased_versions(repository.objects, identity, time.time())


def tombstones(repository: LocalRepository, *paths: bytes) -> int:
    identity = repository.dataset("ds").identity
    found = repository.meta.lookup(identity, paths, tombstones=True)
    return int((found.records["kind"] == 3).sum())


def deleted_file(repository: LocalRepository) -> None:
    writer = Writer(repository)
    writer.add(b"f", b"content of f")
    writer.seal().commit()
    writer.session.delete([b"f"])
    writer.add(b"g", b"content of g")
    writer.seal().commit()
    writer.session.finish()


def dead_process() -> int:
    child = fork(int)
    assert exit_code(child) == 0
    return child


class ShortListing(StoreWrapper):
    def __init__(self, inner: ObjectStore, hidden: str) -> None:
        super().__init__(inner)
        self._hidden = hidden

    @property
    def housekeeping(self) -> Housekeeping:
        return ListedHousekeeping(self)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix, after) if info.name != self._hidden)


def dataset_of(repository: LocalRepository) -> Dataset:
    return connect("ds", repository.url.full_url, create=True)
