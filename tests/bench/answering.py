"""Shared code of the programs that read on a node by orders (`client_process.py`).

They read orders as lines of JSON, and answer each with a line of JSON. Some of the programs run in
the peers' environment, so this needs nothing but Python. Each of them knows these orders, and more:

    {"do": "steady_batches", "seed": S, "seconds": T, "start_s": B, "size": M}
    {"do": "steady_singles", "seed": S, "seconds": T, "start_s": B}

They read random files for T seconds from B of `time.monotonic()` on, M files with one request or
each by itself, and answer the files a second.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import TypeVar

DRAWN, DRAWN_SINGLES = 1024, 1 << 17
"""Batches, and single files, that are drawn before the time counts; they are read again and
again."""

_Wanted = TypeVar("_Wanted")
_File = TypeVar("_File")


def answer_orders(reader: object) -> None:
    """Answer orders until there are no more: `do` names a method, the rest are its arguments."""
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(reader, order.pop("do"))(**order)), flush=True)


def drawn_singles(files: Sequence[_File], seed: int) -> list[_File]:
    return random.Random(seed).choices(files, k=DRAWN_SINGLES)


def steady(
    read: Callable[[_Wanted], object],
    wanted: Sequence[_Wanted],
    seconds: float,
    start_s: float,
    size: int = 1,
) -> dict[str, float]:
    """Call `read` for some seconds with the elements of `wanted`, again and again; each call reads
    `size` files. The first call is not timed."""
    read(wanted[0])
    calls, start_s = 0, wait_until(start_s)
    now_s, end_s = start_s, start_s + seconds
    for each in cycle(wanted):
        read(each)
        calls += 1
        now_s = time.monotonic()
        if now_s >= end_s:
            break
    return {"files/s": size * calls / (now_s - start_s)}


def series_of(
    read: Callable[[_Wanted], object],
    wanted: Iterable[_Wanted],
    seconds: float,
    start_s: float,
    size: int,
    bucket_s: float,
) -> dict[str, float]:
    """Read batches of `size` files all the time; the files a second of each `bucket_s`."""
    buckets = [0] * round(seconds / bucket_s)
    start_s = wait_until(start_s)
    for some in cycle(wanted):
        read(some)
        bucket = int((time.monotonic() - start_s) / bucket_s)
        if bucket >= len(buckets):
            break
        buckets[bucket] += size
    return {str(bucket): count / bucket_s for bucket, count in enumerate(buckets)}


def wait_until(start_s: float) -> float:
    """Wait until this moment of `time.monotonic()`; returns the moment at which the wait ended."""
    time.sleep(max(0.0, start_s - time.monotonic()))
    return time.monotonic()
