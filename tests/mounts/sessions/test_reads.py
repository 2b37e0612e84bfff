"""Reads that wait or fail: each gives all bytes or an error, and delays no other request."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.conftest import LiveMount, mounting
from tests.mounts.observed import log_of
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

WAITING = 20  # more than the 12 READs ahead that the kernel allows by default
REPEATED = 100_000  # large enough that the kernel reads ahead
FAULTS = ("missing", "keyerror", "oserror", "memory", "group", "exit", "short")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[LiveMount]:
    """A mount in which some files cannot be read, and reads of some wait."""
    source = tmp_path_factory.mktemp("faulty") / "source"
    source.mkdir()
    for name in (*FAULTS, "good", *(f"wait{i}" for i in range(WAITING))):
        (source / name).write_bytes(name.encode() * REPEATED)
    at, deadline_s = source.parent / "mount", deadline_of(session)
    with mounting(source, at, session, read_deadline_s=deadline_s) as mounted:
        yield mounted


def deadline_of(session: str) -> float:
    """In a native mount a READ of several files fails earlier, and the file is asked for again."""
    return 2.0 if session == "native" else 1.0


def errno_of(path: Path) -> int:
    """The errno of reading a file; 0 where it can be read."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize("fault", FAULTS)
def test_H5_a_fault_in_a_read_is_EIO_and_a_log_line(faulty: LiveMount, fault: str) -> None:
    """The log names dataset, path and chunk."""
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
@pytest.mark.only_session("kernel", "pyfuse3")
def test_H5_a_fault_in_a_handler_is_EIO_and_the_mount_lives(faulty: LiveMount, fault: str) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        os.stat(faulty.at / f"raise {fault}")
    assert raised.value.errno == errno.EIO
    assert (faulty.at / "good").read_bytes() == b"good" * REPEATED
    assert fault in log_of(faulty)


def test_a_read_that_waits_delays_no_other_and_ends_at_the_deadline(
    faulty: LiveMount, session: str
) -> None:
    """Reads from a store that does not answer get EIO at the deadline; others go on meanwhile."""
    found: list[int] = []
    readers = [
        threading.Thread(target=lambda i=i: found.append(errno_of(faulty.at / f"wait{i}")))
        for i in range(WAITING)
    ]
    started_s = time.monotonic()
    for reader in readers:
        reader.start()
    for _ in range(100):
        assert errno_of(faulty.at / "missing") == errno.EIO  # never from the kernel's memory
        os.listdir(faulty.at)
    others_s = time.monotonic() - started_s
    assert found == [], "a read that should have waited did not"
    for reader in readers:
        reader.join()
    assert found == [errno.EIO] * WAITING
    deadline_s = deadline_of(session)
    assert others_s < deadline_s
    waited_s = time.monotonic() - started_s
    # In a native mount it also waits while the kernel repeats each page that was read ahead.
    most = 3 if session == "native" else 1.8
    assert 0.9 * deadline_s < waited_s < most * deadline_s, "the reader waited for two deadlines"

    def is_logged() -> bool:
        """The line may be left out, after so many of its kind; a later one is not."""
        if f"no answer within {deadline_s:g} s" in log_of(faulty):
            return True
        assert errno_of(faulty.at / "wait0") == errno.EIO
        return False

    wait_until(is_logged)
    faulty.release_reads()
    wait_until(lambda: errno_of(faulty.at / "wait0") == 0)


def test_without_its_store_a_mount_gives_EIO_except_for_pages_that_were_read(
    source: Path, tmp_path: Path, session: str
) -> None:
    """The kernel keeps the pages of a file that was read. The store comes back, and so do reads. In
    a native mount the kernel reads ahead over the ends of files, so the other file is far away.
    """
    (source / "away").write_bytes(b"between them" * 1_000_000)
    with mounting(source, tmp_path / "mount", session, memory_bytes=1) as mounted:  # no pushes
        first = (mounted.at / "a").read_bytes()
        source.rename(tmp_path / "elsewhere")
        assert errno_of(mounted.at / "b") == errno.EIO
        assert (mounted.at / "a").read_bytes() == first
        assert sorted(os.listdir(mounted.at)) == ["a", "away", "b"]
        (tmp_path / "elsewhere").rename(source)
        wait_until(lambda: errno_of(mounted.at / "b") == 0)
        assert (mounted.at / "b").read_bytes() == b"beta"
