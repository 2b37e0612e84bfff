"""Tests of the verbs that list, delete, check and rebuild datasets."""

import base64
import errno
import json
import os
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.rows import each_row
from tests.trees import write

from .conftest import Dlcmd


@pytest.fixture
def pets(dlcmd: Dlcmd, tmp_path: Path) -> Path:
    source = write(tmp_path / "src", {"a": b"1" * 9000, "sub/b": b"22", "sub/in/c": b"333"})
    (source / "link").symlink_to("a")
    os.utime(source / "a", ns=(0, 1_700_000_000_123_456_789))
    dlcmd("put", source, "pets")
    return source


def chunks(dlcmd: Dlcmd) -> list[Path]:
    return sorted(dlcmd.store.glob("datasets/*/chunks/*/*"))


def test_ls_lists_datasets_and_folders(dlcmd: Dlcmd, pets: Path) -> None:
    dlcmd("put", pets, "cars")
    assert dlcmd("ls").out == b"cars\npets\n"
    assert [line.split("\t")[:4] for line in dlcmd("ls", "-l").out.decode().splitlines()] == [
        ["cars", "3", "9005", "1"],
        ["pets", "3", "9005", "1"],
    ]
    assert [each["dataset"] for each in dlcmd("ls", "--json").objects] == ["cars", "pets"]
    assert dlcmd("ls", "pets").out == b"a\nlink\nsub\n"
    assert dlcmd("ls", "pets/sub").out == b"b\nin\n"
    assert dlcmd("ls", "-R", "pets/sub").out == b"b\nin\nin/c\n"
    assert dlcmd("ls", "pets/sub/b").out == b"b\n"
    lines = dlcmd("ls", "-l", "pets").out.decode().splitlines()
    assert re.fullmatch(r"-rw-r--r-- .* 9000 .*", lines[0])
    assert re.fullmatch(r"lrwxrwxrwx .*link -> a", lines[1])
    dlcmd("ls", "pets/gone", code=10)
    dlcmd("ls", "pets/a/", code=2)
    dlcmd("ls", "gone", code=10)


def test_H10_names_are_raw_in_a_pipe_and_marked_in_json(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"\udcff\udcfe": b"", "esc\x1b[2J": b""})
    dlcmd("put", source, "odd")
    assert dlcmd("ls", "odd").out == b"esc\x1b[2J\n\xff\xfe\n"
    escape, raw = dlcmd("ls", "--json", "odd").objects
    assert (escape["path"], "path_b64" in escape) == ("esc\x1b[2J", False)
    assert raw["path"] == "\\xff\\xfe"
    assert base64.b64decode(str(raw["path_b64"])) == b"\xff\xfe"
    result = dlcmd("rm", "odd/" + os.fsdecode(b"\xff\x1b"), code=10)
    assert "\x1b" not in result.err


@each_row(
    ("text", "understood"),
    [
        ("2020-01-31T12:00", "2020-01-31 12:00:00 -0500 (2020-01-31 17:00:00 UTC)"),
        ("2020-07-31T12:00", "2020-07-31 12:00:00 -0400 (2020-07-31 16:00:00 UTC)"),
        ("2020-01-31T12:00+02:00", "2020-01-31 05:00:00 -0500 (2020-01-31 10:00:00 UTC)"),
        ("2020-01-31T12:00Z", "2020-01-31 07:00:00 -0500 (2020-01-31 12:00:00 UTC)"),
    ],
)
def test_recover_since_prints_how_it_understood_the_time(
    dlcmd: Dlcmd, pets: Path, monkeypatch: pytest.MonkeyPatch, text: str, understood: str
) -> None:
    assert pets.exists()
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        result = dlcmd("recover", "--since", text, "pets")
        assert result.err == f"dlcmd: recover pets: reads the chunks since {understood}\n"
        assert b"recovered 1 chunk" in result.out
        assert dlcmd("-q", "recover", "--since", text, "pets").err == ""
    finally:
        monkeypatch.undo()
        time.tzset()
    soon = datetime.now(UTC) + timedelta(minutes=90)
    west = f"{soon - timedelta(hours=8):%Y-%m-%dT%H:%M}-08:00"
    for late in (f"{soon:%Y-%m-%dT%H:%M}Z", "2999-01-01", west):
        refused = dlcmd("recover", "--since", late, "pets", code=2).err
        assert f"the time {late!r} lies in the future: it means " in refused


def test_ls_0_ends_raw_names_with_nul(dlcmd: Dlcmd, tmp_path: Path) -> None:
    files = {"plain": b"1", "new\nline": b"22", "sub/esc\x1b": b"333"}
    dlcmd("put", write(tmp_path / "src", files), "odd")
    assert dlcmd("ls", "-0", "odd").out == b"new\nline\0plain\0sub\0"
    named = dlcmd("ls", "-R", "-0", "odd").out
    assert named == b"new\nline\0plain\0sub\0sub/esc\x1b\0"
    (tmp_path / "names").write_bytes(named)
    for words in (["odd", "-l"], ["odd", "--json"], ["odd@"], []):
        assert "-0 lists the names" in dlcmd("ls", "-0", *words, code=2).err
    again = ("--files-from", tmp_path / "names", "-0", tmp_path / "src", "again")
    assert b"put 3 files" in dlcmd("put", *again).out


def test_control_characters_are_escaped_on_a_terminal(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"esc\x1b[2J": b""}), "odd")
    for words, shown in ((["odd"], b"esc\\x1b[2J\r\n"), (["-l"], b"odd")):
        terminal, theirs = os.openpty()
        with dlcmd.start("ls", *words, stdout=theirs) as process:
            process.communicate(timeout=60)
        os.close(theirs)
        assert shown in os.read(terminal, 4096)
        os.close(terminal)


def test_stat_shows_the_chunks_of_a_file(dlcmd: Dlcmd, pets: Path) -> None:
    (chunk,) = chunks(dlcmd)
    result = json.loads(dlcmd("stat", "--json", "pets/a").out)
    (extent,) = result["extents"]
    assert extent["chunk"] == chunk.name
    stored = chunk.read_bytes()[extent["offset"] : extent["offset"] + extent["length"]]
    assert len(stored) == extent["length"] < 9000
    assert abs(extent["uploaded"] - chunk.stat().st_mtime) < 30
    assert (result["size"], result["mtime_ns"]) == (9000, 1_700_000_000_123_456_789)
    text = dlcmd("stat", "pets/a").out.decode()
    assert f"chunk={chunk.name}" in text
    assert "-rw-r--r--" in text
    result = json.loads(dlcmd("stat", "--json", "pets").out)
    assert (result["kind"], result["files"], result["chunks"]) == ("folder", 3, 1)
    assert dlcmd("stat", "--json", "pets/link").objects[0]["target"] == "a"


def test_du_counts_files_and_bytes(dlcmd: Dlcmd, pets: Path) -> None:
    whole, part = (dlcmd("du", "--json", each).objects[0] for each in ("pets", "pets/sub"))
    assert (whole["files"], whole["bytes"]) == (3, 9005)
    assert (part["files"], part["bytes"], part["stored_bytes"]) == (2, 5, 5)
    assert int(str(whole["stored_bytes"])) < 1000  # 9,000 bytes
    assert dlcmd("du").out.startswith(b"3 files, 9.0 kB (9005 bytes), stored as ")


def test_rm_deletes_all_or_nothing(dlcmd: Dlcmd, pets: Path) -> None:
    assert "rm -r" in dlcmd("rm", "pets/sub", code=2).err
    dlcmd("rm", "pets/a", "pets/gone", code=10)
    assert "delete-dataset" in dlcmd("rm", "-r", "pets", code=2).err
    assert dlcmd("ls", "pets").out == b"a\nlink\nsub\n"
    assert dlcmd("rm", "pets/a").out == b"deleted 1 entry\n"
    dlcmd("rm", "pets/a", code=10)
    assert dlcmd("rm", "-r", "pets/sub", "pets/sub/in").out == b"deleted 4 entries\n"
    assert dlcmd("ls", "-R", "pets").out == b"link\n"
    dlcmd("recover", "pets")
    assert dlcmd("ls", "-R", "pets").out == b"link\n"


def test_delete_dataset_needs_a_confirmation(dlcmd: Dlcmd, pets: Path) -> None:
    assert "--yes" in dlcmd("delete-dataset", "pets", code=2).err
    dlcmd("delete-dataset", "gone", code=10)
    (result,) = dlcmd("delete-dataset", "--json", "pets", "--yes").objects
    assert result == {"dataset": "pets", "objects_removed": 2, "objects_left": 0}
    assert dlcmd("ls").out == b""
    assert chunks(dlcmd) == []
    dlcmd("delete-dataset", "pets", "--yes", code=10)


def test_a_snapshot_goes_to_a_file_and_is_checked(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    file = tmp_path / "pets.snapshot"
    dlcmd("save-meta", "pets", file)
    assert dlcmd.fifo("save-meta", "pets") == file.read_bytes()
    assert dlcmd.program("save-meta", "pets", "/dev/stdout").out == file.read_bytes()
    assert "is a folder" in dlcmd("save-meta", "pets", tmp_path, code=2).err
    assert b"state     up to date\n" in dlcmd("load-meta", file).out
    (pets / "new").write_bytes(b"")
    dlcmd("put", pets, "pets")
    (result,) = dlcmd("load-meta", "--json", file).objects
    assert (result["dataset"], result["files"]) == ("pets", 3)
    assert str(result["state"]).startswith("stale: the current version is ")
    dlcmd("delete-dataset", "pets", "--yes")
    assert b"does not have" in dlcmd("load-meta", file).out
    dlcmd("put", pets, "pets")
    assert b"earlier dataset" in dlcmd("load-meta", file).out
    assert b"not compared" in dlcmd("load-meta", "--url", "file:///nowhere", file).out
    for broken in (b"", b"\x7fELF", file.read_bytes()[:-1]):
        (tmp_path / "broken").write_bytes(broken)
        assert "save-meta" in dlcmd("load-meta", tmp_path / "broken", code=15).err
    dlcmd("load-meta", tmp_path / "gone", code=10)
    dlcmd("save-meta", "pets", tmp_path / "gone/x", code=12)


def test_A12_a_snapshot_file_is_replaced_whole_or_not_at_all(
    dlcmd: Dlcmd, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pets.snapshot"
    dlcmd("save-meta", "pets", file)
    before = file.read_bytes()
    (pets / "new").write_bytes(b"")
    dlcmd("put", pets, "pets")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left" in dlcmd("save-meta", "pets", file, code=16).err
    assert file.read_bytes() == before
    assert list(tmp_path.glob(".tmp-*")) == []
    dlcmd("save-meta", "pets", file)
    assert file.read_bytes() != before


def test_recover_brings_the_metadata_back(dlcmd: Dlcmd, pets: Path) -> None:
    listing = dlcmd("ls", "-l", "-R", "pets").out
    for file in dlcmd.store.glob("meta.sqlite*"):
        file.unlink()
    assert dlcmd("ls", "-l", "-R", "pets").out == listing  # from the snapshot
    assert "dlcmd recover" in dlcmd("verify", "pets", code=15).out.decode()
    assert b"recovered 1 chunk with 7 entries: pets has 3 files" in dlcmd("recover", "pets").out
    assert dlcmd("ls", "-l", "-R", "pets").out == listing
    assert b"checked 1 chunk" in dlcmd("verify", "pets").out
    dlcmd("recover", "--since", "1h", "pets")
    dlcmd("recover", "--since", "2020-01-31T12:00", "pets")
    dlcmd("recover", "--since", "1960-01-31", "pets")
    assert "bad time" in dlcmd("recover", "--since", "yesterday", "pets", code=2).err
    dlcmd("recover", "gone", code=10)
    dlcmd("recover", "--url", "file:///nowhere", "pets", code=13)
    assert not Path("/nowhere").exists()


def test_recover_names_chunks_that_it_cannot_read(dlcmd: Dlcmd, pets: Path) -> None:
    (chunk,) = chunks(dlcmd)
    chunk.write_bytes(chunk.read_bytes()[:100])
    result = dlcmd("recover", "--json", "pets", code=15)
    assert result.objects[-1]["sound"] is False
    assert "truncated chunk" in json.dumps(result.objects[-1]["problems"])
    assert "4 problems found" in result.err  # the chunk, and each of its files


@each_row(
    "name",
    ["../other", "a/b", "-rf", "", "a" * 300, "%2e%2e", ".", "a b", "pets\n", "\u0661", "a\udcff"],
)
def test_M9_bad_names_make_nothing(dlcmd: Dlcmd, tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "src", {"a": b"1"})
    verbs = [
        ["delete-dataset", "--yes", "--", name],
        ["verify", "--", name],
        ["recover", "--", name],
        ["save-meta", "--", name, str(tmp_path / "file")],
        ["mount", "--", name, str(tmp_path)],
    ]
    if name != "a/b":  # here it is a path
        verbs += [["put", "--", str(source), name], ["ls", "--", name], ["cat", "--", name]]
    for words in verbs:
        result = dlcmd(*words, code=2)
        assert re.search("bad dataset name|name of a dataset is expected", result.err), words
        assert len(result.err.splitlines()) == 1
    assert not dlcmd.store.exists()
    assert not (tmp_path / "file").exists()
