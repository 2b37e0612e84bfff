"""Where a dataset can be mounted, with which options, and by ordinary users."""

import json
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diesel_fs.errors import DieselError, PermissionDenied, UsageError
from diesel_fs.mounts import MountRequest, launcher, mount, umount
from diesel_fs.mounts.mountpoint import is_alive, mounted_at
from diesel_fs.mounts.sessions.session import mount_options
from diesel_fs.peers.options import TaskOptions
from diesel_fs.settings import state_folder
from tests.mounts.conftest import PROGRAM, mounting, request_for
from tests.rows import each_row
from tests.unprivileged_user import USER, as_user, module_path, needs_root, user_python

pytestmark = pytest.mark.fuse


def refused(request: MountRequest) -> DieselError:
    """The error of a mount that must fail."""
    with pytest.raises(DieselError) as raised:
        mount(request, program=PROGRAM)
    assert mounted_at(request.mountpoint) is None
    return raised.value


def test_H20_folders_that_cannot_be_mount_points(source: Path, tmp_path: Path) -> None:
    """A mount point is an empty folder that neither lies in the store or the cache nor holds it."""
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
def test_H20_a_mount_point_may_have_any_name(
    source: Path, tmp_path: Path, session: str, name: str
) -> None:
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


def test_entries_have_the_owner_and_umask_that_were_asked_for(
    source: Path, tmp_path: Path, session: str
) -> None:
    """All entries have the owner that was asked for, and modes without the umask; links have
    0777."""
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


# Ordinary users -------------------------------------------------------------------------------


AS_USER = """if True:
    import os, sys, time
    from pathlib import Path
    from diesel_fs.errors import BusyError, DieselError
    from diesel_fs.mounts import mount, stats, umount
    from diesel_fs.mounts.processes import ends_within
    from tests.mounts.conftest import request_for
    place = Path(sys.argv[1])
    request = request_for(place / "source", place / "mount", sys.argv[2], policy="oneshot")
    mount(request, program=(sys.executable, "-m", "tests.mounts.folder_daemon"))
    found = stats(place / "mount")
    assert (place / "mount" / "file").read_bytes() == b"content"
    assert os.stat(place / "mount" / "file").st_uid == os.getuid()
    print("mounted", flush=True)
    sys.stdin.readline()
    with open(place / "mount" / "file"):
        try:
            umount(place / "mount")
        except BusyError as error:
            assert f"held by processes {os.getpid()};" in str(error)
        else:
            raise AssertionError("unmounted what is in use")
    umount(place / "mount")
    assert ends_within(found["pid"], 0)
    for _ in range(3):  # the worker, which opens folders of the mount, pushes meanwhile
        mount(request, program=(sys.executable, "-m", "tests.mounts.folder_daemon"))
        found = stats(place / "mount")
        assert (place / "mount" / "many" / "7").read_bytes() == b"7"
        umount(place / "mount")
        assert ends_within(found["pid"], 0)
        assert ends_within(found["server_pid"], 0)
    mount(request, program=(sys.executable, "-m", "tests.mounts.folder_daemon"))
    assert (place / "mount" / "many" / "7").read_bytes() == b"7"
    deadline_s = time.monotonic() + 10
    while sys.argv[2] == "kernel":
        if stats(place / "mount")["residency"].get("pushed_entries", 0) > 100:
            break
        assert time.monotonic() < deadline_s, "an ordinary user's worker pushes nothing"
        time.sleep(0.1)
    os.kill(stats(place / "mount")["pid"], 15)
    print("ended", ends_within(found["pid"], 2.0), flush=True)
"""


@needs_root
@pytest.mark.only_session("kernel", "pyfuse3")  # an ordinary user has no native mounts
@pytest.mark.usefixtures("device_for_all")
def test_an_ordinary_user_mounts_and_others_stay_out(open_place: Path, session: str) -> None:
    """By fusermount3. H18: without allow_other all other users get EACCES, root too."""
    if shutil.which("fusermount3") is None or shutil.which("setpriv") is None:
        pytest.skip("no fusermount3 or setpriv")
    shutil.rmtree(open_place / "source", ignore_errors=True)
    (open_place / "source" / "many").mkdir(parents=True)
    (open_place / "source" / "file").write_bytes(b"content")
    for number in range(500):
        (open_place / "source" / "many" / str(number)).write_text(str(number))
    (open_place / "mount").mkdir(exist_ok=True)
    os.chown(open_place / "mount", USER, USER)
    process = started_by_user(AS_USER, open_place, session)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "mounted\n", process.communicate(timeout=20)[1]
        with pytest.raises(PermissionError):
            (open_place / "mount" / "file").read_bytes()
        assert is_alive(str(open_place / "mount")), "a living mount of another user is not dead"
        output, complaint = process.communicate("go\n", timeout=30)
        assert (output, process.returncode) == ("ended True\n", 0), complaint
        assert mounted_at(str(open_place / "mount")) is None
    finally:
        process.kill()
        process.communicate()
        while mounted_at(str(open_place / "mount")) is not None:
            subprocess.run(["umount", "-l", open_place / "mount"], check=True)


def started_by_user(script: str, place: Path, session: str) -> "subprocess.Popen[str]":
    """Runs a script as an ordinary user, whose home is `place`."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": module_path(),
        "HOME": str(place),
        "XDG_STATE_HOME": str(place / "state"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        [*as_user(), user_python(), "-c", script, str(place), session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment,
    )


FOLLOWING_AS_USER = """if True:
    import os, sys
    from pathlib import Path
    from tests.mounts.observed import mounted, noise
    from tests.mounts.versions.followed_dataset import FILES, begin, tried
    from tests.waiting import wait_until
    place = Path(sys.argv[1]) / f"following-{sys.argv[2]}"
    place.mkdir()
    ds = begin(place, sys.argv[2])
    with mounted(ds.request):
        for name, content in FILES.items():
            assert (ds.at / name).read_bytes() == content
        held = os.open(ds.at / "changed", os.O_RDONLY)
        os.chdir(ds.at / "left")
        ds.change({"0new": b"0", "changed": noise(90), "kind/in": b"k"}, gone=("left", "kind"))
        assert os.pread(held, 10**6, 0) == FILES["changed"]
        assert Path("inner/f").read_bytes() == FILES["left/inner/f"]
        assert (ds.at / "changed").read_bytes() == noise(90)
        assert sorted(os.listdir(ds.at)) == ["0new", "changed", "d", "gone", "kept", "kind", "z"]
        def pages_stay(number):
            assert (ds.at / "kept").read_bytes() == FILES["kept"]
            ds.change({f"0newer{number}": b"0"})
            with ds.served_by_page_cache():
                assert (ds.at / "kept").read_bytes() == FILES["kept"]
        tried(pages_stay)
        os.chdir("/")
        os.close(held)
        wait_until(lambda: ds.follow()["retired_versions"] == [])
    print("followed")
"""


@needs_root
@pytest.mark.only_session("kernel", "pyfuse3")  # an ordinary user has no native mounts
@pytest.mark.usefixtures("device_for_all")
def test_an_ordinary_users_mount_follows(open_place: Path, session: str) -> None:
    """By fusermount3. An ordinary user can notify the kernel, too."""
    if shutil.which("fusermount3") is None or shutil.which("setpriv") is None:
        pytest.skip("no fusermount3 or setpriv")
    process = started_by_user(FOLLOWING_AS_USER, open_place, session)
    try:
        output, complaint = process.communicate(timeout=60)
        assert (output, process.returncode) == ("followed\n", 0), complaint
    finally:
        process.kill()
        process.communicate()
        at = open_place / f"following-{session}/mount"
        while mounted_at(str(at)) is not None:
            subprocess.run(["umount", "-l", at], check=True)


def test_H18_allow_other_needs_user_allow_other(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of an ordinary user without user_allow_other says what to do."""
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(launcher, "_users_may_allow_other", lambda: False)
    (tmp_path / "mount").mkdir()
    with pytest.raises(PermissionDenied, match=r"write user_allow_other into /etc/fuse\.conf"):
        mount(request_for(source, tmp_path / "mount", allow_other=True), program=PROGRAM)


@needs_root
def test_allow_other_lets_others_in(source: Path, tmp_path: Path, session: str) -> None:
    """Other users read what the modes allow, and no more."""
    (source / "private").write_bytes(b"p")
    (source / "private").chmod(0o600)
    with (
        tempfile.TemporaryDirectory() as folder,
        mounting(source, Path(folder) / "m", session, allow_other=True) as mounted,
    ):
        os.chmod(folder, 0o711)  # noqa: S103  # so that other users can get there
        command = [*as_user(), "cat"]
        read = subprocess.run([*command, mounted.at / "b"], check=True, capture_output=True)
        assert read.stdout == b"beta"
        private = subprocess.run(
            [*command, mounted.at / "private"], check=False, capture_output=True
        )
        assert private.returncode != 0
        assert b"Permission denied" in private.stderr


@pytest.mark.only_session("kernel")
def test_the_log_is_in_the_users_state_folder_unless_another_is_named(
    source: Path, tmp_path: Path, session: str
) -> None:
    """It is one file for each mount point, readable by its owner alone."""
    with mounting(source, tmp_path / "mount", session) as mounted:
        log = launcher.log_path(request_for(source, mounted.at))
        assert log.parent == state_folder()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert "is mounted on" in log.read_text()
    own = tmp_path / "own.log"
    with mounting(source, tmp_path / "mount", session, log_file=str(own)):
        assert "is mounted on" in own.read_text()


def test_the_reason_of_a_failed_mount_is_once_in_the_error_and_once_in_the_log(
    source: Path, tmp_path: Path
) -> None:
    at, log = tmp_path / "mount", tmp_path / "own.log"
    at.mkdir()
    found = refused(replace(request_for(source, at, "none such"), log_file=str(log)))
    assert str(found).count("there is no session 'none such'") == 1
    assert log.read_text().count("there is no session 'none such'") == 1
