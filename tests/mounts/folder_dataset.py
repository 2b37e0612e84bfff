"""A dataset made of a plain folder, without chunks: the snapshot is real, contents are its files.

The names of files choose the fault that their reads meet.
"""

import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt

from diesel_fs.cache.readers.coalescing_reader import ExtentBatch
from diesel_fs.errors import ObjectMissing, ObjectStoreError
from diesel_fs.format.entries import RECORD, ChunkId, ChunkInfo, Kind, Rows
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.reader import Snapshot

IDENTITY_PREFIX = "0123456789abcdef"
CHUNK = ChunkId(bytes(range(16)))
RELEASE_SUFFIX = ".go"
"""While the file `SOURCE.go` is missing beside the source, reads of files called `wait*` hang. Of
`retry*`, the first read fails, and the second one hangs."""

PUSHED = "waitpush"
"""Reads of these files hang too, but the worker pushes the file that is being read."""

HANG = "hang"
"""These files hang the worker, but no reader, while `SOURCE.go` is missing."""

MANY = "many-"
"""The dataset `many-N` has one folder `many` of N empty files, which do not exist on disk."""
LEFT_OUT = (
    *("missing", "keyerror", "oserror", "memory", "group", "exit", "short"),
    *("wait", "retry"),
)
"""The worker leaves them out, as it leaves out damaged files."""

_KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFLNK: Kind.LINK, stat.S_IFDIR: Kind.FOLDER}


def snapshot_of(source: Path, dataset: str = "folder", version: int = 7) -> bytes:
    folders: list[bytes] = []
    names: list[bytes] = []
    tails: dict[int, bytes] = {}
    places, records = [], []
    root = os.fsencode(source)
    for folder, inner, files in os.walk(root):
        folders.append(os.path.relpath(folder, root) if folder != root else b"")
        for name in [*inner, *files, *([b""] if folder == root else [])]:
            found = os.lstat(os.path.join(folder, name))
            kind = _KINDS[stat.S_IFMT(found.st_mode)]
            size = found.st_size if kind != Kind.FOLDER else 0
            if kind == Kind.LINK:
                tails[len(names)] = os.readlink(os.path.join(folder, name))
            places.append(len(folders) - 1)
            names.append(name)
            mode = stat.S_IMODE(found.st_mode) & 0o777
            stored = size if kind == Kind.FILE else 0
            fixed = (found.st_mtime_ns, 0, 96, stored, mode, kind, 0, len(names), 1, 0)
            records.append((size, *fixed))
    return _merged(folders, places, names, records, tails, dataset, version)


def _merged(
    folders: list[bytes],
    places: list[int],
    names: list[bytes],
    records: Sequence[tuple[int, ...]],
    tails: dict[int, bytes],
    dataset: str,
    version: int,
) -> bytes:
    rows = Rows(
        folders=folders,
        folder=np.array(places, np.uint32),
        names=names,
        records=np.array(records, RECORD),
        chunk=np.zeros(len(names), np.uint32),
        chunks=[CHUNK],
        tails=tails,
    )
    chunks = [ChunkInfo(CHUNK, 1 << 32)]
    # The node keeps images by identity and version, so two different trees need two identities.
    what = repr((folders, places, names, records, tails)).encode()
    identity = UUID(IDENTITY_PREFIX + hashlib.md5(what, usedforsecurity=False).hexdigest()[16:])
    parts = build_snapshot(
        None, rows, chunks, identity=identity, dataset=dataset, version=version, digest=0
    )
    return b"".join(parts)


def many_names(count: int) -> list[bytes]:
    return [b"%07d-%s" % (number, b"x" * (number % 40)) for number in range(count)]


def many(dataset: str) -> bytes:
    inside = many_names(int(dataset.removeprefix(MANY)))
    names = [b"", b"many", *inside]
    fixed = (0, 0, 0, 0, 0o755, Kind.FOLDER, 0)
    records = [(0, *fixed, number, 1, 0) for number in range(2)]
    fixed = (0, 0, 0, 0, 0o644, Kind.FILE, 0)
    records += [(0, *fixed, number, 1, 0) for number in range(2, len(names))]
    places = [0, 0, *[1] * len(inside)]
    return _merged([b"", b"many"], places, names, records, {}, dataset, 1)


class FolderBatchSource:
    """The `BatchSource` of the worker: whole files of the source folder."""

    is_slow = False

    def __init__(self, snapshot: Snapshot, source: Path) -> None:
        self._snapshot = snapshot
        self._source = source
        self._given = 0

    def batches(self, entries: npt.NDArray[np.uint32]) -> Iterator[ExtentBatch]:
        """Yield each file in one part. Raises ObjectStoreError."""
        for entry in entries.tolist():
            path = Path(
                os.fsdecode(os.path.join(os.fsencode(self._source), self._snapshot.path(entry)))
            )
            name = path.name
            while name.startswith(HANG) and not Path(f"{self._source}{RELEASE_SUFFIX}").exists():
                time.sleep(0.01)
            if name.startswith(LEFT_OUT) and not name.startswith(PUSHED):
                continue
            try:
                content = path.read_bytes()
            except OSError as error:
                raise ObjectStoreError(f"the store has gone: {error}") from error
            self._given += 1
            yield ExtentBatch(np.array([entry]), np.zeros(1, np.int64), [memoryview(content)])

    def prefetch(self, units: Sequence[npt.NDArray[np.uint32]]) -> None:
        """Does nothing: a folder is fast."""

    def read_costs(self, units: Sequence[npt.NDArray[np.uint32]]) -> Sequence[tuple[float, float]]:
        return [(0.0, 0.0)] * len(units)

    def stats(self) -> dict[str, int]:
        return {"pieces": self._given}

    def close(self) -> None:
        """Does nothing."""


class FolderReader:
    """A file that was read once is in memory."""

    def __init__(self, snapshot: Snapshot, source: Path) -> None:
        self._snapshot = snapshot
        self._source = source
        self._lock = threading.Lock()
        self._contents: dict[int, memoryview] = {}
        self._failed_once: set[int] = set()
        self._at_once = self._at_once_max = 0

    def read(self, index: int, offset: int, size: int) -> memoryview:
        with self._lock:
            self._at_once += 1
            self._at_once_max = max(self._at_once_max, self._at_once)
        try:
            return self._read(index, offset, size)
        finally:
            with self._lock:
                self._at_once -= 1

    def _read(self, index: int, offset: int, size: int) -> memoryview:
        path = self._snapshot.path(index)
        name = os.fsdecode(path.rpartition(b"/")[2])
        waits = name.startswith("wait") or (name.startswith("retry") and index in self._failed_once)
        while waits and not self._source.with_name(self._source.name + RELEASE_SUFFIX).exists():
            time.sleep(0.01)  # a store that does not answer
        if name.startswith("retry") and not waits:
            self._failed_once.add(index)  # the kernel repeats the READ, and the second one waits
            raise ObjectMissing("not yet")
        match name.split(".")[0]:
            case "missing":
                raise ObjectMissing("no such chunk")
            case "keyerror":
                raise KeyError(name)
            case "oserror":
                raise OSError(9, "not our errno")
            case "memory":
                raise MemoryError
            case "group":
                raise ExceptionGroup("several", [RuntimeError("one")])
            case "exit":
                raise SystemExit(3)
            case "short":
                return memoryview(bytes(size - 1))
        try:
            content = memoryview((Path(os.fsdecode(self._source)) / os.fsdecode(path)).read_bytes())
        except OSError as error:
            raise ObjectStoreError(f"the store has gone: {error}") from error
        with self._lock:
            self._contents[index] = content
        return content[offset : offset + size]

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        content = self._contents.get(index)
        return None if content is None else content[offset : offset + size]

    def stats(self) -> dict[str, int]:
        return {"entries": len(self._contents), "at_once_max": self._at_once_max}

    def close(self) -> None:
        """Does nothing."""
