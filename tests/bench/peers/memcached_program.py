"""A client of a cluster of memcached. It runs in the peers' environment on a node:

    python memcached_program.py HOST:PORT,... [text] [remaining]

With `text` it speaks the text protocol: then a request for many keys gives those of the servers
that live, and a proxy understands it. With `remaining`, a server that is dead is left out, and the
others have its keys. It answers the orders of `answering.py`, with the files in "paths", and these:

    {"do": "fill", "source": FOLDER, "paths": FILE}
    {"do": "epoch", "paths": FILE, "size": M}       in this order
    {"do": "refill", "paths": FILE, "size": M, "store": "host:port/prefix"}
    {"do": "series", "paths": FILE, "seed": S, "seconds": T, "start_s": B, "size": M,
     "bucket_s": U, "store": "host:port/prefix", "puts": P}

FILE lists paths as for the C reader: each ends in NUL. `refill` reads misses from the store, and
sets them. `series` reads them too, and sets them with P; its answer has the files a second of each
U seconds. Contents are counted but not checked, in favour of the peer.
"""

import contextlib
import http.client
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pylibmc

from tests.bench.answering import DRAWN, answer_orders, drawn_singles, series_of, steady

_Wanted = TypeVar("_Wanted")

BEHAVIORS = {"tcp_nodelay": True, "ketama": True}
"""The binary protocol and blocking calls: the fastest combination for many keys in one request, and
no slower than the others (text protocol, no blocking) for one key."""


def listed(file: str) -> list[str]:
    with open(file, "rb") as opened:
        return [os.fsdecode(each) for each in opened.read().split(b"\0")[:-1]]


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


class Reader:
    """A client. Its public methods are the orders; `paths` is a FILE."""

    def __init__(self, client: pylibmc.Client) -> None:
        self._client = client
        self._missed = 0

    def fill(self, source: str, paths: str) -> dict[str, float]:
        wanted, start_s = listed(paths), time.perf_counter()
        for path in wanted:
            with open(os.path.join(source, path), "rb") as file:
                self._client.set(path, file.read())
        return {"files/s": len(wanted) / (time.perf_counter() - start_s)}

    def steady_batches(
        self, paths: str, seed: int, seconds: float, start_s: float, size: int
    ) -> dict[str, float]:
        return self._steady(self._batch, _batches(paths, seed, size), seconds, start_s, size)

    def steady_singles(
        self, paths: str, seed: int, seconds: float, start_s: float
    ) -> dict[str, float]:
        return self._steady(self._single, drawn_singles(listed(paths), seed), seconds, start_s, 1)

    def epoch(self, paths: str, size: int) -> dict[str, float]:
        read = self._batch if size > 1 else lambda some: self._single(*some)
        return self._pass(read, paths, size)

    def refill(self, paths: str, size: int, store: str) -> dict[str, float]:
        return self._pass(partial(self._batch_or_store, Store(store), puts=True), paths, size)

    def series(
        self, paths: str, seed: int, seconds: float, start_s: float, size: int, bucket_s: float,
        store: str, puts: bool,
    ) -> dict[str, float]:  # fmt: skip
        read = partial(self._batch_or_store, Store(store), puts=puts)
        return series_of(read, _batches(paths, seed, size), seconds, start_s, size, bucket_s)

    def _steady(
        self, read: Callable[[_Wanted], None], wanted: Sequence[_Wanted], seconds: float,
        start_s: float, size: int,
    ) -> dict[str, float]:  # fmt: skip
        self._missed = 0
        return {**steady(read, wanted, seconds, start_s, size), "missed": self._missed}

    def _pass(self, read: Callable[[list[str]], None], paths: str, size: int) -> dict[str, float]:
        wanted = listed(paths)
        self._missed, start_s = 0, time.perf_counter()
        for first in range(0, len(wanted), size):
            read(wanted[first : first + size])
        seconds = time.perf_counter() - start_s
        return {"s": seconds, "missed": self._missed, "files/s": len(wanted) / seconds}

    def _batch(self, some: list[str]) -> None:
        self._missed += len(some) - len(self._client.get_multi(some))

    def _single(self, path: str) -> None:
        self._missed += self._client.get(path) is None

    def _batch_or_store(self, store: Store, some: list[str], *, puts: bool) -> None:
        """Files that are missing are read from the store, one a request, and put into the cache
        with `puts`."""
        try:
            found = self._client.get_multi(some)
        except pylibmc.Error:  # a server was killed
            found = {}
        missing = [path for path in some if path not in found]
        for path in missing:
            content = store.read(path)
            if puts:
                with contextlib.suppress(pylibmc.Error):  # it is read from the store next time
                    self._client.set(path, content)
        self._missed += len(missing)


def _batches(paths: str, seed: int, size: int) -> list[list[str]]:
    draw, files = random.Random(seed), listed(paths)
    return [draw.sample(files, size) for _ in range(DRAWN)]


def main(servers: str, *options: str) -> None:
    behaviors = {**BEHAVIORS, **({"remove_failed": 1} if "remaining" in options else {})}
    client = pylibmc.Client(servers.split(","), binary="text" not in options, behaviors=behaviors)
    answer_orders(Reader(client))


if __name__ == "__main__":
    main(*sys.argv[1:])
