"""The three processes of a mount: when one is killed or stopped, at any time, no reader hangs."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, DieselError
from diesel_fs.mounts import mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import ends_within
from diesel_fs.mounts.prefetch.resident_set import READ_BYTES_MAX
from tests.mounts.conftest import PROGRAM, LiveMount, mounting, request_for
from tests.mounts.folder_daemon import WATCHDOG
from tests.mounts.folder_dataset import PUSHED
from tests.mounts.observed import (
    Processes,
    Program,
    figures,
    foreground_command,
    fresh_stats,
    is_gone,
    log_of,
    reading,
    waiting_reads,
)
from tests.processes import state_of
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

CONTENT = b"0123456789abcdef" * (READ_BYTES_MAX // 16 * 3 // 2)
"""A smaller file is read by one READ, and not pushed again."""

READERS = 8
FREED_S = 15.0  # far less than the 20 s after which a read that waits is an error


@pytest.fixture
def mounted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LiveMount, Processes]]:
    """A mount by the kernel session, whose server may not answer for 3 s."""
    monkeypatch.setenv(WATCHDOG, "3")
    (source / PUSHED).write_bytes(CONTENT)
    with mounting(source, tmp_path / "mount", "kernel") as found:
        yield found, Processes.of(found.at)


def wait_for_the_push(at: Path, worker: int) -> None:
    """Return when the worker waits for the page lock that an unanswered READ holds."""
    wait_until(lambda: waiting_reads(at))
    wait_until(lambda: state_of(worker) == "D")
    time.sleep(0.1)
    assert state_of(worker) == "D", "the push did not wait"
    stack = ""
    with suppress(OSError):
        stack = Path(f"/proc/{worker}/stack").read_text()
    assert not stack or "fuse_notify" in stack or "fuse_dev_write" in stack, stack


def results(readers: Program, killed_s: float) -> set[str]:
    """The results of the readers: errnos or "right". Assert that all come in time, and no wrong
    bytes."""
    found = readers.end().split()
    assert time.monotonic() - killed_s < FREED_S
    assert len(found) == READERS
    assert "WRONG" not in found
    return set(found)


@pytest.mark.parametrize(
    "victims", ["server", "worker", "server,worker", "worker,server", "supervisor"]
)
def test_Z1_readers_are_freed_when_a_process_is_killed_while_a_push_waits(
    mounted: tuple[LiveMount, Processes], victims: str
) -> None:
    found, pids = mounted
    with reading(found.at / PUSHED, CONTENT, READERS) as readers:
        wait_for_the_push(found.at, pids.worker)
        killed_s = time.monotonic()
        for victim in victims.split(","):
            with suppress(ProcessLookupError):  # the first one's end has ended it
                os.kill(getattr(pids, victim), signal.SIGKILL)
        results(readers, killed_s)
    pids.wait_for_their_end()
    found.release_reads()
    mount(request_for(found.source, found.at, "kernel"), program=PROGRAM)
    assert (found.at / PUSHED).read_bytes() == CONTENT
    umount(found.at)
    assert mounted_at(str(found.at)) is None


def test_Z1_a_killed_worker_that_ends_harms_no_read(mounted: tuple[LiveMount, Processes]) -> None:
    found, pids = mounted
    with reading(found.at / PUSHED, CONTENT, READERS) as readers:
        wait_for_the_push(found.at, pids.worker)
        os.kill(pids.worker, signal.SIGKILL)
        found.release_reads()
        assert results(readers, time.monotonic()) == {"right"}
    wait_until(lambda: is_gone(pids.worker))
    assert (found.at / "a").read_bytes() == b"alpha" * 1000
    assert "nothing is pushed" in log_of(found)
    umount(found.at)
    assert all(map(is_gone, pids))


def test_H6_a_stopped_server_is_ended_by_the_watchdog(mounted: tuple[LiveMount, Processes]) -> None:
    found, pids = mounted
    with reading(found.at / PUSHED, CONTENT, READERS) as readers:
        wait_for_the_push(found.at, pids.worker)
        os.kill(pids.server, signal.SIGSTOP)
        time.sleep(1.0)
        assert not readers.has_ended()
        assert state_of(pids.server) == "T"
        wait_until(readers.has_ended)
        results(readers, time.monotonic())
    for pid in pids:
        assert ends_within(pid, FREED_S)
    assert "has not answered for 3 s" in log_of(found)


def test_H6_reads_go_on_while_the_worker_is_stopped(mounted: tuple[LiveMount, Processes]) -> None:
    found, pids = mounted
    os.kill(pids.worker, signal.SIGSTOP)
    assert (found.at / "a").read_bytes() == b"alpha" * 1000
    umount(found.at)
    assert all(map(is_gone, pids))


def test_H6_a_pause_of_all_processes_ends_nothing(mounted: tuple[LiveMount, Processes]) -> None:
    """Ctrl-Z pauses them, or a container that is frozen."""
    found, pids = mounted
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)  # longer than the server may not answer
    os.kill(pids.supervisor, signal.SIGCONT)
    time.sleep(0.7)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert (found.at / "a").read_bytes() == b"alpha" * 1000
    time.sleep(1.0)
    assert all(state_of(pid) in ("S", "R") for pid in pids)


@pytest.mark.parametrize("way", ["plain", "lazy", "force", "SIGTERM", "SIGINT twice"])
def test_H4_a_mount_ends_while_a_push_waits(mounted: tuple[LiveMount, Processes], way: str) -> None:
    found, pids = mounted
    with reading(found.at / PUSHED, CONTENT, READERS) as readers:
        wait_for_the_push(found.at, pids.worker)
        started_s = time.monotonic()
        match way:
            case "plain":
                with pytest.raises(BusyError, match=f"held by processes {readers.pid};"):
                    umount(found.at)
            case "lazy":
                umount(found.at, lazy=True)
                assert mounted_at(str(found.at)) is None
                time.sleep(0.3)
            case "force":
                umount(found.at, force=True)
            case "SIGTERM":
                os.kill(pids.supervisor, signal.SIGTERM)
            case "SIGINT twice":
                for _ in range(2):
                    os.kill(pids.supervisor, signal.SIGINT)
                    time.sleep(0.1)
                assert ends_within(pids.supervisor, 0.9)
        if way in ("plain", "lazy"):
            assert not readers.has_ended()
            found.release_reads()
            assert results(readers, time.monotonic()) == {"right"}
        else:
            results(readers, started_s)
    if way == "plain":
        umount(found.at)
    for pid in pids:
        assert ends_within(pid, FREED_S)
    assert mounted_at(str(found.at)) is None
    assert " ERROR " not in log_of(found)


@pytest.mark.parametrize(
    ("session", "number"),
    [("native", signal.SIGINT), ("kernel", signal.SIGTERM), ("kernel", signal.SIGHUP)],
)
def test_H4_a_signal_to_all_processes_of_a_mount_in_the_foreground_counts_once(
    source: Path, tmp_path: Path, session: str, number: signal.Signals
) -> None:
    """Ctrl-C and service managers send it. A READ under way is still answered."""
    content = CONTENT[:65_536]  # one READ reads it
    # A native mount reads ahead over the ends of files, which must not reach the file that waits.
    (source / "between").write_bytes(bytes(2 << 20))
    (source / "wait").write_bytes(content)
    at = tmp_path / "mount"
    at.mkdir()
    process = subprocess.Popen(
        foreground_command(source, at, session),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        assert any("is mounted on" in line for line in process.stderr)  # reads up to this line
        pids = Processes.of(at)
        assert pids.supervisor == process.pid
        with reading(at / "wait", content, READERS) as readers:
            wait_until(lambda: waiting_reads(at))
            os.killpg(process.pid, number)
            wait_until(lambda: mounted_at(str(at)) is None)
            LiveMount(source, at, process.pid).release_reads()
            assert results(readers, time.monotonic()) == {"right"}
        _, log = process.communicate(timeout=3)
        assert process.returncode == 0
        assert f"{number.name}: unmounting" in log
        assert "at once" not in log
        assert all(map(is_gone, pids))
    finally:
        process.kill()
        process.communicate(timeout=5)
        with suppress(DieselError):
            umount(at, force=True)


@pytest.mark.parametrize("name", [PUSHED, "retry"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_reader_that_is_ended_while_it_waits_ends_at_once(
    source: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    """It waits for a page that is read ahead, or in a READ of its own, which the kernel interrupts
    (pyfuse3 does not learn of that)."""
    (source / name).write_bytes(CONTENT)
    with mounting(source, tmp_path / "mount", "kernel") as found:
        with reading(found.at / name, CONTENT, READERS) as readers:
            wait_until(lambda: waiting_reads(found.at) >= (2 if name == "retry" else 1))
            time.sleep(0.1)
            assert not readers.has_ended()
            readers.send_signal(number)
            wait_until(readers.has_ended, FREED_S)
        if name == "retry":
            assert figures(fresh_stats(found), "requests").get("interrupt"), "none was interrupted"
        found.release_reads()
        assert (found.at / name).read_bytes() == CONTENT
