"""The peers that pack training data into shards of their own formats, and read them.

All of their code runs in the peers' environment (`shards_program.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..peers import in_peers
from ..store import BUCKET, Store
from ..workbench import Workbench

MDS, LIT, WDS = "mosaicml-streaming", "litdata", "webdataset"
NAMES = (MDS, LIT, WDS)
SHARD_BYTES, SHARD_BYTES_MIN = 64 << 20, 1 << 20  # two of the peers have these
_PROGRAM = Path(__file__).with_name("shards_program.py")


@dataclass(frozen=True, slots=True)
class Passes:
    """The time that a peer took to read all samples from the local disk in one process: the seconds
    of each pass, as it iterates in its own shuffled order, and by random indices."""

    files: int
    bytes: int
    sum: int
    iterated: list[float]
    indexed: list[float]


def shard_bytes(bench: Workbench) -> int:
    """The size of shards: small if the bench is only tried."""
    return max(SHARD_BYTES // bench.divisor, SHARD_BYTES_MIN)


def pack(peer: str, source: Path, out: Path, shard_bytes: int) -> None:
    in_peers(_PROGRAM, "pack", peer, str(source), str(out), str(shard_bytes))


def read(peer: str, folder: Path, seed: int) -> Passes:
    return Passes(**json.loads(in_peers(_PROGRAM, "read", peer, str(folder), str(seed))))


def train(
    peer: str, options: Mapping[str, object], store: Store, cache: Path, cache_bytes: int
) -> list[dict[str, float]]:
    """Train from the shards in the folder of the peer's name in a store's bucket, with an empty
    folder for copies (`cache_bytes` of 0: without a limit); returns the figures of each epoch."""
    place = {
        "endpoint": store.endpoint,
        "bucket": BUCKET,
        "folder": peer,
        "shards": len(list((store.bucket / peer).glob("*.tar"))),
        "cache": str(cache),
        "cache_bytes": cache_bytes,
    }
    text = json.dumps({"options": dict(options), "place": place})
    printed = in_peers(_PROGRAM, "train", peer, text, **store.environment)
    epochs: list[dict[str, float]] = json.loads(printed)
    return epochs
