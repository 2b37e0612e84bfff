"""The nodes that tests of a task run on: which of them reach each other, and that nothing of them
is left."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import is_running
from tests.waiting import until

from . import nodes as harness
from .nodes import NodeHost, Nodes, has_namespaces, needs_links

PORT = 9400


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path, 2) as made:
        yield made


def answering(place: NodeHost) -> socket.socket:
    with place.entered():
        listener = socket.create_server((place.address, PORT))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(bytes(64 << 10))

    threading.Thread(target=serve, daemon=True).start()
    return listener


def fetch_s(origin: NodeHost, target: NodeHost, timeout_s: float = 5.0) -> float:
    start_s = time.monotonic()
    with origin.entered():
        connection = socket.create_connection((target.address, PORT), timeout_s)
    with connection:
        got = 0
        while piece := connection.recv(1 << 16):
            got += len(piece)
    assert got == 64 << 10
    return time.monotonic() - start_s


def test_nodes_reach_each_other_and_the_shared_services(nodes: Nodes) -> None:
    with nodes.start_redis() as client:
        client.set("key", "text")
        for node in nodes:
            answer = node.run("redis-cli", "-u", nodes.redis_url, "get", "key")
            assert answer.stdout.strip() == "text"
    listeners = [answering(place) for place in nodes]
    try:
        assert fetch_s(nodes[0], nodes[1]) < 2
        assert fetch_s(nodes[1], nodes[0]) < 2
        listening = nodes[0].sockets(listening=True)
        assert [(each.local, each.port) for each in listening] == [(nodes[0].address, PORT)]
        with nodes[1].entered():
            listeners.append(socket.create_server((nodes[1].address, PORT + 1)))
        with nodes[0].entered():
            to = (nodes[1].address, PORT + 1)
            listeners += [socket.create_connection(to, 5) for _ in range(3)]
        assert nodes.connections() == [(nodes[0].address, *to)] * 3
    finally:
        for listener in listeners:
            listener.close()


def test_a_link_can_be_cut_mended_and_narrowed(nodes: Nodes) -> None:
    needs_links()
    listener = answering(nodes[1])
    try:
        nodes[1].cut()
        with pytest.raises(OSError, match=r"timed out|unreachable"):
            fetch_s(nodes[0], nodes[1], 0.3)
        nodes[1].restore()
        assert fetch_s(nodes[0], nodes[1]) < 2
        nodes[0].block(nodes[1])
        with pytest.raises(OSError, match="timed out"):
            fetch_s(nodes[0], nodes[1], 0.3)
        assert nodes[0].run("ip", "neigh").stdout
        nodes[0].unblock(nodes[1])
        assert fetch_s(nodes[0], nodes[1]) < 2
        nodes[1].limit_bandwidth(1000)
        assert 0.2 < fetch_s(nodes[0], nodes[1]) < 3
        nodes[1].limit_bandwidth(0)
        assert fetch_s(nodes[0], nodes[1]) < 0.2
    finally:
        listener.close()


def test_nothing_is_left_of_nodes(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2) as nodes:
        nodes.start_redis()
        nodes[0].run("sh", "-c", "setsid sleep 1000 & exit 0")  # a daemon, which has no parent
        until(lambda: nodes[0].matching("sleep 1000"), "the daemon")
        pids = [pid for place in (*nodes, nodes.shared) for pid in place.pids()]
        assert len(pids) == 2
        names = [place.name for place in (*nodes, nodes.shared)]
        runtime = nodes.runtime
    assert not any(is_running(pid) for pid in pids)
    assert not runtime.exists()
    assert not any(Path("/run/netns", name).exists() for name in names)


def test_the_next_run_removes_the_remains_of_a_killed_one(tmp_path: Path) -> None:
    needs_links()
    code = (
        "import os, signal, sys, pathlib\n"
        "from tests.peers.nodes import Nodes\n"
        "nodes = Nodes(pathlib.Path(sys.argv[1]), 1).__enter__()\n"
        "nodes[0].run('sh', '-c', 'setsid sleep 1000 & exit 0')\n"
        "print(nodes[0].name, nodes.runtime, *nodes[0].pids(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=harness.TREE, stdout=subprocess.PIPE, text=True, check=False, timeout=60,
    )  # fmt: skip
    name, runtime, pid = done.stdout.split()
    assert Path("/run/netns", name).exists()
    assert is_running(int(pid))
    has_namespaces.cache_clear()
    assert has_namespaces()
    assert not Path("/run/netns", name).exists()
    assert not Path(runtime).exists()
    until(lambda: not is_running(int(pid)), "its end")
