"""A dataset made of a real folder, without chunks: the snapshot is real, the content is read from

the folder itself. Names of files say which fault their reads meet; they are the tests' own, and no
protection under test can know them.
"""

import os
import stat
import threading
import time
from pathlib import Path
from uuid import UUID

import numpy as np

from diesel_fs.entries import RECORD, ChunkId, ChunkInfo, Kind, Rows
from diesel_fs.errors import ObjectMissing, ObjectStoreError
from diesel_fs.snapshot import Snapshot
from diesel_fs.snapshot_merge import merge

IDENTITY = UUID("0123456789abcdef0123456789abcdef")
CHUNK = ChunkId(bytes(range(16)))
GO = ".go"
"""While the file `SOURCE.go` beside the source is missing, reads of files called `wait*` hang."""

_KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFLNK: Kind.LINK, stat.S_IFDIR: Kind.FOLDER}


def snapshot_of(source: Path, dataset: str = "folder", version: int = 7) -> bytes:
    """The snapshot of everything below a folder, itself included."""
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
            fixed = (found.st_mtime_ns, 0, 0, 0, mode, kind, 0, len(names), 1, 0)
            records.append((size, *fixed))
    rows = Rows(
        folders=folders,
        folder=np.array(places, np.uint32),
        names=names,
        records=np.array(records, RECORD),
        chunk=np.zeros(len(names), np.uint32),
        chunks=[CHUNK],
        tails=tails,
    )
    chunks = [ChunkInfo(CHUNK, 1 << 20)]
    parts = merge(None, rows, chunks, identity=IDENTITY, dataset=dataset, version=version, digest=0)
    return b"".join(parts)


class FolderReader:
    """A `ContentReader` over the source folder; what was read once is in memory."""

    def __init__(self, snapshot: Snapshot, source: Path) -> None:
        self._snapshot = snapshot
        self._source = source
        self._lock = threading.Lock()
        self._contents: dict[int, memoryview] = {}

    def read(self, index: int, offset: int, size: int) -> memoryview:
        """Checked bytes, or the fault that the file's name asks for."""
        path = self._snapshot.path(index)
        name = os.fsdecode(path.rpartition(b"/")[2])
        while (
            name.startswith("wait") and not self._source.with_name(self._source.name + GO).exists()
        ):
            time.sleep(0.01)  # a store that does not answer
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

    def cached(self, index: int, offset: int, size: int) -> memoryview | None:
        """What was read before."""
        content = self._contents.get(index)
        return None if content is None else content[offset : offset + size]

    def stats(self) -> dict[str, int]:
        """How much is in memory."""
        return {"entries": len(self._contents)}

    def close(self) -> None:
        """Nothing is held."""
