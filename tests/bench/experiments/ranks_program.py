"""Ranks of a training job that read batches in lockstep, each a process.

    python ranks_program.py OPTIONS        (JSON: the fields of `Options`)

Each rank reads the files of its list, in the order of the list. In each iteration all ranks begin
to read a batch at the same time; then they wait for each other, and for `compute_s` in the place of
the model. How long each rank read in each iteration is printed as JSON: a list for each iteration.
With `mounts`, each rank announces its stream `train` to its mount in the first epoch, and says how
far it is, as `dlcmd run` does.
"""

import json
import multiprocessing
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import TypedDict

from diesel_fs.mounts.plans.control import Control, drawn

START_S = 60.0


class OrderOptions(TypedDict, total=False):
    """See `control.drawn`."""

    seed: int
    kind: str
    group_size: int
    world: int


@dataclass(frozen=True)
class Options:
    """The options of reading; `lists` has a file with NUL-terminated paths for each rank, `mounts`
    its mount point. `order` has the arguments of `control.drawn` for its `epochs`, of which `epoch`
    is read."""

    lists: list[str]
    batch: int
    compute_s: float
    mounts: tuple[str, ...] = ()
    epoch: int = 0
    epochs: int = 1
    order: OrderOptions = field(default_factory=OrderOptions)


def read(
    rank: int, options: Options, barrier: Barrier, results: "multiprocessing.Queue[object]"
) -> None:
    with open(options.lists[rank], "rb") as file:
        paths = [os.fsdecode(path) for path in file.read().split(b"\0")[:-1]]
    took: list[float] = []
    size = 0
    with ExitStack() as stack:
        link = None
        if options.mounts:
            link = stack.enter_context(Control.connect(options.mounts[rank]))
        for start in range(0, len(paths), options.batch):
            barrier.wait(START_S)
            begun_s = time.monotonic()
            if link is not None and not start and not options.epoch:
                epochs = range(options.epochs)
                link.announce(
                    "train",
                    [drawn(epoch=epoch, rank=rank, **options.order) for epoch in epochs],
                    lag_entries=options.batch,
                )
            for path in paths[start : start + options.batch]:
                with open(path, "rb", buffering=0) as file:
                    size += len(file.read())
            took.append(time.monotonic() - begun_s)
            barrier.wait(START_S)
            computed_s = time.monotonic() + options.compute_s
            position = start + options.batch
            if link is not None and position < len(paths):  # the mount itself sees an epoch's end
                link.progress("train", position, options.epoch)
            time.sleep(max(computed_s - time.monotonic(), 0))
    results.put((rank, size, took))


def main(text: str) -> None:
    """Read, and print the times of each rank."""
    options = Options(**json.loads(text))
    ranks = range(len(options.lists))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(ranks)), context.Queue()
    processes = [
        context.Process(target=read, args=(rank, options, barrier, results), daemon=True)
        for rank in ranks
    ]
    for process in processes:
        process.start()
    by_rank = sorted(results.get(timeout=600.0) for _ in ranks)
    for process in processes:
        process.join()
    report = {
        "bytes": sum(size for _, size, _ in by_rank),
        "iterations": [list(each) for each in zip(*(took for *_, took in by_rank), strict=True)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
