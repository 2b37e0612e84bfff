"""The peers that run on each node of a task: memcached, twemproxy in front of it, and the prototype
of a task's data plane; and iperf3, which measures the rate of TCP between two nodes.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.peers.nodes import NodeHost, Nodes, end
from tests.waiting import until

from ..client_process import ClientProcess
from ..inputs import Shape
from ..reading import write_list
from ..samples import PeerMissing
from . import installed, output_of, system_program

MEMCACHED, TWEMPROXY = "memcached", "memcached through twemproxy"
PROTOTYPE, IPERF3 = "the prototype", "iperf3"
PROTOTYPE_PROGRAM = Path(__file__).with_name("data_plane_program.py")
_MEMCACHED_CLIENT = Path(__file__).with_name("memcached_program.py")
_LISTEN_S = 60.0
_STATS_PORT = 22222  # of twemproxy
_CONFIGURATION = """
bench:
  listen: {address}
  hash: fnv1a_64
  distribution: ketama
  preconnect: true
  timeout: 20000
  servers:
"""


def listen_at(place: NodeHost, port: int, what: str) -> None:
    until(
        lambda: any(each.port == port for each in place.sockets(listening=True)),
        f"{what} on {place.name}", _LISTEN_S,
    )  # fmt: skip


class _Servers(ExitStack):
    """A server on each node, and clients of them; all end with it."""

    name = ""
    port = 0

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self.nodes = nodes
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for rank in range(len(self.nodes)):
            self.start(rank)
        return self

    def words(self, rank: int) -> tuple[str | Path, ...]:
        raise NotImplementedError

    def start(self, rank: int) -> None:
        """Start the server of a node, which is empty."""
        place = self.nodes[rank]
        server = place.start(*self.words(rank), out=subprocess.DEVNULL)
        self.callback(end, server)
        self._started[place.name] = server
        listen_at(place, self.port, self.name)

    def kill(self, rank: int) -> None:
        """End the server of a node as a crash does."""
        end(self._started[self.nodes[rank].name])

    def address(self, place: NodeHost) -> str:
        return f"{place.address}:{self.port}"

    @property
    def addresses(self) -> str:
        return ",".join(map(self.address, self.nodes))


class Memcached(_Servers):
    """memcached on all nodes, which share `memory_bytes`."""

    name, port = MEMCACHED, 11211

    def __init__(self, nodes: Nodes, memory_bytes: int) -> None:
        super().__init__(nodes)
        self._program = system_program("memcached")
        output_of([installed("python"), "-P", "-c", "import pylibmc"])
        self._megabytes = max(memory_bytes // len(nodes) >> 20, 64)

    def words(self, rank: int) -> tuple[str | Path, ...]:
        options = ("-u", "root", "-l", self.nodes[rank].address, "-p", str(self.port))
        return self._program, *options, "-m", str(self._megabytes)

    def client(self, place: NodeHost, *options: str, servers: str = "") -> ClientProcess:
        """Start a client on a node (`memcached_program.py`): of all servers, or of others."""
        program = (installed("python"), "-P", _MEMCACHED_CLIENT)
        words = (servers or self.addresses, *options)
        client = ClientProcess(place, *program, *words, failure=PeerMissing)
        self.callback(client.close)
        return client


class Twemproxy(_Servers):
    """A proxy on each node (Debian's nutcracker): clients connect only to that of their own node,
    and it has the connections to all servers. It maps keys to other servers than the clients of
    memcached do, so it must be filled on its own."""

    name, port = TWEMPROXY, 22121

    def __init__(self, servers: Memcached) -> None:
        super().__init__(servers.nodes)
        self._program = system_program("nutcracker")
        self._servers = servers

    def words(self, rank: int) -> tuple[str | Path, ...]:
        place = self.nodes[rank]
        file = place.folder / "nutcracker.yml"
        servers = "".join(f"   - {each}:1\n" for each in self._servers.addresses.split(","))
        file.write_text(_CONFIGURATION.format(address=self.address(place)) + servers)
        options = ("-a", place.address, "-s", str(_STATS_PORT))
        return self._program, "-c", file, *options, "-o", place.folder / "nutcracker.log"

    def client(self, place: NodeHost) -> ClientProcess:
        """Start a client of the proxy of its own node."""
        return self._servers.client(place, "text", servers=self.address(place))


class Prototype(_Servers):
    """The prototype of a task's data plane (`data_plane_program.py`): server R of N has each N-th
    file from R on, and clients read from all."""

    name, port = PROTOTYPE, 11411

    def __init__(self, nodes: Nodes, shape: Shape, source: Path) -> None:
        super().__init__(nodes)
        self._size = shape.file_bytes
        paths = (f"{source}/{path}" for path in shape.paths())
        self._paths = write_list(paths, nodes.folder / "prototype-paths")
        self._sums = [nodes.folder / f"prototype-sums-{rank}" for rank in range(len(nodes))]

    def words(self, rank: int) -> tuple[str | Path, ...]:
        served = (self.address(self.nodes[rank]), self._sums[rank], self._paths)
        program = (sys.executable, "-P", PROTOTYPE_PROGRAM)
        return *program, "serve", *served, str(rank), str(len(self.nodes))

    def client(self, place: NodeHost) -> ClientProcess:
        sums, program = ",".join(map(str, self._sums)), (sys.executable, "-P", PROTOTYPE_PROGRAM)
        client = ClientProcess(place, *program, "read", self.addresses, sums, str(self._size))
        self.callback(client.close)
        return client


def tcp_bytes_per_s(sender: NodeHost, receiver: NodeHost, seconds: float) -> float:
    """The rate at which the receiver gets bytes from the sender over one connection, measured by
    iperf3 for some seconds (at least one)."""
    program, port = system_program(IPERF3), 5201
    words = ["-s", "-1", "-B", sender.address, "-p", str(port)]
    server = sender.start(program, *words, out=subprocess.DEVNULL)
    try:
        listen_at(sender, port, IPERF3)
        words = ["-c", sender.address, "-p", str(port), "-R", "-J", "-t", str(max(seconds, 1))]
        done = receiver.run(program, *words, check=False)
    finally:
        end(server)
    if done.returncode:
        raise PeerMissing(f"iperf3 ended with {done.returncode}: {done.stdout[-300:]}")
    bits_per_s: float = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
    return bits_per_s / 8
