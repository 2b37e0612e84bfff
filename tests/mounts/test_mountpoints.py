"""Where a dataset can be mounted, with which options, and by ordinary users."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diesel_fs.errors import DieselError, PermissionDenied, UsageError
from diesel_fs.mounts import MountRequest, launcher, mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import is_alive, mounted_at
from diesel_fs.mounts.sessions.session import mount_options
from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.settings import state_folder
from diesel_fs.system import syscalls
from tests.mounts.conftest import PROGRAM, mounting, request_for
from tests.mounts.observed import Program, log_of, mounts_below, with_our_modules
from tests.rows import each_row
from tests.trees import write
from tests.unprivileged_user import USER, as_user, needs_root, user_python

pytestmark = pytest.mark.fuse


def refused(request: MountRequest) -> DieselError:
    with pytest.raises(DieselError) as raised:
        mount(request, program=PROGRAM)
    assert mounted_at(request.mountpoint) is None
    return raised.value


@each_row(
    ("script", "reason"),
    [
        (
            "#!/bin/sh\necho fusermount3: mount failed: Operation not permitted >&2; exit 1",
            "fusermount3: mount failed: Operation not permitted; a container needs --device",
        ),
        (
            "#!/bin/sh\necho fusermount3: too many FUSE filesystems mounted >&2; exit 1",
            "cannot mount on /mnt: fusermount3: too many FUSE filesystems mounted",
        ),
        ("#!/bin/sh\nexit 0", "fusermount3 gave no descriptor"),
        ("", "cannot start fusermount3"),
    ],
)
def test_H24_a_refusal_by_fusermount3_is_an_error_with_its_reason(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fusermount3").write_text(script)
    (tmp_path / "fusermount3").chmod(0o755 if script else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionDenied) as raised:
        syscalls.mount_fuse("/mnt", ["ro"])
    assert reason in str(raised.value)


def test_H20_folders_that_cannot_be_mount_points(source: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    assert type(refused(request_for(source, full))) is UsageError
    assert type(refused(request_for(source, full / "something"))) is UsageError
    assert type(refused(request_for(source, full / "something/below"))) is UsageError
    inside = source / "inside"
    inside.mkdir()
    assert "lie in one another" in str(refused(request_for(source, inside)))
    link = tmp_path / "link"
    link.symlink_to(inside)
    assert "lie in one another" in str(refused(request_for(source, link)))
    outside = tmp_path / "outside"
    outside.mkdir()
    assert "lie in one another" in str(refused(request_for(outside / "repository", outside)))
    for cache in (outside, outside / "cache", outside.parent):
        request = replace(
            request_for(source, outside), task_options=TaskOptions(task="t", cache_dir=str(cache))
        )
        assert "lie in one another" in str(refused(request))
        assert not any(outside.iterdir())


@pytest.mark.parametrize(
    "name", ["a,b", "with space", "quo'te\"", "new\nline", "-o allow_other", "é"]
)
def test_H20_a_place_of_any_name(source: Path, tmp_path: Path, session: str, name: str) -> None:
    """No part of a path becomes an option."""
    with mounting(source, tmp_path / name, session) as mounted:
        found = mounted_at(str(mounted.at))
        assert found is not None
        assert (found.source, found.path) == ("folder@7", str(tmp_path / name))
        assert (mounted.at / "b").read_bytes() == b"beta"
        umount(mounted.at)
    assert mounted_at(str(tmp_path / name)) is None


@pytest.mark.only_session("kernel")
def test_H20_a_mount_point_may_be_a_relative_path_or_a_link(
    source: Path, tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    mount(replace(request_for(source, tmp_path, session), mountpoint="link"), program=PROGRAM)
    assert (tmp_path / "real" / "b").read_bytes() == b"beta"
    umount("link")
    assert mounted_at(str(tmp_path / "real")) is None


@each_row("dataset", ["a,allow_other", "a\\,b", "x y", "-o", "../x", ""])
def test_H20_S16_a_dataset_name_becomes_no_option(dataset: str) -> None:
    with pytest.raises(UsageError):
        mount_options(dataset, 1)


def test_the_options_are_a_fixed_list() -> None:
    options = mount_options("name", 3, allow_other=True)
    assert sorted(options) == [
        *("allow_other", "default_permissions", "fsname=name@3", "noatime", "nodev", "nosuid"),
        *("ro", "subtype=diesel"),
    ]


def test_the_requested_owner_and_umask(source: Path, tmp_path: Path, session: str) -> None:
    (source / "folder").mkdir(mode=0o755)
    (source / "link").symlink_to("a")
    options = {"uid": 12, "gid": 34, "umask": 0o027, "allow_other": True}
    with mounting(source, tmp_path / "mount", session, **options) as mounted:
        found = {
            path: os.lstat(mounted.at / path) for path in ("a", "folder", "link", "", ".diesel")
        }
        assert {(each.st_uid, each.st_gid) for each in found.values()} == {(12, 34)}
        assert stat.S_IMODE(found["a"].st_mode) == 0o640
        assert stat.S_IMODE(found["folder"].st_mode) == 0o750
        assert stat.S_IMODE(found["link"].st_mode) == 0o777
        assert {path: os.lstat(mounted.at / path) for path in os.listdir(mounted.at)} == {
            entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(mounted.at)
        }


def test_a_request_survives_its_way_as_json() -> None:
    request = MountRequest("file:///x", "d", os.fsdecode(b"/m/\xff"), umask=0o22, offline=True)
    assert MountRequest.from_json(request.to_json()) == request
    options = TaskOptions(task="t", peers=("a:1", "b:2"), rank=0)
    with_task = replace(request, task_options=options)
    assert MountRequest.from_json(with_task.to_json()).task_options == options
    incomplete = json.dumps({**asdict(request), "task_options": {"task": "t"}}).encode()
    for text in (b"", b"[]", b"{}", b"nonsense", json.dumps({"url": 1}).encode(), incomplete):
        with pytest.raises(UsageError):
            MountRequest.from_json(text)


AS_USER = """if True:
    import os, sys
    from pathlib import Path
    from diesel_fs.errors import BusyError
    from diesel_fs.mounts import mount, stats, umount
    from diesel_fs.mounts.mountpoints.processes import ends_within
    from tests.mounts.conftest import PROGRAM, request_for
    from tests.mounts.observed import figures
    from tests.waiting import wait_until
    at, session = Path(sys.argv[1]) / "mount", sys.argv[2]
    request = request_for(at.with_name("source"), at, session, policy="oneshot")
    mount(request, program=PROGRAM)
    pid = figures(stats(at))["pid"]
    assert (at / "file").read_bytes() == b"content"
    assert os.stat(at / "file").st_uid == os.getuid()
    print("mounted", flush=True)
    sys.stdin.readline()
    with open(at / "file"):
        try:
            umount(at)
        except BusyError as error:
            assert f"held by processes {os.getpid()};" in str(error)
        else:
            raise AssertionError("unmounted what is in use")
    umount(at)
    assert ends_within(pid, 0)
    for _ in range(3):  # the worker, which opens folders of the mount, pushes meanwhile
        mount(request, program=PROGRAM)
        found = figures(stats(at))
        assert (at / "many" / "7").read_bytes() == b"7"
        umount(at)
        assert ends_within(found["pid"], 0)
        assert ends_within(found["server_pid"], 0)
    mount(request, program=PROGRAM)
    assert (at / "many" / "7").read_bytes() == b"7"
    if session == "kernel":
        wait_until(lambda: figures(stats(at), "residency").get("pushed_entries", 0) > 100)
    pid = figures(stats(at))["pid"]
    os.kill(pid, 15)
    print("ended", ends_within(pid, 2.0), flush=True)
"""

FUSERMOUNT = """#!/bin/sh
tr '\\0' '\\n' < /proc/$$/environ >> "${0%/*}/seen"
exec REAL "$@"
"""

SECRETS = "AWS_SECRET_ACCESS_KEY DIESEL_KEY DIESEL_TASK_KEY HF_TOKEN REDISCLI_AUTH".split()


@pytest.fixture
def by_user(open_place: Path, device_for_all: None) -> Iterator[list[str]]:
    """The words before a program of an ordinary user, whose environment has secrets. Each
    fusermount3 that it starts writes its own environment to `bin/seen`."""
    real = shutil.which("fusermount3")
    if real is None or shutil.which("setpriv") is None:
        pytest.skip("no fusermount3 or setpriv")
    between = open_place / "bin"
    between.mkdir()
    between.chmod(0o777)
    (between / "fusermount3").write_text(FUSERMOUNT.replace("REAL", real))
    (between / "fusermount3").chmod(0o755)
    secrets = dict.fromkeys(SECRETS, "hush")
    path = f"{between}:{os.environ['PATH']}"
    yield [*with_our_modules(open_place, **secrets, PATH=path), *as_user()]
    for at in mounts_below(open_place):
        subprocess.run(["umount", "-l", at], check=True)


@needs_root
@pytest.mark.only_session("kernel", "pyfuse3")  # an ordinary user has no native mounts
def test_other_users_stay_out_of_a_mount(
    by_user: list[str], open_place: Path, session: str
) -> None:
    """H18: without allow_other all other users get EACCES, root too. fusermount3 gets only the
    environment variables that it needs, since a secret may have any name."""
    at = open_place / "mount"
    write(open_place / "source", {f"many/{number}": b"%d" % number for number in range(500)})
    write(open_place / "source", {"file": b"content"})
    with Program(AS_USER, open_place, session, by=by_user, python=user_python()) as user:
        assert user.first_line == "mounted", user.end()
        with pytest.raises(PermissionError):
            (at / "file").read_bytes()
        assert is_alive(str(at)), "a living mount of another user is not dead"
        assert user.ask("go") == "ended True", user.end()
        assert mounted_at(str(at)) is None
    seen = (open_place / "bin" / "seen").read_text()
    assert f"PATH={open_place}/bin" in seen
    assert "hush" not in seen


PUSHING_AS_USER = """if True:
    import os, signal, subprocess, sys
    from pathlib import Path
    from pytest import MonkeyPatch, raises
    from diesel_fs.errors import DeadlineError
    from diesel_fs.mounts import MountRequest, stats, umount
    from diesel_fs.mounts.launcher import Patience
    from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
    from diesel_fs.mounts.mountpoints.processes import free_killed, killed_servants_of
    from diesel_fs.system import syscalls
    from tests.mounts.observed import Processes, figures, is_gone, mounted, noise, put, state_of
    from tests.waiting import PATIENCE_S, wait_until
    def stop(pid):
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T")
    def forbidden(_):
        raise PermissionError("as by Yama, for a process of another parent")
    at, url = Path(sys.argv[1]) / "mount", "file://" + sys.argv[1] + "/repository"
    out = subprocess.DEVNULL
    names = [f"{chunk}{number}" for chunk in "ab" for number in range(4)]
    for chunk in "ab":
        put(url, {name: noise(1) for name in names if name[0] == chunk})
    with mounted(MountRequest(url, "ds", str(at), session="kernel", memory_bytes=1 << 30)):
        (at / "a0").read_bytes()
        wait_until(lambda: figures(stats(at), "residency").get("pushed_entries", 0) == 3)
        pids = Processes.of(at)  # it need not look up names any more
        stop(pids.worker)
        (at / "b0").read_bytes()  # the worker will push its neighbours,
        Processes.of(at)  # which the server has reported by now
        stop(pids.server)
        reader = subprocess.Popen(["head", "-c1", at / "b1"], stdout=out, stderr=out)
        wait_until(lambda: state_of(reader.pid) == "D")  # the kernel has the READ, the server not
        os.kill(pids.worker, signal.SIGCONT)
        wait_until(lambda: state_of(pids.worker) == "D")
        for name in sys.argv[2].split(","):
            os.kill(getattr(pids, name), signal.SIGKILL)
        if sys.argv[2] == "supervisor":
            os.kill(pids.server, signal.SIGCONT)
        elif "supervisor" in sys.argv[2]:
            with MonkeyPatch.context() as patch:
                patch.setattr(syscalls, "clone_of_process", forbidden)
                with raises(DeadlineError, match="root can end it: .*echo 1 > .*/abort"):
                    umount(at, force=True, patience=Patience(idle_s=0.3))
            assert killed_servants_of(str(at)) == [pids.worker]
            assert free_killed(pids.worker, PATIENCE_S)
        reader.wait()
        wait_until(lambda: all(map(is_gone, pids[1:])) and state_of(pids.supervisor) in "Z")
    assert mounted_at(str(at)) is None
    print("all have ended", flush=True)
"""


@needs_root
@pytest.mark.only_session("kernel")
@pytest.mark.parametrize("killed", ["server", "supervisor", "supervisor,server,worker"])
def test_H26_a_push_that_waits_for_a_lost_read_holds_no_process(
    by_user: list[str], open_place: Path, session: str, killed: str
) -> None:
    """An ordinary user may not abort connections. The worker waits in the kernel for a page of a
    READ that the server has not taken, and only the worker's end would end the connection. The
    supervisor ends it, else `umount --force`."""
    with Program(PUSHING_AS_USER, open_place, killed, by=by_user, python=user_python()) as user:
        assert user.first_line == "all have ended", user.end()


FOLLOWING_AS_USER = """if True:
    import os, sys
    from pathlib import Path
    from tests.mounts.observed import mounted, noise
    from tests.mounts.versions.followed_dataset import FILES, begin, tried
    ds = begin(Path(sys.argv[1]), sys.argv[2])
    with mounted(ds.request):
        for name, content in FILES.items():
            assert (ds.at / name).read_bytes() == content
        with open(ds.at / "changed", "rb", buffering=0) as held:
            ds.change({"0new": b"0", "changed": noise(90), "kind/in": b"k"}, gone=("left", "kind"))
            assert held.read() == FILES["changed"]
        assert (ds.at / "changed").read_bytes() == noise(90)
        assert sorted(os.listdir(ds.at)) == ["0new", "changed", "d", "gone", "kept", "kind", "z"]
        def pages_stay(number):
            assert (ds.at / "kept").read_bytes() == FILES["kept"]
            ds.change({f"0newer{number}": b"0"})
            with ds.served_by_page_cache():
                assert (ds.at / "kept").read_bytes() == FILES["kept"]
        tried(pages_stay)
        ds.wait_for_retirement()
    print("followed")
"""


@needs_root
@pytest.mark.only_session("kernel", "pyfuse3")  # an ordinary user has no native mounts
def test_a_plain_users_mount_follows(by_user: list[str], open_place: Path, session: str) -> None:
    """An ordinary user can notify the kernel, too."""
    with Program(FOLLOWING_AS_USER, open_place, session, by=by_user, python=user_python()) as user:
        assert user.first_line == "followed", user.end()


def test_H18_allow_other_needs_user_allow_other(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(launcher, "_users_may_allow_other", lambda: False)
    (tmp_path / "mount").mkdir()
    with pytest.raises(PermissionDenied, match=r"write user_allow_other into /etc/fuse\.conf"):
        mount(request_for(source, tmp_path / "mount", allow_other=True), program=PROGRAM)


@pytest.mark.only_session("kernel")
def test_the_log_is_in_the_users_state_folder(source: Path, tmp_path: Path, session: str) -> None:
    with mounting(source, tmp_path / "mount", session) as mounted:
        assert launcher.log_path(request_for(source, mounted.at)).parent == state_folder()
        assert "is mounted on" in log_of(mounted)
    own = tmp_path / "own.log"
    with mounting(source, tmp_path / "mount", session, log_file=str(own)):
        assert "is mounted on" in own.read_text()
        assert stat.S_IMODE(own.stat().st_mode) == 0o600


def test_the_reason_of_a_failed_mount_is_in_error_and_log_once(
    source: Path, tmp_path: Path
) -> None:
    at, log = tmp_path / "mount", tmp_path / "own.log"
    at.mkdir()
    found = refused(replace(request_for(source, at, "none such"), log_file=str(log)))
    assert str(found).count("there is no session 'none such'") == 1
    assert log.read_text().count("there is no session 'none such'") == 1
