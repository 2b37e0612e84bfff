"""The mount's own process: it forks a server and a helper, watches over them, and ends with them.

Owned here: the life of the three processes, and that no reader ever hangs because of one of them.
This one, the supervisor, holds no descriptor of the connection and never touches the mount, so
nothing that happens there can stop it. Not owned: starting it (`launcher.py`), answering the kernel
(`server.py`), what is pushed into its cache (`prefetch_worker.py`).

The connection is aborted, so that whoever waits gets an error, when the server ends, when it has
not answered for `WATCHDOG_S`, and when one of the two has been killed and cannot end, since it
waits for a page lock. Where the helper merely ends, the mount goes on without pushing. A helper
that does not let go of a mount that has left the tree is killed, or the mount could not end.

SIGTERM and SIGINT are passed on to the server (as SIGUSR1: a terminal, or whoever ends a whole
group of processes, signals the children too), which unmounts; a second one ends it at once. In the
foreground SIGHUP does the same, in the background it is ignored. When this process is killed, the
kernel kills the helper and signals the server, which aborts the connection itself. One thread.
"""

import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import DieselError
from ..net.messages import error_message
from ..storage.objects.cloud import direct as clouds
from ..system import daemons, syscalls
from ..system.log_limit import LogRateLimit
from ..system.mountinfo import mounts
from .launcher import FOREGROUND
from .mountpoint import end_connection, remove_created_folders
from .options import MountRequest
from .prefetch_worker import run_prefetch_worker
from .processes import mark_as_daemon
from .server import ORPHANED_SIGNAL, READY, UNMOUNT_SIGNAL, Report, serve_mount
from .source import MountSource

log = logging.getLogger("diesel.mount")

WATCHDOG_S = 20.0
"""So long the server may go without a turn of its loop, which takes milliseconds: it is stopped or
broken, or the machine has no memory left."""

CHECK_INTERVAL_S = 0.5
"""How often the watchdog looks."""

WORKER_RELEASE_S = 0.5
"""So long the helper may hold a mount that has left the tree; it needs a millisecond, unless it
waits for the store."""

_KILLED_BIT = 1 << (signal.SIGKILL - 1)


def main(
    arguments: Sequence[str], opener: MountSource | None = None, *, watchdog_s: float = WATCHDOG_S
) -> int:
    """Runs a daemon: `[--foreground] MOUNTPOINT`, the request on stdin. The exit code.

    In the background it reports on stdout, one JSON object a line: first its process number, then
    what it warns of, and that it is ready or what went wrong. The mount point is an argument only
    to be seen in `ps`.
    """
    clouds.open_buckets_directly()
    lines = logging.StreamHandler(sys.stderr)
    lines.addFilter(LogRateLimit())
    logging.basicConfig(
        handlers=[lines], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    foreground = FOREGROUND in arguments
    report = _no_report if foreground else daemons.report
    report({"pid": os.getpid()})
    try:
        request = MountRequest.from_json(sys.stdin.buffer.read())
    except DieselError as error:
        log.error("%s", error)
        report(error_message(error))
        return error.exit_code
    supervisor = _Supervisor(request, opener or MountSource(), foreground, report, watchdog_s)
    return supervisor.run()


def _no_report(_: Mapping[str, object]) -> None: ...


class _Supervisor:
    """The two children of one mount, from `run` to their end."""

    def __init__(
        self,
        request: MountRequest,
        opener: MountSource,
        foreground: bool,
        report: Report,
        watchdog_s: float,
    ) -> None:
        self._request = request
        self._report = report
        self._foreground = foreground
        self._watchdog_s = watchdog_s
        self._device = ""
        self._abort_file = self._mark_fd = -1
        self._partial_line = b""
        self._beat_s = self._looked_s = time.monotonic()
        self._gone_s = math.inf  # when the mount had left the tree
        self._stuck_looks = 0
        self._is_ending = False
        self._aborted = False
        self._made_folders = request.made_folders
        self._starting = not foreground  # while the report is read
        self._signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # before a signal can be lost
        ending = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if foreground else [])]
        for number in ending:
            signal.signal(number, lambda *_: None)
        if not foreground:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._beats, beat = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        server_end, helper_end = socket.socketpair()
        ours = [self._signals, wake, self._beats]
        gc.freeze()  # what the children share with us stays shared
        self._server = _forked(
            lambda: serve_mount(request, opener, report, beat, server_end, foreground=foreground),
            [*ours, helper_end.fileno()],
            ORPHANED_SIGNAL,
        )
        self._worker = _forked(
            lambda: _run_worker(request, opener, helper_end),
            [*ours, server_end.fileno(), beat],
            signal.SIGKILL,
        )
        server_end.close()
        helper_end.close()
        os.close(beat)

    def run(self) -> int:
        """Waits for the server's end. Its exit code."""
        server, helper = os.pidfd_open(self._server), os.pidfd_open(self._worker)
        mountinfo = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        watched = select.poll()
        for descriptor in (server, helper, self._beats, self._signals):
            watched.register(descriptor, select.POLLIN)
        watched.register(mountinfo, select.POLLPRI)  # when anything is mounted or unmounted
        while True:
            ready = {descriptor for descriptor, _ in watched.poll(CHECK_INTERVAL_S * 1000)}
            if self._signals in ready:
                self._forward_signals(os.read(self._signals, 64))
            if self._beats in ready and not self._read_heartbeats():
                watched.unregister(self._beats)
            if server in ready:
                return self._end()
            if helper in ready:
                watched.unregister(helper)
                self._bury_helper()
            if mountinfo in ready:
                self._look_for_the_mount()
            self._look_for_the_starter()
            self._check_children()

    def _forward_signals(self, numbers: bytes) -> None:
        for number in numbers:
            self._leave(signal.Signals(number).name)

    def _leave(self, why: str) -> None:
        told = " at once" if self._is_ending else ""
        log.info("%s: unmounting %s%s", why, self._request.mountpoint, told)
        self._is_ending = True
        os.kill(self._server, UNMOUNT_SIGNAL)

    def _read_heartbeats(self) -> bool:
        """The mount's device, that it is ready, then that the server lives. False at its end."""
        with suppress(BlockingIOError):
            text = os.read(self._beats, 4096)
            if not text:
                return False
            self._beat_s = time.monotonic()
            *lines, self._partial_line = (self._partial_line + text).split(b"\n")
            for line in lines:
                if line == READY:
                    self._look_for_the_starter()
                    self._report({"ready": True})
                    if self._foreground:
                        daemons.notify_systemd()
                    self._end_report()
                elif line:
                    self._device = line.decode()
                    self._mark_fd = mark_as_daemon(self._device)
                    self._abort_file = syscalls.open_abort(self._device)
                    self._look_for_the_mount()
        return True

    def _look_for_the_starter(self) -> None:
        """A mount that nobody waits for any more before it is ready does not come up."""
        if self._starting and daemons.is_starter_gone():
            self._starting = False
            if not self._is_ending:
                self._leave("the program that started it has ended")

    def _end_report(self) -> None:
        """Whoever started us sees the report's end once the server has ended it, too."""
        if not self._foreground:
            self._starting = False
            os.dup2(2, 1)

    def _bury_helper(self) -> None:
        _, status = os.waitpid(self._worker, 0)
        self._worker = 0
        if status and self._gone_s == math.inf:
            log.error("the helper ended (%d): nothing is pushed any more", status)

    def _look_for_the_mount(self) -> None:
        if self._device and not any(each.device == self._device for each in mounts()):
            self._gone_s = min(self._gone_s, time.monotonic())
            self._remove_made()

    def _check_children(self) -> None:
        """Frees readers where one of the children cannot go on."""
        now_s = time.monotonic()
        pause_s, self._looked_s = now_s - self._looked_s, now_s
        if (
            pause_s > 4 * CHECK_INTERVAL_S
        ):  # all three were stopped (Ctrl-Z, a frozen container), not one
            self._beat_s += pause_s
        if not self._device or self._aborted:
            return
        if now_s - self._beat_s > self._watchdog_s:
            said = "the server has not answered for %g s: ending the mount"
            log.critical(said, self._watchdog_s)
            self._abort()
            os.kill(self._server, signal.SIGKILL)
            return
        if self._worker and now_s - self._gone_s > WORKER_RELEASE_S:
            os.kill(self._worker, signal.SIGKILL)  # the mount lives on while it holds it
        elif any(pid and _is_killed_but_waits(pid) for pid in (self._server, self._worker)):
            self._stuck_looks += 1
            if self._stuck_looks > 1:  # else it waits for a READ that is answered now
                log.critical("a process was killed and cannot end: ending the mount")
                self._abort()
        else:
            self._stuck_looks = 0

    def _abort(self) -> None:
        self._aborted = True
        end_connection(self._abort_file, self._request.mountpoint, self._device)

    def _end(self) -> int:
        """The server has ended: so does everything else."""
        _, status = os.waitpid(self._server, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and not self._is_ending:
            log.critical("the server was ended by %s", signal.Signals(-code).name)
        if self._device:
            self._abort()  # nobody answers any more, and the helper may wait for an answer
        if self._worker:
            os.kill(self._worker, signal.SIGKILL)
            os.waitpid(self._worker, 0)
        self._remove_made()
        for descriptor in (self._mark_fd, self._abort_file):
            if descriptor >= 0:
                os.close(descriptor)
        return 1 if code < 0 else code

    def _remove_made(self) -> None:
        """Once: others may make folders of the same names then."""
        made, self._made_folders = self._made_folders, ()
        remove_created_folders(made)


def _run_worker(request: MountRequest, opener: MountSource, link: socket.socket) -> int:
    """The helper: not part of the report, and ended by the server's end alone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(2, 1)
    return run_prefetch_worker(request, opener, link)


def _forked(run: Callable[[], int], others: Sequence[int], orphaned: signal.Signals) -> int:
    """A child that runs this and ends with its code; it has no use for the descriptors `others`.

    It gets a signal when we are killed.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        syscalls.die_with_parent(orphaned)
        if os.getppid() != parent:
            return 1
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all of us
            signal.signal(number, signal.SIG_IGN)
        for descriptor in others:
            os.close(descriptor)
        code = run()
    except BaseException:
        log.exception("a process of the mount failed")
    finally:
        logging.shutdown()
        os._exit(code)  # threads that still wait for a store are left behind


def _is_killed_but_waits(pid: int) -> bool:
    """Whether a process has been killed and cannot end: a thread of it waits uninterruptibly."""
    with suppress(OSError):
        return any(map(_waits_killed, Path(f"/proc/{pid}/task").iterdir()))
    return False


def _waits_killed(thread: Path) -> bool:
    with suppress(OSError, ValueError, KeyError):
        lines = (thread / "status").read_text(encoding="ascii", errors="replace").splitlines()
        said = dict(line.split(":", 1) for line in lines if ":" in line)
        pending = int(said["ShdPnd"], 16) | int(said["SigPnd"], 16)
        return bool(pending & _KILLED_BIT) and said["State"].strip().startswith("D")
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
