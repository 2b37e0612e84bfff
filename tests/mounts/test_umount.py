"""`umount` of other users' mounts, of mounts in several namespaces, of daemons that do not end."""

import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest

from diesel_fs.errors import DeadlineError
from diesel_fs.mounts import launcher, stats, umount
from diesel_fs.mounts.daemon.prefetch_worker import run_prefetch_worker
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at, unmount
from diesel_fs.mounts.mountpoints.processes import (
    children_of,
    descendants_of,
    ends_within,
    processor_ticks,
)
from diesel_fs.mounts.source import MountSource
from tests.mounts.conftest import mounting, request_for
from tests.mounts.folder_daemon import WORKS_UNTIL
from tests.mounts.folder_dataset import HANG
from tests.mounts.observed import Program, log_of, mounts_below, with_our_modules
from tests.own_mounts import own_mounts
from tests.unprivileged_user import as_user, module_path, needs_root, user_python
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.fuse

CLI = Path(__file__).parents[2] / "cli"


def by_another_user(*arguments: object) -> "subprocess.CompletedProcess[str]":
    environment = with_our_modules(Path("/"), PYTHONPATH=f"{CLI}:{module_path()}")
    command = [*environment, *as_user(), user_python(), "-m", "dlcmd", *map(str, arguments)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)


@needs_root
@pytest.mark.parametrize("option", [[], ["--force"], ["--lazy"]])
def test_another_users_mount_is_refused_and_lives(
    source: Path, open_place: Path, session: str, option: list[str]
) -> None:
    with mounting(source, open_place / "mount", session) as mounted:
        run = by_another_user("umount", *option, mounted.at)
        assert run.returncode == 12, run
        assert f"{mounted.at} was mounted by user 0" in run.stderr
        assert "is unmounted" not in run.stdout
        assert (mounted.at / "b").read_bytes() == b"beta"
        assert not ends_within(mounted.pid, 0)
        run = by_another_user("stats", mounted.at)
        assert run.returncode == 12, run
        assert "another user has mounted it" in run.stderr


READS = """if True:
    import sys
    print("there", flush=True)
    sys.stdin.readline()
    print(open(sys.argv[1] + "/b").read(), flush=True)
    sys.stdin.readline()
"""


def in_another_namespace(at: Path) -> Program:
    """A process in a mount namespace of its own, as in a container, which has the mount, too."""
    return Program(READS, at, by=own_mounts("--propagation=private", keep=at.parent))


@needs_root
@pytest.mark.parametrize("way", ["umount", "lazy", "force"])
def test_a_mount_stays_served_in_another_namespace(
    source: Path, tmp_path: Path, session: str, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    with (
        mounting(source, tmp_path / "mount", session) as mounted,
        in_another_namespace(mounted.at) as other,
        caplog.at_level(logging.WARNING, "diesel.mount"),
    ):
        umount(mounted.at, force=way == "force", lazy=way == "lazy")
        assert mounted_at(str(mounted.at)) is None
        if way != "force":
            assert f"on {mounted.at}, as process {other.pid} sees it" in caplog.text
            assert "kill" not in caplog.text
            assert not ends_within(mounted.pid, 0)
            assert other.ask("read") == "beta"
            os.kill(other.pid, signal.SIGKILL)
            wait_until(lambda: ends_within(mounted.pid, 0))
        assert ends_within(mounted.pid, 0)


@needs_root
@pytest.mark.parametrize("way", ["umount", "force", "lazy", "signal"])
def test_a_mount_that_was_moved_is_unmounted_at_its_new_place(
    source: Path, tmp_path: Path, session: str, way: str
) -> None:
    with mounts_to_be_moved(tmp_path) as place, mounting(source, place / "old", session) as mounted:
        at = place / "new"
        at.mkdir()
        subprocess.run(["mount", "--move", mounted.at, at], check=True)
        assert mounted_at(str(mounted.at)) is None
        assert stats(at)["pid"] == mounted.pid
        assert (at / "b").read_bytes() == b"beta"
        with mounting(source, mounted.at, session) as second:
            if way == "signal":
                os.kill(mounted.pid, signal.SIGTERM)
                assert ends_within(mounted.pid, PATIENCE_S)
            else:
                umount(at, force=way == "force", lazy=way == "lazy")
                assert ends_within(mounted.pid, 0)
            assert not mounts_below(at)
            assert (second.at / "b").read_bytes() == b"beta"


@needs_root
@pytest.mark.only_session("native")
def test_a_process_that_the_mount_starts_meanwhile_is_no_user_of_it(
    source: Path, tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is not there yet when `umount` begins, and has the mount open then."""
    with mounting(source, tmp_path / "mount", session) as mounted:
        own = [*children_of(mounted.pid)]
        found_first, opened = [False], [own, own]
        known = descendants_of

        def of_later(pid: int) -> list[int]:
            before, found_first[0] = found_first[0], True
            return known(pid) if before else []

        monkeypatch.setattr(launcher, "descendants_of", of_later)
        monkeypatch.setattr(launcher, "openers_of", lambda _: opened.pop() if opened else [])
        umount(mounted.at)
        assert not opened
        assert mounted_at(str(mounted.at)) is None


@contextmanager
def mounts_to_be_moved(folder: Path) -> Iterator[Path]:
    place = folder / "private"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    try:
        subprocess.run(["mount", "--make-private", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", "-R", "-l", place], check=True)


@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_a_worker_that_keeps_an_unmounted_mount_is_ended_without_an_error(
    source: Path, tmp_path: Path, session: str
) -> None:
    (source / HANG).write_bytes(b"content")
    with mounting(source, tmp_path / "mount", session) as mounted:
        assert len(children_of(mounted.pid)) == 2
        with open(mounted.at / "b", "rb") as file:
            file.read()  # a miss, so the worker fetches the whole chunk
            time.sleep(0.5)
            unmount(str(mounted.at), lazy=True)
            wait_until(lambda: len(children_of(mounted.pid)) == 1)  # then only the server is left
        assert ends_within(mounted.pid, PATIENCE_S)
        assert "is mounted on" in log_of(mounted)
        assert " ERROR " not in log_of(mounted)


def test_a_worker_may_be_ended_before_it_has_begun(source: Path, tmp_path: Path) -> None:
    """A signal may come before the mount is ready."""
    server, worker = socket.socketpair()
    with server, worker, open(os.devnull, "rb") as connection:
        socket.send_fds(server, [b"+"], [connection.fileno()])
        server.sendall(msgpack.packb({"do": "end"}) + msgpack.packb({"do": "begin"}))
        assert run_prefetch_worker(request_for(source, tmp_path), MountSource(), worker) == 0


@pytest.mark.only_session("native")
def test_an_idle_daemon_that_does_not_end_is_named(
    source: Path, tmp_path: Path, session: str
) -> None:
    """The supervisor is stopped."""
    with mounting(source, tmp_path / "mount", session) as mounted:
        os.kill(mounted.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match=f"process {mounted.pid}.*has not ended"):
                umount(mounted.at, patience=launcher.Patience(idle_s=0.3))
        finally:
            os.kill(mounted.pid, signal.SIGCONT)
        wait_until(lambda: ends_within(mounted.pid, 0))


@dataclass(frozen=True, slots=True)
class WorkClock:
    """A clock that runs while a process works, and stands still when it does not: a tenth of a
    second for each of its ticks."""

    pid: int

    def monotonic(self) -> float:
        return 0.1 * processor_ticks([self.pid])

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.mark.only_session("native")
def test_umount_waits_for_a_daemon_that_works(
    source: Path,
    tmp_path: Path,
    session: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel may be forgetting millions of files; an idle daemon would be given up. The clock
    stands still when the daemon does not run, so on a busy machine the daemon does not look idle.
    """
    released = tmp_path / "released"
    monkeypatch.setenv(WORKS_UNTIL, str(released))
    patience = launcher.Patience(idle_s=3, total_s=math.inf, log_interval_s=6, before_signal_s=0)
    with mounting(source, tmp_path / "mount", session) as mounted, ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(launcher, "time", WorkClock(mounted.pid))
        with caplog.at_level(logging.WARNING, "diesel.mount"):
            ending = thread.submit(umount, mounted.at, patience=patience)
            wait_until(
                lambda: "forgetting the files that the kernel" in caplog.text or ending.done()
            )
        try:
            assert not ending.done()
            assert mounted_at(str(mounted.at)) is None
        finally:
            released.touch()
        ending.result()
        assert ends_within(mounted.pid, 0)
