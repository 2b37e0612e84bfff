"""A repository with a small dataset, and URLs of repositories with each metadata store."""

from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository

from ..storage.metadata.redis_servers import emptied_server
from ..tiers import fast_first
from ..trees import write
from .folder_puts import put_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", {"a": b"1", "d/b": b"22", "d/e/c": b"333"})


@pytest.fixture
def filled(repository: LocalRepository, source: Path) -> LocalRepository:
    put_folder(repository, source)
    return repository


@pytest.fixture(params=fast_first(["sqlite", "redis"]))
def url_of_both(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    meta = f"?meta={emptied_server().url}" if request.param == "redis" else ""
    return (tmp_path / "store").as_uri() + meta
