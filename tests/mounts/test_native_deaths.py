"""Native mounts whose processes are killed, stopped, or many: nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs.errors import DeadlineError, DieselError
from diesel_fs.mounts import launcher, mount, stats, umount
from diesel_fs.mounts.daemon.server import BEAT_S
from diesel_fs.mounts.launcher import log_path
from diesel_fs.mounts.mountpoints import mountpoint
from diesel_fs.mounts.mountpoints.mountpoint import is_alive, mounted_at
from diesel_fs.mounts.mountpoints.processes import children_of, ends_within
from tests.loop_devices import files_of_loop_devices, only_user_of_loop_devices
from tests.mounts.conftest import PROGRAM, mounting, request_for
from tests.mounts.dying_daemon import DIES, MOMENT, STARTS
from tests.mounts.observed import Processes, figures, is_gone
from tests.mounts.other_kernels import KERNEL
from tests.mounts.test_repeated_mounts import resources_of
from tests.processes import state_of
from tests.tiers import fast_first
from tests.unprivileged_user import needs_root
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.fuse, needs_root]

DYING = (sys.executable, "-m", "tests.mounts.dying_daemon")

VICTIMS = ("server", "supervisor", "worker", "supervisor,server", "server,supervisor,worker")


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test leaves no mount, process, loop device or connection behind. Its images are its own,
    and no other test uses loop devices meanwhile."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def found() -> set[str]:
        return {*resources_of(tmp_path), *files_of_loop_devices()}

    # The first program of a test run starts the zygote, which stays.
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    with only_user_of_loop_devices():
        before = found()
        yield
        wait_until(lambda: not found() - before, otherwise=lambda: f"left: {found() - before}")


def zombies() -> set[int]:
    return {pid for pid in children_of(os.getpid()) if state_of(pid) == "Z"}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("moment", "victims"),
    [case for moment in STARTS for case in fast_first((moment, victims) for victims in VICTIMS)],
)
def test_a_mount_whose_processes_are_killed_while_it_starts_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, victims: str
) -> None:
    monkeypatch.setenv(MOMENT, moment)
    monkeypatch.setenv(DIES, victims)
    monkeypatch.setenv(KERNEL, "no-file-mounts" if "loop devices" in moment else "")
    at = tmp_path / "made" / "mount"
    request = request_for(source, at, "native")
    if victims == "worker":
        mount(request, program=DYING)
        assert (at / "b").read_bytes() == b"beta"
        umount(at)
    else:
        with pytest.raises(DieselError):
            mount(request, program=DYING)
    assert str(at) not in Path("/proc/self/mountinfo").read_text()
    assert not at.parent.exists()
    with mounting(source, tmp_path / "mount", "native") as mounted:
        assert (mounted.at / "b").read_bytes() == b"beta"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("victims", [*VICTIMS, "server,worker"])
def test_one_umount_removes_a_mount_that_was_killed(
    source: Path, tmp_path: Path, victims: str
) -> None:
    """Its tree looks alive."""
    at = tmp_path / "mount"
    mount(request_for(source, at, "native"), program=PROGRAM)
    pids = Processes.of(at)
    for name in victims.split(","):
        with suppress(ProcessLookupError):  # the end of an earlier one may have ended it
            os.kill(getattr(pids, name), signal.SIGKILL)
    if victims == "worker":
        assert is_alive(str(at))
    else:
        pids.wait_for_their_end()
        assert not is_alive(str(at))
        with pytest.raises(DieselError, match="Transport endpoint is not connected"):
            stats(at)
        assert os.listdir(at) == ["a", "b"]
        assert mounted_at(str(at)) is not None
    umount(at)
    assert str(at) not in Path("/proc/self/mountinfo").read_text()
    assert all(map(is_gone, pids))


@pytest.mark.usefixtures("nothing_left")
def test_a_mount_that_does_not_answer_is_named_and_ended_by_force(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mountpoint, "ANSWER_DEADLINE_S", 0.5)
    monkeypatch.setattr(mountpoint, "ANSWER_NOTICE_S", 0.1)
    before = zombies()  # mounts of other tests
    with mounting(source, tmp_path / "mount", "native") as mounted:
        server = Processes.of(mounted.at).server
        os.kill(server, signal.SIGSTOP)
        for call in (
            lambda: mount(request_for(source, mounted.at, "native"), program=PROGRAM),
            lambda: stats(mounted.at),
        ):
            with pytest.raises(DeadlineError, match="does not answer"):
                call()
            assert "has not answered yet" in caplog.text
            caplog.clear()
        wait_until(lambda: zombies() <= before, otherwise=lambda: "a probe was not waited for")
        assert os.listdir(mounted.at) == ["a", "b"]
        umount(mounted.at, force=True)
        assert str(mounted.at) not in Path("/proc/self/mountinfo").read_text()
        assert is_gone(server)


@pytest.mark.usefixtures("nothing_left")
def test_a_mount_that_is_not_ready_in_time_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time may end at any moment of its start."""
    at = tmp_path / "mount"
    for deadline_s in (0.01, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.7):
        monkeypatch.setattr(launcher, "START_DEADLINE_S", deadline_s)
        request = request_for(source, at, "native")
        try:
            mount(request, program=PROGRAM)
        except DeadlineError:
            assert mounted_at(str(at)) is None
            assert not at.exists()
        else:
            umount(at)
        log = log_path(request)
        assert not log.exists() or " ERROR " not in log.read_text()


@pytest.mark.usefixtures("nothing_left")
def test_a_mount_whose_supervisor_was_killed_stays_there_and_answers_with_errors(
    source: Path, tmp_path: Path
) -> None:
    """Also if a heartbeat of the server comes before the signal of its supervisor's death: readers
    must not find the empty folder below the mount. Four mounts, since chance decides which is
    first."""
    places = [tmp_path / f"mount{number}" for number in range(4)]
    found = []
    for at in places:
        mount(request_for(source, at, "native"), program=PROGRAM)
        found.append(Processes.of(at))
    for each in found:
        os.kill(each.server, signal.SIGSTOP)
    time.sleep(BEAT_S)
    for each in found:
        os.kill(each.supervisor, signal.SIGKILL)
        os.kill(each.server, signal.SIGCONT)
    for at, each in zip(places, found, strict=True):
        each.wait_for_their_end()
        assert mounted_at(str(at)) is not None
        assert not is_alive(str(at))
        umount(at)


def test_many_mounts_side_by_side(source: Path, tmp_path: Path) -> None:
    places = [tmp_path / f"mount{number}" for number in range(10)]
    pids = []
    for at in places:
        mount(request_for(source, at, "native"), program=PROGRAM)
        pids.append(figures(stats(at))["pid"])
    devices = {found.device for at in places if (found := mounted_at(str(at)))}
    assert len(devices) == 10
    for pid in pids[::3]:
        os.kill(pid, signal.SIGKILL)
    for number, at in enumerate(places):
        if number % 3:
            assert (at / "a").read_bytes() == b"alpha" * 1000
            assert stats(at)["pid"] == pids[number]
        else:
            wait_until(lambda at=at: not is_alive(str(at)))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
    for pid, at in zip(pids, places, strict=True):
        umount(at)
        assert ends_within(pid, PATIENCE_S)
