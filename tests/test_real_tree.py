"""Real trees, put and read back: Python's own library, odd names and modes, large and many files.

Each is put, then read by `get` and by a mount, and compared with the original by system calls.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.extract import get
from diesel_fs.ingest import FolderSource
from diesel_fs.mounts import MountRequest, mount, umount
from diesel_fs.repository.local import LocalRepository

from .trees import Facts, facts, odd_tree, write

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Facts]:
    """The packages installed beside the library are left out: they may be many times as large."""
    source = tmp_path_factory.mktemp("library") / "source"
    installed = shutil.ignore_patterns("site-packages", "dist-packages")
    shutil.copytree(sysconfig.get_path("stdlib"), source, symlinks=True, ignore=installed)
    return source, facts(source)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def mounted(tmp_path: Path, url: str) -> Iterator[Path]:
    point = tmp_path / "mounted"
    point.mkdir()

    # Otherwise a native mount shows its own folder without permissions for others.
    mount(MountRequest(url, "ds", str(point), allow_other=os.geteuid() == 0))
    yield point
    umount(point)


def put(url: str, source: Path) -> None:
    with LocalRepository.open(url, create=True) as repository:
        report = ingest.put(repository, "ds", FolderSource(source))
        assert report.failed == []


def got(url: str, destination: Path) -> Facts:
    with LocalRepository.open(url) as repository:
        view = repository.view("ds")
        reader = EntryReader(view, repository.objects, 64 << 20)
        get(view, reader, b"", destination)
    return facts(destination)


def test_pythons_library_there_and_back(
    url: str, tmp_path: Path, library: tuple[Path, Facts], request: pytest.FixtureRequest
) -> None:
    source, expected = library
    assert len(expected) > 1000
    put(url, source)
    assert got(url, tmp_path / "back") == expected
    with LocalRepository.open(url) as repository:
        assert repository.verify("ds").problems == []
        repository.recover("ds")
    assert facts(request.getfixturevalue("mounted")) == expected


def test_oddities_there_and_back(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = odd_tree(tmp_path / "source")
    expected = facts(source)
    put(url, source)
    assert got(url, tmp_path / "back") == expected
    assert facts(request.getfixturevalue("mounted")) == expected


def test_300_MB(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = write(tmp_path / "source", {"small": b"1"})
    block = bytes(range(256)) * 4096
    with (source / "large").open("wb") as file:
        for i in range(300):
            file.write(block[i:] + block[:i])
    put(url, source)
    expected = facts(source)
    assert facts(request.getfixturevalue("mounted")) == expected
    assert got(url, tmp_path / "back") == expected


def test_100000_files_in_a_folder(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = write(tmp_path / "source", {f"{i:06}": b"" for i in range(100_000)})
    put(url, source)
    point: Path = request.getfixturevalue("mounted")
    assert sorted(path.name for path in point.iterdir()) == [f"{i:06}" for i in range(100_000)]
    assert (point / "077777").stat().st_size == 0
