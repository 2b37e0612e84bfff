"""Starts the Python programs of tests by a fork of a process that has imported them already.

The start of a program costs 0.3 to 0.5 s of a processor, nearly all of it for imports, and a
test run starts some thousands of programs. So each pytest process has a *zygote*: a process
without threads that has imported the modules of the programs, and waits. `installed` replaces
`subprocess.Popen` by a class that, for a command such as `python -m dlcmd ls`, sends arguments,
environment and descriptors to the zygote, which forks. The child runs the module, script or code
as a new interpreter would, after 20 ms. A second zygote, for programs that import torch, starts
with the first of these programs.

As with `exec`, the program is a process of its own, with memory, descriptors, environment and
arguments (in `/proc`, too), folder, session, limits, signals and exit status of its own;
`tests/test_zygote.py` compares the two ways. Its parent is the zygote, though, and the modules
were imported under the zygote's environment. A command is started by `exec` if this could
matter: options of Python, other variables that an interpreter reads, another user or namespace,
`preexec_fn`, and any command in a test that is marked `real_start`. Each program has such tests,
for each way to start it.

A program that was forked so starts its own children by `exec`, because it must be their parent.
Only a daemon (`diesel_fs/system/daemons.py`), which has no parent, is forked by the zygote
again.

Concurrency: any thread may start programs. A zygote serves one request after the other.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import re
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from resource import getrlimit  # tests replace that of the module
from typing import NoReturn

from diesel_fs.system import syscalls
from diesel_fs.system.daemons import DETACH

OURS = ("diesel_fs", "diesel_server", "dlcmd")
"""The packages that a zygote imports, with their imports, but without modules that need torch."""

PREPARED = (*OURS, "tests", "torch")
"""Programs of these packages may be forked."""

_ROOT = Path(__file__).parents[1]
PATH = [str(_ROOT), str(_ROOT / "server"), str(_ROOT / "cli")]
"""The folders of this tree's modules."""

_EXECUTABLE = sys.executable
_DIES_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_READ_AT_START = re.compile(r"PYTHON|LD_|LC_|LANG$|MALLOC_|GLIBC_|OMP_|MKL_")  # by interpreter or C
_FREE = ("PYTHONPATH", "PYTHONFAULTHANDLER")
_TORCH = re.compile(r"^\s*(?:import|from) torch\b", re.MULTILINE)
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_LENGTH, _ANSWER = struct.Struct("<I"), struct.Struct("<Bi")
_STARTED, _FAILED, _ENDED = range(3)
_CANNOT_FLUSH = 120  # the exit code of an interpreter that could not flush stdout
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MEMORY_MAP = struct.Struct("<12Q2I")  # struct prctl_mm_map
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_ulong
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


@dataclass(frozen=True, slots=True)
class Command:
    way: str  # "-m", "-c" or "" for a script
    what: str
    words: list[str]  # as `/proc` shows them
    arguments: list[str]
    is_safe: bool  # -P: the current folder is no place for modules
    is_detached: bool
    dies_with_parent: bool

    @classmethod
    def parse(cls, words: list[str]) -> "Command | None":
        dies = words[:3] == _DIES_WITH_PARENT
        words = words[3:] if dies else words
        prefix = [_EXECUTABLE, *DETACH]
        is_detached = words[: len(prefix)] == prefix
        words = words[len(prefix) :] if is_detached else words
        shown, is_safe = words, words[1:2] == ["-P"]
        words = [*words[:1], *words[2:]] if is_safe else words
        if words[:1] != [_EXECUTABLE] or len(words) < 2:
            return None
        way, rest = ("", words[1:]) if words[1][:1] != "-" else (words[1], words[2:])
        if way not in ("", "-m", "-c") or not rest:
            return None
        if way == "-m" and rest[0].partition(".")[0] not in PREPARED:
            return None
        if not way and not rest[0].endswith(".py"):
            return None
        return cls(way, rest[0], shown, rest[1:], is_safe, is_detached, dies)

    @property
    def needs_torch(self) -> bool:
        """Whether its own source imports torch."""
        if self.way == "-c":
            return bool(_TORCH.search(self.what))
        if self.way == "-m":
            spec = find_spec(self.what) if not self.what.startswith("torch") else None
            path = spec.origin if spec is not None else None
        else:
            path = self.what
        return path is None or bool(_TORCH.search(Path(path).read_text(encoding="utf-8")))


# the starting process -----------------------------------------------------------------------------


class _State:
    def __init__(self) -> None:
        self.is_on = False  # whether commands are forked
        self.must_exec = self.must_fork = False
        self.only_detached = False  # in a process that was forked so
        self.sockets: dict[bool, str] = {}  # of the zygotes, with and without torch
        self.folder = ""
        self.identity: list[object] = []
        self.variables: dict[str, str] = {}
        self.path: set[str] = set()
        self.lock = threading.Lock()

    @property
    def can_fork(self) -> bool:
        return self.is_on and not self.must_exec


_state = _State()
_Plain = subprocess.Popen


class Popen(subprocess.Popen):  # type: ignore[type-arg]  # of bytes or text, as the other
    """`subprocess.Popen`; a zygote forks the programs that it can run."""

    _relay: socket.socket | None = None

    def _execute_child(  # type: ignore[no-untyped-def]  # the library's own method
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, process_group,
    ) -> None:  # fmt: skip
        special = executable or preexec_fn or not close_fds or shell or process_group != -1
        is_plain = not special and (gid, gids, uid, umask) == (None, None, None, -1)
        command = None
        if is_plain and _state.can_fork and not isinstance(args, str | bytes | os.PathLike):
            command = _forkable([os.fsdecode(word) for word in args], env)
        if command is None:
            assert not _state.must_fork, args
            super()._execute_child(  # type: ignore[misc]  # a private method
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        sys.audit("subprocess.Popen", args[0], args, cwd, env)
        streams = [0 if p2cread == -1 else p2cread, 1 if c2pwrite == -1 else c2pwrite]
        streams.append(2 if errwrite == -1 else errwrite)
        try:
            self._relay, self.pid = _fork(
                command, cwd, env, streams, sorted(pass_fds), bool(start_new_session)
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(  # type: ignore[attr-defined]  # a private method
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
            )

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._relay is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]  # private
        try:
            kind, status = _receive_answer(self._relay, socket.MSG_DONTWAIT if wait_flags else 0)
        except BlockingIOError:
            return 0, 0
        assert kind == _ENDED
        self._relay.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._relay is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc,no-any-return]  # private
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]  # private
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]  # private
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]  # private
        return self.returncode


def _forkable(words: list[str], environment: Mapping[str, str] | None) -> Command | None:
    command = Command.parse(words)
    if command is None or (_state.only_detached and not command.is_detached):
        return None
    wanted = os.environ if environment is None else environment
    places = wanted.get("PYTHONPATH", "").split(os.pathsep)
    same = all(
        wanted.get(name) == _state.variables.get(name)
        for name in wanted.keys() | _state.variables.keys()
        if _READ_AT_START.match(name) and name not in _FREE
    )
    if not same or not set(filter(None, places)) <= _state.path:
        return None
    return command if _identity() == _state.identity else None


def _identity() -> list[object]:
    """The properties that a forked process gets from the zygote, not from the process that starts
    it."""
    spaces: list[object] = [os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES]
    return [*spaces, *os.getresuid(), *os.getresgid(), *sorted(os.getgroups()), os.stat("/").st_ino]


def _fork(
    command: Command,
    cwd: str | os.PathLike[str] | None,
    environment: Mapping[str, str] | None,
    streams: Sequence[int],
    passed: Sequence[int],
    new_session: bool,
) -> tuple[socket.socket, int]:
    """Let a zygote run a command. Returns the connection that will report its end, and its process
    number. Raises OSError."""
    ignored = [
        int(number)
        for number in signal.valid_signals()
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    request = {
        "command": asdict(command),
        "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
        "environment": {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if environment is None else environment).items()
        },
        "passed": list(passed),
        "new_session": new_session,
        "ignored": ignored,
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "limits": [getrlimit(each) for each in _LIMITS],
        "umask": _umask(),
    }
    text = json.dumps(request).encode()
    relay = socket.socket(socket.AF_UNIX)
    try:
        relay.connect(_address(needs_torch=command.needs_torch))
        socket.send_fds(relay, [_LENGTH.pack(len(text))], [*streams, *passed])
        relay.sendall(text)
        kind, value = _receive_answer(relay, 0)
        if kind == _FAILED:
            raise OSError(value, os.strerror(value), cwd)
        if kind == _ENDED:
            raise RuntimeError(f"the zygote could not start {command.words}: status {value}")
    except BaseException:
        relay.close()
        raise
    return relay, value


def _receive_answer(relay: socket.socket, flags: int) -> tuple[int, int]:
    answer = relay.recv(_ANSWER.size, flags)
    if len(answer) < _ANSWER.size:
        raise RuntimeError("the zygote has ended")
    kind, value = _ANSWER.unpack(answer)
    return kind, value


def _umask() -> int:
    """Read from `/proc`, since other threads would see a change."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("Umask:", 1)[1].split()[0], 8)


def _address(*, needs_torch: bool) -> str:
    """The socket of a zygote, which is started if it does not run."""
    with _state.lock:
        if needs_torch not in _state.sockets:
            _start_zygote(needs_torch)
        return _state.sockets[needs_torch]


def _start_zygote(needs_torch: bool) -> None:
    path = f"{_state.folder}/{'torch' if needs_torch else 'plain'}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    words = [_EXECUTABLE, "-m", __name__, str(listening.fileno()), path, str(int(needs_torch))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH)}
    with listening:
        files = [listening.fileno()]
        _zygotes.append(_Plain(words, stdin=subprocess.PIPE, pass_fds=files, env=environment))
    _state.sockets[needs_torch] = path


_zygotes: list["subprocess.Popen[bytes]"] = []


@contextmanager
def installed() -> Iterator[None]:
    """Fork programs that this process starts from now on, if this kernel lets a process set the
    texts that `/proc` shows of it (CONFIG_CHECKPOINT_RESTORE)."""
    if not _can_show():
        yield
        return
    _state.identity, _state.variables, _state.path = _identity(), dict(os.environ), {*sys.path}
    subprocess.Popen = Popen  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="diesel-zygote-") as _state.folder:
        _state.is_on = True
        try:
            yield
        finally:
            subprocess.Popen = _Plain  # type: ignore[misc]
            _state.is_on = False
            for each in _zygotes:
                with each:
                    each.kill()


@contextmanager
def by_exec() -> Iterator[None]:
    before, _state.must_exec = _state.must_exec, True
    try:
        yield
    finally:
        _state.must_exec = before


@contextmanager
def only_by_fork() -> Iterator[None]:
    """Fail during the `with` if a program would be started by `exec`."""
    before, _state.must_fork = _state.must_fork, True
    try:
        yield
    finally:
        _state.must_fork = before


# the zygote ---------------------------------------------------------------------------------------


def main() -> "Job | None":
    """Serve requests until the process that started this one ends. Returns in each forked child,
    with the job to run."""
    listening, path, with_torch = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3]
    _import_all(with_torch == "1")
    _state.is_on, _state.only_detached, _state.folder = True, True, os.path.dirname(path)
    _state.sockets = dict.fromkeys((False, True), path)
    _state.identity, _state.variables, _state.path = _identity(), dict(os.environ), {*sys.path}
    gc.collect()
    gc.freeze()
    return _Zygote(listening).serve()


def _import_all(with_torch: bool) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads must not fork
    subprocess.Popen = Popen  # type: ignore[misc]
    if with_torch:
        importlib.import_module("torch.utils.data")
    for package in map(importlib.import_module, OURS):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            needs_torch = each.name.startswith("diesel_fs.torch.")
            if not each.name.endswith("__main__") and (with_torch or not needs_torch):
                importlib.import_module(each.name)
    del os.environ["OPENBLAS_NUM_THREADS"]


class Job(types.SimpleNamespace):
    """A request, as received by the child that must run it."""


class _Zygote:
    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._relays: dict[int, socket.socket] = {}
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for its forked programs
        signal.set_wakeup_fd(wake.fileno())
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._woken, sys.stdin):
            self._selector.register(each, selectors.EVENT_READ)

    def serve(self) -> Job | None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap()
            if sys.stdin in ready:
                return None
            if self._listening in ready:
                job = self._fork()
                if job is not None:
                    return job

    def _close(self) -> None:
        """Close everything, in a child: otherwise an object that is collected later would close the
        descriptor that has its number then."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for each in (self._listening, self._woken, self._wake, *self._relays.values()):
            each.close()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                with self._relays.pop(pid) as relay, suppress(OSError):
                    relay.sendall(_ANSWER.pack(_ENDED, status))

    def _fork(self) -> Job | None:
        relay, _ = self._listening.accept()
        length, files, _, _ = socket.recv_fds(relay, _LENGTH.size, 250)
        text = bytearray()
        (size,) = _LENGTH.unpack(length)
        while len(text) < size:
            received = relay.recv(size - len(text))
            if not received:
                break
            text += received
        pid = os.fork() if len(text) == size else -1
        if pid == 0:
            self._close()
            return _prepared(json.loads(text), files, relay)
        for each in files:
            os.close(each)
        if pid > 0:
            self._relays[pid] = relay
        return None


def _prepared(request: dict[str, object], files: list[int], relay: socket.socket) -> Job:
    """Give this new process the state of a newly started program; called once."""
    job = Job(**request)
    command = job.command = Command(**job.command)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in job.ignored:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, job.blocked)
    if job.new_session:
        os.setsid()
    os.umask(job.umask)
    try:
        os.chdir(job.cwd)
        _show(command.words, job.environment)
    except OSError as error:
        relay.sendall(_ANSWER.pack(_FAILED, error.errno or 0))
        os._exit(127)
    with relay:
        relay.sendall(_ANSWER.pack(_STARTED, os.getpid()))
    if command.is_detached and os.fork():
        os._exit(0)
    if command.dies_with_parent:
        syscalls.die_with_parent(signal.SIGKILL)
    _take_over(files, [0, 1, 2, *job.passed])
    for each, values in zip(_LIMITS, job.limits, strict=True):
        if list(getrlimit(each)) != values:
            resource.setrlimit(each, tuple(values))
    os.environ.clear()
    os.environ.update(job.environment)
    time.tzset()
    return job


def _take_over(files: list[int], targets: list[int]) -> None:
    """Move the received descriptors to their numbers, and close all others."""
    above = max(targets) + 1
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in files]
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in high:
            with suppress(OSError):
                os.close(each)
    for source, target in zip(high, targets, strict=True):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]  # never replaced


def _show(words: list[str], environment: Mapping[str, str]) -> None:
    """Let `/proc/self/cmdline` and `environ` show these. Raises OSError."""
    texts = [b"".join(os.fsencode(word) + b"\0" for word in words)]
    texts.append(b"".join(os.fsencode(f"{key}={text}\0") for key, text in environment.items()))
    places = []
    for text in texts:
        _shown.append(ctypes.create_string_buffer(text, len(text)))
        start = ctypes.addressof(_shown[-1])
        places += [start, start + len(text)]
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    code, data, stack = map(int, fields[23:25]), map(int, fields[42:44]), int(fields[25])
    heap = [int(fields[44]), _libc.sbrk(0)]
    new = _MEMORY_MAP.pack(*code, *data, *heap, stack, *places, 0, 0, 0xFFFFFFFF)
    if _prctl(_PR_SET_MM, _PR_SET_MM_MAP, new, len(new), 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _can_show() -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _show(["trial"], {})
            code = int(Path("/proc/self/cmdline").read_bytes() != b"trial\0")
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


_shown: list[ctypes.Array[ctypes.c_char]] = []  # the kernel reads it


def run(job: Job) -> None:
    command = job.command
    own = len(_state.variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[: 1 + own] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if not command.is_safe:
        script = os.path.dirname(os.path.abspath(command.what))
        sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(command.way, script))
    sys.argv = [{"-c": "-c"}.get(command.way, command.what), *command.arguments]
    sys.orig_argv = command.words
    if command.way == "-m":
        sys.modules.pop(command.what, None)
        runpy.run_module(command.what, run_name="__main__", alter_sys=True)
    elif command.way == "-c":
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(command.what, "<string>", "exec"), module.__dict__)  # noqa: S102
    else:
        runpy.run_path(command.what, run_name="__main__")


def end(job: Job) -> NoReturn:
    """Run a program to its end, as `Py_FinalizeEx` ends it, except for its modules: destroying them
    would copy the zygote's memory, page by page."""
    code, is_interrupted = 0, False
    try:
        run(job)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
        is_interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        code = _CANNOT_FLUSH
        print(f"Exception ignored in: {sys.stdout!r}\n{error!r}", file=sys.stderr)
    sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    wanted = main()
    if wanted is not None:
        end(wanted)
