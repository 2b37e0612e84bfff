"""The image's programs work as the manifests start them.

The server runs as in the overlay `with-redis`: its command, its variables from the ConfigMap and
the Secrets, its user, a root that is read-only but for the volumes, the certificate in its
Secret's folder with its modes, and Redis started by the command of its StatefulSet. An S3 server
of moto holds the bucket.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.manifests import KUBERNETES, container, environment, render
from tests.deploy.test_kubernetes_page import blocks
from tests.image.dockerfile import ImageError, Stage, build, parse
from tests.kubernetes.fields import Json, items, text
from tests.storage.objects.s3_server import credentials, without_proxies
from tests.test_house import TREE
from tests.waiting import wait_until

BUILD = TREE / "build" / "image"
KEY = re.compile(r"diesel-key-1:\S+")
ENDPOINT = "http://objects:5000"  # moto takes the first part of a longer name for a bucket
PASSWORD = "of-redis"  # noqa: S105
URL = "diesel+tls://diesel-server.diesel.svc:9300"


@pytest.fixture(scope="module")
def image() -> Stage:
    if os.geteuid() != 0:
        pytest.fail("only root can run the steps of an image: sudo make test-image")
    return build((TREE / "deploy/Dockerfile").read_text(), TREE, BUILD / "stages")


@dataclass(frozen=True, slots=True)
class Network:
    """A network namespace: ports are those of the manifests, even if this machine uses them."""

    holder: int
    """A process in the namespace."""
    hosts: Path
    """A file for `/etc/hosts` with the names of Services, at the address of loopback."""

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *words]

    @contextmanager
    def running(
        self, words: list[str], log: Path, port: int, environment: dict[str, str] | None = None
    ) -> Iterator["subprocess.Popen[bytes]"]:
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


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
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


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done


def test_the_image_runs_every_program_as_a_user_without_rights(image: Stage) -> None:
    assert image.entry_point == ["diesel-server"]
    seen = run(image.command("sh", "-c", "id -u; id -g; ls /; command -v pip python"))
    assert seen.stdout.split()[:2] == ["10000", "10000"]
    assert "wheels" not in seen.stdout.split()
    for program in ("diesel-server", "dlcmd", "diesel-csi", "diesel-operator"):
        shown = run(image.command(program, "--help", environment={"HOME": "/tmp"}))
        assert shown.stdout.startswith(f"Usage: {program}")
    run(image.command("sh", "-c", "command -v fusermount3 mount umount sleep"))


def test_an_unknown_step_is_an_error() -> None:
    with pytest.raises(ImageError, match="unknown instruction ADD"):
        parse("FROM python:3.13-slim\nADD x /x\n")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    (script,) = [each for each in blocks("sh") if "openssl req" in each]
    done = subprocess.run(["sh", "-ec", script], cwd=folder, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def trusting(image: Stage, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    (dockerfile,) = blocks("dockerfile")
    context = tmp_path_factory.mktemp("context")
    shutil.copy(certificates / "ca.crt", context)
    first = parse(dockerfile)[0]
    assert first.name == "FROM"
    made = build(dockerfile, context, BUILD / "trusting", {first.text: image})
    assert made.user == image.user
    return made


@dataclass(frozen=True, slots=True)
class Deployed:
    image: Stage
    network: Network
    account: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes]"

    def run(self, *words: str, **changes: str) -> str:
        """Run a command in a container with a read-only root, as the image's user. Returns its
        output."""
        return in_container(self.image, self.network, *words, environment=self.account | changes)


def in_container(image: Stage, network: Network, *words: str, environment: dict[str, str]) -> str:
    binds = {network.hosts: "/etc/hosts"}
    command = image.command(*words, environment=environment, writable=["/tmp"], binds=binds)
    return run(network.command(*command)).stdout


def settings(objects: list[Json], name: str) -> dict[str, str]:
    """The variables of a container, with the endpoint of the bucket besides."""
    given = credentials(ENDPOINT)
    secrets = {
        "diesel-store": {name: given[name] for name in given if "KEY" in name},
        "diesel-redis": {"password": PASSWORD},
    }
    return {**environment(objects, container(objects, name), secrets), "AWS_ENDPOINT_URL": ENDPOINT}


@pytest.fixture(scope="module")
def deployed(
    trusting: Stage, network: Network, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    objects = render(KUBERNETES / "overlays/with-redis")
    one = container(objects, "server")
    tls = folder / "tls"
    tls.mkdir()
    for name in ("tls.crt", "tls.key"):
        shutil.copy(certificates / name, tls)
        os.chown(tls / name, 0, 10000)  # as fsGroup and defaultMode make it
        (tls / name).chmod(0o440)
    redis = container(objects, "redis")
    for place in ("data", "run"):
        (folder / place).mkdir()
    words = [
        str(word).replace("/data", str(folder / "data")).replace("/run/redis", str(folder / "run"))
        for word in items(redis, "command")
    ]
    secrets = {"diesel-redis": {"password": PASSWORD}}
    of_redis = {**os.environ, **environment(objects, redis, secrets)}
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "5000"]
    writable = [text(each, "mountPath") for each in items(one, "volumeMounts")]
    command = trusting.command(
        *map(str, items(one, "command")),
        environment=settings(objects, "server"),
        writable=[place for place in writable if place != "/etc/diesel/tls"],
        binds={network.hosts: "/etc/hosts", tls: "/etc/diesel/tls"},
    )
    admin, log = settings(objects, "admin"), folder / "server.log"
    with (
        network.running(words, folder / "redis.log", 6379, of_redis),
        network.running(moto, folder / "moto.log", 5000, without_proxies()),
    ):
        bucket = admin["DIESEL_SERVER_STORE"].removeprefix("s3://").partition("/")[0]
        run(network.command("curl", "-sf", "-X", "PUT", f"http://127.0.0.1:5000/{bucket}"))
        add = ("dlcmd", "user", "add", "root", "--admin")
        (key,) = KEY.findall(in_container(trusting, network, *add, environment=admin))
        with network.running(command, log, 9400) as process:
            root = {"HOME": "/tmp", "DIESEL_URL": URL, "DIESEL_USER": "root", "DIESEL_KEY": key}
            yield Deployed(trusting, network, root, log, process)
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
            assert PASSWORD not in log.read_text()
            assert KEY.search(log.read_text()) is None


def test_a_put_and_a_get_through_the_server_as_the_manifests_start_it(deployed: Deployed) -> None:
    status = Path(f"/proc/{deployed.process.pid}/status").read_text()
    assert re.search(r"^Uid:\s+10000\s+10000", status, re.MULTILINE)
    run(deployed.network.command("curl", "-sf", "http://127.0.0.1:9400/healthz"))
    (key,) = KEY.findall(deployed.run("dlcmd", "user", "add", "trainer"))
    deployed.run("dlcmd", "grant", "pets", "trainer", "admin")
    trainer = {"DIESEL_USER": "trainer", "DIESEL_KEY": key}
    deployed.run("dlcmd", "put", "/etc/apt", "pets", **trainer)
    assert "sources.list" in deployed.run("dlcmd", "ls", "pets", **trainer)
    script = "dlcmd get pets /tmp/pets && cat /tmp/pets/sources.list"
    assert "trixie" in deployed.run("sh", "-ec", script, **trainer)
    assert "warning" not in deployed.log.read_text()
    script = "touch /tmp/x && ! touch /etc/x 2>/dev/null && ! touch /var/cache/x 2>/dev/null"
    deployed.run("sh", "-ec", script)  # such a root is read-only


@pytest.mark.fuse
def test_the_image_mounts_as_root(deployed: Deployed) -> None:
    """A mount pod is privileged, too; the server's account is the administrator's."""
    deployed.run("dlcmd", "put", "/etc/apt", "mounted")
    script = "dlcmd mount mounted /mnt && cat /mnt/sources.list && dlcmd umount /mnt"
    command = deployed.image.command(
        "sh", "-ec", script, user="0:0", environment=deployed.account,
        binds={deployed.network.hosts: "/etc/hosts"},
    )  # fmt: skip
    assert "trixie" in run(deployed.network.command(*command)).stdout
