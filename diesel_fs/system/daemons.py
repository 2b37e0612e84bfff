"""Starting a program of ours that goes on by itself, and hearing whether it came up.

Owned here: how it is detached, what it gets (one request on stdin, our environment without
secrets), its report (JSON lines on stdout: `pid`, `warning`, `wait_until_ready` or `error`), and
its log. Not owned: what it does, and what its request means. Any thread.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from ..errors import (
    DETAIL,
    DeadlineError,
    DieselError,
    PermissionDenied,
    UsageError,
    error_by_class_name,
)
from .atomic_file import check_file, check_links

LOG_LINES_SHOWN = 15

END_DEADLINE_S = 5.0
"""How long a daemon may take to end that was told to while it came up; it needs 2 s at most."""

_UNEXPLAINED = (DieselError, DeadlineError)
"""An error of another kind tells by itself what was wrong."""

_SECRETS = ("DIESEL_KEY", "DIESEL_TASK_KEY")
_NEEDED = ("PATH", "LD_LIBRARY_PATH")  # to be found, and to find libraries

# The daemon must be nobody's child: no zombie where its starter lives on, no hang-up with it. The
# interpreter that forks has no threads and becomes the daemon by exec, so nothing is inherited.
_DETACH = "import os, sys; os._exit(0) if os.fork() else os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """What a daemon is asked to be: fields of what JSON has, of tuples, or of other requests."""

    BYTES_MAX: ClassVar[int]
    """How long it may be as it travels."""

    def to_json(self) -> bytes:
        """The request as it travels. Raises UsageError where it is too long."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > self.BYTES_MAX:
            raise UsageError(f"a request of {len(text)} bytes (at most {self.BYTES_MAX})")
        return text

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """The request that was sent. Raises UsageError for anything else."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"not a request: {error}") from error
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: object) -> Self:
        """The request that JSON has made values of. Raises UsageError for anything else."""
        if not isinstance(values, dict) or set(values) != {each.name for each in fields(cls)}:
            raise UsageError(f"not a {cls.__name__}: other fields than this version's")
        return cls(**{each.name: _field(each.type, values[each.name]) for each in fields(cls)})


def _field(kind: object, value: object) -> object:
    """A field's value out of what JSON has made of it."""
    if isinstance(kind, type) and issubclass(kind, DaemonRequest):
        return kind.from_values(value)
    return tuple(value) if isinstance(value, list) else value


def start(
    command: Sequence[str],
    text: bytes,
    log: BinaryIO,
    logger: logging.Logger,
    *,
    daemon_name: str,
    deadline_s: float,
    pass_fds: Sequence[int] = (),
) -> Mapping[str, object]:
    """Starts a daemon and returns what it says when it is ready.

    What it warns of is a warning of `logger` here, too. `daemon_name` is what comes up, for
    messages. Raises the error that it reports, DieselError where it ends without a word,
    DeadlineError where it is not ready in time: it is killed then. Where this call is interrupted,
    the daemon is told to end. After an error or an interruption it has ended. It inherits the
    descriptors `pass_fds`, under their numbers.
    """
    detach = [sys.executable, "-I", "-S", "-c", _DETACH]
    receiver, sender = os.pipe()
    with open(receiver, "rb", buffering=0) as file:
        report_reader = _Report(file, daemon_name)
        try:
            try:
                starter = subprocess.Popen(
                    [*detach, *command],
                    stdin=subprocess.PIPE,
                    stdout=sender,
                    stderr=log,
                    cwd="/",
                    env=environment(),
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
            finally:
                os.close(sender)
            with suppress(BrokenPipeError):
                starter.communicate(text)
            return report_reader.wait_until_ready(logger, deadline_s)
        except DeadlineError:
            report_reader.wait_for_end(signal.SIGKILL)
            raise
        except Exception:
            report_reader.wait_for_end()
            raise
        except BaseException:
            report_reader.wait_for_end(signal.SIGTERM, signal.SIGKILL)
            raise


def environment() -> dict[str, str]:
    """Ours without secrets; the daemon finds the modules that we run."""
    kept = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def minimal_environment() -> dict[str, str]:
    """What a program needs that is not ours, or that opens no store: of what this process has, as
    secrets of any name, it gets nothing else.
    """
    kept = {name: os.environ[name] for name in _NEEDED if name in os.environ}
    return {**kept, "LC_ALL": "C"}


@contextmanager
def minimal_environment_set() -> Iterator[None]:
    """This process has the bare environment meanwhile, as do programs that a library starts."""
    before = dict(os.environ)
    bare = minimal_environment()
    for name in before.keys() - bare:
        del os.environ[name]
    os.environ.update(bare)
    try:
        yield
    finally:
        del os.environ["LC_ALL"]
        os.environ.update(before)


def report(what: Mapping[str, object]) -> None:
    """What a daemon says to whoever started it, who may be gone."""
    with suppress(OSError):
        os.write(1, json.dumps(what).encode() + b"\n")


def notify_systemd() -> None:
    """That we are ready, where we are a service of `Type=notify`; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"READY=1", address.replace("@", "\0", 1) if address[0] == "@" else address)


def is_starter_gone() -> bool:
    """Whether nobody reads a daemon's report any more: whoever started it has ended, or gave up."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class _Report:
    """What a daemon says while it comes up."""

    def __init__(self, file: FileIO, what: str) -> None:
        self._file = file
        self._what = what
        self._text = b""
        self._pid = 0

    def wait_until_ready(self, logger: logging.Logger, deadline_s: float) -> Mapping[str, object]:
        """What it says when it is ready. Raises what it reports, DieselError, DeadlineError."""
        for line in self._lines(deadline_s):
            if "error" in line:
                raise error_by_class_name(line["error"], line["message"], line["advice"])
            if "warning" in line:
                logger.warning("%s", line["warning"])
            if "ready" in line:
                return line
        raise DieselError(f"{self._what} did not come up")

    def wait_for_end(self, *numbers: signal.Signals) -> None:
        """Waits for the daemon's end, to which it comes by itself, or by the first of these
        signals, or, where that takes too long, by the next.
        """
        with suppress(DeadlineError):
            if not self._pid:  # it says its number in a moment
                next(self._lines(END_DEADLINE_S), None)
        if not self._pid:  # it has ended, or will when it finds that nobody hears it
            return
        with suppress(ProcessLookupError), open(os.pidfd_open(self._pid), "rb") as process:
            for number in numbers or (0,):
                signal.pidfd_send_signal(process.fileno(), number)
                if select.select([process], [], [], END_DEADLINE_S)[0]:
                    return

    def _lines(self, deadline_s: float) -> Iterator[dict[str, str]]:
        """Its lines, to its end. Raises DeadlineError where none comes any more in time."""
        until_s = time.monotonic() + deadline_s
        while select.select([self._file], [], [], max(0.0, until_s - time.monotonic()))[0]:
            read = self._file.read(4096)
            if not read:
                return
            *lines, self._text = (self._text + read).split(b"\n")
            for line in map(json.loads, lines):
                self._pid = line.get("pid", self._pid)
                yield line
        raise DeadlineError(f"{self._what} did not come up within {deadline_s:g} s")


@contextmanager
def log_file(path: Path) -> Iterator[BinaryIO]:
    """A log, open at its end; readable by its owner alone. Raises PermissionDenied, also for what
    may have been planted (see `atomic_file.py`).
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        check_links(path)
        place = os.path.realpath(path)
        if place.startswith("/proc/"):  # what is open in this process: it has no name of its own
            descriptor = os.open(path, flags)
        else:
            descriptor = os.open(place, flags | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PermissionDenied(f"cannot write the log {path}: {error.strerror}") from error
    try:
        check_file(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "a+b") as log:
        yield log


def add_log_tail(error: DieselError, log: BinaryIO, start: int) -> None:
    """Gives an error that explains nothing, as an end without a word, the details: the end of what
    has been logged since `start`. Daemons log their errors, too: one's own words are left out, and
    the details of another daemon's are taken as they are."""
    if type(error) not in _UNEXPLAINED:
        return
    log.seek(start)
    said = tuple(filter(None, str(error).splitlines()))
    lines = log.read().decode(errors="replace").splitlines()
    others = [line.removeprefix(DETAIL) for line in lines if not line.endswith(said)]
    error.details = "\n".join(others[-LOG_LINES_SHOWN:])
