"""When a volume without a version shares a mount, and when it gets one of its own.

The node's logic runs in this process, so that a test says how long a version counts as current.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from diesel_fs.errors import DeadlineError
from diesel_kubernetes.csi import node
from diesel_kubernetes.csi.mounter import ProcessMounter
from diesel_kubernetes.csi.node import NodeVolumes
from diesel_kubernetes.csi.state import StateFolder
from diesel_kubernetes.csi.volumes import Limits
from tests.waiting import wait_until

from .conftest import put_files

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]


@contextmanager
def volumes_of(url: str, state: Path) -> Iterator[NodeVolumes]:
    """The logic of a plugin."""
    folder = StateFolder(state)
    limits = Limits(url=url)
    volumes = NodeVolumes(folder, ProcessMounter(folder), limits, idle_s=0, starts_max=2)
    try:
        yield volumes
        wait_until(lambda: not folder.names())
    finally:
        volumes.close()
        folder.close()


def publish(volumes: NodeVolumes, target: Path) -> bytes:
    """Publish `pets`, and read the file in it."""
    attributes = {"dataset": "pets"}
    volumes.publish(str(target), attributes, {}, [], timeout_s=60, is_wanted=lambda: True)
    return (target / "a").read_bytes()


def test_a_later_pod_sees_the_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods before keep theirs. Where nobody can say what is current, the mount is shared."""
    monkeypatch.setattr(node, "VERSION_KNOWN_S", 0.0)
    url = (tmp_path / "store").as_uri()
    put_files(url, {"a": b"first"})
    targets = [tmp_path / str(number) for number in range(4)]
    with volumes_of(url, tmp_path / "state") as volumes:
        assert publish(volumes, targets[0]) == b"first"
        assert publish(volumes, targets[1]) == b"first"
        assert len(os.listdir(tmp_path / "state/mounts")) == 1
        put_files(url, {"a": b"second"})
        assert publish(volumes, targets[2]) == b"second"
        assert (targets[0] / "a").read_bytes() == b"first"
        assert len(os.listdir(tmp_path / "state/mounts")) == 2
        store = Path(urlsplit(url).path)
        store.rename(tmp_path / "away")
        assert publish(volumes, targets[3]) == b"second"
        (tmp_path / "away").rename(store)
        for target in targets:
            volumes.unpublish(str(target))


def test_a_caller_that_has_gone_gets_no_bind(tmp_path: Path) -> None:
    """Else the target would be mounted after kubelet has unpublished it."""
    url = (tmp_path / "store").as_uri()
    put_files(url, {"a": b"first"})
    with volumes_of(url, tmp_path / "state") as volumes:
        with pytest.raises(DeadlineError):
            volumes.publish(
                str(tmp_path / "mount"), {"dataset": "pets"}, {}, [], timeout_s=60,
                is_wanted=lambda: False,
            )  # fmt: skip
        assert not (tmp_path / "mount").exists()
