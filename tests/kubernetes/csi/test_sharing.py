"""When a volume without a version shares a mount, and when it gets one of its own.

The node's logic runs in this process, so that a test sets how long a version counts as current.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from diesel_fs.errors import DeadlineError
from diesel_kubernetes.csi import node
from diesel_kubernetes.csi.mounter import ProcessMounter
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.volumes import VolumeLimits
from tests.waiting import wait_until

from .conftest import MOUNTS_AS_ROOT, node_volumes, publish, put_files

pytestmark = MOUNTS_AS_ROOT


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = (tmp_path / "store").as_uri()
    put_files(url, {"a": b"first"})
    return url


@pytest.fixture
def volumes(url: str, tmp_path: Path) -> Iterator[NodeVolumes]:
    state = StateFolder(tmp_path / "state")
    with node_volumes(state, ProcessMounter(state), VolumeLimits(url=url)) as volumes:
        yield volumes
        wait_until(lambda: not state.names())


def test_a_later_pod_sees_the_later_version(
    url: str, volumes: NodeVolumes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "VERSION_KNOWN_S", 0.0)
    targets = [tmp_path / str(number) for number in range(4)]

    def published(target: Path) -> bytes:
        publish(volumes, target)
        return (target / "a").read_bytes()

    assert published(targets[0]) == published(targets[1]) == b"first"
    assert len(os.listdir(tmp_path / "state/mounts")) == 1
    put_files(url, {"a": b"second"})
    assert published(targets[2]) == b"second"
    assert (targets[0] / "a").read_bytes() == b"first"
    assert len(os.listdir(tmp_path / "state/mounts")) == 2
    store = Path(urlsplit(url).path)
    store.rename(tmp_path / "away")
    assert published(targets[3]) == b"second"
    (tmp_path / "away").rename(store)
    for target in targets:
        volumes.unpublish(str(target))


def test_a_caller_that_has_gone_gets_no_bind(volumes: NodeVolumes, tmp_path: Path) -> None:
    """Otherwise the target would be mounted after kubelet has unpublished it."""
    with pytest.raises(DeadlineError):
        publish(volumes, tmp_path / "mount", is_wanted=False)
    assert not (tmp_path / "mount").exists()
