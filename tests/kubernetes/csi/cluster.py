"""Stand-ins for a cluster: an API server that keeps pods, Secrets and ConfigMaps, and a kubelet
that runs the commands of pods as processes of this machine.

The API server answers only the calls that the plugin makes (create, get, list by label,
merge-patch, delete), by the rules of Kubernetes' API, and refuses what the Role in the manifests
does not allow. The kubelet has no containers: a pod's
command runs with the pod's environment in a mount namespace of its own, so its mounts are real, and
reach the node only by propagation.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.cli.conftest import program_environment

Json = dict[str, object]
NAMESPACE = ("unshare", "--mount", "--propagation", "unchanged")
"""A container's mounts are its own, but for those below a shared mount (`Bidirectional`)."""

KINDS = {"pods": "Pod", "secrets": "Secret", "configmaps": "ConfigMap"}
ACCESS = Path(__file__).resolve().parents[3] / "deploy/kubernetes/base/csi/access.yaml"
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def rights() -> set[tuple[str, str]]:
    """What the plugin's Role allows: kinds of objects, and what may be done with them."""
    (role,) = [each for each in yaml.safe_load_all(ACCESS.read_text()) if each["kind"] == "Role"]
    return {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def inner(value: object, *path: str | int) -> object:
    """What lies at a path in a value of JSON; None where nothing does."""
    for step in path:
        if isinstance(step, int):
            value = value[step] if isinstance(value, list) and len(value) > step else None
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


class Cluster:
    """The objects of one namespace, and the processes of its pods. Any thread."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}  # by plural and name
        self.calls: list[str] = []
        self.used: set[tuple[str, str]] = set()
        """The rights that were used."""
        self._rights = rights()
        self.made: list[Json] = []  # every object as it was created
        self.hold_pods = False  # a kubelet that starts nothing
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                code, answer = cluster.answer(self.command, self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # as http.server

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """End the server and all pods."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for name in list(self._processes):
            self._end_pod(name)

    def answer(self, verb: str, path: str, body: Json | None) -> tuple[int, Json]:
        """The answer to one request."""
        parts = urlsplit(path)
        _, _, _, _, namespace, plural, *rest = parts.path.split("/")
        name = rest[0] if rest else ""
        assert namespace == "diesel-system"
        with self._lock:
            self.calls.append(f"{verb} {plural}")
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
                        and labels.items()
                        <= cast("Json", inner(each, "metadata", "labels")).items()
                    ]
                    return 200, {"kind": "List", "apiVersion": "v1", "items": found, "metadata": {}}
                case _ if (plural, name) not in self.objects:
                    return _status(404, "NotFound", f'{plural} "{name}" not found')
                case "GET":
                    self._refresh(plural, name)
                case "PATCH":
                    assert body is not None
                    for field in body.keys() & {"metadata", "data"}:
                        part = cast("Json", self.objects[plural, name][field])
                        part |= cast("Json", body[field])
                case "DELETE":
                    if plural == "pods":
                        self._end_pod(name)
                        for key, each in list(self.objects.items()):  # the garbage collector
                            if inner(each, "metadata", "ownerReferences", 0, "name") == name:
                                del self.objects[key]
                    return 200, self.objects.pop((plural, name))
            return 200, self.objects[plural, name]

    def kill_pod(self, name: str) -> None:
        """Kill all processes of a pod, as when its node has no memory left."""
        os.killpg(self._processes[name].pid, signal.SIGKILL)

    def _create(self, plural: str, body: Json) -> tuple[int, Json]:
        metadata = cast("Json", body["metadata"])
        name = str(metadata["name"])
        if (plural, name) in self.objects:
            return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        self.made.append(json.loads(json.dumps(body)))
        metadata["uid"] = f"uid-{len(self.made)}"
        self.objects[plural, name] = {**body, "kind": KINDS[plural], "apiVersion": "v1"}
        if plural == "pods":
            self.objects[plural, name]["status"] = {"phase": "Pending"}
            if not self.hold_pods:
                self._run_pod(name, body)
        return 201, self.objects[plural, name]

    def _run_pod(self, name: str, pod: Json) -> None:
        container = cast("Json", inner(pod, "spec", "containers", 0))
        environment = {
            str(inner(each, "name")): str(inner(each, "value"))
            for each in cast("list[Json]", container["env"])
        }
        secret = inner(container, "envFrom", 0, "secretRef", "name")
        if secret:
            environment |= cast(
                "dict[str, str]", self.objects["secrets", str(secret)]["stringData"]
            )
        program, *arguments = cast("list[str]", container["command"])
        assert program == "dlcmd"
        self._processes[name] = subprocess.Popen(
            [*NAMESPACE, sys.executable, "-m", "dlcmd", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**program_environment(), **environment},
            process_group=0,
        )
        self.objects["pods", name]["status"] = {"phase": "Running"}

    def _refresh(self, plural: str, name: str) -> None:
        """Say how a pod has ended, if it has."""
        process = self._processes.get(name) if plural == "pods" else None
        if process is not None and process.poll() is not None:
            assert process.stderr is not None
            log = "" if process.stderr.closed else process.stderr.read().decode()
            process.stderr.close()
            ended = {"terminated": {"exitCode": process.returncode, "message": log[-2048:]}}
            status = {"name": "mount", "state": ended, "image": "", "imageID": "", "ready": False}
            self.objects["pods", name].setdefault("status", {})
            if log:
                self.objects["pods", name]["status"] = {
                    "phase": "Failed",
                    "containerStatuses": [{**status, "restartCount": 0}],
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


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster of one node, which is ended whatever happened to it."""
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()
