"""How a mount begins and ends: start, signals, unmounting, killed processes."""

import errno
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, DieselError, NoSuchDataset, UsageError
from diesel_fs.mounts import mount, stats, umount
from diesel_fs.mounts.launcher import log_path
from diesel_fs.mounts.mountpoints.mountpoint import is_alive, mounted_at
from diesel_fs.mounts.mountpoints.processes import children_of, ends_within
from tests.mounts.conftest import PROGRAM, LiveMount, mounting, request_for
from tests.mounts.folder_daemon import GRACE
from tests.mounts.observed import (
    Program,
    figures,
    holding,
    log_of,
    mounts_below,
    reading,
    waiting_reads,
)
from tests.processes import state_of
from tests.rows import each_row
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.fuse

NEVER_S = 3600.0

ENDED = {str(number) for number in (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED)}
"""The errors of readers of a mount that has ended."""


@pytest.fixture
def live_mount(source: Path, tmp_path: Path, session: str) -> Iterator[LiveMount]:
    # A native mount reads ahead over the ends of files, which must not reach the file that waits.
    (source / "between").write_bytes(bytes(2 << 20))
    (source / "wait").write_bytes(b"w" * 4992)
    with mounting(source, tmp_path / "mount", session, read_deadline_s=NEVER_S) as mounted:
        yield mounted


def waiting(at: Path, count: int = 1) -> Program:
    readers = reading(at / "wait", b"w" * 4992, count)
    wait_until(lambda: waiting_reads(at))
    return readers


def test_a_mount_is_ready_after_mount_and_gone_after_umount(
    source: Path, tmp_path: Path, session: str
) -> None:
    """Meanwhile it stands in no folder of the user's, and SIGHUP does not end it (H4)."""
    at = tmp_path / "mount"
    at.mkdir()
    mount(request_for(source, at, session), program=PROGRAM)
    pid = figures(stats(at))["pid"]
    os.kill(pid, signal.SIGHUP)
    assert (at / "b").read_bytes() == b"beta"
    assert not ends_within(pid, 0.3)
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    umount(at)
    assert state_of(pid) in ("", "Z")  # Z: pid 1, its parent now, has not reaped it yet
    assert mounted_at(str(at)) is None
    assert os.listdir(at) == []


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        ("absent", NoSuchDataset, "no dataset absent; put it first"),
        ("broken", DieselError, "a bug in the mount"),
        ("dying", DieselError, "did not come up"),
    ],
)
def test_a_failed_mount_reports_the_reason(
    source: Path, tmp_path: Path, dataset: str, kind: type[DieselError], message: str
) -> None:
    at = tmp_path / "mount"
    request = request_for(source, at, dataset=dataset)
    with pytest.raises(DieselError) as raised:
        mount(request, program=PROGRAM)
    assert type(raised.value) is kind
    assert message.partition(";")[0] in raised.value.message
    assert raised.value.advice == message.partition("; ")[2]
    assert ("Traceback" in raised.value.details) == (dataset == "broken")
    assert bool(raised.value.details) == (dataset == "broken")
    assert mounted_at(str(at)) is None
    assert log_path(request).stat().st_mode & 0o777 == 0o600


REMOVED = """if True:
    import os, runpy, sys
    if not os.path.exists(sys.argv[1]):
        os.rmdir(sys.argv[2])
        open(sys.argv[1], "x").close()
    del sys.argv[1]
    runpy.run_module("tests.mounts.folder_daemon", run_name="__main__")
"""


def test_a_folder_that_is_removed_is_made_again(source: Path, tmp_path: Path, session: str) -> None:
    """After `umount --lazy` the former mount removes the folder that it has made, perhaps after the
    next one has found it."""
    at = tmp_path / "mount"
    at.mkdir()
    program = (sys.executable, "-c", REMOVED, str(tmp_path / "removed"))
    mount(request_for(source, at, session), program=program)
    try:
        assert (at / "b").read_bytes() == b"beta"
    finally:
        umount(at)
    assert not at.exists()  # the later mount's process


@pytest.mark.real_start
@pytest.mark.only_session("native")
def test_S8_no_secret_in_arguments_environment_or_log(
    source: Path, tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIESEL_KEY", "canary-in-env")
    with mounting(source, tmp_path / "mount", session) as mounted:
        process = Path(f"/proc/{mounted.pid}")
        seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert b"canary" not in seen
        assert "canary" not in log_of(mounted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, 0])
def test_H4_the_end_of_a_used_mount_logs_no_error(live_mount: LiveMount, number: int) -> None:
    """The mount leaves the tree at once. After a signal the daemon ends, and open files give
    errors; after `umount --lazy` they are served until they are closed."""
    pid = live_mount.pid
    with holding(
        f"f = open('{live_mount.at}/a', 'rb')", "print(os.pread(f.fileno(), 9, 0))"
    ) as holder:
        log = log_path(request_for(live_mount.source, live_mount.at))
        if number:
            os.kill(pid, number)
            assert ends_within(pid, PATIENCE_S)
        else:
            umount(live_mount.at, lazy=True)
            wait_until(lambda: len(children_of(pid)) < 2)  # only the server is left
            assert not ends_within(pid, 0.1)
        assert mounted_at(str(live_mount.at)) is None
        output = holder.end()
        assert "[Errno" in output if number else output == "b'alphaalph'\n"
    assert ends_within(pid, PATIENCE_S)
    assert "is mounted on" in log.read_text()
    assert " ERROR " not in log.read_text()


@pytest.mark.parametrize("come", [True, False])
def test_H4_reads_under_way_get_bytes_in_time_or_an_error(
    live_mount: LiveMount, come: bool
) -> None:
    with waiting(live_mount.at) as reader:
        os.kill(live_mount.pid, signal.SIGTERM)
        wait_until(lambda: mounted_at(str(live_mount.at)) is None)
        if come:
            live_mount.release_reads()
        assert ends_within(live_mount.pid, PATIENCE_S)
        assert reader.end().strip() in ({"right"} if come else ENDED)


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRACE, str(NEVER_S))


@pytest.mark.usefixtures("long_grace")
def test_H4_a_second_signal_ends_at_once(live_mount: LiveMount) -> None:
    with waiting(live_mount.at) as reader:
        os.kill(live_mount.pid, signal.SIGTERM)
        wait_until(lambda: mounted_at(str(live_mount.at)) is None)
        assert not ends_within(live_mount.pid, 0.5), "the first signal did not wait for reads"
        os.kill(live_mount.pid, signal.SIGTERM)
        assert ends_within(live_mount.pid, PATIENCE_S)
        assert reader.end().strip() in ENDED


# A mapped file holds the mount, but only an attempt to unmount it shows that.
HOLDING = {
    "an open file": "f = open('{at}/a', 'rb')",
    "an open folder": "f = os.open('{at}', os.O_RDONLY)",
    "a mapped file": "f = open('{at}/a', 'rb'); "
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()",
    "the place where it stands": "os.chdir('{at}')",
    "a hidden file": "f = open('{at}/.diesel/stats')",
    "the hidden folder, where it stands": "os.chdir('{at}/.diesel')",
    "a mapped hidden file": "f = open('{at}/.diesel/snapshot', 'rb'); "
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()",
}


def test_umount_of_a_busy_mount_names_its_users_and_changes_nothing(live_mount: LiveMount) -> None:
    """`.diesel` is found by name, and listed nowhere, also after the kernel has forgotten all names
    that it can."""
    at = live_mount.at
    before = mounts_below(at)
    for hold in HOLDING.values():
        with holding(hold.format(at=at)) as holder:
            for _ in range(2):
                with pytest.raises(BusyError) as raised:
                    umount(at)
            assert raised.value.exit_code == 11
            assert raised.value.message == f"{at} is held by processes {holder.pid}"
            Path("/proc/sys/vm/drop_caches").write_text("2")
            assert (at / "b").read_bytes() == b"beta"
            assert os.listdir(at) == ["a", "b", "between", "wait"]
            assert (at / ".diesel" / "stats").exists()
            assert mounts_below(at) == before
    umount(at)
    assert ends_within(live_mount.pid, 0)
    assert not mounts_below(at)


@pytest.mark.parametrize("stopped", [False, True])
def test_H6_umount_by_force_ends_a_mount_that_hangs(live_mount: LiveMount, stopped: bool) -> None:
    with waiting(live_mount.at) as reader:
        if stopped:
            os.kill(live_mount.pid, signal.SIGSTOP)
        umount(live_mount.at, force=True)
        assert mounted_at(str(live_mount.at)) is None
        assert ends_within(live_mount.pid, 0)
        assert reader.end().strip() in ENDED


@each_row(
    ("place", "what"), [("", "nothing is mounted there"), ("/proc", "that is a mount of proc")]
)
def test_other_mounts_and_folders_are_refused(tmp_path: Path, place: str, what: str) -> None:
    for call in (umount, stats):
        with pytest.raises(UsageError, match=f"no mount of a dataset: {what}"):
            call(place or tmp_path)


@pytest.mark.parametrize("whom", ["pid", "server_pid"])
def test_H1_readers_of_a_killed_daemon_fail(live_mount: LiveMount, session: str, whom: str) -> None:
    at = live_mount.at
    with waiting(at, 8) as readers:
        os.kill(figures(stats(at))[whom], signal.SIGKILL)
        output = readers.end().split()
        assert len(output) == 8
        assert ENDED.issuperset(output)
        assert state_of(readers.pid) == ""
    assert ends_within(live_mount.pid, PATIENCE_S)
    with pytest.raises(OSError, match=r".") as raised:
        os.statvfs(at / ".diesel" if session == "native" else at)
    assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    # So these cannot show that a mount is dead.
    assert stat.S_ISDIR(os.stat(at).st_mode)
    if session == "native":
        assert os.listdir(at) == ["a", "b", "between", "wait"]
        assert os.statvfs(at).f_files
    assert not is_alive(str(at))
    with pytest.raises(DieselError, match="Transport endpoint is not connected"):
        stats(at)
    umount(at)
    assert mounted_at(str(at)) is None


def test_H2_only_a_dead_mount_is_replaced(live_mount: LiveMount, session: str) -> None:
    again = request_for(live_mount.source, live_mount.at, session)
    with pytest.raises(BusyError, match="folder@7 is mounted on"):
        mount(again, program=PROGRAM)
    os.kill(live_mount.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(str(live_mount.at)))  # its server ends after it
    mount(again, program=PROGRAM)
    assert (live_mount.at / "b").read_bytes() == b"beta"
    assert Path("/proc/self/mounts").read_text().count(f" {live_mount.at} ") == 1
    umount(live_mount.at)
    assert mounted_at(str(live_mount.at)) is None
