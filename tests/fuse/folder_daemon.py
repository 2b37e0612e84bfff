"""The mount daemon over a `folder_dataset`: the real program with another source.

`request.url` names the source folder, `request.dataset` the dataset.
"""

import logging
import os
import sys
import threading
import time

import trio

from diesel_fs.errors import NoSuchDataset
from diesel_fs.fuse.daemon import main
from diesel_fs.fuse.request import MountRequest
from diesel_fs.fuse.source import Source
from diesel_fs.settings import parse_url
from diesel_fs.snapshot import Snapshot
from tests.fuse.folder_dataset import FolderReader, snapshot_of


class FaultySnapshot(Snapshot):
    """A snapshot in which looking up some names meets a bug."""

    def child(self, folder: int, name: bytes) -> int:
        """The index, or the fault that is asked for."""
        match name:
            case b"raise KeyError":
                raise KeyError(name)
            case b"raise OSError":
                raise OSError(1, "not our errno")
            case b"raise MemoryError":
                raise MemoryError
            case b"raise RuntimeError":
                raise RuntimeError("a bug")
            case b"raise Cancelled":
                raise cancelled()
            case b"raise ExceptionGroup":
                raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
            case b"raise SystemExit":
                raise SystemExit(3)
        return super().child(folder, name)


def cancelled() -> trio.Cancelled:
    """What trio raises inside a cancelled scope; nobody else can make one."""

    async def collect() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as error:
                caught.append(error)
                raise

    caught: list[trio.Cancelled] = []
    thread = threading.Thread(target=trio.run, args=(collect,))
    thread.start()
    thread.join()
    return caught[0]


def open_folder(request: MountRequest) -> Source:
    """The folder that the URL names, as a dataset."""
    if request.dataset == "absent":
        raise NoSuchDataset("no dataset absent", advice="put it first")
    if request.dataset == "broken":
        raise KeyError("a bug of ours")
    if request.dataset == "dying":
        os._exit(9)
    if request.dataset == "slow":
        time.sleep(60)
    source = parse_url(request.url).path
    content = snapshot_of(source, request.dataset)
    snapshot = FaultySnapshot(content)
    return Source(snapshot, FolderReader(snapshot, source))


if __name__ == "__main__":
    code = main(sys.argv[1:], open_folder)
    logging.shutdown()
    os._exit(code)
