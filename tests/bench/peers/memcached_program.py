"""A client of a cluster of memcached. It runs in the peers' environment on a node, and reads
commands:

    python memcached_program.py HOST:PORT,... <<END {"do": "fill", "source": FOLDER, "paths": FILE}
    {"do": "batches", "paths": FILE, "seed": S, "count": N, "size": M} {"do": "singles", "paths":
    FILE, "seed": S, "count": N} {"do": "epoch", "paths": FILE, "size": M}
    in this order {"do": "refill", "paths": FILE, "size": M, "store": "host:port/prefix"}   misses
    are read from it END

FILE lists paths as for the C reader: each ends in NUL. The answer to each command is a line of
JSON. Contents are counted but not checked, in favour of the peer.
"""

import http.client
import json
import os
import random
import sys
import time

import pylibmc

BEHAVIORS = {"tcp_nodelay": True, "ketama": True}
"""The binary protocol and blocking calls: the fastest combination for many keys at once, and no
slower than the others (text protocol, no blocking) for one key."""


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


def batches(
    client: pylibmc.Client, paths: list[str], seed: int, count: int, size: int
) -> dict[str, float]:
    draw = random.Random(seed)
    wanted = [draw.sample(paths, size) for _ in range(count)]
    missed = size - len(client.get_multi(wanted[0]))
    start_s = time.perf_counter()
    for some in wanted:
        missed += size - len(client.get_multi(some))
    seconds = time.perf_counter() - start_s
    return {"files/s": count * size / seconds, "missed": missed}


def singles(client: pylibmc.Client, paths: list[str], seed: int, count: int) -> dict[str, float]:
    draw = random.Random(seed)
    wanted = draw.choices(paths, k=count)
    missed = 0
    start_s = time.perf_counter()
    for path in wanted:
        missed += client.get(path) is None
    return {"files/s": count / (time.perf_counter() - start_s), "missed": missed}


def epoch(client: pylibmc.Client, paths: list[str], size: int) -> dict[str, float]:
    missed = 0
    start_s = time.perf_counter()
    for first in range(0, len(paths), size):
        some = paths[first : first + size]
        missed += len(some) - len(client.get_multi(some))
    return {"files/s": len(paths) / (time.perf_counter() - start_s), "missed": missed}


def refill(client: pylibmc.Client, paths: list[str], size: int, store: str) -> dict[str, float]:
    """Read an epoch; files that are missing are read from the store, one file a request, and
    set."""
    place, _, prefix = store.partition("/")
    link = http.client.HTTPConnection(place, timeout=60)
    missed = 0
    start_s = time.perf_counter()
    for first in range(0, len(paths), size):
        some = paths[first : first + size]
        try:
            found = client.get_multi(some)
        except pylibmc.Error:  # a server was killed
            found = {}
        for path in some:
            if path not in found:
                link.request("GET", f"/{prefix}/{path}")
                answer = link.getresponse()
                content = answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"the store answered {answer.status}")
                client.set(path, content)
                missed += 1
    seconds = time.perf_counter() - start_s
    return {"s": seconds, "missed": missed, "files/s": len(paths) / seconds}


def main(servers: str) -> None:
    client = pylibmc.Client(servers.split(","), binary=True, behaviors=BEHAVIORS)
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        order["paths"] = listed(order["paths"])
        print(json.dumps(globals()[do](client, **order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
