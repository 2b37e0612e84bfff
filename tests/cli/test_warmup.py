"""Tests of `dlcmd warmup`, on real mounts: loaded files are read without the store."""

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import pytest

from diesel_fs.errors import DieselError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import launcher, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.plans.control import Control, explicit
from diesel_fs.mounts.warmup import Warmup
from tests.tiers import fast_first
from tests.trees import facts, write
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

from .conftest import Dlcmd

pytestmark = pytest.mark.fuse

FILES = {f"{folder}/{number}": os.urandom(9_000) for folder in "ab" for number in range(300)}


class Mount(Protocol):
    def __call__(self, *options: str) -> Path: ...


@pytest.fixture
def pets(dlcmd: Dlcmd, tmp_path: Path) -> Path:
    source = write(tmp_path / "src", {**FILES, "a/empty file": b""})
    (source / "empty").mkdir()
    (source / "link").symlink_to("b")
    (source / "outside").symlink_to(tmp_path)
    dlcmd("put", "--chunk-size", "256K", source, "pets")
    return source


@pytest.fixture
def mounted(dlcmd: Dlcmd, pets: Path, tmp_path: Path) -> Iterator[Mount]:
    at = tmp_path / "mnt"

    def mount(*options: str) -> Path:
        dlcmd("mount", *options, "pets", at)
        return at

    yield mount
    while mounted_at(str(at)) is not None:
        with suppress(DieselError):
            umount(at, force=True)


@contextmanager
def moved_away(found: Iterable[Path], *, behind_folders: bool = False) -> Iterator[None]:
    """Meanwhile these are not there, or folders stand in their places."""
    moved = [(each, Path(f"{each}.away")) for each in found]
    for each, away in moved:
        each.rename(away)
        if behind_folders:
            each.mkdir()
    try:
        yield
    finally:
        for each, away in moved:
            if behind_folders:
                each.rmdir()
            away.rename(each)


def without_contents(store: Path) -> AbstractContextManager[None]:
    return moved_away(store.glob("datasets/*/chunks"))


def with_failing_store(store: Path) -> AbstractContextManager[None]:
    return moved_away(store.glob("datasets/*/chunks/*/*"), behind_folders=True)


ATTEMPTS = 5


def assert_loads(dlcmd: Dlcmd, at: Path, place: Path, paths: Iterable[str]) -> None:
    """Assert that after a warmup of `place` these files are read without the store.

    The machine may take idle pages away meanwhile, but not at each attempt.
    """
    failed: list[list[str]] = []
    while [] not in failed:
        assert len(failed) < ATTEMPTS, failed
        dlcmd("warmup", place)
        failed.append([])
        with without_contents(dlcmd.store):
            for path in paths:
                try:
                    assert (at / path).read_bytes() == FILES[path]
                except OSError:
                    failed[-1].append(path)


def loaded(result: dict[str, object]) -> tuple[object, ...]:
    names = ("files", "memory_files", "cache_files", "left_files")
    return tuple(result[name] for name in names)


@pytest.mark.parametrize("session", fast_first(["native", "kernel"]))
def test_loaded_files_need_no_store(dlcmd: Dlcmd, pets: Path, mounted: Mount, session: str) -> None:
    at = mounted("--session", session, "--memory", "256M")
    dlcmd("warmup", at / "b")
    with Control.connect(at) as control:
        assert _residency(control)["resident_entries"] == 300
        assert _streams(control) == []  # the plan is withdrawn
    (result,) = dlcmd("--json", "-q", "warmup", at / "a" / "1").objects
    assert result["path"] == "a/1"
    assert loaded(result) == (1, 1, 0, 0)
    assert b"301 files (2.7 MB) of" in dlcmd("warmup", at / "a").out
    assert_loads(dlcmd, at, at / "a", [path for path in FILES if path.startswith("a/")])
    assert dlcmd("warmup", "-q", f"{at}/").out == b""
    (result,) = dlcmd("--json", "-q", "warmup", at).objects
    assert loaded(result) == (601, 601, 0, 0)
    assert result["dataset"] == "pets"
    assert result["failed"] == []
    assert_loads(dlcmd, at, at, FILES)
    assert facts(at / "a") == facts(pets / "a")


@pytest.mark.parametrize("session", fast_first(["native", "kernel"]))
def test_H22_pages_of_failed_reads_are_no_hits(dlcmd: Dlcmd, mounted: Mount, session: str) -> None:
    """The kernel keeps the page of a READ that has failed, without contents."""
    at = mounted("--session", session, "--memory", "256M")
    dlcmd("warmup", at)

    def fails() -> bool:
        with (at / "a/7").open("rb") as file, suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return not file.read()
        return True

    with without_contents(dlcmd.store):
        wait_until(fails)  # a native mount keeps a copy in its content file for a moment
    assert_loads(dlcmd, at, at, FILES)


def test_too_small_a_memory_is_filled_and_the_right_one_named(
    dlcmd: Dlcmd, mounted: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = mounted("--memory", "4M")
    with monkeypatch.context() as patch:  # as in the first moment of a mount, before it reports
        early = {**launcher.stats(at), "residency": {}}
        patch.setattr(launcher, "stats", lambda _: early)
        assert 200 < Warmup.open(at).room.files < 400
    result = dlcmd("warmup", at, code=3)
    before, after = result.err.splitlines()
    assert "there is memory for" in before
    match = re.search(r"mount with --memory (\d+M)", after)
    assert match, after
    assert f"the mount on {at} has no room for them" in after
    (described,) = dlcmd("--json", "-q", "warmup", at, code=3).objects
    total, in_memory, cached, left = map(int, map(str, loaded(described)))
    assert (total, in_memory + left, cached) == (601, 601, 0)
    assert 200 < in_memory < 400
    assert f"{left} files" in before
    for path in ("a/299", "b/299"):  # files that were loaded before make way
        assert_loads(dlcmd, at, at / path, [path])
    dlcmd("umount", at)
    mounted("--memory", match[1])
    dlcmd("warmup", at)


def test_a_cache_gets_what_memory_cannot_hold(dlcmd: Dlcmd, mounted: Mount, tmp_path: Path) -> None:
    large = os.urandom(2_000_000)
    dlcmd("put", "--chunk-size", "256K", write(tmp_path / "more", {"large": large}), "pets/more")
    at = mounted("--memory", "8M", "--cache-dir", str(tmp_path / "cache"), "--cache-size", "64M")
    (result,) = dlcmd("--json", "-q", "warmup", at / "more").objects
    assert loaded(result) == (1, 0, 1, 0)
    (result,) = dlcmd("--json", "-q", "warmup", at).objects
    _, in_memory, cached, left = map(int, map(str, loaded(result)))
    assert (in_memory + cached, left) == (602, 0)
    assert cached > 300
    with without_contents(dlcmd.store):
        for path, content in (FILES | {"more/large": large}).items():
            assert (at / path).read_bytes() == content


def test_a_cache_that_is_too_small_is_reported(
    dlcmd: Dlcmd, mounted: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diesel_fs.mounts.warmup.PASSES_MAX", 2)
    at = mounted("--memory", "3M", "--cache-dir", str(tmp_path / "cache"), "--cache-size", "1M")
    result = dlcmd("warmup", at, code=3)
    assert "mount with a larger --cache-size or --memory" in result.err


def test_files_that_the_kernel_has_freed_are_loaded_again(dlcmd: Dlcmd, mounted: Mount) -> None:
    at = mounted("--session", "kernel", "--memory", "256M")
    dlcmd("warmup", at)
    for path in FILES:
        file = os.open(at / path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    assert_loads(dlcmd, at, at, FILES)


def test_places_where_nothing_can_be_loaded(dlcmd: Dlcmd, mounted: Mount, tmp_path: Path) -> None:
    at = mounted("--memory", "256M")
    assert "is in no mount of a dataset" in dlcmd("warmup", tmp_path, code=2).err
    assert "no file or folder" in dlcmd("warmup", at / "no such", code=10).err
    assert "DIR[/path] is empty" in dlcmd("warmup", "", code=2).err
    for own in (".diesel", ".diesel/stats"):
        assert "belongs to the mount on" in dlcmd("warmup", at / own, code=2).err
    assert f"leads to {tmp_path}" in dlcmd("warmup", at / "outside", code=2).err
    assert b"has no files to load" in dlcmd("warmup", at / "empty").out
    assert b"1 file (0 B)" in dlcmd("warmup", at / "a/empty file").out
    (tmp_path / "from outside").symlink_to(at / "link")
    for link in (at / "link", tmp_path / "from outside"):
        (result,) = dlcmd("--json", "-q", "warmup", link).objects
        assert (result["path"], result["files"]) == ("b", 300)
    dlcmd("warmup", code=2)


@needs_root
def test_other_views_of_a_mount_get_a_note(dlcmd: Dlcmd, mounted: Mount, tmp_path: Path) -> None:
    at, view = mounted("--session", "native", "--memory", "256M"), tmp_path / "view"
    view.mkdir()
    subprocess.run(["mount", "--bind", at, view], check=True)
    try:
        assert f"another view of the mount on {at};" in dlcmd("warmup", view, code=2).err
    finally:
        subprocess.run(["umount", view], check=True)
    for verb in ("stats", "top"):
        assert f"it lies in the mount on {at}\n" in dlcmd(verb, at / "a", code=2).err


def test_a_damaged_file_is_named(dlcmd: Dlcmd, mounted: Mount) -> None:
    for chunk in dlcmd.store.glob("datasets/*/chunks/*/*"):
        content = chunk.read_bytes()
        if (at_byte := content.find(FILES["a/77"])) >= 0:
            chunk.chmod(0o600)
            chunk.write_bytes(content[:at_byte] + b"damage" + content[at_byte + 6 :])
    at = mounted("--memory", "256M")
    result = dlcmd("warmup", at, code=3)
    assert "a/77: damaged, or cannot be read" in result.err
    assert "1 entry could not be loaded" in result.err
    assert b"600 files" in result.out


def test_warmup_waits_for_no_other_plan_that_has_the_memory(dlcmd: Dlcmd, mounted: Mount) -> None:
    at = mounted("--memory", "4M")
    with Control.connect(at) as control:
        snapshot = Snapshot((at / ".diesel/snapshot").read_bytes())
        control.announce("training", [explicit(epoch=0, entries=snapshot.files())])
        control.progress("training", 1)
        wait_until(lambda: bool(_residency(control)["waits_for_room"]))
        result = dlcmd("warmup", at / "b", code=3)
        assert "has no room for them" in result.err
        assert [each["name"] for each in _streams(control)] == ["training"]


def _residency(control: Control) -> dict[str, object]:
    found = control.stats()["residency"]
    assert isinstance(found, dict)
    return {**found}


def _streams(control: Control) -> list[dict[str, object]]:
    found = _residency(control)["streams"]
    assert isinstance(found, list)
    return found


@contextmanager
def _waiting_for_a_failing_store(dlcmd: Dlcmd, at: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with (
        with_failing_store(dlcmd.store),
        dlcmd.start("warmup", at) as process,
        Control.connect(at) as control,
    ):
        wait_until(lambda: bool(_streams(control)) and _residency(control)["failed_pushes"] != 0)
        yield process


def test_ctrl_c_ends_a_plan(dlcmd: Dlcmd, mounted: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    at = mounted("--memory", "256M")
    with _waiting_for_a_failing_store(dlcmd, at) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    with Control.connect(at) as control:
        assert _streams(control) == []
    with with_failing_store(dlcmd.store), monkeypatch.context() as patch:
        patch.setattr("diesel_fs.mounts.warmup.FAILING_S", 0.5)
        assert "cannot read its object store" in dlcmd("warmup", at, code=13).err
    dlcmd("warmup", at)


def test_a_mount_that_ends_meanwhile_is_an_error(dlcmd: Dlcmd, mounted: Mount) -> None:
    at = mounted("--memory", "256M")
    with _waiting_for_a_failing_store(dlcmd, at) as process:
        umount(at, force=True)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert f"the mount on {at} has ended".encode() in err


@pytest.mark.parametrize("session", fast_first(["native", "kernel"]))
def test_a_dead_mount_is_an_error(dlcmd: Dlcmd, mounted: Mount, session: str) -> None:
    at = mounted("--session", session, "--memory", "256M")
    (stats,) = dlcmd("--json", "stats", at).objects
    for name in ("pid", "server_pid"):
        os.kill(int(str(stats[name])), signal.SIGKILL)
    wait_until(lambda: "ended" in dlcmd("warmup", at, code=1).err)


def test_a_mount_whose_worker_has_ended_is_read(dlcmd: Dlcmd, mounted: Mount) -> None:
    at = mounted("--memory", "256M")

    def takes_plans() -> bool:
        with suppress(DieselError):
            control.resident([1])
            return True
        return False

    with Control.connect(at) as control:
        os.kill(int(str(_residency(control)["pid"])), signal.SIGKILL)
        wait_until(lambda: not takes_plans())
    assert_loads(dlcmd, at, at, FILES)
