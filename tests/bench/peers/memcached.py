"""A memcached on each node of a task, with a client of all of them.

The servers have the same memory as our masters, and use the same network and machine."""

import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.peers.nodes import NodeHost, Nodes, end
from tests.server.program import until

from ..client_process import ClientProcess
from ..samples import PeerMissing
from . import installed, output_of, system_program

NAME = "memcached"
PORT = 11211
_PROGRAM = Path(__file__).with_name("memcached_program.py")


class Cluster:
    """The servers, one on each node, which share `memory_bytes`."""

    def __init__(self, nodes: Nodes, memory_bytes: int) -> None:
        self._program = system_program("memcached")
        output_of([installed("python"), "-P", "-c", "import pylibmc"])
        self._nodes = nodes
        self._megabytes = max(memory_bytes // len(nodes) >> 20, 64)
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for rank in range(len(self._nodes)):
            self.start(rank)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def servers(self) -> str:
        """The addresses of all servers, as clients are given them."""
        return ",".join(f"{node.address}:{PORT}" for node in self._nodes)

    def start(self, rank: int) -> None:
        """Start an empty server on a node."""
        place = self._nodes[rank]
        options = ["-u", "root", "-l", place.address, "-p", str(PORT), "-m", str(self._megabytes)]
        server = place.start(self._program, *options, out=subprocess.DEVNULL)
        self._stack.callback(end, server)
        self._servers[rank] = server
        until(lambda: any(each.port == PORT for each in place.sockets(listening=True)), "memcached")

    def kill(self, rank: int) -> None:
        """End the server of a node as a crash does."""
        end(self._servers[rank])

    def client(self, place: NodeHost, *options: str) -> ClientProcess:
        """Start a client of all servers on a node (`memcached_program.py`), which ends with the
        cluster."""
        return self.client_of(place, self.servers, *options)

    def client_of(self, place: NodeHost, servers: str, *options: str) -> ClientProcess:
        """A client of these servers, which may be proxies."""
        client = ClientProcess(
            place, installed("python"), "-P", _PROGRAM, servers, *options, failure=PeerMissing
        )
        self._stack.callback(client.close)
        return client

    def run(self, place: NodeHost, order: Mapping[str, object]) -> dict[str, float]:
        """Run a client on a node with one order, and return its answer."""
        return self.client(place).run(**order)
