"""A task of some nodes for a benchmark: its dataset, a master on each node, and clients.

Nodes are network namespaces of this machine (loopback addresses if there are none), so all of them
share its processors with their readers; this holds for all sides. The store is an S3 server of the
bench's own in this process. Every request to it takes `STORE_S`, which is quick for an object
store. Unless stated otherwise, the data are in the caches before anything is timed.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.peers.nodes import NodeHost, Nodes
from tests.peers.running import DATASET, RunningTask

from .client_process import ClientProcess, answers_of, rate_together
from .inputs import Shape
from .peers.clusters import Memcached
from .reading import write_list
from .samples import PeerMissing, Side, progress
from .workbench import Workbench

NODES = 4
BATCH = 128  # files in one request
STORE_S = 0.005
CLIENT_BYTES, CLIENT_PART = 8 << 20, 1 / 16
"""The most memory of each client, and the most as a part of the dataset: nearly nothing of it, so
that the task's cache serves its reads."""

MASTER_PART = 1.5 / NODES  # the part of the dataset that fits the memory of a node
CHUNK_BYTES, CHUNK_BYTES_MIN = 4 << 20, 64 << 10
WARM_S = 120.0
SECONDS = 2.0


def connected(place: NodeHost, options: Mapping[str, object]) -> ClientProcess:
    """Start a process that opens a dataset on a node (`probes/task.py`); its first answer comes
    when the dataset is open."""
    client = ClientProcess(place, sys.executable, "-m", "tests.bench.probes.task")
    client.send_order(options)
    return client


class Running:
    def __init__(self, shape: Shape, source: Path, nodes: Nodes, task: RunningTask) -> None:
        self.shape, self.source, self.nodes, self.task = shape, source, nodes, task
        self.task.s3.delay_s = STORE_S
        self.clients: list[ClientProcess] = []
        self._serial = 0

    def start(self, **options: object) -> None:
        """Start a new task: a master and a client on each node."""
        self.stop()
        self._serial += 1
        self.task.name = f"bench{self._serial}"
        part = max(MASTER_PART, 1.5 / len(self.nodes))
        options = {"task_memory_bytes": int(part * self.task.stored_bytes), **options}
        self.clients = self.join(range(len(self.nodes)), **options)
        self.task.gathered()

    def join(self, ranks: Sequence[int], **options: object) -> list[ClientProcess]:
        """Start a client of the task on each of these nodes, and a master if the node has none."""
        clients = [connected(self.nodes[rank], {**self.member(rank), **options}) for rank in ranks]
        for client in clients:
            client.answer()
        for client in clients:
            client.run(do="batches", seed=0, count=1, size=1)  # afterwards it is connected
        return clients

    def member(self, rank: int) -> dict[str, object]:
        """The arguments of `connect` for a client on a node."""
        return {
            "dataset": DATASET,
            "task": self.task.name,
            "rank": rank,
            "world": len(self.nodes),
            "listen": f"{self.nodes[rank].address}:0",
            "memory_bytes": self.client_bytes,
        }

    @property
    def client_bytes(self) -> int:
        return min(CLIENT_BYTES, int(CLIENT_PART * self.task.stored_bytes))

    def stop(self) -> None:
        """End the task's clients and kill its masters."""
        for client in self.clients:
            client.close()
        self.clients = []
        for node in self.nodes:
            node.kill()
            for left in Path(node.environment["XDG_RUNTIME_DIR"]).rglob("socket"):
                left.unlink()

    def all(self, **order: object) -> list[dict[str, float]]:
        return answers_of(self.clients, [order] * len(self.clients))

    def warm_s(self) -> float:
        """The seconds until every chunk is in the memory of its owner."""
        start_s = time.perf_counter()
        for part, client in enumerate(self.clients):
            client.send_order({"do": "touch", "part": part, "of": len(self.clients)})
        self.wait_whole(range(len(self.nodes)))
        seconds = time.perf_counter() - start_s
        for client in self.clients:
            client.answer()
        return seconds

    def wait_whole(self, ranks: Sequence[int]) -> None:
        """Wait until these masters own all chunks together, and have them."""
        end_s = time.monotonic() + WARM_S
        while not self.is_whole(ranks):
            assert time.monotonic() < end_s, "the task does not get warm"
            time.sleep(0.01)

    def is_whole(self, ranks: Sequence[int]) -> bool:
        stats = [self.task.stats(rank) for rank in ranks]
        held = [each["node_cache"] for each in stats]
        if any(each["members"] != len(stats) for each in stats):
            return False
        return all(
            isinstance(each, dict) and each["share_chunks"] == each["share_held_chunks"]
            for each in held
        )

    def paths(self) -> str:
        file = self.nodes.folder / "paths"
        return str(file if file.exists() else write_list(self.shape.paths(), file))

    def put_files(self, paths: Sequence[str]) -> None:
        """Put each of these files into the store as an object."""
        for path in paths:
            self.task.s3.put(f"files/{path}", (self.source / path).read_bytes())

    @property
    def files_store(self) -> str:
        """The address of the objects of `put_files` for a client of memcached."""
        return f"{self.task.s3.endpoint.removeprefix('http://')}/bucket/files"


@contextmanager
def running(
    bench: Workbench, wanted: Shape, count: int = NODES, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Running]:
    """A dataset of a shape in a store, and nodes on which a task can be started."""
    shape, source = bench.prepared(wanted)
    chunk_bytes = max(chunk_bytes // bench.divisor, CHUNK_BYTES_MIN)
    with (
        bench.scratch() as folder,
        Nodes(folder / "nodes", count) as nodes,
        RunningTask(nodes, files=shape.files, source=source, chunk_bytes=chunk_bytes) as task,
    ):
        made = Running(shape, source, nodes, task)
        try:
            yield made
        finally:
            made.stop()


NO_MEMCACHED = "no memcached, or no client of it"


def filled(stack: ExitStack, task: Running, *, copies: int = 1) -> Memcached:
    """A memcached on each node that has all files, and room for `copies` copies of them."""
    cluster = Memcached(task.nodes, 2 * copies * task.shape.bytes + (256 << 20))
    stack.enter_context(cluster)
    client = cluster.client(task.nodes[0])
    client.run(do="fill", source=str(task.source), paths=task.paths())
    return cluster


def filled_if_installed(stack: ExitStack, task: Running, *, copies: int = 1) -> Memcached | None:
    try:
        return filled(stack, task, copies=copies)
    except PeerMissing as error:
        progress(f"NOT MEASURED: {error}")
        return None


def reading_together(
    clients: Sequence[ClientProcess], order: Mapping[str, object], seconds: float
) -> Side:
    """A side with clients that read for some seconds together; without a client, it is missing."""

    def run() -> dict[str, float]:
        if not clients:
            raise PeerMissing(NO_MEMCACHED)
        return rate_together(clients, seconds, order)

    return run


def seconds_of(bench: Workbench) -> float:
    """The time for which clients read for a sample: shorter if the bench is only tried."""
    return max(SECONDS / bench.divisor, 0.2)
