"""Listens to the hooks in training processes, a thread for each."""

import json
import os
import queue
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import ConflictError, DieselError
from .announcing import Controls, LoaderStreams
from .file_tables import Entries, FileTable, MountedFiles, concatenated

_LENGTHS = struct.Struct("<IQ")  # as in the hook's `link.py`
_BODY_BYTES_MAX, _PAYLOAD_BYTES_MAX = 1 << 20, 1 << 30

_NOTES_MAX = 5
_TEMPORARY_CHARACTERS_MAX = 70  # the path of a socket has 107 bytes at most
_END_S = 20.0  # for what is left to announce at the end; a mount may be slow

Said = dict[str, object]


@dataclass(slots=True)
class Summary:
    """What a training command has done, as far as its hooks said."""

    processes: int = 0
    """Python processes that loaded the hook."""
    epochs: int = 0
    """Epochs of loaders that began."""
    planned_epochs: int = 0
    """Those that were announced to a mount."""
    files: int = 0
    """Entries that were announced."""
    batches: int = 0
    waited_s: float = 0.0
    """How long the loops waited for data."""
    computed_s: float = 0.0
    """How long they did something else between two batches."""
    notes: Counter[str] = field(default_factory=Counter)
    """What the user should know; how often it was said."""

    def lines(self) -> Sequence[str]:
        """What a user should know at the end."""
        lines = []
        if not self.processes:
            lines.append(
                "no Python process of the command could be joined: it has none, or runs it with"
                " -I, -E or -S, or without PYTHONPATH"
            )
        elif not self.epochs:
            lines.append("no DataLoader has read files in a known order: nothing was announced")
        elif not self.planned_epochs:
            lines.append("no file that was read lies in a mount: nothing was announced")
        else:
            lines.append(
                f"announced {self.planned_epochs} of {self.epochs} epochs, {self.files:,} files"
            )
        total_s = self.waited_s + self.computed_s
        if self.batches and total_s:
            lines.append(
                f"{self.batches:,} batches: waited {self.waited_s:.1f} s for data"
                f" ({self.waited_s / total_s:.1%} of {total_s:.1f} s)"
            )
        shown = self.notes.most_common(_NOTES_MAX)
        lines += [text + (f" ({count} times)" if count > 1 else "") for text, count in shown]
        if len(self.notes) > len(shown):
            lines.append(f"and {len(self.notes) - len(shown)} more notes")
        return lines


class _Served(NamedTuple):
    """A process that has connected."""

    thread: threading.Thread
    connected: socket.socket


class TrainingPlanner:
    """Announces what training processes will read, while it is open. A context manager."""

    def __init__(self) -> None:
        """The socket lies in a new folder that is private to this user. Raises OSError."""
        is_long = len(tempfile.gettempdir()) > _TEMPORARY_CHARACTERS_MAX
        place = "/tmp" if is_long else None  # noqa: S108 (the new folder in it is private)
        self._folder = tempfile.TemporaryDirectory(prefix="diesel-run-", dir=place)
        self.socket_path = Path(self._folder.name) / "join"
        self.summary = Summary()
        self._files = MountedFiles()
        self._controls = Controls()
        self._lock = threading.Lock()  # for all of the above
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket_path))
        self._listener.listen(64)
        self._served: list[_Served] = []
        self._accepting = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Serve from now on, in threads. Processes that have connected before are served then."""
        self._accepting.start()

    def environment(self, *, ahead: int) -> str:
        """The value of the hook's variable in the environment of a training process."""
        return json.dumps(
            {
                "socket": str(self.socket_path),
                "ahead": ahead,
                "fuse_trees": self._files.fuse_trees,
            }
        )

    def __enter__(self) -> "TrainingPlanner":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting.ident is not None:
            self._accepting.join()
        self._listener.close()
        for served in self._served:  # what has been sent is still received
            with suppress(OSError):
                served.connected.shutdown(socket.SHUT_RD)
        for served in self._served:
            served.thread.join(_END_S)
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
        """Receive what a process sends, and have another thread work on it: a process never waits
        for a mount."""
        received: queue.SimpleQueue[tuple[Said, bytes] | None] = queue.SimpleQueue()
        working = threading.Thread(target=self._work, args=[received], daemon=True)
        working.start()
        try:
            self._receive(connected, received)
        finally:
            received.put(None)
            working.join()

    def _work(self, received: "queue.SimpleQueue[tuple[Said, bytes] | None]") -> None:
        process = _Process(self._files, self._controls, self.summary)
        while (message := received.get()) is not None:
            with self._lock:
                process.handle(*message)
        with self._lock:
            process.end()

    def _receive(
        self,
        connected: socket.socket,
        received: "queue.SimpleQueue[tuple[Said, bytes] | None]",
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
    """What one training process has said."""

    def __init__(self, files: MountedFiles, controls: Controls, summary: Summary) -> None:
        self._files, self._controls, self._summary = files, controls, summary
        self._cwd = "/"
        self._tables: dict[int, FileTable] = {}
        self._filled: Counter[int] = Counter()  # by table: how many of its paths have come
        self._streams: dict[str, LoaderStreams] = {}

    def handle(self, said: Said, payload: bytes) -> None:
        """A message. What cannot be done is noted for the user."""
        try:
            self._handle(said, payload)
        except ConflictError:  # the mount has moved on to another version
            self._files.refresh()  # for datasets that come; those that were told keep their version
            self._note(
                "a mount has changed to another version while the command read from it: what it"
                " knew before is planned no more"
            )
        except DieselError as error:
            self._note(f"{error.message}" + (f" ({error.advice})" if error.advice else ""))
        except (KeyError, TypeError, ValueError) as error:
            self._note(f"a training process sent what has no meaning: {error!r}")

    def end(self) -> None:
        """The process has ended."""
        for each in self._streams.values():
            self._summary.files += each.announced
            self._summary.planned_epochs += each.planned_epochs
            try:
                each.withdraw()
            except DieselError:  # the mount is gone, or knows the stream no more
                continue

    def _note(self, text: str) -> None:
        self._summary.notes[text] += 1

    def _handle(self, said: Said, payload: bytes) -> None:
        match said["do"]:
            case "process":
                self._summary.processes += 1
                self._cwd = str(said["cwd"])
            case "note":
                self._note(str(said["text"]))
            case "files":
                self._tables[_whole(said["dataset"])] = FileTable(_whole(said["size"]))
            case "paths":
                self._paths(_whole(said["dataset"]), payload)
            case "subset":
                table = self._tables[_whole(said["of"])]
                self._tables[_whole(said["dataset"])] = table.subset(_indices(payload))
            case "concat":
                of = said["of"]
                assert isinstance(of, list)
                tables = [self._tables[_whole(each)] for each in of]
                self._tables[_whole(said["dataset"])] = concatenated(tables)
            case "forget":
                self._tables.pop(_whole(said["dataset"]), None)
                self._filled.pop(_whole(said["dataset"]), None)
            case "order":
                self._order(said, _indices(payload))
            case "more":
                self._streams[str(said["stream"])].more(_indices(payload))
            case "cut":
                self._streams[str(said["stream"])].cut(_whole(said["position"]))
            case "progress":
                self._progress(said)

    def _paths(self, number: int, payload: bytes) -> None:
        table, paths = self._tables[number], payload.split(b"\0")
        self._files.find(table, self._filled[number], paths, self._cwd)
        self._filled[number] += len(paths)
        if self._filled[number] != table.size:
            return
        if table.found < table.size:
            self._note(
                f"{table.size - table.found:,} of {table.size:,} files of a dataset lie in no mount"
            )
        for shown in table.entries:  # connected before the first epoch begins
            self._controls.of(shown)

    def _order(self, said: Said, indices: Entries) -> None:
        name, epoch = str(said["stream"]), _whole(said["epoch"])
        table = self._tables[_whole(said["dataset"])]
        streams = self._streams.get(name)
        if streams is None:
            streams = LoaderStreams(f"run:{os.getpid()}.{name}", self._controls)
            self._streams[name] = streams
        if _whole(said["ahead"]):
            streams.foresee(table, epoch, indices)
            return
        self._summary.epochs += 1
        streams.begin(table, epoch, _whole(said["lag"]), indices)

    def _progress(self, said: Said) -> None:
        summary = self._summary
        summary.batches += _whole(said["batches"])
        summary.waited_s += float(str(said["waited_s"]))
        summary.computed_s += float(str(said["computed_s"]))
        streams = self._streams.get(str(said["stream"]))
        if streams is not None:
            streams.progress(_whole(said["position"]))


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _indices(payload: bytes) -> Entries:
    return np.frombuffer(payload, np.int64)
