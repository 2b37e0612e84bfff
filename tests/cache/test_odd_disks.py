"""`DiskTier` in a folder with things that are not chunks, or on a disk that takes no writes."""

import contextlib
import os
import shutil
import socket
from pathlib import Path

import pytest

from diesel_fs.cache.disk import folder as cache_folder
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.errors import ConflictError, NoSpaceError

from ..small_disks import remount
from .disk_tier import Chunks, Kept, content_of, counted, file_of, put, tier_at

pytestmark = pytest.mark.deep


def plant(what: str, path: Path) -> None:
    if what == "link":
        target = path.with_name("elsewhere")
        target.write_bytes(b"elsewhere")
        path.symlink_to(target)
    elif what == "dangling link":
        path.symlink_to("nowhere")
    elif what == "FIFO":
        os.mkfifo(path)
    elif what == "socket":
        here = os.open(path.parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")  # a short name
        os.close(here)
    else:
        path.mkdir()
    if what == "full folder":
        (path / "thesis.tex").touch()


STRANGE = pytest.mark.parametrize(
    "what", ["link", "dangling link", "FIFO", "socket", "folder", "full folder"]
)


@STRANGE
def test_a_path_that_is_not_a_regular_file_is_not_a_chunk(
    what: str, place: Path, chunks: Chunks, caplog: pytest.LogCaptureFixture
) -> None:
    kept, stays = Kept(place, chunks), what == "full folder"
    kept.take_more()
    tier, key, path = kept.tier, kept.key, file_of(place, kept.key)
    for _ in range(4):  # more often than a disk may fail
        path.unlink()
        plant(what, path)
        assert tier.list_chunks(key.identity) == [kept.other.id]
        assert not tier.holds(key)
        for _ in range(4 if stays else 1):
            assert not kept.is_served()
        assert os.path.lexists(path) == stays
        if stays:
            assert tier.reserve(key, len(kept.content)) is None
            shutil.rmtree(path)
        assert content_of(tier, kept.other) == kept.more
        put(tier, key, kept.content)
        assert kept.is_served()
    assert len(caplog.records) == (1 if stays else 4)
    assert ("cannot be removed" if stays else "removed") in caplog.text


@STRANGE
def test_paths_that_are_not_regular_files_are_removed_when_counting_or_writing(
    what: str, place: Path, chunks: Chunks
) -> None:
    kept, stays = Kept(place, chunks), what == "full folder"
    kept.take_more()
    tier, key, content, more = kept.tier, kept.key, kept.content, kept.more
    path, used = file_of(place, key), file_of(place, key).with_name(".used")
    coming = path.with_name("." + path.name)
    path.unlink()
    plant(what, path)
    plant(what, coming)
    assert counted(tier_at(place)) == len(more)
    assert os.path.lexists(path) == os.path.lexists(coming) == stays
    for each in (path, coming) if stays else ():
        shutil.rmtree(each)
    for each in (path, coming, used):
        if each == used:
            each.unlink()
        plant(what, each)
        if stays:
            assert tier.reserve(key, len(content)) is None
            shutil.rmtree(each)
        put(tier, key, content)
        assert content_of(tier, key) == content
        tier.evict([key])
    assert counted(tier) == len(more)
    assert not tier.folder.writes.is_open


def use_up(point: Path, what: str) -> None:
    if what == "writes":
        remount(point, "ro")
        return
    with contextlib.suppress(OSError):
        for number in range(100):
            if what == "inodes":
                (point / "lost+found").mkdir(exist_ok=True)
                (point / "lost+found" / f"{number}").touch()
            else:
                with (point / "lost+found").open("ab", 0) as file:
                    file.write(bytes(4096 if number else 2 << 20))


def make_room(point: Path, what: str) -> None:
    if what == "inodes":
        shutil.rmtree(point / "lost+found")
    elif what == "bytes":
        (point / "lost+found").unlink()
    else:
        remount(point, "rw")


USED_UP = pytest.mark.parametrize("what", ["bytes", "inodes", "writes"])


@USED_UP
@pytest.mark.parametrize("folder", [".", "new/cache"])
def test_J1_J4_a_disk_without_room_for_a_cache_is_named(
    what: str, folder: str, small: Path
) -> None:
    use_up(small, what)
    with pytest.raises(NoSpaceError, match=r"cannot be used for a cache: (No space|Read-only)"):
        prepare_cache_folder(small / folder)
    make_room(small, what)
    prepare_cache_folder(small / folder)
    (small / "theses").mkdir(mode=0o700)
    (small / "theses" / "thesis.tex").touch()
    remount(small, "ro")
    with pytest.raises(ConflictError, match="neither empty nor a cache"):
        prepare_cache_folder(small / "theses")


@USED_UP
def test_J1_J4_a_cache_on_a_full_disk_is_still_read(
    what: str, small: Path, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "FREE_FRACTION_MIN", -1.0)
    kept = Kept(prepare_cache_folder(small), chunks)
    kept.tier.close()
    (small / ".reading").unlink()
    use_up(small, what)
    kept.tier = tier_at(prepare_cache_folder(small))
    assert ("is only read" in kept.tier.folder.read_only_reason) == (what != "bytes")
    assert kept.is_served()
    with contextlib.suppress(NoSpaceError):
        if (reserved := kept.tier.reserve(kept.other, len(kept.more))) is not None:
            reserved.commit(memoryview(kept.more))
    assert content_of(kept.tier, kept.other) is None
    kept.tier.note_reading(begins=True)
    make_room(small, what)
    kept.take_more()
