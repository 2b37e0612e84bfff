"""The leases of a mount, without a mount: their versions, and the effect of failures."""

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


class LeasingSource(MountSource):
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
def source() -> LeasingSource:
    return LeasingSource()


@pytest.fixture
def leases(source: LeasingSource, tmp_path: Path) -> VersionLeases:
    return VersionLeases(MountRequest(tmp_path.as_uri(), "ds", str(tmp_path)), source)


def test_the_leases_are_on_the_given_versions(leases: VersionLeases, source: LeasingSource) -> None:
    leases.set_versions([version(1)])
    leases.set_versions([version(2), version(1)])
    assert source.held == [1, 2]
    leases.set_versions([version(2)])
    assert source.held == [2]
    leases.close()
    assert source.held == []


def test_a_lease_that_failed_is_tried_again(
    leases: VersionLeases, source: LeasingSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leases.set_versions([version(1)])
    source.is_away = True
    for _ in range(3):
        leases.set_versions([version(2), version(1)])
    assert source.held == [1]
    assert caplog.messages == ["no lease on version 2: the store is away"]
    source.is_away = False
    leases.set_versions([version(2), version(1)])
    assert source.held == [1, 2]
