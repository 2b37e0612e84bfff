"""A worker: a process that serves. `python -m diesel_server.worker`; its parent tells it what.

Owned here: its life, from the task to the last answer. Not owned: what it serves (`wiring.py`),
connections. It is a program of its own and no fork, since libraries of object stores hang in one.

SIGTERM, or the end of the parent, ends it when what is under way is done, `DRAIN_S` later at the
latest; SIGHUP makes it read its certificate again. Other signals of a terminal are the parent's.
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
from pathlib import Path
from typing import NoReturn

import trio

from diesel_fs.errors import DieselError
from diesel_fs.metrics import MetricCells, cells_bytes
from diesel_fs.net.messages import error_message

from . import limits
from .certificate import ServerCertificate, load_certificate
from .connection import ConnectionContext
from .limits import ConnectionLimits
from .listener import Listener, most_connections
from .refusal_log import RefusalLog
from .requests import Dispatcher
from .wiring import WireUp, Wiring, wire_up
from .worker_config import WorkerConfig, read_config

log = logging.getLogger("diesel.server")

_LAST_S = 5.0
"""After the drain: for threads that nothing can stop."""


def run_worker(make: WireUp) -> NoReturn:
    """The life of a worker."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        task = read_config(sys.stdin.buffer)
    except EOFError:
        os._exit(0)
    os.environ.update(task.environment)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s diesel-server worker {task.slot} %(levelname)s %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    code = 0
    try:
        trio.run(_serve, task, make)
    except DieselError as error:
        _tell(task, json.dumps(error_message(error)))
        code = error.exit_code
    except BaseException:
        log.exception("a worker ends by a bug")
        code = 1
    logging.shutdown()
    os._exit(code)  # threads that hang, in a store that does, keep nobody


async def _serve(task: WorkerConfig, make: WireUp) -> None:
    certificate = _certificate(task)
    stopped = trio.Event()
    _watch_parent(stopped)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
        cells = MetricCells(_shared(task))
        wiring = await trio.to_thread.run_sync(make, task, cells)
        gc.collect()
        gc.freeze()  # what is there now stays: looked over again and again, it took a tenth of all
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep, wiring, nursery)
            nursery.start_soon(_beat, cells)
            listener = Listener(
                [socket.socket(fileno=number) for number in task.sockets],
                _service(wiring, cells),
                certificate,
            )
            nursery.start_soon(_handle_signals, signals, stopped, listener, task)
            nursery.start_soon(_stop, stopped, listener)
            _tell(task, "{}")
            await listener.run()
            nursery.cancel_scope.cancel()
        wiring.close()


async def _keep(wiring: Wiring, nursery: trio.Nursery) -> None:
    for work in wiring.background:
        nursery.start_soon(work)


async def _beat(cells: MetricCells) -> None:
    """Signs of life for the parent."""
    while True:
        cells.add("diesel_worker_beats_total")
        await trio.sleep(limits.HEARTBEAT_S)


def _service(wiring: Wiring, cells: MetricCells) -> ConnectionContext:
    return ConnectionContext(
        store_id=wiring.store_id,
        login=wiring.login,
        dispatcher=Dispatcher(wiring.handlers),
        cells=cells,
        refusals=RefusalLog(cells),
        count=ConnectionLimits(most_connections()),
        takes_payload=wiring.takes_payload,
        redactions=wiring.redactions,
    )


async def _handle_signals(
    signals: AsyncIterator[int], stopped: trio.Event, listener: Listener, task: WorkerConfig
) -> None:
    async for number in signals:
        if number == signal.SIGTERM:
            stopped.set()
        else:
            try:
                listener.certificate = _certificate(task)
                log.info("the certificate has been read again")
            except DieselError as error:
                log.error("goes on with the certificate that it has: %s", error)


async def _stop(stopped: trio.Event, listener: Listener) -> None:
    await stopped.wait()
    threading.Thread(target=_exit_after_drain, daemon=True).start()
    listener.stop()


def _exit_after_drain() -> None:
    threading.Event().wait(limits.DRAIN_S + _LAST_S)
    log.error("ended in the middle of something that does not end")
    os._exit(0)


def _watch_parent(stopped: trio.Event) -> None:
    token = trio.lowlevel.current_trio_token()

    def watch() -> None:
        sys.stdin.buffer.read()
        try:
            token.run_sync_soon(stopped.set)
        except trio.RunFinishedError:
            return
        _exit_after_drain()

    threading.Thread(target=watch, daemon=True).start()


def _certificate(task: WorkerConfig) -> ServerCertificate | None:
    if not task.certificate:
        return None
    return load_certificate(Path(task.certificate), Path(task.key))


def _shared(task: WorkerConfig) -> memoryview:
    """The worker's part of the memory in which all count."""
    size = cells_bytes()
    whole = mmap.mmap(task.cells, size * task.workers)
    os.close(task.cells)
    return memoryview(whole)[size * task.slot : size * (task.slot + 1)]


def _tell(task: WorkerConfig, line: str) -> None:
    """Tell the parent how the start has gone; once."""
    try:
        os.write(task.status, line.encode() + b"\n")
        os.close(task.status)
    except OSError:  # it has been told, or has gone
        return


if __name__ == "__main__":
    run_worker(wire_up)
