"""A dataset that changes, over every session: not mounted yet, and with a mount that follows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.observed import mounted
from tests.mounts.versions.followed_dataset import FollowedMount, begin


@pytest.fixture
def prepared(tmp_path: Path, session: str) -> FollowedMount:
    return begin(tmp_path, session)


@pytest.fixture
def followed(prepared: FollowedMount) -> Iterator[FollowedMount]:
    with mounted(prepared.request):
        yield prepared
