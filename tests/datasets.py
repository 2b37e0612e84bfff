"""The content of a dataset, in forms that tests compare."""

import os
import shutil
from pathlib import Path

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.format.entries import Kind
from diesel_fs.format.object_names import chunk_prefix
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.interface import Repository


def dataset_state(repository: Repository, name: str = "ds") -> dict[bytes, tuple[object, ...]]:
    """Return what `trees.facts` returns for a folder."""
    view = repository.view(name)
    reader = EntryReader(view, repository.objects, 64 << 20)
    found: dict[bytes, tuple[object, ...]] = {}
    for index in view.walk(0).tolist():
        status = view.stat(index)
        path = view.path(index) or b"."
        match status.kind:
            case Kind.FILE:
                content = bytes(reader.read(index))
                found[path] = ("file", status.mode, status.mtime_ns, content)
            case Kind.LINK:
                found[path] = ("link", status.mtime_ns, view.link(index))
            case Kind.FOLDER:
                found[path] = ("folder", status.mode, status.mtime_ns)
    return found


def file_contents(view: Snapshot, repository: Repository) -> dict[bytes, bytes]:
    reader = EntryReader(view, repository.objects, 1 << 20)
    try:
        return {view.path(i): bytes(reader.read(i)) for i in view.files().tolist()}
    finally:
        reader.close()


def content(repository: Repository, path: bytes, name: str = "ds") -> bytes | None:
    view = repository.view(name)
    index = view.lookup(path)
    if index < 0:
        return None
    return bytes(EntryReader(view, repository.objects, 1 << 20).read(index))


def stored_bytes(repository: Repository, name: str = "ds") -> int:
    prefix = chunk_prefix(repository.dataset(name).identity)
    return sum(info.bytes for info in repository.objects.list(prefix))


def forget_private_copies() -> None:
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "diesel", ignore_errors=True)
