"""Mounts that follow their dataset, over every session: which parts a switch changes, and which
stay.
"""

import errno
import mmap
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.errors import ConflictError, UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.mounts import MountRequest, mount
from diesel_fs.mounts.plans.control import Control, explicit
from diesel_fs.repository.local import LocalRepository
from tests.mounts.observed import FILE_BYTES, Processes, figures, mounted, noise
from tests.mounts.versions.followed_dataset import (
    FILES,
    POLL_INTERVAL_S,
    FollowedMount,
    begin,
    tried,
)
from tests.rows import each_row
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse


FUSE = ("kernel", "pyfuse3")
"""The sessions in which all versions are one file system."""

PUSHING = ("native", "kernel")
"""The sessions that push contents."""


def node_of(file: int | Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, FILE_BYTES + 1, 0)


def test_Z3_open_files_keep_the_old_version_and_names_lead_on(followed: FollowedMount) -> None:
    at = followed.at
    held = {name: os.open(at / name, os.O_RDONLY) for name in FILES}
    mapped = {name: mmap.mmap(held[name], 0, prot=mmap.PROT_READ) for name in FILES}
    nodes = {name: node_of(descriptor) for name, descriptor in held.items()}
    os.pread(held["kept"], 10, 0)
    assert mapped["changed"][:5] == FILES["changed"][:5]
    assert not (at / "0new").exists()
    assert not (at / "d" / "new").exists()
    followed.put({}, gone=("kind",))
    followed.change(
        {
            "0new": b"0",
            "changed": noise(12),
            "d/new": b"n",
            "kind/in": b"k",
            "moved": FILES["gone"],
        },
        gone=("gone", "d/gone", "left"),
    )
    for name in FILES:
        assert content_of(held[name]) == FILES[name]
        assert mapped[name][:] == FILES[name]
        assert os.fstat(held[name]).st_size == len(FILES[name])
    now = {"kept": FILES["kept"], "changed": noise(12), "d/kept": FILES["d/kept"], "z": b"small",
           "0new": b"0", "d/new": b"n", "kind/in": b"k", "moved": FILES["gone"]}  # fmt: skip
    assert {name: (at / name).read_bytes() for name in now} == now
    assert sorted(os.listdir(at)) == ["0new", "changed", "d", "kept", "kind", "moved", "z"]
    assert sorted(os.listdir(at / "d")) == ["kept", "new"]
    for name in ("gone", "d/gone", "left", "left/inner", "left/inner/f"):
        with pytest.raises(FileNotFoundError):
            os.stat(at / name)
    nodes_now = {name: node_of(at / name) for name in (*now, "kind")}
    for name in ("kept", "d/kept", "z"):
        assert (nodes_now.pop(name) == nodes[name]) != followed.is_native
    assert not set(nodes_now.values()) & set(nodes.values())
    for each in mapped.values():
        each.close()
    for descriptor in held.values():
        os.close(descriptor)
    followed.wait_for_retirement()


@pytest.mark.only_session("kernel")
def test_a_switch_keeps_pages_of_unchanged_files_and_pushes_new_ones(
    followed: FollowedMount,
) -> None:
    """In the new version entries have other indices, and nodes are no indices."""
    at = followed.at

    def attempt(number: int) -> None:
        new = [f"{number}{digit}" for digit in range(4)]
        for name in ("kept", "d/kept", "z"):
            (at / name).read_bytes()
        followed.change({name: noise(100 + int(name)) for name in new})
        names = [*new, "kept"]
        with Control.connect(at) as control:
            entries = followed.entries(names)
            control.announce("s", [explicit(epoch=0, entries=entries)])
            wait_until(lambda: control.resident(entries).all())
            with followed.served_by_page_cache():
                for name in new:
                    assert (at / name).read_bytes() == noise(100 + int(name))
                for name in ("kept", "d/kept", "z"):
                    assert (at / name).read_bytes() == FILES[name]
            control.withdraw("s")
            followed.change({new[0]: noise(200), f"{number}00": b"first of all"})
            entries = followed.entries(names)
        with Control.connect(at) as control:
            assert control.resident(entries).tolist() == [False, True, True, True, True]
        with followed.served_by_page_cache():
            assert (at / new[3]).read_bytes() == noise(100 + int(new[3]))
        assert (at / new[0]).read_bytes() == noise(200)

    followed.change({}, gone=("gone",))
    tried(attempt)


@pytest.mark.only_session(*PUSHING)
def test_a_miss_after_a_switch_pushes_the_right_chunk(followed: FollowedMount) -> None:
    """The session reports nodes, which are no indices any more."""
    names = [f"mate{number}" for number in range(10)]
    followed.put_together(dict.fromkeys(names, noise(7, 1000)))
    followed.put_together({f"0{number:03}": b"%d" % number for number in range(200)})
    assert (followed.at / names[3]).read_bytes() == noise(7, 1000)
    with Control.connect(followed.at) as control:
        entries = followed.entries(names)
        wait_until(lambda: int(control.resident(entries).sum()) >= len(names) - 1)


@pytest.mark.only_session(*FUSE)
def test_nodes_are_never_given_again(followed: FollowedMount) -> None:
    at = followed.at
    seen: dict[int, tuple[str, int, int]] = {}
    for step in range(10):
        files = {f"f{number}": b"%d" % number for number in range(step, step + 3)}
        files["z"] = b"%d" % step
        followed.change(files, gone=(f"f{step - 1}",) if step else ())
        for name in os.listdir(at):
            found = os.stat(at / name)
            identity = name, found.st_mtime_ns, found.st_size
            if not os.path.isdir(at / name):
                assert seen.setdefault(found.st_ino, identity) == identity
                assert (at / name).read_bytes() == ({**FILES, **files}.get(name) or b"")
    assert len(seen) > 30


def test_a_listing_goes_on_across_a_switch(followed: FollowedMount) -> None:
    at = followed.at
    names = [f"{number:04}" for number in range(2000)]
    followed.put_together({f"many/{name}": b"" for name in names})
    with os.scandir(at / "many") as listed:
        found = [next(listed).name for _ in range(100)]
        new = {f"many/{name}": b"" for name in ("0000a", "0050a", "1999a")}
        followed.change(new, gone=("many/0007", "many/1500"))
        assert len(os.listdir(at / "many")) == 2001  # another reader lists it meanwhile
        found += [next(listed).name for _ in range(600)]
        followed.change({"many/0001a": b"", "many/0003": b"changed"}, gone=("many/0000a",))
        found += [entry.name for entry in listed]
    assert len(found) == len(set(found))
    assert set(names) - {"1500"} <= set(found) | {"0007"}


def test_a_removed_folder_can_be_used_from_within(followed: FollowedMount) -> None:
    at = followed.at
    inside = os.open(at / "left", os.O_RDONLY | os.O_DIRECTORY)
    followed.change({"0": b"0"}, gone=("left",))
    followed.change({"1": b"1"})
    assert os.listdir(inside) == ["inner"]
    descriptor = os.open("inner/f", os.O_RDONLY, dir_fd=inside)
    assert content_of(descriptor) == FILES["left/inner/f"]
    assert os.stat("..", dir_fd=inside).st_ino == os.stat(at).st_ino
    os.close(descriptor)
    assert not (at / "left").exists()
    wait_until(lambda: len(followed.retired_versions()) == 1)
    os.close(inside)
    followed.change({"2": b"2"})
    followed.wait_for_retirement()


def test_listings_show_a_folders_new_mode_and_time(followed: FollowedMount, tmp_path: Path) -> None:
    """The folder above lists the same names, but its listing contains attributes."""
    (source := tmp_path / "source").mkdir()
    for path in ("above/inner/f", "above/g"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(b"x")
    for mode, time_s in ((0o755, 1), (0o700, 2)):
        os.chmod(source / "above/inner", mode)
        for path in ("above", "above/inner"):
            os.utime(source / path, (time_s, time_s))
        with LocalRepository.open(followed.url) as repository:
            put(repository, "ds", FolderSource(source), options=PutOptions(jobs=1))
            version = repository.view("ds").version
        followed.wait_for(version)
        assert sorted(os.listdir(followed.at / "above")) == ["g", "inner"]
        found = os.stat(followed.at / "above/inner")
        assert (stat.S_IMODE(found.st_mode), found.st_mtime) == (mode, time_s)


def test_an_empty_dataset_is_filled_and_emptied(tmp_path: Path, session: str) -> None:
    (tmp_path / "empty").mkdir()
    followed = begin(tmp_path / "empty", session)
    with followed.connected() as dataset:
        dataset.delete_dataset()
    followed.put({})
    with mounted(followed.request):
        assert os.listdir(followed.at) == []
        for number in range(3):
            followed.change({"x" * 255: noise(number), "d/e/f": b"f"})
            assert sorted(os.listdir(followed.at)) == ["d", "x" * 255]
            assert (followed.at / ("x" * 255)).read_bytes() == noise(number)
            followed.change({}, gone=("x" * 255, "d"))
            assert os.listdir(followed.at) == []
        switches = figures(followed.follow())["switches"]
        assert 6 <= switches <= 12, "each file and each deletion is a version, which may be skipped"


@pytest.mark.only_session(*PUSHING)
def test_a_stopped_worker_delays_a_switch_and_nothing_else(followed: FollowedMount) -> None:
    wait_until(lambda: followed.stats()["residency"])
    worker = Processes.of(followed.at).worker
    os.kill(worker, signal.SIGSTOP)
    try:
        version = followed.put({"0new": b"0"})
        time.sleep(10 * POLL_INTERVAL_S)
        for name in FILES:
            assert (followed.at / name).read_bytes() == FILES[name]
    finally:
        os.kill(worker, signal.SIGCONT)
    followed.wait_for(version)
    assert (followed.at / "0new").read_bytes() == b"0"


def test_hidden_names_follow_and_open_hidden_files_do_not(followed: FollowedMount) -> None:
    hidden = followed.at / ".diesel"
    names = sorted(name.encode() for name in FILES)
    assert sorted((hidden / "filelist").read_bytes().split()) == names
    with (
        open(hidden / "filelist", "rb") as before,
        open(hidden / "snapshot", "rb") as shown,
        open(hidden / "shuffle/seed=1,epoch=2", "rb") as order,
    ):
        followed.change({"0new": b"0"}, gone=("gone",))
        assert b"0new\n" in (hidden / "filelist").read_bytes()
        assert b"gone" not in (hidden / "shuffle/seed=1,epoch=2").read_bytes().split()
        assert followed.snapshot().lookup(b"0new") > 0
        assert sorted(before.read().split()) == names
        assert sorted(order.read().split()) == names
        assert Snapshot(shown.read()).lookup(b"0new") == -1
    assert os.readlink(hidden / "control")


# plans --------------------------------------------------------------------------------------------


@pytest.mark.only_session(*PUSHING)
def test_a_running_plan_postpones_the_switch(followed: FollowedMount) -> None:
    """A plan of the old version is refused after the switch."""
    for number in range(2):
        with Control.connect(followed.at) as control:
            entries, old = followed.entries(FILES), control.version
            control.announce("job", [explicit(epoch=0, entries=entries)])
            version = followed.put({f"{number}new": b"0"})
            wait_until(lambda: followed.follow()["put_off_by"] == ["job"])
            time.sleep(20 * POLL_INTERVAL_S)
            assert followed.stats()["version"] == old
            assert not (followed.at / f"{number}new").exists()
            if number:
                for name in FILES:
                    assert (followed.at / name).read_bytes() == FILES[name]
            else:
                control.extend("job", [explicit(epoch=1, entries=entries)])
                control.withdraw("job")
            followed.wait_for(version)
            assert followed.follow()["put_off_by"] == []
            with pytest.raises(ConflictError, match=f"version {old}.*shows {version}"):
                control.announce("job", [explicit(epoch=0, entries=entries)])
        assert (followed.at / f"{number}new").read_bytes() == b"0"


# a dataset that cannot be followed ------------------------------------------------------------


@pytest.mark.only_session("kernel")
def test_H16_a_deletion_and_a_new_dataset_are_logged_once(followed: FollowedMount) -> None:
    at = followed.at
    assert (at / "kept").read_bytes() == FILES["kept"]
    with connect("ds", followed.url) as dataset:
        dataset.delete_dataset()
    wait_until(lambda: followed.warnings("ds has been deleted; the mount stays at version"))
    followed.put({"kept": noise(50), "other": b"x"})
    wait_until(lambda: followed.warnings("is another dataset now"))
    time.sleep(10 * POLL_INTERVAL_S)
    assert followed.warnings("has been deleted") == 1
    assert followed.warnings("is another dataset now") == 1
    assert (at / "kept").read_bytes() == FILES["kept"]
    assert not (at / "other").exists()
    assert sorted(os.listdir(at)) == sorted({name.split("/")[0] for name in FILES})


@pytest.mark.only_session("native")
def test_a_store_that_is_away_changes_nothing_and_is_logged_once(followed: FollowedMount) -> None:
    at, store = followed.at, Path(followed.url.removeprefix("file://"))
    assert (at / "kept").read_bytes() == FILES["kept"]
    store.rename(store.with_name("away"))
    wait_until(lambda: followed.warnings("cannot follow"))
    time.sleep(2 * POLL_INTERVAL_S)  # a check under way may have met the store half moved
    logged = followed.warnings("cannot follow")
    time.sleep(10 * POLL_INTERVAL_S)
    assert followed.warnings("cannot follow") == logged <= 2
    assert (at / "kept").read_bytes() == FILES["kept"]
    store.with_name("away").rename(store)
    wait_until(lambda: followed.warnings("following ds again"))
    followed.change({"0new": b"0"})
    assert (at / "0new").read_bytes() == b"0"


def test_E11_a_purged_chunk_is_EIO_and_the_log_has_the_reason(followed: FollowedMount) -> None:
    """A file of the same name and size may have taken its place."""
    store = Path(followed.url.removeprefix("file://"))
    held = os.open(followed.at / "gone", os.O_RDONLY)
    before = set(store.rglob("*"))
    followed.change({"gone": noise(77)})
    new = {path for path in store.rglob("*") if path.is_file()} - before
    for path in before:
        if path.is_file() and path.stat().st_size > FILE_BYTES and "chunks" in str(path):
            path.unlink()
    assert new
    with pytest.raises(OSError, match=r".") as raised:
        content_of(held)
    assert raised.value.errno == errno.EIO
    assert followed.warnings("snapshot too old")
    os.close(held)
    assert (followed.at / "gone").read_bytes() == noise(77)


@each_row("offline", [False, True])
def test_a_mount_of_one_version_cannot_follow(tmp_path: Path, offline: bool) -> None:
    request = MountRequest(
        "file:///s", "ds", str(tmp_path), follow=True, snapshot_file="/x", offline=offline
    )
    with pytest.raises(UsageError, match="exclude each other"):
        mount(request)
