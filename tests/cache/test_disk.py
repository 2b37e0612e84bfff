"""`DiskTier` keeps checked chunks in a folder, within its limits, whatever happens to the disk."""

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from diesel_fs.cache.disk import folder
from diesel_fs.cache.disk.folder import DISK_PAUSE_S
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.errors import ConflictError, NoSpaceError, PermissionDenied
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.storage.objects.store import StoreWrapper
from tests.rows import each_row

from ..small_disks import remount, small_disk
from .disk_tier import Chunks, Kept, content_of, counted, file_of, files, idle, put, tier_at


@pytest.fixture
def kept(place: Path, chunks: Chunks) -> Kept:
    return Kept(place, chunks)


def test_a_chunk_is_found_by_all_tiers_of_a_folder(place: Path, chunks: Chunks) -> None:
    one, other = tier_at(place), tier_at(place)
    for key, content in chunks.items():
        assert content_of(one, key) is None
        put(one, key, content)
        assert content_of(one, key) == content_of(other, key) == content
        assert one.reserve(key, len(content)) is None
    assert counted(other) == sum(map(len, chunks.values()))
    for path in place.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path  # J11: only the user can open it
    key, content = next(iter(chunks.items()))
    found = one.find(key)
    assert found is not None
    with found:
        other.drop(key)
        assert content_of(one, key) is None
        room = memoryview(bytearray(10))
        found.read_into(0, room)
        assert room == content[:10]
        with pytest.raises(EOFError):
            found.read_into(len(content) - 5, room)


def test_a_chunk_is_reserved_once(kept: Kept) -> None:
    one, other = kept.tier, tier_at(kept.place)
    first = one.reserve(kept.other, len(kept.more))
    assert first is not None
    for tier in (one, other):
        assert tier.reserve(kept.other, len(kept.more)) is None
    assert content_of(other, kept.other) is None
    first.cancel()
    assert counted(other) == len(kept.content)
    put(other, kept.other, kept.more)
    assert content_of(one, kept.other) == kept.more


def test_a_node_lists_evicts_and_makes_room_itself(place: Path, chunks: Chunks) -> None:
    limit_bytes = sum(map(len, chunks.values()))
    tier = tier_at(place, limit_bytes)
    assert tier.list_chunks(next(iter(chunks)).identity) == []
    assert tier.folder.free_bytes() == limit_bytes
    for key, content in chunks.items():
        put(tier, key, content)
    one, other, third, *_ = chunks
    assert sorted(tier.list_chunks(one.identity)) == sorted(key.id for key in chunks)
    assert tier.folder.free_bytes() == 0
    tier.evict([one, other, one])
    freed_bytes = len(chunks[one]) + len(chunks[other])
    assert tier.folder.free_bytes() == freed_bytes == limit_bytes - counted(tier)
    on_its_way = tier.reserve(one, len(chunks[one]))
    assert on_its_way is not None
    assert sorted(tier.list_chunks(one.identity)) == sorted({key.id for key in [*chunks][2:]})
    on_its_way.cancel()
    assert tier.folder.make_room(one.identity, freed_bytes + 1) == freed_bytes, (
        "all of it is in use"
    )
    idle(place)
    assert tier.folder.make_room(one.identity, freed_bytes + 1) > freed_bytes
    shutil.rmtree(place)
    assert tier.folder.free_bytes() == tier.folder.make_room(one.identity, 1) == 0
    tier.evict([third])


# Which folders


def test_J11_folders_that_are_refused(tmp_path: Path) -> None:
    def make(name: str, mode: int = 0o755) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        return tmp_path / name

    full, marked, of_other = make("full"), make("marked"), make("other", 0o700)
    (full / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (marked / ".diesel-cache").write_text("something else")
    for path, error, words in (
        (make("writable", 0o777), PermissionDenied, "others can write"),
        (full, ConflictError, "neither empty nor a cache"),
        (tmp_path / "file", PermissionDenied, "File exists"),
        (marked, ConflictError, "not the marker"),
    ):
        with pytest.raises(error, match=words):
            prepare_cache_folder(path)
    assert list(full.iterdir()) == [full / "thesis.tex"]
    (marked / ".diesel-cache").unlink()
    os.mkfifo(marked / ".diesel-cache")
    with pytest.raises(ConflictError, match="not the marker"):  # and it does not hang
        prepare_cache_folder(marked)
    if os.geteuid() == 0:
        os.chown(of_other, 12345, 12345)
        with pytest.raises(PermissionDenied, match="not a folder of this user"):
            prepare_cache_folder(of_other)


def test_workers_that_start_together_make_one_cache(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"{number}"
        ready = threading.Barrier(4)

        def make(path: Path = path, ready: threading.Barrier = ready) -> Path:
            ready.wait(20)
            return prepare_cache_folder(path)

        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(make) for _ in range(4)]
            assert {each.result(20) for each in made} == {path}
        assert [found.name for found in path.iterdir()] == [".diesel-cache"]
    killed = tmp_path / "killed"
    killed.mkdir(mode=0o700)
    (killed / ".diesel-cache-12-34").touch()  # the process that made it was killed
    prepare_cache_folder(killed)


def test_a_cache_in_its_store_or_around_it_is_refused(tmp_path: Path) -> None:
    store = FolderStore.create(tmp_path / "outer" / "store")
    link = tmp_path / "link"
    link.symlink_to(store.root)
    for bad in ("outer/store", "outer/store/cache", "outer", "link/x", "outer/../outer/store/"):
        with pytest.raises(ConflictError, match="lie in each other"):
            prepare_cache_folder(tmp_path / bad, StoreWrapper(StoreWrapper(store)))
    assert not (tmp_path / "outer" / "store" / "cache").exists()
    prepare_cache_folder(tmp_path / "outer" / "beside", store)


def test_O17_one_folder_however_it_is_spelled(tmp_path: Path, chunks: Chunks) -> None:
    (tmp_path / "real folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real folder")
    kept = Kept(prepare_cache_folder(tmp_path / "link"), chunks)
    relative = os.path.relpath(tmp_path / "real folder") + "/"
    kept.tier = tier_at(prepare_cache_folder(Path(relative)))
    assert kept.is_served()


# Limits (`test_disk_jobs.py` has a model of evictions)


def test_a_smaller_limit_holds_from_the_start(place: Path, chunks: Chunks) -> None:
    tier = tier_at(place)
    for key, content in chunks.items():
        put(tier, key, content)
    limit = 3 * max(map(len, chunks.values()))
    assert 0 < counted(tier_at(place, limit)) <= limit
    assert sum(path.stat().st_size for path in files(place)) <= limit


def test_the_default_limit_is_half_of_the_bytes_that_are_free(
    tmp_path: Path, chunks: Chunks
) -> None:
    """Bytes that the cache has already count as available: a restart keeps a warm cache."""
    disk_bytes = 3 * sum(map(len, chunks.values()))
    with small_disk(tmp_path / "disk", f"size={disk_bytes},mode=700") as point:
        place = prepare_cache_folder(point)
        limit_bytes = 0
        for start in range(4):
            tier = tier_at(place, None)
            assert len(files(place)) == (len(chunks) if start else 0)
            if start:
                assert abs(tier.folder.limit_bytes - limit_bytes) < 50_000  # folders and pages
            limit_bytes = tier.folder.limit_bytes
            for key, content in chunks.items():
                if not start:
                    put(tier, key, content)
            assert all(content_of(tier, key) == content for key, content in chunks.items())
            tier.close()
        for key in list(chunks)[: len(chunks) // 2]:  # its own count is not needed for that
            file_of(place, key).unlink()
        assert abs(tier_at(place, None).folder.limit_bytes - limit_bytes) < 50_000
        (point / "lost+found").write_bytes(bytes(2 * tier.folder.limit_bytes - disk_bytes // 2))
        assert tier_at(place, None).folder.limit_bytes < 0.8 * limit_bytes, (
            "a part is left to other programs"
        )
        tier.folder.make_room(uuid4(), 1 << 40)
        assert tier.folder.limit_bytes == limit_bytes, "the limit does not change later"
    assert tier_at(prepare_cache_folder(tmp_path / "none"), 0).folder.limit_bytes == 0


def test_J1_a_twentieth_of_the_disk_stays_free(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    file_system = os.statvfs(kept.place)
    free = file_system.f_bavail / file_system.f_blocks + 0.05  # others use the disk meanwhile
    monkeypatch.setattr(folder, "FREE_FRACTION_MIN", free)
    kept.refuse_more()
    monkeypatch.undo()
    kept.take_more()


# Faults


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda content, other: b"",
    "short": lambda content, other: content[:-1],
    "long": lambda content, other: content + b"\0",
    "flipped": lambda content, other: content[:-3] + bytes([content[-3] ^ 16]) + content[-2:],
    "zeros": lambda content, other: bytes(len(content)),
    "foreign": lambda content, other: other,
}


@each_row("way", ["find", "load"])
@each_row("damage", DAMAGE)
def test_J6_damage_that_a_crash_left_is_not_served(
    damage: str, way: str, tmp_path: Path, chunks: Chunks, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(prepare_cache_folder(tmp_path / "cache"), chunks)
    path = file_of(kept.place, kept.key)
    path.write_bytes(DAMAGE[damage](kept.content, kept.more))
    kept.tier = tier_at(kept.place)
    room = bytearray(len(kept.content))
    if way == "find":
        assert not kept.is_served()
    else:
        assert not kept.tier.load(kept.key, memoryview(room))
    assert not path.exists()
    assert "was dropped" in caplog.text
    assert not kept.tier.load(kept.key, memoryview(room))
    put(kept.tier, kept.key, kept.content)
    assert kept.is_served()
    assert kept.tier.load(kept.key, memoryview(room))
    assert room == kept.content


def test_a_planted_link_is_not_followed(kept: Kept, tmp_path: Path) -> None:
    path = file_of(kept.place, kept.key)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert content_of(tier_at(kept.place), kept.key) is None


def test_J1_a_full_disk_is_not_an_error_for_a_reader(
    small: Path, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "FREE_FRACTION_MIN", -1.0)  # somebody else was faster
    place = prepare_cache_folder(small)
    tier = tier_at(place)
    (small / "lost+found").write_bytes(bytes(3 << 19))
    kept = 0
    for key, content in chunks.items():
        reserved = tier.reserve(key, len(content)) if not tier.folder.writes.is_open else None
        if reserved is not None:
            reserved.commit(memoryview(content))
        found = content_of(tier, key)
        assert found in (None, content)
        kept += found is not None
    assert 0 < kept < len(chunks), "else this test shows nothing"
    assert not [path for path in files(place) if path.name[0] == "."], "partial files"
    assert counted(tier) == sum(path.stat().st_size for path in files(place))


def test_J10_a_disk_without_inodes_is_treated_as_full(small: Path, chunks: Chunks) -> None:
    tier = tier_at(prepare_cache_folder(small))
    with contextlib.suppress(OSError):
        for number in range(30):
            (small / f"other{number}").touch()
    assert os.statvfs(small).f_favail == 0
    key, content = next(iter(chunks.items()))
    for _ in range(5):
        with pytest.raises(NoSpaceError):
            tier.reserve(key, len(content))
    assert content_of(tier, key) is None


def test_J2_a_failing_disk_is_paused_and_tried_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", fail)
        for _ in range(3):
            found = kept.tier.find(kept.key)
            assert found is not None
            with found, pytest.raises(OSError, match="Input/output"):
                found.read_into(0, memoryview(bytearray(5)))
        assert kept.tier.find(kept.key) is None, "the tier is paused"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert not kept.is_served()
    kept.now_s += DISK_PAUSE_S
    assert kept.is_served()
    assert "works again" in caplog.records[-1].message


def test_J2_a_failed_write_leaves_no_file(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = os.pwrite

    def fail(file: int, data: bytes, at: int) -> int:
        if len(data) > 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written(file, data, at)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", fail)
        for _ in range(3):
            put(kept.tier, kept.other, kept.more)
            assert files(kept.place) == [file_of(kept.place, kept.key)]
        kept.refuse_more(times=1)
    assert counted(kept.tier) == len(kept.content)
    assert len(caplog.records) == 1
    kept.now_s += DISK_PAUSE_S
    kept.take_more()


def test_J4_a_removed_folder_is_not_an_error(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    reserved = kept.tier.reserve(kept.other, len(kept.more))
    assert reserved is not None
    shutil.rmtree(kept.place)
    reserved.commit(memoryview(kept.more))
    assert not kept.is_served()
    kept.refuse_more(times=3)
    assert not kept.place.exists(), "a folder that may be a mount point is not made again"
    assert "is not used" in caplog.text
    kept.place.mkdir(mode=0o700)
    kept.now_s += DISK_PAUSE_S
    kept.take_more()


def test_J4_an_emptied_folder_becomes_a_cache_again(kept: Kept) -> None:
    for path in kept.place.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    assert not kept.is_served()
    kept.take_more()
    assert counted(kept.tier) == len(kept.more)


def test_J4_a_file_system_that_becomes_read_only_serves_and_a_lost_one_is_left_alone(
    tmp_path: Path, chunks: Chunks
) -> None:
    """Nothing is written below the mount point of a lost disk."""
    with small_disk(tmp_path / "disk", "size=10m,mode=700") as point:
        kept = Kept(prepare_cache_folder(point), chunks)
        remount(point, "ro")
        for _ in range(4):
            kept.refuse_more(times=1)
            assert kept.is_served()
        kept.tier.drop(kept.key)
        remount(point, "rw")
        kept.now_s += DISK_PAUSE_S
        kept.take_more()
        subprocess.run(["umount", "-l", str(point)], check=True)
        try:
            assert not kept.is_served()
            kept.refuse_more()
            assert list(point.iterdir()) == []
        finally:
            command = ["mount", "-t", "tmpfs", "diesel-test", str(point)]
            subprocess.run(command, check=True)
