"""What tests of `DiskTier` share."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.cache.disk.chunks import DiskTier
from diesel_fs.cache.tiers import CacheTier, ChunkKey
from diesel_fs.errors import NoSpaceError

STORE = UUID(int=7)
Chunks = dict[ChunkKey, bytes]


def tier_at(
    place: Path,
    limit_bytes: int | None = 1 << 30,
    clock: Callable[[], float] = time.monotonic,
) -> DiskTier:
    return DiskTier(place, STORE, limit_bytes, clock)


def put(tier: CacheTier, key: ChunkKey, content: bytes) -> None:
    reservation = tier.reserve(key, len(content))
    assert reservation is not None
    reservation.commit(memoryview(content))


def content_of(tier: CacheTier, key: ChunkKey) -> bytes | None:
    found = tier.find(key)
    if found is None:
        return None
    with found:
        room = bytearray(found.bytes)
        found.read_into(0, memoryview(room))
        return bytes(room)


def file_of(place: Path, key: ChunkKey) -> Path:
    (file,) = place.glob(f"*/{key.identity.hex}/{key.id.hex()}")
    return file


def files(place: Path) -> list[Path]:
    return [path for path in place.glob("*/*/*") if path.name != ".used"]


def counted(tier: DiskTier) -> int:
    with tier.folder.locked() as ledger:
        return ledger.used_bytes


def idle(place: Path) -> None:
    """Make all chunks look as if nobody had read them for an hour."""
    for path in place.glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (time.time() - 3600,) * 2)


def start_program(code: str, *arguments: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


class Kept:
    """A tier in a folder that keeps one chunk, and another chunk. Its clock stands still."""

    def __init__(self, place: Path, chunks: Chunks) -> None:
        (self.key, self.content), (self.other, self.more), *_ = chunks.items()
        self.place, self.now_s = place, 0.0
        self.tier = tier_at(place, clock=lambda: self.now_s)
        put(self.tier, self.key, self.content)

    def is_served(self) -> bool:
        found = content_of(self.tier, self.key)
        assert found in (None, self.content)
        return found is not None

    def refuse_more(self, times: int = 4) -> None:
        for _ in range(times):
            with pytest.raises(NoSpaceError):
                self.tier.reserve(self.other, len(self.more))

    def take_more(self) -> None:
        put(self.tier, self.other, self.more)
        assert content_of(self.tier, self.other) == self.more
