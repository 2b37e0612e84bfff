"""Fixtures for object stores: no proxies, a scripted S3 server, sleeps that take no time."""

import os
from collections.abc import Iterator

import pytest

from tests.storage.objects.scripted_s3 import ScriptedS3
from tests.storage.objects.scripted_store import ScriptedBucket, VirtualSleep, store_on


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)


@pytest.fixture
def sleeps() -> VirtualSleep:
    """A clock for a store's retries: it records pauses instead of sleeping."""
    return VirtualSleep()


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as server:
        yield server


@pytest.fixture
def bucket(server: ScriptedS3, sleeps: VirtualSleep) -> ScriptedBucket:
    return ScriptedBucket(server, sleeps, store_on(server, sleeps))
