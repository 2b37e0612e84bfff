"""The control socket of a mount: plans from other processes, and which processes may send them."""

import itertools
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
import trio

from diesel_fs.client.dataset import connect
from diesel_fs.errors import (
    ConflictError,
    DieselError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.mounts.mountpoint import mounted_at
from diesel_fs.mounts.plans.control import Control, drawn, explicit
from diesel_fs.mounts.plans.control_socket import CONNECTIONS_MAX, ControlSocket
from diesel_fs.mounts.plans.control_wire import FRAME_BYTES_MAX, HELLO_BYTES_MAX, PROTOCOL
from diesel_fs.mounts.prefetch.link import WorkerLink
from diesel_fs.mounts.processes import children_of
from diesel_fs.net.messages import LENGTH
from diesel_fs.settings import runtime_folder
from tests.mounts import slow_daemon
from tests.mounts.observed import current_stats, mounted
from tests.rows import each_row

pytestmark = pytest.mark.fuse

FILES = 600
HOPE_S = 10.0
NOBODY = 65534


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[Path]:
    """A mount of a real dataset."""
    base = tmp_path_factory.mktemp("control")
    url, folder = (base / "store").as_uri(), base / "mount"
    folder.mkdir()
    with connect("ds", url, create=True) as written:
        for number in range(FILES):
            written.put(b"%d" % number * 50, f"{number % 7}/{number:05}")
    mount(MountRequest(url, "ds", str(folder), session=session, log_file=str(base / "log")))
    try:
        yield folder
    finally:
        if mounted_at(str(folder)):
            umount(folder, force=True)


@pytest.fixture
def control(at: Path) -> Iterator[Control]:
    """A connection to a mount that takes plans."""
    with Control.connect(at) as made:
        yield made


def view(at: Path) -> Snapshot:
    return Snapshot((at / ".diesel/snapshot").read_bytes())


def log_of(at: Path) -> str:
    return (at.parent / "log").read_text()


def spoken(at: Path, *frames: bytes) -> bytes:
    """Send these bytes. Returns all that comes back, up to the end of the connection."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(HOPE_S)
        raw.connect(os.readlink(at / ".diesel/control"))
        answer = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it was cut off
            for each in frames:
                raw.sendall(each)
            raw.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while received := raw.recv(65_536):
                answer += received
        return answer


def framed(value: object) -> bytes:
    body: bytes = msgpack.packb(value)
    return LENGTH.pack(len(body)) + body


HELLO = framed({"diesel_control": PROTOCOL})


def test_the_hello_says_what_the_mount_shows(at: Path, session: str) -> None:
    with Control.connect(at) as made:
        snapshot = view(at)
        assert made.hello["dataset"] == "ds"
        assert made.hello["entries"] == len(snapshot)
        assert (made.identity, made.version) == (str(snapshot.identity), snapshot.version)
        assert made.accepts_plans == (session != "pyfuse3")
        told = made.stats()
        assert (told["dataset"], told["session"]) == ("ds", session)


@pytest.mark.only_session("pyfuse3")
def test_a_mount_that_pushes_nothing_refuses_plans(at: Path) -> None:
    with (
        Control.connect(at) as made,
        pytest.raises(UsageError, match=r"pushes nothing ahead.*--session kernel"),
    ):
        made.announce("s", [drawn(epoch=0, seed=1)])


@pytest.mark.only_session("native", "kernel")
def test_a_plan_makes_files_resident(at: Path, control: Control) -> None:
    files = view(at).files()
    order = files[::-1].copy()
    epochs = [explicit(epoch=0, entries=order[:400], bounds=[200, 400]), drawn(epoch=1, seed=3)]
    control.announce("mine", epochs, lag_entries=400)
    end_s = time.monotonic() + HOPE_S
    while not control.resident(order).all() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert control.resident(order).all()
    counts = [reads(at)]
    for part in range(3):
        for path in view(at).paths(order[part::97]):
            (at / os.fsdecode(path)).read_bytes()
        counts.append(reads(at))
    # The machine may take an idle page away, not always one of these.
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


def streams(control: Control) -> dict[str, dict[str, object]]:
    """The streams of the mount, by name."""
    residency = control.stats()["residency"]
    assert isinstance(residency, dict)
    found = residency["streams"]
    assert isinstance(found, list)
    return {str(each["name"]): {**each} for each in found if isinstance(each, dict)}


def reads(at: Path) -> int:
    """How many reads of files the server answered."""
    found = current_stats(at)["reads"]
    assert isinstance(found, dict)
    return int(found["hits"]) + int(found["misses"])


@pytest.mark.only_session("native", "kernel")
def test_requests_are_answered_while_a_push_waits_for_the_store(
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of the store takes 8 s, so the push of 8 chunks lasts longer than an answer may:
    where requests wait for its end, the first one fails."""
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "mount"
    folder.mkdir()
    with connect("ds", url, create=True) as written:
        for number in range(32):
            written.put(b"%d" % number * 9_000, f"{number}")
            if number % 4 == 3:
                written.flush()
    monkeypatch.setenv(slow_daemon.RANGES, "8")
    request = MountRequest(url, "ds", str(folder), session=session)
    with mounted(request, slow_daemon.PROGRAM), Control.connect(folder) as control:
        order = drawn(epoch=0, seed=1, kind="full")
        control.announce("train", [order])
        time.sleep(0.5)  # the push has begun
        control.extend("train", [drawn(epoch=1, seed=1, kind="full")])
        control.progress("train", 3)
        assert not control.resident(range(1, 33)).any()
        control.withdraw("train")
        with pytest.raises(UsageError, match="no stream"):
            control.progress("train", 4)


@pytest.mark.only_session("native")
def test_a_plan_for_another_version_is_refused(at: Path, control: Control) -> None:
    version = control.version
    with Control.connect(at, version=version - 1) as old:
        with pytest.raises(ConflictError, match=rf"{version - 1}.*{version}"):
            old.announce("old", [drawn(epoch=0, seed=1)])
        with pytest.raises(ConflictError):
            old.resident([1])
    with (
        Control.connect(at, identity="another") as other,
        pytest.raises(ConflictError, match="another"),
    ):
        other.announce("old", [drawn(epoch=0, seed=1)])
    assert "old" not in streams(control)


@pytest.mark.only_session("native")
def test_a_long_epoch_is_sent_in_parts(
    at: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Parent and child may use it at the same time."""
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


# who may speak ------------------------------------------------------------------------------------


@pytest.mark.only_session("native")
def test_S6_the_socket_is_private(at: Path) -> None:
    """It lies in a folder that no other user can enter, and has a random name."""
    path = Path(os.readlink(at / ".diesel/control"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    folder = path.parent.stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.geteuid())
    assert path.parent == runtime_folder()
    assert len(path.name) >= 16


AS_NOBODY = f"""if True:
    import os, socket, struct, sys
    os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)
    raw = socket.socket(socket.AF_UNIX); raw.settimeout(5)
    try:
        raw.connect(sys.argv[1])
        raw.sendall({HELLO!r})
        print("answered" if raw.recv(100) else "cut off")
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.only_session("native")
@pytest.mark.alone  # it opens folders that are to be private
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_S6_another_user_gets_no_answer(at: Path) -> None:
    """The folder keeps other users out; if it did not, the socket would refuse them."""
    path = Path(os.readlink(at / ".diesel/control"))
    ask = [sys.executable, "-I", "-S", "-c", AS_NOBODY, str(path)]
    told = subprocess.run(ask, capture_output=True, text=True, timeout=HOPE_S, check=True)
    assert told.stdout == "PermissionError\n"
    opened = [path, *[each for each in path.parents if each != Path("/")]]
    modes = {each: each.stat().st_mode for each in opened}
    try:
        for each in opened:
            each.chmod(0o777)
        told = subprocess.run(ask, capture_output=True, text=True, timeout=HOPE_S, check=True)
    finally:
        for each, mode in modes.items():
            each.chmod(stat.S_IMODE(mode))
    assert told.stdout in ("cut off\n", "ConnectionResetError\n", "BrokenPipeError\n")
    assert f"belongs to user {NOBODY}" in log_of(at)


@pytest.mark.only_session("native")
def test_the_socket_is_removed_with_the_mount_and_dead_ones_by_the_next(
    tmp_path: Path, session: str
) -> None:
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "mount"
    folder.mkdir()
    connect("ds", url, create=True).close()
    dead, new = (runtime_folder() / name for name in ("control-dead", ".new-control-late"))
    for each in (dead, new):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(each))
    (runtime_folder() / "another").touch()
    mount(MountRequest(url, "ds", str(folder), session=session))
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
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "mount"
    folder.mkdir()
    (tmp_path / "run" / "diesel").mkdir(parents=True)
    (tmp_path / "run" / "diesel").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    connect("ds", url, create=True).close()
    mount(MountRequest(url, "ds", str(folder), session=session, log_file=str(tmp_path / "log")))
    try:
        assert "control" not in os.listdir(folder / ".diesel")
        with pytest.raises(UsageError, match="no mount that takes plans"):
            Control.connect(folder)
        assert "others can write" in (tmp_path / "log").read_text()
    finally:
        umount(folder)


def test_a_mount_that_fails_leaves_no_control_socket(
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it fails after the socket was made: here the mount point is removed meanwhile."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "mount"
    folder.mkdir()
    connect("ds", url, create=True).close()
    request = MountRequest(url, "ds", str(folder), session=session)
    program = (sys.executable, "-c", REMOVES_ITS_PLACE, str(folder))
    with pytest.raises(DieselError):
        mount(request, program=program)
    assert not [*(tmp_path / "diesel").glob("*control-*")]


REMOVES_ITS_PLACE = """if True:
    import os, sys
    from diesel_fs.mounts import supervisor
    from diesel_fs.mounts.plans import control_socket
    listen = control_socket.ControlSocket.listen
    def listened(self):
        listen(self)
        os.rmdir(sys.argv[1])
    control_socket.ControlSocket.listen = listened
    sys.exit(supervisor.main(sys.argv[2:]))
"""


@pytest.mark.only_session("native", "kernel")
def test_the_worker_is_known_when_mount_returns(tmp_path: Path, session: str) -> None:
    """Statistics have the worker's process number at once, however long it takes to begin."""
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "mount"
    folder.mkdir()
    connect("ds", url, create=True).close()
    request = MountRequest(url, "ds", str(folder), session=session)
    mount(request, program=(sys.executable, "-c", BEGINS_LATE))
    try:
        told = stats(folder)
        supervisor, residency = told["pid"], told["residency"]
        assert isinstance(supervisor, int)
        assert isinstance(residency, dict)
        assert residency["pid"] in children_of(supervisor)
    finally:
        umount(folder, force=True)


BEGINS_LATE = """if True:
    import sys, time
    from diesel_fs.mounts import supervisor
    from diesel_fs.mounts.prefetch_worker import PrefetchWorker
    switch_version = PrefetchWorker.switch_version
    def switch_late(*given):
        time.sleep(3)
        switch_version(*given)
    PrefetchWorker.switch_version = switch_late
    sys.exit(supervisor.main(sys.argv[1:]))
"""


def test_a_runtime_folder_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    url, folder = (tmp_path / "store").as_uri(), tmp_path / "mount"
    folder.mkdir()
    connect("ds", url, create=True).close()
    mount(MountRequest(url, "ds", str(folder), session=session))
    try:
        with Control.connect(folder) as made:
            assert made.hello["dataset"] == "ds"
    finally:
        umount(folder)


# bad clients --------------------------------------------------------------------------------------


@pytest.mark.only_session("native")
@each_row(
    "frames",
    [
        [b"GET / HTTP/1.1\r\n\r\n"],
        [LENGTH.pack(HELLO_BYTES_MAX + 1)],
        [LENGTH.pack(0xFFFFFFFF)],
        [framed({"diesel_control": True})],
        [framed({"diesel_control": 1, "more": 1})],
        [framed({"do": "stats"})],
        [framed([1])],
        [LENGTH.pack(1) + b"\xc1"],
        [HELLO[:-1]],
        [b"\0"],
    ],
)
def test_a_client_without_a_hello_is_disconnected(at: Path, frames: list[bytes]) -> None:
    assert spoken(at, *frames) == b""
    with Control.connect(at) as made:
        assert made.hello["dataset"] == "ds"


@pytest.mark.only_session("native")
def test_another_protocol_version_is_refused_with_ours(at: Path) -> None:
    answer = msgpack.unpackb(spoken(at, framed({"diesel_control": PROTOCOL + 1}))[LENGTH.size :])
    assert answer["error"] == "UsageError"
    assert f"version {PROTOCOL}" in answer["message"]


@pytest.mark.only_session("native")
@pytest.mark.parametrize(
    "garbage",
    [
        LENGTH.pack(FRAME_BYTES_MAX + 1),
        LENGTH.pack(5) + b"\xdf\xff\xff\xff\xff",
        LENGTH.pack(1000) + b"\x91" * 1000,
        LENGTH.pack(100) + b"short",
    ],
)
def test_garbage_ends_only_its_own_connection(at: Path, garbage: bytes) -> None:
    """With a line in the log; other connections do not notice."""
    with Control.connect(at) as other:
        before = log_of(at).count("was disconnected") + log_of(at).count("left out")
        answer = spoken(at, HELLO, framed({"do": "stats"}), garbage, framed({"do": "stats"}))
        (length,) = LENGTH.unpack_from(answer)
        (second,) = LENGTH.unpack_from(answer, LENGTH.size + length)
        assert len(answer) == 2 * LENGTH.size + length + second, "no answer after the garbage"
        assert log_of(at).count("was disconnected") + log_of(at).count("left out") >= before
        assert other.stats()["dataset"] == "ds"


@pytest.mark.only_session("native")
@pytest.mark.parametrize("hello", [b"", HELLO])
def test_a_frame_that_is_too_long_is_not_waited_for(at: Path, hello: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(HOPE_S / 2)
        raw.connect(os.readlink(at / ".diesel/control"))
        raw.sendall(hello)
        assert not hello or raw.recv(4096)
        raw.sendall(LENGTH.pack((FRAME_BYTES_MAX if hello else HELLO_BYTES_MAX) + 1))
        assert raw.recv(4096) == b""


@pytest.mark.only_session("native")
@each_row(
    "message",
    [
        {"do": "end"}, {"do": "begin"}, {"do": "missed", "entries": b""}, {"do": 1}, {},
        {"do": "list read", "stream": "s", "list": "seed=1,epoch=1"}, {"do": "forget", "node": 2},
        {"do": "stats", "id": 1}, {"do": "withdraw"}, {"do": "withdraw", "stream": None},
    ],
)  # fmt: skip
def test_internal_requests_are_refused_and_the_connection_stays(
    at: Path, message: dict[str, object]
) -> None:
    answers = spoken(at, HELLO, framed(message), framed({"do": "stats"}))
    found = []
    while answers:
        (length,) = LENGTH.unpack_from(answers)
        found.append(msgpack.unpackb(answers[LENGTH.size : LENGTH.size + length]))
        answers = answers[LENGTH.size + length :]
    hello, refused, told = found
    assert hello["diesel_control"] == PROTOCOL
    assert refused["error"] == "UsageError"
    assert told["stats"]["dataset"] == "ds"


@pytest.mark.only_session("native")
def test_connections_keep_their_limit(at: Path) -> None:
    talking = [Control.connect(at) for _ in range(CONNECTIONS_MAX)]
    try:
        with pytest.raises(DieselError):
            Control.connect(at)
        assert talking[0].stats()["dataset"] == "ds"
    finally:
        for each in talking:
            each.close()
    end_s = time.monotonic() + HOPE_S
    while time.monotonic() < end_s:
        try:
            Control.connect(at).close()
            return
        except DieselError:
            time.sleep(0.05)
    raise AssertionError("those who have gone still count")


def test_an_unfinished_frame_ends_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle connection may stay; one in the middle of a frame or of a hello may not."""
    tmp_path.chmod(0o700)
    ours, theirs = socket.socketpair()
    link = WorkerLink(ours)
    made = ControlSocket(tmp_path, {"dataset": "ds"}, dict, link, frame_deadline_s=0.3)
    made.listen()

    async def talk(first: bytes, rest: bytes) -> bytes:
        stream = await trio.open_unix_socket(os.fsdecode(made.path))
        async with stream:
            if first:
                await stream.send_all(first)
            await trio.sleep(0.6)
            try:
                if rest:
                    await stream.send_all(rest)
                with trio.fail_after(HOPE_S):
                    return await stream.receive_some(4096)
            except trio.BrokenResourceError:
                return b""

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            assert await talk(HELLO[:3], HELLO[3:]) == b""
            assert await talk(b"", HELLO) == b"", "a hello that is late"
            stream = await trio.open_unix_socket(os.fsdecode(made.path))
            async with stream:
                await stream.send_all(HELLO)
                assert await stream.receive_some(4096)
                await trio.sleep(0.6)
                await stream.send_all(framed({"do": "nothing"}))
                assert b"no request" in await stream.receive_some(4096)
                await stream.send_all(LENGTH.pack(100) + b"x")
                with trio.fail_after(HOPE_S):
                    assert await stream.receive_some(4096) == b""
            stream = await trio.open_unix_socket(os.fsdecode(made.path))
            async with stream:
                await stream.send_all(HELLO + b"\0")
                with trio.fail_after(HOPE_S):
                    while await stream.receive_some(4096):
                        pass
            nursery.cancel_scope.cancel()

    with ours, theirs:
        trio.run(run)
        made.close()
    assert os.listdir(tmp_path) == []
