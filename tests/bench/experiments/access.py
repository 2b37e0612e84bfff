"""Benchmarks of a stock PyTorch script whose files lie in a slow store, beside DIESEL's section 6.

`time_of_epochs` is the data access time of figure 14: an epoch's shuffle and reads, without a
model. The peer asks the store for the files one by one; a mount reads chunks, in the order of a
list that the script reads when an epoch begins, or under `dlcmd run`. The paper's figure is a mean
over ten epochs, so ours is one, too: the first epoch, and nine like the later ones. `sessions`
counts the requests of chunk-wise orders (section 4.3) in each session, with memory for two groups.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from ..dlcmd import PROGRAM
from ..inputs import D4, D110
from ..report import Row, against, at_most, no_more_than
from ..samples import Side, alternate
from ..store import BUCKET
from ..workbench import Workbench
from .plan_costs import DATASET, SECONDS, Epoch, Ground, ground_of

WORKERS = 4
GROUP = 100
EPOCHS, PAPERS_EPOCHS = 3, 10
PART_MAX = 0.1  # of the peer's time; DIESEL's is 0.42 to 0.49 of Lustre's
LIST, RUN, OBJECTS = "a chunk-wise list", "dlcmd run", "files in the store one by one"
FIRST, MEAN = "first epoch", f"mean of {PAPERS_EPOCHS} epochs"
_STORED = "files"  # the folder of single files in the bucket

PYFUSE3, OTHERS = "pyfuse3", ("kernel", "native")
MEMORIES = {4: 24_000_000, 100: 160_000_000}
"""Memory of a mount by the size of a group. It must hold two of them, and the kernel's memory for
names; for groups of 100 that is more than all files take."""
CHUNK_BYTES, CHUNK_BYTES_MIN = 512 << 10, 64 << 10
SESSIONS_EPOCHS = 2
REQUESTS, REQUESTS_MAX = "requests in the worst epoch", 2

_RUN = (str(PROGRAM), "-q", "run")


def time_of_epochs(bench: Workbench) -> list[Row]:
    """Files of 4 KiB and of 110 KiB; the mount has memory for all of them."""
    rows: list[Row] = []
    for wanted in (D4, D110):
        with ground_of(bench, wanted) as ground:
            store = ground.slow.store
            (store.bucket / _STORED).symlink_to(bench.input(ground.shape))
            options = (*bench.session_options, "--memory", str(4 * ground.shape.bytes))
            mounted = partial(_mounted, ground, options, epochs=EPOCHS)
            sides: dict[str, Side] = {
                LIST: partial(mounted, group=GROUP),
                RUN: partial(mounted, *_RUN, "--"),
                OBJECTS: partial(_one_by_one, ground),
            }
            rounds = alternate(bench.rounds, sides)
            least_s = ground.shape.bytes / ground.slow.bytes_per_s
        for how in (LIST, RUN):
            for part in (FIRST, MEAN):
                name = f"access to {wanted.name} in a store, {how}, {part}"
                note = f"{WORKERS} workers, memory for all; bandwidth alone takes {least_s:.2g} s"
                targets = {OBJECTS: at_most(PART_MAX)}
                rows += against(rounds, name, SECONDS, targets, note, of=part, side=how)
    return rows


def sessions(bench: Workbench) -> list[Row]:
    """D4 in small chunks and in chunk-wise order: pyfuse3 beside the other sessions."""
    rows: list[Row] = []
    size = str(max(CHUNK_BYTES // bench.divisor, CHUNK_BYTES_MIN))
    with ground_of(bench, D4, "--chunk-size", size) as ground:
        found = ground.slow.store.bucket.glob("datasets/*/chunks/**/*")
        chunks = sum(path.is_file() for path in found)
        for group, memory_bytes in MEMORIES.items():
            memory = ("--memory", str(memory_bytes))
            launched = (*_RUN, "--shuffle", "chunk", "--group-size", str(group), "--")
            for how, prefix in {LIST: (), f"{RUN} --shuffle chunk": launched}.items():
                sides: dict[str, Side] = {
                    session: partial(
                        _mounted, ground, ("--session", session, *memory), *prefix,
                        epochs=SESSIONS_EPOCHS, group=0 if prefix else group,
                    )
                    for session in (PYFUSE3, *OTHERS)
                }  # fmt: skip
                rounds = alternate(bench.rounds, sides)
                megabytes = f"--memory {memory_bytes / 1e6:.0f} MB"
                name = f"pyfuse3, {megabytes}, D4 in {chunks} chunks, {how}, groups of {group}"
                note = f"twice the number of chunks; {WORKERS} workers"
                measured, limit = rounds.of(PYFUSE3, REQUESTS), REQUESTS_MAX * chunks
                rows.append(no_more_than(name, REQUESTS, measured, limit, note))
                for unit in (REQUESTS, SECONDS):
                    others = dict.fromkeys(OTHERS)
                    rows += against(rounds, name, unit, others, side=PYFUSE3)
    return rows


def _mounted(
    ground: Ground, options: Sequence[str], *prefix: str, epochs: int, group: int = 0
) -> dict[str, float]:
    """The figures of the script on a mount with these options, for a user without cached data:
    with these words before its command, or in the order of lists with groups of this size."""
    store = ground.slow.store
    ground.bench.warm_page_cache(store.bucket / "datasets")
    with ground.bench.scratch() as folder:
        dlcmd, mountpoint = ground.slow.user(folder), folder / "mount"
        lists = f"{mountpoint}/.diesel/shuffle0/seed=1,epoch={{}},group={group}"
        orders = [lists.format(epoch) for epoch in range(epochs if group else 0)]
        with dlcmd.mounted(DATASET, mountpoint, *options):
            before = store.counts().requests
            trained = ground.train(
                dlcmd, mountpoint, *prefix, epochs=epochs, step_s=0.0, workers=WORKERS,
                orders=orders, counters=[(f"{store.endpoint}/counts", 0.0)],
            )  # fmt: skip
    requests = [before, *(epoch["counts"][0]["requests"] for epoch in trained)]
    return {**_times(trained), REQUESTS: max(later - each for each, later in pairwise(requests))}


def _one_by_one(ground: Ground) -> dict[str, float]:
    """The figures of one epoch, as all are alike: the script keeps no file."""
    store = ground.slow.store
    ground.bench.warm_page_cache(store.bucket / _STORED)
    with ground.bench.scratch() as folder:
        trained = ground.train(
            ground.slow.user(folder), f"{store.endpoint}/{BUCKET}/{_STORED}", epochs=1,
            step_s=0.0, workers=WORKERS,
        )  # fmt: skip
    return _times(trained)


def _times(epochs: Sequence[Epoch]) -> dict[str, float]:
    first, *later = (each["seconds"] for each in epochs)
    mean = (first + (PAPERS_EPOCHS - 1) * statistics.mean(later or [first])) / PAPERS_EPOCHS
    return {FIRST: first, MEAN: mean, SECONDS: statistics.mean([first, *later])}
