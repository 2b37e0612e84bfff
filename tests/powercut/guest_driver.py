"""A program for the guest that uses the stores directly: `guest_driver.py WHAT FOLDER`.

It prints a line "@did ..." after each call that has succeeded. After the last one it does nothing
more: a later sync could hide that one was missing.
"""

import os
import sys
import uuid
from pathlib import Path

from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.private_copies import save_snapshot
from diesel_fs.repository.versions import empty_snapshot
from diesel_fs.storage.metadata.sqlite.database_file import LEASE_NAME
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.objects.folder import FolderStore
from tests.storage.metadata.batches import Chunk, Entry

DATASET = "datasets/" + "ab" * 16
LEASE = f"{DATASET}/leases/me"
IDENTITY = uuid.UUID(int=7)
DATASET_NAME = "flowers"
COMMITS = 5


def object_name(letter: str) -> str:
    return f"{DATASET}/chunks/{letter * 4}/{letter * 4}{'0' * 18}"


SIZES = {object_name("a"): 70_000, object_name("b"): 3_000_001}
"""The sizes of two objects: one is written through the page cache, and one with O_DIRECT."""


def content(name: str) -> bytes:
    return (name.encode() * (SIZES[name] // len(name) + 1))[: SIZES[name]]


def made_chunk(number: int) -> Chunk:
    return Chunk(number, tuple(Entry(b"a/%d" % (number * 7 % 10 + i), number) for i in range(40)))


def tell(what: str) -> None:
    print(f"@did {what}", flush=True)


def objects(folder: Path, what: str) -> None:
    store = FolderStore.create(folder)
    for name in SIZES:
        store.put(name, [content(name)])
    if what == "delete":
        store.delete(object_name("a"))
    if what == "replace":
        store.replace(LEASE, [b"old"])
        store.replace(LEASE, [b"new"])
    tell(what)


def commits(folder: Path, mode: str) -> None:
    if mode == "rollback":
        (folder / LEASE_NAME).touch()  # a lease, even a free one, stands for a network file system
    meta = SqliteMetadata.open(folder / "meta.sqlite", create=True)
    meta.create(DATASET_NAME, IDENTITY)
    for number in range(1, COMMITS + 1):
        meta.commit(IDENTITY, made_chunk(number).batch())
        meta.sync()
        tell(f"{mode} {number}")


def saves(folder: Path, what: str) -> None:
    with LocalRepository.open(folder.as_uri(), create=True):
        for name in ("old", "new"):
            save_snapshot(empty_snapshot(IDENTITY, name), folder / "saved")
        tell(what)
        os._exit(0)  # so that nothing is closed


DRIVERS = {
    "put": objects,
    "delete": objects,
    "replace": objects,
    "wal": commits,
    "rollback": commits,
    "save": saves,
}

if __name__ == "__main__":
    DRIVERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[1])
    os._exit(0)
