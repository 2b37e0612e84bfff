"""Runs tests against a real control plane of Kubernetes, which `make test-kubernetes` builds.

`make test` leaves this folder out (`norecursedirs` in `pyproject.toml`). README.md, one folder up,
describes the control plane, and the stand-ins for nodes.
"""

import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Namespace, Pod

from tests.cli.conftest import program_environment
from tests.kubernetes.cluster import control_plane as planes
from tests.kubernetes.cluster.containers import Environment
from tests.kubernetes.cluster.control_plane import PROGRAMS, ControlPlane
from tests.kubernetes.cluster.operators import IMAGE, OWN_IMAGE, Resources, install
from tests.processes import command_lines
from tests.trees import write


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """It leaves no folder, and no process that has its folder in its arguments."""
    if not (PROGRAMS / "stamp").exists():
        pytest.fail(f"{PROGRAMS} has no control plane: run `make test-kubernetes`")
    with planes.control_plane() as running:
        folder = running.kubeconfig.parent
        yield running
    assert not folder.exists()
    assert not [pid for pid, line in command_lines() if str(folder).encode() in line]


@pytest.fixture(scope="session")
def client(control_plane: ControlPlane) -> Iterator[Client]:
    with control_plane.client() as made:
        yield made


@pytest.fixture(scope="module")
def installed(client: Client) -> None:
    install(client)


@pytest.fixture
def resources(client: Client) -> Iterator[Resources]:
    """Its pods end with the test, so that no other test runs them."""
    name = planes.make_namespace(client)
    yield Resources(client, name)
    client.delete(Namespace, name)  # from now on no controller can make a pod in it
    client.deletecollection(Pod, namespace=name, grace_period=0)


@pytest.fixture
def images() -> dict[str, Environment]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**program_environment(), "PATH": path}
    return {IMAGE: environment, OWN_IMAGE: environment}


@contextmanager
def served_archive(folder: Path, name: str, files: dict[str, bytes]) -> Iterator[str]:
    """A server that gives an archive of these files, compressed if its name says so. Yields its
    address."""
    served = folder / "served"
    served.mkdir()
    with tarfile.open(served / name, "w:gz" if name.endswith(".gz") else "w") as tar:
        for path in write(folder / "archived", files).iterdir():
            tar.add(path, path.name)
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/{name}"
        finally:
            server.shutdown()
            thread.join()
