"""`.diesel`: reached by name, never listed; its files whole, still, and new when they change."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from diesel_fs.errors import UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import stats
from diesel_fs.mounts.attributes import HIDDEN_ROOT
from diesel_fs.mounts.vfs import STATS_MAX_AGE_S
from tests.mounts.conftest import LiveMount
from tests.mounts.folder_dataset import IDENTITY, snapshot_of
from tests.mounts.observed import fresh_stats

pytestmark = pytest.mark.fuse

NAMES = ["control", "filelist", "filelist0", "shuffle", "shuffle0", "snapshot", "stats"]


def test_the_folder_is_reached_but_not_listed(tree: LiveMount) -> None:
    """`.diesel` is no name of the root's listing: ImageFolder takes every folder for a class."""
    assert ".diesel" not in os.listdir(tree.at)
    assert sorted(os.listdir(tree.at / ".diesel")) == NAMES
    assert {each.name: each.is_dir() for each in os.scandir(tree.at / ".diesel")} == {
        name: name.startswith("shuffle") for name in NAMES
    }
    for folder in ("shuffle", "shuffle0"):
        assert os.listdir(tree.at / ".diesel" / folder) == []
        assert os.stat(tree.at / ".diesel" / folder / "..").st_ino == HIDDEN_ROOT
    assert not (tree.at / "deep" / ".diesel").exists()
    assert os.stat(tree.at / ".diesel" / "..").st_ino == os.stat(tree.at).st_ino
    assert not (tree.at / ".diesel" / "nothing").exists()
    numbers = {os.lstat(tree.at / ".diesel" / name).st_ino for name in ("", *NAMES)}
    assert len(numbers) == 1 + len(NAMES)
    assert min(numbers) == HIDDEN_ROOT


def test_stats_say_what_the_mount_is_and_did(tree: LiveMount, session: str) -> None:
    (tree.at / "page").read_bytes()
    fresh_stats(tree)
    told = stats(tree.at)
    assert (told["dataset"], told["version"], told["session"]) == ("folder", 7, session)
    assert told["identity"] == str(IDENTITY)
    assert told["pid"] == tree.pid
    reads = told["reads"]
    assert isinstance(reads, dict)
    assert reads["bytes"] >= 4096
    assert {"uptime_s", "requests", "cache", "waiting"} <= set(told)


def test_stats_stand_still_and_are_whole(tree: LiveMount, tmp_path: Path) -> None:
    """For a second the statistics are one content under one node; then they are another."""
    path = tree.at / ".diesel" / "stats"
    fresh_stats(tree)
    first, node = path.read_bytes(), path.stat().st_ino
    assert (path.read_bytes(), path.stat().st_ino) == (first, node)
    assert path.stat().st_size == len(first)
    with open(path, "rb") as held:
        assert held.read(10) == first[:10]
        fresh_stats(tree)
        assert path.stat().st_ino != node
        assert path.read_bytes() != first
        assert held.read() == first[10:], "an open file changed its content"
        assert os.fstat(held.fileno()).st_ino == node
    subprocess.run(["cp", path, tmp_path / "copy"], check=True)
    json.loads((tmp_path / "copy").read_bytes())


def test_stats_are_whole_whenever_they_are_read(tree: LiveMount) -> None:
    """Also over the moment in which they change: no reader sees a mixture or a part."""
    end_s = time.monotonic() + 2.2 * STATS_MAX_AGE_S
    contents = set()
    while time.monotonic() < end_s:
        content = (tree.at / ".diesel" / "stats").read_bytes()
        json.loads(content)
        contents.add(content)
    assert 2 <= len(contents) <= 4


def test_the_snapshot_file_is_the_snapshot(tree: LiveMount) -> None:
    """`.diesel/snapshot` is the mounted snapshot, byte for byte, under one node for ever."""
    path = tree.at / ".diesel" / "snapshot"
    node = path.stat().st_ino
    content = path.read_bytes()
    assert content == snapshot_of(tree.source)
    assert Snapshot(content).version == 7
    fresh_stats(tree)
    assert path.stat().st_ino == node


def test_stats_of_another_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no mount of a dataset: nothing"):
        stats(tmp_path)
    with pytest.raises(UsageError, match="no mount of a dataset: that is a mount of proc"):
        stats("/proc")
