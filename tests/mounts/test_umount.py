"""`umount` of other users' mounts, of mounts in several namespaces, of daemons that do not end."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diesel_fs.errors import DeadlineError
from diesel_fs.mounts import launcher, umount
from diesel_fs.mounts.mountpoint import mounted_at
from diesel_fs.mounts.processes import ends_within
from tests.mounts.conftest import mounting
from tests.unprivileged_user import USER, as_user, module_path, needs_root, user_python
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

CLI = Path(__file__).parents[2] / "cli"


@needs_root
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["umount", "--force"], marks=pytest.mark.only_session("kernel")),
        pytest.param(["umount", "--lazy"], marks=pytest.mark.only_session("pyfuse3")),
        pytest.param(["umount"], marks=pytest.mark.only_session("native")),
    ],
)
def test_another_users_mount_is_refused_and_lives(
    source: Path, open_place: Path, session: str, command: list[str]
) -> None:
    """Each way to unmount is exit 12, and names the user who mounted it."""
    with mounting(source, open_place / "mount", session) as mounted:
        run = as_other_user("dlcmd", *command, mounted.at)
        assert run.returncode == 12, run
        assert f"{mounted.at} was mounted by user 0" in run.stderr
        assert "is unmounted" not in run.stdout
        assert (mounted.at / "b").read_bytes() == b"beta"
        assert not ends_within(mounted.pid, 0)


@needs_root
def test_statistics_of_another_users_mount_are_not_allowed(
    source: Path, open_place: Path, session: str
) -> None:
    """`dlcmd stats` is exit 12 for a mount without --allow-other."""
    with mounting(source, open_place / "mount", session) as mounted:
        run = as_other_user("dlcmd", "stats", mounted.at)
        assert run.returncode == 12, run
        assert "another user has mounted it" in run.stderr


def as_other_user(module: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs one of our programs as an ordinary user."""
    return subprocess.run(
        [*as_user(), user_python(), "-m", module, *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{CLI}:{module_path()}", "HOME": "/"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


IN_ANOTHER = """if True:
    import sys
    print("there", flush=True)
    sys.stdin.readline()
    print(open(sys.argv[1] + "/b").read(), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def another_namespace(at: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in a mount namespace of its own, as in a container, which has the mount, too."""
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", sys.executable, "-c", IN_ANOTHER, at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


@needs_root
@pytest.mark.parametrize("lazy", [False, True])
def test_a_mount_that_another_namespace_has_too_is_served_there_further(
    source: Path, tmp_path: Path, session: str, caplog: pytest.LogCaptureFixture, lazy: bool
) -> None:
    """It is unmounted here, with a warning; the daemon ends with the other namespace."""
    with (
        mounting(source, tmp_path / "mount", session) as mounted,
        another_namespace(mounted.at) as process,
    ):
        with caplog.at_level(logging.WARNING, "diesel.mount"):
            umount(mounted.at, lazy=lazy)
        assert mounted_at(str(mounted.at)) is None
        assert f"on {mounted.at}, as process {process.pid} sees it" in caplog.text
        assert "kill" not in caplog.text
        assert not ends_within(mounted.pid, 0)
        assert process.stdin is not None
        assert process.stdout is not None
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "beta\n"
        process.kill()
        wait_until(lambda: ends_within(mounted.pid, 0))


@needs_root
def test_force_ends_a_mount_for_all_namespaces(source: Path, tmp_path: Path, session: str) -> None:
    with (
        mounting(source, tmp_path / "mount", session) as mounted,
        another_namespace(mounted.at),
    ):
        umount(mounted.at, force=True)
        assert mounted_at(str(mounted.at)) is None
        assert ends_within(mounted.pid, 0)


@pytest.mark.only_session("native")
def test_a_daemon_that_neither_ends_nor_does_anything_is_named(
    source: Path, tmp_path: Path, session: str
) -> None:
    """The supervisor is stopped, so it cannot end, although its mount is unmounted."""
    with mounting(source, tmp_path / "mount", session) as mounted:
        os.kill(mounted.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match=f"process {mounted.pid}.*has not ended"):
                umount(mounted.at, patience=launcher.Patience(idle_s=0.3))
        finally:
            os.kill(mounted.pid, signal.SIGCONT)
        wait_until(lambda: ends_within(mounted.pid, 0))


FUSERMOUNT = """#!/bin/sh
tr '\\0' '\\n' < /proc/$$/environ >> "${0%/*}/seen"
exec REAL "$@"
"""

MOUNTING = """if True:
    import os, sys
    from pathlib import Path
    from diesel_fs.mounts import mount, umount
    from tests.mounts.conftest import request_for
    place = Path(sys.argv[1])
    request = request_for(place / "source", place / "mount", sys.argv[2])
    mount(request, program=(sys.executable, "-m", "tests.mounts.folder_daemon"))
    assert (place / "mount" / "file").read_bytes() == b"content"
    umount(place / "mount")
"""


@needs_root
@pytest.mark.only_session("kernel", "pyfuse3")  # an ordinary user has no native mounts
@pytest.mark.usefixtures("device_for_all")
def test_fusermount3_gets_no_secret(open_place: Path, session: str) -> None:
    """It gets only the environment variables that it needs, since a secret may have any name."""
    real = subprocess.run(["which", "fusermount3"], check=True, capture_output=True, text=True)
    between = open_place / "bin"
    between.mkdir()
    (between / "fusermount3").write_text(FUSERMOUNT.replace("REAL", real.stdout.strip()))
    (between / "fusermount3").chmod(0o755)
    between.chmod(0o777)
    (open_place / "source").mkdir()
    (open_place / "source" / "file").write_bytes(b"content")
    (open_place / "mount").mkdir()
    os.chown(open_place / "mount", USER, USER)
    secrets = (
        "AWS_SECRET_ACCESS_KEY",
        "DIESEL_KEY",
        "DIESEL_TASK_KEY",
        "HF_TOKEN",
        "REDISCLI_AUTH",
    )
    run = subprocess.run(
        [*as_user(), user_python(), "-c", MOUNTING, str(open_place), session],
        env={
            **dict.fromkeys(secrets, "hush"),
            "PATH": f"{between}:{os.environ['PATH']}",
            "PYTHONPATH": module_path(),
            "HOME": str(open_place),
        },
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seen = (between / "seen").read_text()
    assert f"PATH={between}" in seen
    assert "hush" not in seen
