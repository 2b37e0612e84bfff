"""Benchmarks of order logs on real mounts and a real store, beside LCache's section V.

`throughput` is the paper's figure 5 with loops that do nothing else: a stock PyTorch script reads a
dataset of which a part fits the local disk, and memory a quarter. PyTorch's loader and one in the
manner of NoPFS (`ssd_program.py`) have that part on the same disk as files, from the start, and ask
the store for the others one by one. Ours begin with an empty disk, so two epochs are left out: the
second one's order becomes known when it begins. The pages of local files are dropped before each
epoch. `index` is the paper's MetaIndex (section III-C), `recovery` its section III-D.
"""

import json
import os
import signal
import statistics
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans.control import Control, explicit
from tests.waiting import wait_until

from ..cases.limits import LAUNCHED
from ..dlcmd import TREE, last_line
from ..inputs import D4, Indices, Shape
from ..memory import members
from ..mounts import Mount
from ..peers import python_of_training
from ..reading import Order, write_list
from ..report import Row, against, at_least, no_more_than
from ..samples import OURS, alternate, progress, repeat
from ..store import BUCKET
from ..workbench import Workbench
from .plan_costs import DATASET, ONE_THREAD, Ground, ground_of

SHAPES = (D4, Shape("D32", 8_000, 40, 32 * 1024), Shape("D110S", 4_000, 40, 110 * 1024))
PARTS = (0.25, 0.5, 1.0)
MEMORY_DIVISOR = 4
BATCH, WORKERS = 64, 8
ROOM_BYTES = 12 << 20
"""Of the cache's size beside the dataset's part: the logs set 10 to 14 MiB aside with these memory
sizes, for what waits to be written and read."""
LEFT_OUT, EPOCHS, PEERS_EPOCHS = 2, 4, 2
AUTO, STOCK, NOPFS = "ours, --cache-layout auto", "PyTorch's loader", "as NoPFS"
AUTO_PART = 0.5
ALL_TARGETS = {STOCK: at_least(9.4), NOPFS: at_least(7.8)}  # of the paper, at most
PART_TARGETS = {STOCK: at_least(1.45), NOPFS: at_least(1.08)}  # of the paper, a half on the disk
RATE = "files/s"
_STORED = "files"

INDEX_FILES, INDEX_BYTES = 14_197_103, int(1.3e12)  # ImageNet-21K
INDEX_S, INDEX_GB = 15, 10  # of the paper

FIRST_FILES, KILLED_AT = 256, 0.3


def throughput(bench: Workbench) -> list[Row]:
    """Files of 4, 32 and 110 KiB, with a quarter, half and all of them on the disk."""
    rows: list[Row] = []
    for wanted in SHAPES:
        with ground_of(bench, wanted) as place:
            (place.slow.store.bucket / _STORED).symlink_to(bench.input(place.shape))
            for part in PARTS:
                sides = {
                    OURS: partial(_ours, place, part, "order"),
                    STOCK: partial(_peer, place, part, "stock"),
                    NOPFS: partial(_peer, place, part, "clairvoyant"),
                }
                if part == AUTO_PART:
                    sides[AUTO] = partial(_ours, place, part, "auto")
                rounds = alternate(min(bench.rounds, 3), sides)
                name = f"order log, {wanted.name}, {part:.0%} on the disk"
                note = "the median epoch from the third on"
                targets = ALL_TARGETS if part == 1 else PART_TARGETS
                rows += against(rounds, name, RATE, targets, note)
                rows.append(Row(name, "requests/file", rounds.ours("requests")))
                if part == AUTO_PART:
                    how = f"{name}, --cache-layout auto"
                    rows += against(rounds, how, RATE, dict.fromkeys(targets), side=AUTO)
    return rows


def _memory_bytes(shape: Shape) -> int:
    return shape.bytes // MEMORY_DIVISOR


def _ours(place: Ground, part: float, layout: str) -> dict[str, float]:
    """The stock script under `dlcmd run`, for a user with an empty disk cache."""
    bench, store, shape = place.bench, place.slow.store, place.shape
    bench.warm_page_cache(store.bucket / "datasets")
    with bench.scratch() as folder:
        dlcmd, mountpoint = place.slow.user(folder), folder / "mount"
        options = (
            "--memory", str(_memory_bytes(shape)), "--cache-dir", str(folder / "disk"),
            "--cache-layout", layout, "--cache-size", str(int(part * shape.bytes) + ROOM_BYTES),
        )  # fmt: skip
        counters = [(f"{store.endpoint}/counts", 0.0)]
        with dlcmd.mounted(DATASET, mountpoint, *bench.session_options, *options):
            epochs = place.train(
                dlcmd, mountpoint, *LAUNCHED, epochs=EPOCHS, step_s=0.0, workers=WORKERS,
                batch=BATCH, counters=counters,
            )  # fmt: skip
    requests = [epoch["counts"][0]["requests"] for epoch in epochs]
    seconds = [epoch["seconds"] for epoch in epochs]
    progress(f"{layout}, {part:.0%}: epochs of {', '.join(f'{each:.2f}' for each in seconds)} s")
    return {
        RATE: shape.files / statistics.median(seconds[LEFT_OUT:]),
        "requests": (requests[-1] - requests[LEFT_OUT - 1]) / (EPOCHS - LEFT_OUT) / shape.files,
    }


def _peer(place: Ground, part: float, kind: str) -> dict[str, float]:
    shape, store = place.shape, place.slow.store
    options = {
        "source": str(place.bench.input(shape)), "url": f"{store.endpoint}/{BUCKET}/{_STORED}",
        "local": part, "memory_bytes": _memory_bytes(shape), "file_bytes": shape.file_bytes,
        "list": str(place.folder / "list"), "epochs": PEERS_EPOCHS, "batch": BATCH,
        "workers": WORKERS, "compute_s": 0.0,
    }  # fmt: skip
    script = Path(__file__).with_name("ssd_program.py")
    command = [python_of_training(), "-P", str(script), kind, json.dumps(options)]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(TREE)}
    epochs = json.loads(last_line(command, environment))
    for epoch in epochs:
        shape.check(epoch["files"], epoch["bytes"], epoch["sum"])
    return {RATE: shape.files / epochs[-1]["seconds"]}


def index(bench: Workbench) -> list[Row]:
    """The index of a log of 14.2 million files: made when an epoch begins, and loaded after a
    crash."""
    files, size = INDEX_FILES // bench.divisor, INDEX_BYTES // bench.divisor

    def run(what: str) -> dict[str, float]:
        with bench.scratch() as folder:
            module = "tests.bench.probes.order_log_index"
            words = (str(folder), str(files), str(size))
            command = [sys.executable, "-m", module, *words]
            if what == "load":
                last_line([*command, "write"])
            found: dict[str, float] = json.loads(last_line([*command, what]))
            return found

    rows = []
    for what, how in (("build", "for the next epoch"), ("load", "from the disk, after a crash")):
        rounds = repeat(min(bench.rounds, 3), partial(run, what))
        name = f"order log, index of {files / 1e6:.1f} million files, {how}"
        gigabytes = rounds.ours("bytes").map(lambda count: count / 1e9)
        rows.append(no_more_than(name, "s", rounds.ours("seconds"), INDEX_S, "LCache: 15 s"))
        rows.append(no_more_than(name, "GB", gigabytes, INDEX_GB, "at most, meanwhile; LCache: 10"))
    return rows


def recovery(bench: Workbench) -> list[Row]:
    """All processes of a mount are killed in the second epoch; the next mount reads it from what
    the logs have."""
    with ground_of(bench, D4) as place:
        rounds = repeat(bench.rounds, partial(_recovered, place))
    name = f"order log, {D4.name}, all processes of the mount killed (SIGKILL)"
    note = f"from the mount command until {FIRST_FILES} files of the epoch are read"
    what = "of the whole epoch, counted at the store; each byte that is read is checked"
    return [
        Row(f"{name}, until the log serves", "s", rounds.ours("seconds"), note=note),
        no_more_than(f"{name}, from the store", "% of files", rounds.ours("requested"), 5, what),
    ]


def _recovered(place: Ground) -> dict[str, float]:
    bench, store, shape = place.bench, place.slow.store, place.shape
    orders = [np.random.default_rng(epoch).permutation(shape.files) for epoch in range(3)]
    with bench.scratch() as folder:
        dlcmd, mountpoint = place.slow.user(folder), folder / "mount"
        options = (
            *bench.session_options, "--memory", str(_memory_bytes(shape)),
            "--cache-dir", str(folder / "disk"), "--cache-layout", "order",
            "--cache-size", str(2 * shape.bytes + ROOM_BYTES),
        )  # fmt: skip

        def read(order: Indices) -> None:
            paths = shape.paths()
            listed = folder / "some"
            write_list((f"{mountpoint}/{paths[at]}" for at in order.tolist()), listed)
            total = int(shape.file_sums()[order].sum())
            some = Order(listed, len(order), len(order) * shape.file_bytes, total)
            bench.read_epoch(some)  # a wrong byte is an error

        with dlcmd.mounted(DATASET, mountpoint, *options) as mount:
            control = _announced(mount, shape, orders, 0)
            read(orders[0])
            wait_until(lambda: _log_entries(mount) == shape.files)
            read(orders[1][: int(KILLED_AT * shape.files)])
            control.close()
            _kill(mount)
            dlcmd.output("umount", "--lazy", str(mountpoint))
        before = store.counts()
        start_s = time.monotonic()
        with dlcmd.mounted(DATASET, mountpoint, *options) as mount:
            control = _announced(mount, shape, orders, 1)
            read(orders[1][:FIRST_FILES])
            seconds = time.monotonic() - start_s
            read(orders[1][FIRST_FILES:])
            requests = (store.counts() - before).requests
            control.close()
    return {"seconds": seconds, "requested": 100 * requests / shape.files}


def _announced(mount: Mount, shape: Shape, orders: list[Indices], first: int) -> Control:
    snapshot = Snapshot((mount.path / ".diesel" / "snapshot").read_bytes())
    entry = snapshot.lookup_many([path.encode() for path in shape.paths()])
    control = Control.connect(mount.path)
    epochs = [explicit(epoch=epoch, entries=entry[orders[epoch]]) for epoch in (first, first + 1)]
    control.announce("train", epochs)
    return control


def _log_entries(mount: Mount) -> int:
    stats = json.loads((mount.path / ".diesel" / "stats").read_text(encoding="utf-8"))
    return int(stats["residency"].get("store", {}).get("log_next_entries", 0))


def _kill(mount: Mount) -> None:
    for pid in members(os.getsid(mount.counts().supervisor)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
