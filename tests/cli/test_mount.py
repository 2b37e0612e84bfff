"""`dlcmd mount`, `umount` and `stats`. What a mount does is tested in `tests/fuse`."""

import os
from pathlib import Path

import pytest

from dlcmd.mount_stats import lines
from tests.trees import facts, write

from .conftest import Dlcmd


def test_a_mount_that_cannot_be_says_why(dlcmd: Dlcmd, tmp_path: Path) -> None:
    assert "no mount of a dataset" in dlcmd("umount", tmp_path, code=2).err
    assert "no mount of a dataset" in dlcmd("stats", tmp_path, code=2).err
    for bad in ("99", "-1", "0o22", "07777777", ""):
        said = dlcmd("mount", f"--umask={bad}", "pets", tmp_path, code=2).err
        assert f"bad umask {bad!r}" in said
    dlcmd("mount", "--memory", "much", "pets", tmp_path, code=2)
    dlcmd("mount", "--session", "none", "pets", tmp_path, code=2)


@pytest.mark.fuse
def test_a_dataset_is_mounted_and_unmounted(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"2"})
    dlcmd("put", source, "pets")
    folder = tmp_path / "mnt"
    assert "no folder" in dlcmd("mount", "pets", folder, code=10).err
    folder.mkdir()
    assert "version 7" in dlcmd("mount", "pets@7", folder, code=10).err
    said_so = dlcmd("mount", "--seed", "4", "--group-size", "3", "pets", folder).out
    assert said_so == f"pets is mounted on {folder}\n".encode()
    try:
        assert facts(folder) == facts(source)
        assert "is mounted on" in dlcmd("mount", "pets", folder, code=11).err
        (said,) = dlcmd("--json", "stats", folder).objects
        assert said["mountpoint"] == str(folder)
        assert b"mountpoint" in dlcmd("stats", folder).out
        listed = (folder / ".diesel/filelist").read_bytes()
        assert (
            listed
            == dlcmd("shuffle", "pets", "--seed", "4", "--epoch", "0", "--group-size", "3").out
        )
        assert sorted(listed.split()) == [b"a", b"sub/b"]
        with (folder / "a").open("rb"):
            assert str(os.getpid()) in dlcmd.program("umount", folder, code=11).err
            assert (folder / "sub/b").read_bytes() == b"2"
    finally:
        dlcmd("umount", folder)
    assert list(folder.iterdir()) == []


TOLD = {
    "dataset": "pets",
    "version": 1_700_000_000_000_000,
    "bytes": 5_000_000,
    "uptime_s": 12.34,
    "requests": {"lookup": 4321},
    "residency": {
        "resident_bytes": 4096,
        "reads_avoided_estimate": 98765,
        "store": {"fetched_bytes": 1_200_000},
        "streams": [
            {"name": "a", "epoch": 3, "position": 250, "length": 1000, "entries_per_s": 1234.5},
            {"name": "late", "epoch": 0, "position": 0, "length": 10, "tentative": True},
            {"name": "over", "epoch": -1},
        ],
    },
    "new in a later version": {"some_bytes": 3},
    "empty": {},
}


def test_statistics_are_shown_in_groups_with_units() -> None:
    shown = [" ".join(line.split()) for line in lines(TOLD)]
    assert shown == [
        "dataset pets", "version 1700000000000000", "bytes 5.0 MB", "uptime s 12.3 s", "",
        "requests of the kernel:", "lookup 4,321", "",
        "contents in the kernel's cache:", "resident bytes 4.1 kB",
        "reads avoided estimate 98,765", "",
        "read from the store to be pushed:", "fetched bytes 1.2 MB", "",
        "plans:", "stream epoch position of files/s", "a 3 250 1,000 25 % 1,234",
        "late 0 0 10 0 % 0 not followed yet", "over - all read", "",
        "new in a later version:", "some bytes 3 B",
    ]  # fmt: skip


@pytest.mark.fuse
def test_a_dataset_that_is_not_there_is_not_mounted(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    (tmp_path / "mnt").mkdir()
    assert "no dataset 'gone'" in dlcmd("mount", "gone", tmp_path / "mnt", code=10).err
