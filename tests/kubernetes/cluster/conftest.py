"""Runs tests against a real control plane of Kubernetes, which `make test-kubernetes` builds.

`make test` leaves this folder out (`norecursedirs` in `pyproject.toml`). README.md, one folder up,
says what the control plane is, and what stands in for nodes.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lightkube import Client

from tests.cli.conftest import program_environment
from tests.kubernetes.cluster import control_plane as planes
from tests.kubernetes.cluster.containers import Image
from tests.kubernetes.cluster.control_plane import PROGRAMS, ControlPlane

IMAGE = "diesel-fs"


def processes_with(argument: str) -> list[int]:
    """The processes in whose arguments some text stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane for all tests of a session."""
    if not (PROGRAMS / "stamp").exists():
        pytest.fail(f"{PROGRAMS} has no control plane: run `make test-kubernetes`")
    with planes.control_plane() as running:
        folder = running.kubeconfig.parent
        yield running
    assert not folder.exists()
    assert processes_with(str(folder)) == []


@pytest.fixture(scope="session")
def client(control_plane: ControlPlane) -> Iterator[Client]:
    """An administrator's client."""
    with control_plane.client() as made:
        yield made


@pytest.fixture
def namespace(client: Client) -> str:
    """A namespace of the test's own. It goes with the control plane."""
    return planes.make_namespace(client)


@pytest.fixture(scope="session")
def images() -> dict[str, Image]:
    """An image in which a shell and this tree's programs are found."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {IMAGE: Image({**program_environment(), "PATH": path})}
