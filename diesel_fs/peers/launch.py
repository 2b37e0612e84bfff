"""Finds the master of a task on this node, and starts it if there is none. For any thread and
process.

Below the user's runtime folder, each task has a folder with a folder for each of its nodes on this
machine. A node's folder has `socket`; `lock`, which a process holds while it starts a master; and
`options`, the request that started the master. A master that ends by itself removes `options`, so
`options` beside a dead socket mean that the master was killed. A process that joins without a rank
then restarts it with these options, so that the node keeps its rank. The next job removes the files
of old jobs, and the last master removes the folders.
"""

import fcntl
import json
import logging
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from ..errors import (
    BusyError,
    ConflictError,
    DieselError,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from ..settings import private_folder, runtime_folder, state_folder
from ..system import daemons
from ..system.available_memory import default_memory_bytes
from ..system.unix_sockets import connect_unix
from ..urls import SERVER_SCHEMES, parse_url
from . import local_wire, wire
from .members.addresses import listen_address
from .members.membership import resolve_node
from .members.options import TaskRequest

log = logging.getLogger("diesel.task")

MASTER = (sys.executable, "-m", "diesel_fs.peers")

START_DEADLINE_S = 60.0
"""How long a starting master may be silent: it may have to fetch a snapshot first."""

FIRST_PROCESS_WAIT_S = 2.0
"""How long a node's other processes let its first process start the master: users look for errors
in the output of the first one."""

ALIVE_MARK_S, KILLED_REMEMBERED_S = 10.0, 60.0
"""A master marks that it is alive every `ALIVE_MARK_S`. A process without a rank restarts a killed
master only within `KILLED_REMEMBERED_S` after its last mark; the master's former clients do at any
time."""

DESCRIPTORS_MIN = 512
"""Open files that a master needs for clients and chunks, besides connections to other nodes."""

FOLDERS_WAIT_S = 5.0
"""How long to wait for a process that makes or removes folders, which takes microseconds."""

_PERMANENT_ERRORS = (ConflictError, NotFoundError, PermissionDenied, UsageError)

_UNREACHABLE_PEER, _ALONE = "127.0.0.1:1", "127.0.0.1:0"  # for a node that needs no others
_OPTIONS, _LOCK = "options", "lock"
_POLL_S = 0.02
_ANSWER_S = 1.0  # for a master without readers to answer, and to end
_ENDED_READER_S = 0.1
_CONNECT_S = 5.0  # a master that accepts no connection for this time hangs
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
_NODE_VARIABLES = ("SLURM_NODEID", "GROUP_RANK")

_Found = TypeVar("_Found")


def join(
    request: TaskRequest,
    *,
    program: Sequence[str] = MASTER,
    first_process_wait_s: float = FIRST_PROCESS_WAIT_S,
    start_deadline_s: float = START_DEADLINE_S,
) -> Path:
    """The socket of this node's master, which `program` starts if none is alive.

    A running master with other options is replaced if it has no readers (its mount has just ended).
    If it has readers, it keeps its options, and a warning names those that differ. Raises the error
    that kept the master from starting, with the end of its log; UsageError for a bad rank or
    address."""
    socket_path = _find_or_start(request, program, first_process_wait_s, start_deadline_s)
    running = _running_request(socket_path)
    if (
        running is not None
        and not request.asks_for_the_same(running)
        and _ends_unless_it_is_read(request, socket_path)
    ):
        socket_path = _find_or_start(request, program, first_process_wait_s, start_deadline_s)
        running = _running_request(socket_path)
    ignored = [] if running is None else request.differing_options(running)
    if ignored:
        log.warning(
            "%s: ignored, because this node's master of task %r runs with other options; it ends"
            " after some seconds without clients", ", ".join(ignored), request.task,
        )  # fmt: skip
    return socket_path


def _find_or_start(
    request: TaskRequest,
    program: Sequence[str],
    first_process_wait_s: float,
    start_deadline_s: float,
) -> Path:
    """For a request without a rank, in a task of one node, take the only live master of this task
    on this machine; if there is none, restart the only killed one."""
    environment = os.environ
    rank, world = resolve_node(environment, request.rank, request.world)
    folder = _folder(request)
    if world == 1 and request.rank is None and not any(map(environment.get, _NODE_VARIABLES)):
        alive = [each for each in sorted(folder.glob("*/socket")) if is_alive(each)]
        if len(alive) == 1:
            return alive[0]
        killed = [each.with_name("socket") for each in sorted(folder.glob(f"*/{_OPTIONS}"))]
        if not alive:
            killed = [each for each in killed if not _remove_if_stale(each)]
        if not alive and len(killed) == 1:
            restart_killed(request, killed[0], program=program)
            if is_alive(killed[0]):
                return killed[0]
    request = replace(request, rank=rank, world=world)
    path = socket_path(request)
    wait_s = 0.0 if _is_first(environment) else first_process_wait_s
    if not _poll(lambda: is_alive(path) or None, wait_s):
        _start_locked(request, path, program, start_deadline_s)
    return path


def _running_request(socket_path: Path) -> TaskRequest | None:
    options = socket_path.with_name(_OPTIONS)
    try:
        if options.stat().st_mtime_ns < socket_path.stat().st_mtime_ns:
            return None  # the file is of an earlier master, which was killed
        return TaskRequest.from_json(options.read_bytes())
    except (OSError, UsageError):
        return None  # the master is starting or ending, or is of another version of this program


def _ends_unless_it_is_read(request: TaskRequest, socket_path: Path) -> bool:
    """End a master that has no readers; returns whether it ended. Such a master ends when a client
    asks for another version of the dataset, so this asks for version 0, which does not exist."""
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError, DieselError):
        client.settimeout(_ANSWER_S)
        connect_unix(client, socket_path)
        # A reader that has just ended may still count
        if not _poll(lambda: _readers(client) == 0 or None, _ENDED_READER_S):
            return False
        hello = local_wire.hello(UUID(hex=request.identity), 0)
        client.sendall(local_wire.request(local_wire.HELLO, body=hello))
        return _poll(lambda: None if is_alive(socket_path) else True, _ANSWER_S) is not None
    return False


def _readers(client: socket.socket) -> int:
    """Returns -1 if the master's answer has no number."""
    client.sendall(local_wire.request(local_wire.STATS))
    with client.makefile("rb", buffering=0) as answers:
        head = answers.read(wire.HEAD_BYTES) or b""
        size = local_wire.parse_answer(head, local_wire.STATS, 0).body_bytes
        body = b""
        while len(body) < size and (more := answers.read(size - len(body))):
            body += more
    try:
        found = json.loads(body).get("readers", -1)
    except (ValueError, AttributeError):
        return -1
    return found if isinstance(found, int) else -1


def restart_killed(
    request: TaskRequest, socket_path: Path, *, program: Sequence[str] = MASTER
) -> bool:
    """Restart the master at a socket if it was killed; returns whether it was. Raises as `join`.
    After a permanent error the master counts as ended, so that no other process tries."""
    if is_alive(socket_path):
        return False
    try:
        return _restart(request, socket_path, program)
    except _PERMANENT_ERRORS:
        mark_ended(socket_path)
        remove_folders(socket_path)
        raise


def mark_ended(socket_path: Path) -> None:
    with suppress(OSError):
        socket_path.with_name(_OPTIONS).unlink()


def remove_folders(socket_path: Path, *, folders_wait_s: float = FOLDERS_WAIT_S) -> None:
    """Remove a node's folder, and with the last one its task's, if no master runs, starts, or was
    killed there."""
    with (
        suppress(OSError, DieselError),
        _locked(socket_path, 0.0, folders_wait_s),
        _folders_locked(folders_wait_s),
    ):
        if not socket_path.exists() and not socket_path.with_name(_OPTIONS).exists():
            socket_path.with_name(_LOCK).unlink()
            socket_path.parent.rmdir()
            socket_path.parent.parent.rmdir()


def mark_alive(socket_path: Path) -> None:
    with suppress(OSError):
        os.utime(socket_path.with_name(_OPTIONS))


def _remove_if_stale(socket_path: Path) -> bool:
    """Remove the files of a killed master if its job ended long ago: a new job must not take over
    its rank. Returns whether it did."""
    try:
        if socket_path.with_name(_OPTIONS).stat().st_mtime > time.time() - KILLED_REMEMBERED_S:
            return False
        with _locked(socket_path, 0.0):
            if is_alive(socket_path):
                return False
            socket_path.unlink(missing_ok=True)
            mark_ended(socket_path)
    except (OSError, DieselError):
        return False
    remove_folders(socket_path)
    return True


def has_successor(socket_path: Path) -> bool:
    """Whether another master runs or starts at a socket that was closed."""
    if socket_path.exists():
        return True
    try:
        lock = os.open(socket_path.with_name(_LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def is_alive(socket_path: Path) -> bool:
    """Whether a master accepts connections at a socket, or hangs."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            connect_unix(probe, socket_path)
        except TimeoutError:  # the master hangs; a second one would hang, too
            return True
        except OSError:
            return False
    return True


def default_log(request: TaskRequest) -> Path:
    return state_folder() / f"task-{request.dataset}-{request.task}-{request.rank}.log"


def wait_until_gone(socket_path: Path, timeout_s: float) -> bool:
    """Returns False if a master is still alive after `timeout_s`."""
    return _poll(lambda: None if is_alive(socket_path) else True, timeout_s) is not None


def _is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the node's first process; true if neither SLURM nor torchrun numbers them."""
    values = (environment[each] for each in _LOCAL_RANK_VARIABLES if environment.get(each))
    return next(values, "0").strip() == "0"


def _locked(
    socket_path: Path, timeout_s: float, folders_wait_s: float = FOLDERS_WAIT_S
) -> AbstractContextManager[None]:
    """Lock a node: no other process starts a master at the socket, or removes its folder, which is
    made if it is missing. Raises BusyError."""

    def attempt() -> int | None:
        with _folders_locked(folders_wait_s):
            private_folder(socket_path.parent.parent)
            private_folder(socket_path.parent)
            return _try_lock(socket_path.with_name(_LOCK))

    return _held(attempt, timeout_s, _POLL_S, "another process is starting this task's master")


def _folders_locked(timeout_s: float = FOLDERS_WAIT_S) -> AbstractContextManager[None]:
    """Lock all of the user's tasks: no other process makes or removes their folders. Raises
    BusyError."""
    tasks = _tasks()
    return _held(
        lambda: _try_lock(tasks / _LOCK), timeout_s, _POLL_S / 10,
        f"another process is changing the folders in {tasks}",
    )  # fmt: skip


@contextmanager
def _held(
    attempt: Callable[[], int | None], timeout_s: float, every_s: float, otherwise: str
) -> Iterator[None]:
    lock = _poll(attempt, timeout_s, every_s)
    if lock is None:
        raise BusyError(otherwise)
    try:
        yield
    finally:  # a child that was forked meanwhile has the file open, too: unlock it
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _poll(
    attempt: Callable[[], _Found | None], timeout_s: float, every_s: float = _POLL_S
) -> _Found | None:
    """Return the first result that is not None; None if there was none within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while (found := attempt()) is None and time.monotonic() <= until_s:
        time.sleep(every_s)
    return found


def _start_locked(
    request: TaskRequest, socket_path: Path, program: Sequence[str], deadline_s: float
) -> None:
    try:
        with _locked(socket_path, deadline_s + _CONNECT_S):
            if not is_alive(socket_path):
                _start(request, socket_path, program, deadline_s)
                _save_options(request, socket_path)
    except DieselError:
        remove_folders(socket_path)
        raise


def _restart(request: TaskRequest, socket_path: Path, program: Sequence[str]) -> bool:
    """Returns False if the master ended by itself. Options that the request gives replace the
    former ones."""
    try:
        before = TaskRequest.from_json(socket_path.with_name(_OPTIONS).read_bytes())
    except (OSError, UsageError):
        return False
    default = TaskRequest()
    given = {each.name: getattr(request, each.name) for each in fields(TaskRequest)}
    given = {name: value for name, value in given.items() if value != getattr(default, name)}
    if request.memory_is_default:
        del given["memory_bytes"], given["memory_is_default"]
    elif request.memory_bytes:
        given["memory_is_default"] = False
    _start_locked(replace(before, **given), socket_path, program, START_DEADLINE_S)
    return True


def _save_options(request: TaskRequest, socket_path: Path) -> None:
    """Save no secrets, and no addresses that may hold a password."""
    saved = replace(request, url="", user="", key="", task_key="").to_json()
    new = socket_path.with_name(f"{_OPTIONS}.new")
    try:
        new.write_bytes(saved)
        new.replace(socket_path.with_name(_OPTIONS))
    except OSError:  # no space: this master will not be started again
        with suppress(OSError):
            new.unlink()
        mark_ended(socket_path)  # removes the options of an earlier master


def _start(
    request: TaskRequest, socket_path: Path, program: Sequence[str], deadline_s: float
) -> None:
    rank, world = request.rank, request.world
    assert rank is not None
    assert world is not None
    if world == 1 and not request.peers and not _is_registered(request):
        # A single node needs no registry: a list with only itself replaces it
        request = replace(
            request, peers=(_UNREACHABLE_PEER,), task_key=secrets.token_hex(32), listen=_ALONE
        )
    _check_descriptors(world)
    complete = replace(
        request,
        listen=str(listen_address(request, rank, world)),
        memory_bytes=request.memory_bytes or default_memory_bytes(),
    )
    with suppress(FileNotFoundError):
        socket_path.unlink()
    path = Path(request.log_file) if request.log_file else default_log(request)
    with daemons.log_file(path) as file:
        start = file.tell()
        try:
            daemons.start(
                [*program, request.task, f"--rank={rank}"], complete.to_json(), file, log,
                daemon_name=f"the master of task {request.task!r}", deadline_s=deadline_s,
            )  # fmt: skip
            if not is_alive(socket_path):
                raise DieselError(f"the master of task {request.task!r} ended at once")
        except DieselError as error:
            daemons.add_log_tail(error, file, start)
            raise


def _check_descriptors(world: int) -> None:
    """A master raises its soft limit of open files, but not the hard one. Raises UsageError."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_MIN + 2 * world  # one connection to each other node, and one from it
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"a master of {world} nodes needs {needed} open files, and {limit} are allowed here",
            advice=f"ulimit -Hn {2 * needed}, or LimitNOFILE in what starts the job",
        )


def _is_registered(request: TaskRequest) -> bool:
    url = parse_url(request.url)
    return url.scheme in SERVER_SCHEMES or bool(url.meta)


def socket_path(request: TaskRequest) -> Path:
    """`request` has a rank. The socket's folder exists while a master runs or starts."""
    assert request.rank is not None
    return _folder(request) / str(request.rank) / "socket"


def _folder(request: TaskRequest) -> Path:
    return _tasks() / request.name.digest.hex()[:32]


def _tasks() -> Path:
    return private_folder(runtime_folder() / "tasks")
