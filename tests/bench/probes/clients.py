"""Rates of N concurrent client processes of a server: URL DATASET WHAT CLIENTS COUNT [SIZE].

    files     COUNT files each, in random order, one request a file
    batches   COUNT batches each of SIZE random files, one request a batch
    chunks    COUNT passes each over all chunks, whole, one request a chunk
    stat      COUNT requests each for the entries at SIZE random paths
    lookups   COUNT times SIZE random paths looked up in the snapshot, without a request
    objects   COUNT objects of an S3 server each, of SIZE, in random order; URL is the bucket's

Clients are processes that begin together; their preparation and Python's start do not count.
"""

import http.client
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np

from diesel_fs import Dataset, connect
from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.open import open_configured
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.settings import load_settings

SAMPLE_STEP = 10
"""One file in this many is an object of the S3 server, too: those are read on both sides."""

MEMORY_BYTES = 8 << 20
"""Memory of a client: too little to keep a chunk, as with a dataset larger than its memory."""

Work = Callable[[], None]
_Wanted = TypeVar("_Wanted")

SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request,"
    " SignedHeaders=host, Signature=unchecked"
}


def sample(paths: list[str]) -> list[str]:
    return paths[::SAMPLE_STEP]


def together(clients: int, prepare: Callable[[int], Work]) -> float:
    """Seconds from the start of all clients to the end of the last. Each is a fork of this process,
    and makes its own connections."""
    ready_in, ready_out = os.pipe()
    go_in, go_out = os.pipe()
    pids = []
    for number in range(clients):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.close(go_out)
                work = prepare(number)
                os.write(ready_out, b"r")
                os.read(go_in, 1)
                work()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(ready_out)
    waiting = clients
    while waiting:
        got = len(os.read(ready_in, waiting))
        assert got, "a client failed before it began"
        waiting -= got
    start_s = time.perf_counter()
    os.close(go_out)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    seconds = time.perf_counter() - start_s
    assert not any(codes), "a client failed"
    return seconds


def calls(read: Callable[[_Wanted], object], wanted: Iterable[_Wanted]) -> Work:
    def work() -> None:
        for each in wanted:
            read(each)

    return work


def files(dataset: Dataset, clients: int, count: int, _size: int) -> dict[str, float]:
    names = sample([os.fsdecode(path) for path in dataset.snapshot.paths(dataset.snapshot.files())])

    def prepare(number: int) -> Work:
        dataset.get(names[0])
        return calls(dataset.get, random.Random(number).choices(names, k=count))

    return {"files/s": clients * count / together(clients, prepare)}


def batches(dataset: Dataset, clients: int, count: int, size: int) -> dict[str, float]:
    indices = dataset.snapshot.files()[::SAMPLE_STEP]

    def prepare(number: int) -> Work:
        draw = np.random.default_rng(number)
        list(dataset.read_many(indices[:2]))

        def read(_: int) -> None:
            got = sum(map(len, dataset.read_many(draw.choice(indices, size, replace=False))))
            assert got, "nothing was read"

        return calls(read, range(count))

    return {"s": together(clients, prepare) / count}


def lookups(dataset: Dataset, clients: int, count: int, size: int) -> dict[str, float]:
    view = dataset.snapshot
    paths = list(view.paths(view.files()))

    def prepare(number: int) -> Work:
        wanted = random.Random(number).choices(paths, k=size)
        view.stat_many(view.lookup_many(wanted))
        return calls(lambda _: view.stat_many(view.lookup_many(wanted)), range(count))

    return {"entries/s": clients * count * size / together(clients, prepare)}


def chunks(
    repository: RemoteRepository, name: str, clients: int, count: int, _size: int
) -> dict[str, float]:
    view = repository.view(name)
    names = [chunk_object(view.identity, chunk) for chunk in view.chunk_ids]
    sizes = view.chunk_sizes.tolist()

    def prepare(number: int) -> Work:
        repository.objects.read_into(names[0], 0, bytearray(96))

        def read(_: int) -> None:
            for chunk, size in zip(names, sizes, strict=True):
                repository.objects.read_into(chunk, 0, np.empty(size, np.uint8).data)

        return calls(read, range(count))

    return {"B/s": clients * count * sum(sizes) / together(clients, prepare)}


def stat(
    repository: RemoteRepository, name: str, clients: int, count: int, size: int
) -> dict[str, float]:
    view = repository.view(name)
    paths = list(view.paths(view.files()))

    def prepare(number: int) -> Work:
        draw = random.Random(number)
        wanted = [draw.choices(paths, k=size) for _ in range(count)]
        repository.stat_many(name, paths[:1])

        def read(some: list[bytes]) -> None:
            assert len(repository.stat_many(name, some)) == size

        return calls(read, wanted)

    return {"entries/s": clients * count * size / together(clients, prepare)}


def objects(url: str, clients: int, count: int, keys: int) -> dict[str, float]:
    """GETs of objects by a client that costs almost nothing, less than any S3 library."""
    place = urlsplit(url)

    def prepare(number: int) -> Work:
        link = http.client.HTTPConnection(place.netloc)

        def get(key: int) -> None:
            link.request("GET", f"{place.path}/{key}", headers=SIGNED)
            answer = link.getresponse()
            assert answer.read(), "nothing was read"
            assert answer.status == 200

        get(0)
        return calls(get, random.Random(number).choices(range(keys), k=count))

    return {"files/s": clients * count / together(clients, prepare)}


OF_DATASET = {"files": files, "batches": batches, "lookups": lookups}
OF_REPOSITORY = {"chunks": chunks, "stat": stat}


def main(url: str, name: str, what: str, clients: int, count: int, size: int = 0) -> None:
    if what == "objects":
        report = objects(url, clients, count, size)
    elif what in OF_REPOSITORY:
        repository = open_configured(load_settings({}))
        assert isinstance(repository, RemoteRepository)
        report = OF_REPOSITORY[what](repository, name, clients, count, size)
    else:
        with connect(name, memory_bytes=MEMORY_BYTES) as dataset:
            report = OF_DATASET[what](dataset, clients, count, size)
    print(json.dumps(report))


if __name__ == "__main__":
    url, name, what, *numbers = sys.argv[1:]
    main(url, name, what, *map(int, numbers))
