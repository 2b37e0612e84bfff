"""Finding the master of a task on this node, and starting it where there is none.

Owned here: where its socket lies, who of several processes starts it, and what its start needs. Not
owned: what it does (`__main__.py`), speaking to it (`link.py`).

A task has a folder in the user's runtime folder, a node of it one in that: `socket`; `lock`, which
is held while a master is being started; and `options`, what it was started with, secrets and
addresses with passwords left out. A master that ends by itself takes that along, so whoever finds
it beside a dead socket knows that the master was killed, and which node it was: who has joined
without naming one must not become another. What a job of old has left is cleared away by the next.
The last master of a task's nodes takes the folders along. Any thread, any process.
"""

import fcntl
import logging
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

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
from ..urls import SERVER_SCHEMES, parse_url
from .addresses import listen_address
from .client_connection import connect_unix
from .membership import resolve_node
from .options import TaskRequest

log = logging.getLogger("diesel.task")

MASTER = (sys.executable, "-m", "diesel_fs.peers")

START_DEADLINE_S = 60.0
"""How long a master may take to come up: it may fetch a snapshot first."""

FIRST_PROCESS_WAIT_S = 2.0
"""How long all but the first process of a node wait for that to start the master: its errors are
seen there."""

ALIVE_MARK_S, KILLED_REMEMBERED_S = 10.0, 60.0
"""How often a master says on its node that it lives, and for how long it is missed by who comes to
its task without a rank. Who was there all the time goes on missing it."""

DESCRIPTORS_MIN = 512
"""Open files of a master besides its connections to other nodes: for clients, and for chunks."""

_PERMANENT_ERRORS = (ConflictError, NotFoundError, PermissionDenied, UsageError)
"""What trying again does not mend."""

_UNREACHABLE_PEER, _ALONE = "127.0.0.1:1", "127.0.0.1:0"
_OPTIONS, _LOCK = "options", "lock"
_POLL_S = 0.02
_CONNECT_S = 5.0
_FIRST = ("LOCAL_RANK", "SLURM_LOCALID")
_NODE = ("SLURM_NODEID", "GROUP_RANK")


def join(request: TaskRequest, *, program: Sequence[str] = MASTER) -> Path:
    """The socket of this node's master; started where none is alive. One that runs stays as it is:
    options that ask for another have no effect, which is a warning.

    Raises what kept it from coming up, with the end of its log; UsageError for a rank or an address
    without meaning.
    """
    place = _joined(request, program)
    if others := _differing_options(request, place):
        log.warning(
            "%s: without effect, as this node's master of task %r runs with other options; it ends"
            " when nobody has used it for some seconds", ", ".join(others), request.task,
        )  # fmt: skip
    return place


def _joined(request: TaskRequest, program: Sequence[str]) -> Path:
    environment = os.environ
    rank, world = resolve_node(environment, request.rank, request.world)
    folder = _folder(request)
    if world == 1 and request.rank is None and not any(map(environment.get, _NODE)):
        alive = [each for each in _sockets(folder) if is_alive(each)]
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
    place = socket_path(request)
    if is_alive(place) or (
        not _is_first(environment) and _wait_until_alive(place, FIRST_PROCESS_WAIT_S)
    ):
        return place
    _start_locked(request, place, program)
    return place


def _differing_options(request: TaskRequest, socket_path: Path) -> list[str]:
    """The options that say something else than what a running master was started with."""
    options = socket_path.with_name(_OPTIONS)
    try:
        if (
            options.stat().st_mtime_ns < socket_path.stat().st_mtime_ns
        ):  # of one that was killed before
            return []
        return request.differing_options(TaskRequest.from_json(options.read_bytes()))
    except (OSError, UsageError):  # it has just come up, or ends; or it is of another version
        return []


def restart_killed(
    request: TaskRequest, socket_path: Path, *, program: Sequence[str] = MASTER
) -> bool:
    """Start the master at a socket again where it was killed; whether that was so. Raises as
    `join`: after an error that passes it may be called again, after another it does nothing."""
    if is_alive(socket_path):
        return False
    try:
        return _start_again(request, socket_path, program)
    except _PERMANENT_ERRORS:
        mark_ended(socket_path)
        remove_folders(socket_path)
        raise


def mark_ended(socket_path: Path) -> None:
    """The master at a socket ends by itself: nobody is to start it again."""
    with suppress(OSError):
        socket_path.with_name(_OPTIONS).unlink()


def remove_folders(socket_path: Path) -> None:
    """Take a node's folder away, and its task's after the last one; where a master is there, is
    coming up, or was killed, they stay."""
    with suppress(OSError, DieselError), _locked(socket_path, patience_s=0.0), _folders_locked():
        if not socket_path.exists() and not socket_path.with_name(_OPTIONS).exists():
            socket_path.with_name(_LOCK).unlink()
            socket_path.parent.rmdir()
            socket_path.parent.parent.rmdir()


def mark_alive(socket_path: Path) -> None:
    """The master at a socket lives: said every `ALIVE_MARK_S`."""
    with suppress(OSError):
        os.utime(socket_path.with_name(_OPTIONS))


def _remove_if_stale(socket_path: Path) -> bool:
    """Whether the master that was killed here was of a job that has been over for long: then what
    is left of it goes, as a new job is not to become what that was."""
    try:
        if socket_path.with_name(_OPTIONS).stat().st_mtime > time.time() - KILLED_REMEMBERED_S:
            return False
        with _locked(socket_path, patience_s=0.0):
            if is_alive(socket_path):
                return False
            socket_path.unlink(missing_ok=True)
            mark_ended(socket_path)
    except (OSError, DieselError):
        return False
    remove_folders(socket_path)
    return True


def has_successor(socket_path: Path) -> bool:
    """Whether another master is there, or coming up, at a socket that was closed."""
    if socket_path.exists():
        return True
    try:
        lock = os.open(socket_path.with_name(_LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # nobody starts one
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def is_alive(socket_path: Path) -> bool:
    """Whether somebody takes connections at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            connect_unix(probe, os.fspath(socket_path))
        except TimeoutError:  # it is there, and hangs: another would not be better off
            return True
        except OSError:
            return False
    return True


def default_log(request: TaskRequest) -> Path:
    """Where the log of a node's master goes."""
    return state_folder() / f"task-{request.dataset}-{request.task}-{request.rank}.log"


def wait_until_gone(socket_path: Path, patience_s: float) -> bool:
    """Whether the master at a socket is gone within some time."""
    until_s = time.monotonic() + patience_s
    while is_alive(socket_path):
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _sockets(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*/socket"))


def _is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the first process of its node, as far as anybody says."""
    return next((environment[each] for each in _FIRST if environment.get(each)), "0").strip() == "0"


def _wait_until_alive(socket_path: Path, patience_s: float) -> bool:
    """Whether somebody else starts a master in time."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        time.sleep(_POLL_S)
        if is_alive(socket_path):
            return True
    return False


@contextmanager
def _locked(socket_path: Path, patience_s: float) -> Iterator[None]:
    """Alone among those who would start a master at a socket, or take its folder away. Raises
    BusyError."""
    until_s = time.monotonic() + patience_s
    while (lock := _try_lock(socket_path)) is None:
        if time.monotonic() > until_s:
            raise BusyError("another process is starting this task's master")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        _unlock(lock)


def _try_lock(socket_path: Path) -> int | None:
    """The lock, held; None where another process has it. The folder is made where it is missing."""
    with _folders_locked():
        private_folder(socket_path.parent.parent)
        private_folder(socket_path.parent)
        lock = _open_lock(socket_path.with_name(_LOCK))
        if _is_locked_elsewhere(lock):
            os.close(lock)
            return None
        return lock


@contextmanager
def _folders_locked() -> Iterator[None]:
    """Nobody else makes a folder of a task, or takes one away: it is a matter of microseconds.
    Raises BusyError where somebody was stopped in them."""
    lock = _open_lock(_tasks() / _LOCK)
    until_s = time.monotonic() + _CONNECT_S
    while _is_locked_elsewhere(lock):
        if time.monotonic() > until_s:
            os.close(lock)
            raise BusyError(f"another process is at the folders in {_tasks()}")
        time.sleep(_POLL_S / 10)
    try:
        yield
    finally:
        _unlock(lock)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _is_locked_elsewhere(lock: int) -> bool:
    """Whether somebody else has a lock; else it is held now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _unlock(lock: int) -> None:
    """Closing alone does not: a child that another thread has forked meanwhile has it open, too."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _start_locked(request: TaskRequest, socket_path: Path, program: Sequence[str]) -> None:
    """Starts a master where there is none by now. Raises DieselError."""
    try:
        with _locked(socket_path, START_DEADLINE_S + _CONNECT_S):
            if not is_alive(socket_path):
                _start(request, socket_path, program)
                _remember(request, socket_path)
    except DieselError:
        remove_folders(socket_path)
        raise


def _start_again(request: TaskRequest, socket_path: Path, program: Sequence[str]) -> bool:
    """Starts a master that was killed as the node that it was; False where it ended by itself.
    Whatever the request does not say stays what it was. Raises DieselError."""
    try:
        before = TaskRequest.from_json(socket_path.with_name(_OPTIONS).read_bytes())
    except (OSError, UsageError):
        return False
    default = TaskRequest()
    given = {each.name: getattr(request, each.name) for each in fields(TaskRequest)}
    given = {name: value for name, value in given.items() if value != getattr(default, name)}
    if request.memory_is_default:
        del given["memory_bytes"], given["memory_guessed"]
    elif request.memory_bytes:
        given["memory_guessed"] = False
    _start_locked(replace(before, **given), socket_path, program)
    return True


def _remember(request: TaskRequest, socket_path: Path) -> None:
    """Keeps what a master was started with, but for what is secret, or may hold a password."""
    said = replace(request, url="", user="", key="", task_key="").to_json()
    new = socket_path.with_name(f"{_OPTIONS}.new")
    try:
        new.write_bytes(said)
        new.replace(socket_path.with_name(_OPTIONS))
    except OSError:  # no space: it will not be started again
        with suppress(OSError):
            new.unlink()
        mark_ended(socket_path)  # of another one


def _start(request: TaskRequest, socket_path: Path, program: Sequence[str]) -> None:
    """Starts a master whose rank and world are known. Raises DieselError."""
    rank, world = request.rank, request.world
    assert rank is not None
    assert world is not None
    if world == 1 and not request.peers and not _is_registered(request):
        # A node that is alone has nobody to be found by: it is its own list of nodes.
        request = replace(
            request, peers=(_UNREACHABLE_PEER,), task_key=secrets.token_hex(32), listen=_ALONE
        )
    _check_descriptors(world)
    host, port = listen_address(
        request.listen,
        request.advertise,
        rank=rank,
        world=world,
        peers=request.peers,
        url=parse_url(request.url),
    )
    asked = replace(
        request,
        listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        memory_bytes=request.memory_bytes or default_memory_bytes(),
    )
    with suppress(FileNotFoundError):
        socket_path.unlink()
    path = Path(request.log_file) if request.log_file else default_log(request)
    with daemons.log_file(path) as file:
        start = file.tell()
        try:
            daemons.start(
                [*program, request.task, f"--rank={rank}"], asked.to_json(), file, log,
                daemon_name=f"the master of task {request.task!r}", deadline_s=START_DEADLINE_S,
            )  # fmt: skip
            if not is_alive(socket_path):
                raise DieselError(f"the master of task {request.task!r} ended at once")
        except DieselError as error:
            daemons.add_log_tail(error, file, start)
            raise


def _check_descriptors(world: int) -> None:
    """Raises UsageError where the connections of a task of so many nodes need more descriptors than
    a process may have here; what a soft limit forbids, a master allows itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_MIN + 2 * world  # one connection to each other node, and one from it
    if most != resource.RLIM_INFINITY and most < needed:
        raise UsageError(
            f"a master of {world} nodes wants {needed} open files, and {most} are allowed here",
            advice=f"ulimit -Hn {2 * needed}, or LimitNOFILE in what starts the job",
        )


def _is_registered(request: TaskRequest) -> bool:
    """Whether the nodes of a task can find each other without being named."""
    url = parse_url(request.url)
    return url.scheme in SERVER_SCHEMES or bool(url.meta)


def socket_path(request: TaskRequest) -> Path:
    """Where the master that a request asks for listens to its clients; its rank is known. The
    folder is there while one runs, or comes up."""
    assert request.rank is not None
    return _folder(request) / str(request.rank) / "socket"


def _folder(request: TaskRequest) -> Path:
    """What a task has on this machine."""
    return _tasks() / request.name.digest.hex()[:32]


def _tasks() -> Path:
    return private_folder(runtime_folder() / "tasks")
