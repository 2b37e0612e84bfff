"""Tests of `dlcmd get` and `cat`: which files they write where, and which they leave alone."""

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disks import small_disk
from tests.trees import facts, odd_tree, write

from .conftest import Dlcmd

NOBODY = 65534


@pytest.fixture
def pets(dlcmd: Dlcmd, tmp_path: Path) -> Path:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"22", "sub/in/c": b"333"})
    (source / "link").symlink_to("../outside")
    dlcmd("put", source, "pets")
    return source


def test_a_second_get_of_a_folder_writes_nothing(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    out = tmp_path / "new/out"
    assert dlcmd("get", "pets", out).out == b"got 3 files (6 B); 0 unchanged\n"
    assert facts(out) == facts(pets)
    written = {path: path.lstat().st_ino for path in out.rglob("*")}
    assert dlcmd("get", "pets", out).out == b"got 0 files (0 B); 4 unchanged\n"
    assert {path: path.lstat().st_ino for path in out.rglob("*")} == written
    dlcmd("get", "pets/sub", tmp_path / "part")
    assert facts(tmp_path / "part") == facts(pets / "sub")


def test_a_file_or_link_comes_back_under_a_name(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    dlcmd("get", "pets/sub/b", tmp_path / "file")
    dlcmd("get", "pets/sub/b", f"{tmp_path}/new/")
    dlcmd("get", "pets/link", tmp_path / "new")
    assert (tmp_path / "file").read_bytes() == b"22"
    assert (tmp_path / "file").stat().st_mtime_ns == (pets / "sub/b").stat().st_mtime_ns
    assert sorted(os.listdir(tmp_path / "new")) == ["b", "link"]
    assert os.readlink(tmp_path / "new/link") == "../outside"
    assert "make it first" in dlcmd("get", "pets/a", tmp_path / "gone/x", code=10).err


def test_M4_replacing_other_files_needs_force(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", {"a": b"mine", "sub/b": b"22"})
    (out / "a").chmod(0o400)
    os.mkfifo(out / "link")  # opening it would wait for ever
    errors = dlcmd("get", "pets", out, code=3).err
    assert "dlcmd: a: something different is there; --force replaces it" in errors
    assert "dlcmd: link: something different is there" in errors
    assert "dlcmd: sub/b: something different is there" in errors  # it has another time
    assert (out / "a").read_bytes() == b"mine"
    assert (out / "sub/in/c").read_bytes() == b"333"
    dlcmd("get", "--force", "pets", out)
    assert facts(out, times=False) == facts(pets, times=False)
    out = write(tmp_path / "other", {"a/keep": b"", "sub": b"a file"})
    errors = dlcmd("get", "pets", out, code=3).err
    assert "dlcmd: a: a folder is there" in errors
    assert "dlcmd: sub: a file is there; --force replaces it" in errors
    assert "dlcmd: sub/b: a link or file stands where its folder should" in errors
    errors = dlcmd("get", "--force", "pets", out, code=3).err
    assert errors.splitlines()[0] == "dlcmd: a: a folder is there; remove it first"
    assert (out / "a/keep").exists()
    assert (out / "sub/in/c").read_bytes() == b"333"


def test_M3_a_link_that_is_there_is_not_followed(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"b": b"theirs"})
    out = tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to(outside)
    (out / "a").symlink_to(outside / "a")
    before = facts(outside)
    result = dlcmd("get", "pets", out, code=3)
    assert "sub/b: a link or file stands where its folder should" in result.err
    dlcmd("get", "--force", "pets", out)
    assert facts(out, times=False) == facts(pets, times=False)
    assert facts(outside) == before


@pytest.fixture
def ordinary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if os.geteuid():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, NOBODY, NOBODY)
        for kind in ("CACHE", "CONFIG"):
            monkeypatch.setenv(f"XDG_{kind}_HOME", f"{name}/{kind}")
        monkeypatch.setenv("DIESEL_URL", f"file://{name}/store")
        os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_M5_modes_come_back_without_their_special_bits(dlcmd: Dlcmd, ordinary: Path) -> None:
    tmp_path = ordinary
    source = write(tmp_path / "src", {"a": b"1", "closed/b": b"2", "closed/in/c": b"3"})
    (source / "a").chmod(0o4777)
    (source / "closed/in").chmod(0o500)
    (source / "closed").chmod(0o2555)
    dlcmd("put", source, "pets")
    for _ in range(2):  # the second time into folders that are read-only
        dlcmd("get", "pets", tmp_path / "out")
        for name, mode in {"a": 0o777, "closed": 0o555, "closed/in": 0o500}.items():
            assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == mode
        assert facts(tmp_path / "out") == facts(source)
    (tmp_path / "out/closed").chmod(0o755)
    (tmp_path / "out/closed/b").unlink()
    (tmp_path / "out/closed").chmod(0o000)
    dlcmd("get", "pets", tmp_path / "out", code=3)  # no option opens it
    assert stat.S_IMODE((tmp_path / "out/closed").stat().st_mode) == 0
    result = dlcmd("get", "--force", "pets", tmp_path / "out")
    assert result.out.startswith(b"got 1 file")
    assert facts(tmp_path / "out", times=False) == facts(source, times=False)
    for folder in (source / "closed", source / "closed/in", tmp_path / "out/closed"):
        folder.chmod(0o755)


def test_a_full_destination_keeps_its_mode(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    """`get pets /tmp` must not give /tmp the mode of the dataset's root."""
    out = write(tmp_path / "out", {"other": b""})
    out.chmod(0o1777)
    dlcmd("get", "pets", out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o1777


def test_bad_sources_and_destinations_are_refused(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> None:
    assert "lies in the repository" in dlcmd("get", "pets", dlcmd.store / "x", code=2).err
    assert "not a folder" in dlcmd("get", "pets", pets / "a", code=2).err
    dlcmd("get", "pets", code=2)
    dlcmd("get", "pets", tmp_path / "x", "--tar", "-", code=2)
    for missing in ("pets/gone", "gone"):
        dlcmd("get", missing, tmp_path / "x", code=10)


def test_H9_a_path_of_4000_bytes_is_put_and_written_back(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    folder = os.open(source, os.O_DIRECTORY)
    names = [f"{i:0199d}" for i in range(24)]
    for name in names:  # no system call takes the whole path
        os.mkdir(name, dir_fd=folder)
        deeper = os.open(name, os.O_DIRECTORY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
        file.write(b"deep")
    os.close(folder)
    dlcmd("put", source, "deep")
    path = "/".join([*names, "file"])
    assert len(path) > 4000
    assert dlcmd("cat", f"deep/{path}").out == b"deep"
    dlcmd("get", "deep", tmp_path / "out")
    found = [(names, files) for _, names, files, _ in os.fwalk(tmp_path / "out")]
    assert found == [*(([name], []) for name in names), ([], ["file"])]
    dlcmd("put", tmp_path / "out", "again")
    assert dlcmd("cat", f"again/{path}").out == b"deep"


def test_a_tar_comes_back_by_a_name_or_a_pipe(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "src")
    dlcmd("put", source, "odd")
    dlcmd("get", "odd", "--tar", tmp_path / "odd.tar")
    result = dlcmd("get", "odd", "--tar", "-")
    assert result.out == (tmp_path / "odd.tar").read_bytes()
    dlcmd("put", "--tar", tmp_path / "odd.tar", "again")
    dlcmd("get", "again", tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)
    assert "--force" in dlcmd("get", "odd", "--tar", tmp_path / "odd.tar", code=12).err
    dlcmd("get", "odd", "--force", "--tar", tmp_path / "odd.tar")
    one = dlcmd("get", "odd/sub/deeper/file", "--tar", "-").out
    with tarfile.open(fileobj=io.BytesIO(one)) as tar:
        assert tar.getnames() == ["file"]
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert dlcmd.program("get", "odd", "--tar", "/dev/stdout").out == result.out
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    for force in ([], ["--force"]):
        dlcmd("get", "odd/sub/deeper/file", "--tar", tmp_path / "fifo", *force)
        assert os.read(reader, 1 << 16) == one
        assert (tmp_path / "fifo").is_fifo()
    os.close(reader)
    assert "is a folder" in dlcmd("get", "odd", "--tar", tmp_path, "--force", code=2).err
    for name in (f"{tmp_path}/none/tar", f"{tmp_path}/./none//tar"):
        assert f"cannot write {name}: " in dlcmd("get", "odd", "--tar", name, code=12).err


def test_E9_a_full_disk_names_the_file_that_is_not_written(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """Each verb that writes a file that its user names does so."""
    dlcmd("put", write(tmp_path / "src", {"a": os.urandom(1 << 20)}), "pets")
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        tar = disk / "x.tar"
        result = dlcmd("get", "pets", "--tar", tar, code=16).err
        assert result == f"dlcmd: cannot write {tar}: No space left on device\n"
        assert list(disk.iterdir()) == []
        (disk / "fill").write_bytes(bytes(64 << 10))
        dlcmd("user", "add", "ann", "--key-out", tmp_path / "key")
        for words in (["save-meta", "pets"], ["user", "export"]):
            result = dlcmd(*words, disk / "file", code=16).err
            assert f"cannot write {disk / 'file'}: No space left" in result
        assert [path.name for path in disk.iterdir()] == ["fill"]
    result = dlcmd("get", "pets", "--tar", "/dev/full", code=16).err
    assert result.startswith("dlcmd: cannot write /dev/full: No space left")
    for words in (["get", "pets", "--tar", "-"], ["cat", "pets/a"], ["ls", "pets"]):
        with dlcmd.start(*words, stdout=os.open("/dev/full", os.O_WRONLY)) as process:
            _, err = process.communicate(timeout=60)
        full = b"dlcmd: standard output: No space left on device\n"
        assert (process.returncode, err) == (16, full)


def test_damaged_files_are_named_and_the_others_are_written(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"aaaa", "b": b"bbbb", "c": b"cccc"})
    dlcmd("put", "--compress", "none", source, "pets")
    (chunk,) = (path for path in dlcmd.store.glob("datasets/*/chunks/*/*"))
    chunk.write_bytes(chunk.read_bytes().replace(b"bbbb", b"bxbb"))
    result = dlcmd("get", "pets", tmp_path / "out", code=3)
    assert "dlcmd: b: pets/b is damaged in chunk" in result.err
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "c"]
    assert "is damaged" in dlcmd("get", "pets", "--tar", tmp_path / "x.tar", code=3).err
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert [name for name in tar.getnames() if name != "."] == ["a", "c"]
    assert "is damaged" in dlcmd("cat", "pets/b", code=15).err
    assert "problem: " in dlcmd("verify", "pets", code=15).out.decode()
    assert dlcmd("verify", "--headers-only", "pets").err == ""
    assert [*tmp_path.rglob(".dlcmd-*")] == []


def test_cat_writes_files_and_nothing_else(dlcmd: Dlcmd, pets: Path) -> None:
    assert dlcmd("cat", "pets/a", "pets/sub/in/c", "pets/a").out == b"13331"
    for folder in ("pets/sub", "pets"):
        assert "is a folder" in dlcmd("cat", folder, code=2).err
    assert "is a link to '../outside'" in dlcmd("cat", "pets/link", code=2).err
    assert "no 'gone'" in dlcmd("cat", "pets/gone", code=10).err
