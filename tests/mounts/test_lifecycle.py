"""How a mount begins and ends: start, signals, unmounting, killed processes."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, DieselError, NoSuchDataset, UsageError
from diesel_fs.mounts import mount, stats, umount
from diesel_fs.mounts.launcher import log_path
from diesel_fs.mounts.mountpoint import is_alive, mounted_at
from diesel_fs.mounts.processes import children_of, ends_within
from tests.mounts.conftest import PROGRAM, LiveMount, mounting, request_for
from tests.mounts.folder_daemon import GRACE
from tests.mounts.observed import foreground_command, state_of, waiting_reads
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.fuse

NEVER_S = 3600.0
"""No test waits so long."""

HOLD = """if True:
    import os, sys
    {hold}
    print("held", flush=True)
    sys.stdin.read()
    {after}
"""

READ = (
    "import threading;"
    " t = [threading.Thread(target=open('{at}/wait').read) for _ in range({count})];"
    " [x.start() for x in t]"
)
"""So many threads read a file whose reads wait; each ends with its own error."""


class Holder:
    """A process that uses a mount in some way until it is told to stop."""

    def __init__(self, hold: str, after: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD.format(hold=hold, after=after)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def stop(self) -> str:
        """Ends the process. Returns its stdout and stderr."""
        output, complaint = self.process.communicate(timeout=PATIENCE_S)
        return output + complaint


@pytest.fixture
def live_mount(source: Path, tmp_path: Path, session: str) -> Iterator[LiveMount]:
    """A mount with a file whose reads wait."""
    # A native mount reads ahead over the ends of files, which must not reach the file that waits.
    (source / "between").write_bytes(bytes(2 << 20))
    (source / "wait").write_bytes(b"w" * 5000)
    with mounting(source, tmp_path / "mount", session, read_deadline_s=NEVER_S) as mounted:
        yield mounted


def test_a_mount_is_ready_when_mount_returns_and_gone_after_umount(
    source: Path, tmp_path: Path, session: str
) -> None:
    at = tmp_path / "mount"
    at.mkdir()
    mount(request_for(source, at, session), program=PROGRAM)
    pid = int(str(stats(at)["pid"]))
    assert (at / "b").read_bytes() == b"beta"
    assert state_of(pid) in "SR"
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
def test_a_mount_that_does_not_come_up_says_why(
    source: Path, tmp_path: Path, dataset: str, kind: type[DieselError], message: str
) -> None:
    """The error has the reason and the log of this start; nothing is left mounted."""
    at = tmp_path / "mount"
    at.mkdir()
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


@pytest.mark.real_start
@pytest.mark.only_session("native")
def test_S8_no_secret_in_arguments_environment_or_log(
    source: Path, tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIESEL_KEY", "canary-in-env")
    with mounting(source, tmp_path / "mount", session) as mounted:
        process = Path(f"/proc/{mounted.pid}")
        seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        seen += log_path(request_for(source, mounted.at)).read_bytes()
        assert b"canary" not in seen


@pytest.mark.parametrize("number", [signal.SIGINT, 0])
def test_the_end_of_a_mount_that_is_in_use_is_no_error_in_its_log(
    live_mount: LiveMount, number: int
) -> None:
    """A signal, or `umount --lazy`, ends the worker, which is no error."""
    holder = Holder(f"f = open('{live_mount.at}/a', 'rb')")
    log = log_path(request_for(live_mount.source, live_mount.at))
    if number:
        os.kill(live_mount.pid, number)
    else:
        umount(live_mount.at, lazy=True)
        wait_until(lambda: len(children_of(live_mount.pid)) < 2)  # only the server is left
    holder.stop()
    assert ends_within(live_mount.pid, PATIENCE_S)
    assert "is mounted on" in log.read_text()
    assert " ERROR " not in log.read_text()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.only_session("native")),
    ],
)
def test_H4_a_signal_unmounts_and_ends(live_mount: LiveMount, number: signal.Signals) -> None:
    """The mount is gone when the daemon has ended."""
    os.kill(live_mount.pid, number)
    assert ends_within(live_mount.pid, PATIENCE_S)
    assert mounted_at(str(live_mount.at)) is None


@pytest.mark.only_session("kernel")
def test_H4_SIGHUP_is_ignored_in_the_background(live_mount: LiveMount) -> None:
    os.kill(live_mount.pid, signal.SIGHUP)
    assert (live_mount.at / "b").read_bytes() == b"beta"
    assert not ends_within(live_mount.pid, 0.3)


def test_H4_a_signal_while_a_file_is_open_detaches(live_mount: LiveMount) -> None:
    """The mount leaves the tree at once, the daemon ends, and the holder of the file gets an
    error."""
    holder = Holder(f"f = open('{live_mount.at}/a', 'rb')", "print(os.pread(f.fileno(), 9, 0))")
    os.kill(live_mount.pid, signal.SIGTERM)
    assert ends_within(live_mount.pid, PATIENCE_S)
    assert mounted_at(str(live_mount.at)) is None
    assert "[Errno" in holder.stop()


def test_H4_reads_under_way_finish(live_mount: LiveMount) -> None:
    """A read whose bytes come within the grace time gets them after the signal."""
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((live_mount.at / "wait").read_bytes()))
    reader.start()
    wait_until(lambda: waiting_reads(live_mount.at))
    os.kill(live_mount.pid, signal.SIGTERM)
    wait_until(lambda: mounted_at(str(live_mount.at)) is None)
    live_mount.release_reads()
    reader.join()
    assert found == [b"w" * 5000]
    assert ends_within(live_mount.pid, PATIENCE_S)


def test_H4_reads_that_do_not_finish_get_an_error(live_mount: LiveMount) -> None:
    found: list[int] = []

    def read() -> None:
        try:
            (live_mount.at / "wait").read_bytes()
        except OSError as error:
            found.append(error.errno or 0)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: waiting_reads(live_mount.at))
    os.kill(live_mount.pid, signal.SIGTERM)
    assert ends_within(live_mount.pid, PATIENCE_S)
    reader.join(2.0)
    assert not reader.is_alive()
    assert found[0] in (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED)


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end the daemon waits for reads without limit."""
    monkeypatch.setenv(GRACE, str(NEVER_S))


@pytest.mark.usefixtures("long_grace")
def test_H4_a_second_signal_ends_at_once(live_mount: LiveMount) -> None:
    reader = Holder(READ.format(count=1, at=live_mount.at))
    wait_until(lambda: waiting_reads(live_mount.at))
    os.kill(live_mount.pid, signal.SIGTERM)
    wait_until(lambda: mounted_at(str(live_mount.at)) is None)
    assert not ends_within(live_mount.pid, 0.5), "the first signal did not wait for reads"
    os.kill(live_mount.pid, signal.SIGTERM)
    assert ends_within(live_mount.pid, PATIENCE_S)
    assert "[Errno" in reader.stop()


HOLDING = {
    "an open file": "f = open('{at}/a', 'rb')",
    "an open folder": "f = os.open('{at}', os.O_RDONLY)",
    "a mapped file": "import mmap; f = open('{at}/a', 'rb'); "
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()",
    "the place where it stands": "os.chdir('{at}')",
}


@pytest.mark.only_session("native", "kernel")
@pytest.mark.parametrize("way", sorted(HOLDING))
def test_umount_of_a_busy_mount_names_the_processes(live_mount: LiveMount, way: str) -> None:
    """The error is exit 11 with the process IDs, and the mount goes on serving."""
    holder = Holder(HOLDING[way].format(at=live_mount.at))
    with pytest.raises(BusyError) as raised:
        umount(live_mount.at)
    assert raised.value.exit_code == 11
    assert raised.value.message == f"{live_mount.at} is held by processes {holder.process.pid}"
    assert (live_mount.at / "b").read_bytes() == b"beta"
    holder.stop()
    umount(live_mount.at)
    assert ends_within(live_mount.pid, 0)


def test_umount_lazily_detaches_and_serves_the_files_that_are_open(live_mount: LiveMount) -> None:
    holder = Holder(f"f = open('{live_mount.at}/a', 'rb')", "print(len(f.read()))")
    umount(live_mount.at, lazy=True)
    assert mounted_at(str(live_mount.at)) is None
    assert not ends_within(live_mount.pid, 0.1)
    assert holder.stop() == "5000\n"
    assert ends_within(live_mount.pid, PATIENCE_S)


def test_umount_lazily_of_an_idle_mount_ends_it(live_mount: LiveMount) -> None:
    umount(live_mount.at, lazy=True)
    assert ends_within(live_mount.pid, 0)


@pytest.mark.parametrize("stopped", [False, True])
def test_H6_umount_by_force_ends_a_mount_that_hangs(live_mount: LiveMount, stopped: bool) -> None:
    """Readers get an error although neither store nor daemon answers."""
    reader = Holder(READ.format(count=1, at=live_mount.at))
    wait_until(lambda: waiting_reads(live_mount.at))
    if stopped:
        os.kill(live_mount.pid, signal.SIGSTOP)
    umount(live_mount.at, force=True)
    assert mounted_at(str(live_mount.at)) is None
    assert ends_within(live_mount.pid, 0)
    assert "[Errno" in reader.stop()


def test_umount_refuses_what_is_no_mount_of_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is mounted there"):
        umount(tmp_path)
    with pytest.raises(UsageError, match="a mount of proc"):
        umount("/proc")


@pytest.mark.parametrize("whom", ["pid", "server_pid"])
def test_H1_readers_of_a_killed_daemon_get_an_error(
    live_mount: LiveMount, session: str, whom: str
) -> None:
    """After kill -9 while reads wait, all readers get errors, and none stays in D state."""
    victim = stats(live_mount.at)[whom]
    assert isinstance(victim, int)
    readers = Holder(READ.format(count=8, at=live_mount.at))
    wait_until(lambda: waiting_reads(live_mount.at))
    os.kill(victim, signal.SIGKILL)
    assert readers.stop().count("[Errno") == 8
    assert state_of(readers.process.pid) == ""
    assert ends_within(live_mount.pid, PATIENCE_S)
    asked = live_mount.at / ".diesel" if session == "native" else live_mount.at
    calls: list[Callable[[], object]] = [lambda: os.statvfs(asked)]
    if session == "pyfuse3":  # in the others the kernel opens files without a request
        calls.append(lambda: os.open(live_mount.at / "b", os.O_RDONLY))
    for call in calls:
        with pytest.raises(OSError, match=r".") as raised:
            call()
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    # So these cannot show that a mount is dead.
    assert stat.S_ISDIR(os.stat(live_mount.at).st_mode)
    if session == "native":
        assert os.listdir(live_mount.at) == ["a", "b", "between", "wait"]
        assert os.statvfs(live_mount.at).f_files
    assert not is_alive(str(live_mount.at))
    with pytest.raises(DieselError, match="Transport endpoint is not connected"):
        stats(live_mount.at)


def test_H2_a_dead_mount_is_replaced_and_a_living_one_is_not(
    live_mount: LiveMount, session: str
) -> None:
    """A dead mount is replaced; mounting over a living one is refused."""
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


def test_umount_removes_a_dead_mount(live_mount: LiveMount) -> None:
    os.kill(live_mount.pid, signal.SIGKILL)
    assert ends_within(live_mount.pid, PATIENCE_S)
    umount(live_mount.at)
    assert mounted_at(str(live_mount.at)) is None


@pytest.mark.only_session("native")
def test_two_mounts_of_one_dataset_are_independent(
    live_mount: LiveMount, tmp_path: Path, session: str
) -> None:
    """Each has its own daemon, and goes on when the other is killed."""
    with mounting(live_mount.source, tmp_path / "second", session) as second:
        assert second.pid != live_mount.pid
        assert (second.at / "a").read_bytes() == (live_mount.at / "a").read_bytes()
        os.kill(second.pid, signal.SIGKILL)
    assert (live_mount.at / "b").read_bytes() == b"beta"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.only_session("native")),
        pytest.param(signal.SIGHUP, marks=pytest.mark.only_session("kernel")),
    ],
)
def test_H4_a_signal_ends_a_mount_in_the_foreground(
    source: Path, tmp_path: Path, session: str, number: signal.Signals
) -> None:
    """The program itself serves, logs to stderr, and ends by a signal with exit code 0."""
    at = tmp_path / "mount"
    at.mkdir()
    command = foreground_command(source, at, session)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("is mounted on" in line for line in process.stderr)  # reads up to this line
    assert stats(at)["pid"] == process.pid
    process.send_signal(number)
    _, log = process.communicate(timeout=2)
    assert process.returncode == 0
    assert f"{number.name}: unmounting" in log
    assert mounted_at(str(at)) is None
