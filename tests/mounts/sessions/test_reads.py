"""Reads that wait or fail: each gives all bytes or an error, and delays no other request."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.conftest import LiveMount, mounting
from tests.mounts.observed import Program, figures, fresh_stats, log_of
from tests.rows import each_row
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

WAITING = 20  # more than the 12 READs ahead that the kernel allows by default
REPEATED = 100_000  # large enough that the kernel reads ahead
FAULTS = ("missing", "keyerror", "oserror", "memory", "group", "exit", "short")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[LiveMount]:
    source = tmp_path_factory.mktemp("faulty") / "source"
    source.mkdir()
    for name in (*FAULTS, "good", *(f"wait{i}" for i in range(WAITING))):
        (source / name).write_bytes(name.encode() * REPEATED)
    at, deadline_s = source.parent / "mount", deadline_of(session)
    with mounting(source, at, session, read_deadline_s=deadline_s) as mounted:
        yield mounted


def deadline_of(session: str) -> float:
    """The read deadline. In a native mount a READ of several files fails earlier, and the kernel
    requests the file again."""
    return 2.0 if session == "native" else 1.0


def errno_of(path: Path) -> int:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno or -1
    return 0


@each_row("fault", FAULTS)
def test_H5_a_fault_in_a_read_is_EIO_and_a_log_line(faulty: LiveMount, fault: str) -> None:
    assert errno_of(faulty.at / fault) == errno.EIO
    assert (faulty.at / "good").read_bytes() == b"good" * REPEATED
    lines = [line for line in log_of(faulty).splitlines() if f"folder/{fault}" in line]
    assert lines
    assert (faulty.at / fault).stat().st_size == len(fault) * REPEATED
    if fault in ("missing", "short"):
        assert "chunk -" in lines[0]


@each_row(
    "fault", "KeyError OSError MemoryError RuntimeError Cancelled ExceptionGroup SystemExit".split()
)
@pytest.mark.only_session("kernel", "pyfuse3")
def test_H5_a_fault_in_a_handler_is_EIO_and_the_mount_lives(faulty: LiveMount, fault: str) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        os.stat(faulty.at / f"raise {fault}")
    assert raised.value.errno == errno.EIO
    assert (faulty.at / "good").read_bytes() == b"good" * REPEATED
    assert fault in log_of(faulty)


def test_a_waiting_read_delays_no_other_and_ends_in_time(faulty: LiveMount, session: str) -> None:
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
        """After some lines of a kind, others may be left out, but later ones are not."""
        if f"no answer within {deadline_s:g} s" in log_of(faulty):
            return True
        assert errno_of(faulty.at / "wait0") == errno.EIO
        return False

    wait_until(is_logged)
    faulty.release_reads()
    wait_until(lambda: errno_of(faulty.at / "wait0") == 0)


SLOW_REPEATED = 2000
SIGNALS = 20  # one may end a READ ahead, and another one the reader's own

# Reads a file while signals come that it handles; prints the errno of the read, or "right".
INTERRUPTED = """if True:
    import ctypes, os, signal, sys
    path, size = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    libc = ctypes.PyDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY)
    print("opened", flush=True)
    room, filled = ctypes.create_string_buffer(size), 0
    while filled < size:  # os.read would try again after EINTR
        count = libc.read(file, ctypes.byref(room, filled), size - filled)
        if count <= 0:
            print(ctypes.get_errno())
            break
        filled += count
    else:
        print("right" if room.raw == os.path.basename(path).encode() * REPEATED else "WRONG")
""".replace("REPEATED", str(SLOW_REPEATED))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGCHLD, signal.SIGSTOP])
@pytest.mark.only_session("kernel", "native")
def test_handled_signals_fail_no_read(tmp_path: Path, session: str, number: signal.Signals) -> None:
    """The store is slow, and the signals come while the kernel waits for a READ of the reader's own
    and reports them to the mount. They may also stop the reader for a while."""
    source = tmp_path / "source"
    source.mkdir()
    # A READ ahead fails first: in a native mount that of several files, else the first of the file.
    slow = "wait" if session == "native" else "retry"
    for name, repeated in ("a", REPEATED), (slow, SLOW_REPEATED), ("z", REPEATED):
        (source / name).write_bytes(name.encode() * repeated)
    with mounting(source, tmp_path / "mount", session, memory_bytes=1) as mounted:
        (mounted.at / "a").read_bytes()
        with Program(INTERRUPTED, mounted.at / slow, len(slow) * SLOW_REPEATED) as reader:

            def is_interrupted() -> bool:
                reader.send_signal(number)
                reader.send_signal(signal.SIGCONT)
                requests = figures(fresh_stats(mounted), "requests")
                return requests.get("interrupt", 0) > 0 or reader.has_ended()

            wait_until(is_interrupted)
            for _ in range(SIGNALS):
                reader.send_signal(number)
                time.sleep(0.02)
                reader.send_signal(signal.SIGCONT)
                time.sleep(0.02)
            assert not reader.has_ended(), reader.end()
            mounted.release_reads()
            assert reader.end() == "right\n"
