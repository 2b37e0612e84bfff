"""`read_nowait`: bytes that are in the machine's memory already, at once; never a wait, never a
wrong byte.
"""

import os
from pathlib import Path

import pytest

from diesel_fs.storage.objects import nowait_reads as cached_reads
from diesel_fs.storage.objects.folder import FolderStore

from ...server.program import until

CONTENT = os.urandom(300_000)
FOLDER = "datasets/" + "ab" * 16 + "/chunks/aaaa/"
NAME = FOLDER + "aaaa" + "0" * 18


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    """On a disk: of a file system in memory everything is at hand."""
    made = FolderStore.create(tmp_path_factory.mktemp("store", numbered=True) / "s")
    made.put(NAME, [CONTENT])
    made.get(NAME, 0, len(CONTENT))  # the page cache has it now
    return made


def read_nowait(store: FolderStore, name: str, start: int, size: int) -> bytes | None:
    room = memoryview(bytearray(size))
    return bytes(room) if store.read_nowait(name, start, room) else None


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 200_000])
def test_what_is_in_memory_comes_at_once(store: FolderStore, start: int) -> None:
    assert read_nowait(store, NAME, start, 50_000) == CONTENT[start : start + 50_000]


def test_what_is_not_is_not_waited_for(store: FolderStore) -> None:
    """After its pages have gone, and again once a read has brought them."""
    path = Path(store.root) / NAME
    if os.statvfs(path).f_fsid == 0:  # nothing can leave memory here
        pytest.skip("the temporary folder is in memory")

    def is_gone() -> bool:
        """The kernel keeps a page as long as anybody has it in hand: it is asked again."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return read_nowait(store, NAME, 100_000, 8192) is None

    until(is_gone, "its pages to go")
    assert store.get(NAME, 0, len(CONTENT)) == CONTENT
    assert read_nowait(store, NAME, 100_000, 8192) == CONTENT[100_000:108_192]


def test_beyond_the_end_and_missing_are_no_answers(store: FolderStore) -> None:
    assert read_nowait(store, NAME, len(CONTENT) - 10, 20) is None
    assert read_nowait(store, FOLDER + "aaaa" + "1" * 18, 0, 10) is None


def test_a_link_is_not_followed(store: FolderStore) -> None:
    link = Path(store.root) / (FOLDER + "aaaa" + "2" * 18)
    link.symlink_to(Path(store.root) / NAME)
    assert read_nowait(store, FOLDER + "aaaa" + "2" * 18, 0, 10) is None


def test_a_kernel_without_it_always_waits(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_reads, "_SYS_OPENAT2", 10_000)
    assert read_nowait(store, NAME, 0, 10) is None


def test_nothing_stays_open(store: FolderStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for start in range(100):
        read_nowait(store, NAME, start, 10)
        read_nowait(store, NAME, len(CONTENT), 10)
        read_nowait(store, FOLDER + "aaaa" + "1" * 18, start, 10)
    assert len(os.listdir("/proc/self/fd")) == before
