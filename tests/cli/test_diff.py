"""Tests of `dlcmd diff`: its lines for versions, datasets and folders, and its exit codes."""

import os
from pathlib import Path

import pytest

from tests.trees import write

from .conftest import Dlcmd


@pytest.fixture
def source(dlcmd: Dlcmd, tmp_path: Path) -> Path:
    found = write(tmp_path / "source", {"a/x": b"1", "a/y": b"2", "b/z": b"3"})
    dlcmd("put", found, "pets")
    return found


def version(dlcmd: Dlcmd) -> str:
    return dlcmd("ls", "pets@").out.splitlines()[-1].split()[0].decode()


def test_a_folder_and_a_version_give_the_same_lines(dlcmd: Dlcmd, source: Path) -> None:
    before = version(dlcmd)
    assert dlcmd("diff", "pets", source).out == b"0 added, 0 changed, 0 removed, 6 unchanged\n"
    (source / "a/x").write_bytes(b"other")
    (source / "a/y").unlink()
    (source / "a/\udcff").write_bytes(b"")
    expected = b"+ a/\xff\nM a\nM a/x\n- a/y\n1 added, 2 changed, 1 removed, 3 unchanged\n"
    assert dlcmd("diff", "pets", source).out == expected
    assert dlcmd("-q", "diff", "pets", source).out == expected[: expected.index(b"1 added")]
    dlcmd("put", "--delete", source, "pets")
    assert dlcmd("diff", f"pets@{before}", "pets").out == expected
    assert dlcmd("diff", f"pets@{before}/b", "pets").out.startswith(b"0 added, 0 changed, 0 rem")
    back = dlcmd("diff", "pets", f"pets@{before}").out
    assert back.splitlines()[:4] == [b"+ a/y", b"M a", b"M a/x", b"- a/\xff"]
    first, *lines, done = dlcmd("--json", "diff", f"pets@{before}", "pets").objects
    changes = [(each["event"], each["path"]) for each in lines]
    assert changes == [("changed", "a"), ("changed", "a/x"), ("removed", "a/y")]
    assert first["path_b64"] == "YS//"
    assert done == {"event": "done", "added": 1, "changed": 2, "removed": 1, "unchanged": 3}


def test_two_datasets_are_compared(dlcmd: Dlcmd, source: Path) -> None:
    dlcmd("put", source, "other")
    assert b"6 unchanged" in dlcmd("diff", "pets", "other").out
    dlcmd("rm", "other/b/z")
    assert dlcmd("diff", "pets", "other").out.startswith(b"- b/z\n")
    (source / "b").chmod(0o700)
    assert dlcmd("diff", "pets/b", source / "b").out.startswith(b"M b\n")
    (source).chmod(0o700)
    assert dlcmd("diff", "pets", source).out.startswith(b"M .\nM b\n")


def test_folders_need_a_slash(dlcmd: Dlcmd, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    for folder in ("./source", "source/"):
        assert b"6 unchanged" in dlcmd("diff", "pets", folder).out
    assert "write ./source to compare" in dlcmd("diff", "pets", "source", code=10).err
    monkeypatch.chdir(source)
    assert b"6 unchanged" in dlcmd("diff", "pets", ".").out
    assert "dataset first" in dlcmd("diff", source, "pets", code=2).err


def test_exit_codes_of_diff(dlcmd: Dlcmd, source: Path) -> None:
    os.mkfifo(source / "pipe")
    result = dlcmd("diff", "pets", source, code=3)
    assert "pipe: skipped" in result.err
    assert result.out.startswith(b"M .\n")
    for one, other in (
        ("pets", "/nonexistent/x"), ("pets@5", "pets"), ("pets/nowhere", "pets"),
        ("nowhere", "pets"), ("pets", "s3://"),
    ):  # fmt: skip
        dlcmd("diff", one, other, code=10)
    dlcmd("diff", "pets", code=2)
