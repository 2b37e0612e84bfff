"""What tests of `DiskTier` share."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from diesel_fs.cache import disk
from diesel_fs.cache.disk import DiskTier
from diesel_fs.cache.tiers import CacheTier, ChunkKey

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
    with tier._locked() as marker:
        return disk._used_bytes(marker)


def idle(place: Path) -> None:
    """Make all chunks look as if nobody had read them for an hour."""
    for path in place.glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (time.time() - 3600,) * 2)
