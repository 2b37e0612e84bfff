"""Describes a training job to the forecast: its nodes, the store, and how it reads.

Rates are those of one node unless a field says otherwise.
"""

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..orders.shuffle import GROUP_SIZE_DEFAULT, SEED_MAX, check_number

Shuffle = Literal["full", "chunk"]

CONNECTIONS = 64
"""The requests that a node makes at once: `FETCH_THREADS` of `cache/fetching/stored_parts.py`."""

EPOCHS_MAX, BATCH_MAX, WORKERS_MAX = 1000, 1 << 20, 1 << 10
RANKS_MAX = 1 << 12
"""The time of a simulation grows with the ranks on all nodes."""


@dataclass(frozen=True, slots=True)
class ForecastStore:
    """The object store, as one node sees it.

    The first byte of a response comes after `request_s`, the others at no more than
    `connection_bytes_per_s`. All requests of a node share `bytes_per_s`. Prices, in any currency,
    are for 1,000 requests and for 1e9 bytes that leave the store.
    """

    request_s: float = 0.02
    bytes_per_s: float = 1e9
    connection_bytes_per_s: float = 1e8
    price_per_1000: float = 0.0004
    price_per_gb: float = 0.0

    def price(self, requests: int, size: int) -> float:
        return requests / 1000 * self.price_per_1000 + size / 1e9 * self.price_per_gb


@dataclass(frozen=True, slots=True)
class ForecastNode:
    """One machine of the job; all are alike.

    `window_bytes`: memory into which the mount loads files ahead of the reader. `memory_bytes`: the
    cache's own memory. `disk_bytes`: its folder on an SSD. `network_request_s`: the latency of a
    request to another node.
    """

    window_bytes: int
    memory_bytes: int = 0
    disk_bytes: int = 0
    disk_read_bytes_per_s: float = 2e9
    disk_write_bytes_per_s: float = 1e9
    network_bytes_per_s: float = 1.25e9
    network_request_s: float = 0.0002
    push_bytes_per_s: float = 1e9
    """Checking and pushing contents: 963 MB/s measured in one process with files of 110 KiB
    (tests/bench/RESULTS.md)."""


@dataclass(frozen=True, slots=True)
class ForecastJob:
    """A data-parallel training job. Raises UsageError for numbers out of range.

    In each iteration, each of the `nodes` x `ranks` processes reads `batch` files. `images_per_s`
    is the rate of the model and of decoding on one rank without waits. Each rank's DataLoader has
    `workers` processes, each of which prepares two batches ahead.
    """

    node: ForecastNode
    store: ForecastStore = ForecastStore()
    nodes: int = 1
    ranks: int = 1
    batch: int = 64
    workers: int = 4
    images_per_s: float = 1000.0
    epochs: int = 3
    seed: int = 0
    shuffle: Shuffle = "full"
    group_size: int = GROUP_SIZE_DEFAULT

    def __post_init__(self) -> None:
        check_number("number of nodes", self.nodes, 1, RANKS_MAX)
        check_number("number of ranks", self.ranks, 1, RANKS_MAX)
        check_number("number of ranks of all nodes", self.world, 1, RANKS_MAX)
        check_number("batch", self.batch, 1, BATCH_MAX)
        check_number("number of workers", self.workers, 0, WORKERS_MAX)
        check_number("number of epochs", self.epochs, 1, EPOCHS_MAX)
        check_number("seed", self.seed, 0, SEED_MAX - self.epochs)
        check_number("group size", self.group_size, 1)
        check_number("memory of the mount", self.node.window_bytes)
        check_number("memory of the cache", self.node.memory_bytes)
        check_number("size of the disk cache", self.node.disk_bytes)
        for what, value in (
            ("the store's rate", self.store.bytes_per_s),
            ("the rate of one connection to the store", self.store.connection_bytes_per_s),
            ("the network's rate", self.node.network_bytes_per_s),
            ("the rate of reading the disk", self.node.disk_read_bytes_per_s),
            ("the rate of writing the disk", self.node.disk_write_bytes_per_s),
            ("the rate of pushing contents", self.node.push_bytes_per_s),
            ("the rate of images", self.images_per_s),
        ):
            if not 0 < value <= 1e18:
                raise UsageError(f"{what} is {value:g}: it must be above 0, and at most 1e18")
        for what, value in (
            ("the store's latency", self.store.request_s),
            ("the network's latency", self.node.network_request_s),
            ("the price of requests", self.store.price_per_1000),
            ("the price of traffic", self.store.price_per_gb),
        ):
            if not 0 <= value < 1e6:
                raise UsageError(f"{what} is {value:g}: it must be 0 or more, and below 1e6")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks
