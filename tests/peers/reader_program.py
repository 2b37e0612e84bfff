"""A training process on one node: it obeys orders and checks every byte that it reads.

Each line on stdin is an order in JSON, each line on stdout its result. The first order says what to
read: `{"mount": DIR}`, or the arguments of `connect`, optionally with `master`, the module of
another master program, and `lies` for it. The others are:

    {"do": "epoch", "files": N, "seed": S, "batch": B, "pace_s": P}    all files, in random order
    {"do": "planned", "epoch": E, "group": G, "rank": R, "world": W, "batch": B, "pace_s": P,
     "announced": A}      the files of this rank in chunk-wise order, which it announces to the
                          master before; A is "computed", or "explicit" for the entries of this
                          epoch and the next one
    {"do": "stats"}                                                    the statistics of the task

It ends when its stdin is closed.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import diesel_fs
from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.orders.plan import Epoch
from diesel_fs.peers import launch
from diesel_fs.peers.plan.sender import PlanSender, StreamProgress
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from tests.peers.contents import content, path

Read = Callable[[list[str]], Iterable[bytes | memoryview]]


def checked(
    read: Callable[[list[int]], Iterable[bytes | memoryview]],
    order: list[int],
    number_of: Callable[[int], int],
    batch: int,
    pause: Callable[[int], None],
) -> dict[str, object]:
    """Read files in batches. Returns how many were right, and how long the slowest batch took.
    `pause` gets the first place of the next batch."""
    right, wrong, worst_s, errors = 0, 0, 0.0, []
    start_s = time.monotonic()
    for first in range(0, len(order), batch):
        some, began_s = order[first : first + batch], time.monotonic()
        try:
            got = [bytes(each) for each in read(some)]
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            got = []
        worst_s = max(worst_s, time.monotonic() - began_s)
        for each, read_bytes in zip(some, got, strict=False):
            right += read_bytes == content(number_of(each))
            wrong += read_bytes != content(number_of(each))
        pause(first + batch)
    seconds = time.monotonic() - start_s
    return {"right": right, "wrong": wrong, "errors": errors, "worst_s": worst_s, "s": seconds}


def epoch(read: Read, files: int, seed: int, batch: int, pace_s: float) -> dict[str, object]:
    order = random.Random(seed).sample(range(files), files)

    def read_numbers(numbers: list[int]) -> Iterable[bytes | memoryview]:
        return read([path(number) for number in numbers])

    return checked(read_numbers, order, lambda number: number, batch, lambda _: time.sleep(pace_s))


class PlannedReader:
    def __init__(self, dataset: diesel_fs.Dataset) -> None:
        self._dataset = dataset
        task = dataset._task
        assert task is not None
        self._sender = PlanSender(dataset.snapshot, task.send_plan, send_s=0.1)

    def epoch(
        self, epoch: int, group: int, rank: int, world: int, batch: int, pace_s: float,
        announced: str,
    ) -> dict[str, object]:  # fmt: skip
        """Read all files of the rank. Returns as the other `epoch`."""
        snapshot = self._dataset.snapshot
        orders = [ComputedOrder(1, each, group, rank, world) for each in (epoch, epoch + 1)]
        entries = [each.entries(snapshot).astype(np.uint32) for each in orders]
        if announced == "computed":
            epochs = [Epoch(epoch, entries[0], computed=orders[0])]
        else:
            epochs = [Epoch(epoch + at, each) for at, each in enumerate(entries)]
        order, start_s = entries[0].tolist(), time.monotonic()

        def announce(first: int) -> None:
            at = min(first, len(order))
            self._sender.set_streams({"train": StreamProgress(tuple(epochs), epoch, at)})

        def pause(following: int) -> None:
            due_s = start_s + pace_s * following / batch
            time.sleep(max(due_s - time.monotonic(), 0))
            announce(following)

        def number_of(entry: int) -> int:
            return int(snapshot.path(entry)[-5:])

        announce(0)
        return checked(self._dataset.read_many, order, number_of, batch, pause)


def main() -> None:
    open_buckets_directly()  # it never forks
    opened = json.loads(sys.stdin.readline())
    if "mount" in opened:
        top = Path(opened["mount"])

        def read(paths: list[str]) -> Iterable[bytes]:
            return [(top / each).read_bytes() for each in paths]

        def stats() -> object:
            return json.loads((top / ".diesel" / "stats").read_bytes())
    else:
        if "master" in opened:
            os.environ["LIES"] = opened.pop("lies")
            program = (sys.executable, "-m", opened.pop("master"))
            assert launch.join.__kwdefaults__ is not None
            launch.join.__kwdefaults__["program"] = program
        dataset = diesel_fs.connect(**opened)
        read = dataset.read_many  # type: ignore[assignment]  # views do as well
        stats = dataset.task_stats
    planned: PlannedReader | None = None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "epoch":
                answer: object = epoch(read, **order)
            case "planned":
                planned = planned or PlannedReader(dataset)
                answer = planned.epoch(**order)
            case "stats":
                answer = stats()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
