"""Lists of files in a mount: their contents, when they change, and that their files are pushed."""

import errno
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import diesel_fs
from diesel_fs.client.dataset import connect
from diesel_fs.errors import UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.mounts.attributes import HIDDEN_ROOT, FuseErrno, Owner
from diesel_fs.mounts.dot_diesel import FILELIST, HiddenFolder, ListObserver, ListRef
from diesel_fs.mounts.mountpoint import mounted_at
from diesel_fs.mounts.plans.control import Control
from diesel_fs.orders.path_lists import ListName, PathLists
from diesel_fs.orders.shuffle import SEED_MAX, WORLD_MAX, chunk_shuffle
from tests.mounts.conftest import LiveMount
from tests.mounts.folder_dataset import snapshot_of
from tests.mounts.observed import current_stats
from tests.orders.datasets import dataset, odd_dataset
from tests.rows import each_row

SEED, GROUP = 5, 2
FILES = 1500
HOPE_S = 10.0
"""How long to wait for something that must happen."""


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
    """And its size is the one that was computed before."""
    order = chunk_shuffle(
        snapshot, name.seed, name.epoch, group_size=name.group, rank=name.rank, world=name.world
    )
    lists = PathLists(snapshot)
    for nul in (False, True):
        text = lists.text(name, nul=nul)
        end = b"\0" if nul else b"\n"
        assert text.content.tobytes() == b"".join(path + end for path in snapshot.paths(order))
        assert len(text.content) == lists.size(name)
        assert text.tail == order[-64:].tolist()


def test_a_newline_in_a_path_makes_two_lines_and_is_refused(tmp_path: Path) -> None:
    """A newline in a file's own name or a folder's; a folder without files does not matter."""
    (tmp_path / "em\npty").mkdir()
    (tmp_path / "a").touch()
    assert PathLists(Snapshot(snapshot_of(tmp_path))).text(ListName(0, 0), nul=False).content.size
    (tmp_path / "em\npty" / "deep").mkdir()
    (tmp_path / "em\npty" / "deep" / "b").touch()
    lists = PathLists(Snapshot(snapshot_of(tmp_path)))
    with pytest.raises(UsageError, match="newline in its path"):
        lists.text(ListName(0, 0), nul=False)
    found = lists.text(ListName(0, 0), nul=True).content.tobytes()
    assert sorted(found.split(b"\0")) == [b"", b"a", b"em\npty/deep/b"]


class CountingObserver(ListObserver):
    """Readers that count."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    async def on_lookup(self, ref: ListRef) -> None:
        """A list that had been read."""
        self.events.append("looked up")

    def on_read(self, ref: ListRef) -> None:
        """From its start."""
        self.events.append("reading")

    def on_generated(self, ref: ListRef, tail: list[int]) -> None:
        """Its content."""
        self.events.append("made")


def test_a_list_is_made_when_read_and_its_reading_is_reported() -> None:
    snapshot, readers = dataset(5, 40), CountingObserver()
    folder = HiddenFolder(snapshot, {}, Owner(0, 0), list_observer=readers)

    async def read() -> None:
        found = await folder.lookup(HIDDEN_ROOT, FILELIST)
        folder.count_lookup(found.node)
        assert await folder.lookup(HIDDEN_ROOT, FILELIST) == found
        assert readers.events == [], "looking is not reading"
        assert folder.read_nowait(found.node, 0, 10) is None
        first = await folder.read(found.node, 0, 10)
        assert readers.events == ["reading", "made"]
        assert folder.read_nowait(found.node, 0, 10) == first
        assert folder.read_nowait(found.node, found.size, 10) == b""
        await folder.lookup(HIDDEN_ROOT, FILELIST)
        await folder.lookup(HIDDEN_ROOT, FILELIST)
        assert readers.events == ["reading", "made", "reading", "looked up"]
        folder.forget(found.node, 1)
        with pytest.raises(FuseErrno):
            folder.read_nowait(found.node, 0, 10)
        again = await folder.lookup(HIDDEN_ROOT, FILELIST)
        assert again.node == found.node, "the same content has the same node"
        assert folder.stats()["held"] == 0

    trio.run(read)


def test_lists_keep_their_memory_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Lists that nobody waits for make room, and are made again; one that is too long is
    refused."""
    snapshot = dataset(5, 40)
    size = PathLists(snapshot).size(ListName(0, 0))
    folder = HiddenFolder(snapshot, {}, Owner(0, 0), lists_bytes_max=2 * size)

    async def read() -> None:
        shuffle = (await folder.lookup(HIDDEN_ROOT, b"shuffle")).node
        contents = {}
        for epoch in range(6):
            found = await folder.lookup(shuffle, b"seed=1,epoch=%d" % epoch)
            folder.count_lookup(found.node)
            contents[found.node] = bytes(await folder.read(found.node, 0, size))
            held = folder.stats()["held_bytes"]
            assert isinstance(held, int)
            assert held <= 2 * size
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

    trio.run(read)
    assert "do not fit beside" in caplog.text


# in a mount ---------------------------------------------------------------------------------------


@contextmanager
def mounting_real(base: Path, session: str) -> Iterator[Path]:
    """A mount of a real dataset of several chunks, with its prefetch worker if it has one."""
    folder, url = base / "mount", (base / "store").as_uri()
    folder.mkdir()
    with connect("ds", url, create=True) as written:
        for number in range(FILES):
            written.put(b"%d" % number * 50, f"class {number % 7}/{number:05}")
            if number % 300 == 299:
                written.flush()
    mount(MountRequest(url, "ds", str(folder), session=session, seed=SEED, group_size=GROUP))
    try:
        yield folder
    finally:
        if mounted_at(str(folder)):
            umount(folder, force=True)


@pytest.fixture
def at(tmp_path: Path, session: str) -> Iterator[Path]:
    """A mount for this test alone, which shows the list of epoch 0 first."""
    with mounting_real(tmp_path, session) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def unfollowed(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[Path]:
    """A mount whose files nobody opens, so it shows the list of epoch 0 to all tests."""
    with mounting_real(tmp_path_factory.mktemp("unfollowed"), session) as mounted:
        yield mounted


def expected(at: Path, epoch: int, rank: int = 0, world: int = 1) -> bytes:
    """The list of an epoch, made from the snapshot."""
    view = Snapshot((at / ".diesel/snapshot").read_bytes())
    order = chunk_shuffle(view, SEED, epoch, group_size=GROUP, rank=rank, world=world)
    return b"".join(path + b"\n" for path in view.paths(order))


def follow(at: Path, text: bytes) -> None:
    """Read the files that a list names."""
    for line in text.splitlines():
        assert (at / os.fsdecode(line)).read_bytes()


def epoch_of(at: Path) -> int:
    """The epoch of the list that `filelist` shows."""
    text = (at / ".diesel/filelist").read_bytes()
    return next(epoch for epoch in range(100) if expected(at, epoch) == text)


@pytest.mark.fuse
def test_filelist_shows_the_next_epoch_once_its_files_have_been_read(at: Path) -> None:
    """A training script reads the list, its files, and at once the list again."""
    path = at / ".diesel/filelist"
    nodes = set()
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


@pytest.mark.fuse
@pytest.mark.only_session("native", "kernel")
def test_a_lookup_of_the_list_waits_for_the_latest_opens(at: Path) -> None:
    """Also where the worker has not yet read their events."""
    pid = prefetch_worker_of(at)
    text = (at / ".diesel/filelist").read_bytes()
    middle = text[: len(text) // 2].rindex(b"\n") + 1
    follow(at, text[:middle])
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    try:
        follow(at, text[middle:])
        look = ["cat", str(at / ".diesel/filelist")]
        with subprocess.Popen(look, stdout=subprocess.PIPE) as looking:
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            found, _ = looking.communicate(timeout=HOPE_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found == expected(at, 1)


def prefetch_worker_of(at: Path) -> int:
    """The process number of the prefetch worker."""
    end_s = time.monotonic() + HOPE_S
    while stats(at)["session"] != "pyfuse3" and time.monotonic() < end_s:
        told = stats(at)["residency"]
        if isinstance(told, dict) and isinstance(told.get("pid"), int):
            return int(told["pid"])
        time.sleep(0.2)
    raise AssertionError("the worker did not begin")


@pytest.mark.fuse
def test_a_list_that_is_read_but_not_followed_stays(unfollowed: Path) -> None:
    for _ in range(3):
        assert (unfollowed / ".diesel/filelist").read_bytes() == expected(unfollowed, 0)
    with (
        (unfollowed / ".diesel/filelist").open("rb") as one,
        (unfollowed / ".diesel/filelist").open("rb") as other,
    ):
        assert one.read() == other.read()
    assert (unfollowed / ".diesel/filelist0").read_bytes() == expected(unfollowed, 0).replace(
        b"\n", b"\0"
    )


@pytest.mark.fuse
def test_an_open_list_stays_while_the_next_epoch_begins(at: Path) -> None:
    with (at / ".diesel/filelist").open("rb", buffering=0) as held:
        first = held.read(100)
        follow(at, (at / ".diesel/filelist").read_bytes())
        assert epoch_of(at) == 1
        assert first + held.read() == expected(at, 0)


@pytest.mark.fuse
def test_cp_of_a_list_is_as_long_as_stat_said(unfollowed: Path, tmp_path: Path) -> None:
    for name in ("filelist", "filelist0", "shuffle/seed=5,epoch=3,group=2,rank=1,world=4"):
        size = (unfollowed / ".diesel" / name).stat().st_size
        subprocess.run(["cp", unfollowed / ".diesel" / name, tmp_path / "copy"], check=True)
        assert (tmp_path / "copy").stat().st_size == size
    assert (tmp_path / "copy").read_bytes() == expected(unfollowed, 3, 1, 4)


@pytest.mark.fuse
def test_any_list_can_be_read_by_its_name(unfollowed: Path) -> None:
    for folder, end in (("shuffle", b"\n"), ("shuffle0", b"\0")):
        inside = unfollowed / ".diesel" / folder
        name = "seed=5,epoch=2,group=2,rank=2,world=3"
        assert (inside / name).read_bytes() == expected(unfollowed, 2, 2, 3).replace(b"\n", end)
        assert not (inside / "seed=5").exists()
        assert not (inside / "seed=5,epoch=2,epoch=2").exists()
        assert not (inside / "seed=5,epoch=2,rank=1").exists()


@pytest.mark.fuse
@pytest.mark.only_session("native", "kernel")
def test_reading_a_list_pushes_its_files(at: Path) -> None:
    """Reading it makes its files resident ahead; looking at it does not. Each reading counts, also
    where the kernel had the list's pages.
    """
    name = "seed=9,epoch=0,group=2"
    assert (at / ".diesel/shuffle" / name).stat().st_size
    time.sleep(1.0)  # a push would have begun
    assert residency(at)["pushed_entries"] == 0
    text = (at / ".diesel/shuffle" / name).read_bytes()
    end_s = time.monotonic() + HOPE_S
    while been_resident(at) < FILES and time.monotonic() < end_s:
        time.sleep(0.1)
    assert been_resident(at) >= FILES
    with Control.connect(at) as control:
        control.withdraw(f"shuffle:9.{GROUP}.0.1")
        assert (at / ".diesel/shuffle" / name).read_bytes() == text
        control.progress(f"shuffle:9.{GROUP}.0.1", 0)  # it is there again
    paths = text.splitlines(keepends=True)
    counts = [reads(at)]
    for part in range(5):
        follow(at, b"".join(paths[part::5]))
        counts.append(reads(at))
    asked = [after - before for before, after in itertools.pairwise(counts)]
    # Idle pages may be taken away by the machine (DAMON) meanwhile, not again and again.
    assert min(asked) <= FILES // 5 // 20, "files were asked for that should have been there"


def been_resident(at: Path) -> int:
    """How many files are believed to be resident, or were and are known to be freed."""
    state = residency(at)
    return int(state["resident_entries"]) + int(state["lost_entries"])


def residency(at: Path) -> dict[str, int]:
    """The statistics of the prefetch worker."""
    state = current_stats(at)["residency"]
    assert isinstance(state, dict)
    return {"pushed_entries": 0, "resident_entries": 0, "lost_entries": 0, **state}


def reads(at: Path) -> int:
    """How many reads of files the server answered."""
    found = current_stats(at)["reads"]
    assert isinstance(found, dict)
    return int(found["hits"]) + int(found["misses"])


@pytest.mark.fuse
def test_lists_from_python(unfollowed: Path) -> None:
    for epoch, found in (
        (0, diesel_fs.filelist(unfollowed)),
        (7, diesel_fs.filelist(unfollowed, epoch=7)),
    ):
        assert [os.fsencode(path) for path in found] == expected(unfollowed, epoch).splitlines()
    with pytest.raises(UsageError):
        diesel_fs.filelist(unfollowed, epoch=-1)


@pytest.mark.fuse
def test_a_path_with_a_newline_needs_the_list_with_NUL(tree: LiveMount) -> None:
    """The list by lines gives an error, and never a path that does not exist."""
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
@pytest.mark.only_session("native", "kernel")
def test_a_lookup_that_waits_delays_no_other_request(at: Path) -> None:
    """While the worker does not answer, look-ups of lists are late, and those of files are not."""
    (at / ".diesel/filelist").read_bytes()
    pid = prefetch_worker_of(at)
    os.kill(pid, signal.SIGSTOP)
    try:
        looking = subprocess.Popen(["stat", at / ".diesel/filelist"], stdout=subprocess.PIPE)
        started_s = time.monotonic()
        for number in range(100):
            assert (at / f"class {number % 7}/{number:05}").read_bytes()
        took_s = time.monotonic() - started_s
        looking.communicate(timeout=HOPE_S)
        assert took_s < 0.9, took_s
        assert looking.returncode == 0
    finally:
        os.kill(pid, signal.SIGCONT)
