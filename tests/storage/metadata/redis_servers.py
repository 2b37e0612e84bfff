"""Real Redis processes for tests: by themselves, under sentinels, and as a cluster.

They listen on sockets and loopback ports of their own, keep their files in a temporary folder, and
end with this process, however it ends.
"""

import atexit
import functools
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.waiting import wait_until

START_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], object], what: str, seconds: float = START_S) -> None:
    """An error of Redis counts as false."""

    def holds() -> object:
        try:
            return true()
        except (RedisError, OSError):
            return False

    wait_until(holds, seconds, lambda: f"waited in vain for: {what}")


def once(work: Callable[[], object]) -> Callable[[], None]:
    left = [work]

    def run() -> None:
        if left:
            left.pop()()

    return run


def program(name: str) -> str:
    """Skips the test if the program is missing."""
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is missing")
    return found


class RedisServer:
    def __init__(
        self, folder: Path, options: Mapping[str, str] | None = None, *, port: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port
        self.socket = Path(tempfile.mkdtemp(prefix="redis-")) / "s"  # its path may not be long
        self.options = {
            "port": str(port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(folder),
            "save": "",
            "logfile": str(folder / "log"),
            "enable-debug-command": "yes",
            **(options or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        config = self.folder / "redis.conf"
        lines = [f"{key} {value or chr(34) * 2}\n" for key, value in self.options.items()]
        config.write_text("".join(lines))
        command = [program("redis-server"), str(config)]
        if threading.current_thread() is threading.main_thread():
            command[:0] = ["setpriv", "--pdeathsig", "KILL"]  # it never outlives this process
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers, "redis-server")

    def _answers(self) -> bool:
        with self.client() as client:
            return bool(client.ping())

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> Redis:
        return Redis(
            unix_socket_path=str(self.socket),
            password=self.options.get("requirepass"),
            protocol=2,
            socket_timeout=10,
        )

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def execute(client: Redis, *words: str | int | bytes) -> object:
    reply: object = client.execute_command(*words)
    return reply


class RedisCluster:
    def __init__(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        options = {
            **(more or {}),
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": "2000",
        }
        self.nodes: list[RedisServer] = []
        for i in range(3):
            own = {**options, "cluster-port": str(free_port())}
            self.nodes.append(RedisServer(folder / f"node{i}", own, port=free_port()))
        bounds = [0, 5461, 10923, 16384]
        for i, node in enumerate(self.nodes):
            client = node.client()
            execute(client, "CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
            execute(client, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            first = self.nodes[0]
            words = "127.0.0.1", first.port, first.options["cluster-port"]
            execute(client, "CLUSTER", "MEET", *words)
        for node in self.nodes:
            until(functools.partial(_is_complete, node), "the cluster")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def flush(self) -> None:
        for node in self.nodes:
            node.client().flushall()

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _is_complete(node: RedisServer) -> bool:
    info = execute(node.client(), "CLUSTER INFO")
    assert isinstance(info, dict)
    return (info["cluster_state"], info["cluster_known_nodes"]) == ("ok", "3")


@functools.cache
def shared_server() -> RedisServer:
    """A server for all tests that do not harm it; `emptied_server` empties it."""
    folder = Path(tempfile.mkdtemp(prefix="redis-shared-"))
    server = RedisServer(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.close)
    return server


def emptied_server() -> RedisServer:
    server = shared_server()
    server.client().flushall()
    return server


@functools.cache
def shared_cluster() -> RedisCluster:
    """A cluster of three masters for all tests that do not harm it."""
    folder = Path(tempfile.mkdtemp(prefix="redis-cluster-"))
    cluster = RedisCluster(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(cluster.close)
    return cluster
