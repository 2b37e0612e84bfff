"""A ledger of small chunks for tests of the pure parts of a node's cache."""

from typing import cast
from uuid import UUID

import numpy as np
import numpy.typing as npt

from diesel_fs.cache.policies.eviction import POLICIES
from diesel_fs.format.entries import ChunkId
from diesel_fs.peers.node.ledger import Ledger, Room, Tables
from diesel_fs.peers.node.sealed_memory import SealedMemory
from tests.clocks import ManualClock


class FakeMemory:
    """Stands in for `SealedMemory`: no test of the ledger needs real memory."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.view = memoryview(bytes(size)).toreadonly()
        self.descriptor = 1

    def close(self) -> None:
        self.descriptor = -1


def memory(size: int) -> SealedMemory:
    return cast(SealedMemory, FakeMemory(size))


def ids(names: list[int]) -> list[ChunkId]:
    return [ChunkId(name.to_bytes(16, "big")) for name in names]


def sizes(names: list[int]) -> npt.NDArray[np.uint64]:
    return np.array([100 + 10 * name for name in names], np.uint64)


def make_ledger(
    names: list[int],
    memory_bytes: int,
    *,
    queue_bytes: int = 0,
    chunks: int = 100,
    policy: str = "lru",
) -> tuple[Ledger, ManualClock]:
    clock = ManualClock()
    room = Room(memory_bytes, chunks, queue_bytes)
    tables = Tables(POLICIES[policy](), POLICIES[policy]())
    ledger = Ledger(UUID(int=5), ids(names), sizes(names), room, tables, clock)
    ledger.set_owned(np.ones(len(names), np.bool_))
    return ledger, clock
