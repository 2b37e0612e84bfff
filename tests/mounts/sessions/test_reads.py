"""Reads that wait, fail or lie: each is in full or an error, and none disturbs another."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.conftest import LiveMount, mounting
from tests.mounts.observed import log_of

pytestmark = pytest.mark.fuse

WAITING = 20  # more than the 12 that the kernel lets the page cache have by default
REPEATED = 100_000  # large enough that the kernel reads ahead, in requests that it counts
FAULTS = ("missing", "keyerror", "oserror", "memory", "group", "exit", "short")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[LiveMount]:
    """A mount in which some files cannot be read, and some make their readers wait."""
    source = tmp_path_factory.mktemp("faulty") / "source"
    source.mkdir()
    for name in (*FAULTS, "good", *(f"wait{i}" for i in range(WAITING))):
        (source / name).write_bytes(name.encode() * REPEATED)
    with mounting(source, source.parent / "mount", session, read_deadline_s=1.0) as mounted:
        yield mounted


def errno_of(path: Path) -> int:
    """The errno of reading a file; 0 where it can be read."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize("fault", FAULTS)
def test_H5_a_fault_in_a_read_is_EIO_and_a_log_line(faulty: LiveMount, fault: str) -> None:
    """A read gives all the bytes that were asked for or EIO; the log names dataset, path, chunk."""
    assert errno_of(faulty.at / fault) == errno.EIO
    assert (faulty.at / "good").read_bytes() == b"good" * REPEATED
    lines = [line for line in log_of(faulty).splitlines() if f"folder/{fault}" in line]
    assert lines
    assert (faulty.at / fault).stat().st_size == len(fault) * REPEATED
    if fault in ("missing", "short"):
        assert "chunk -" in lines[0]


@pytest.mark.parametrize(
    "fault",
    "KeyError OSError MemoryError RuntimeError Cancelled ExceptionGroup SystemExit".split(),
)
def test_H5_a_fault_in_a_handler_is_EIO_and_the_mount_lives(faulty: LiveMount, fault: str) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        os.stat(faulty.at / f"raise {fault}")
    assert raised.value.errno == errno.EIO
    assert (faulty.at / "good").read_bytes() == b"good" * REPEATED
    assert fault in log_of(faulty)


def test_a_read_that_waits_delays_no_other_and_ends_at_the_deadline(faulty: LiveMount) -> None:
    """Readers of a store that does not answer get EIO at the deadline; all others go on."""
    found: list[int] = []
    readers = [
        threading.Thread(target=lambda i=i: found.append(errno_of(faulty.at / f"wait{i}")))
        for i in range(WAITING)
    ]
    started_s = time.monotonic()
    for reader in readers:
        reader.start()
    for _ in range(100):
        assert errno_of(faulty.at / "missing") == errno.EIO  # these come to the daemon each time
        os.listdir(faulty.at)
    others_s = time.monotonic() - started_s
    assert found == [], "a read that should have waited did not"
    for reader in readers:
        reader.join()
    assert found == [errno.EIO] * WAITING
    assert others_s < 1.0
    assert 0.9 < time.monotonic() - started_s < 1.8, "the reader waited for two deadlines"
    assert "no answer within 1 s" in log_of(faulty)
    faulty.release_reads()
    assert errno_of(faulty.at / "wait0") == 0


def test_a_store_that_disappears_is_EIO_and_kept_pages_stay(
    source: Path, tmp_path: Path, session: str
) -> None:
    """What has been read stays readable; the rest is EIO, never a hang."""
    with mounting(source, tmp_path / "mount", session, memory_bytes=1) as mounted:  # no pushes
        first = (mounted.at / "a").read_bytes()
        source.rename(tmp_path / "elsewhere")
        assert errno_of(mounted.at / "b") == errno.EIO
        assert (mounted.at / "a").read_bytes() == first
        assert sorted(os.listdir(mounted.at)) == ["a", "b"]
        (tmp_path / "elsewhere").rename(source)
        assert (mounted.at / "b").read_bytes() == b"beta"
