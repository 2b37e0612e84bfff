"""`.diesel`: it is reached by name, never listed; a file in it changes its node with its
content."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import stats
from diesel_fs.mounts.tree.attributes import HIDDEN_ROOT
from tests.mounts.conftest import LiveMount
from tests.mounts.folder_dataset import snapshot_of
from tests.mounts.observed import figures, fresh_stats

pytestmark = pytest.mark.fuse

NAMES = ["control", "filelist", "filelist0", "shuffle", "shuffle0", "snapshot", "stats"]


def test_the_folder_is_reached_but_not_listed(tree: LiveMount) -> None:
    """ImageFolder would take it for a class."""
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


def test_the_statistics_name_dataset_session_and_reads(tree: LiveMount, session: str) -> None:
    (tree.at / "page").read_bytes()
    fresh_stats(tree)
    values = stats(tree.at)
    assert (values["dataset"], values["version"], values["session"]) == ("folder", 7, session)
    assert values["identity"] == str(Snapshot(snapshot_of(tree.source)).identity)
    assert values["pid"] == tree.pid
    assert figures(values, "reads")["bytes"] >= 4096
    assert {"uptime_s", "requests", "cache", "waiting"} <= set(values)


def test_the_statistics_do_not_change_for_a_second(tree: LiveMount, tmp_path: Path) -> None:
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


def test_the_snapshot_file_is_the_snapshot(tree: LiveMount) -> None:
    path = tree.at / ".diesel" / "snapshot"
    node = path.stat().st_ino
    content = path.read_bytes()
    assert content == snapshot_of(tree.source)
    assert Snapshot(content).version == 7
    fresh_stats(tree)
    assert path.stat().st_ino == node
