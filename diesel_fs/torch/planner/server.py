"""Receives the messages of the hooks in training processes, and turns them into plans.

Concurrency. One thread accepts connections. Two threads serve each process. One reads messages from
the socket at once and queues them, so that a training process never waits for a mount. The other
thread handles them in order: it finds files, announces orders, and sends answers. It holds the
planner's one lock while it handles a message, because all processes share the mounts' connections,
the snapshots, the learned files and the summary. So messages are handled one at a time, and those
of two processes may come in any order. A planner that closes shuts the sockets for
reading, still handles the messages that were sent before, and waits up to 20 s for each process.
"""

import json
import os
import queue
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np

from ...errors import ConflictError, DieselError
from ..hook.diesel_hook.link import HookSettings
from .announcing import Controls, LoaderStreams
from .file_tables import (
    ConcatTable,
    Entries,
    FileTable,
    MountedFiles,
    SampleTable,
    SubsetTable,
)
from .observing import ObservedTable
from .summary import Interval, MeasuredWorkers, Summary

_LENGTHS = struct.Struct("<IQ")  # as in the hook's `link.py`
_LENGTH = struct.Struct("<Q")
_BODY_BYTES_MAX, _PAYLOAD_BYTES_MAX = 1 << 20, 1 << 30

_TEMPORARY_CHARACTERS_MAX = 70  # the path of a socket has 107 bytes at most
_BACKLOG = 4096  # the number of processes that may join at once: a kernel allows no more
_LEFT_EARLY = 2  # after this many epochs that a loop has left early, the user gets a note
_END_S = 20.0  # the wait for the remaining announcements: a mount may be slow

HookMessage = dict[str, object]


class _Served(NamedTuple):
    """A connected process, and the thread that receives its messages."""

    thread: threading.Thread
    connected: socket.socket


class PlanServer:
    """Announces the reads of training processes while it is open. A context manager."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """Make the socket, in a new folder that is private to this user. `show` is called with each
        message for the user, in any thread. Raises OSError."""
        is_long = len(tempfile.gettempdir()) > _TEMPORARY_CHARACTERS_MAX
        place = "/tmp" if is_long else None  # noqa: S108 (the new folder in it is private)
        self._folder = tempfile.TemporaryDirectory(prefix="diesel-run-", dir=place)
        self.socket_path = Path(self._folder.name) / "join"
        self.summary = Summary(show=show)
        self._started_s = monotonic()
        self._files = MountedFiles()
        self._controls = Controls()
        self._learned: dict[str, ObservedTable] = {}
        self._lock = threading.Lock()  # for all of the above
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket_path))
        self._listener.listen(_BACKLOG)
        self._served: list[_Served] = []
        self._accepting = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Begin to serve processes, including those that have connected before."""
        self._accepting.start()

    def settings(
        self, *, ahead: int = 1, group_size: int = 0, own_seed: bool = False
    ) -> HookSettings:
        """The settings for the hooks that shall connect to this server."""
        return {
            "socket": str(self.socket_path),
            "ahead": ahead,
            "group_size": group_size,
            "own_seed": own_seed,
        }

    def __enter__(self) -> "PlanServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting.ident is not None:
            self._accepting.join()
        self._listener.close()
        for served in self._served:  # messages that were sent are still received
            with suppress(OSError):
                served.connected.shutdown(socket.SHUT_RD)
        for served in self._served:
            served.thread.join(_END_S)
        for learned in self._learned.values():
            if text := learned.describe():
                self.summary.notes[text] += 1
        self._files.refresh()
        for mount in sorted(self._controls.mounts - self._files.mount_points):
            self.summary.notes[f"the mount on {mount} has gone: its files cannot be read"] += 1
        self._controls.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=[connected], daemon=True)
            self._served.append(_Served(thread, connected))
            thread.start()

    def _serve(self, connected: socket.socket) -> None:
        received: queue.SimpleQueue[tuple[HookMessage, bytes] | None] = queue.SimpleQueue()
        working = threading.Thread(target=self._work, args=[connected, received], daemon=True)
        working.start()
        try:
            self._receive(connected, received)
        finally:
            received.put(None)
            working.join()

    def _work(
        self,
        connected: socket.socket,
        received: "queue.SimpleQueue[tuple[HookMessage, bytes] | None]",
    ) -> None:
        process = _Process(
            self._files, self._controls, self._learned, self.summary, self._started_s
        )
        while (message := received.get()) is not None:
            with self._lock:
                answer = process.handle(*message)
            if answer is not None:
                with suppress(OSError):  # the process has gone
                    connected.sendall(_LENGTH.pack(len(answer)) + answer)
        with self._lock:
            process.end()

    def _receive(
        self,
        connected: socket.socket,
        received: "queue.SimpleQueue[tuple[HookMessage, bytes] | None]",
    ) -> None:
        with connected, connected.makefile("rb") as stream:
            while head := stream.read(_LENGTHS.size):
                if len(head) < _LENGTHS.size:
                    break
                body_bytes, payload_bytes = _LENGTHS.unpack(head)
                if body_bytes > _BODY_BYTES_MAX or payload_bytes > _PAYLOAD_BYTES_MAX:
                    break
                body, payload = stream.read(body_bytes), stream.read(payload_bytes)
                if len(body) < body_bytes or len(payload) < payload_bytes:
                    break
                received.put((json.loads(body), payload))


class _Process:
    """One connected training process: its datasets and streams. `handle` and `end` are called with
    the planner's lock."""

    def __init__(
        self,
        files: MountedFiles,
        controls: Controls,
        learned: dict[str, ObservedTable],
        summary: Summary,
        started_s: float,
    ) -> None:
        """`learned` is shared by all processes: a worker process reports the files that it opens
        for a dataset of its parent."""
        self._files, self._controls, self._summary = files, controls, summary
        self._learned = learned
        self._started_s = started_s
        self._pid = 0
        self._tables: dict[int, SampleTable] = {}
        self._filling: dict[int, tuple[FileTable, int]] = {}  # with the number of received paths
        self._streams: dict[str, LoaderStreams] = {}
        self._left_early: Counter[str] = Counter()  # epochs of which less than half was read

    def handle(self, message: HookMessage, payload: bytes) -> bytes | None:
        """Handle a message. Returns the answer if the message is a request, otherwise None. Errors
        become notes for the user."""
        try:
            if message["do"] == "chunks":
                return self._chunks(_whole(message["dataset"]))
            self._handle(message, payload)
        except ConflictError:  # the mount has moved on to another version
            self._files.refresh()  # for new datasets; known ones keep their version
            self._summary.note(
                "a mount has changed to another version while the command read from it: datasets"
                " of the earlier version are no longer planned"
            )
        except DieselError as error:
            self._summary.note(f"{error.message}" + (f" ({error.advice})" if error.advice else ""))
        except OSError as error:  # of a mount's snapshot
            self._summary.note(f"a mount cannot be read: {error}")
        except (KeyError, TypeError, ValueError) as error:
            self._summary.note(f"a training process sent a malformed message: {error!r}")
        return b"" if message.get("do") == "chunks" else None

    def end(self) -> None:
        """The process has closed its connection: end its streams."""
        for name in [*self._streams]:
            self._leave(name)

    def _look_back(self, message: HookMessage) -> None:
        """A loop has left an epoch before its end. If it did so after less than half of the epoch,
        in `_LEFT_EARLY` epochs, note that for the user."""
        name = str(message["stream"])
        streams = self._streams.get(name)
        if streams is None or not streams.announced or "of" not in message:
            return
        position, of = _whole(message["position"]), _whole(message["of"])
        if 2 * position >= of:
            return
        self._left_early[name] += 1
        if self._left_early[name] == _LEFT_EARLY:
            self._summary.note(
                f"a loop leaves its epochs early, this one after {position:,} of {of:,} samples"
                " that were announced: the mount loads more than is read. Let the sampler give"
                " fewer samples"
            )

    def _leave(self, name: str, epoch: object = None) -> None:
        """End the streams of a loader; with `epoch`, only if that is the loader's current epoch."""
        streams = self._streams.get(name)
        if streams is not None and epoch in (None, streams.epoch):
            del self._streams[name]
            self._summary.files += streams.announced
            self._summary.planned_epochs += streams.planned_epochs
            with suppress(DieselError):  # the mount is gone, or knows the stream no more
                streams.withdraw()

    def _handle(self, message: HookMessage, payload: bytes) -> None:
        match message["do"]:
            case "process":
                self._summary.processes += 1
                self._pid = _whole(message["pid"])
            case "note":
                self._summary.note(str(message["text"]))
            case "files":
                listed = FileTable(_whole(message["size"]))
                self._observe(message, ObservedTable(str(message["name"]), listed.size, listed))
                self._filling[_whole(message["dataset"])] = listed, 0
            case "paths":
                self._paths(_whole(message["dataset"]), payload, str(message["cwd"]))
            case "learn":
                self._observe(message, ObservedTable(str(message["name"]), _whole(message["size"])))
            case "learned":
                self._add_learned(message, payload)
            case "subset":
                of = self._tables[_whole(message["of"])]
                self._tables[_whole(message["dataset"])] = SubsetTable(of, _indices(payload))
            case "concat":
                parts = message["of"]
                assert isinstance(parts, list)
                tables = [self._tables[_whole(each)] for each in parts]
                self._tables[_whole(message["dataset"])] = ConcatTable(tables)
            case "forget":
                gone = _whole(message["dataset"])
                self._tables.pop(gone, None)
                if self._filling.pop(gone, None) is not None:
                    learned = self._learned.pop(f"{self._pid}.{gone}")
                    if text := learned.describe():
                        self._summary.notes[text] += 1
            case "order":
                self._order(message, _indices(payload))
            case "more":
                self._streams[str(message["stream"])].more(_indices(payload))
            case "cut":
                self._streams[str(message["stream"])].cut(_whole(message["position"]))
            case "progress":
                self._progress(message)
            case "left":
                self._look_back(message)
                self._leave(str(message["stream"]), message.get("epoch"))

    def _paths(self, number: int, payload: bytes, cwd: str) -> None:
        (table, filled), paths = self._filling[number], payload.split(b"\0")
        self._files.find(table, range(filled, filled + len(paths)), paths, cwd)
        filled += len(paths)
        self._filling[number] = table, filled
        if filled != table.size:
            return
        if table.found < table.size:
            self._summary.note(
                f"{table.size - table.found:,} of {table.size:,} files of a dataset lie in no mount"
            )
        for shown in table.mounts:  # connect before the first epoch begins
            self._controls.of(shown)

    def _observe(self, message: HookMessage, table: ObservedTable) -> None:
        number = _whole(message["dataset"])
        self._learned[f"{self._pid}.{number}"] = self._tables[number] = table

    def _add_learned(self, message: HookMessage, payload: bytes) -> None:
        numbers = np.frombuffer(payload, np.int64, 3 * _whole(message["samples"]))
        rest = payload[numbers.nbytes :]
        paths = rest.split(b"\0") if rest else []
        table = self._learned.get(str(message["table"]))
        if table is not None:  # None: the process has forgotten the dataset meanwhile
            samples, is_checked, counts = numbers[::3], numbers[1::3] != 0, numbers[2::3]
            note = table.add(self._files, samples, is_checked, counts, paths, str(message["cwd"]))
            if note:
                self._summary.note(note)

    def _chunks(self, number: int) -> bytes:
        """The chunk of each sample of a dataset, as numbers of 64 bits; -1: not known. Chunks of
        several mounts are counted one after the other."""
        table = self._tables[number].for_all_ranks()
        chunks, base = np.full(table.size, -1), 0
        for shown, files in table.take(np.arange(table.size)).items():
            snapshot = self._files.snapshot(shown.mount)
            if (str(snapshot.identity), snapshot.version) != shown[1:]:
                continue  # the mount has moved on to another version
            counts = np.diff(files.ends, prepend=0)
            [samples] = np.nonzero((counts > 0) & (chunks < 0))
            found = snapshot.chunk_of(files.entries[(files.ends - counts)[samples]])
            chunks[samples] = np.where(found >= 0, base + found, -1)
            base += snapshot.chunk_count
        return chunks.astype("<i8").tobytes()

    def _order(self, message: HookMessage, indices: Entries) -> None:
        name, epoch = str(message["stream"]), _whole(message["epoch"])
        table = self._tables[_whole(message["dataset"])]
        streams = self._streams.get(name)
        if streams is None:
            streams = LoaderStreams(f"run:{os.getpid()}.{name}", self._controls)
            self._streams[name] = streams
        if _whole(message["ahead"]):
            streams.foresee(table, epoch, indices)
            return
        self._summary.epochs += 1
        streams.begin(table, epoch, _whole(message["lag"]), indices)

    def _progress(self, message: HookMessage) -> None:
        self._summary.add(
            str(message["stream"]),
            Interval(
                _whole(message["epoch"]),
                monotonic() - self._started_s,
                _whole(message["batches"]),
                float(str(message["waited_s"])),
                float(str(message["computed_s"])),
            ),
            _measured_workers(message),
        )
        streams = self._streams.get(str(message["stream"]))
        if streams is not None:
            streams.progress(_whole(message["position"]))


def _measured_workers(message: HookMessage) -> MeasuredWorkers | None:
    if "workers" not in message:
        return None
    workers, at_once, batches = (
        _whole(message[name]) for name in ("workers", "at_once", "fetched")
    )
    cores, fetch_s, cpu_s = (float(str(message[name])) for name in ("cores", "fetch_s", "cpu_s"))
    return MeasuredWorkers(workers, at_once, cores, batches, fetch_s, cpu_s)


def _whole(value: object) -> int:
    """A whole number of a message. Raises TypeError for another value."""
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _indices(payload: bytes) -> Entries:
    return np.frombuffer(payload, np.int64)
