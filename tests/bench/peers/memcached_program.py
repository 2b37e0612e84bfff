"""A client of a cluster of memcached. It runs in the peers' environment on a node:

    python memcached_program.py HOST:PORT,... [text] [remaining]

With `text` it speaks the text protocol: then a request for many keys gives those of the servers
that live, and a proxy understands it. With `remaining`, a server that is dead is left out, and the
others have its keys. It reads orders as lines of JSON, and answers each with a line of JSON:

    {"do": "fill", "source": FOLDER, "paths": FILE}
    {"do": "steady_batches", "paths": FILE, "seed": S, "seconds": T, "start_s": B, "size": M}
    {"do": "steady_singles", "paths": FILE, "seed": S, "seconds": T, "start_s": B}
    {"do": "epoch", "paths": FILE, "size": M}       in this order
    {"do": "refill", "paths": FILE, "size": M, "store": "host:port/prefix"}
    {"do": "series", "paths": FILE, "seed": S, "seconds": T, "start_s": B, "size": M,
     "bucket_s": U, "store": "host:port/prefix", "puts": P}

FILE lists paths as for the C reader: each ends in NUL. The steady orders begin at B of
`time.monotonic()`, and last T seconds. `refill` reads misses from the store, and sets them.
`series` reads them too, and sets them with P; its answer has the files a second of each U seconds.
Contents are counted but not checked, in favour of the peer.
"""

import contextlib
import http.client
import json
import os
import random
import sys
import time
from itertools import cycle

import pylibmc

BEHAVIORS = {"tcp_nodelay": True, "ketama": True}
"""The binary protocol and blocking calls: the fastest combination for many keys at once, and no
slower than the others (text protocol, no blocking) for one key."""

DRAWN, DRAWN_SINGLES = 1024, 1 << 17
"""Batches, and single files, that are drawn before the time counts; they are read again and
again."""


def listed(file: str) -> list[str]:
    with open(file, "rb") as opened:
        return [os.fsdecode(each) for each in opened.read().split(b"\0")[:-1]]


def fill(client: pylibmc.Client, source: str, paths: list[str]) -> dict[str, float]:
    """Read file by file, each with a request of its own."""
    start_s = time.perf_counter()
    for path in paths:
        with open(os.path.join(source, path), "rb") as file:
            client.set(path, file.read())
    return {"files/s": len(paths) / (time.perf_counter() - start_s)}


def steady_batches(
    client: pylibmc.Client, paths: list[str], seed: int, seconds: float, start_s: float, size: int
) -> dict[str, float]:
    draw = random.Random(seed)
    wanted = [draw.sample(paths, size) for _ in range(DRAWN)]
    missed = size - len(client.get_multi(wanted[0]))
    done, start_s = 0, wait_until(start_s)
    now_s, end_s = start_s, start_s + seconds
    for some in cycle(wanted):
        missed += size - len(client.get_multi(some))
        done += size
        now_s = time.monotonic()
        if now_s >= end_s:
            break
    return {"files/s": done / (now_s - start_s), "missed": missed}


def steady_singles(
    client: pylibmc.Client, paths: list[str], seed: int, seconds: float, start_s: float
) -> dict[str, float]:
    wanted = random.Random(seed).choices(paths, k=DRAWN_SINGLES)
    missed = int(client.get(wanted[0]) is None)
    done, start_s = 0, wait_until(start_s)
    now_s, end_s = start_s, start_s + seconds
    for path in cycle(wanted):
        missed += client.get(path) is None
        done += 1
        now_s = time.monotonic()
        if now_s >= end_s:
            break
    return {"files/s": done / (now_s - start_s), "missed": missed}


def wait_until(start_s: float) -> float:
    """Wait until this moment of `time.monotonic()`; the moment when that was over."""
    time.sleep(max(0.0, start_s - time.monotonic()))
    return time.monotonic()


def epoch(client: pylibmc.Client, paths: list[str], size: int) -> dict[str, float]:
    missed = 0
    start_s = time.perf_counter()
    for first in range(0, len(paths), size):
        some = paths[first : first + size]
        missed += len(some) - len(client.get_multi(some))
    return {"files/s": len(paths) / (time.perf_counter() - start_s), "missed": missed}


class Store:
    """The store of files, of which each is an object: `host:port/prefix`."""

    def __init__(self, store: str) -> None:
        place, _, self._prefix = store.partition("/")
        self._link = http.client.HTTPConnection(place, timeout=60)

    def read(self, path: str) -> bytes:
        self._link.request("GET", f"/{self._prefix}/{path}")
        answer = self._link.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the store answered {answer.status}")
        return content


def read_batch(client: pylibmc.Client, some: list[str], store: Store, *, puts: bool) -> int:
    """Read files; those that are missing are read from the store, one a request, and put into the
    cache with `puts`. Returns how many were missing."""
    try:
        found = client.get_multi(some)
    except pylibmc.Error:  # a server was killed
        found = {}
    missing = [path for path in some if path not in found]
    for path in missing:
        content = store.read(path)
        if puts:
            with contextlib.suppress(pylibmc.Error):  # it is still read from the store next time
                client.set(path, content)
    return len(missing)


def refill(client: pylibmc.Client, paths: list[str], size: int, store: str) -> dict[str, float]:
    """Read an epoch; files that are missing are read from the store, and set."""
    opened = Store(store)
    missed = 0
    start_s = time.perf_counter()
    for first in range(0, len(paths), size):
        missed += read_batch(client, paths[first : first + size], opened, puts=True)
    seconds = time.perf_counter() - start_s
    return {"s": seconds, "missed": missed, "files/s": len(paths) / seconds}


def series(
    client: pylibmc.Client, paths: list[str], seed: int, seconds: float, start_s: float, size: int,
    bucket_s: float, store: str, puts: bool,
) -> dict[str, float]:  # fmt: skip
    """Read random batches all the time; the files a second of each part of the time."""
    draw, opened = random.Random(seed), Store(store)
    wanted = [draw.sample(paths, size) for _ in range(DRAWN)]
    buckets = [0] * round(seconds / bucket_s)
    start_s = wait_until(start_s)
    for some in cycle(wanted):
        read_batch(client, some, opened, puts=puts)
        bucket = int((time.monotonic() - start_s) / bucket_s)
        if bucket >= len(buckets):
            break
        buckets[bucket] += size
    return {str(bucket): count / bucket_s for bucket, count in enumerate(buckets)}


def main(servers: str, *options: str) -> None:
    behaviors = {**BEHAVIORS, **({"remove_failed": 1} if "remaining" in options else {})}
    client = pylibmc.Client(servers.split(","), binary="text" not in options, behaviors=behaviors)
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        order["paths"] = listed(order["paths"])
        print(json.dumps(globals()[do](client, **order)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
