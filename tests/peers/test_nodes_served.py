"""A task with nodes that use DIESEL servers only: each another server, over the same stores."""

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import until

from ..server.certificates import Authority
from ..server.program import Server
from .contents import make
from .nodes import Nodes, has_namespaces
from .running import CHUNK_BYTES, DATASET, Reader, is_right, stats_at

pytestmark = pytest.mark.deep

FILES = 600
PORTS = (9300, 9301)
METRICS = (9310, 9311)
KEY = "a key that all nodes of this test have been given"


@dataclass(frozen=True, slots=True)
class Served:
    nodes: Nodes
    scheme: str
    bytes: int
    stack: ExitStack

    def reader(self, rank: int, **more: object) -> Reader:
        node = self.nodes[rank]
        url = f"{self.scheme}://{self.nodes.shared.address}:{PORTS[rank]}"
        opened: dict[str, object] = {
            "dataset": DATASET, "url": url, "task": "served", "rank": rank, "world": 2,
            "memory_bytes": 1 << 20, **more,
        }  # fmt: skip
        if not has_namespaces():  # no master registers with loopback by itself
            opened["listen"] = f"{node.address}:0"
        reader = Reader(node, opened, FILES)
        self.stack.callback(reader.close)
        return reader

    def stats(self, rank: int) -> dict[str, object]:
        runtime = Path(self.nodes[rank].environment["XDG_RUNTIME_DIR"])
        return stats_at(next(runtime.rglob("socket")))

    def sent_bytes(self) -> float:
        total = 0.0
        for port in METRICS:
            with self.nodes.shared.entered():
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(
                    f"http://{self.nodes.shared.address}:{port}/metrics", timeout=10
                ) as answer:
                    text = answer.read().decode()
            lines = [line.split() for line in text.splitlines() if "tier_bytes_total{" in line]
            total += sum(float(number) for _, number in lines)
        return total


@pytest.fixture(params=["diesel", "diesel+tls"])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    scheme: str = request.param
    with Nodes(tmp_path, 2) as nodes, ExitStack() as stack:
        nodes.start_redis()
        shared = nodes.shared
        store = (shared.folder / "store").as_uri()
        shared.environment["DIESEL_URL"] = f"{store}?meta={nodes.redis_url}"
        total = make(tmp_path / "source", FILES)
        words = ["put", "--chunk-size", str(CHUNK_BYTES), "--compress", "none"]
        shared.dlcmd(*words, tmp_path / "source", DATASET)
        key = tmp_path / "key"
        shared.dlcmd("user", "add", "trainer", "--admin", "--key-out", key)
        options: list[str | Path] = ["--store", store, "--meta", nodes.redis_url]
        if scheme == "diesel":
            options.append("--insecure")
        else:
            authority = Authority(tmp_path / "authority")
            pair = authority.issue(shared.address)
            options += ["--tls-cert", pair.certificate, "--tls-key", pair.key]
        for node in nodes:
            node.environment |= {"DIESEL_USER": "trainer", "DIESEL_KEY": key.read_text().strip()}
            if scheme == "diesel+tls":
                node.environment["SSL_CERT_FILE"] = str(authority.path)
        for port, metrics in zip(PORTS, METRICS, strict=True):
            stack.enter_context(
                Server(
                    tmp_path / f"server{port}",
                    *(*options, "--metrics", f"{shared.address}:{metrics}"),
                    listen=f"{shared.address}:{port}",
                    program=shared.command(sys.executable, "-m", "diesel_server"),
                    environment=shared.environment,
                )
            )  # fmt: skip
        yield Served(nodes, scheme, total, stack)


def test_nodes_of_two_servers_are_one_task_and_read_the_store_once(served: Served) -> None:
    more = {"task_key": KEY} if served.scheme == "diesel" else {}
    readers = [served.reader(rank, **more) for rank in range(2)]
    for reader in readers:
        reader.ready()
    until(lambda: [served.stats(rank)["members"] for rank in range(2)] == [2, 2], "both", 20)
    before = served.sent_bytes()
    for seed, reader in enumerate(readers):
        reader.begin(seed)
    outcomes = [reader.outcome() for reader in readers]
    assert all(is_right(each, FILES) for each in outcomes), outcomes
    assert served.sent_bytes() - before <= 1.05 * (served.bytes + (64 << 10))
    # Without an option, masters listen at the address by which they reach the server.
    for node in served.nodes:
        assert [each.local for each in node.sockets(listening=True)] == [node.address]
    made = served.nodes.connections()
    assert len({(by, to) for by, to, _ in made}) == 2
    assert len(made) <= 4, "one of each reader, and one of each master"
