"""`dlcmd mount`, `umount` and `stats`. What a mount does is tested in `tests/fuse`."""

import os
from pathlib import Path

import pytest

from tests.trees import facts, write

from .conftest import Dlcmd


def test_a_mount_that_cannot_be_says_why(dlcmd: Dlcmd, tmp_path: Path) -> None:
    assert "no mount of a dataset" in dlcmd("umount", tmp_path, code=2).err
    assert "no mount of a dataset" in dlcmd("stats", tmp_path, code=2).err
    dlcmd("mount", "--umask", "999", "pets", tmp_path, code=2)
    dlcmd("mount", "--memory", "much", "pets", tmp_path, code=2)
    dlcmd("mount", "--session", "none", "pets", tmp_path, code=2)
    assert "kept versions" in dlcmd("mount", "pets@7", tmp_path, code=2).err


@pytest.mark.fuse
def test_a_dataset_is_mounted_and_unmounted(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"2"})
    dlcmd("put", source, "pets")
    folder = tmp_path / "mnt"
    assert "no folder" in dlcmd("mount", "pets", folder, code=10).err
    folder.mkdir()
    assert dlcmd("mount", "pets", folder).out == f"pets is mounted on {folder}\n".encode()
    try:
        assert facts(folder) == facts(source)
        assert "is mounted on" in dlcmd("mount", "pets", folder, code=11).err
        (said,) = dlcmd("--json", "stats", folder).objects
        assert said["mountpoint"] == str(folder)
        assert b"mountpoint" in dlcmd("stats", folder).out
        with (folder / "a").open("rb"):
            assert str(os.getpid()) in dlcmd.program("umount", folder, code=11).err
            assert (folder / "sub/b").read_bytes() == b"2"
    finally:
        dlcmd("umount", folder)
    assert list(folder.iterdir()) == []


@pytest.mark.fuse
def test_a_dataset_that_is_not_there_is_not_mounted(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    (tmp_path / "mnt").mkdir()
    assert "no dataset 'gone'" in dlcmd("mount", "gone", tmp_path / "mnt", code=10).err
