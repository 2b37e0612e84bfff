"""Measures the cost of a snapshot for its readers and its maker: URL DATASET
export|open|rates|scan.
"""

import json
import os
import sys
import time
from functools import partial

import numpy as np

from diesel_fs import Dataset, Kind, connect
from diesel_fs.repository.local import LocalRepository

from ..memory import rollup_bytes

SAMPLE_PATHS = 500_000
SEED = 1


def export(url: str, name: str) -> dict[str, float]:
    """Make the whole snapshot from the metadata store alone, durable beside the chunks."""
    with LocalRepository.open(url) as repository:
        start_s = time.perf_counter()
        repository.publish(name, full=True)
        return {"seconds": time.perf_counter() - start_s}


def open_snapshot(url: str, name: str) -> dict[str, float]:
    """The time from an open repository to the first path that is looked up; and the snapshot's
    size."""
    with LocalRepository.open(url) as repository:
        start_s = time.perf_counter()
        view = repository.view(name)
        view.stat(view.lookup(b"class0000"))
        seconds = time.perf_counter() - start_s
        beside_names = len(view.buffer) - view.columns.names.nbytes
        return {
            "seconds": seconds,
            "entries": view.entry_count,
            "bytes_per_entry": beside_names / view.entry_count,
        }


def rates(url: str, name: str) -> dict[str, float]:
    """Rates of random paths: looked up one by one, and through `Dataset.stat_many`."""
    with connect(name, url=url) as dataset:
        view = dataset.snapshot
        drawn = np.random.default_rng(SEED).choice(view.files(), SAMPLE_PATHS)
        paths = view.paths(drawn)
        texts = [os.fsdecode(path) for path in paths]

        lookup = view.lookup
        start_s = time.perf_counter()
        for path in paths:
            lookup(path)
        report = {"lookups_per_s": len(paths) / (time.perf_counter() - start_s)}
        ways = {
            "stats_per_s": partial(dataset.stat_many, paths),
            "stats_by_text_per_s": partial(dataset.stat_many, texts),
            "stats_by_index_per_s": partial(dataset.stat_many, drawn),
        }
        for rate, stat in ways.items():
            start_s = time.perf_counter()
            stats = stat()
            report[rate] = len(paths) / (time.perf_counter() - start_s)
            assert len(stats) == len(paths)
            assert bool((stats.kind == Kind.FILE).all())
    return report


def scan(url: str, name: str) -> dict[str, float]:
    """List, name, look up and stat every entry; then measure this process's memory.

    Own memory is memory that no file backs. `Private_Dirty` would also count the mapped snapshot,
    some 80 MB, until the kernel has written it out, since it is not synced.
    """
    with connect(name, url=url) as dataset:
        start_s = time.perf_counter()
        seen = _scan(dataset)
        seconds = time.perf_counter() - start_s
        assert seen == dataset.snapshot.entry_count
        memory = rollup_bytes("self")
    own_bytes = memory["Pss_Anon"]
    return {"own_bytes": own_bytes, "seconds": seconds, "entries": seen}


def _scan(dataset: Dataset) -> int:
    view = dataset.snapshot
    folders, seen = [0], 1
    while folders:
        folder = folders.pop()
        inside = view.children(folder)
        stats = dataset.stat_many(inside)
        place = view.path(folder)
        paths = [place + b"/" + child if place else child for child in view.names(inside)]
        found = view.lookup_many(paths)
        for index, path in zip(inside, paths, strict=True):
            assert view.lookup(path) == index
            view.stat(index)
        assert found.tolist() == list(inside)
        folders += [inside[int(at)] for at in np.flatnonzero(stats.kind == Kind.FOLDER)]
        seen += len(inside)
    return seen


MODES = {"export": export, "open": open_snapshot, "rates": rates, "scan": scan}

if __name__ == "__main__":
    _, repository_url, dataset_name, mode = sys.argv
    print(json.dumps(MODES[mode](repository_url, dataset_name)))
