"""A repository in a folder of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[LocalRepository]:
    with LocalRepository.open((tmp_path / "store").as_uri(), create=True) as opened:
        yield opened
