"""The parent process of a server: it opens the listening sockets, and starts and replaces workers.

A worker's *slot* is its number; a task for each slot starts a new worker after the last one has
ended. Workers count their metrics in *cells*, memory that they share with the supervisor, which
serves the sums. One of these counters, the *beats*, shows that a worker's event loop still runs.

SIGTERM and SIGINT let the workers finish the requests under way; a second signal ends the server at
once. SIGHUP makes the workers load the certificate again.
"""

import json
import logging
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import trio

from diesel_fs.errors import DeadlineError, DieselError, error_by_class_name
from diesel_fs.metrics import PARENT_TABLE, MetricCells, cells_bytes, exposition, private_cells
from diesel_fs.net.endpoints import listen
from diesel_fs.net.metrics_endpoint import MetricsEndpoint
from diesel_fs.net.tls import load_certificate
from diesel_fs.urls import HostPort

from .. import limits
from ..options import ServerOptions
from .worker_config import WorkerConfig, config_line, split_environment

log = logging.getLogger("diesel.server")

PROGRAM = (sys.executable, "-P", "-m", "diesel_server.process.worker")

START_S = 60.0
"""A starting worker may wait for a Redis that loads its data."""

_END_S = limits.DRAIN_S + 8.0  # for all workers to end; then they are killed
_PAUSE_S = 0.1  # before a worker is started again; it doubles up to the maximum
_PAUSE_S_MAX = 10.0
_BEATS_MISSED_MAX = 15  # looks, one a second; a healthy loop was never busy for longer than one
_WELL_S = 60.0  # after a worker has lived for this time, the pause is short again
_STATUS_BYTES_MAX = 64 << 10


class Supervisor:
    def __init__(
        self,
        options: ServerOptions,
        ready: Callable[[str], None],
        program: Sequence[str] | None = None,
    ) -> None:
        """`ready` is called with one line for the user when the server accepts connections. Raises
        ConfigError; ConflictError if an address is in use."""
        self._options = options
        self._ready = ready
        self._program = PROGRAM if program is None else program
        self._sockets = listen(options.listen)
        self._metrics = [] if options.metrics is None else listen(options.metrics)
        self._memory = os.memfd_create("diesel-metrics")
        size = cells_bytes()
        os.ftruncate(self._memory, size * options.workers)
        whole = memoryview(mmap.mmap(self._memory, size * options.workers))
        self._cells = [
            MetricCells(whole[size * i : size * (i + 1)]) for i in range(options.workers)
        ]
        self._own = private_cells(PARENT_TABLE)
        self._running: dict[int, trio.Process] = {}
        self._accepting: set[int] = set()
        self._stopping = trio.Event()
        self._code = 0

    async def run(self) -> int:
        """Returns the exit code. Raises DieselError if the server cannot start."""
        if self._options.certificate is not None and self._options.key is not None:
            # Before the workers load it, so that an error ends the server's start
            load_certificate(self._options.certificate, self._options.key)
        first_error: list[DieselError] = []
        try:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._handle_signals, signals, nursery)
                    try:
                        await self._start_all(nursery)
                    except DieselError as error:
                        first_error.append(error)
                        nursery.cancel_scope.cancel()
                    else:
                        self._report_ready()
                        if self._metrics:
                            shown = MetricsEndpoint(self._metrics_text, self._is_healthy)
                            nursery.start_soon(shown.serve, self._metrics)
                        await self._stopping.wait()
                        await self._end_workers()
                        nursery.cancel_scope.cancel()
        finally:
            for process in self._running.values():
                process.kill()
        if first_error:
            raise first_error[0]
        return self._code

    def _report_ready(self) -> None:
        options = self._options
        scheme = "diesel" if options.certificate is None else "diesel+tls"
        where = HostPort(options.listen.host, self._sockets[0].getsockname()[1])
        self._ready(f"diesel-server accepts connections at {scheme}://{where}")
        if options.metrics is not None:
            port = self._metrics[0].getsockname()[1]
            log.info("metrics at http://%s/metrics", HostPort(options.metrics.host, port))

    # Workers

    async def _start_all(self, nursery: trio.Nursery) -> None:
        """Returns when all workers accept connections. Raises the error of the first that
        cannot."""
        errors: list[DieselError] = []
        async with trio.open_nursery() as starting:

            async def start(slot: int) -> None:
                try:
                    process = await self._start(slot, is_first=True)
                except DieselError as error:
                    errors.append(error)
                    starting.cancel_scope.cancel()
                else:
                    nursery.start_soon(self._keep, slot, process)

            for slot in range(self._options.workers):
                starting.start_soon(start, slot)
        if errors:
            raise errors[0]

    async def _keep(self, slot: int, process: trio.Process) -> None:
        pause_s = _PAUSE_S
        while True:
            began_s = trio.current_time()
            code = await self._end_of(slot, process)
            self._worker_ended(slot)
            if self._stopping.is_set():
                return
            log.error("worker %d has ended (%s) and is started again", slot, _exit_text(code))
            if trio.current_time() - began_s > _WELL_S:
                pause_s = _PAUSE_S
            while True:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                if self._stopping.is_set():
                    return
                try:
                    process = await self._start(slot, is_first=False)
                    break
                except DieselError as error:
                    log.error("worker %d cannot start: %s", slot, error)

    async def _end_of(self, slot: int, process: trio.Process) -> int:
        """Kills a worker that hangs. Returns the exit code."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, slot, process)
            code = await process.wait()
            nursery.cancel_scope.cancel()
        return code

    async def _watch(self, slot: int, process: trio.Process) -> None:
        """Kills a worker whose beats do not change in many looks. Looks are counted, not time: if
        this process is paused, the worker must not be killed for that."""
        beats, missed = -1.0, 0
        while missed < _BEATS_MISSED_MAX:
            await trio.sleep(limits.HEARTBEAT_S)
            now = self._cells[slot].get("diesel_worker_beats_total")
            missed = missed + 1 if now == beats else 0
            beats = now
        log.error("worker %d hangs, and is killed", slot)
        process.kill()

    def _worker_ended(self, slot: int) -> None:
        self._running.pop(slot, None)
        self._accepting.discard(slot)
        self._own.set("diesel_workers", value=len(self._accepting))
        self._cells[slot].clear_gauges()

    async def _start(self, slot: int, *, is_first: bool) -> trio.Process:
        """Returns when the worker accepts connections. Raises DieselError."""
        options = self._options
        inherited, secrets = split_environment(os.environ)
        try:
            reading, writing = os.pipe()
        except OSError as error:
            raise _no_process(error) from error
        status = trio.lowlevel.FdStream(reading)
        config = WorkerConfig(
            url=options.url.full_url,
            slot=slot,
            is_first=is_first,
            sockets=[each.fileno() for each in self._sockets],
            cells=self._memory,
            workers=options.workers,
            status=writing,
            certificate=str(options.certificate or ""),
            key=str(options.key or ""),
            cache=str(options.cache or ""),
            cache_bytes=options.cache_bytes,
            environment=secrets,
        )
        try:
            process = await trio.lowlevel.open_process(
                self._program,
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                env=inherited,
                pass_fds=[*config.sockets, config.cells, config.status],
            )
        except OSError as error:  # no memory or no file descriptors, perhaps only now
            await status.aclose()
            raise _no_process(error) from error
        finally:
            os.close(writing)
        self._own.add("diesel_worker_starts_total")
        self._running[slot] = process
        accepts = False
        try:
            report = await _start_report(process, status, config)
            accepts = report == b"{}\n"
        finally:
            if not accepts:
                process.kill()
                with trio.CancelScope(shield=True):
                    code = await process.wait()
                self._worker_ended(slot)
        if not accepts:
            raise _start_error(report, code)
        self._accepting.add(slot)
        self._own.set("diesel_workers", value=len(self._accepting))
        return process

    async def _end_workers(self) -> None:
        for process in list(self._running.values()):
            process.terminate()
        with trio.move_on_after(_END_S):
            for process in list(self._running.values()):
                await process.wait()

    # Signals

    async def _handle_signals(self, signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                for slot in self._accepting:  # a worker that is starting loads the new one anyway
                    self._running[slot].send_signal(signal.SIGHUP)
            elif self._stopping.is_set() or not self._accepting:
                self._code = 128 + number
                nursery.cancel_scope.cancel()
            else:
                self._stopping.set()

    def _metrics_text(self) -> str:
        """The metrics name no users, datasets or addresses."""
        return exposition(self._cells) + exposition([self._own])

    def _is_healthy(self) -> bool:
        return bool(self._accepting) and not self._stopping.is_set()


async def _start_report(
    process: trio.Process, status: trio.lowlevel.FdStream, config: WorkerConfig
) -> bytes:
    """Returns the worker's report, empty if it ended without one. Raises DeadlineError."""
    assert process.stdin is not None
    with trio.move_on_after(START_S):
        async with status:
            with suppress(trio.BrokenResourceError):  # it has ended; its report may have the reason
                await process.stdin.send_all(config_line(config))
            return await _all(status)
    raise DeadlineError(f"a worker did not start within {START_S:g} s", advice="see its log")


async def _all(status: trio.lowlevel.FdStream) -> bytes:
    report = b""
    while len(report) < _STATUS_BYTES_MAX:
        some = await status.receive_some()
        if not some:
            break
        report += some
    return report


def _no_process(error: OSError) -> DieselError:
    return DieselError(f"cannot start a worker: {error.strerror}")


def _start_error(report: bytes, code: int) -> DieselError:
    """Takes the error from the report, if it has one."""
    try:
        fields = json.loads(report)
        return error_by_class_name(
            str(fields["error"]), str(fields["message"]), str(fields["advice"])
        )
    except (ValueError, KeyError, TypeError):
        return DieselError(f"a worker ended while it was starting ({_exit_text(code)})")


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
