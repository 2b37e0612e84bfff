"""Packs files for the peers that stream training data, and reads them as their documents say.

    python streaming_program.py pack  PEER SOURCE OUT SHARD_BYTES
    python streaming_program.py train PEER OPTIONS      (JSON: `training_program.Options`, and more)
    python streaming_program.py read  PEER FOLDER SEED

It runs in the peers' environment, with this tree on the path. A sample is the content of a file.
`train` has `source`, the URL or S3 URL of the shards, `cache`, an empty folder for copies of them,
and `cache_bytes`, how much it may hold (0: no limit). `read` reads all samples of shards on the
local disk in one process, and prints the seconds as JSON: as the dataset is iterated with its own
shuffling, and by random indices where it has them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

# isort: off
import deploy.torchvision_operators  # noqa: F401 (streaming and litdata import torchvision)

# isort: on
import litdata
import numpy as np
import streaming
import torch
import webdataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import default_collate

from tests.bench.training_program import Content, Options, be_quiet, content, report, train

MDS, WDS, LIT = "mosaicml-streaming", "webdataset", "litdata"
SHUFFLED = 1000  # samples in webdataset's buffer, as in its documents
"""The columns and extensions of the samples."""
COLUMN, EXTENSION = "data", "bin"


class Place(Protocol):
    """Where a training process finds its shards."""

    source: str
    cache: str
    cache_bytes: int


def files(source: str) -> Iterator[tuple[str, bytes]]:
    """All files below a folder, in the order of their names."""
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield os.path.relpath(path, source), file.read()


def pack_mds(source: str, out: str, shard_bytes: int) -> None:
    with streaming.MDSWriter(out=out, columns={COLUMN: "bytes"}, size_limit=shard_bytes) as writer:
        for _, data in files(source):
            writer.write({COLUMN: data})


def pack_wds(source: str, out: str, shard_bytes: int) -> None:
    os.makedirs(out)
    pattern = os.path.join(out, "shard-%06d.tar")
    with webdataset.ShardWriter(pattern, maxsize=shard_bytes, verbose=0) as writer:
        for path, data in files(source):
            key = os.path.splitext(path)[0]
            writer.write({"__key__": key, EXTENSION: data})


def read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def pack_lit(source: str, out: str, shard_bytes: int) -> None:
    paths = [os.path.join(source, path) for path, _ in files(source)]
    litdata.optimize(
        fn=read_file, inputs=paths, output_dir=out, chunk_bytes=shard_bytes, num_workers=1,
        verbose=False,
    )  # fmt: skip


def samples_of_mds(batch: list[dict[str, bytes]]) -> torch.Tensor:
    return default_collate([content(sample[COLUMN]) for sample in batch])


def samples_of_wds(batch: list[tuple[bytes]]) -> torch.Tensor:
    return default_collate([content(sample[0]) for sample in batch])


def samples_of_lit(batch: list[bytes]) -> torch.Tensor:
    return default_collate([content(sample) for sample in batch])
