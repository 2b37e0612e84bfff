"""The program of a mount in which some steps take longer, in seconds, by environment variables:
`STORE` for each read of the object store, `RANGES` for each chunk that the prefetch worker reads,
`SPANS` for each of its reads as long as it does not take the store for slow, `PEER` for each answer
of a node of the task, `DECODE` for each decompression and check, `LOOKUP` for each name."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from diesel_fs.cache.readers import entry_reader
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.daemon.supervisor import main
from diesel_fs.peers.reader.task_chunks import TaskChunks
from diesel_fs.storage.objects.folder import FolderReads, FolderStore

STORE, RANGES, SPANS = "TEST_STORE_S", "TEST_RANGES_S", "TEST_SPANS_S"
PEER = "TEST_PEER_S"
DECODE, LOOKUP = "TEST_DECODE_S", "TEST_LOOKUP_S"

PROGRAM = (sys.executable, "-m", "tests.mounts.slow_daemon")

_P = ParamSpec("_P")
_T = TypeVar("_T")


def slowed(call: Callable[_P, _T], seconds: float) -> Callable[_P, _T]:
    def slow(*args: _P.args, **named: _P.kwargs) -> _T:
        time.sleep(seconds)
        return call(*args, **named)

    return slow


def each_slowed(call: Callable[_P, Iterable[_T]], seconds: float) -> Callable[_P, Iterator[_T]]:
    def slow(*args: _P.args, **named: _P.kwargs) -> Iterator[_T]:
        for each in call(*args, **named):
            time.sleep(seconds)
            yield each

    return slow


if __name__ == "__main__":
    if SPANS in os.environ:
        name = "read_ranges"
        setattr(FolderReads, name, each_slowed(FolderReads.read_ranges, float(os.environ[SPANS])))
    for variable, owner, name in (
        (STORE, FolderStore, "read_into"),
        (STORE, FolderReads, "read"),
        (RANGES, FolderReads, "read_ranges"),
        (PEER, TaskChunks, "pin"),
        (PEER, TaskChunks, "read_whole"),
        (PEER, TaskChunks, "try_part"),
        (DECODE, entry_reader, "decode"),
        (LOOKUP, Snapshot, "child"),
    ):
        if variable in os.environ:
            setattr(owner, name, slowed(getattr(owner, name), float(os.environ[variable])))
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
