"""A repository on each of the metadata stores, and a clock that a test moves."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository

from ...trees import write
from ..folder_puts import put_folder
from .moved_clock import MovedClock, moved_clock


@pytest.fixture
def clock() -> Iterator[MovedClock]:
    with moved_clock() as clock:
        yield clock


@pytest.fixture
def repository(url_of_both: str, clock: MovedClock) -> Iterator[LocalRepository]:
    with LocalRepository.open(url_of_both, create=True) as opened:
        yield opened


@pytest.fixture
def holed(repository: LocalRepository, tmp_path: Path) -> LocalRepository:
    source = write(tmp_path / "source", {f"d{i % 3}/{i}": os.urandom(5000) for i in range(60)})
    put_folder(repository, source)
    for i in range(0, 60, 2):
        (source / f"d{i % 3}/{i}").unlink()
    put_folder(repository, source, delete=True)
    return repository
