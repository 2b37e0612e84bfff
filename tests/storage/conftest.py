"""Fixtures of the tests of stores: an S3 server, and metadata stores of every kind."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diesel_fs.storage.metadata.store import MetadataStore
from tests.small_disks import small_disk
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, STORES, Clock, Opener
from tests.storage.objects.s3_server import Server, s3_server
from tests.tiers import fast_first


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if "proxy" in name.lower()]:
            patch.delenv(name)
        with s3_server(tmp_path_factory.mktemp("s3")) as server:
            yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=fast_first(["sqlite-rows", *STORES], 3))
def open_meta(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Opener:
    kind: str = request.param
    # SQLite keeps entries in rows, or many in one row (`runs.py`): test both for all entries
    entries_min = 10**9 if kind == "sqlite-rows" else 1
    monkeypatch.setattr("diesel_fs.storage.metadata.sqlite.runs.ENTRIES_MIN", entries_min)
    return STORES[kind.removesuffix("-rows")](tmp_path, clock)


@pytest.fixture
def meta(open_meta: Opener) -> Iterator[MetadataStore]:
    store = open_meta()
    store.create(NAME, IDENTITY)
    yield store
    store.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=1m") as point:
        yield point
