"""Stand-ins for a cluster: an API server that keeps pods, Secrets and ConfigMaps, and a kubelet
that runs the commands of pods as processes of this machine.

The API server answers only the calls that the plugin makes (create, get, list by label,
merge-patch, delete), by the rules of Kubernetes' API, and refuses calls that the Role in the
manifests does not allow. The kubelet has no containers: a pod's command runs with the pod's
environment in a mount namespace of its own, so its mounts are real, and reach the node only by
propagation.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from lightkube import Client, KubeConfig

from tests.cli.conftest import program_environment
from tests.deploy.manifests import KUBERNETES, read
from tests.kubernetes.fields import Json, at, fields, items, text, texts

NAMESPACE = ("unshare", "--mount", "--propagation", "unchanged")
"""A container's mounts are its own, but for those below a shared mount (`Bidirectional`)."""

KINDS = {"pods": "Pod", "secrets": "Secret", "configmaps": "ConfigMap"}
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def rights() -> set[tuple[object, object]]:
    access = read(KUBERNETES / "base/csi/access.yaml")
    (role,) = [each for each in access if each["kind"] == "Role"]
    return {
        (resource, verb)
        for rule in items(role, "rules")
        for resource in items(rule, "resources")
        for verb in items(rule, "verbs")
    }


class ApiStandIn:
    """The objects of one namespace, and the processes of its pods. Any thread."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}  # by plural and name
        self.used: set[tuple[object, object]] = set()
        """The rights that were used."""
        self._rights = rights()
        self.made: list[Json] = []  # every object as it was created
        self._numbers = itertools.count(1)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                code, answer = cluster._answer(self.command, self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # as http.server

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.kubeconfig: Json = {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for name in list(self._processes):
            self._end_pod(name)

    @contextmanager
    def client(self) -> Iterator[Client]:
        config = KubeConfig.from_dict(self.kubeconfig)
        with Client(config, namespace="diesel-system") as client:
            yield client

    def put(self, plural: str, body: Json) -> Json:
        metadata = {**fields(body, "metadata"), "uid": f"uid-{next(self._numbers)}"}
        made = {**body, "metadata": metadata, "kind": KINDS[plural], "apiVersion": "v1"}
        self.objects[plural, text(metadata, "name")] = made
        return made

    def kill_pod(self, name: str) -> None:
        """Kill all processes of a pod, as happens when its node has no memory left."""
        os.killpg(self._processes[name].pid, signal.SIGKILL)

    def _answer(self, verb: str, path: str, body: Json | None) -> tuple[int, Json]:
        parts = urlsplit(path)
        _, _, _, _, namespace, plural, *rest = parts.path.split("/")
        name = rest[0] if rest else ""
        assert namespace == "diesel-system"
        with self._lock:
            right = plural, VERBS.get(verb, "get" if name else "list")
            if right not in self._rights:
                return _status(403, "Forbidden", f"the plugin may not {right[1]} {plural}")
            self.used.add(right)
            match verb:
                case "POST":
                    assert body is not None
                    return self._create(plural, body)
                case "GET" if not name:
                    query = parse_qs(parts.query)
                    labels = dict(each.split("=") for each in query["labelSelector"][0].split(","))
                    found = [
                        each
                        for (kind, _), each in self.objects.items()
                        if kind == plural
                        and labels.items() <= texts(each, "metadata", "labels").items()
                    ]
                    return 200, {"kind": "List", "apiVersion": "v1", "items": found, "metadata": {}}
                case _ if (plural, name) not in self.objects:
                    return _status(404, "NotFound", f'{plural} "{name}" not found')
                case "GET":
                    if plural == "pods":
                        self._refresh(name)
                case "PATCH":
                    there = self.objects[plural, name]
                    for field in ("metadata", "data"):
                        there[field] = {**fields(there, field), **fields(body, field)}
                case "DELETE":
                    if plural == "pods":
                        self._end_pod(name)
                        for key, each in list(self.objects.items()):  # the garbage collector
                            if at(each, "metadata", "ownerReferences", 0, "name") == name:
                                del self.objects[key]
                    return 200, self.objects.pop((plural, name))
            return 200, self.objects[plural, name]

    def _create(self, plural: str, body: Json) -> tuple[int, Json]:
        name = text(body, "metadata", "name")
        if (plural, name) in self.objects:
            return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        self.made.append(body)
        made = self.put(plural, body)
        if plural == "pods":
            self._run_pod(name, made)
        return 201, made

    def _run_pod(self, name: str, pod: Json) -> None:
        container = fields(pod, "spec", "containers", 0)
        environment = {text(each, "name"): text(each, "value") for each in items(container, "env")}
        if secret := text(container, "envFrom", 0, "secretRef", "name"):
            environment |= texts(self.objects["secrets", secret], "stringData")
        program, *arguments = map(str, items(container, "command"))
        assert program == "dlcmd"
        self._processes[name] = subprocess.Popen(
            [*NAMESPACE, sys.executable, "-m", "dlcmd", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**program_environment(), **environment},
            process_group=0,
        )
        pod["status"] = {"phase": "Running"}

    def _refresh(self, name: str) -> None:
        process = self._processes.get(name)
        if process is None or process.poll() is None:
            return
        assert process.stderr is not None
        log = "" if process.stderr.closed else process.stderr.read().decode()
        process.stderr.close()
        if log:
            ended = {"terminated": {"exitCode": process.returncode, "message": log[-2048:]}}
            status = {"name": "mount", "state": ended, "image": "", "imageID": "", "ready": False}
            statuses = [{**status, "restartCount": 0}]
            self.objects["pods", name]["status"] = {
                "phase": "Failed",
                "containerStatuses": statuses,
            }

    def _end_pod(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.terminate()
            process.wait(60)
            assert process.stderr is not None
            process.stderr.close()


def _status(code: int, reason: str, message: str) -> tuple[int, Json]:
    return code, {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": message, "metadata": {},
    }  # fmt: skip
