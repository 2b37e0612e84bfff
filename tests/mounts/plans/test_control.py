"""The control socket of a mount: plans from other processes, and which processes may send them."""

import itertools
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from diesel_fs.errors import DieselError, PermissionDenied, UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.mounts.mountpoints.processes import children_of
from diesel_fs.mounts.plans.control import Control, drawn, explicit
from diesel_fs.settings import runtime_folder
from tests.mounts import slow_daemon
from tests.mounts.observed import count_of_reads, figures, mounted, put
from tests.mounts.plans.test_control_fuzz import HELLO
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

FILES = 600
NOBODY = 65534


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("control")
    url = (base / "store").as_uri()
    put(url, {f"{number % 7}/{number:05}": b"%d" % number * 50 for number in range(FILES)})
    request = MountRequest(
        url, "ds", str(base / "mount"), session=session, log_file=str(base / "log")
    )
    with mounted(request) as made:
        yield made


@pytest.fixture
def control(at: Path) -> Iterator[Control]:
    with Control.connect(at) as made:
        yield made


def view(at: Path) -> Snapshot:
    return Snapshot((at / ".diesel/snapshot").read_bytes())


def test_the_hello_describes_the_mount(at: Path, session: str) -> None:
    with Control.connect(at) as made:
        snapshot = view(at)
        assert made.hello["dataset"] == "ds"
        assert made.hello["entries"] == len(snapshot)
        assert (made.identity, made.version) == (str(snapshot.identity), snapshot.version)
        assert made.accepts_plans
        found = made.stats()
        assert (found["dataset"], found["session"]) == ("ds", session)


@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_a_plan_makes_files_resident(at: Path, control: Control) -> None:
    order = view(at).files()[::-1].copy()
    epochs = [explicit(epoch=0, entries=order[:400], bounds=[200, 400]), drawn(epoch=1, seed=3)]
    control.announce("mine", epochs, lag_entries=400)
    wait_until(lambda: control.resident(order).all())
    counts = [count_of_reads(at)]
    for part in range(3):
        for path in view(at).paths(order[part::97]):
            (at / os.fsdecode(path)).read_bytes()
        counts.append(count_of_reads(at))
    # The machine may take an idle page away, but not the same one each time.
    assert any(after == before for before, after in itertools.pairwise(counts))
    control.progress("mine", 300)
    assert streams(control)["mine"]["position"] == 300
    control.replace("mine", explicit(epoch=1, entries=order[:10]))
    control.extend("mine", [explicit(epoch=1, entries=order[10:20]), drawn(epoch=2, seed=3)])
    control.value(order[:5], 2.0)
    control.withdraw("mine")
    assert "mine" not in streams(control)
    with pytest.raises(UsageError, match="no stream 'mine'"):
        control.progress("mine", 0)


def streams(control: Control) -> dict[str, dict[str, int]]:
    found = cast("list[dict[str, int]]", figures(control.stats(), "residency")["streams"])
    return {str(each["name"]): each for each in found}


@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_requests_are_answered_during_a_push(
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of the store takes 8 s, so the push of 8 chunks lasts longer than an answer may."""
    url = (tmp_path / "store").as_uri()
    for chunk in range(8):
        put(url, {f"{chunk}-{number}": b"%d" % number * 9_000 for number in range(4)})
    monkeypatch.setenv(slow_daemon.STORE, "8")
    request = MountRequest(url, "ds", str(tmp_path / "mount"), session=session)
    with mounted(request, slow_daemon.PROGRAM) as folder, Control.connect(folder) as control:
        control.announce("train", [drawn(epoch=0, seed=1, kind="full")])
        time.sleep(0.5)  # the push has begun
        control.extend("train", [drawn(epoch=1, seed=1, kind="full")])
        control.progress("train", 3)
        assert not control.resident(range(1, 33)).any()
        control.withdraw("train")
        with pytest.raises(UsageError, match="no stream"):
            control.progress("train", 4)


@pytest.mark.only_session("native")
def test_long_epochs_are_split(at: Path, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diesel_fs.mounts.plans.control.ENTRIES_PER_FRAME", 100)
    files = view(at).files()
    control.announce(
        "long", [explicit(epoch=0, entries=files[:50]), explicit(epoch=1, entries=files[:450])]
    )
    control.progress("long", 449, epoch=1)
    assert streams(control)["long"]["length"] == 450
    assert len(control.resident(files)) == FILES
    control.replace("long", explicit(epoch=1, entries=files[:250]), 10)
    control.progress("long", 250, epoch=1)
    assert streams(control)["long"]["length"] == 260
    control.withdraw("long")


@pytest.mark.only_session("native")
def test_Z9_a_forked_child_has_a_connection_of_its_own(at: Path, control: Control) -> None:
    control.announce("both", [drawn(epoch=0, seed=1)])
    child = os.fork()
    if not child:
        code = 1
        try:
            for position in range(50):
                control.progress("both", position)
            code = 0
        finally:
            os._exit(code)
    for _ in range(50):
        assert "both" in streams(control)
    assert os.waitpid(child, 0)[1] == 0
    control.withdraw("both")


# which processes may send ------------------------------------------------------------------------


AS_NOBODY = f"""if True:
    import os, socket, sys
    os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)
    raw = socket.socket(socket.AF_UNIX); raw.settimeout(5)
    try:
        raw.connect(sys.argv[1])
        raw.sendall(bytes.fromhex("{HELLO.hex()}"))
        print("answered" if raw.recv(100) else "cut off")
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.only_session("native")
@pytest.mark.alone  # it opens folders that must be private
@needs_root
def test_S6_another_user_gets_no_answer(at: Path) -> None:
    """The socket has a random name, and its folder keeps other users out. If the folder did not,
    the socket would refuse them."""
    path = Path(os.readlink(at / ".diesel/control"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.parent == runtime_folder()
    folder = path.parent.stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.geteuid())
    assert len(path.name) >= 16
    ask = [sys.executable, "-I", "-S", "-c", AS_NOBODY, str(path)]
    result = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "PermissionError\n"
    opened = [path, *[each for each in path.parents if each != Path("/")]]
    modes = {each: each.stat().st_mode for each in opened}
    try:
        for each in opened:
            each.chmod(0o777)
        result = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
    finally:
        for each, mode in modes.items():
            each.chmod(stat.S_IMODE(mode))
    assert result.stdout in ("cut off\n", "ConnectionResetError\n", "BrokenPipeError\n")
    assert f"belongs to user {NOBODY}" in (at.parent / "log").read_text()


@pytest.fixture
def empty(tmp_path: Path, session: str) -> MountRequest:
    url = (tmp_path / "store").as_uri()
    put(url, {})
    return MountRequest(
        url, "ds", str(tmp_path / "mount"), session=session, log_file=str(tmp_path / "log")
    )


@pytest.mark.only_session("native")
def test_umount_removes_the_socket_and_the_next_mount_dead_ones(empty: MountRequest) -> None:
    dead, new = (runtime_folder() / name for name in ("control-dead", ".new-control-late"))
    for each in (dead, new):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(each))
    (runtime_folder() / "another").touch()
    with mounted(empty) as folder:
        path = Path(os.readlink(folder / ".diesel/control"))
        assert path.exists()
        assert not dead.exists()
        assert new.exists(), "it may be about to get its name"
        umount(folder)
    assert not path.exists()
    new.unlink()
    assert (runtime_folder() / "another").exists()


@pytest.mark.only_session("kernel")
def test_a_mount_without_a_folder_for_the_socket_works_without_it(
    empty: MountRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "diesel").mkdir(parents=True)
    (tmp_path / "run" / "diesel").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with mounted(empty) as folder:
        assert "control" not in os.listdir(folder / ".diesel")
        with pytest.raises(UsageError, match="no mount that takes plans"):
            Control.connect(folder)
        assert "others can write" in (tmp_path / "log").read_text()


def test_a_mount_that_fails_leaves_no_control_socket(
    empty: MountRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the mount point is removed after the socket was made."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mount").mkdir()
    program = (sys.executable, "-c", REMOVES_ITS_PLACE, empty.mountpoint)
    with pytest.raises(DieselError):
        mount(empty, program=program)
    assert not [*(tmp_path / "diesel").glob("*control-*")]


REMOVES_ITS_PLACE = """if True:
    import os, sys
    from diesel_fs.mounts.daemon import supervisor
    from diesel_fs.mounts.plans import control_socket
    listen = control_socket.ControlSocket.listen
    def listened(self):
        listen(self)
        os.rmdir(sys.argv[1])
    control_socket.ControlSocket.listen = listened
    sys.exit(supervisor.main(sys.argv[2:]))
"""


@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_the_worker_is_known_when_mount_returns(empty: MountRequest) -> None:
    """The worker starts slowly."""
    with mounted(empty, (sys.executable, "-c", BEGINS_LATE)) as folder:
        found = stats(folder)
        assert figures(found, "residency")["pid"] in children_of(figures(found)["pid"])


BEGINS_LATE = """if True:
    import sys, time
    from diesel_fs.mounts.daemon import supervisor
    from diesel_fs.mounts.daemon.prefetch_worker import PrefetchWorker
    switch_version = PrefetchWorker.switch_version
    def switch_late(*given):
        time.sleep(3)
        switch_version(*given)
    PrefetchWorker.switch_version = switch_late
    sys.exit(supervisor.main(sys.argv[1:]))
"""


def test_a_link_is_no_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "diesel").symlink_to("elsewhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(PermissionDenied):
        runtime_folder()
    (tmp_path / "diesel").unlink()
    (tmp_path / "diesel").mkdir(mode=0o750)
    with pytest.raises(PermissionDenied, match="others can enter"):
        runtime_folder()


@pytest.mark.only_session("kernel")
def test_a_socket_with_a_long_path_can_be_used(
    empty: MountRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with mounted(empty) as folder, Control.connect(folder) as made:
        assert made.hello["dataset"] == "ds"
