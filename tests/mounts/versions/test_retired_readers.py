"""Readers of retired versions: their memory has one bound for any number of open files."""

import random
import threading

from diesel_fs.mounts.versions.versioned_vfs import RETIRED_READERS_MAX, LazyReader, RetiredReaders

VERSIONS = 15


class Store:
    def __init__(self) -> None:
        self.open: set[int] = set()
        self.most = 0
        self.may_read = threading.Event()
        self.may_read.set()

    def reader(self, version: int) -> "Reader":
        return Reader(self, version)


class Reader:
    def __init__(self, store: Store, version: int) -> None:
        self._store, self._version = store, version
        store.open.add(version)

    def read(self, index: int, offset: int, size: int) -> memoryview:
        assert self._version in self._store.open
        self._store.most = max(self._store.most, len(self._store.open))
        self._store.may_read.wait()
        return memoryview(b"%d" % self._version)

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        return None

    def stats(self) -> dict[str, int]:
        return {"open": 1}

    def close(self) -> None:
        self._store.open.discard(self._version)


def lazy_readers(store: Store) -> list[LazyReader]:
    together = RetiredReaders()
    return [
        LazyReader(lambda version=version: store.reader(version), together)  # type: ignore[misc]  # mypy infers no lambda with defaults
        for version in range(VERSIONS)
    ]


def test_few_are_open_at_once_and_all_can_be_read() -> None:
    store = Store()
    versions = lazy_readers(store)
    assert [each.stats() for each in versions] == [{}] * VERSIONS
    for number in random.Random(1).choices(range(VERSIONS), k=200):
        assert bytes(versions[number].read(0, 0, 1)) == b"%d" % number
        assert len(store.open) <= RETIRED_READERS_MAX
    assert store.most <= RETIRED_READERS_MAX + 1  # the new one is opened first
    for each in versions:
        each.close()
    assert not store.open


def test_one_that_is_read_is_not_closed() -> None:
    store = Store()
    versions = lazy_readers(store)
    store.may_read.clear()
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(bytes(versions[0].read(0, 0, 1))))
    reading.start()
    while 0 not in store.open:
        reading.join(0.001)
    others = [threading.Thread(target=each.read, args=(0, 0, 1)) for each in versions[1:]]
    for each in others:
        each.start()
    store.may_read.set()
    for each in [reading, *others]:
        each.join()
    assert found == [b"0"]
    versions[1].read(0, 0, 1)
    assert len(store.open) <= RETIRED_READERS_MAX
