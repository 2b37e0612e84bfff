"""Benchmarks of a task's cache: four nodes, against a memcached on each of the same four.

Nodes are network namespaces of this machine (loopback addresses where there are none), so all of
them share its processors with their readers; both sides do. The store is an S3 server of the
bench's own in this process, whose every request takes `STORE_S`, which is quick for an object
store; where nothing else is said, the data are in the caches before anything is timed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.plans import control
from tests.peers.nodes import NodeHost, Nodes, end
from tests.peers.running import DATASET, RunningTask

from ..epochs import files_per_s, prepared, random_order, read_epoch
from ..inputs import D4L, Shape
from ..peers import memcached
from ..reader import write_list
from ..report import Row, at_least, within
from ..samples import OURS, Measured, PeerMissing, Samples, Side, alternate, repeat, say
from ..workbench import Workbench

T4 = Shape("T4", 40_000, 200, 4096)
NODES = 4
BATCH, BATCHES, SINGLES = 128, 400, 10_000
STORE_S = 0.005
CLIENT_BYTES = 8 << 20
"""Memory of each client: nearly nothing of a dataset, so that its master serves what it reads."""
MASTER_PART = 1.5 / NODES  # the part of the dataset that fits the memory of a node
CHUNK_BYTES, CHUNK_BYTES_MIN = 4 << 20, 64 << 10
SMALL_CHUNK_BYTES = 512 << 10
"""Of what half of the dataset is to be: of a node's ten large ones, four or five would fit."""
POLICY_BATCHES = 30
WARM_S = 120.0
SAMPLE = 2_000  # files that are read one by one from the store, to measure that rate
SLOW_ROUNDS = 2  # for benchmarks that take a minute a round
GONE = 3  # the rank of the node that is killed

BATCH_RATIO, SINGLE_RATIO, MOUNT_RATIO = 1.3, 0.8, 1.5
COLD_RATIO, FILE_BY_FILE_RATIO, RECOVERY_RATIO = 0.8, 5, 5
EGRESS_MAX = 1.05
HIT_RATIO = 0.95
NO_CACHE, THEORY = "without a cache", "in theory"
SEQUENTIAL, FILE_BY_FILE = "the store's chunks in a row", "file by file"
RATE = "files/s"


class Client:
    """A process that reads on a node (`probes/task.py`)."""

    def __init__(self, place: NodeHost, client_options: Mapping[str, object]) -> None:
        self._log = (place.folder / f"client-{id(self)}.log").open("w+b")
        self._process = place.start(
            *(sys.executable, "-m", "tests.bench.probes.task"),
            log=self._log, stdin=subprocess.PIPE,
        )  # fmt: skip
        self.send_order(client_options)

    def send_order(self, order: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"a reader ended: {self._log.read()[-2000:]!r}")
        said: dict[str, float] = json.loads(line)
        return said

    def run(self, **order: object) -> dict[str, float]:
        self.send_order(order)
        return self.answer()

    def close(self) -> None:
        """End the process as a training process ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            say("a reader does not end")
        end(self._process)
        self._log.close()


class Running:
    """A task of some nodes, with a client on each node."""

    def __init__(
        self,
        stack: ExitStack,
        bench: Workbench,
        shape: Shape,
        source: Path,
        nodes: Nodes,
        chunk_bytes: int,
    ) -> None:
        self.shape = shape
        self.source = source
        self.nodes = nodes
        chunk_bytes = max(chunk_bytes // bench.divisor, CHUNK_BYTES_MIN)
        self.task = stack.enter_context(
            RunningTask(nodes, files=shape.files, source=source, chunk_bytes=chunk_bytes)
        )
        self.task.s3.delay_s = STORE_S
        self.clients: list[Client] = []
        self._serial = 0

    def start(self, **options: object) -> None:
        """Start a new task: a master on each node, and a client of it."""
        self.stop()
        self._serial += 1
        self.task.name = f"bench{self._serial}"
        part = max(MASTER_PART, 1.5 / len(self.nodes))
        options = {"task_memory_bytes": int(part * self.task.stored_bytes), **options}
        words = [
            {"dataset": DATASET, "task": self.task.name, "rank": rank, "world": len(self.nodes),
             "listen": f"{node.address}:0", "memory_bytes": CLIENT_BYTES, **options}
            for rank, node in enumerate(self.nodes)
        ]  # fmt: skip
        clients = zip(self.nodes, words, strict=True)
        self.clients = [Client(node, each) for node, each in clients]
        for client in self.clients:
            client.answer()
        for client in self.clients:
            client.run(do="singles", seed=0, count=1)  # afterwards it is connected to its master
        self.task.gathered()

    def stop(self) -> None:
        """End the task's clients; its masters end by themselves."""
        for client in self.clients:
            client.close()
        self.clients = []
        for rank in range(len(self.nodes)):
            self.nodes[rank].kill()
            runtime = Path(self.nodes[rank].environment["XDG_RUNTIME_DIR"])
            for left in runtime.rglob("socket"):
                left.unlink()

    def all(self, **order: object) -> list[dict[str, float]]:
        """Give an order to all clients at once."""
        for client in self.clients:
            client.send_order(order)
        return [client.answer() for client in self.clients]

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

    def wait_whole(self, ranks: "range | list[int]") -> None:
        """Wait until these masters have all chunks that they own, and together own all chunks."""
        end_s = time.monotonic() + WARM_S
        while not self._is_whole(ranks):
            assert time.monotonic() < end_s, "the task does not get warm"
            time.sleep(0.01)

    def _is_whole(self, ranks: "range | list[int]") -> bool:
        stats = [self.task.stats(rank) for rank in ranks]
        held = [each["node_cache"] for each in stats]
        if any(each["members"] != len(stats) for each in stats):
            return False
        return all(
            isinstance(each, dict) and each["share_chunks"] == each["share_held_chunks"]
            for each in held
        )


@contextmanager
def _running(
    bench: Workbench, wanted: Shape, count: int = NODES, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Running]:
    shape, source = prepared(bench, wanted)
    with ExitStack() as stack:
        folder = stack.enter_context(bench.scratch())
        nodes = stack.enter_context(Nodes(folder / "nodes", count))
        running = Running(stack, bench, shape, source, nodes, chunk_bytes)
        stack.callback(running.stop)
        yield running


def _paths(running: Running) -> str:
    """Write the list of files that a client of memcached reads."""
    file = running.nodes.folder / "paths"
    return str(file if file.exists() else write_list(running.shape.paths(), file))


def _filled(stack: ExitStack, running: Running) -> memcached.Cluster | None:
    """A memcached on each node, which has all files; None if memcached is not installed."""
    try:
        cluster = memcached.Cluster(running.nodes, 2 * running.shape.bytes + (256 << 20))
        stack.enter_context(cluster)
        order = {"do": "fill", "source": str(running.source), "paths": _paths(running)}
        cluster.run(running.nodes[0], order)
    except PeerMissing as error:
        say(f"NOT MEASURED: {error}")
        return None
    return cluster


def reads(bench: Workbench) -> list[Row]:
    """T4 from the caches of four nodes: batches, single files, by one client and by one a node."""
    with _running(bench, T4) as running, ExitStack() as stack:
        running.start()
        running.warm_s()
        cluster = _filled(stack, running)
        count, single = BATCHES // bench.divisor, SINGLES // bench.divisor

        def theirs(clients: int, **order: object) -> dict[str, float]:
            if cluster is None:
                raise PeerMissing("no memcached, or no client of it")
            order["paths"] = _paths(running)
            begun = [
                cluster.start_client(node, {**order, "seed": rank})
                for rank, node in enumerate(running.nodes.nodes[:clients])
            ]
            said = [memcached.answer(each) for each in begun]
            assert not any(each["missed"] for each in said), "memcached has lost files"
            return {RATE: sum(each[RATE] for each in said)}

        def ours(clients: int, **order: object) -> dict[str, float]:
            for rank, client in enumerate(running.clients[:clients]):
                client.send_order({**order, "seed": rank})
            return {RATE: sum(each.answer()[RATE] for each in running.clients[:clients])}

        rows = []
        for clients in (1, NODES):
            for what, ratio, order in (
                (f"{BATCH} in one request", BATCH_RATIO,
                 {"do": "batches", "count": count, "size": BATCH}),
                ("one by one", SINGLE_RATIO, {"do": "singles", "count": single}),
            ):  # fmt: skip
                sides: dict[str, Side] = {
                    OURS: lambda clients=clients, order=order: ours(clients, **order),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                    memcached.NAME: lambda clients=clients, order=order: theirs(clients, **order),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                }
                running.all(do="batches", seed=99, count=10, size=BATCH)
                rounds = alternate(bench.rounds, sides)
                name = f"task {running.shape.name}, random, {what}, {_clients(clients)}"
                rows.append(
                    Row(name, RATE, rounds.ours(RATE), memcached.NAME,
                        rounds.of(memcached.NAME, RATE), at_least(ratio)),
                )  # fmt: skip
        return rows


def _clients(count: int) -> str:
    return "one client" if count == 1 else f"{count} clients on {count} nodes"


def mounted(bench: Workbench) -> list[Row]:
    """D4L in a known random order through a mount that has a quarter of it in its node's memory,
    against multi-get of the same files in such an order."""
    with _running(bench, D4L) as running, ExitStack() as stack:
        shape, task = running.shape, running.task
        task.s3.delay_s = 0.0
        share = max(shape.bytes // 2, 64 << 20)
        task.options = {"policy": "oneshot", "memory": str(share), "session": "kernel"}
        mountpoints = [task.mount(rank) for rank in range(NODES)]
        for rank in range(NODES):
            stack.callback(task.umount, rank)
        running.wait_whole(range(NODES))
        cluster = _filled(stack, running)
        mountpoint, epoch = mountpoints[0], 0
        folder = stack.enter_context(bench.scratch())

        def ours() -> dict[str, float]:
            nonlocal epoch
            epoch += 1
            order = random_order(shape, mountpoint, epoch, folder)
            _announce(mountpoint, shape, epoch)
            before = _reads(mountpoint)
            report = read_epoch(bench, order)
            return {
                RATE: files_per_s(report),
                "READs a file": (_reads(mountpoint) - before) / shape.files,
            }

        def theirs() -> dict[str, float]:
            if cluster is None:
                raise PeerMissing("no memcached, or no client of it")
            draw = np.random.default_rng(epoch).permutation(shape.files)
            paths = shape.paths()
            listed = write_list((paths[at] for at in draw.tolist()), folder / "theirs")
            order = {"do": "epoch", "paths": str(listed), "size": BATCH}
            return {RATE: cluster.run(running.nodes[0], order)[RATE]}

        rounds = alternate(bench.rounds, {OURS: ours, memcached.NAME: theirs})
        name = f"task {shape.name}, an epoch in known random order, through a mount"
        note = f"the mount and its master have {share >> 20} MB, the dataset {shape.bytes >> 20} MB"
        return [
            Row(name, RATE, rounds.ours(RATE), memcached.NAME, rounds.of(memcached.NAME, RATE),
                at_least(MOUNT_RATIO), note),
            within(name, "READs a file", rounds.ours("READs a file"), 0.02, most=True),
        ]  # fmt: skip


def _announce(mountpoint: Path, shape: Shape, epoch: int) -> None:
    """Tell the mount the order that `random_order` draws for this seed."""
    view = Snapshot((mountpoint / ".diesel" / "snapshot").read_bytes())
    drawn = np.random.default_rng(epoch).permutation(shape.files)
    paths = [path.encode() for path in shape.paths()]
    entries = view.lookup_many(paths)[drawn]
    with control.Control.connect(mountpoint) as link:
        link.announce("bench", [control.explicit(epoch=epoch, entries=entries)])


def _reads(mountpoint: Path) -> int:
    """The READs of files that the mount has answered so far."""
    time.sleep(1.1)  # its statistics may be a second old
    said = json.loads((mountpoint / ".diesel" / "stats").read_bytes())["reads"]
    return int(said["hits"]) + int(said["misses"])


def egress(bench: Workbench) -> list[Row]:
    """The reads from the store in the first epoch, which every node reads whole, in its own
    order."""
    rows = []
    for count in (1, 2, 4):
        with _running(bench, T4, count) as running:

            def run(running: Running = running) -> dict[str, float]:
                running.task.forget()
                running.start()
                for rank, client in enumerate(running.clients):
                    client.send_order({"do": "epoch", "seed": rank, "size": BATCH})
                for client in running.clients:
                    client.answer()
                return {"x": running.task.egress_bytes() / running.task.stored_bytes}

            rounds = repeat(bench.rounds, run)
        name = f"task {T4.name}, one epoch of {count} node{'s' * (count > 1)}, read from the store"
        rows.append(within(name, "x dataset", rounds.ours("x"), EGRESS_MAX, most=True))
    return rows


def cold(bench: Workbench) -> list[Row]:
    """D4L from nothing to every chunk in its owner's memory."""
    with _running(bench, D4L) as running:
        stored = running.task.stored_bytes
        file_by_file = _file_by_file(running)

        def sequential() -> dict[str, float]:
            said = running.clients[0].run(do="chunks")
            return {"B/s": said["bytes"] / said["s"]}

        def ours() -> dict[str, float]:
            running.start()
            return {"B/s": stored / running.warm_s()}

        sides: dict[str, Side] = {OURS: ours, SEQUENTIAL: sequential}
        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), sides)
        name = f"task {running.shape.name}, from cold to warm"
        mega = rounds.ours("B/s").map(lambda rate: rate / 1e6)
        other = rounds.of(SEQUENTIAL, "B/s").map(lambda rate: rate / 1e6)
        per_file = stored / running.shape.files
        rate = rounds.ours("B/s").map(lambda rate: rate / per_file)
        return [
            Row(name, "MB/s", mega, SEQUENTIAL, other, at_least(COLD_RATIO)),
            Row(name, RATE, rate, FILE_BY_FILE, file_by_file, at_least(FILE_BY_FILE_RATIO),
                note=f"memcached, {NODES} clients at once; of {SAMPLE} files each"),
        ]  # fmt: skip


def _file_by_file(running: Running) -> Measured:
    """The rate of filling memcached, where each file is read from the store by itself: files/s."""
    paths = running.shape.paths()[:: max(running.shape.files // (SAMPLE * NODES), 1)]
    _objects(running, paths)

    def run() -> dict[str, float]:
        with memcached.Cluster(running.nodes, 2 * running.shape.bytes) as cluster:
            begun = [
                _refill(cluster, running, node, paths[rank::NODES], str(rank))
                for rank, node in enumerate(running.nodes)
            ]
            said = [memcached.answer(each) for each in begun]
            return {RATE: sum(each["missed"] for each in said) / max(each["s"] for each in said)}

    side = "memcached"
    return alternate(1, {side: run}).of(side, RATE)


def _objects(running: Running, paths: list[str]) -> None:
    """Put each of these files into the store as an object of its own."""
    for path in paths:
        running.task.s3.put(f"files/{path}", (running.source / path).read_bytes())


def _refill(
    cluster: memcached.Cluster, running: Running, node: NodeHost, paths: list[str], name: str
) -> "subprocess.Popen[bytes]":
    listed = write_list(paths, running.nodes.folder / f"refill-{name}")
    place = running.task.s3.endpoint.removeprefix("http://")
    order = {"do": "refill", "paths": str(listed), "size": BATCH, "store": f"{place}/bucket/files"}
    return cluster.start_client(node, order)


def recovery(bench: Workbench) -> list[Row]:
    """D4L, when one of four nodes is killed: how long until nothing is read from the store again.

    Readers on the others go on. A new memcached takes the dead one's place at once; its readers put
    into it what they miss. Of ours nobody takes the place: the others share what it had.
    """
    others = [rank for rank in range(NODES) if rank != GONE]
    with _running(bench, D4L) as running:

        def ours() -> dict[str, float]:
            running.start()
            running.warm_s()
            start_s = time.perf_counter()
            running.nodes[GONE].kill()
            worst_s = 0.0
            while time.perf_counter() - start_s < WARM_S:
                for rank in others:
                    order = {"do": "batches", "seed": int(time.monotonic_ns() % 1000)}
                    running.clients[rank].send_order({**order, "count": 20, "size": BATCH})
                said = [running.clients[rank].answer() for rank in others]
                worst_s = max(worst_s, *(each["worst_s"] for each in said))
                if running._is_whole(others):
                    break
            return {"s": time.perf_counter() - start_s, "worst": worst_s}

        def theirs() -> dict[str, float]:
            with ExitStack() as own:
                cluster = _filled(own, running)
                if cluster is None:
                    raise PeerMissing("no memcached, or no client of it")
                cluster.kill(GONE)
                cluster.start(GONE)
                draw = np.random.default_rng(1).permutation(running.shape.files)
                paths = running.shape.paths()
                begun = [
                    _refill(cluster, running, running.nodes[rank],
                            [paths[at] for at in draw[place :: len(others)].tolist()], str(rank))
                    for place, rank in enumerate(others)
                ]  # fmt: skip
                said = [memcached.answer(each) for each in begun]
                assert sum(each["missed"] for each in said) > running.shape.files / NODES / 2
                return {"s": max(each["s"] for each in said)}

        _objects(running, running.shape.paths())
        sides: dict[str, Side] = {OURS: ours, memcached.NAME: theirs}
        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), sides)
        name = f"task {running.shape.name}, one of {NODES} nodes killed"
        ours_rate, theirs_rate = rounds.ours("s"), rounds.of(memcached.NAME, "s")
        return [
            Row(f"{name}, as fast again", "1/s", ours_rate.map(_inverse), memcached.NAME,
                theirs_rate.map(_inverse), at_least(RECOVERY_RATIO)),
            Row(f"{name}, until all is cached", "s", ours_rate, memcached.NAME, theirs_rate),
            Row(f"{name}, the slowest batch of {BATCH} meanwhile", "s", rounds.ours("worst")),
        ]  # fmt: skip


def _inverse(value: float) -> float:
    return 1 / value


def policies(bench: Workbench) -> list[Row]:
    """Half of T4 fits the caches together: the share of random reads that find their chunk
    there."""
    rows = []
    with _running(bench, T4, chunk_bytes=SMALL_CHUNK_BYTES) as running:
        half = running.task.stored_bytes // 2 // NODES
        for policy in ("lru", "lfu", "none"):

            def run(policy: str = policy) -> dict[str, float]:
                running.start(task_memory_bytes=half, evict=policy)
                running.all(do="batches", seed=1, count=POLICY_BATCHES // bench.divisor, size=BATCH)
                before = _counted(running)
                running.all(do="batches", seed=2, count=POLICY_BATCHES // bench.divisor, size=BATCH)
                asked, missed = (a - b for a, b in zip(_counted(running), before, strict=True))
                return {"hits": 1 - missed / asked}

            rounds = repeat(min(bench.rounds, SLOW_ROUNDS), run)
            name = f"task {running.shape.name}, half of it fits, --evict {policy}"
            rows.append(
                Row(name, "hits", rounds.ours("hits"), THEORY, Samples((0.5,)),
                    at_least(HIT_RATIO)),
            )  # fmt: skip
    return rows


def _counted(running: Running) -> tuple[int, int]:
    """What clients have read, and what of it was in no cache: read by them, or by a master while
    they waited."""
    names = ("client_parts", "client_misses")
    asked, left = (sum(running.task.figure(rank, name) for rank in range(NODES)) for name in names)
    held = [running.task.stats(rank)["node_cache"] for rank in range(NODES)]
    mapped = sum(int(said["mapped_reads"]) for said in running.all(do="stats"))
    return asked + mapped, left + sum(each["waited"] for each in held if isinstance(each, dict))


def too_large(bench: Workbench) -> list[Row]:
    """T4 is a fifth larger than the caches together: random batches with and without them."""
    with _running(bench, T4) as running:
        count = 100 // bench.divisor
        part = int(running.task.stored_bytes / 1.2) // NODES

        def ours() -> dict[str, float]:
            running.start(task_memory_bytes=part)
            running.all(do="batches", seed=1, count=count, size=BATCH)
            said = running.all(do="batches", seed=2, count=count, size=BATCH)
            return {RATE: sum(each[RATE] for each in said)}

        def bare() -> dict[str, float]:
            clients = [
                Client(node, {"dataset": DATASET, "memory_bytes": CLIENT_BYTES})
                for node in running.nodes
            ]
            for client in clients:
                client.answer()
            for client in clients:
                client.send_order({"do": "batches", "seed": 2, "count": count, "size": BATCH})
            said = [client.answer() for client in clients]
            for client in clients:
                client.close()
            return {RATE: sum(each[RATE] for each in said)}

        rounds = alternate(min(bench.rounds, SLOW_ROUNDS), {OURS: ours, NO_CACHE: bare})
        name = f"task {running.shape.name}, 1.2 times the caches, random, {BATCH} in one request"
        return [
            Row(name, RATE, rounds.ours(RATE), NO_CACHE, rounds.of(NO_CACHE, RATE), at_least(1)),
        ]  # fmt: skip
