"""The leases of a mount, without a mount: which versions are held, and what becomes of failures."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest

from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.options import MountRequest
from diesel_fs.mounts.source import MountSource
from diesel_fs.mounts.versions.leases import VersionLeases
from diesel_fs.repository.leases import ReadLease


def version(number: int) -> Snapshot:
    return cast(Snapshot, SimpleNamespace(version=number, identity=UUID(int=1)))


class Opener(MountSource):
    """Notes what is taken and given back; it can be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.held: list[int] = []

    def lease(self, request: MountRequest, snapshot: Snapshot) -> ReadLease:
        if self.is_away:
            raise ObjectStoreError("the store is away")
        number = snapshot.version
        self.held.append(number)
        return cast(ReadLease, SimpleNamespace(close=lambda: self.held.remove(number)))


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def leases(opener: Opener, tmp_path: Path) -> VersionLeases:
    return VersionLeases(MountRequest(tmp_path.as_uri(), "ds", str(tmp_path)), opener)


def test_those_that_are_answered_for_are_held_and_no_others(
    leases: VersionLeases, opener: Opener
) -> None:
    leases.set_versions([version(1)])
    leases.set_versions([version(2), version(1)])
    assert opener.held == [1, 2]
    leases.set_versions([version(2)])
    assert opener.held == [2]
    leases.close()
    assert opener.held == []


def test_a_lease_that_could_not_be_had_is_asked_for_again(
    leases: VersionLeases, opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """The store was away for a moment; that is told once."""
    caplog.set_level("INFO")
    leases.set_versions([version(1)])
    opener.is_away = True
    for _ in range(3):
        leases.set_versions([version(2), version(1)])
    assert opener.held == [1]
    assert caplog.messages == ["no lease on version 2: the store is away"]
    opener.is_away = False
    leases.set_versions([version(2), version(1)])
    assert opener.held == [1, 2]
