"""Lists of files in a mount: their contents, when they change, and that their files are pushed."""

import errno
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import diesel_fs
from diesel_fs.errors import UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest
from diesel_fs.mounts.plans.control import Control
from diesel_fs.mounts.tree.attributes import HIDDEN_ROOT, FuseErrno, Owner
from diesel_fs.mounts.tree.dot_diesel import FILELIST, HiddenFolder, ListObserver, ListRef
from diesel_fs.orders.path_lists import ListName, PathLists
from diesel_fs.orders.shuffle import SEED_MAX, WORLD_MAX, chunk_shuffle
from tests.mounts.conftest import LiveMount
from tests.mounts.folder_dataset import snapshot_of
from tests.mounts.observed import Processes, current_stats, figures, mounted, put
from tests.orders.datasets import dataset, odd_dataset
from tests.rows import each_row
from tests.waiting import PATIENCE_S, wait_until

SEED, GROUP = 5, 2
FILES = 1500
# names and bytes, without a mount -----------------------------------------------------------------


@each_row(
    ("text", "name"),
    [
        (b"seed=1,epoch=2", ListName(1, 2, 100, 0, 1)),
        (b"epoch=2,seed=1", ListName(1, 2, 100, 0, 1)),
        (b"seed=1,epoch=2,group=7,rank=3,world=4", ListName(1, 2, 7, 3, 4)),
        (b"seed=%d,epoch=0" % SEED_MAX, ListName(SEED_MAX, 0)),
    ],
)
def test_names_of_lists_are_parsed(text: bytes, name: ListName) -> None:
    assert ListName.parse(text) == name
    assert ListName.parse(str(name).encode()) == name


@each_row(
    "text",
    [
        b"", b"seed=1", b"epoch=1", b"seed=1,epoch=2,", b"seed=1,epoch=2,epoch=2",
        b"seed=1,epoch=2,color=3", b"seed=1,epoch=-2", b"seed=01,epoch=2", b"seed=1,epoch=",
        b"seed=1 ,epoch=2", b"seed=1,epoch=2,group=0", b"seed=1,epoch=2,rank=1",
        b"seed=1,epoch=2,world=0", b"seed=%d,epoch=0" % (SEED_MAX + 1),
        b"seed=1,epoch=2,world=%d" % (WORLD_MAX + 1), b"seed=1,epoch=2,rank=4,world=4",
        "seed=\u0661,epoch=2".encode(), b"seed=1,epoch=2\n", b"\xff", b"seed=1,epoch=" + b"9" * 300,
    ],
)  # fmt: skip
def test_bad_names_of_lists_are_refused(text: bytes) -> None:
    assert ListName.parse(text) is None


@each_row("snapshot", [dataset(5, 40), odd_dataset()])
@each_row("name", [ListName(1, 2, 2), ListName(1, 3, 2, 1, 3), ListName(0, 0, 1, 6, 7)])
def test_a_list_has_the_paths_of_its_order(snapshot: Snapshot, name: ListName) -> None:
    order = chunk_shuffle(
        snapshot, name.seed, name.epoch, group_size=name.group, rank=name.rank, world=name.world
    )
    lists = PathLists(snapshot)
    for nul in (False, True):
        text = lists.text(name, nul=nul)
        end = b"\0" if nul else b"\n"
        assert text.tobytes() == b"".join(path + end for path in snapshot.paths(order))
        assert len(text) == lists.size(name)


def test_a_newline_in_a_path_makes_two_lines_and_is_refused(tmp_path: Path) -> None:
    (tmp_path / "em\npty").mkdir()
    (tmp_path / "a").touch()
    assert PathLists(Snapshot(snapshot_of(tmp_path))).text(ListName(0, 0), nul=False).size
    (tmp_path / "em\npty" / "deep").mkdir()
    (tmp_path / "em\npty" / "deep" / "b").touch()
    lists = PathLists(Snapshot(snapshot_of(tmp_path)))
    with pytest.raises(UsageError, match="newline in its path"):
        lists.text(ListName(0, 0), nul=False)
    found = lists.text(ListName(0, 0), nul=True).tobytes()
    assert sorted(found.split(b"\0")) == [b"", b"a", b"em\npty/deep/b"]


class CountingObserver(ListObserver):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    async def on_lookup(self, ref: ListRef) -> None:
        self.events.append("looked up")

    def on_read(self, ref: ListRef) -> None:
        self.events.append("reading")


async def test_a_list_is_made_when_read_and_its_reading_is_reported() -> None:
    snapshot, readers = dataset(5, 40), CountingObserver()
    folder = HiddenFolder(snapshot, {}, Owner(0, 0), list_observer=readers)
    found = await folder.lookup(HIDDEN_ROOT, FILELIST)
    folder.count_lookup(found.node)
    assert await folder.lookup(HIDDEN_ROOT, FILELIST) == found
    assert readers.events == [], "looking is not reading"
    assert folder.read_nowait(found.node, 0, 10) is None
    first = await folder.read(found.node, 0, 10)
    assert readers.events == ["reading"]
    assert folder.read_nowait(found.node, 0, 10) == first
    assert folder.read_nowait(found.node, found.size, 10) == b""
    await folder.lookup(HIDDEN_ROOT, FILELIST)
    await folder.lookup(HIDDEN_ROOT, FILELIST)
    assert readers.events == ["reading", "reading", "looked up"]
    folder.forget(found.node, 1)
    with pytest.raises(FuseErrno):
        folder.read_nowait(found.node, 0, 10)
    again = await folder.lookup(HIDDEN_ROOT, FILELIST)
    assert again.node == found.node, "the same content has the same node"
    assert folder.stats()["held"] == 0


async def test_lists_keep_their_memory_limit(caplog: pytest.LogCaptureFixture) -> None:
    snapshot = dataset(5, 40)
    size = PathLists(snapshot).size(ListName(0, 0))
    folder = HiddenFolder(snapshot, {}, Owner(0, 0), lists_bytes_max=2 * size)
    shuffle = (await folder.lookup(HIDDEN_ROOT, b"shuffle")).node
    contents = {}
    for epoch in range(6):
        found = await folder.lookup(shuffle, b"seed=1,epoch=%d" % epoch)
        folder.count_lookup(found.node)
        contents[found.node] = bytes(await folder.read(found.node, 0, size))
        assert figures(folder.stats())["held_bytes"] <= 2 * size
    assert len(set(contents.values())) == 6
    for node, content in contents.items():
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(folder.read, node, 0, 5)
        assert await folder.read(node, 0, size) == content
    folder._lists_bytes_max = size - 1
    for node in contents:
        folder.forget(node, 1)
    found = await folder.lookup(shuffle, b"seed=1,epoch=9")
    with pytest.raises(FuseErrno) as raised:
        await folder.read(found.node, 0, 5)
    assert raised.value.errno == errno.ENOMEM
    assert folder.stats()["held_bytes"] == 0
    assert "do not fit beside" in caplog.text


# in a mount ---------------------------------------------------------------------------------------


@pytest.fixture
def at(tmp_path: Path, session: str) -> Iterator[Path]:
    url = (tmp_path / "store").as_uri()
    for chunk in range(5):
        numbers = range(300 * chunk, 300 * (chunk + 1))
        put(url, {f"class {each % 7}/{each:05}": b"%d" % each * 50 for each in numbers})
    request = MountRequest(
        url, "ds", str(tmp_path / "mount"), session=session, seed=SEED, group_size=GROUP
    )
    with mounted(request) as made:
        yield made


def expected(at: Path, epoch: int, rank: int = 0, world: int = 1) -> bytes:
    view = Snapshot((at / ".diesel/snapshot").read_bytes())
    order = chunk_shuffle(view, SEED, epoch, group_size=GROUP, rank=rank, world=world)
    return b"".join(path + b"\n" for path in view.paths(order))


def follow(at: Path, text: bytes) -> None:
    for line in text.splitlines():
        assert (at / os.fsdecode(line)).read_bytes()


@pytest.mark.fuse
def test_filelist_shows_the_next_epoch_once_its_files_have_been_read(at: Path) -> None:
    """A training script reads the list, its files, and at once the list again."""
    path = at / ".diesel/filelist"
    nodes = set()
    with path.open("rb", buffering=0) as held:
        begun = held.read(100)
        for epoch in range(4):
            assert path.stat().st_size == len(expected(at, epoch))
            text = path.read_bytes()
            assert text == expected(at, epoch)
            follow(at, text[: text[:-1].rindex(b"\n") + 1])
            assert path.read_bytes() == text, "it changed before the epoch's last file was opened"
            nodes.add(path.stat().st_ino)
            follow(at, text)
        assert len(nodes) == 4, "a node has one content"
        assert path.read_bytes() == expected(at, 4)
        assert begun + held.read() == expected(at, 0)


@pytest.mark.fuse
@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_a_lookup_of_the_list_waits_for_the_latest_opens(at: Path) -> None:
    worker = Processes.of(at).worker
    text = (at / ".diesel/filelist").read_bytes()
    middle = text[: len(text) // 2].rindex(b"\n") + 1
    follow(at, text[:middle])
    time.sleep(0.3)
    os.kill(worker, signal.SIGSTOP)
    try:
        follow(at, text[middle:])
        look = ["cat", str(at / ".diesel/filelist")]
        with subprocess.Popen(look, stdout=subprocess.PIPE) as looking:
            time.sleep(0.3)
            os.kill(worker, signal.SIGCONT)
            found, _ = looking.communicate(timeout=PATIENCE_S)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert found == expected(at, 1)


@pytest.mark.fuse
def test_lists_have_their_orders_and_stay_until_followed(at: Path, tmp_path: Path) -> None:
    """They are read again and again, by two readers at once, by cp, which reads the size that stat
    gave, and by the library."""
    hidden = at / ".diesel"
    for _ in range(3):
        assert (hidden / "filelist").read_bytes() == expected(at, 0)
    with (hidden / "filelist").open("rb") as one, (hidden / "filelist").open("rb") as other:
        assert one.read() == other.read()
    name = "seed=5,epoch=3,group=2,rank=1,world=4"
    wanted = {"filelist": expected(at, 0), f"shuffle/{name}": expected(at, 3, 1, 4)}
    for each, text in wanted.items():
        with_nul = each.replace("shuffle", "shuffle0").replace("filelist", "filelist0")
        for path, content in ((each, text), (with_nul, text.replace(b"\n", b"\0"))):
            size = (hidden / path).stat().st_size
            subprocess.run(["cp", hidden / path, tmp_path / "copy"], check=True)
            assert (tmp_path / "copy").read_bytes() == content
            assert size == len(content)
    for bad in ("seed=5", "seed=5,epoch=2,epoch=2", "seed=5,epoch=2,rank=1"):
        assert not (hidden / "shuffle" / bad).exists()
    for epoch, paths in ((0, diesel_fs.filelist(at)), (7, diesel_fs.filelist(at, epoch=7))):
        assert [os.fsencode(path) for path in paths] == expected(at, epoch).splitlines()
    with pytest.raises(UsageError):
        diesel_fs.filelist(at, epoch=-1)


@pytest.mark.fuse
@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_reading_a_list_pushes_its_files(at: Path) -> None:
    """Each reading counts, also if the kernel has the list's pages."""
    path = at / ".diesel/shuffle/seed=9,epoch=0,group=2"
    assert path.stat().st_size
    time.sleep(1.0)  # by then a push would have begun
    assert residency(at)["pushed_entries"] == 0
    text = path.read_bytes()
    wait_until(lambda: residency(at)["resident_entries"] + residency(at)["lost_entries"] >= FILES)
    with Control.connect(at) as control:
        control.withdraw(f"shuffle:9.{GROUP}.0.1")
        assert path.read_bytes() == text
        control.progress(f"shuffle:9.{GROUP}.0.1", 0)  # the list is shown again


def residency(at: Path) -> Counter[str]:
    return Counter(figures(current_stats(at), "residency"))


@pytest.mark.fuse
def test_a_path_with_a_newline_needs_the_list_with_NUL(tree: LiveMount) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        (tree.at / ".diesel/filelist").read_bytes()
    assert raised.value.errno in (errno.EILSEQ, errno.EIO)
    found = (tree.at / ".diesel/filelist0").read_bytes().split(b"\0")[:-1]
    assert b"odd/new\nline" in found
    assert sorted(found) == sorted(
        os.path.relpath(os.path.join(folder, name), os.fsencode(tree.at))
        for folder, _, names in os.walk(os.fsencode(tree.at))
        for name in names
        if not os.path.islink(os.path.join(folder, name))
    )


@pytest.mark.fuse
@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_a_lookup_that_waits_delays_no_other_request(at: Path) -> None:
    (at / ".diesel/filelist").read_bytes()
    worker = Processes.of(at).worker
    os.kill(worker, signal.SIGSTOP)
    try:
        looking = subprocess.Popen(["stat", at / ".diesel/filelist"], stdout=subprocess.PIPE)
        started_s = time.monotonic()
        for number in range(100):
            assert (at / f"class {number % 7}/{number:05}").read_bytes()
        took_s = time.monotonic() - started_s
        looking.communicate(timeout=PATIENCE_S)
        assert took_s < 0.9, took_s
        assert looking.returncode == 0
    finally:
        os.kill(worker, signal.SIGCONT)
