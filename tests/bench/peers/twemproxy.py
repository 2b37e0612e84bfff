"""twemproxy (Debian's nutcracker), a proxy of memcached, on each node: clients connect to that of
their own node alone, and it has the connections to all servers."""

import subprocess
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.peers.nodes import NodeHost, Nodes, end
from tests.server.program import until

from ..client_process import ClientProcess
from . import memcached, system_program

NAME = "memcached through twemproxy"
PORT, STATS_PORT = 22121, 22222
_CONFIGURATION = """
bench:
  listen: {address}
  hash: fnv1a_64
  distribution: ketama
  preconnect: true
  timeout: 20000
  servers:
"""


class Proxies:
    """A proxy on each node, of a cluster. It gives keys to other servers than the cluster's own
    clients do, so it must be filled on its own."""

    def __init__(self, nodes: Nodes, cluster: memcached.Cluster) -> None:
        self._program = system_program("nutcracker")
        self._nodes = nodes
        self._cluster = cluster
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for place in self._nodes:
                file = place.folder / "nutcracker.yml"
                servers = "".join(f"   - {each}:1\n" for each in self._cluster.servers.split(","))
                file.write_text(_CONFIGURATION.format(address=self._address(place)) + servers)
                words = ("-c", file, "-a", place.address, "-s", str(STATS_PORT))
                proxy = place.start(
                    *(self._program, *words, "-o", place.folder / "nutcracker.log"),
                    out=subprocess.DEVNULL,
                )
                stack.callback(end, proxy)
            for place in self._nodes:
                until(lambda place=place: _listens(place), f"{NAME} on {place.name}")  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def client(self, place: NodeHost) -> ClientProcess:
        """Start a client of the proxy of its own node."""
        return self._cluster.client_of(place, self._address(place), "text")

    def _address(self, place: NodeHost) -> str:
        return f"{place.address}:{PORT}"


def _listens(place: NodeHost) -> bool:
    return any(each.port == PORT for each in place.sockets(listening=True))
