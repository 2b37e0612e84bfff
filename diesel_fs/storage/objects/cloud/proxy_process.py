"""The helper process that speaks to a bucket for processes that may fork (`proxy.py`).

`python -m diesel_fs.storage.objects.cloud.proxy_process URL DESCRIPTOR [--create]` opens the store
at URL and reports on stdout that it is ready. DESCRIPTOR is the helper's end of the control socket.
A thread serves each connection.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import islice

from ....errors import DieselError, FormatError, UsageError
from ....format.entries import Bytes
from ....net.messages import error_message
from ....system import daemons
from ..store import ObjectStore
from .proxy import NAMES_AT_ONCE, HelperDisconnected, receive_frame, send_frame
from .store import open_cloud

log = logging.getLogger("diesel.objects")


def main(words: Sequence[str]) -> int:
    url, descriptor, *options = words
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    daemons.report({"pid": os.getpid()})
    try:
        store = open_cloud(url, create="--create" in options)
    except DieselError as error:
        daemons.report(error_message(error))
        return error.exit_code
    daemons.report({"ready": True, "store": store.store_id.hex})
    serving: list[threading.Thread] = []
    with socket.socket(fileno=int(descriptor)) as control:
        for connection in _connections(control):
            serving = [each for each in serving if each.is_alive()]
            serving.append(threading.Thread(target=_serve, args=(connection, store)))
            serving[-1].start()
    for each in serving:
        each.join()
    return 0


def _connections(control: socket.socket) -> Iterator[socket.socket]:
    """Ends when no other process holds the control socket."""
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        yield from (socket.socket(fileno=each) for each in descriptors)


def _serve(connection: socket.socket, store: ObjectStore) -> None:
    with connection:
        try:
            while True:
                call, payload = receive_frame(connection)
                send_frame(connection, *_answer(store, call, payload))
        except HelperDisconnected:
            pass


def _answer(
    store: ObjectStore, call: object, payload: memoryview
) -> tuple[Mapping[str, object], Sequence[Bytes]]:
    try:
        match call:
            case ["get", str(name), int(start), int() | None as length]:
                return {"value": None}, [store.get(name, start, length)]
            case ["put", str(name)]:
                return {"value": store.put(name, [payload])}, []
            case ["replace", str(name)]:
                return {"value": store.replace(name, [payload])}, []
            case ["delete", str(name)]:
                return {"value": store.delete(name)}, []
            case ["stat", str(name)]:
                return {"value": astuple(store.stat(name))}, []
            case ["list", str(prefix), str(after)]:
                batch = islice(store.list(prefix, after), NAMES_AT_ONCE)
                return {"value": [astuple(info) for info in batch]}, []
            case ["names", str(prefix), str(after)]:
                return {
                    "value": [*islice(store.housekeeping.names(prefix, after), NAMES_AT_ONCE)]
                }, []
            case ["foreign", str(prefix)]:
                return {"value": [*store.housekeeping.foreign(prefix)]}, []
        raise UsageError(f"not a call of an object store: {call!r:.80}")
    except FormatError as error:
        return {**error_message(error), "offset": error.offset}, []
    except DieselError as error:
        return error_message(error), []
    except Exception as error:
        log.exception("a call of the object store failed unexpectedly")
        return error_message(DieselError(f"unexpected {type(error).__name__}: {error}")), []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
