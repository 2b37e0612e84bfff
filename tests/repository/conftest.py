"""A repository with a small dataset."""

from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository

from ..trees import write
from .folder_puts import put_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", {"a": b"1", "d/b": b"22", "d/e/c": b"333"})


@pytest.fixture
def filled(repository: LocalRepository, source: Path) -> LocalRepository:
    """A repository whose dataset `ds` holds `source`, in one chunk."""
    put_folder(repository, source)
    return repository
