"""Where the kernel reads a native mount from: files, files through FUSE, or loop devices.

The mount chooses by the kernel's abilities, so the tests let its daemon meet other kernels
(`other_kernels.py`).
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import PermissionDenied
from diesel_fs.mounts import mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from tests.loop_devices import files_of_loop_devices, only_user_of_loop_devices
from tests.mounts.conftest import PROGRAM, mounting, request_for
from tests.mounts.folder_dataset import IDENTITY_PREFIX
from tests.mounts.observed import Processes
from tests.mounts.other_kernels import KERNEL
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

pytestmark = [pytest.mark.fuse, needs_root]

ROOT_FILE = "memfd:diesel-root (deleted)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Images of its own, and no other test uses loop devices meanwhile."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with only_user_of_loop_devices():
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for number in range(60):
        path = folder / f"folder{number % 7}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number**3))
    (folder / "large").write_bytes(os.urandom(5_000_001))
    (folder / "link").symlink_to("folder1/file1")
    return folder


def loops() -> list[str]:
    return [
        name
        for name in files_of_loop_devices()
        # The name of this dataset's image begins so.
        if name == ROOT_FILE or name.startswith(("content-", IDENTITY_PREFIX))
    ]


def assert_same(source: Path, shown: Path) -> None:
    names = sorted(path.relative_to(source) for path in source.rglob("*"))
    assert sorted(path.relative_to(shown) for path in shown.rglob("*")) == names
    for name in names:
        if (source / name).is_file():
            assert (shown / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("kernel", ["", "no-file-mounts", "zeros"])
def test_the_tree_is_the_same_on_files_and_on_loop_devices(
    kernel: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL, kernel)
    with mounting(source, tmp_path / "mount", "native") as mounted:
        assert len(loops()) == (3 if kernel else 0)
        assert_same(source, mounted.at)
        assert (mounted.at / ".diesel" / "snapshot").is_file()
        found = mounted_at(str(mounted.at))
        assert found is not None
        assert found.is_native
        assert found.source == "folder@7"
        umount(mounted.at)
        wait_until(lambda: not loops())


def test_an_image_on_tmpfs_is_read_through_the_mount(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EROFS cannot use files of tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        with mounting(source, tmp_path / "mount", "native") as mounted:
            assert not loops()
            assert_same(source, mounted.at)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("no-erofs", "no EROFS"),
        ("no-file-mounts no-loop-devices", "loop devices are in use"),
        ("zeros no-loop-devices", "shows zeros"),
    ],
)
def test_a_kernel_without_native_mounts_gives_an_error(
    kernel: str, words: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL, kernel)
    at = tmp_path / "mount"
    with pytest.raises(PermissionDenied, match=words) as caught:
        mount(request_for(source, at, "native"), program=PROGRAM)
    assert "--session auto" in caught.value.advice
    assert mounted_at(str(at)) is None
    wait_until(lambda: not loops())


def test_loop_devices_end_with_a_mount_whose_processes_were_killed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL, "no-file-mounts")
    with mounting(source, tmp_path / "mount", "native") as mounted:
        for pid in Processes.of(mounted.at)[:2]:
            os.kill(pid, signal.SIGKILL)
        umount(mounted.at, force=True)
        wait_until(lambda: not loops())
