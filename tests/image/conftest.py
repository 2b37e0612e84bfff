"""The image of `deploy/Dockerfile`, and a network in which a cluster's names lead to loopback."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.image.dockerfile import Stage, build
from tests.test_house import TREE
from tests.waiting import wait_until

BUILD = TREE / "build" / "image"


@pytest.fixture(scope="session")
def image() -> Stage:
    """All steps of the Dockerfile have been run, with this tree as their context."""
    if os.geteuid() != 0:
        pytest.fail("only root can run the steps of an image: sudo make test-image")
    return build((TREE / "deploy/Dockerfile").read_text(), TREE, BUILD / "stages")


@dataclass(frozen=True, slots=True)
class Network:
    """A network namespace: ports are those of the manifests, whatever this machine listens at."""

    holder: int
    """A process in it."""
    hosts: Path
    """A file for `/etc/hosts` with the names of Services, at the address of loopback."""

    def command(self, *words: str) -> list[str]:
        """A command in this network."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *words]

    @contextmanager
    def running(
        self, words: list[str], log: Path, port: int, environment: dict[str, str] | None = None
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A program that listens at a port of loopback; it ends with the `with`."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command("setpriv", "--pdeathsig", "KILL", *words),
                env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        connect = self.command("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")

        def listens_or_has_ended() -> bool:
            tried = subprocess.run(connect, check=False, stderr=subprocess.DEVNULL)
            return tried.returncode == 0 or process.poll() is not None

        try:
            wait_until(listens_or_has_ended, otherwise=lambda: log.read_text(errors="replace"))
            assert process.poll() is None, log.read_text(errors="replace")
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """The network of the tests. Processes in it keep it."""
    hosts = tmp_path_factory.mktemp("network") / "hosts"
    names = ("localhost", "diesel-redis.diesel.svc", "diesel-server.diesel.svc", "objects")
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in names))
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c",
         "ip link set lo up && echo up && exec sleep infinity"],
        stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        try:
            yield Network(holder.pid, hosts)
        finally:
            holder.kill()
