"""Images are built once on a node, checked before each use, and continue one chain."""

import fcntl
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diesel_fs.errors import FormatError
from diesel_fs.format.image import Image, ImageTooLarge, Shown
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.tree.images import IMAGES_KEPT, UNUSED_S_MAX, open_image
from diesel_fs.repository.private_copies import boot_id
from tests.format.image.trees import file, link, snapshot_of, snapshot_of_large_file
from tests.small_disks import small_disk

ME = Shown(uid=1000, gid=1001)
FIRST = {b"a": file(3, 96, 5000), b"b": file(3, 97, 9)}
SECOND = {b"b": file(3, 97, 9), b"c": file(4, 96, 9)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diesel" / "images"


def opened(snapshot: Snapshot, how: Shown = ME) -> Image:
    image, descriptor = open_image(snapshot, how)
    os.close(descriptor)
    return image


def kept(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if not path.name.endswith(".chain")]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_an_image_is_built_once_and_found_again(folder: Path) -> None:
    snapshot = snapshot_of(FIRST)
    image, descriptor = open_image(snapshot, ME)
    try:
        [path] = kept(folder)
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        assert path.read_bytes() == bytes(image.buffer)
        assert (image.identity, image.version, image.shown) == (snapshot.identity, 1, ME)
        before = path.stat()
        again = opened(snapshot)
        assert (again.chain, again.sequence) == (image.chain, image.sequence)
        assert os.path.samestat(path.stat(), before)
        assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    finally:
        os.close(descriptor)


def test_versions_and_ways_to_show_them_continue_one_chain() -> None:
    first = opened(snapshot_of(FIRST))
    other = opened(snapshot_of(FIRST), Shown(uid=5, gid=6, umask=0o077))
    second = opened(snapshot_of(SECOND, version=2, also=[3]))
    assert {image.chain for image in (first, other, second)} == {first.chain}
    assert [image.sequence for image in (first, other, second)] == [1, 2, 3]
    blocks = [image.first_block.tolist() for image in (first, other, second)]
    assert blocks == [[0, 1, 3], [0, 1, 3], [0, 3, 4]]


def test_another_snapshot_of_the_same_version_has_its_own_image() -> None:
    """A user may mount a forged snapshot from a file."""
    assert opened(snapshot_of(FIRST)).entry_count == 3
    assert opened(snapshot_of({b"x": file(3, 96, 1)})).entry_count == 2
    assert opened(snapshot_of(FIRST)).entry_count == 3


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1000],
    "truncated in the tree": lambda data: data[:5000],
    "another byte in the tree": lambda data: data[:4200] + b"\xaa" + data[4201:],
    "another byte in the trailer": lambda data: data[:-400] + b"\xaa" + data[-399:],
    "zeros": lambda data: bytes(len(data)),
    "another file": lambda data: b"#!/bin/sh\n" * 2000,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_image_is_made_again_in_a_new_chain(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount may still read the lost one, so its addresses must not be given again."""
    snapshot = snapshot_of(FIRST)
    image = opened(snapshot)
    [path] = kept(folder)
    good = path.read_bytes()
    path.unlink()  # otherwise the mapping changes, which others cannot do in this folder
    path.write_bytes(DAMAGE[how](good))
    again = opened(snapshot)
    assert (again.entry_count, again.sequence) == (3, 1)
    assert again.chain != image.chain
    [warning] = warnings_in(caplog)
    assert "made again" in warning
    assert path.read_bytes() == bytes(again.buffer)


def test_no_image_of_another_tree_is_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(snapshot_of(FIRST))
    [path] = kept(folder)
    opened(snapshot_of(SECOND, version=2))
    other = kept(folder)[-1]
    other.rename(path)
    assert opened(snapshot_of(FIRST)).version == 1
    [warning] = warnings_in(caplog)
    assert "another tree" in warning


@pytest.mark.parametrize("lost", ["image", "record", "part of the record", "text"])
def test_a_chain_that_lost_a_part_is_not_continued(folder: Path, lost: str) -> None:
    opened(snapshot_of(FIRST))
    last = opened(snapshot_of(SECOND, version=2))
    record = next(folder.glob("*.chain"))
    if lost == "image":
        kept(folder)[-1].unlink()
    elif lost == "record":
        record.unlink()
    elif lost == "part of the record":
        os.truncate(record, 20)
    else:
        record.write_bytes(record.read_bytes() + b"more")
    new = opened(snapshot_of(SECOND, version=3))
    assert new.chain != last.chain
    assert new.sequence == 1
    assert opened(snapshot_of(SECOND, version=4)).chain == new.chain


def test_a_chain_without_addresses_left_gives_way_to_a_new_one() -> None:
    """Two versions of 10 TiB each have no content in common."""
    ten = 10 << 40
    first = opened(snapshot_of_large_file(ten))
    second = opened(snapshot_of_large_file(ten + (1 << 30)))
    assert second.chain != first.chain
    assert second.sequence == 1


def test_a_tree_that_cannot_be_shown_is_an_error(folder: Path) -> None:
    with pytest.raises(ImageTooLarge):
        open_image(snapshot_of_large_file(20 << 40), ME)
    with pytest.raises(FormatError, match="target"):
        open_image(snapshot_of({b"a": link(b"t" * 4096)}), ME)
    assert kept(folder) == []


def versions_in(folder: Path) -> list[int]:
    return [Image(path.read_bytes(), verify=True).version for path in kept(folder)]


def test_the_images_used_last_are_kept_and_those_that_are_open(folder: Path) -> None:
    image, descriptor = open_image(snapshot_of(FIRST), ME)
    try:
        for version in range(2, 7):
            opened(snapshot_of(FIRST, version=version))
        assert versions_in(folder) == [1, *range(7 - IMAGES_KEPT, 7)]
    finally:
        os.close(descriptor)
    del image
    opened(snapshot_of(FIRST, version=7))
    assert versions_in(folder) == [*range(8 - IMAGES_KEPT, 8)]
    opened(snapshot_of(FIRST, version=8 - IMAGES_KEPT))
    opened(snapshot_of(FIRST, version=9))
    assert set(versions_in(folder)) >= {8 - IMAGES_KEPT, 9}


def name_of_another(kind: str, ours: str, tag: str) -> str:
    rest, boot = ours.split(".")
    return {
        "boot": f"{rest}.{tag}",
        "dataset": f"{tag * 32}{rest[32:]}.{boot}",
        "chain": f"{rest[:32]}.{tag}.chain",
    }[kind]


@pytest.mark.parametrize("kind", ["boot", "dataset", "chain"])
def test_images_unused_for_a_week_are_removed_unless_they_are_open(folder: Path, kind: str) -> None:
    """Nodes may share the folder, and it holds files from before a boot."""
    opened(snapshot_of(FIRST))
    [kept_image] = kept(folder)
    used, unused, recent = (folder / name_of_another(kind, kept_image.name, tag) for tag in "012")
    for path in (used, unused, recent):
        path.write_bytes(b"x")
    for path in (used, unused):
        os.utime(path, (0, time.time() - UNUSED_S_MAX - 60))
    with used.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        opened(snapshot_of(FIRST, version=2))
        assert (used.exists(), unused.exists(), recent.exists()) == (True, False, True)


def test_an_image_of_an_earlier_boot_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(snapshot_of(FIRST)).chain
    boot = f".{boot_id()}"
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr("diesel_fs.repository.private_copies._BOOT_ID", tmp_path / "boot")
    boot_id.cache_clear()
    try:
        assert opened(snapshot_of(FIRST)).chain != first
        assert {path.suffix for path in kept(folder)} == {boot, ".another"}
    finally:
        boot_id.cache_clear()


# Several processes


def open_in_child(state: "multiprocessing.Queue[tuple[str, int, int]]") -> None:
    image, descriptor = open_image(snapshot_of(FIRST), ME)
    state.put((image.chain.hex, image.sequence, os.fstat(descriptor).st_ino))


def test_processes_at_once_build_one_image() -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[tuple[str, int, int]] = context.Queue()
    children = [context.Process(target=open_in_child, args=(answers,)) for _ in range(6)]
    for child in children:
        child.start()
    found = {answers.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert len(found) == 1


def test_threads_at_once_build_one_image() -> None:
    snapshot = snapshot_of(FIRST)
    with ThreadPoolExecutor(6) as pool:
        found = {(image.chain, image.sequence) for image in pool.map(opened, [snapshot] * 20)}
    assert len(found) == 1


BUILDER = """
import sys, time
from diesel_fs.format.image import Shown
from diesel_fs.mounts.tree import images
from tests.mounts.test_images import FIRST
from tests.format.image.trees import snapshot_of
build = images.build_image
def slow(*args):
    pieces = build(*args)
    yield next(pieces)
    print("building", flush=True)
    time.sleep(1000)
images.build_image = slow
images.open_image(snapshot_of(FIRST), Shown(uid=1000, gid=1001))
"""


@pytest.fixture
def builder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", BUILDER], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"building\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_waits_for_a_builder_and_takes_over_if_it_is_killed(
    builder: subprocess.Popen[bytes], folder: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opened, snapshot_of(FIRST))
        assert not waiting.done()
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        assert waiting.result(60).entry_count == 3
    opened(snapshot_of(FIRST, version=2))  # removes the killed process's file
    assert {Image(path.read_bytes(), verify=True).version for path in kept(folder)} == {1, 2}


def test_a_process_that_has_waited_long_enough_builds_for_itself(
    builder: subprocess.Popen[bytes], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image, descriptor = open_image(snapshot_of(FIRST), ME, deadline_s=0.1)
    os.close(descriptor)
    assert image.entry_count == 3
    [warning] = warnings_in(caplog)
    assert "another process" in warning
    assert builder.poll() is None


# Folders in which images cannot be kept


def test_without_a_folder_each_image_is_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    image, descriptor = open_image(snapshot_of(FIRST), ME)
    assert os.fstat(descriptor).st_nlink == 0
    assert os.pread(descriptor, len(image.buffer), 0) == bytes(image.buffer)
    os.close(descriptor)
    assert opened(snapshot_of(FIRST)).chain != image.chain
    assert "not kept" in warnings_in(caplog)[0]


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    opened(snapshot_of(FIRST))
    folder.chmod(0o777)
    image, descriptor = open_image(snapshot_of(FIRST), ME)
    assert (os.fstat(descriptor).st_nlink, image.entry_count) == (0, 3)
    os.close(descriptor)


@pytest.mark.parametrize("options", ["size=16k", "size=1m,nr_inodes=4"])
def test_on_a_full_disk_the_image_is_built_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        image, descriptor = open_image(snapshot_of(FIRST), ME)
        assert (os.fstat(descriptor).st_nlink, image.entry_count) == (0, 3)
        os.close(descriptor)
        leftovers = [path for path in disk.rglob("*") if path.is_file() and path.suffix != ".chain"]
        assert leftovers == []


def test_with_full_disks_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        monkeypatch.setattr("diesel_fs.mounts.tree.images.UNNAMED_IN", (str(disk), "/missing"))
        image, descriptor = open_image(snapshot_of(FIRST), ME)
        assert "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert image.entry_count == 3
        os.close(descriptor)
