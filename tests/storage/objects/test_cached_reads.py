"""`read_nowait` of a folder store: returns bytes that are in the page cache, and never waits."""

import os
from pathlib import Path

import pytest

from diesel_fs.storage.objects import nowait_reads
from diesel_fs.storage.objects.folder import FolderStore
from tests.rows import each_row
from tests.waiting import until

CONTENT = os.urandom(300_000)
FOLDER = "datasets/" + "ab" * 16 + "/chunks/aaaa/"
NAME = FOLDER + "aaaa" + "0" * 18


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    """A store on a disk: in a file system in memory every byte would be in the page cache."""
    made = FolderStore.create(tmp_path_factory.mktemp("store", numbered=True) / "s")
    made.put(NAME, [CONTENT])
    made.get(NAME, 0, len(CONTENT))  # now it is in the page cache
    return made


def read_nowait(store: FolderStore, name: str, start: int, size: int) -> bytes | None:
    room = memoryview(bytearray(size))
    return bytes(room) if store.fast_reads.read_nowait(name, start, room) else None


@each_row("start", [0, 1, 4095, 4096, 200_000])
def test_bytes_in_the_page_cache_are_read_at_once(store: FolderStore, start: int) -> None:
    assert read_nowait(store, NAME, start, 50_000) == CONTENT[start : start + 50_000]


def test_bytes_on_the_disk_are_not_waited_for(store: FolderStore) -> None:
    """Pages that were evicted are refused; after a usual read they are returned."""
    path = Path(store.root) / NAME
    if os.statvfs(path).f_fsid == 0:  # here pages cannot be evicted
        pytest.skip("the temporary folder is in memory")

    def is_gone() -> bool:
        """The kernel keeps a page while it is in use, so eviction is requested again and again."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return read_nowait(store, NAME, 100_000, 8192) is None

    until(is_gone, "the pages to be evicted")
    assert store.get(NAME, 0, len(CONTENT)) == CONTENT
    assert read_nowait(store, NAME, 100_000, 8192) == CONTENT[100_000:108_192]


def test_reads_that_cannot_be_answered_are_refused_and_leave_nothing_open(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, link = FOLDER + "aaaa" + "1" * 18, FOLDER + "aaaa" + "2" * 18
    Path(store.root, link).symlink_to(Path(store.root) / NAME)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert read_nowait(store, NAME, 0, 10) == CONTENT[:10]
        assert read_nowait(store, NAME, len(CONTENT) - 10, 20) is None
        assert read_nowait(store, NAME, len(CONTENT), 10) is None
        assert read_nowait(store, missing, 0, 10) is None
        assert read_nowait(store, link, 0, 10) is None
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(nowait_reads, "_SYS_OPENAT2", 10_000)
    assert read_nowait(store, NAME, 0, 10) is None
