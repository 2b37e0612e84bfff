"""A repository with a dataset, and a plugin that runs as a program."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect

from .plugin import Plugin, running_plugin

FILES = {"a": b"alpha" * 100, "folder/b": b"beta"}


def put_files(url: str, files: dict[str, bytes], name: str = "pets") -> int:
    """Put files into a dataset, which is made if it is missing. Returns its version."""
    with connect(name, url, create=True) as dataset:
        for path, content in files.items():
            dataset.put(content, path)
        dataset.flush()
    with connect(name, url) as dataset:
        return dataset.version


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a repository on this machine, with the dataset `pets`."""
    url = (tmp_path_factory.mktemp("repositories") / "store").as_uri()
    put_files(url, FILES)
    return url


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    """A plugin that ends mounts at once when nothing shows them."""
    folder = tmp_path_factory.mktemp("plugin")
    with running_plugin(folder, "--idle=0", f"--file-root={folder.parent}") as plugin:
        yield plugin
        plugin.wait_until_clean()


@pytest.fixture
def own_plugin(tmp_path: Path) -> Iterator[Plugin]:
    """The same for one test, which may kill it."""
    options = ("--idle=0", f"--file-root={tmp_path.parent.parent}")
    with running_plugin(tmp_path / "plugin", *options) as plugin:
        yield plugin
        plugin.wait_until_clean()
