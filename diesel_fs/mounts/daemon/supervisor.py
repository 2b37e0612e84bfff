"""The supervisor, a mount's first process: it forks the other two, watches them, and ends last.

It prevents readers from hanging when the server (`server.py`) or the prefetch worker
(`prefetch_worker.py`) dies or stops. It has no descriptor of the connection and never touches the
mount, so nothing that happens in the mount can stop it.

It aborts the connection, so that readers get an error, if the server ends, if the server gives no
heartbeat for `WATCHDOG_S`, or if server or worker was killed but cannot end because it waits for a
page lock. If this user may not abort connections, the supervisor kills the server, and fails the
requests that the worker waits for (`processes.free_killed`). If only the worker ends, the mount
goes on without pushing. A worker that still holds a mount that was unmounted is killed; otherwise
the mount could not end.

Signals: SIGTERM and SIGINT make the server unmount; a second signal ends it at once. They are
passed on as SIGUSR1, because a terminal or a service manager sends them to the children as well.
In the foreground SIGHUP acts like SIGTERM; in the background it is ignored. If the supervisor is
killed, the kernel kills the worker and signals the server, which then aborts the connection.

Concurrency: one thread, one loop over poll(2), no locks. With `--metrics` another thread serves
the metrics; it starts after both forks, and shares no state with the loop.

- The loop handles each event completely before the next poll, so the methods never interleave.
- Server, worker and kernel run on meanwhile, so a fact may be outdated when it is used. Two facts
  are safe: a child's process ID stays its own until `waitpid`, which only this loop calls; and the
  open abort file belongs to this connection even if its device number is used again.
- Nothing in the loop waits for a process that may live on. After the server's end, `_end` kills the
  worker, and then waits for it.
- The mount's device arrives before READY. Until then there is nothing to abort.
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

from ...errors import DieselError
from ...net.messages import error_message
from ...storage.objects.cloud.direct import open_buckets_directly
from ...system import daemons, syscalls
from ...system.log_limit import LogRateLimit
from ..launcher import FOREGROUND
from ..mountpoints.mountpoint import MountPresence, end_connection, remove_created_folders
from ..mountpoints.processes import free_killed, is_killed_but_waits, mark_as_daemon
from ..options import MountRequest
from ..source import MountSource
from ..statistics.metrics_port import MetricsPort
from .ending import GRACE_S, ORPHANED_SIGNAL, UNMOUNT_SIGNAL
from .prefetch_worker import run_prefetch_worker
from .server import CONNECTED, READY, Report, serve_mount

log = logging.getLogger("diesel.mount")

WATCHDOG_S = 20.0
"""How long the server may go without a heartbeat. A turn of its loop takes milliseconds; after this
time it is stopped or broken, or the machine has no memory left."""

LARGE_BYTES = 4 << 20
"""Pieces of memory of at least this size return to the kernel when they are freed. Columns of
datasets with a million entries are larger. By default glibc keeps freed pieces of up to 32 MiB: 24
MB after reading the snapshot of 1.28 million entries."""

CHECK_INTERVAL_S = 0.5
"""The longest time between two checks of the children."""

STUCK_S = 0.45
"""If a killed process has not ended after this time, the connection is aborted: the process may
wait for a READ under way. A little less than the time between two checks."""

WORKER_RELEASE_S = 0.5
"""How long the worker may hold a mount that was unmounted. It needs a millisecond, unless it waits
for the store."""

WORKER_FREED_S = 20.0
"""How long the supervisor fails the requests that keep a killed worker from ending."""


def main(
    arguments: Sequence[str],
    source: MountSource | None = None,
    *,
    watchdog_s: float = WATCHDOG_S,
    grace_s: float = GRACE_S,
) -> int:
    """Runs a mount: arguments `[--foreground] MOUNTPOINT`, a `MountRequest` on stdin. Returns the
    exit code.

    In the background it reports on stdout, one JSON object a line: first its process ID, then its
    steps and warnings, and at last that it is ready or why it failed. The mount point is an
    argument only so that `ps` shows it. Tests pass another `source`, and other times.
    """
    open_buckets_directly()
    syscalls.map_large_allocations(LARGE_BYTES)
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
    try:
        supervisor = _Supervisor(
            request, source or MountSource(), foreground, report, watchdog_s, grace_s
        )
    except DieselError as error:  # the port of the metrics is in use
        log.error("%s", error)
        report(error_message(error))
        return error.exit_code
    return supervisor.run()


def _no_report(_: Mapping[str, object]) -> None: ...


class _Supervisor:
    def __init__(
        self,
        request: MountRequest,
        source: MountSource,
        foreground: bool,
        report: Report,
        watchdog_s: float,
        grace_s: float,
    ) -> None:
        self._request = request
        self._report = report
        self._foreground = foreground
        self._watchdog_s = watchdog_s
        self._device = ""
        self._presence: MountPresence | None = None
        self._abort_file = self._mark_fd = -1
        self._partial_line = b""  # of the server's pipe
        self._beat_s = self._checked_s = time.monotonic()  # of the last heartbeat, and check
        self._gone_s = math.inf  # when the mount was first seen unmounted
        self._stuck_s = math.inf  # when a killed process was found that has not ended since
        self._is_ending = False
        self._aborted = False
        self._made_folders = request.made_folders
        self._starting = not foreground  # while a starter reads the report
        place = request.metrics_endpoint
        metrics = None if place is None else MetricsPort(place)
        self._signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # first, so that no signal is lost
        ending = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if foreground else [])]
        for number in ending:
            signal.signal(number, lambda *_: None)
        if not foreground:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._beats, beat = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        server_end, worker_end = socket.socketpair()
        own = [self._signals, wake, self._beats]
        if metrics is not None:
            own += metrics.own_descriptors
        metrics_source = None if metrics is None else metrics.source
        gc.freeze()  # the children then share the memory of these objects
        self._server = _forked(
            lambda: serve_mount(
                request,
                source,
                report,
                beat,
                server_end,
                metrics_source,
                foreground=foreground,
                grace_s=grace_s,
            ),
            [*own, worker_end.fileno()],
            ORPHANED_SIGNAL,
        )
        self._worker = _forked(
            lambda: _run_worker(request, source, worker_end),
            [
                *own,
                server_end.fileno(),
                beat,
                *([] if metrics is None else [metrics.server_descriptor]),
            ],
            signal.SIGKILL,
        )
        if metrics is not None:
            metrics.start()
        server_end.close()
        worker_end.close()
        os.close(beat)

    def run(self) -> int:
        """Returns the exit code, when the server has ended."""
        server, worker = os.pidfd_open(self._server), os.pidfd_open(self._worker)
        mountinfo = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        watched = select.poll()
        for descriptor in (server, worker, self._beats, self._signals):
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
            if worker in ready:
                watched.unregister(worker)
                self._reap_worker()
            if mountinfo in ready:
                self._check_mount()
            self._check_starter()
            self._check_children()

    def _forward_signals(self, numbers: bytes) -> None:
        for number in numbers:
            self._leave(signal.Signals(number).name)

    def _leave(self, reason: str) -> None:
        when = " at once" if self._is_ending else ""
        log.info("%s: unmounting %s%s", reason, self._request.mountpoint, when)
        self._is_ending = True
        os.kill(self._server, UNMOUNT_SIGNAL)

    def _read_heartbeats(self) -> bool:
        """Reads the server's lines (`serve_mount`). Returns False at the end of the pipe."""
        with suppress(BlockingIOError):
            text = os.read(self._beats, 4096)
            if not text:
                return False
            self._beat_s = time.monotonic()
            *lines, self._partial_line = (self._partial_line + text).split(b"\n")
            for line in lines:
                if line == READY:
                    self._check_starter()
                    self._report({"ready": True})
                    if self._foreground:
                        daemons.notify_systemd()
                    self._end_report()
                elif line.startswith(CONNECTED):
                    self._set_device(line.removeprefix(CONNECTED).decode())
                elif line:
                    self._set_device(line.decode())
                    self._presence = MountPresence(self._device)
                    self._mark_fd = mark_as_daemon(self._device)
                    self._check_mount()
        return True

    def _set_device(self, device: str) -> None:
        self._device = device
        if self._abort_file >= 0:
            os.close(self._abort_file)
        self._abort_file = syscalls.open_abort(device)

    def _check_starter(self) -> None:
        if self._starting and daemons.is_starter_gone():
            self._starting = False
            if not self._is_ending:
                self._leave("the program that started it has ended")

    def _end_report(self) -> None:
        """The starter sees the end once both this process and the server have closed the report."""
        if not self._foreground:
            self._starting = False
            os.dup2(2, 1)

    def _reap_worker(self) -> None:
        _, status = os.waitpid(self._worker, 0)
        self._worker = 0
        self._check_mount()  # the news that it is unmounted may come after the worker's end
        if status and self._gone_s == math.inf:
            code = os.waitstatus_to_exitcode(status)
            why = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            log.error("the prefetch worker ended (%s): nothing is pushed ahead any more", why)

    def _check_mount(self) -> None:
        if self._presence is not None and not self._presence.is_mounted():
            self._gone_s = min(self._gone_s, time.monotonic())
            self._remove_created()

    def _check_children(self) -> None:
        now_s = time.monotonic()
        pause_s, self._checked_s = now_s - self._checked_s, now_s
        if pause_s > 4 * CHECK_INTERVAL_S:  # all three were stopped: Ctrl-Z, a frozen container
            self._beat_s += pause_s
        if not self._device or self._aborted:
            return
        if self._presence is not None and now_s - self._beat_s > self._watchdog_s:
            log.critical("the server has not answered for %g s: ending the mount", self._watchdog_s)
            self._abort()
            os.kill(self._server, signal.SIGKILL)
            return
        if self._worker and now_s - self._gone_s > WORKER_RELEASE_S:
            os.kill(self._worker, signal.SIGKILL)  # it would keep the mount alive
        elif any(pid and is_killed_but_waits(pid) for pid in (self._server, self._worker)):
            self._stuck_s = min(self._stuck_s, now_s)
            if now_s - self._stuck_s >= STUCK_S:
                log.critical("a process of the mount was killed and cannot end: ending the mount")
                self._abort()
        else:
            self._stuck_s = math.inf

    def _abort(self) -> None:
        self._aborted = True
        has_ended = end_connection(self._abort_file, self._request.mountpoint, self._device)
        if self._server and not has_ended:
            os.kill(self._server, signal.SIGKILL)  # `_end` does without an abort

    def _end(self) -> int:
        """Returns the mount's exit code."""
        _, status = os.waitpid(self._server, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and not self._is_ending:
            log.critical("the server was ended by %s", signal.Signals(-code).name)
        self._server = 0
        if self._device:
            self._abort()  # no process answers any more, and the worker may wait for a reply
        if self._worker:
            os.kill(self._worker, signal.SIGKILL)
            free_killed(self._worker, WORKER_FREED_S)
            os.waitpid(self._worker, 0)
        self._remove_created()
        for descriptor in (self._mark_fd, self._abort_file):
            if descriptor >= 0:
                os.close(descriptor)
        return 1 if code < 0 else code

    def _remove_created(self) -> None:
        """Only once, since another mount may make the folders again later."""
        made, self._made_folders = self._made_folders, ()
        remove_created_folders(made)


def _run_worker(request: MountRequest, source: MountSource, link: socket.socket) -> int:
    """The worker writes no report. SIGTERM does not end it: it ends with the server."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(2, 1)
    return run_prefetch_worker(request, source, link)


def _forked(run: Callable[[], int], others: Sequence[int], orphaned: signal.Signals) -> int:
    """Forks a child that calls `run` and exits with its code; it closes the descriptors `others`,
    and gets the signal `orphaned` when this process is killed."""
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
        for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the children, too
            signal.signal(number, signal.SIG_IGN)
        for descriptor in others:
            os.close(descriptor)
        code = run()
    except BaseException:
        log.exception("a process of the mount failed (a bug)")
    finally:
        logging.shutdown()
        os._exit(code)  # without waiting for threads that wait for a store


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
