"""Starts a background program of DIESEL-FS (a daemon), and waits until it reports that it is ready.

A daemon is detached from its starter. It gets one request (JSON; a subclass of `DaemonRequest`) on
stdin, and the environment without secrets. It reports in JSON lines on stdout (`pid`, `step`,
`warning`, then `ready` or `error`), and logs to a file. Any thread.
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
"""An error message repeats these lines of a daemon's log."""

END_DEADLINE_S = 5.0
"""The time to end after each signal; a starting daemon needs at most 2 s."""

_UNEXPLAINED = (DieselError, DeadlineError)
"""Errors that do not name the cause, so that a message needs lines of the log."""

_ENDING = (signal.SIGTERM, signal.SIGKILL)
"""After the first signal a starting daemon can clean up."""

_SECRETS = ("DIESEL_KEY", "DIESEL_TASK_KEY")
_NEEDED = ("PATH", "LD_LIBRARY_PATH")  # to find programs and libraries

# The daemon must not be a child of its starter: it would become a zombie, or end with the starter's
# terminal. So an interpreter between them forks; it has no threads whose locks could be copied.
_DETACH = "import os, sys; os._exit(0) if os.fork() else os.execv(sys.argv[1], sys.argv[1:])"
DETACH = ("-I", "-S", "-c", _DETACH)
"""Arguments of a Python interpreter that starts the command after them without a parent."""


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """A subclass is a dataclass whose fields are JSON values, tuples, and other requests."""

    BYTES_MAX: ClassVar[int]
    """The longest request, as JSON."""

    def to_json(self) -> bytes:
        """Raises UsageError if the request is too long."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > self.BYTES_MAX:
            raise UsageError(f"a request of {len(text)} bytes (at most {self.BYTES_MAX})")
        return text

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises UsageError for malformed JSON, or other fields than this class's."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"not a request: {error}") from error
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: object) -> Self:
        """Raises UsageError unless `values` is a map of this class's fields."""
        if not isinstance(values, dict) or set(values) != {each.name for each in fields(cls)}:
            raise UsageError(f"not a {cls.__name__}: other fields than this version's")
        return cls(**{each.name: _field(each.type, values[each.name]) for each in fields(cls)})


def _field(field_type: object, value: object) -> object:
    if isinstance(field_type, type) and issubclass(field_type, DaemonRequest):
        return field_type.from_values(value)
    return tuple(value) if isinstance(value, list) else value


def start(
    command: Sequence[str],
    request: bytes,
    log: BinaryIO,
    logger: logging.Logger,
    *,
    daemon_name: str,
    deadline_s: float,
    pass_fds: Sequence[int] = (),
    new_session: bool = True,
) -> Mapping[str, object]:
    """Start a daemon and return its report that it is ready.

    `request` is JSON. The daemon's warnings also go to `logger`, in this process; its stderr goes
    to `log`. `daemon_name` is for messages. The daemon inherits the descriptors `pass_fds` under
    the same numbers. Raises the error that the daemon reports, DieselError if it ends without a
    report, and DeadlineError if it is not ready within `deadline_s`, counted anew from each step
    that it reports. If this call raises an error or is interrupted, the daemon has ended by itself,
    or was ended or killed.
    """
    receiver, sender = os.pipe()
    with open(receiver, "rb", buffering=0) as file:
        report_reader = _Report(file, daemon_name)
        try:
            try:
                starter = subprocess.Popen(
                    [sys.executable, *DETACH, *command],
                    stdin=subprocess.PIPE,
                    stdout=sender,
                    stderr=log,
                    cwd="/",
                    env=environment(),
                    start_new_session=new_session,
                    pass_fds=pass_fds,
                )
            finally:
                os.close(sender)
            with suppress(BrokenPipeError):
                starter.communicate(request)
            return report_reader.wait_until_ready(logger, deadline_s)
        except BaseException as error:
            ends_by_itself = isinstance(error, Exception) and not isinstance(error, DeadlineError)
            report_reader.wait_for_end(*(() if ends_by_itself else _ENDING))
            raise


def environment() -> dict[str, str]:
    """This process's environment without secrets, and with its path of modules."""
    public = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return {**public, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def minimal_environment() -> dict[str, str]:
    """Only needed variables, so that no secret is passed under any name. For programs that open no
    store, or are not part of DIESEL-FS."""
    needed = {name: os.environ[name] for name in _NEEDED if name in os.environ}
    return {**needed, "LC_ALL": "C"}


@contextmanager
def minimal_environment_set() -> Iterator[None]:
    """During the `with`, programs that a library starts inherit the minimal environment."""
    before, minimal = dict(os.environ), minimal_environment()
    for name in before.keys() - minimal:
        del os.environ[name]
    os.environ.update(minimal)
    try:
        yield
    finally:
        del os.environ["LC_ALL"]
        os.environ.update(before)


def report(line: Mapping[str, object]) -> None:
    """In a daemon: write a line of its report. Does nothing if its starter has ended."""
    with suppress(OSError):
        os.write(1, json.dumps(line).encode() + b"\n")


def notify_systemd() -> None:
    """Report to systemd that this process is ready (service of `Type=notify`; sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(
                b"READY=1", address.replace("@", "\0", 1) if address[0] == "@" else address
            )


def is_starter_gone() -> bool:
    """In a daemon: whether nobody reads its report any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class _Report:
    def __init__(self, file: FileIO, daemon_name: str) -> None:
        self._file = file
        self._daemon_name = daemon_name
        self._unfinished_line = b""
        self._pid = 0

    def wait_until_ready(self, logger: logging.Logger, deadline_s: float) -> Mapping[str, object]:
        """Raises the error that the daemon reports, DieselError or DeadlineError."""
        for line in self._lines(deadline_s):
            if "error" in line:
                raise error_by_class_name(line["error"], line["message"], line["advice"])
            if "warning" in line:
                logger.warning("%s", line["warning"])
            if "ready" in line:
                return line
        raise DieselError(f"{self._daemon_name} did not come up")

    def wait_for_end(self, *signals: signal.Signals) -> None:
        """Send the daemon the first of these signals, and the next one if it has not ended after
        `END_DEADLINE_S`. Without signals, it ends by itself."""
        with suppress(DeadlineError):
            if not self._pid:  # the daemon reports its number first
                next(self._lines(END_DEADLINE_S), None)
        if not self._pid:  # the daemon has ended, or will when it finds its starter gone
            return
        with suppress(ProcessLookupError), open(os.pidfd_open(self._pid), "rb") as process:
            for number in signals or (0,):  # 0 sends nothing
                signal.pidfd_send_signal(process.fileno(), number)
                if select.select([process], [], [], END_DEADLINE_S)[0]:
                    return

    def _lines(self, deadline_s: float) -> Iterator[dict[str, str]]:
        """Raises DeadlineError if the daemon is not ready in time; each step starts the time
        anew."""
        until_s, since = time.monotonic() + deadline_s, f"within {deadline_s:g} s"
        while select.select([self._file], [], [], max(0.0, until_s - time.monotonic()))[0]:
            read = self._file.read(4096)
            if not read:
                return
            *lines, self._unfinished_line = (self._unfinished_line + read).split(b"\n")
            for line in map(json.loads, lines):
                self._pid = line.get("pid", self._pid)
                if "step" in line:
                    until_s = time.monotonic() + deadline_s
                    since = f"and has been {line['step']} for {deadline_s:g} s"
                yield line
        raise DeadlineError(f"{self._daemon_name} did not come up {since}")


@contextmanager
def log_file(path: Path) -> Iterator[BinaryIO]:
    """The file is open for appending, and only its owner can read it. Raises PermissionDenied if it
    cannot be opened, or may have been planted (`atomic_file.py`)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        check_links(path)
        target = os.path.realpath(path)
        if target.startswith("/proc/"):  # an open file of this process, which has no other name
            descriptor = os.open(path, flags)
        else:
            descriptor = os.open(target, flags | os.O_NOFOLLOW, 0o600)
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
    """Add the last lines since the position `start` to an error that does not name the cause,
    without lines that repeat the error's own text."""
    if type(error) not in _UNEXPLAINED:
        return
    log.seek(start)
    known = tuple(filter(None, str(error).splitlines()))
    lines = log.read().decode(errors="replace").splitlines()
    others = [line.removeprefix(DETAIL) for line in lines if not line.endswith(known)]
    error.details = "\n".join(others[-LOG_LINES_SHOWN:])
