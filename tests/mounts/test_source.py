"""Which snapshot a mount shows, when it warns of it or refuses it, and how much memory it takes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.credentials import key_text
from diesel_fs.errors import (
    ConflictError,
    ForeignError,
    MetadataError,
    NoSuchDataset,
    UsageError,
)
from diesel_fs.mounts import MountRequest
from diesel_fs.mounts.source import MemorySplit, MountSource, OpenedSnapshot
from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.peers.reader.store import MASTER_END_WAIT_S, TaskStore
from diesel_fs.storage.objects.store import ObjectStore
from diesel_fs.system import available_memory as memory
from tests.rows import each_row


@pytest.fixture
def saved(tmp_path: Path) -> MountRequest:
    """A request for version 2 of `dogs`, from a file."""
    url = (tmp_path / "store").as_uri()
    with connect("cats", url, create=True) as cats:
        cats.put(b"a cat", "a")
    with connect("dogs", url, create=True) as dogs:
        dogs.put(b"a dog", "a")
        dogs.flush()
        shutil.copytree(tmp_path / "store", tmp_path / "before")
        dogs.put(b"another", "b")
        dogs.flush()
        dogs.save_meta(tmp_path / "dogs.snap")
    return MountRequest(url, "dogs", "/nowhere", snapshot_file=str(tmp_path / "dogs.snap"))


def content(request: MountRequest, source: OpenedSnapshot, path: bytes) -> bytes:
    reader = MountSource().reader(request, source.snapshot, 1 << 20)
    index = source.snapshot.lookup(path)
    try:
        return bytes(reader.read(index, 0, source.snapshot.stat(index).size))
    finally:
        reader.close()


def lose_metadata(store: Path) -> None:
    for file in store.glob("meta.sqlite*"):
        file.unlink()


def open_with(request: MountRequest, **changes: object) -> OpenedSnapshot:
    return MountSource().open(replace(request, **changes))  # type: ignore[arg-type]  # fields by name


def test_only_the_first_version_waits_for_a_master_that_ends(
    saved: MountRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later the master serves this mount, and stays until it learns of the new version."""
    waits: list[float] = []

    def joined(inner: ObjectStore, *_: object, wait_s: float, **__: object) -> ObjectStore:
        waits.append(wait_s)
        return inner

    monkeypatch.setattr(TaskStore, "join", joined)
    request, source = replace(saved, task_options=TaskOptions(task="night")), MountSource()
    snapshot = source.open(request).snapshot
    with connect("dogs", saved.url) as dogs:
        dogs.put(b"more", "c")
        dogs.flush()
        for each in (snapshot, dogs.snapshot, dogs.snapshot):
            source.reader(request, each, 1 << 20)
    assert waits == [MASTER_END_WAIT_S, 0.0]


@pytest.mark.parametrize("stale", ["refuse", "warn", "allow"])
def test_a_current_snapshot_gives_no_warning(saved: MountRequest, stale: str) -> None:
    source = open_with(saved, stale=stale)
    assert source.warning == ""
    assert content(saved, source, b"b") == b"another"


def test_E4_a_stale_snapshot_is_refused_warned_of_or_allowed(saved: MountRequest) -> None:
    with connect("dogs", saved.url) as dogs:
        dogs.delete("b")
        current = dogs.version
    with pytest.raises(ConflictError, match=f"current is {current}") as refused:
        open_with(saved, stale="refuse")
    assert "--stale warn" in refused.value.advice
    warned = open_with(saved, stale="warn")
    assert f"is of version {warned.snapshot.version}, current is {current}" in warned.warning
    assert warned.snapshot.version < current
    assert open_with(saved, stale="allow").warning == ""
    assert open_with(saved, stale="refuse", offline=True).snapshot.version < current


@pytest.mark.parametrize("stale", ["refuse", "warn"])
def test_E5_a_snapshot_newer_than_the_metadata_is_accepted_with_a_warning(
    saved: MountRequest, tmp_path: Path, stale: str
) -> None:
    lose_metadata(tmp_path / "store")
    for file in (tmp_path / "before").glob("meta.sqlite*"):
        shutil.copy(file, tmp_path / "store")
    source = open_with(saved, stale=stale)
    assert "the metadata store is behind" in source.warning
    assert content(saved, source, b"b") == b"another"
    assert open_with(saved, stale="allow").warning == ""


def test_E6_without_metadata_it_is_exit_14_or_offline(saved: MountRequest, tmp_path: Path) -> None:
    lose_metadata(tmp_path / "store")
    with pytest.raises(MetadataError, match="cannot find out whether") as refused:
        open_with(saved)
    assert refused.value.exit_code == 14
    assert "--offline" in refused.value.advice
    with pytest.raises(MetadataError, match="cannot find out whether"):
        open_with(saved, url="diesel://127.0.0.1:1", user="me", key=key_text(bytes(32)))
    source = open_with(saved, offline=True)
    assert source.warning == ""
    assert content(saved, source, b"b") == b"another"


def test_without_metadata_a_warning_says_the_version_may_be_old(
    saved: MountRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    current = replace(saved, snapshot_file="")
    assert open_with(current).warning == ""
    lose_metadata(tmp_path / "store")
    source = open_with(current)
    warning = (
        f"this is version {source.snapshot.version} of dogs, the newest snapshot, which is 0:00:"
    )
    assert warning in source.warning
    assert open_with(current, stale="allow").warning == ""
    with pytest.raises(ConflictError, match="the newest snapshot") as refused:
        open_with(current, stale="refuse")
    assert "--stale warn" in refused.value.advice
    assert open_with(current, stale="refuse", version=source.snapshot.version).warning == ""
    with connect("dogs", saved.url):
        assert warning in caplog.text


@pytest.mark.parametrize("offline", [False, True])
def test_a_snapshot_is_never_mounted_under_another_name(
    saved: MountRequest, tmp_path: Path, offline: bool
) -> None:
    """Otherwise `--snapshot dogs.snap cats` would show the files of dogs as cats."""
    with pytest.raises(ForeignError, match=r"is a snapshot of 'dogs' .* not of 'cats'"):
        open_with(saved, dataset="cats", offline=offline)
    with pytest.raises(NoSuchDataset):
        open_with(saved, dataset="cows", offline=offline)
    with connect("dogs", saved.url) as dogs:
        dogs.delete_dataset()
    with connect("dogs", saved.url, create=True) as dogs:
        dogs.put(b"new dog", "a")
    with pytest.raises(ForeignError):  # a dataset with the same name and another identity
        open_with(saved, offline=offline)
    lose_metadata(tmp_path / "store")
    with pytest.raises(ForeignError if offline else MetadataError):
        open_with(saved, offline=offline)


# Memory -----------------------------------------------------------------------------------------

V1 = "5:devices:/\n4:cpu,memory:/a/b\n0::/\n"


@each_row(
    ("listed", "files", "limit"),
    [
        ("0::/a/b\n", {"memory.max": "7", "a/memory.max": "max", "a/b/memory.max": "5"}, 5),
        ("0::/a/b\n", {"a/memory.max": "4", "a/b/memory.max": "5"}, 4),
        ("0::/\n", {"memory.max": "123\n"}, 123),
        ("0::/the/hosts/name\n", {"memory.max": "9"}, 9),
        ("0::/../outside\n", {"memory.max": "9"}, 9),
        ("0::/\n", {"memory.max": "max"}, 1 << 62),
        ("", {"memory.max": "9"}, 1 << 62),
        (V1, {"memory/a/b/memory.limit_in_bytes": "3", "memory.max": "max"}, 3),
        (V1, {"memory/memory.limit_in_bytes": "6"}, 6),
        (V1, {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 1 << 62),
    ],
)
def test_the_memory_limit_is_the_smallest_of_the_control_groups(
    tmp_path: Path, listed: str, files: dict[str, str], limit: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.cgroup_limit_bytes(tmp_path, listed) == limit


def test_a_mount_takes_a_part_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a part of the host's memory the mount would be killed."""
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    v1 = [line.split(":", 2)[2] for line in groups if ":memory:" in line]
    name = f"memory{v1[0]}/memory.limit_in_bytes" if v1 else "memory.max"
    (tmp_path / "groups" / name).parent.mkdir(parents=True)
    (tmp_path / "groups" / name).write_text(str(400 << 20))
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    assert (
        MemorySplit.of(MountRequest("", "", "")).total_bytes == (400 << 20) // memory.MEMORY_DIVISOR
    )
    assert MemorySplit.of(MountRequest("", "", "", memory_bytes=300 << 20)).total_bytes == 300 << 20


def test_the_parts_of_the_memory_add_up_to_the_whole() -> None:
    for total_bytes in (64 << 20, 1 << 30, 64 << 30):
        shares = MemorySplit(total_bytes)
        assert shares.server_bytes + shares.push_bytes == total_bytes
        assert shares.push_bytes > total_bytes // 2


@pytest.mark.parametrize("name", ["uid", "gid"])
def test_a_negative_owner_is_refused(name: str) -> None:
    request = MountRequest(url="file:///x", dataset="pets", mountpoint="/mnt")
    request.check()  # -1: the user of this process
    with pytest.raises(UsageError, match=f"no {name} is -5"):
        (replace(request, uid=-5) if name == "uid" else replace(request, gid=-5)).check()
