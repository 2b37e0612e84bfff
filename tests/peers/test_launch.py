"""Joining a task: the node's master is found, or started exactly once, with the given options. A
master without readers ends.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
import trio
import trio.testing

from diesel_fs.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    DieselError,
    MetadataError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.peers import launch
from diesel_fs.peers.launch import (
    is_alive,
    join,
    mark_ended,
    remove_folders,
    restart_killed,
    socket_path,
)
from diesel_fs.peers.master.local import LocalServer, LocalSocket
from diesel_fs.peers.members.membership import TaskName
from diesel_fs.peers.members.options import TaskOptions, TaskRequest, read_key_file
from diesel_fs.peers.reader import store as client
from tests.processes import is_running
from tests.rows import each_row
from tests.waiting import until

from .children import fork

STUB = (sys.executable, "-m", "tests.peers.stub_program")
SECRET = "canary-5cf2-and-long-enough"  # noqa: S105  # of these tests alone
TREE = Path(__file__).resolve().parents[2]


class Node:
    def __init__(self, runtime: Path, patch: pytest.MonkeyPatch) -> None:
        folder = runtime.parent
        self.starts_file = folder / "starts"
        self._patch, self._run = patch, runtime
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("STUB_STARTS", str(self.starts_file))
        patch.setattr(sys, "path", [str(TREE), *sys.path])
        self.does("good")
        self.request = TaskRequest(
            url=(folder / "store").as_uri(), dataset="ds", identity=UUID(int=5).hex, version=3,
            task="training", memory_bytes=1 << 20,
        )  # fmt: skip

    def request_with(self, **changes: object) -> TaskRequest:
        return replace(self.request, **changes)  # type: ignore[arg-type]  # by name

    def join(self, request: TaskRequest | None = None, **changes: object) -> Path:
        return join(replace(request or self.request, **changes), program=STUB)  # type: ignore[arg-type]  # by name

    def restart(self, place: Path, request: TaskRequest | None = None) -> bool:
        return restart_killed(request or self.request, place, program=STUB)

    def does(self, how: str) -> None:
        self._patch.setenv("STUB", how)

    def starts(self) -> list[dict[str, dict[str, object]]]:
        if not self.starts_file.exists():
            return []
        return [json.loads(line) for line in self.starts_file.read_text().splitlines()]

    def left(self) -> list[Path]:
        return list((self._run / "diesel" / "tasks").glob("*/**"))

    def kill(self) -> None:
        for each in self.starts():
            with suppress(ProcessLookupError):
                os.kill(each["pid"], signal.SIGKILL)  # type: ignore[arg-type]  # as it is written

    def die(self, place: Path) -> None:
        self.kill()
        until(lambda: not is_alive(place), "its end")


@pytest.fixture
def node(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(runtime, monkeypatch)
    yield made
    made.kill()


# One master for all processes of a node -----------------------------------------------------------


def test_a_master_is_started_once_and_then_found_until_it_dies(node: Node) -> None:
    """Its node needs neither Redis nor peers, as it is the only one."""
    place = node.join()
    assert is_alive(place)
    assert node.join() == place
    [started] = node.starts()
    request = started["request"]
    assert (request["rank"], request["world"], request["listen"]) == (0, 1, "127.0.0.1:0")
    assert len(str(request["task_key"])) >= 32
    assert request["peers"] == ["127.0.0.1:1"]
    for folder in (place.parent, place.parent.parent, place.parent.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    node.die(place)
    assert place.exists()
    assert node.join() == place
    assert len(node.starts()) == 2


def test_many_processes_that_come_at_once_start_one(node: Node) -> None:
    code = (
        "import sys; from diesel_fs.peers.members.options import TaskRequest;"
        "from diesel_fs.peers.launch import join; from tests.peers.test_launch import STUB;"
        "print(join(TaskRequest.from_json(sys.argv[1].encode()), program=STUB))"
    )
    command = [sys.executable, "-c", code, node.request.to_json().decode()]
    programs = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "LOCAL_RANK": str(local), "PYTHONPATH": str(TREE)},
        )
        for local in (0, 0, 1, 2, 3)
    ]
    outputs = {each.communicate(timeout=60)[0] for each in programs}
    assert not any(each.returncode for each in programs)
    assert len(outputs) == len(node.starts()) == 1


def test_nodes_and_tasks_have_masters_of_their_own(node: Node) -> None:
    requests = [
        node.request_with(rank=rank, world=2, task=task, listen="127.0.0.1:0")
        for rank in (0, 1)
        for task in ("one", "two")
    ]
    places = {node.join(each) for each in requests}
    assert len(places) == len(node.starts()) == 4
    others = node.request_with(task="one", identity=UUID(int=6).hex)
    assert node.join(others) not in places


def test_without_a_rank_the_only_master_of_the_task_is_used(node: Node) -> None:
    given = node.request_with(rank=3, world=4, listen="127.0.0.1:0")
    place = node.join(given)
    assert node.join() == place
    node.join(given, rank=2)
    assert node.join().parent.name == "0"


def _node_of(started: dict[str, dict[str, object]]) -> list[object]:
    request = started["request"]
    return [request[each] for each in ("rank", "world", "listen", "cache_dir", "version")]


@pytest.mark.parametrize("how", ["who reads", "who comes"])
def test_F8_a_killed_master_restarts_as_its_node(node: Node, tmp_path: Path, how: str) -> None:
    """A process that gives no rank may restart it while another master of the task has rank 0."""
    folder = str(tmp_path / "cache")
    given = node.request_with(rank=3, world=4, listen="127.0.0.1:0", cache_dir=folder)
    place = node.join(given)
    nameless = node.request_with(version=5)
    node.die(place)
    if how == "who reads":
        assert node.restart(place, nameless)
    else:
        assert node.join(nameless) == place
    assert is_alive(place)
    assert [_node_of(each) for each in node.starts()] == [
        [3, 4, "127.0.0.1:0", folder, version] for version in (3, 5)
    ]
    assert not node.restart(place, nameless), "it is there"


def test_a_new_job_does_not_take_over_the_rank_of_an_old_one(node: Node) -> None:
    old = node.join(rank=1, world=3, listen="127.0.0.1:0")
    node.die(old)
    os.utime(old.with_name("options"), (time.time() - 3600,) * 2)
    assert node.join() == old.parent.parent / "0" / "socket"
    assert not old.parent.exists()
    assert node.starts()[-1]["request"]["world"] == 1


def test_a_master_marks_that_it_is_alive(tmp_path: Path) -> None:
    place = tmp_path / "socket"
    launch.mark_alive(place)  # it ends just now
    options = tmp_path / "options"
    options.touch()
    os.utime(options, (0, 0))
    launch.mark_alive(place)
    assert time.time() - options.stat().st_mtime < 60


def test_a_failed_restart_is_tried_again(node: Node) -> None:
    place = node.join()
    node.die(place)
    node.does("error")
    for _ in range(2):
        with pytest.raises(MetadataError):
            node.restart(place)
    node.does("good")
    assert node.restart(place)
    node.die(place)
    with pytest.raises(UsageError):
        node.restart(place, node.request_with(world=2, listen="nonsense"))
    assert not node.restart(place), "not after a lasting error"


def test_a_master_that_ended_by_itself_is_not_restarted(node: Node) -> None:
    place = node.join(rank=3, world=4, listen="127.0.0.1:0")
    mark_ended(place)
    node.die(place)
    assert not node.restart(place)
    assert node.join().parent.name == "0"


def test_ignored_options_are_warned_of_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    given = node.request_with(rank=1, world=2, listen="127.0.0.1:0", evict="lfu", task_key=SECRET)
    node.join(given)
    assert "127.0.0.1 is this machine alone" in caplog.text
    caplog.clear()
    for same in (
        given,
        node.request_with(memory_bytes=0),  # no warning for this one
        node.request_with(memory_bytes=5, memory_is_default=True),
        replace(given, task_key="another, which is kept nowhere", user="", version=4),
    ):
        node.join(same)
        assert not caplog.records, same
    others = {"memory_bytes": 5, "evict": "none", "cache_dir": "/c", "cache_bytes": 7, "world": 3}
    node.join(given, **others)
    [warning] = caplog.messages
    for option in ("--memory", "--evict", "--cache-dir", "--cache-size", "--world"):
        assert option in warning
    assert "--listen" not in warning
    assert len(node.starts()) == 1
    caplog.clear()
    node.join(policy="oneshot")
    assert caplog.messages[0].startswith("--policy: ignored")


def test_the_options_of_a_killed_master_are_not_those_of_its_successor(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """For a moment they lie beside the socket of the new master."""
    place = node.join(evict="lfu")
    old = place.with_name("options").read_bytes()
    node.die(place)
    node.join(rank=0, world=1, evict="none")
    place.with_name("options").write_bytes(old)
    os.utime(place.with_name("options"), (1e9, 1e9))
    node.join(rank=0, world=1, evict="none")
    assert not caplog.records
    os.utime(place.with_name("options"))
    node.join(rank=0, world=1, evict="none")
    assert "--evict" in caplog.text


def test_a_computed_memory_size_is_not_compared(node: Node) -> None:
    place = node.join()
    node.die(place)
    assert node.restart(place, node.request_with(memory_bytes=5, memory_is_default=True))
    assert [each["request"]["memory_bytes"] for each in node.starts()] == [1 << 20] * 2


def test_S8_saved_options_hold_no_secret(node: Node) -> None:
    url = f"{node.request.url}?meta=redis://user:{SECRET}@127.0.0.1:1"
    request = node.request_with(task_key=SECRET, key=SECRET, user="me", url=url)
    place = node.join(request, listen="127.0.0.1:0")
    for each in place.parent.iterdir():
        if each != place:
            assert SECRET.encode() not in each.read_bytes(), each
    node.die(place)
    assert node.restart(place, request)
    [first, second] = (each["request"] for each in node.starts())
    for name in ("url", "user", "key", "task_key"):
        assert first[name] == second[name]


def test_other_processes_wait_for_the_first(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "2")
    start_s = time.monotonic()
    join(node.request, program=STUB, first_process_wait_s=0.5)
    assert time.monotonic() - start_s > 0.5
    assert len(node.starts()) == 1


# Reasons why a master does not come up


def test_a_masters_error_is_raised_and_without_one_the_end_of_its_log(node: Node) -> None:
    node.does("error")
    with pytest.raises(MetadataError) as refused:
        node.join()
    assert refused.value.exit_code == 14
    assert str(refused.value) == "no Redis here; start it"
    node.does("dies")
    with pytest.raises(DieselError, match=r"did not come up\n  \| a line of the log"):
        node.join()
    assert node.left() == []
    node.does("good")
    assert is_alive(node.join())


def test_the_lock_of_a_removed_folder_keeps_nobody_out(node: Node) -> None:
    place = socket_path(node.request_with(rank=0, world=1))
    inside, most, lost = 0, 0, 0

    def come_and_go(_: int) -> None:
        nonlocal inside, most, lost
        for _ in range(100):
            with launch._locked(place, 30.0):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0002)
                inside -= 1
            remove_folders(place)
            lost += not place.parent.exists()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(come_and_go, range(4))] == [None] * 4
    assert most == 1
    assert lost > 0
    assert node.left() == []


def test_a_child_forked_meanwhile_does_not_hold_the_lock(node: Node) -> None:
    """Another thread may fork at any time, and the child may live long."""
    place = socket_path(node.request_with(rank=0, world=1))
    for held in (launch._folders_locked(), launch._locked(place, 0.0)):
        receiver, sender = os.pipe()

        def live_on(receiver: int = receiver, sender: int = sender) -> None:
            os.close(sender)
            os.read(receiver, 1)  # until the parent lets go

        with held:
            wait = fork(live_on)
        with launch._locked(place, 1.0):
            os.close(receiver)
            os.close(sender)
        wait()


def test_others_wait_only_for_a_time_for_a_process_stopped_at_the_folders(node: Node) -> None:
    place = socket_path(node.request_with(rank=0, world=1))
    with launch._folders_locked():
        with (
            pytest.raises(BusyError, match="changing the folders"),
            launch._locked(place, 0.0, 0.1),
        ):
            pass
        remove_folders(place, folders_wait_s=0.1)  # logs nothing
    with launch._locked(place, 0.0):
        pass


def test_the_error_of_a_real_master_is_raised_once_and_logged(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(UsageError) as refused:
        join(node.request_with(evict="bad", log_file=str(log)))
    assert str(refused.value).count("bad --evict") == 1
    assert log.read_text().count("bad --evict") == 1
    assert not node.starts()


def test_a_master_that_reports_nothing_is_killed(node: Node) -> None:
    node.does("silent")
    with pytest.raises(DeadlineError):
        join(node.request, program=STUB, start_deadline_s=1.0)
    [started] = node.starts()
    until(lambda: not is_running(int(str(started["pid"]))), "it to be killed")


def test_sockets_in_deep_paths(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a socket has at most 107 bytes."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    place = socket_path(node.request_with(rank=0))
    place.parent.mkdir(parents=True)
    here = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        listener.listen()
        assert is_alive(place)
        assert node.join() == place


def test_a_starting_master_refuses_clients_at_once(tmp_path: Path) -> None:
    coming = LocalSocket(tmp_path / "socket")
    try:
        assert coming.path.exists()
        assert not is_alive(coming.path)
        coming.listen()
        assert is_alive(coming.path)
    finally:
        coming.close()


def test_a_repeated_close_does_not_remove_another_masters_socket(tmp_path: Path) -> None:
    """Many file systems reuse inode numbers at once."""
    ending = LocalSocket(tmp_path / "socket")
    ending.close()
    assert not ending.path.exists()
    coming = LocalSocket(tmp_path / "socket")
    ending._inode = coming._inode
    ending.close()
    assert coming.path.exists()
    coming.close()


def test_F14_too_few_descriptors_for_the_world_are_an_error_at_the_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    request = node.request_with(rank=0, listen="127.0.0.1:0")
    with pytest.raises(UsageError, match="1312 open files, and 1024 are allowed") as refused:
        node.join(request, world=400)
    assert "ulimit" in refused.value.advice
    assert not node.starts()
    node.join(request, world=100)


# The request --------------------------------------------------------------------------------------


def test_a_request_travels_and_shows_no_secret(node: Node) -> None:
    request = node.request_with(
        task_key=SECRET, key=SECRET, user="me", peers=("a:1", "b:2"), rank=0, world=2
    )
    assert TaskRequest.from_json(request.to_json()) == request
    assert SECRET not in repr(request)
    for text in (b"", b"[]", b"{}", b"x", b"[" * 100_000, b"\xff", request.to_json()[:-2]):
        with pytest.raises(UsageError):
            TaskRequest.from_json(text)
    place = node.join(request, listen="127.0.0.1:0")
    [started] = node.starts()
    assert started["request"]["task_key"] == SECRET
    shown = Path(f"/proc/{started['pid']}/cmdline").read_bytes()
    shown += Path(f"/proc/{started['pid']}/environ").read_bytes()
    assert SECRET.encode() not in shown
    assert is_alive(place)


def test_a_request_that_is_too_long_is_refused(node: Node) -> None:
    with pytest.raises(UsageError, match="at most 262144"):
        node.request_with(peers=("a:1",) * 50_000).to_json()


def test_a_task_belongs_to_the_account_or_to_the_machines_user(node: Node) -> None:
    assert node.request.name == TaskName(UUID(int=5), f"uid:{os.geteuid()}", "training")
    assert node.request_with(user="ann").name == TaskName(UUID(int=5), "ann", "training")


@each_row("option", ["rank", "peers", "listen", "advertise", "evict", "peer_tls"])
def test_options_without_a_task_are_refused(option: str) -> None:
    value = {"rank": 1, "peers": ("a:1",), "peer_tls": True}.get(option, "x")
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is about a task"):
        TaskOptions(**{option: value}).check()  # type: ignore[arg-type]  # by name
    TaskOptions(task_key=SECRET, policy="oneshot").check()
    with pytest.raises(UsageError, match="--peers names 1 nodes, and --world says 2"):
        TaskOptions(task="x", peers=("a:1",), world=2).check()
    TaskOptions(task="x", peers=("a:1",)).check()
    TaskOptions(task="x", peers=("a:1", "b:1", "c:1"), world=2).check()
    with pytest.raises(UsageError, match="without its folder"):
        TaskOptions(task="x", cache_bytes=5).check()


def test_a_cache_folder_without_a_task_is_a_task_of_this_machine() -> None:
    alone = TaskOptions(cache_dir="/ssd").or_single_node("a")
    assert (alone.rank, alone.world) == (0, 1)
    assert alone.task
    assert alone == TaskOptions(cache_dir="/ssd").or_single_node("a")
    assert alone.task != TaskOptions(cache_dir="/ssd").or_single_node("b").task
    with pytest.raises(UsageError):
        TaskOptions(cache_dir="/ssd", rank=1).or_single_node("a")


def test_a_key_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o644)
    with pytest.raises(PermissionDenied, match="others may read"):
        read_key_file(file)
    file.chmod(0o600)
    assert read_key_file(file) == SECRET
    for content in (b"\xff" * 20, b"x" * 5000, b"", b" \n\t\n"):
        file.write_bytes(content)
        with pytest.raises(ConfigError):
            read_key_file(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_file(tmp_path / "none")


# The end of a master that has no reader


async def test_an_idle_master_ends_unless_a_reader_of_its_version_follows_one_of_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = LocalServer(None)  # type: ignore[arg-type]  # it serves no client
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.wait_until_idle, 60.0)
        await trio.testing.wait_all_tasks_blocked()
        server.other_version_requested()
        server.reader_joined()
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks, "it has ended"
        nursery.cancel_scope.cancel()
    caplog.set_level("INFO", "diesel.task")
    await LocalServer(None).wait_until_idle(0.01)  # type: ignore[arg-type]  # as above
    assert "no client for 0.01 s: the master ends" in caplog.text


def test_a_reader_restarts_only_its_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new master may have another socket, for example as another rank."""
    monkeypatch.setattr(client, "is_alive", lambda place: place.name == "other")
    monkeypatch.setattr(client, "join", lambda _: tmp_path / "other")
    request = TaskRequest(task="night")
    assert not client._restart_master(request, tmp_path / "mine", has_served=False)
