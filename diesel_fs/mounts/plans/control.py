"""The client of a mount's control socket: it announces which files a program will read.

    from diesel_fs.mounts.plans.control import Control, explicit

    with Control.connect("/mnt/imagenet") as control:
        control.announce("rank0", [explicit(epoch=0, entries=order)])
        control.progress("rank0", 4096)

A *stream* is the files that one reader of a training program will read in each epoch; the mount
pushes them into the kernel's page cache ahead of the reader. Files are given by their indices in
the snapshot that the mount shows (`.diesel/snapshot`); a plan for another version is refused.
CONTROL.md describes the messages.

The client is blocking, and starts no thread. Any thread may use a `Control`; requests are sent one
at a time. After a fork the child opens a connection of its own with its first request.
"""

import os
import socket
import stat
import threading
from collections.abc import Sequence
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import DeadlineError, DieselError, PermissionDenied, UsageError
from ...net.messages import LENGTH, Message, Value, frame, parse_error, unpack
from ...orders.plan import EntryOrder
from ...system.unix_sockets import connect_unix
from .control_wire import (
    CHECK_ENTRIES_MAX,
    ENTRIES_PER_FRAME,
    FRAME_BYTES_MAX,
    PROTOCOL,
    VALUES_PER_FRAME,
    pack_entries,
)

DEADLINE_S = 30.0
"""The mount waits up to 15 s of this for its prefetch worker."""

ANSWER_ITEMS_MAX = 1 << 14
"""Statistics of 64 streams and 64 readers have some 5,000 items."""

Epochs: TypeAlias = Sequence[Message]
"""The fields of epochs, each made by `explicit` or `drawn`."""


def explicit(
    *, epoch: int, entries: EntryOrder, exact: bool = True, bounds: Sequence[int] | None = None
) -> Message:
    """An epoch given by its entries, in the order of reading. `exact` is False for a prediction;
    `bounds` has for each batch the position behind its last entry. Raises UsageError."""
    fields: Message = {"epoch": epoch, "exact": exact, **pack_entries(entries)}
    if bounds is not None:
        fields["bounds"] = np.asarray(bounds, "<i8").tobytes()
    return fields


def drawn(
    *,
    epoch: int,
    seed: int,
    kind: str = "chunk",
    group_size: int | None = None,
    rank: int = 0,
    world: int = 1,
    drop_last: bool = False,
    below: int = 0,
    exact: bool = True,
) -> Message:
    """An epoch that the mount draws itself from the parameters of its shuffle
    (`orders/computed.py`). `kind` is `chunk` (chunk-wise) or `full`; `below` is the index of the
    folder whose files are shuffled; `exact` is False for a prediction."""
    fields: Message = {
        "epoch": epoch, "exact": exact, "kind": kind, "seed": seed, "rank": rank, "world": world,
        "drop_last": drop_last, "below": below,
    }  # fmt: skip
    if group_size is not None:
        fields["group_size"] = group_size
    return fields


class Control:
    """A connection to the control socket of a mount. Made by `connect`.

    Every method raises the DieselError in the mount's answer (UsageError for a request without
    meaning, ConflictError for another dataset or version), and DeadlineError if no answer arrives.
    """

    def __init__(self, mountpoint: str, identity: str | None, version: int | None) -> None:
        self._mountpoint = mountpoint
        # One for each process, since a fork may inherit a lock that is held
        self._locks: dict[int, threading.Lock] = {}
        self._socket: socket.socket | None = None
        self._owner = -1  # the process that has opened the socket
        self.hello: Message = {}
        """The mount's first answer (CONTROL.md)."""
        self._identity = identity
        self._version = version

    @classmethod
    def connect(
        cls,
        mountpoint: str | os.PathLike[str],
        *,
        identity: str | None = None,
        version: int | None = None,
    ) -> Self:
        """Connects to the mount at a folder. `identity` and `version` are those of the snapshot
        that plans are made from, by default those of the mount. Raises UsageError,
        PermissionDenied."""
        control = cls(os.fspath(mountpoint), identity, version)
        control._open()
        return control

    @property
    def accepts_plans(self) -> bool:
        """Whether the mount pushes contents ahead of readers; otherwise it refuses plans."""
        return self.hello.get("plans") is True

    @property
    def identity(self) -> str:
        return str(self.hello.get("identity")) if self._identity is None else self._identity

    @property
    def version(self) -> int:
        version = self.hello.get("version") if self._version is None else self._version
        assert isinstance(version, int)
        return version

    def announce(
        self, stream: str, epochs: Epochs, *, tentative: bool = False, lag_entries: int = 0
    ) -> None:
        """Announces a stream and the epochs that it will read (`explicit`, `drawn`), in place of a
        stream of the same name. With `tentative`, nothing is pushed until the reader has been seen
        to follow the order. `lag_entries`: how many positions the stream's workers may be apart; 0
        if unknown."""
        first, rest = _split(epochs)
        self._request(
            {"do": "announce", "stream": stream, "tentative": tentative, "lag_entries": lag_entries,
             **self._version_fields(), "epochs": first}
        )  # fmt: skip
        self._extend(stream, rest)

    def extend(self, stream: str, epochs: Epochs) -> None:
        """Adds epochs to a stream. If the first of them has the number of the last announced epoch,
        its entries are appended to that epoch."""
        first, rest = _split(epochs)
        self._extend(stream, [part for part in (first, *rest) if part])

    def replace(self, stream: str, epoch: Message, position: int = 0) -> None:
        """Replaces the entries of an announced epoch, from a position on."""
        first_part, rest = _split([epoch])
        [first], *rest = [part for part in (first_part, *rest) if part]
        assert isinstance(first, dict)
        self._request(
            {
                "do": "replace",
                "stream": stream,
                "position": position,
                **self._version_fields(),
                **first,
            }
        )
        self._extend(stream, rest)

    def withdraw(self, stream: str) -> None:
        self._request({"do": "withdraw", "stream": stream})

    def progress(self, stream: str, position: int, epoch: int | None = None) -> None:
        """Reports which position the stream reads next, in its current epoch or in a named one."""
        named: Message = {} if epoch is None else {"epoch": epoch}
        self._request({"do": "progress", "stream": stream, "position": position, **named})

    def value(self, entries: EntryOrder, importance: float) -> None:
        """Sets one value for all these entries: a finite number that is not negative. Among entries
        that are not pushed ahead of a reader, the mount drops the least valuable first."""
        for part in _parts(entries, ENTRIES_PER_FRAME):
            self._request(
                {"do": "value", "importance": float(importance), **self._version_fields(),
                 **pack_entries(part)}
            )  # fmt: skip

    def values(
        self,
        entries: EntryOrder,
        importances: "npt.ArrayLike",
        *,
        job: str = "",
        benefit: float = 1.0,
        substitutes: bool = False,
    ) -> int:
        """Sets the values of entries, one for each: finite numbers that are not negative. If
        several jobs use the mount, each gives its name, and how many times as fast its batches
        arrive with the cache (`benefit`); their values are merged. With `substitutes`, the job
        accepts resident entries of low importance in place of others. Returns how many jobs have
        set values."""
        row = np.asarray(importances, "<f4")
        if row.shape != np.shape(entries):
            raise UsageError(f"{row.size} values for {len(np.asarray(entries))} entries")
        parts, jobs = _parts(entries, VALUES_PER_FRAME), 0
        for at, part in enumerate(parts):
            start = at * VALUES_PER_FRAME
            answer = self._request(
                {"do": "value", "importances": row[start : start + len(part)].tobytes(),
                 "more": at + 1 < len(parts), "job": job, "benefit": float(benefit),
                 "substitutes": substitutes, **self._version_fields(), **pack_entries(part)}
            )  # fmt: skip
            found = answer.get("jobs")
            jobs = found if isinstance(found, int) else 0
        return jobs

    def resident(self, entries: EntryOrder) -> npt.NDArray[np.bool_]:
        """Which of these entries are in the page cache, as far as the mount knows."""
        return self._resident("resident", entries, ENTRIES_PER_FRAME)

    def check(self, entries: EntryOrder) -> npt.NDArray[np.bool_]:
        """As `resident`, after the mount has queried the kernel, which may have freed some of them.
        That takes some 10 us for each entry."""
        return self._resident("check", entries, CHECK_ENTRIES_MAX)

    def _resident(self, do: str, entries: EntryOrder, entries_max: int) -> npt.NDArray[np.bool_]:
        found = []
        for part in _parts(entries, entries_max):
            answer = self._request({"do": do, **self._version_fields(), **pack_entries(part)})
            bitmap = answer.get("bitmap")
            if not isinstance(bitmap, bytes) or len(bitmap) != -(-len(part) // 8):
                raise DieselError("the mount's answer has no bitmap of these entries")
            bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
            found.append(bits[: len(part)].astype(np.bool_))
        return np.concatenate(found)

    def stats(self) -> Message:
        """The same as `.diesel/stats`, but up to date."""
        found = self._request({"do": "stats"}).get("stats")
        if not isinstance(found, dict):
            raise DieselError("the mount's answer has no statistics")
        return found

    def close(self) -> None:
        """Closes the connection. Plans that were not withdrawn stay in force."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the connection -------------------------------------------------------------------------------

    def _extend(self, stream: str, parts: Sequence[list[Value]]) -> None:
        for part in parts:
            self._request(
                {"do": "extend", "stream": stream, **self._version_fields(), "epochs": part}
            )

    def _version_fields(self) -> Message:
        return {"identity": self.identity, "version": self.version}

    def _request(self, message: Message) -> Message:
        """Raises the error in the answer."""
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._socket is None or self._owner != os.getpid():
                self._open()
            answer = self._exchange(message)
        error = parse_error(answer)
        if error is not None:
            raise error
        return answer

    def _open(self) -> None:
        """Connects and exchanges hellos. A connection inherited by a fork is only closed here."""
        self.close()
        self._owner = os.getpid()
        self._socket = _connect(self._mountpoint)
        answer = self._exchange({"diesel_control": PROTOCOL})
        error = parse_error(answer)
        if error is not None:
            self.close()
            raise error
        self.hello = answer

    def _exchange(self, message: Message) -> Message:
        assert self._socket is not None
        request = frame(message, FRAME_BYTES_MAX)
        try:
            self._socket.sendall(request)
            (length,) = LENGTH.unpack(self._receive(LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise DieselError(
                    f"the mount answers with {length} bytes (at most {FRAME_BYTES_MAX})"
                )
            return unpack(self._receive(length), ANSWER_ITEMS_MAX)
        except BaseException as error:
            self.close()  # the next answer on this connection could belong to this request
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"the mount on {self._mountpoint} did not answer within {DEADLINE_S:g} s"
                ) from None
            if isinstance(error, OSError):
                raise DieselError(
                    f"the connection to the mount on {self._mountpoint} failed: {error.strerror}"
                ) from error
            raise

    def _receive(self, count: int) -> bytearray:
        assert self._socket is not None
        body = bytearray()
        while len(body) < count:
            received = self._socket.recv(min(count - len(body), 1 << 20))
            if not received:
                raise DieselError(
                    f"the mount on {self._mountpoint} closed the connection",
                    advice="only the user that mounted it may send plans; its log says more",
                )
            body += received
        return body


def _connect(mountpoint: str) -> socket.socket:
    path = os.path.join(mountpoint, ".diesel", "control")
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):  # in a container this is the socket itself
            path = os.readlink(path)
    except OSError as error:
        raise UsageError(f"{mountpoint} is no mount that takes plans: {error.strerror}") from error
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        client.settimeout(DEADLINE_S)
        connect_unix(client, path)
    except OSError as error:
        client.close()
        raise PermissionDenied(
            f"cannot connect to the mount on {mountpoint}: {error.strerror or error}",
            advice="only the user that mounted it may send plans",
        ) from error
    return client


def _parts(entries: EntryOrder, entries_max: int) -> "list[npt.NDArray[np.int64]]":
    row = np.asarray(entries)
    return [row[start : start + entries_max] for start in range(0, max(len(row), 1), entries_max)]


def _split(epochs: Epochs) -> tuple[list[Value], list[list[Value]]]:
    """Divides epochs among the first message and each `extend` after it, by the size of a frame. An
    epoch that is cut loses its bounds, which are positions in the whole epoch."""
    frames: list[list[Value]] = [[]]
    left_bytes = frame_bytes = 4 * ENTRIES_PER_FRAME
    for epoch in epochs:
        entries = epoch.get("entries", b"")
        assert isinstance(entries, bytes)
        if len(entries) <= left_bytes:
            left_bytes -= len(entries)
            frames[-1].append(epoch)
            continue
        if "bounds" in epoch and len(entries) > frame_bytes:
            epoch = {name: value for name, value in epoch.items() if name != "bounds"}
        for start in range(0, len(entries), frame_bytes):
            part = entries[start : start + frame_bytes]
            frames.append([{**epoch, "entries": part}])
            left_bytes = frame_bytes - len(part)
    return frames[0], frames[1:]
