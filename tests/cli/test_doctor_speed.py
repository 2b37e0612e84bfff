"""Tests of `dlcmd doctor --speed`: it measures rates, and leaves nothing behind."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import PermissionDenied
from diesel_fs.system.mountinfo import mounts
from tests.waiting import wait_until

from .conftest import Dlcmd

MEASURES = ["speed.put", "speed.api", "speed.scan", "speed.read", "speed.again"]


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlcmd.doctor.speed.FILES", 250)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for all files that programs keep. It must be empty at the end."""
    folder = tmp_path / "state"
    folder.mkdir()
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR"):
        (folder / name).mkdir()
        monkeypatch.setenv(name, str(folder / name))
    yield folder
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert [*(folder / "TMPDIR").iterdir()] == []
    assert [each.path for each in mounts() if "diesel-speed-" in each.path] == []


def rates(dlcmd: Dlcmd) -> list[dict[str, object]]:
    """The findings about speed. The exit code is that of a repository that does not exist."""
    [result] = dlcmd("doctor", "--speed", "--quick", "--json", code=3).objects
    findings = result["findings"]
    assert isinstance(findings, list)
    return [each for each in findings if each["check"].startswith("speed")]


@pytest.mark.fuse
@pytest.mark.usefixtures("few_files", "state")
def test_all_rates_are_measured(dlcmd: Dlcmd) -> None:
    found = rates(dlcmd)
    assert [each["check"] for each in found] == MEASURES
    for each in found:
        assert each["state"] == "ok"
        assert each["figures"]["per_s"] > 0  # type: ignore[index]  # of JSON
    assert not dlcmd.store.exists()  # which DIESEL_URL names


@pytest.mark.usefixtures("few_files", "state")
def test_a_failed_mount_is_a_finding(dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionDenied("there is no /dev/fuse", advice="run `modprobe fuse`")

    monkeypatch.setattr("dlcmd.doctor.speed.mount", refuse)
    [found] = [each for each in rates(dlcmd) if each["check"] == "speed.mount"]
    assert found["state"] == "warning"
    assert "cannot mount here: there is no /dev/fuse" in str(found["found"])


@pytest.mark.usefixtures("state")
def test_a_disk_without_room_is_a_finding(dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlcmd.doctor.speed.FILES", 1 << 50)
    [found] = rates(dlcmd)
    assert found["state"] == "fault"
    assert "TMPDIR" in str(found["cure"])


@pytest.mark.fuse
@pytest.mark.parametrize("moment", ["it is put", "it is mounted"])
def test_interrupted_it_leaves_nothing(dlcmd: Dlcmd, state: Path, moment: str) -> None:
    """Two signals come, the second one while it cleans up."""
    place = state / "TMPDIR"
    looks: dict[str, Callable[[], bool]] = {
        "it is put": lambda: any(place.glob("*/store/datasets/*/chunks")),
        "it is mounted": lambda: any("diesel-speed-" in each.path for each in mounts()),
    }
    seen = looks[moment]
    with dlcmd.start("doctor", "--speed", "--quick") as process:
        wait_until(lambda: seen() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 143), err
    assert os.listdir(place) == []
