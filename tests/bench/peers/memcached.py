"""A memcached on each node of a task, with a client of all of them.

The servers have the same memory as our masters, and use the same network and machine."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.peers.nodes import NodeHost, Nodes, end
from tests.server.program import until

from ..samples import PeerMissing
from . import DEADLINE_S, installed

NAME = "memcached"
PORT = 11211
_PROGRAM = Path(__file__).with_name("memcached_program.py")


class Cluster:
    """The servers, one on each node, which share `memory_bytes`."""

    def __init__(self, nodes: Nodes, memory_bytes: int) -> None:
        found = shutil.which("memcached", path="/usr/local/bin:/usr/bin:/usr/sbin")
        if found is None:
            raise PeerMissing("memcached is not installed")
        installed("python")
        self._program = found
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
        end(self._servers[rank])

    def run(self, place: NodeHost, order: Mapping[str, object]) -> dict[str, float]:
        """Run a client on a node with one command, and return its answer
        (`memcached_program.py`)."""
        done = place.run(
            *(installed("python"), "-P", _PROGRAM, self.servers),
            said=json.dumps(order) + "\n", check=False, timeout_s=DEADLINE_S,
        )  # fmt: skip
        if done.returncode:
            raise PeerMissing(f"its client ended with {done.returncode}: {done.stderr[-300:]}")
        report: dict[str, float] = json.loads(done.stdout)
        return report

    def start_client(
        self, place: NodeHost, order: Mapping[str, object]
    ) -> "subprocess.Popen[bytes]":
        """Start a client on a node, for several at once; `answer` waits for its end."""
        process = place.start(
            *(installed("python"), "-P", _PROGRAM, self.servers), stdin=subprocess.PIPE
        )
        self._stack.callback(end, process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.close()
        return process


def answer(process: "subprocess.Popen[bytes]") -> dict[str, float]:
    """The answer of a client that `start` has started."""
    assert process.stdout is not None
    line = process.stdout.read()
    if process.wait(DEADLINE_S):
        raise PeerMissing(f"its client ended with {process.returncode}")
    report: dict[str, float] = json.loads(line)
    return report
