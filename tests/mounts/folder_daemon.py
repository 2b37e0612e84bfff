"""The program of a mount, with a `folder_dataset` in the place of a repository.

`request.url` names the source folder, `request.dataset` the dataset. Environment variables
change the program: `WATCHDOG` is the time that the server may not answer, `GRACE` the time for
reads at the end, `LACKING` has the bits of INIT that the kernel pretends to lack, `KERNEL` names
the other kernel (`other_kernels.py`). Until the file `WORKS_UNTIL` exists, the daemon does not
end and uses processor time, as it does while the kernel forgets millions of files.
"""

import logging
import os
import sys
import threading
import time

import trio

from diesel_fs.errors import NoSuchDataset
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.daemon.ending import GRACE_S
from diesel_fs.mounts.daemon.supervisor import WATCHDOG_S, main
from diesel_fs.mounts.options import MountRequest
from diesel_fs.mounts.sessions import protocol
from diesel_fs.mounts.sessions.protocol import Op
from diesel_fs.mounts.source import MountSource, OpenedSnapshot
from diesel_fs.urls import parse_url
from tests.mounts import other_kernels
from tests.mounts.folder_dataset import MANY, FolderBatchSource, FolderReader, many, snapshot_of

WATCHDOG = "TEST_WATCHDOG_S"
GRACE = "TEST_GRACE_S"
LACKING = "TEST_LACKING_FLAGS"
WORKS_UNTIL = "TEST_WORKS_UNTIL"
WORKS_S_MAX = 60.0


class FaultySnapshot(Snapshot):
    """A snapshot in which looking up some names raises an exception, as a bug would."""

    def child(self, folder: int, name: bytes) -> int:
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
    """The exception of a cancelled scope, which only trio can make."""

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


class FolderMountSource(MountSource):
    def open(self, request: MountRequest) -> OpenedSnapshot:
        if request.dataset == "absent":
            raise NoSuchDataset("no dataset absent", advice="put it first")
        if request.dataset == "broken":
            raise KeyError("a bug in the mount")
        if request.dataset == "dying":
            os._exit(9)
        if request.dataset == "slow":
            time.sleep(60)
        if request.dataset.startswith(MANY):
            return OpenedSnapshot(Snapshot(many(request.dataset)))
        return OpenedSnapshot(
            FaultySnapshot(snapshot_of(parse_url(request.url).path, request.dataset))
        )

    def lease(self, request: MountRequest, snapshot: Snapshot) -> None:
        """None: a folder has no purge."""

    def reader(self, request: MountRequest, snapshot: Snapshot, memory_bytes: int) -> FolderReader:
        return FolderReader(snapshot, parse_url(request.url).path)

    def batch_source(self, request: MountRequest, snapshot: Snapshot) -> FolderBatchSource:
        return FolderBatchSource(snapshot, parse_url(request.url).path)


real_read = os.read


def read_lacking_flags(descriptor: int, size: int) -> bytes:
    content = real_read(descriptor, size)
    if os.readlink(f"/proc/self/fd/{descriptor}") != "/dev/fuse":
        return content
    assert protocol.parse_header(memoryview(content)).op == Op.INIT
    flags_at = protocol.HEADER_BYTES + 12  # after major, minor and readahead
    flags = int.from_bytes(content[flags_at : flags_at + 4], "little")
    flags &= ~int(os.environ[LACKING])
    return content[:flags_at] + flags.to_bytes(4, "little") + content[flags_at + 4 :]


if __name__ == "__main__":
    if LACKING in os.environ:
        setattr(os, "read", read_lacking_flags)  # noqa: B010  # mypy forbids =
    other_kernels.meet(os.environ.get(other_kernels.KERNEL, ""))
    code = main(
        sys.argv[1:],
        FolderMountSource(),
        watchdog_s=float(os.environ.get(WATCHDOG, WATCHDOG_S)),
        grace_s=float(os.environ.get(GRACE, GRACE_S)),
    )
    while WORKS_UNTIL in os.environ and not os.path.exists(os.environ[WORKS_UNTIL]):
        if time.process_time() > WORKS_S_MAX:  # the test was killed
            break
    logging.shutdown()
    os._exit(code)
