"""Mounts of real datasets, which are changed, deleted and purged while they are mounted."""

import errno
import logging
import mmap
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.errors import ConflictError
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import holders_of
from diesel_fs.repository.leases import leased_versions
from diesel_fs.repository.local import LocalRepository
from tests.mounts.observed import FILE_BYTES, current_stats, figures, holding, mounted, noise, put

pytestmark = pytest.mark.fuse


@pytest.fixture
def at(tmp_path: Path) -> Path:
    folder = tmp_path / "mount"
    folder.mkdir()
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def read_or_errno(path: Path) -> bytes | int:
    try:
        return path.read_bytes()
    except OSError as error:
        return error.errno or -1


def test_an_empty_dataset_is_an_empty_folder(url: str, at: Path, session: str) -> None:
    put(url, {})
    with mounted(MountRequest(url, "ds", str(at), session=session)):
        assert list(os.walk(at)) == [(str(at), [], [])]
        assert read_or_errno(at / "a") == errno.ENOENT
        assert os.statvfs(at).f_blocks >= 1
        assert stats(at)["bytes"] == 0
        assert (at / ".diesel/snapshot").stat().st_size > 0
        with pytest.raises(OSError, match=r".") as raised:
            (at / "a").write_bytes(b"")
        assert raised.value.errno == errno.EROFS


def test_H16_a_changed_or_deleted_dataset_stays_in_a_mount(
    url: str, at: Path, session: str
) -> None:
    """Another dataset with the same name, paths and sizes may have taken its place."""
    before = {f"f{seed}": noise(seed) for seed in range(12)} | {"folder/f": noise(12)}
    put(url, before, one_each=True)
    with mounted(MountRequest(url, "ds", str(at), session=session)):
        with connect("ds", url) as dataset:
            dataset.put(noise(100), "f1")
            dataset.put(noise(101), "new")
            dataset.delete("f2")
            dataset.delete("folder", recursive=True)
            dataset.flush()
            assert dataset.version > figures(stats(at))["version"]
        names = sorted({name.partition("/")[0] for name in before})
        assert sorted(os.listdir(at)) == names
        assert {name: (at / name).read_bytes() for name in list(before)[:6]} == {
            name: before[name] for name in list(before)[:6]
        }
        assert read_or_errno(at / "new") == errno.ENOENT
        with connect("ds", url) as dataset:
            dataset.delete_dataset()
        put(url, {name: noise(100 + seed) for seed, name in enumerate(before)}, one_each=True)
        # The kernel has the pages of some; the mount's lease spares the chunks of all.
        assert {name: read_or_errno(at / name) for name in before} == before
        assert sorted(os.listdir(at)) == names


def test_H16_a_missing_chunk_gives_EIO(url: str, at: Path, session: str, tmp_path: Path) -> None:
    before = {f"f{seed:02}": noise(seed) for seed in range(40)}
    put(url, before, one_each=True)
    log = tmp_path / "log"
    with mounted(MountRequest(url, "ds", str(at), session=session, log_file=str(log))):
        assert (at / "f00").read_bytes() == before["f00"]
        for chunk in (tmp_path / "store").glob("datasets/*/chunks/*/*"):
            chunk.unlink()
        other = {name: noise(100 + seed) for seed, name in enumerate(before)}
        put(url, other, "other", one_each=True)
        found = {name: read_or_errno(at / name) for name in before}
        assert found["f00"] == before["f00"]  # the kernel has its pages
        assert all(found[name] in (before[name], errno.EIO) for name in before)
        assert found["f39"] == errno.EIO  # it was not read ahead
        assert "snapshot too old" in log.read_text()


@pytest.mark.only_session("native")
def test_a_mount_leases_its_version(url: str, at: Path, session: str, tmp_path: Path) -> None:
    put(url, {"a": b"a"})
    with LocalRepository.open(url) as repository:
        view, objects = repository.view("ds"), repository.objects
        with mounted(MountRequest(url, "ds", str(at), session=session)):
            assert leased_versions(objects, view.identity, time.time()) == {view.version}
            umount(at)
        assert leased_versions(objects, view.identity, time.time()) == set()


def test_H21_a_mount_of_a_newer_version_shows_no_old_page(url: str, at: Path, session: str) -> None:
    """Path, size, inode number and mount point are the same."""
    old, new = noise(1), noise(2)
    request = MountRequest(url, "ds", str(at), session=session)
    put(url, {"a": old})
    with mounted(request):
        assert (at / "a").read_bytes() == old
        kept = os.open(at / "a", os.O_RDONLY)
        try:
            put(url, {"a": new})
            umount(at, lazy=True)
            with mounted(request):
                assert (at / "a").stat().st_ino == os.stat(kept).st_ino
                assert (at / "a").read_bytes() == new
                with (at / "a").open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                assert mapped[:] == new
                mapped.close()
                assert os.pread(kept, FILE_BYTES, 0) == old
                umount(at)
        finally:
            os.close(kept)
    with mounted(request):
        assert (at / "a").read_bytes() == new


def test_H19_killed_readers_leave_no_handle_behind(url: str, at: Path, session: str) -> None:
    """Each OPEN gets its RELEASE."""
    files = {f"f{seed}": noise(seed) for seed in range(12)}
    put(url, files, one_each=True)
    with mounted(MountRequest(url, "ds", str(at), session=session)), ExitStack() as stack:
        holds = (f"f = open('{at}/{name}', 'rb'); f.read(9)" for name in files)
        readers = [stack.enter_context(holding(hold, "f.read()")) for hold in holds]
        for reader in readers[::3]:
            reader.send_signal(signal.SIGKILL)
        assert [reader.end() for reader in readers] == [""] * len(readers)
        found = mounted_at(str(at))
        assert found is not None
        assert holders_of(found) == []
        # The kernel session gets no OPEN, so it has nothing to release.
        assert session == "native" or "release" not in figures(current_stats(at), "requests")
        assert {name: (at / name).read_bytes() for name in files} == files
        umount(at)  # it would fail if a process used the mount


@pytest.fixture
def saved(url: str, at: Path, session: str, tmp_path: Path) -> MountRequest:
    put(url, {"a": b"old"})
    with connect("ds", url) as dataset:
        dataset.save_meta(tmp_path / "snap")
    put(url, {"a": b"new"})
    return MountRequest(url, "ds", str(at), session=session, snapshot_file=str(tmp_path / "snap"))


@pytest.mark.only_session("native")
def test_E4_a_stale_snapshot_is_refused_or_warns_the_user(
    saved: MountRequest, at: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(saved):
        assert (at / "a").read_bytes() == b"old"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "is of version" in warning.getMessage()
    caplog.clear()
    for request in (replace(saved, stale="allow"), replace(saved, offline=True)):
        with mounted(request):
            assert (at / "a").read_bytes() == b"old"
    assert caplog.records == []
    with pytest.raises(ConflictError) as refused:
        mount(replace(saved, stale="refuse"))
    assert refused.value.exit_code == 12
    assert str(refused.value).count("is of version") == 1
    assert str(refused.value).count("--stale warn") == 1
    assert mounted_at(str(at)) is None
