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

from .. import daemons
from ..available_memory import fair_bytes
from ..errors import (
    BusyError,
    ConflictError,
    DieselError,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from ..settings import private_folder, runtime_folder, state_folder
from ..urls import SERVER_SCHEMES, parse_url
from .addresses import listening
from .client_connection import connect_to
from .membership import node_of
from .request import TaskRequest

log = logging.getLogger("diesel.task")

MASTER = (sys.executable, "-m", "diesel_fs.task")

START_DEADLINE_S = 60.0
"""How long a master may take to come up: it may fetch a snapshot first."""

OTHERS_FIRST_S = 2.0
"""How long all but the first process of a node wait for that to start the master: its errors are
seen there."""

MARK_S, MISSED_S = 10.0, 60.0
"""How often a master says on its node that it lives, and for how long it is missed by who comes to
its task without a rank. Who was there all the time goes on missing it."""

DESCRIPTORS_MIN = 512
"""Open files of a master besides its connections to other nodes: for clients, and for chunks."""

_FOR_GOOD = (ConflictError, NotFoundError, PermissionDenied, UsageError)
"""What trying again does not mend."""

_NOBODY, _ALONE = "127.0.0.1:1", "127.0.0.1:0"
_OPTIONS, _LOCK = "options", "lock"
_LOOK_S = 0.02
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
    if others := _unlike(request, place):
        log.warning(
            "%s: without effect, as this node's master of task %r runs with other options; it ends"
            " when nobody has used it for some seconds", ", ".join(others), request.task,
        )  # fmt: skip
    return place


def _joined(request: TaskRequest, program: Sequence[str]) -> Path:
    environment = os.environ
    rank, world = node_of(environment, request.rank, request.world)
    folder = _folder(request)
    if world == 1 and request.rank is None and not any(map(environment.get, _NODE)):
        alive = [each for each in _sockets(folder) if is_alive(each)]
        if len(alive) == 1:
            return alive[0]
        killed = [each.with_name("socket") for each in sorted(folder.glob(f"*/{_OPTIONS}"))]
        if not alive:
            killed = [each for each in killed if not _is_of_old(each)]
        if not alive and len(killed) == 1:
            revived(request, killed[0], program=program)
            if is_alive(killed[0]):
                return killed[0]
    request = replace(request, rank=rank, world=world)
    place = socket_of(request)
    if is_alive(place) or (not _is_first(environment) and _comes(place, OTHERS_FIRST_S)):
        return place
    _start_alone(request, place, program)
    return place


def _unlike(request: TaskRequest, place: Path) -> list[str]:
    """The options that say something else than what a running master was started with."""
    options = place.with_name(_OPTIONS)
    try:
        if options.stat().st_mtime_ns < place.stat().st_mtime_ns:  # of one that was killed before
            return []
        return request.unlike(TaskRequest.from_json(options.read_bytes()))
    except (OSError, UsageError):  # it has just come up, or ends; or it is of another version
        return []


def revived(request: TaskRequest, place: Path, *, program: Sequence[str] = MASTER) -> bool:
    """Start the master at a socket again where it was killed; whether that was so. Raises as
    `join`: after an error that passes it may be called again, after another it does nothing."""
    if is_alive(place):
        return False
    try:
        return _start_again(request, place, program)
    except _FOR_GOOD:
        forget(place)
        tidy(place)
        raise


def forget(place: Path) -> None:
    """The master at a socket ends by itself: nobody is to start it again."""
    with suppress(OSError):
        place.with_name(_OPTIONS).unlink()


def tidy(place: Path) -> None:
    """Take a node's folder away, and its task's after the last one; where a master is there, is
    coming up, or was killed, they stay."""
    with suppress(OSError, DieselError), _locked(place, patience_s=0.0), _folders_stay():
        if not place.exists() and not place.with_name(_OPTIONS).exists():
            place.with_name(_LOCK).unlink()
            place.parent.rmdir()
            place.parent.parent.rmdir()


def mark(place: Path) -> None:
    """The master at a socket lives: said every `MARK_S`."""
    with suppress(OSError):
        os.utime(place.with_name(_OPTIONS))


def _is_of_old(place: Path) -> bool:
    """Whether the master that was killed here was of a job that has been over for long: then what
    is left of it goes, as a new job is not to become what that was."""
    try:
        if place.with_name(_OPTIONS).stat().st_mtime > time.time() - MISSED_S:
            return False
        with _locked(place, patience_s=0.0):
            if is_alive(place):
                return False
            place.unlink(missing_ok=True)
            forget(place)
    except (OSError, DieselError):
        return False
    tidy(place)
    return True


def is_followed(place: Path) -> bool:
    """Whether another master is there, or coming up, at a socket that was closed."""
    if place.exists():
        return True
    try:
        lock = os.open(place.with_name(_LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # nobody starts one
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def is_alive(place: Path) -> bool:
    """Whether somebody takes connections at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            connect_to(probe, os.fspath(place))
        except TimeoutError:  # it is there, and hangs: another would not be better off
            return True
        except OSError:
            return False
    return True


def default_log(request: TaskRequest) -> Path:
    """Where the log of a node's master goes."""
    return state_folder() / f"task-{request.dataset}-{request.task}-{request.rank}.log"


def ends(place: Path, patience_s: float) -> bool:
    """Whether the master at a socket is gone within some time."""
    until_s = time.monotonic() + patience_s
    while is_alive(place):
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _sockets(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*/socket"))


def _is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the first process of its node, as far as anybody says."""
    return next((environment[each] for each in _FIRST if environment.get(each)), "0").strip() == "0"


def _comes(place: Path, patience_s: float) -> bool:
    """Whether somebody else starts a master in time."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        if is_alive(place):
            return True
    return False


@contextmanager
def _locked(place: Path, patience_s: float) -> Iterator[None]:
    """Alone among those who would start a master at a socket, or take its folder away. Raises
    BusyError."""
    until_s = time.monotonic() + patience_s
    while (lock := _lock(place)) is None:
        if time.monotonic() > until_s:
            raise BusyError("another process is starting this task's master")
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        _unlock(lock)


def _lock(place: Path) -> int | None:
    """The lock, held; None where another process has it. The folder is made where it is missing."""
    with _folders_stay():
        private_folder(place.parent.parent)
        private_folder(place.parent)
        lock = _open_lock(place.with_name(_LOCK))
        if _is_taken(lock):
            os.close(lock)
            return None
        return lock


@contextmanager
def _folders_stay() -> Iterator[None]:
    """Nobody else makes a folder of a task, or takes one away: it is a matter of microseconds.
    Raises BusyError where somebody was stopped in them."""
    lock = _open_lock(_tasks() / _LOCK)
    until_s = time.monotonic() + _CONNECT_S
    while _is_taken(lock):
        if time.monotonic() > until_s:
            os.close(lock)
            raise BusyError(f"another process is at the folders in {_tasks()}")
        time.sleep(_LOOK_S / 10)
    try:
        yield
    finally:
        _unlock(lock)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _is_taken(lock: int) -> bool:
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


def _start_alone(request: TaskRequest, place: Path, program: Sequence[str]) -> None:
    """Starts a master where there is none by now. Raises DieselError."""
    try:
        with _locked(place, START_DEADLINE_S + _CONNECT_S):
            if not is_alive(place):
                _start(request, place, program)
                _remember(request, place)
    except DieselError:
        tidy(place)
        raise


def _start_again(request: TaskRequest, place: Path, program: Sequence[str]) -> bool:
    """Starts a master that was killed as the node that it was; False where it ended by itself.
    Whatever the request does not say stays what it was. Raises DieselError."""
    try:
        before = TaskRequest.from_json(place.with_name(_OPTIONS).read_bytes())
    except (OSError, UsageError):
        return False
    default = TaskRequest()
    said = {each.name: getattr(request, each.name) for each in fields(TaskRequest)}
    said = {name: value for name, value in said.items() if value != getattr(default, name)}
    if request.memory_guessed:
        del said["memory_bytes"], said["memory_guessed"]
    elif request.memory_bytes:
        said["memory_guessed"] = False
    _start_alone(replace(before, **said), place, program)
    return True


def _remember(request: TaskRequest, place: Path) -> None:
    """Keeps what a master was started with, but for what is secret, or may hold a password."""
    said = replace(request, url="", user="", key="", task_key="").to_json()
    new = place.with_name(f"{_OPTIONS}.new")
    try:
        new.write_bytes(said)
        new.replace(place.with_name(_OPTIONS))
    except OSError:  # no space: it will not be started again
        with suppress(OSError):
            new.unlink()
        forget(place)  # of another one


def _start(request: TaskRequest, place: Path, program: Sequence[str]) -> None:
    """Starts a master whose rank and world are known. Raises DieselError."""
    rank, world = request.rank, request.world
    assert rank is not None
    assert world is not None
    if world == 1 and not request.peers and not _is_registered(request):
        # A node that is alone has nobody to be found by: it is its own list of nodes.
        request = replace(request, peers=(_NOBODY,), task_key=secrets.token_hex(32), listen=_ALONE)
    _check_descriptors(world)
    host, port = listening(
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
        memory_bytes=request.memory_bytes or fair_bytes(),
    )
    with suppress(FileNotFoundError):
        place.unlink()
    path = Path(request.log_file) if request.log_file else default_log(request)
    with daemons.log_file(path) as file:
        start = file.tell()
        try:
            daemons.start(
                [*program, request.task, f"--rank={rank}"], asked.to_json(), file, log,
                what=f"the master of task {request.task!r}", deadline_s=START_DEADLINE_S,
            )  # fmt: skip
            if not is_alive(place):
                raise DieselError(f"the master of task {request.task!r} ended at once")
        except DieselError as error:
            daemons.add_last_lines(error, file, start)
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


def socket_of(request: TaskRequest) -> Path:
    """Where the master that a request asks for listens to its clients; its rank is known. The
    folder is there while one runs, or comes up."""
    assert request.rank is not None
    return _folder(request) / str(request.rank) / "socket"


def _folder(request: TaskRequest) -> Path:
    """What a task has on this machine."""
    return _tasks() / request.name.digest.hex()[:32]


def _tasks() -> Path:
    return private_folder(runtime_folder() / "tasks")
