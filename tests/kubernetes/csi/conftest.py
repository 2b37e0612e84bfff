"""A repository with a dataset, a plugin that runs as a program, and a plugin's logic in this
process."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from diesel_fs.client.dataset import connect
from diesel_kubernetes.csi.mounter import Mounter
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.volumes import VolumeLimits

from .cluster import ApiStandIn
from .plugin import Plugin, running_plugin

MOUNTS_AS_ROOT = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]
FILES = {"a": b"alpha" * 100, "folder/b": b"beta"}


def put_files(url: str, files: dict[str, bytes], name: str = "pets") -> int:
    """Put files into a dataset, which is made if it is missing. Returns its version."""
    with connect(name, url, create=True) as dataset:
        for path, content in files.items():
            dataset.put(content, path)
        dataset.flush()
    with connect(name, url) as dataset:
        return dataset.version


def shown(target: Path) -> dict[str, bytes]:
    found = [path for path in target.rglob("*") if path.is_file()]
    return {str(path.relative_to(target)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    url = (tmp_path_factory.mktemp("repositories") / "store").as_uri()
    put_files(url, FILES)
    return {"dataset": "pets", "url": url}


@contextmanager
def clean_plugin(folder: Path, file_root: Path) -> Iterator[Plugin]:
    with running_plugin(folder, "--idle=0", f"--file-root={file_root}") as plugin:
        yield plugin
        plugin.wait_until_clean()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    folder = tmp_path_factory.mktemp("plugin")
    with clean_plugin(folder, folder.parent) as plugin:
        yield plugin


@pytest.fixture
def own_plugin(tmp_path: Path) -> Iterator[Plugin]:
    with clean_plugin(tmp_path / "plugin", tmp_path.parent.parent) as plugin:
        yield plugin


@contextmanager
def node_volumes(
    state: StateFolder, mounter: Mounter, limits: VolumeLimits
) -> Iterator[NodeVolumes]:
    volumes = NodeVolumes(state, mounter, limits, idle_s=0, starts_max=2)
    try:
        yield volumes
    finally:
        volumes.close()
        state.close()


def publish(
    volumes: NodeVolumes,
    target: Path,
    attributes: Mapping[str, str] = MappingProxyType({}),
    *,
    secrets: Mapping[str, str] = MappingProxyType({}),
    is_wanted: bool = True,
) -> None:
    """Publish `pets`, unless the attributes name another dataset."""
    given = {"dataset": "pets", **attributes}
    volumes.publish(str(target), given, secrets, [], timeout_s=60, is_wanted=lambda: is_wanted)


@pytest.fixture
def cluster() -> Iterator[ApiStandIn]:
    with closing(ApiStandIn()) as cluster:
        yield cluster
