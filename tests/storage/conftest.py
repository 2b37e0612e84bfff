"""Servers that the tests of stores stand on, started once where a test asks for them."""

import os
from collections.abc import Iterator

import pytest

from tests.storage.s3_server import Server, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A whole S3 server, reached without a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if "proxy" in name.lower()]:
            patch.delenv(name)
        with s3_server(tmp_path_factory.mktemp("s3")) as server:
            yield server
