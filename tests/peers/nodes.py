"""Nodes of a task on one machine: network namespaces at a bridge, and a place for shared services.

    with Nodes(folder, 4) as nodes:
        nodes.start_redis()
        nodes[0].run("dlcmd", "mount", ...)     # on that node: its network, its user's folders
        nodes[1].cut()

A node has an address, a link that can be cut or slowed down, and XDG folders of its own. All
nodes see the same file systems. Stores, servers and Redis run in `shared`. However a test ends,
processes on nodes are killed, their mounts are detached, and the namespaces are removed; the
next run removes those of a run that was killed.

If namespaces are not permitted, nodes are loopback addresses, which is logged once, and tests
that cut or slow down links are skipped (`needs_links`).

`entered` changes the network of the thread that calls it. Use the rest from one thread.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import pytest
from redis import Redis

from tests.processes import command_lines, is_running
from tests.waiting import until

from ..storage.metadata.redis_servers import program

TREE = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
RUN_S = 60.0
REDIS_PORT = 6379
_NAMESPACES = Path("/run/netns")
_PREFIX = "dfs"
_CLONE_NEWNET = 0x40000000
_UNUSED_MAC = "02:00:00:00:00:fe"  # a hardware address that no link has
_MARK = "NODES_OF"  # in the environment of all that runs in a node
_serial = itertools.count()


@functools.cache
def has_namespaces() -> bool:
    """Return whether nodes can be network namespaces here. If not, log the reason once."""
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        _sweep()
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        text = f"nodes are loopback addresses: no network namespace can be made ({reason.strip()})"
        print(text, file=sys.stderr)
        warnings.warn(pytest.PytestWarning(text), stacklevel=2)
        return False
    _ip("netns", "del", name)
    return True


def needs_links() -> None:
    if not has_namespaces():
        pytest.skip("links cannot be cut here: no network namespaces")


@dataclass(frozen=True, slots=True)
class Socket:
    """A TCP socket as `ss` shows it; `peer` is empty if it listens."""

    local: str
    port: int
    peer: str
    peer_port: int
    pid: int  # of a program that has it; 0 for none


class NodeHost:
    def __init__(self, name: str, address: str, folder: Path, runtime: Path, link: str) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._link = link  # the switch's end of its link
        self._switch = ""
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("DIESEL_")}
        self.environment[_MARK] = name
        self.environment["PATH"] = f"{PROGRAMS}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        self.environment["PYTHONPATH"] = str(TREE)
        self.environment["HOME"] = str(folder)
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            self.environment[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        for variable in ("SLURM_NODEID", "SLURM_NNODES", "GROUP_RANK", "GROUP_WORLD_SIZE"):
            self.environment.pop(variable, None)
        self.environment["XDG_RUNTIME_DIR"] = str(runtime)
        for each in (folder, runtime):
            each.mkdir(parents=True, exist_ok=True)
            each.chmod(0o700)

    # Programs

    def command(self, *words: str | Path) -> list[str]:
        inside = ["nsenter", f"--net={_NAMESPACES / self.name}"] if self._switch else []
        return [*inside, *map(str, words)]

    def start(
        self,
        *words: str | Path,
        out: int | IO[bytes] = subprocess.PIPE,
        log: IO[bytes] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self.command(*words),
            env=self.environment,
            cwd=self.folder,
            stdin=stdin,
            stdout=out,
            stderr=log,
        )

    def run(
        self, *words: str | Path, check: bool = True, timeout_s: float = RUN_S
    ) -> "subprocess.CompletedProcess[str]":
        """Processes that it leaves in the background keep none of our pipes open."""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        ):
            done = subprocess.run(
                self.command(*words),
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                timeout=timeout_s,
                check=False,
            )
            for file in (out, errors):
                file.seek(0)
            whole = subprocess.CompletedProcess(
                done.args, done.returncode, out.read(), errors.read()
            )
        assert not check or not done.returncode, whole
        return whole

    def dlcmd(
        self, *words: str | Path, timeout_s: float = RUN_S
    ) -> "subprocess.CompletedProcess[str]":
        return self.run("dlcmd", "-q", *words, timeout_s=timeout_s)

    def pids(self) -> list[int]:
        if self._switch:
            words = _ip("netns", "pids", self.name).split()
            return [pid for pid in map(int, words) if pid != os.getpid()]
        mark = f"{_MARK}={self.name}".encode()
        return [pid for pid, _ in command_lines() if mark in _environment(pid)]

    def matching(self, text: str) -> list[int]:
        words, here = text.replace(" ", "\0").encode(), self.pids()
        return [pid for pid, line in command_lines() if pid in here and words in line]

    def kill(self) -> None:
        """End all processes here, as a crash of the node does."""
        for _ in range(50):
            pids = [pid for pid in self.pids() if is_running(pid)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.02)
        raise AssertionError(f"what runs in {self.name} does not end: {pids}")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile belong to this place, and stay here."""
        if not self._switch:
            yield
            return
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_network(_NAMESPACES / self.name)
            yield
        finally:
            _set_network(Path(f"/proc/self/fd/{own}"))
            os.close(own)

    # Sockets

    def sockets(self, *, listening: bool = False) -> list[Socket]:
        """Return those that listen, or those of established connections."""
        options = ["-l"] if listening else ["state", "established"]
        text = self.run("ss", "-H", "-t", "-n", "-p", *options).stdout
        found = []
        for line in text.splitlines():
            ends = re.findall(r"(\S+):(\d+|\*)(?=\s|$)", line)
            (local, port), (peer, peer_port) = ends[0], ends[1]
            held = re.search(r"pid=(\d+)", line)
            there = "" if peer_port == "*" else peer.strip("[]")
            number = int(peer_port) if there else 0
            pid = int(held[1]) if held else 0
            found.append(Socket(local.strip("[]"), int(port), there, number, pid))
        if self._switch:
            return found
        ours = set(self.pids())
        return [each for each in found if each.local == self.address or each.pid in ours]

    # The link

    def cut(self) -> None:
        """Drop all packets from now on, and give no end of a connection a notice."""
        self._of_switch("link", "set", self._link, "down")

    def restore(self) -> None:
        self._of_switch("link", "set", self._link, "up")

    def block(self, other: "NodeHost") -> None:
        """Drop all packets from here to the other node, without a notice."""
        needs_links()
        self.run(
            *("ip", "neigh", "replace", other.address, "lladdr", _UNUSED_MAC),
            *("dev", "eth0", "nud", "permanent"),
        )

    def unblock(self, other: "NodeHost") -> None:
        self.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def limit_bandwidth(self, kbit_s: int) -> None:
        """Limit the rate in both directions; 0 for no limit."""
        needs_links()
        for prefix, device in ((self.command(), "eth0"), (self._switch_command(), self._link)):
            if kbit_s:
                rate = ["rate", f"{kbit_s}kbit", "burst", "16kb", "latency", "400ms"]
                words = ["replace", "dev", device, "root", "tbf", *rate]
            else:
                words = ["del", "dev", device, "root"]
            _checked([*prefix, "tc", "qdisc", *words], self.environment)

    def join_switch(self, switch: str) -> None:
        """The place is separate from now on."""
        _ip("netns", "add", self.name)
        self._switch = switch
        _ip("-n", self.name, "link", "set", "lo", "up")
        if self.name == switch:
            _ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
            device = "br0"
        else:
            device = "eth0"
            ends = ("netns", switch, "type", "veth", "peer", "name", device, "netns", self.name)
            _ip("link", "add", "name", self._link, *ends)
            _ip("-n", switch, "link", "set", self._link, "master", "br0", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", device)
        _ip("-n", self.name, "link", "set", device, "up")

    def remove(self) -> None:
        self.kill()
        for point in mounts_below(self.folder):
            subprocess.run(["umount", "-l", point], check=False)
        if self._switch:
            _ip("netns", "del", self.name)
            self._switch = ""

    def _switch_command(self) -> list[str]:
        return ["nsenter", f"--net={_NAMESPACES / self._switch}"]

    def _of_switch(self, *words: str) -> None:
        needs_links()
        _ip("-n", self._switch, *words)


class Nodes:
    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.runtime = Path(
            tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        )  # paths of sockets are short
        name = f"{_PREFIX}{os.getpid()}-{next(_serial)}"
        net = "10.77.0" if has_namespaces() else f"127.77.{os.getpid() % 250 + 1}"
        self.shared = NodeHost(f"{name}-all", f"{net}.1", folder / "all", self.runtime / "all", "")
        self.nodes = [
            NodeHost(f"{name}-{i}", f"{net}.{10 + i}", folder / f"node{i}", self.runtime / str(i),
                  f"n{i}")
            for i in range(count)
        ]  # fmt: skip
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.runtime, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            for place in (self.shared, *self.nodes):
                self._stack.callback(place.remove)
                if has_namespaces():
                    place.join_switch(self.shared.name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, rank: int) -> NodeHost:
        return self.nodes[rank]

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[NodeHost]:
        return iter(self.nodes)

    # What all share

    @property
    def redis_url(self) -> str:
        return f"redis://{self.shared.address}:{REDIS_PORT}"

    def start_redis(self) -> Redis:
        """Start Redis at `redis_url`. Returns a client of it for the test itself."""
        folder = self.shared.folder / "redis"
        folder.mkdir()
        socket = self.runtime / "redis"
        options = {
            "bind": self.shared.address,
            "port": str(REDIS_PORT),
            "protected-mode": "no",
            "unixsocket": str(socket),
            "dir": str(folder),
            "save": '""',
            "logfile": str(folder / "log"),
        }
        config = folder / "redis.conf"
        config.write_text("".join(f"{key} {text}\n" for key, text in options.items()))
        process = self.shared.start(program("redis-server"), config, out=subprocess.DEVNULL)
        self._stack.callback(end, process)
        client = Redis(unix_socket_path=str(socket), socket_timeout=10)
        self._stack.callback(client.close)
        until(lambda: socket.exists() and bool(client.ping()), "redis-server")
        return client

    def connections(self) -> list[tuple[str, str, int]]:
        """Return the connector, the acceptor and the port of each TCP connection between nodes. An
        end counts as the acceptor's if its node listens on its port."""
        addresses = {node.address for node in self.nodes}
        made: list[tuple[str, str, int]] = []
        for node in self.nodes:
            listens = {each.port for each in node.sockets(listening=True)}
            made += [
                (node.address, each.peer, each.peer_port)
                for each in node.sockets()
                if each.peer in addresses - {node.address} and each.port not in listens
            ]
        return sorted(made)


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait(20)
    for pipe in (process.stdout, process.stdin, process.stderr):
        if pipe is not None:
            pipe.close()


def mounts_below(folder: Path) -> list[str]:
    """Mount points in a folder, the innermost first."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    points = [line.split()[1] for line in lines]
    return sorted((each for each in points if each.startswith(f"{folder}/")), reverse=True)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _sweep() -> None:
    """Remove the namespaces of runs that were killed, their processes, and their folders."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        if not is_running(int(left.name.removeprefix(_PREFIX).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    for name in [each.name for each in _NAMESPACES.glob(f"{_PREFIX}[0-9]*-*")]:
        owner = int(name.removeprefix(_PREFIX).partition("-")[0])
        if owner != os.getpid() and not is_running(owner):
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return _checked(["ip", *words], {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"})


def _checked(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=RUN_S
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def _set_network(path: Path) -> None:
    """Move this thread to another network (Python 3.11 has no call for it)."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(descriptor)
