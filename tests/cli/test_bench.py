"""Tests of `dlcmd bench`: it measures, and leaves nothing behind, whatever happens."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import PermissionDenied
from diesel_fs.system.mountinfo import mounts
from tests.trees import write
from tests.waiting import wait_until

from .conftest import Dlcmd

MEASURES = [
    "put", "API: read_many", "API: get", "API: stat", "API: stat_many",
    "scan of a mount", "read through a mount", "the same again",
]  # fmt: skip
SMALL = ("--files", "250", "--size", "1K")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for all that programs keep, which must be empty at the end."""
    folder = tmp_path / "state"
    folder.mkdir()
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR"):
        (folder / name).mkdir()
        monkeypatch.setenv(name, str(folder / name))
    yield folder
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert [*(folder / "TMPDIR").iterdir()] == []
    assert [each.path for each in mounts() if "diesel-bench-" in each.path] == []


@pytest.mark.fuse
def test_all_rates_are_measured(dlcmd: Dlcmd, state: Path) -> None:
    *progress, result = dlcmd("--json", "bench", *SMALL, "--folder", state / "TMPDIR").objects
    assert all(each["event"] == "progress" for each in progress)
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["measure"] for row in rows] == MEASURES
    assert all(row["per_s"] > 0 and row["limited_by"] for row in rows)
    assert [row["bytes_per_s"] for row in rows if row["unit"] == "files"].count(None) == 0
    lines = dlcmd("bench", *SMALL).out.decode().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["250 files of 1.0 kB", *MEASURES]
    assert not dlcmd.store.exists()  # which DIESEL_URL names


@pytest.mark.fuse
def test_a_named_repository_stays_as_it_was(dlcmd: Dlcmd, state: Path, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    dlcmd("--url", dlcmd.store.as_uri(), "bench", *SMALL)
    assert dlcmd("ls").out == b"pets\n"
    assert len([*dlcmd.store.glob("datasets/*/chunks/*/*")]) == 1
    dlcmd("verify", "pets")
    missing = (tmp_path / "none").as_uri()
    assert "there is no repository" in dlcmd("--url", missing, "bench", *SMALL, code=13).err
    for path in state.rglob("*"):  # of `put` and `ls`
        if path.is_file():
            path.unlink()


def test_where_nothing_can_be_mounted_the_rows_say_why(
    dlcmd: Dlcmd, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise PermissionDenied("there is no /dev/fuse", advice="run `modprobe fuse`")

    monkeypatch.setattr("dlcmd.verbs.bench.mount_in_background", refuse)
    lines = dlcmd("bench", *SMALL).out.decode().splitlines()
    assert [line for line in lines if "cannot mount here: there is no /dev/fuse" in line] == (
        lines[-3:]
    )


def test_bad_numbers_are_errors(dlcmd: Dlcmd, state: Path, tmp_path: Path) -> None:
    for option, value in (("--files", "0"), ("--size", "0"), ("--size", "much")):
        dlcmd("bench", option, value, code=2)
    dlcmd("bench", "--folder", tmp_path / "none", code=10)
    result = dlcmd("bench", "--files", "10000000", "--size", "1G", code=16)
    assert "make fewer with --files" in result.err


@pytest.mark.fuse
@pytest.mark.parametrize(("moment", "files"), [("it is put", 2_000), ("it is mounted", 500)])
def test_interrupted_it_leaves_nothing(dlcmd: Dlcmd, state: Path, moment: str, files: int) -> None:
    """Two signals, of which the second one comes while it cleans up."""
    place = state / "TMPDIR"
    looks: dict[str, Callable[[], bool]] = {
        "it is put": lambda: any(place.glob("*/store/datasets/*/chunks")),
        "it is mounted": lambda: any("diesel-bench-" in each.path for each in mounts()),
    }
    seen = looks[moment]
    with dlcmd.start("bench", "--files", str(files), "--size", "1K") as process:
        wait_until(lambda: seen() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 143), err
    assert os.listdir(place) == []
