"""Benchmark of the forecast against real runs: four nodes in network namespaces mount a dataset as
a task and train on it, with memory for all of it, half, or a tenth.

`dlcmd forecast` gets the rates of this run: the store's latency and bandwidth, as a node measures
them, and the pace of the readers. Each row is the difference of the run relative to the forecast:
requests to the store and their bytes, as the store counts them, and hits, the part of the bytes
read that the store did not give (in points). These are sums over two epochs, since a mount loads
files of the second before the first is over. The first epoch begins with empty caches. A node reads
ahead within the window of its memory, a 30th of an epoch if a tenth of the dataset fits; with few
files that is little time, so the readers are slow.
"""

import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.source import MASTER_SHARE, SERVER_DIVISOR
from diesel_fs.orders.computed import ComputedOrder
from tests.peers.nodes import Nodes
from tests.peers.running import DATASET, RunningTask
from tests.storage.objects.scripted_s3 import BUCKET

from ..dlcmd import last_line
from ..inputs import Shape
from ..reading import write_list
from ..report import Row, no_more_than
from ..samples import Samples, progress
from ..workbench import Workbench

NODES = 4
SHAPE = Shape("D4F", 40_000, 20, 4_000)
CHUNK_BYTES = 128 << 10
BATCH = 32
STORE_S, STORE_BYTES_PER_S = 0.05, 6e6  # the latter for each node


@dataclass(frozen=True, slots=True)
class Order:
    """An order, and the seconds that the model takes for a batch. A full shuffle takes a request a
    file, which keeps this machine busy."""

    shuffle: Literal["chunk", "full"]
    group: int
    compute_s: float


SEED = 3
ORDERS = (Order("chunk", 4, 0.16), Order("full", 1 << 20, 0.32))
EPOCHS = 2
FITS = {"all": 1.25, "half": 0.5, "a tenth": 0.1}
"""Memory of all masters together, by the bytes of the dataset. Shares of nodes differ somewhat."""
COUNTS_MAX, SECONDS_MAX = 0.02, 0.15
SAMPLES, PARALLEL = 8, 4
_PROGRAM = Path(__file__).parent / "ranks_program.py"


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one epoch. `requests` and `bytes` are those of the store."""

    requests: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The store's rates, as a node measures them."""

    request_s: float
    bytes_per_s: float

    @classmethod
    def measure(cls, task: RunningTask) -> "Rates":
        """Time small parts of chunks, and whole chunks, several at once."""
        keys = [key for key in task.s3.objects if "/chunks/" in key]
        place = urlsplit(task.s3.endpoint)

        def get(key: str, part: str) -> tuple[float, int]:
            with task.nodes[0].entered():
                link = HTTPConnection(place.hostname or "", place.port)
                link.connect()
            link.request("GET", f"/{BUCKET}/{key}", headers={"Range": f"bytes={part}"})
            begun_s = time.monotonic()
            size = len(link.getresponse().read())
            link.close()
            return time.monotonic() - begun_s, size

        small_s = statistics.median(get(key, "0-4095")[0] for key in keys[:SAMPLES])
        with ThreadPoolExecutor(PARALLEL) as pool:
            begun_s = time.monotonic()
            sizes = [size for _, size in pool.map(lambda key: get(key, "0-"), keys[:64])]
            seconds = time.monotonic() - begun_s
        return cls(small_s, sum(sizes) / max(seconds, 0.05))


@dataclass(frozen=True, slots=True)
class _Ground:
    """The task's dataset in its store, and the settings that a forecast and a mount share."""

    task: RunningTask
    folder: Path

    def memory_bytes(self, fit: float) -> int:
        """`mount --memory` of a node, so that the memory for chunks of all nodes together is this
        part of the dataset."""
        chunks_bytes = int(fit * self.task.stored_bytes / NODES)
        left = chunks_bytes * MASTER_SHARE[1] // MASTER_SHARE[0]
        return left * SERVER_DIVISOR // (SERVER_DIVISOR - 1)

    def forecast(self, order: Order, memory_bytes: int, rates: Rates) -> list[Figures]:
        options = {
            "nodes": NODES, "ranks": 1, "batch": BATCH, "workers": 0, "memory": memory_bytes,
            "store-latency": rates.request_s * 1e3, "store-bandwidth": int(rates.bytes_per_s),
            "images-per-s": BATCH / order.compute_s, "epochs": EPOCHS, "seed": SEED,
            "shuffle": order.shuffle, "group-size": min(order.group, 1000), "evict": "plan",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        printed = self.task.nodes.shared.dlcmd("--json", "forecast", *words, DATASET)
        [found] = json.loads(printed.stdout.splitlines()[-1])["forecasts"]
        return [
            Figures(each["store_requests"], each["store_bytes"], each["seconds"])
            for each in found["epochs"]
        ]


class _Training:
    """One training job on real mounts: its epochs, as they went."""

    def __init__(self, ground: _Ground, order: Order, memory_bytes: int) -> None:
        task, folder = ground.task, ground.folder
        task.options = {"memory": str(memory_bytes)}
        self._task, self._folder, self._order = task, folder, order
        self._mounts = [task.mount(rank) for rank in range(NODES)]
        task.gathered()
        self._snapshot = Snapshot((self._mounts[0] / ".diesel" / "snapshot").read_bytes())

    def read(self, epoch: int) -> Figures:
        """Read an epoch. All are announced with the first."""
        lists = []
        for rank, mount in enumerate(self._mounts):
            order = ComputedOrder(SEED, epoch, self._order.group, rank, NODES)
            entries = order.entries(self._snapshot).tolist()
            paths = (f"{mount}/{self._snapshot.path(each).decode()}" for each in entries)
            lists.append(str(write_list(paths, self._folder / f"list{rank}")))
        announced: dict[str, object] = {"seed": SEED, "kind": self._order.shuffle, "world": NODES}
        if self._order.shuffle == "chunk":
            announced["group_size"] = self._order.group
        options = {
            "lists": lists, "batch": BATCH, "compute_s": self._order.compute_s, "epoch": epoch,
            "epochs": EPOCHS, "mounts": [*map(str, self._mounts)], "order": announced,
        }  # fmt: skip
        report = json.loads(last_line([sys.executable, "-P", str(_PROGRAM), json.dumps(options)]))
        requests, size = sum(self._task.gets().values()), self._task.egress_bytes()
        self._task.forget()
        assert report["bytes"] == SHAPE.bytes, "not all bytes were read"
        seconds = sum(max(took) + self._order.compute_s for took in report["iterations"])
        return Figures(requests, size, seconds)


def measure(bench: Workbench) -> list[Row]:
    """All settings and orders."""
    rows = []
    with (
        bench.scratch() as folder,
        Nodes(folder / "nodes", NODES) as nodes,
        RunningTask(
            nodes, files=SHAPE.files, source=bench.input(SHAPE), chunk_bytes=CHUNK_BYTES
        ) as task,
    ):
        ground = _Ground(task, folder)
        for order, (what, fit) in itertools.product(ORDERS, FITS.items()):
            task.s3.delay_s, task.s3.bytes_per_s = STORE_S, STORE_BYTES_PER_S
            memory_bytes = ground.memory_bytes(fit)
            forecast = ground.forecast(order, memory_bytes, Rates.measure(task))
            task.forget()
            try:
                training = _Training(ground, order, memory_bytes)
                observed = [training.read(epoch) for epoch in range(EPOCHS)]
            finally:
                task.end()  # as a crash does
            name = f"task of {NODES} nodes, {what} fits, {order.shuffle}"
            rows += _rows(name, forecast, observed)
    return rows


def _rows(name: str, forecast: list[Figures], observed: list[Figures]) -> list[Row]:
    """The differences of the run from the forecast."""
    requests, sizes, hits = [], [], []
    for side in (forecast, observed):
        requests.append(sum(each.requests for each in side))
        sizes.append(sum(each.bytes for each in side))
        hits.append(100 * (1 - sizes[-1] / (EPOCHS * SHAPE.bytes)))
    compared: list[tuple[str, str, float, float, float]] = [
        ("hits", "points", hits[0], hits[1], 100 * COUNTS_MAX),
        ("requests", "parts", requests[0], requests[1], COUNTS_MAX),
        ("bytes", "parts", sizes[0], sizes[1], COUNTS_MAX),
    ]
    for number, (forecast_epoch, epoch) in enumerate(zip(forecast, observed, strict=True), 1):
        seconds = (forecast_epoch.seconds, epoch.seconds)
        compared.append((f"seconds of epoch {number}", "parts", *seconds, SECONDS_MAX))
    rows = []
    for what, unit, expected, found, limit in compared:
        off = Samples((abs(found - expected) / (1 if unit == "points" else expected or 1),))
        note = f"forecast {expected:,.6g}, was {found:,.6g}"
        progress(f"{name}, {what}: {note}")
        rows.append(no_more_than(f"{name}: {what} off by", unit, off, limit, note))
    return rows
