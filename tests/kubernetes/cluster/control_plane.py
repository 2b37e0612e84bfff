"""Runs a real control plane of Kubernetes on loopback, for tests.

It is etcd, kube-apiserver, kube-controller-manager and kube-scheduler, as `make test-kubernetes`
built them, with certificates of an authority of its own, RBAC, and the admission that a cluster
has. There are no machines: `nodes.py` stands in for kubelets.
"""

import contextlib
import json
import ssl
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from httpx2 import Timeout
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace, ServiceAccount, ServiceAccountToken

from tests.server.certificates import Authority, Pair
from tests.storage.objects.swift_server import free_ports
from tests.waiting import wait_until

PROGRAMS = Path(__file__).resolve().parents[3] / "build" / "kubernetes"
"""Where `tests/kubernetes/build.sh` puts the programs."""

ETCD, API_SERVER = "etcd", "kube-apiserver"
CONTROLLERS, SCHEDULER = "kube-controller-manager", "kube-scheduler"
REQUEST_S = 120.0
"""How long an answer may take: a request may delete a thousand pods."""

START_S = 120.0
"""A start takes some seconds; on a busy machine, more."""


Options = dict[str, object]


class ControlPlaneProgram:
    """Used by one thread, which lives as long as the program: the kernel kills the program with
    it."""

    def __init__(self, folder: Path, name: str, options: Options) -> None:
        self._log = folder / f"{name}.log"
        words = [f"--{option}={value}" for option, value in options.items()]
        self._command = ["setpriv", "--pdeathsig", "KILL", str(PROGRAMS / name), *words]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """End it as a crash does (kill -9). It may have ended already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_lines(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]


class ControlPlane:
    """A running control plane. `kubeconfig` is that of an administrator."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = Authority(folder / "certificates", "kubernetes")
        self._serving = self._authority.issue("127.0.0.1", "kubernetes.default.svc")
        etcd, peers, *ports = (f"127.0.0.1:{port}" for port in free_ports(5))
        names = (API_SERVER, CONTROLLERS, SCHEDULER)
        self._urls = {name: f"https://{at}" for name, at in zip(names, ports, strict=True)}
        # RBAC allows everything to this group
        administrator = self._authority.issue(name="administrator", group="system:masters")
        self._context = ssl.create_default_context(cafile=str(self._authority.path))
        self._context.load_cert_chain(administrator.certificate, administrator.key)
        self.kubeconfig = self._kubeconfig_of_certificate("administrator", administrator)
        options = {
            ETCD: self._etcd(f"http://{etcd}", f"http://{peers}"),
            API_SERVER: self._api_server(f"http://{etcd}"),
            CONTROLLERS: self._controllers(),
            SCHEDULER: self._of_controllers(SCHEDULER),
        }
        self._programs = {
            name: ControlPlaneProgram(folder, name, own) for name, own in options.items()
        }

    def _etcd(self, clients: str, peers: str) -> Options:
        return {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
            "logger": "zap",
            "log-level": "warn",
        }

    def _served(self, name: str) -> Options:
        return {
            "bind-address": "127.0.0.1",
            "secure-port": self._urls[name].rpartition(":")[2],
            "tls-cert-file": self._serving.certificate,
            "tls-private-key-file": self._serving.key,
        }

    def _api_server(self, etcd: str) -> Options:
        return {
            **self._served(API_SERVER),
            "etcd-servers": etcd,
            "advertise-address": "127.0.0.1",
            "endpoint-reconciler-type": "none",  # it would refuse an address on loopback
            "service-cluster-ip-range": "10.96.0.0/16",
            "client-ca-file": self._authority.path,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",  # besides those that are on by default
            "allow-privileged": "true",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": self._serving.certificate,
            "service-account-signing-key-file": self._serving.key,
        }

    def _of_controllers(self, name: str) -> Options:
        user = f"system:{name}"
        kubeconfig = self._kubeconfig_of_certificate(name, self._authority.issue(name=user))
        return {
            **self._served(name),
            "port": 0,
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            "leader-elect": "false",
        }

    def _controllers(self) -> Options:
        return {
            **self._of_controllers(CONTROLLERS),
            "use-service-account-credentials": "true",
            "service-account-private-key-file": self._serving.key,
            "root-ca-file": self._authority.path,
            "kube-api-qps": 200,  # ten times the default, which a thousand Jobs wait for
            "kube-api-burst": 400,
            "node-monitor-period": "0.5s",  # a tenth of the default: how soon a node becomes ready
        }

    def start(self) -> None:
        """Return when all programs are ready. The caches of the controllers are filled a little
        later."""
        self._programs[ETCD].start()  # the API server waits for it
        self._programs[API_SERVER].start()
        self._wait_until_ready(API_SERVER)
        for name in (CONTROLLERS, SCHEDULER):  # side by side
            self._programs[name].start()
        self._wait_until_ready(CONTROLLERS)
        self._wait_until_ready(SCHEDULER)

    def kill(self) -> None:
        for name in (SCHEDULER, CONTROLLERS, API_SERVER, ETCD):
            self._programs[name].kill()

    def _wait_until_ready(self, name: str) -> None:
        program = self._programs[name]
        page = f"{self._urls[name]}/{'readyz' if name == API_SERVER else 'healthz'}"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._context)
        )

        def answers_or_has_ended() -> bool:
            with contextlib.suppress(OSError), opener.open(page, timeout=5):
                return True
            return not program.is_running()

        wait_until(answers_or_has_ended, START_S, program.last_lines)
        assert program.is_running(), f"{name} has ended:\n{program.last_lines()}"

    def client(self, kubeconfig: Path | None = None) -> Client:
        config = KubeConfig.from_file(kubeconfig or self.kubeconfig)
        return Client(config, timeout=Timeout(REQUEST_S), trust_env=False)

    def kubeconfig_of(self, namespace: str, account: str) -> Path:
        """A new kubeconfig with a token of a ServiceAccount, which exists."""
        request = ServiceAccountToken(metadata=ObjectMeta(), spec=TokenRequestSpec())
        with self.client() as client:
            answer = client.create(request, account, namespace=namespace)
        assert answer.status is not None
        token = answer.status.token or ""
        return self._write_kubeconfig(f"{namespace}.{account}", {"token": token}, namespace)

    def _kubeconfig_of_certificate(self, name: str, pair: Pair) -> Path:
        user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        return self._write_kubeconfig(name, user, "default")

    def _write_kubeconfig(self, name: str, user: Mapping[str, str], namespace: str) -> Path:
        cluster = {
            "server": self._urls[API_SERVER],
            "certificate-authority": str(self._authority.path),
        }
        context = {"cluster": "tests", "user": name, "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "tests", "context": context}],
            "current-context": "tests",
        }
        path = self._folder / f"{name}.{uuid.uuid4().hex[:8]}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config), encoding="utf-8")  # which YAML includes
        return path


@contextlib.contextmanager
def control_plane() -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="kubernetes-") as folder:
        running = ControlPlane(Path(folder))
        try:
            running.start()
            with running.client() as client:
                wait_for_service_account(client, "default")
            yield running
        finally:
            running.kill()


def make_namespace(client: Client) -> str:
    name = f"test-{uuid.uuid4().hex[:8]}"
    client.create(Namespace(metadata=ObjectMeta(name=name)))
    wait_for_service_account(client, name)
    return name


def wait_for_service_account(client: Client, namespace: str, name: str = "default") -> None:
    """Wait until controllers have made a token of a ServiceAccount: admission refuses pods without
    one."""

    def has_token() -> bool:
        with contextlib.suppress(ApiError):
            return bool(client.get(ServiceAccount, name, namespace=namespace).secrets)
        return False

    wait_until(has_token, START_S, lambda: f"no controller made a token of {namespace}/{name}")
