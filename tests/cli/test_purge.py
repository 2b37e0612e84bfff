"""Tests of `purge`, of versions in addresses, and of the reclaimable bytes that `du` shows."""

import os
import tarfile
from contextlib import chdir
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from diesel_fs.errors import NotFoundError, UsageError
from diesel_fs.mounts.options import MountRequest
from diesel_fs.mounts.source import MountSource
from tests.rows import each_row

from ..trees import facts, write
from .conftest import Dlcmd


@pytest.fixture
def filled(dlcmd: Dlcmd, tmp_path: Path) -> Dlcmd:
    """Version 1 has d/a and d/b; version 2 has d/b and another c."""
    source = write(tmp_path / "src", {"d/a": os.urandom(90_000), "d/b": b"b" * 10, "c": b"old"})
    dlcmd("put", source, "pets")
    (source / "d/a").unlink()
    write(source, {"c": b"newer"})
    dlcmd("put", "--delete", source, "pets")
    return dlcmd


def versions(dlcmd: Dlcmd, name: str = "pets") -> list[dict[str, object]]:
    return dlcmd("--json", "ls", f"{name}@").objects


def test_kept_versions_are_listed_and_read(filled: Dlcmd, tmp_path: Path) -> None:
    first, second = versions(filled)
    assert (first["files"], second["files"]) == (3, 2)
    assert (first["bytes"], second["bytes"]) == (90_013, 15)
    lines = filled("ls", "pets@").out.decode().splitlines()
    assert lines[0].split("\t")[0] == str(first["version"])
    old = f"pets@{first['version']}"
    assert filled("ls", f"{old}/d").out == b"a\nb\n"
    assert filled("cat", f"{old}/c").out == b"old"
    assert filled("cat", "pets/c").out == b"newer"
    assert filled("--json", "stat", f"{old}/c").objects[0]["size"] == 3
    for verb in ("stat", "du"):
        assert filled("--json", verb, old).objects[0]["files"] == 3
    filled("get", old, tmp_path / "out")
    files = {path for path, fact in facts(tmp_path / "out").items() if fact[0] == "file"}
    assert files == {b"c", b"d/a", b"d/b"}
    tar = filled.program("get", f"{old}/d", "--tar", "-").out
    with tarfile.open(fileobj=BytesIO(tar)) as opened:
        assert sorted(opened.getnames())[-1].endswith("b")
    filled("save-meta", old, tmp_path / "old.snapshot")
    assert "stale" in filled("load-meta", tmp_path / "old.snapshot").out.decode()
    assert "not kept" in filled("ls", "pets@5", code=10).err
    filled("ls", "dogs@", code=10)


@each_row(
    "words",
    [
        *("put src pets@5", "put src pets@5/d", "rm pets@5/c", "delete-dataset pets@5 --yes"),
        *("purge pets@5", "verify pets@5", "recover pets@5"),
        *("ls pets@x", "ls pets@-1", "ls pets@0", "cat pets@/c"),
        *("purge pets --grace soon", "purge pets --max-unused 101%", "purge pets --keep -1"),
    ],
)
def test_verbs_that_write_refuse_a_version(filled: Dlcmd, words: str) -> None:
    with chdir(filled.store.parent):
        filled(*words.split(), code=2)
    assert filled("cat", "pets/c").out == b"newer"


def test_purge_frees_space(filled: Dlcmd) -> None:
    first = versions(filled)[0]["version"]
    before = filled("--json", "du", "pets").objects[0]
    assert 89_000 < int(str(before["reclaimable_bytes"])) < 92_000
    assert "reclaimable 90" in filled("du", "pets").out.decode()
    dry = filled("--json", "purge", "-n", "pets").objects[0]
    assert (dry["dry_run"], dry["deleted"]) == (True, 0)
    assert len(versions(filled)) == 2
    for policy in (["--keep", "2"], []):
        filled("purge", *policy, "--grace", "0", "pets")
        assert filled("cat", f"pets@{first}/c").out == b"old"
    policy = ["--keep", "0", "--grace", "0", "--max-unused", "2.5%"]
    assert "deleted: 9" in filled("purge", *policy, "pets").out.decode()
    assert len(versions(filled)) == 1
    filled("cat", f"pets@{first}/c", code=10)
    assert filled("--json", "du", "pets").objects[0]["reclaimable_bytes"] == 0
    filled("verify", "pets")
    assert filled("cat", "pets/c").out == b"newer"


def test_a_mount_shows_the_version_in_its_address(filled: Dlcmd, tmp_path: Path) -> None:
    version = int(str(versions(filled)[0]["version"]))
    request = MountRequest(filled.store.as_uri(), "pets", str(tmp_path / "m"), version=version)
    request.check()
    shown = MountSource().open(request).snapshot
    assert (shown.version, shown.file_count) == (version, 3)
    with pytest.raises(UsageError, match="exclude"):
        replace(request, follow=True).check()
    with pytest.raises(NotFoundError, match="not kept"):
        MountSource().open(replace(request, version=version + 1))
    filled("mount", "pets@", tmp_path / "m", code=2)
