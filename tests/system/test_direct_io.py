"""Files are read past the page cache, and give the same bytes as through it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.system.direct_io import aligned_memory, read_once, set_direct
from diesel_fs.system.syscalls import cached_bytes
from tests.rows import each_row


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    if not set_direct(opened, wanted=True):
        pytest.skip("this file system has no O_DIRECT")
    set_direct(opened, wanted=False)
    yield opened
    os.close(opened)


def written(file: int, size: int) -> bytes:
    content = os.urandom(size)
    set_direct(file, wanted=False)
    os.ftruncate(file, 0)
    os.pwrite(file, content, 0)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return content


@each_row("size", [1, 511, 4096, 4097, (1 << 20) + 298])
def test_files_of_any_size_are_read_and_leave_no_pages(size: int, file: int) -> None:
    content = written(file, size)
    room = aligned_memory(size)
    read_once(file, size, room)
    assert room[:size] == content
    assert cached_bytes(file, 0, size) == 0


def test_cached_pages_are_used(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(file, 100_000)
    os.pread(file, 100_000, 0)
    monkeypatch.setattr(
        "diesel_fs.system.direct_io.set_direct", lambda *_, **__: pytest.fail("direct")
    )
    room = aligned_memory(100_000)
    read_once(file, 100_000, room)
    assert room[:100_000] == content


def test_a_file_system_that_refuses_direct_reads_works(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, read = written(file, 5000), os.preadv
    refused: list[int] = []

    def preadv(opened: int, rooms: list[memoryview], at: int) -> int:
        if not refused:
            refused.append(opened)
            raise OSError(errno.EINVAL, "no such blocks")
        return read(opened, rooms, at)

    monkeypatch.setattr(os, "preadv", preadv)
    room = aligned_memory(5000)
    read_once(file, 5000, room)
    assert refused
    assert room[:5000] == content


def test_a_file_that_is_cut_off_ends_the_read(file: int) -> None:
    written(file, 6000)
    with pytest.raises(EOFError):
        read_once(file, 9000, aligned_memory(9000))
