"""A worker: one of the processes of a server that serve clients.

It is a program of its own and not a fork, since libraries of object stores hang in forked
processes.

At SIGTERM, or when the supervisor ends, a worker finishes the requests under way, for at most
`DRAIN_S`, and ends. SIGHUP makes it load its certificate again. It ignores a terminal's other
signals, which the supervisor handles.
"""

import gc
import json
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import trio

from diesel_fs.errors import DieselError
from diesel_fs.metrics import MetricCells, cells_bytes
from diesel_fs.net.messages import error_message
from diesel_fs.net.tls import Certificate, load_certificate

from .. import limits
from ..connections.listener import Listener
from .wiring import WireUp, wire_up
from .worker_config import WorkerConfig, read_config

log = logging.getLogger("diesel.server")

_LAST_S = 5.0
"""Threads, which cannot be cancelled, have this time after `DRAIN_S`; then the process ends."""


def run_worker(make: WireUp) -> NoReturn:
    """`make` is `wire_up`, except in tests."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        config = read_config(sys.stdin.buffer)
    except EOFError:
        os._exit(0)
    os.environ.update(config.environment)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s diesel-server worker {config.slot} %(levelname)s %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    code = 0
    try:
        trio.run(_serve, config, make)
    except DieselError as error:
        log.error("the worker ends: %s", error)
        _report(config, json.dumps(error_message(error)))
        code = error.exit_code
    except BaseException:
        log.exception("a bug ends the worker")
        code = 1
    logging.shutdown()
    os._exit(code)  # without waiting for threads, which may hang in a store that does not answer


async def _serve(config: WorkerConfig, make: WireUp) -> None:
    certificate = _certificate(config)
    stopped = trio.Event()
    _watch_parent(stopped)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
        cells = MetricCells(_shared(config))
        wiring = await trio.to_thread.run_sync(make, config, cells)
        gc.collect()
        gc.freeze()  # collecting these lasting objects again took a tenth of the processor time
        async with trio.open_nursery() as nursery:
            for work in wiring.background:
                nursery.start_soon(work)
            nursery.start_soon(_beat, cells)
            listener = Listener(
                [socket.socket(fileno=number) for number in config.sockets],
                wiring.context,
                certificate,
            )
            nursery.start_soon(_handle_signals, signals, stopped, listener, config)
            nursery.start_soon(_stop, stopped, listener)
            _report(config, "{}")
            await listener.run()
            nursery.cancel_scope.cancel()
        wiring.close()


async def _beat(cells: MetricCells) -> None:
    while True:
        cells.add("diesel_worker_beats_total")
        await trio.sleep(limits.HEARTBEAT_S)


async def _handle_signals(
    signals: AsyncIterator[int], stopped: trio.Event, listener: Listener, config: WorkerConfig
) -> None:
    async for number in signals:
        if number == signal.SIGTERM:
            stopped.set()
        else:
            try:
                listener.certificate = _certificate(config)
                log.info("the certificate has been loaded again")
            except DieselError as error:
                log.error("the worker keeps the certificate that it has: %s", error)


async def _stop(stopped: trio.Event, listener: Listener) -> None:
    await stopped.wait()
    threading.Thread(target=_exit_after_drain, daemon=True).start()
    listener.stop()


def _exit_after_drain() -> None:
    threading.Event().wait(limits.DRAIN_S + _LAST_S)
    log.error("the worker ends while a thread still works")
    os._exit(0)


def _watch_parent(stopped: trio.Event) -> None:
    """Sets `stopped` when the supervisor ends, which closes this process's standard input."""
    token = trio.lowlevel.current_trio_token()

    def watch() -> None:
        sys.stdin.buffer.read()
        try:
            token.run_sync_soon(stopped.set)
        except trio.RunFinishedError:
            return
        _exit_after_drain()

    threading.Thread(target=watch, daemon=True).start()


def _certificate(config: WorkerConfig) -> Certificate | None:
    if not config.certificate:
        return None
    return load_certificate(Path(config.certificate), Path(config.key))


def _shared(config: WorkerConfig) -> memoryview:
    size = cells_bytes()
    whole = mmap.mmap(config.cells, size * config.workers)
    os.close(config.cells)
    return memoryview(whole)[size * config.slot : size * (config.slot + 1)]


def _report(config: WorkerConfig, line: str) -> None:
    """Only the first report arrives. Its descriptor stays taken, so that a later one, of an error
    that ends the worker, is not written into a connection that has got the same number."""
    with suppress(OSError):  # the supervisor has ended
        os.write(config.status, line.encode() + b"\n")
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), config.status, inheritable=False)


if __name__ == "__main__":
    run_worker(wire_up)
