"""Packs files into shards of the peers that stream training data, reads them, and trains from them
in a store, as the peers' documents say.

    python shards_program.py pack  PEER SOURCE OUT SHARD_BYTES
    python shards_program.py read  PEER FOLDER SEED
    python shards_program.py train PEER JSON

It runs in the peers' environment, with this tree on the path. A sample is the content of a file.

`read` reads all samples of shards on the local disk in one process, in batches, twice as the
dataset is iterated with its own shuffling, and twice by random indices. It prints as JSON the
seconds of each pass, the count of samples and bytes, and the sum of their 64-bit words. The JSON of
`train` has the fields of `training_program.Options` as `options`, and those of `Place` as `place`.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

# isort: off
import deploy.torchvision_operators  # noqa: F401 (the peers import torchvision, which may not import)
import litdata
import numpy as np
import streaming
import torch
import webdataset
from litdata.streaming import downloader
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import default_collate

from tests.bench.experiments.training_program import Options, be_quiet, content, report, train

# isort: on

MDS, LIT, WDS = "mosaicml-streaming", "litdata", "webdataset"
COLUMN, EXTENSION = "data", "bin"
SHUFFLED = 1000  # samples in webdataset's buffer, as in its documents
PASSES = 2
BATCH = 64  # samples that are held together

Loader = Iterable[torch.Tensor]


@dataclass(frozen=True)
class Place:
    """The place of a training process's shards: the folder below a bucket, the store's endpoint, an
    empty folder for copies of shards, and the bytes that it may hold (0: no limit)."""

    endpoint: str
    bucket: str
    folder: str
    shards: int
    cache: str
    cache_bytes: int

    @property
    def s3_url(self) -> str:
        return f"s3://{self.bucket}/{self.folder}"


def files(source: str) -> Iterator[str]:
    """All files below a folder, in the order of their names."""
    for folder, folders, names in os.walk(source):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))


def read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def pack_mds(source: str, out: str, shard_bytes: int) -> None:
    columns = {COLUMN: "bytes"}
    with streaming.MDSWriter(out=out, columns=columns, size_limit=shard_bytes) as writer:
        for path in files(source):
            writer.write({COLUMN: read_file(path)})


def pack_lit(source: str, out: str, shard_bytes: int) -> None:
    paths = list(files(source))
    litdata.optimize(
        fn=read_file, inputs=paths, output_dir=out, chunk_bytes=shard_bytes, num_workers=1,
        verbose=False,
    )  # fmt: skip


def pack_wds(source: str, out: str, shard_bytes: int) -> None:
    os.makedirs(out)
    pattern = os.path.join(out, "%06d.tar")
    with webdataset.ShardWriter(pattern, maxsize=shard_bytes, verbose=0) as writer:
        for path in files(source):
            key = os.path.splitext(os.path.relpath(path, source))[0]
            writer.write({"__key__": key, EXTENSION: read_file(path)})


PACK: dict[str, Callable[[str, str, int], None]] = {MDS: pack_mds, LIT: pack_lit, WDS: pack_wds}


def read_all(peer: str, folder: str, seed: int) -> dict[str, object]:
    """Read all samples in one process, in batches: iterated, and by random indices."""
    if peer == MDS:
        clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(local=folder, shuffle=True, batch_size=1)
    else:
        dataset = litdata.StreamingDataset(input_dir=folder, shuffle=True)

    def data(sample: object) -> bytes:
        found: bytes = sample[COLUMN] if isinstance(sample, dict) else sample  # type: ignore[assignment] # as it was packed
        return found

    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    passes: dict[str, list[float]] = {"iterated": [], "indexed": []}
    for _ in range(PASSES):
        for way in passes:
            start_s, read_bytes = time.perf_counter(), 0
            # Not `iter(dataset)`: litdata's iterators begin anew when they are sliced.
            everything = (each for each in dataset)
            samples = everything if way == "iterated" else map(dataset.__getitem__, order)
            while batch := [*islice(samples, BATCH)]:  # held together, as a `DataLoader` does
                read_bytes += sum(len(data(sample)) for sample in batch)
            passes[way].append(time.perf_counter() - start_s)
    total = sum(int(np.frombuffer(data(sample), np.uint64).sum()) for sample in dataset)
    return {"files": len(order), "bytes": read_bytes, "sum": total % (1 << 64), **passes}


def collated(samples: Sequence[bytes]) -> torch.Tensor:
    """A batch: the bytes of its samples, one a row."""
    batch: torch.Tensor = default_collate([content(sample) for sample in samples])
    return batch


def collated_columns(samples: Sequence[dict[str, bytes]]) -> torch.Tensor:
    return collated([sample[COLUMN] for sample in samples])


def loader_of_mds(place: Place, options: Options) -> Loader:
    clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        remote=place.s3_url, local=place.cache, shuffle=True, batch_size=options.batch,
        cache_limit=place.cache_bytes or None,
    )  # fmt: skip
    loader: Loader = streaming.StreamingDataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, persistent_workers=True,
        collate_fn=collated_columns,
    )  # fmt: skip
    return loader


def loader_of_lit(place: Place, options: Options) -> Loader:
    """Its client takes HTTPS only, and has no setting for that, so its options are changed."""
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    dataset = litdata.StreamingDataset(
        input_dir=place.s3_url, cache_dir=place.cache, shuffle=True, drop_last=False,
        max_cache_size=place.cache_bytes or None, storage_options={"endpoint_url": place.endpoint},
    )  # fmt: skip
    loader: Loader = litdata.StreamingDataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, persistent_workers=True,
        collate_fn=collated,
    )  # fmt: skip
    return loader


def loader_of_wds(place: Place, options: Options) -> Loader:
    """With a limit it has no cache: its own is for whole shards without one."""
    base = f"{place.endpoint}/{place.bucket}/{place.folder}"
    dataset = (
        webdataset.WebDataset(
            [f"{base}/{number:06}.tar" for number in range(place.shards)],
            shardshuffle=place.shards,
            cache_dir=None if place.cache_bytes else place.cache,
            empty_check=False,
        )
        .shuffle(SHUFFLED)
        .to_tuple(EXTENSION)
        .map(lambda sample: sample[0])
        .batched(options.batch, collation_fn=collated)
    )
    loader: Loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=options.workers, persistent_workers=True
    )
    return loader


LOADERS: dict[str, Callable[[Place, Options], Loader]] = {
    MDS: loader_of_mds,
    LIT: loader_of_lit,
    WDS: loader_of_wds,
}


def main(do: str, peer: str, *words: str) -> None:
    be_quiet()
    if do == "pack":
        source, out, shard_bytes = words
        PACK[peer](source, out, int(shard_bytes))
    elif do == "train":
        fields = json.loads(words[0])
        options, place = Options(**fields["options"]), Place(**fields["place"])
        report(train(LOADERS[peer](place, options), options))
    else:
        folder, seed = words
        print(json.dumps(read_all(peer, folder, int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
