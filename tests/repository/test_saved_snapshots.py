"""Snapshots in files that a user saves: written whole or not at all, and not needed once read."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import NoSpaceError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.private_copies import open_snapshot_file, save_snapshot

from ..small_disks import small_disk
from ..trees import write
from .folder_puts import put_folder

FILES = {f"d{i % 7}/file-{i}": bytes([i % 251]) * i for i in range(500)}


@pytest.fixture
def view(repository: LocalRepository, tmp_path: Path) -> Snapshot:
    put_folder(repository, write(tmp_path / "source", FILES))
    return repository.view("ds")


@pytest.fixture
def saved(repository: LocalRepository, view: Snapshot, tmp_path: Path) -> Path:
    file = tmp_path / "ds.snapshot"
    save_snapshot(view, file)
    return file


def _truncate(file: Path) -> None:
    os.truncate(file, 0)


def _replace(file: Path) -> None:
    other = file.with_suffix(".other")
    other.write_bytes(b"something else")
    other.rename(file)


def _overwrite(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.write(b"\xff" * size)


READ_ALL = """
import os, sys
from pathlib import Path
from diesel_fs.repository.private_copies import open_snapshot_file
view = open_snapshot_file(Path(sys.argv[1]))
print("read", flush=True)
sys.stdin.readline()
print(sum(entry.size for entry in view.stat_many(view.files())), len(view.paths(view.files())))
"""


def reading(saved: Path, home: Path) -> "subprocess.Popen[str]":
    """A process that opens the file, reports that, and reads all of it on request."""
    pipe, environment = subprocess.PIPE, {**os.environ, "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-c", READ_ALL, str(saved)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("harm", [_truncate, _replace, _overwrite, Path.unlink])
def test_E8_later_changes_of_the_file_do_not_matter(
    view: Snapshot, saved: Path, tmp_path: Path, harm: Callable[[Path], None], private: bool
) -> None:
    """In a separate process: a mapped file that is truncated would kill it (Z10)."""
    home = tmp_path / "home"
    home.mkdir()
    if not private:  # without a place for a copy it stays in memory
        (home / "cache").write_bytes(b"in the way")
    with reading(saved, home / "cache") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "read\n"
        harm(saved)
        out, _ = process.communicate("go\n", timeout=30)
    assert process.returncode == 0
    assert out.split() == [str(sum(map(len, FILES.values()))), str(len(FILES))]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "size=96k") as point:
        yield point


def test_E9_a_full_disk_leaves_the_previous_snapshot(
    repository: LocalRepository, view: Snapshot, small: Path, tmp_path: Path
) -> None:
    file = small / "ds.snapshot"
    save_snapshot(view, file)
    before = file.read_bytes()
    more = write(tmp_path / "more", {f"more-{i}": b"x" for i in range(500)})
    put_folder(repository, more)
    with pytest.raises(NoSpaceError, match=r"ds\.snapshot"):
        save_snapshot(repository.view("ds"), file)
    assert [each.name for each in small.iterdir()] == [file.name]
    assert file.read_bytes() == before
    assert open_snapshot_file(file).version == view.version


@pytest.mark.parametrize("nodes", [1, 8])
def test_processes_share_one_file(view: Snapshot, saved: Path, tmp_path: Path, nodes: int) -> None:
    """On a shared file system: each node keeps a copy, which its processes share."""
    started = []
    for number in range(8):
        home = tmp_path / f"node{number % nodes}"
        home.mkdir(exist_ok=True)
        started.append(reading(saved, home))
    outputs = [process.communicate("go\n", timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0] * 8
    assert outputs == [["read", str(sum(map(len, FILES.values()))), str(len(FILES))]] * 8
    copies = [path for path in tmp_path.glob("node*/diesel/snapshots/*") if path.is_file()]
    assert len(copies) == nodes
    assert {path.read_bytes() for path in copies} == {saved.read_bytes()}
