"""The operator, with the rights of its manifests, on a real control plane: real Jobs, real pods."""

import functools
import http.server
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod

from diesel_kubernetes.operator.fields import Json, fields, text
from diesel_kubernetes.operator.resources import condition_of
from tests.cli.conftest import program_environment
from tests.kubernetes.cluster.containers import Image
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.kubernetes.cluster.nodes import Node
from tests.kubernetes.cluster.operators import (
    DatasetResource,
    Operator,
    Resources,
    TrainingJobResource,
    install,
    python_environment,
)
from tests.waiting import wait_until

FILES = {f"images/{number}.jpg": b"%d" % number * 1000 for number in range(20)}


@pytest.fixture(scope="module", autouse=True)
def installed(client: Client) -> None:
    install(client)


@pytest.fixture
def resources(client: Client, namespace: str) -> Resources:
    return Resources(client, namespace)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder for a repository."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[str]:
    """The address of an archive with `FILES`, on a web server of the test."""
    served = tmp_path / "served"
    for name, content in FILES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    served.mkdir()
    with tarfile.open(served / "images.tar", "w") as tar:
        tar.add(tmp_path / "files" / "images", "images")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/images.tar"
        server.shutdown()
        thread.join()


@pytest.fixture
def node(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Node]:
    """A node that runs what the operator's Jobs say."""
    image = {"diesel-fs": Image(python_environment())}
    with Node(
        control_plane,
        f"node-{tmp_path.name[-20:]}".replace("_", "-"),
        tmp_path / "node",
        images=image,
    ) as made:
        yield made


@pytest.fixture
def operator(
    control_plane: ControlPlane, namespace: str, store: Path, tmp_path: Path
) -> Iterator[Operator]:
    made = Operator(control_plane, tmp_path, f"--namespace={namespace}", f"--file-root={store}")
    with made:
        yield made


def dataset_spec(store: Path, archive: str, **more: object) -> Json:
    """The spec of a Dataset from an archive."""
    return {
        "url": f"file://{store}",
        "source": {"archives": {"urls": [archive]}},
        "preparation": {"jobs": 1},
        **more,
    }


def explained(resources: Resources, operator: Operator) -> str:
    """What is in the namespace, for messages of failures."""
    lines = [operator.last_lines()]
    for kind in (DatasetResource, TrainingJobResource, Job, Pod, Event):
        for each in resources.client.list(kind, namespace=resources.namespace):
            described = each.to_dict()
            described["metadata"].pop("managedFields", None)
            lines.append(f"{kind.__name__} {json.dumps(described)}")
    return "\n".join(lines)


def in_phase(resources: Resources, operator: Operator, name: str, phase: str) -> Json:
    """The status of a Dataset, as soon as it is in a phase."""

    def is_there() -> bool:
        return text(resources.dataset(name), "status", "phase") == phase

    wait_until(is_there, otherwise=lambda: explained(resources, operator))
    return fields(resources.dataset(name), "status")


def reason_of(status: Json) -> str:
    return text(condition_of(status, "Ready"), "reason")


def dlcmd(store: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What `dlcmd --json` says of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "dlcmd", "--json", f"--url=file://{store}", *arguments],
        env=program_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def job_names(client: Client, namespace: str) -> list[str]:
    return [
        str(each.metadata.name) for each in client.list(Job, namespace=namespace) if each.metadata
    ]


def test_a_dataset_becomes_ready(
    client: Client, resources: Resources, operator: Operator, node: Node, store: Path, archive: str
) -> None:
    resources.make_dataset("pets", dataset_spec(store, archive, keep=2))
    status = in_phase(resources, operator, "pets", "Ready")
    stat = json.loads(dlcmd(store, "stat", "pets").stdout)
    for name in ("entries", "files", "bytes", "version"):
        assert status[name] == stat[name], name
    assert status["files"] == len(FILES)
    assert status["bytes"] == sum(map(len, FILES.values()))
    assert condition_of(status, "Ready")["status"] == "True"
    assert "progress" not in status
    events = client.list(
        Event, namespace=resources.namespace, fields={"involvedObject.name": "pets"}
    )
    assert {each.reason for each in events} == {"Running", "Prepared"}
    kept = dlcmd(store, "ls", "pets@").stdout
    assert str(status["version"]) in kept
